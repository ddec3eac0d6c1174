"""The command line of the catalog.

    python -m mint_jax.catalog --catalog=FOLDER_OR_URL [--payloads=URL] COMMAND ... [--json]

Exit status: 0; 1 if ``verify`` found damage or ``import`` refused something; 2 for a mistake,
reported in one line on stderr. A command's module is imported when it runs, so that a listing
starts without jax.
"""

import argparse
import importlib
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from mint_jax.catalog.cli.output import Result, plain, show
from mint_jax.catalog.lifecycle import Catalog
from mint_jax.errors import UserError

_HERE = "mint_jax.catalog.cli"
_REVISION = "policy@alias, policy@number or a digest"
_CPUS = os.cpu_count() or 1


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status.

    Raises:
        SystemExit: help was requested, or the arguments are wrong (status 2).
    """
    parser = _parser()
    args = parser.parse_args(argv, argparse.Namespace(catalog=None, payloads=None, json=False))
    if not args.catalog:
        parser.error("--catalog is missing: give a folder, sqlite:///path or postgresql://…")
    module, _, name = args.run.partition(":")
    try:
        command = getattr(importlib.import_module(f"{_HERE}.{module}"), name)
        result = _run(args, command, makes=module == "importing")
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


def _run(args: argparse.Namespace, command: Callable[..., Result], makes: bool) -> Result:
    """Runs a command on its catalog; import creates the catalog, except in a dry run."""
    if not _exists(args.catalog):
        if not makes:
            raise UserError(
                f"there is no catalog at {args.catalog}: check --catalog, or make one with import"
            )
        if args.dry_run:
            return command(args, None)
    with Catalog.open(args.catalog, args.payloads) as catalog:
        return command(args, catalog)


def _exists(place: str) -> bool:
    """False if there is no catalog; a server is asked when it is opened."""
    if place.startswith("sqlite:///"):
        return Path(place.removeprefix("sqlite:///")).is_file()
    return "://" in place or (Path(place) / "catalog.db").is_file()


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    place = "a folder, sqlite:///path or postgresql://…"
    common.add_argument("--catalog", type=_path, metavar="PLACE", help=place)
    outside = "place of the payloads, if not in that folder"
    common.add_argument("--payloads", type=_path, metavar="URL", help=outside)
    common.add_argument("--json", action="store_true", help="print one JSON document")
    about = "Policies, their revisions and aliases."
    parser = argparse.ArgumentParser("python -m mint_jax.catalog", None, about, parents=[common])
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(run: str, help: str, name: str = "") -> Callable[..., argparse.Action]:
        name = name or run.partition(":")[2]
        made = commands.add_parser(name, help=help, description=help, parents=[common])
        made.set_defaults(run=run)
        return made.add_argument

    _add_listing(command)
    _add_changes(command)
    _add_files(command)
    return parser


Command = Callable[..., Callable[..., argparse.Action]]


def _add_listing(command: Command) -> None:
    add = command("listing:ls", "list policies, or the revisions of one")
    add("policy", nargs="?")
    add("--tenant", help="only this tenant's policies")
    add("--state", choices=("active", "retired", "deleted"))
    tagged = {"action": "append", "default": [], "type": _tag, "metavar": "KEY=VALUE"}
    add("--tag", **tagged, help="only policies with this tag (repeated: with all)")
    add("--match", metavar="TEXT", help="only policies whose name contains TEXT")
    _paging(add, "policy, or revision number")

    add = command("listing:show_one", "show a policy or a revision", "show")
    add("name", help=f"policy, {_REVISION}")
    limit = "at most N revisions and evaluations (default 20)"
    add("--limit", type=_count, default=20, metavar="N", help=limit)

    add = command("listing:audit", "list all changes, of one policy, or the moves of one alias")
    add("name", nargs="?", metavar="POLICY[@ALIAS]")
    _paging(add, "entry's id")

    add = command("listing:rollouts", "list a policy's stored rollouts, or show those of one step")
    add("action", choices=("list", "show"))
    add("policy")
    add("--step", type=_count_or_0, metavar="N", help="to show (default: the newest)")
    add("--limit", type=_count, default=100, metavar="N", help="at most N (default 100)")

    add = command("listing:verify", "read everything, or one revision, and list what is damaged")
    add("name", nargs="?", help=_REVISION)


def _add_changes(command: Command) -> None:
    add = command("changing:promote", "point an alias at a revision")
    add("policy", help="policy, or policy@revision")
    add("revision", nargs="?", help="number, alias or digest")
    add("--alias", default="serving", help="default serving")
    _reason(add)
    add = command("changing:rollback", "point an alias back at its revision before")
    add("policy")
    add("--to", metavar="REVISION", help="an earlier revision of the alias")
    add("--alias", default="serving", help="default serving")
    _reason(add)
    either, one = "policy, or policy@revision", "policy@revision"
    for name, help, of in (
        ("retire", "take a policy or a revision out of use", either),
        ("restore", "undo retire", either),
        ("pin", "keep a revision regardless of retention", one),
        ("unpin", "undo pin", one),
    ):
        add = command(f"changing:{name}", help)
        add("name", help=of)
        _reason(add)
    add = command("changing:tag", "label a policy or a revision")
    add("name", help=either)
    add("tags", nargs="*", type=_tag, metavar="KEY=VALUE")
    remove = {"action": "append", "default": [], "metavar": "KEY"}
    add("--remove", **remove, help="remove this tag; may be repeated")
    _reason(add)
    add = command("changing:keep_last", "set how many newest revisions gc keeps", "keep-last")
    add("policy")
    add("count", type=_count_or_all, metavar="N", help="a number, or all")
    _reason(add)
    add = command("changing:delete", "remove a retired policy; gc then frees its bytes")
    add("policy")
    _reason(add)
    add = command("changing:gc", "remove what retention gives up and nothing refers to")
    add("--dry-run", action="store_true", help="only report")
    add("--no-compact", action="store_true", help="do not join small packs")
    grace = "time for writers and readers (default 3600)"
    add("--grace", type=_seconds, default=3600.0, metavar="SECONDS", help=grace)
    _reason(add)


def _add_files(command: Command) -> None:
    add = command("exporting:run", "write a revision to files", "export")
    add("name", help=_REVISION)
    add("directory", nargs="?", type=_path, help="a new directory")
    formats = "of the directory (default peft)"
    add("--format", choices=("peft", "orbax"), default="peft", help=formats)
    named = "the base's name in a PEFT directory: a hub name, or a directory"
    add("--base-name", metavar="NAME", help=named)
    packed = "write the packed object, one safetensors file, instead of a directory"
    add("--packed", type=_path, metavar="FILE", help=packed)
    _base(add)

    add = command(
        "importing:run", "import PEFT directories, Orbax checkpoints, packed files", "import"
    )
    add("paths", nargs="+", type=_path, metavar="PATH", help="one of them, or a folder of them")
    template = "policies' names; {name} and {parent} are of the path"
    add("--policy", default="{name}", metavar="TEMPLATE", help=template)
    add("--tenant", help="tenant of the policies")
    steps = "number of optimizer steps done"
    add("--step", type=_count_or_0, default=0, metavar="N", help=steps)
    dtypes = ("keep", "float32", "bfloat16", "float16")
    add("--dtype", choices=dtypes, default="keep", help="of the factors of PEFT files")
    add("--force", action="store_true", help="accept NaN and infinite weights")
    links = "follow symbolic links that lead out of the given folder"
    add("--follow-links", action="store_true", help=links)
    limit = "refuse larger files (default 4 GiB)"
    add("--max-bytes", type=_count, default=4 << 30, metavar="N", help=limit)
    readers = min(8, 2 * _CPUS)
    add("--readers", type=_count, default=readers, metavar="N", help="files read at once")
    batch = "adapters per transaction (default 1000)"
    add("--batch", type=_count, default=1000, metavar="N", help=batch)
    add("--dry-run", action="store_true", help="read and check, write nothing")
    _base(add)
    _reason(add)


def _base(add: Callable[..., argparse.Action]) -> None:
    add("--base", type=_path, help="name or directory of the base; its weights are not loaded")
    only = "of the base, if --base has only its config.json"
    add("--fingerprint", metavar="HEX", help=only)


def _reason(add: Callable[..., argparse.Action]) -> None:
    add("--by", help="author of the change (default: user and host)")
    add("--why", default="", help="reason, for the audit log")


def _paging(add: Callable[..., argparse.Action], last: str) -> None:
    add("--limit", type=_count, default=100, metavar="N", help="at most N (default 100)")
    add("--after", metavar="LAST", help=f"continue after this {last}")


def _path(text: str) -> str:
    """Expands ``~``, which shells do not after ``=``."""
    found = re.match(r"(sqlite:///|file://)?(~.*)", text, re.DOTALL)
    return text if found is None else (found[1] or "") + os.path.expanduser(found[2])


def _tag(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not (key and equals and value):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not KEY=VALUE")
    return key, value


def _count_or_all(text: str) -> int | None:
    return None if text == "all" else _count(text)


def _count(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 19 and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number above 0")
    return int(text)


def _count_or_0(text: str) -> int:
    return 0 if text == "0" else _count(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e12:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number of seconds")
    return value
