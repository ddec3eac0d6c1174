"""The command line of the catalog.

    python -m mint_jax.catalog --catalog=FOLDER_OR_URL [--payloads=URL] COMMAND ... [--json]

Exit status: 0; 1 where ``verify`` found damage or ``import`` refused something; 2 for a mistake,
reported in one line on stderr. Commands are in ``looking`` (nothing changes), ``changing`` and
``importing``; what only some of them need is imported there when they run, so that a listing starts
without jax.
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
from mint_jax.catalog.upkeep.recovery import TEMPLATE
from mint_jax.errors import UserError

_HERE = "mint_jax.catalog.cli"
_REVISION = "policy@alias, policy@number or a digest"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status.

    Raises:
        SystemExit: the arguments are not understood (status 2), or only help was asked for.
    """
    parser = _parser()
    args = parser.parse_args(argv, argparse.Namespace(catalog=None, payloads=None, json=False))
    if not args.catalog:
        parser.error("--catalog is missing: give a folder, sqlite:///path or postgresql://…")
    module, _, name = args.run.partition(":")
    command: Callable[[argparse.Namespace, Catalog | None], Result] = getattr(
        importlib.import_module(module), name
    )
    try:
        if args.run == f"{_HERE}.importing:run":
            show(result := _import(args, command), args.json)
        else:
            with _open(args) as catalog:
                show(result := command(args, catalog), args.json)
        sys.stdout.flush()
        return result.code
    except UserError as error:
        print(f"error: {plain(str(error))}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130


def _open(args: argparse.Namespace) -> Catalog:
    if not _exists(args.catalog):
        raise UserError(
            f"there is no catalog at {args.catalog}: check --catalog, or make one with import"
        )
    return Catalog.open(args.catalog, args.payloads)


def _import(args: argparse.Namespace, command: Callable) -> Result:
    """Import makes a catalog where there is none, but not to say what it would do."""
    if args.dry_run and not _exists(args.catalog):
        return command(args, None)
    with Catalog.open(args.catalog, args.payloads) as catalog:
        return command(args, catalog)


def _exists(place: str) -> bool:
    """Whether a catalog may be there; a server is asked when it is opened."""
    if place.startswith("sqlite:"):
        from sqlalchemy import exc, make_url

        try:
            return Path(make_url(place).database or "").is_file()
        except exc.ArgumentError:
            return True  # to be explained when it is opened
    return "://" in place or (Path(place) / "catalog.db").is_file()


def _parser() -> argparse.ArgumentParser:
    everywhere = argparse.ArgumentParser(add_help=False)
    everywhere.add_argument(
        "--catalog",
        type=_place,
        default=argparse.SUPPRESS,
        metavar="PLACE",
        help="a folder, sqlite:///path or postgresql://…",
    )
    everywhere.add_argument(
        "--payloads",
        type=_place,
        default=argparse.SUPPRESS,
        metavar="URL",
        help="where payloads are, if not in that folder",
    )
    everywhere.add_argument(
        "--json", action="store_true", default=argparse.SUPPRESS, help="print one JSON document"
    )
    parser = argparse.ArgumentParser(
        "python -m mint_jax.catalog",
        description="Policies, their revisions and aliases.",
        parents=[everywhere],
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(name: str, run: str, help: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=help, description=help, parents=[everywhere])
        made.set_defaults(run=f"{_HERE}.{run}")
        return made

    _add_looking(command)
    _add_changing(command)
    _add_files(command)
    return parser


def _add_looking(command: Callable[..., argparse.ArgumentParser]) -> None:
    ls = command("ls", "looking:ls", "list policies, or the revisions of one")
    ls.add_argument("policy", nargs="?")
    ls.add_argument("--tenant", help="only this tenant's policies")
    ls.add_argument("--state", choices=("active", "retired", "deleted"))
    ls.add_argument(
        "--tag",
        action="append",
        default=[],
        type=_tag,
        metavar="KEY=VALUE",
        help="only policies with this tag (several: all)",
    )
    ls.add_argument("--match", metavar="TEXT", help="only policies whose name has TEXT in it")
    _paging(ls, "the last policy, or the last revision's number, of the page before")

    one = command("show", "looking:show", "a policy or a revision with all that belongs to it")
    one.add_argument("name", help=f"policy, {_REVISION}")
    one.add_argument(
        "--limit",
        type=_count,
        default=20,
        metavar="N",
        help="at most N revisions and evaluations (default 20)",
    )

    history = command("history", "looking:history", "the moves of an alias, oldest first")
    history.add_argument("policy")
    history.add_argument("alias", nargs="?", default="serving")
    history.add_argument(
        "--at",
        type=float,
        metavar="SECONDS",
        help="only what the alias was then, in seconds since 1970",
    )
    _paging(history, "the last move's id of the page before")

    audit = command("audit", "looking:audit", "every change, of one policy or of all")
    audit.add_argument("policy", nargs="?")
    _paging(audit, "the last entry's id of the page before")

    evaluations = command(
        "evaluations", "looking:evaluations", "scores of a policy or of one revision"
    )
    evaluations.add_argument("name", help=f"policy, {_REVISION}")
    evaluations.add_argument("--limit", type=_count, default=100, metavar="N")

    rollouts = command(
        "rollouts",
        "looking:rollouts",
        "what training kept of a policy's last steps, the newest first",
    )
    rollouts.add_argument("policy")
    rollouts.add_argument("--limit", type=_count, default=100, metavar="N")

    diff = command(
        "diff",
        "diff:run",
        "how two revisions differ: schema, and each projection's change of the weights",
    )
    diff.add_argument("a", metavar="A", help=_REVISION)
    diff.add_argument("b", metavar="B", help=_REVISION)

    verify = command(
        "verify", "looking:verify", "read everything, or one revision, and name what is damaged"
    )
    verify.add_argument("name", nargs="?", help=_REVISION)
    command("stats", "looking:stats", "counts and bytes")


def _add_changing(command: Callable[..., argparse.ArgumentParser]) -> None:
    promote = command("promote", "changing:promote", "point an alias at a revision")
    promote.add_argument("policy", help="policy, or policy@revision at once")
    promote.add_argument("revision", nargs="?", help="number, alias or digest")
    _move(promote)
    rollback = command(
        "rollback", "changing:rollback", "point an alias back at the revision it named before"
    )
    rollback.add_argument("policy")
    rollback.add_argument("--to", metavar="REVISION", help="an earlier one that it named")
    _move(rollback)
    branch = command(
        "branch", "changing:branch", "make a policy that begins with the bytes of a revision"
    )
    branch.add_argument("name")
    branch.add_argument("revision", help=_REVISION)
    branch.add_argument(
        "--keep-last",
        type=_count,
        metavar="N",
        help="gc keeps N of its newest revisions (default: all)",
    )
    _reason(branch)
    for name, help in (
        ("retire", "take a policy or a revision out of use"),
        ("restore", "undo retire"),
    ):
        made = command(name, f"changing:{name}", help)
        made.add_argument("name", help="policy, or policy@revision")
        _reason(made)
    for name, help in (("pin", "keep a revision whatever retention says"), ("unpin", "undo pin")):
        made = command(name, f"changing:{name}", help)
        made.add_argument("name", help="policy@revision")
        _reason(made)
    tag = command("tag", "changing:tag", "label a policy or a revision, to find it by")
    tag.add_argument("name", help="policy, or policy@revision")
    tag.add_argument("tags", nargs="*", type=_tag, metavar="KEY=VALUE")
    tag.add_argument(
        "--remove",
        action="append",
        default=[],
        metavar="KEY",
        help="take this tag away; may be repeated",
    )
    _reason(tag)
    rename = command(
        "rename", "changing:rename", "give a policy another name; the old one no longer resolves"
    )
    rename.add_argument("policy")
    rename.add_argument("name")
    _reason(rename)
    delete = command(
        "delete",
        "changing:delete",
        "remove a retired policy with its revisions; gc then frees their bytes",
    )
    delete.add_argument("policy")
    _reason(delete)
    keep = command(
        "keep-last", "changing:keep_last", "how many of its newest revisions gc keeps of a policy"
    )
    keep.add_argument("policy")
    keep.add_argument("count", type=_count_or_all, metavar="N", help="a number, or all")
    _reason(keep)
    gc = command("gc", "changing:gc", "remove what retention gives up and nothing names")
    gc.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    gc.add_argument("--no-compact", action="store_true", help="do not join small packs")
    gc.add_argument(
        "--grace",
        type=_seconds,
        default=3600.0,
        metavar="SECONDS",
        help="writers and readers have so long (default 3600)",
    )
    gc.add_argument(
        "--accept-losses",
        action="store_true",
        help="collect though the database has lost commits, as verify says",
    )
    _reason(gc)
    recover = command(
        "recover",
        "changing:recover",
        "make revisions of adapters in packs that no record names, as after a lost database",
    )
    recover.add_argument(
        "--policy",
        default=TEMPLATE,
        metavar="TEMPLATE",
        help=f"policies' names (default {TEMPLATE})",
    )
    recover.add_argument(
        "--grace",
        type=_seconds,
        default=3600.0,
        metavar="SECONDS",
        help="writers have so long (default 3600)",
    )
    recover.add_argument("--dry-run", action="store_true", help="only say what would be recovered")
    _reason(recover)


def _add_files(command: Callable[..., argparse.ArgumentParser]) -> None:
    export = command(
        "export",
        "changing:export",
        "write a revision as a PEFT directory, an Orbax checkpoint or a packed file",
    )
    export.add_argument("name", help=_REVISION)
    export.add_argument("directory", nargs="?", type=_place, help="a new directory")
    export.add_argument(
        "--format",
        choices=("peft", "orbax"),
        default="peft",
        help="of the directory (default peft)",
    )
    export.add_argument(
        "--base-name",
        metavar="NAME",
        help="what a PEFT directory calls its base: a hub name, or a directory",
    )
    export.add_argument(
        "--packed",
        type=_place,
        metavar="FILE",
        help="the packed object, in one safetensors file, in place of a directory",
    )
    _base(export)

    bring = command(
        "import",
        "importing:run",
        "make revisions of PEFT directories, Orbax checkpoints and packed files, or of all in a"
        " folder",
    )
    bring.add_argument("paths", nargs="+", type=_place, metavar="PATH")
    bring.add_argument(
        "--policy",
        default="{name}",
        metavar="TEMPLATE",
        help="policies' names; {name} and {parent} are of the path",
    )
    bring.add_argument("--tenant", help="whose policies they become")
    bring.add_argument(
        "--step", type=_count_or_0, default=0, metavar="N", help="optimizer steps that were done"
    )
    bring.add_argument(
        "--dtype",
        choices=("keep", "float32", "bfloat16", "float16"),
        default="keep",
        help="of the factors of PEFT files",
    )
    bring.add_argument("--force", action="store_true", help="take NaN and infinite weights too")
    bring.add_argument(
        "--follow-links",
        action="store_true",
        help="follow symbolic links that lead out of the given folder",
    )
    bring.add_argument(
        "--max-bytes",
        type=_count,
        default=4 << 30,
        metavar="N",
        help="larger files are refused (default 4 GiB)",
    )
    bring.add_argument(
        "--readers",
        type=_count,
        default=min(8, 2 * (os.cpu_count() or 1)),
        metavar="N",
        help="files read at once",
    )
    bring.add_argument(
        "--batch",
        type=_count,
        default=1000,
        metavar="N",
        help="adapters a transaction (default 1000)",
    )
    bring.add_argument("--dry-run", action="store_true", help="read and check, write nothing")
    _base(bring)
    _reason(bring)


def _base(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--base", type=_place, help="name or directory of the base; its weights are not loaded"
    )
    parser.add_argument(
        "--fingerprint", metavar="HEX", help="the base's, where --base has its config.json only"
    )


def _move(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--alias", default="serving", help="default serving")
    _reason(parser)


def _reason(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--by", help="who does it (default: user and host)")
    parser.add_argument("--why", default="", help="the reason, for the audit log")


def _paging(parser: argparse.ArgumentParser, after: str) -> None:
    parser.add_argument(
        "--limit", type=_count, default=100, metavar="N", help="at most N (default 100)"
    )
    parser.add_argument("--after", metavar="LAST", help=f"go on behind {after}")


def _place(text: str) -> str:
    """``~`` means the home folder; shells leave it as it is behind a ``=``."""
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
