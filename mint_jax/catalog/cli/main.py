"""The command line of the catalog.

    python -m mint_jax.catalog --catalog=FOLDER_OR_URL [--payloads=URL] COMMAND ... [--json]

Exit status: 0; 1 if ``verify`` found damage or ``import`` refused something; 2 for a mistake,
reported in one line on stderr. A listing starts without jax.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from mint_jax.catalog.cli import importing  # noqa: F401 - registers ``import``
from mint_jax.catalog.cli.commands import COMMANDS, path
from mint_jax.catalog.cli.output import Result, plain, show
from mint_jax.catalog.lifecycle import Catalog
from mint_jax.errors import UserError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status. Raises ``SystemExit``: help was requested, or
    the arguments are wrong (status 2).
    """
    parser = _parser()
    args = parser.parse_args(argv, argparse.Namespace(catalog=None, payloads=None, json=False))
    if not args.catalog:
        parser.error("--catalog is missing: give a folder, sqlite:///path or postgresql://…")
    try:
        result = _run(args)
        show(result, args.json)
        sys.stdout.flush()
        return result.code
    except UserError as error:
        print(f"error: {plain(str(error))}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of our output has stopped
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130


def _run(args: argparse.Namespace) -> Result:
    """Runs a command on its catalog; import creates the catalog, except in a dry run."""
    run, _, _ = COMMANDS[args.command]
    if not _exists(args.catalog):
        if args.command != "import":
            raise UserError(
                f"there is no catalog at {args.catalog}: check --catalog, or make one with import"
            )
        if args.dry_run:
            return run(args, None)
    with Catalog.open(args.catalog, args.payloads) as catalog:
        return run(args, catalog)


def _exists(place: str) -> bool:
    """False if there is no catalog; a server is asked when it is opened."""
    if place.startswith("sqlite:///"):
        return Path(place.removeprefix("sqlite:///")).is_file()
    return "://" in place or (Path(place) / "catalog.db").is_file()


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    place = "a folder, sqlite:///path or postgresql://…"
    common.add_argument("--catalog", type=path, metavar="PLACE", help=place)
    outside = "a folder, s3://… or gs://…; needed if PLACE is a database's URL"
    common.add_argument("--payloads", type=path, metavar="URL", help=outside)
    common.add_argument("--json", action="store_true", help="print one JSON document")
    about = "Lists, promotes, rolls back, imports and exports revisions of policies."
    parser = argparse.ArgumentParser("python -m mint_jax.catalog", None, about, parents=[common])
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, (_, help, arguments) in COMMANDS.items():
        made = commands.add_parser(name, help=help, description=help, parents=[common])
        made.set_defaults(command=name)
        for flags, options in arguments:
            made.add_argument(*flags, **options)
    return parser
