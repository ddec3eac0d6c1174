"""The commands of the catalog's command line, each with its arguments; ``importing`` has import."""

import argparse
import dataclasses
import functools
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mint_jax.catalog.cli.output import Result, progress
from mint_jax.catalog.lifecycle import Catalog
from mint_jax.catalog.packed import unpack
from mint_jax.catalog.records import names
from mint_jax.catalog.records.aliases import Alias
from mint_jax.catalog.records.lookup import Resolved, Revision
from mint_jax.catalog.records.policies import PolicyRecord
from mint_jax.catalog.rollouts import unpack_rollouts
from mint_jax.errors import UserError
from mint_jax.files import write_file

Run = Callable[[argparse.Namespace, Any], Result]
Argument = tuple[tuple[str, ...], dict[str, Any]]  # arguments of ``add_argument``


@dataclasses.dataclass(frozen=True)
class Command:
    """A command: its function, its line of help, and its arguments."""

    run: Run
    help: str
    arguments: tuple[Argument, ...]


COMMANDS: dict[str, Command] = {}


def command(name: str, help: str, *arguments: Argument) -> Callable[[Run], Run]:
    """Registers a function as a command."""

    def register(run: Run) -> Run:
        COMMANDS[name] = Command(run, help, arguments)
        return run

    return register


def arg(*flags: str, **options: Any) -> Argument:
    """An argument, as ``ArgumentParser.add_argument`` takes it."""
    return flags, options


def path(text: str) -> str:
    """Expands ``~``, which shells do not after ``=``."""
    found = re.match(r"(sqlite:///|file://)?(~.*)", text, re.DOTALL)
    return text if found is None else (found[1] or "") + os.path.expanduser(found[2])


def count(text: str, least: int = 1) -> int:
    """Parses a whole number."""
    if not (text.isascii() and text.isdecimal() and len(text) < 19 and int(text) >= least):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number above {least - 1}")
    return int(text)


def _count_or_all(text: str) -> int | None:
    return None if text == "all" else count(text)


def _tag(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not (key and equals and value):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not KEY=VALUE")
    return key, value


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e12:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number of seconds")
    return value


NATURAL = functools.partial(count, least=0)
REVISION = "policy@alias, policy@number or a digest"
EITHER = "policy, or policy@revision"
SIGNED = (
    arg("--by", help="author of the change (default: user and host)"),
    arg("--why", default="", help="reason, for the audit log"),
)
BASE = (
    arg("--base", type=path, help="name or directory of the base; its weights are not loaded"),
    arg("--fingerprint", metavar="HEX", help="of the base, if --base has only its config.json"),
)
_LIMIT = arg("--limit", type=count, default=100, metavar="N", help="at most N (default 100)")
_ALIAS = arg("--alias", default="serving", help="default serving")


def _after(last: str) -> Argument:
    return arg("--after", metavar="LAST", help=f"continue after this {last}")


@command(
    "ls",
    "list policies, or the revisions of one",
    arg("policy", nargs="?"),
    arg("--tenant", help="only this tenant's policies"),
    arg("--state", choices=("active", "retired", "deleted")),
    arg(
        "--tag",
        action="append",
        default=[],
        type=_tag,
        metavar="KEY=VALUE",
        help="only policies with this tag (repeated: with all)",
    ),
    arg("--match", metavar="TEXT", help="only policies whose name contains TEXT"),
    _LIMIT,
    _after("policy, or revision number"),
)
def _ls(args: argparse.Namespace, catalog: Catalog) -> Result:
    if args.policy is not None:
        if args.tenant or args.state or args.match or args.tag:
            raise UserError(
                "ls of one policy lists all its revisions: leave --tenant, --state, --tag and"
                " --match out"
            )
        found = catalog.revisions(args.policy, _number(args.after), args.limit)
        last = found[-1].number if len(found) == args.limit else None
        return _page({"revisions": found}, last)
    page = catalog.policies(
        args.tenant, args.after, args.limit, args.state, args.match or "", dict(args.tag)
    )
    aliases, tags = catalog.aliases_of(page), catalog.tags_of(page)
    data = [
        _policy_data(one) | {"aliases": aliases[one.policy], "tags": tags[one.policy]}
        for one in page
    ]
    return _page({"policies": data}, page[-1].policy if len(page) == args.limit else None)


_COLUMNS = {
    "policies": "policy state revisions aliases base parent session_owner tags touched_at",
    "revisions": "number step digest bytes state pinned origin created_at",
    "aliases": "name number digest version updated_at",
    "entries": "id at action policy alias before after actor why details",
    "rollouts": "step tokens mean_reward digest created_at",
    "evaluations": "policy number digest scorer renderer dataset seed isolated shared metrics",
    "findings": "kind digest revisions what",
}


def _shown(data: dict[str, Any], note: str = "", code: int = 0) -> Result:
    return Result(data, _COLUMNS, note, code)


def _page(data: dict[str, Any], last: str | int | None) -> Result:
    """A page; ``next`` is the argument of ``--after`` for the next one, null at the end."""
    more = "" if last is None else f"There may be more: --after {last}"
    return _shown(data | {"next": None if last is None else str(last)}, more)


def _number(after: str | None) -> int:
    if after is None:
        return 0
    if not (after.isascii() and after.isdecimal() and len(after) < 19):
        raise UserError(f"--after is {after[:40]!r}; the page before ended with a number")
    return int(after)


def _policy_data(record: PolicyRecord) -> dict[str, Any]:
    """Returns a policy for JSON, with its full name and its schema as an object."""
    fields = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
    return {"policy": record.policy} | fields | {"schema": json.loads(record.schema)}


@command(
    "show",
    "show a policy or a revision",
    arg("name", help=f"policy, {REVISION}"),
    arg(
        "--limit",
        type=count,
        default=20,
        metavar="N",
        help="at most N revisions and evaluations (default 20)",
    ),
)
def _show(args: argparse.Namespace, catalog: Catalog) -> Result:
    if "@" in args.name or names.is_digest(args.name):
        return _show_revision(catalog, _find_revision(catalog, args.name), args.limit)
    record = catalog.policy(args.name)
    revisions = catalog.revisions(args.name, max(0, record.revisions - args.limit), args.limit)
    return _shown(
        {
            "policy": _policy_data(record),
            "tags": catalog.tags(args.name),
            "aliases": catalog.aliases(args.name),
            "revisions": revisions,
            "evaluations": catalog.evaluations(args.name, args.limit),
        }
    )


def _find_revision(catalog: Catalog, name: str) -> Revision:
    """Returns a revision by ``policy@…`` (retired ones too) or digest."""
    policy, at, which = name.partition("@")
    if not at:
        found = catalog.resolve(name)
        return catalog.revision(found.policy, found.number)
    return catalog.revision(
        policy, int(which) if names.is_number(which) else names.clean_alias(which)
    )


def _show_revision(catalog: Catalog, revision: Revision, limit: int) -> Result:
    aliases = [one for one in catalog.aliases(revision.policy) if one.number == revision.number]
    return _shown(
        {
            "revision": revision,
            "policy": _policy_data(catalog.policy(revision.policy)),
            "tags": catalog.tags(f"{revision.policy}@{revision.number}"),
            "aliases": aliases,
            "evaluations": catalog.evaluations(revision.digest, limit),
        }
    )


@command(
    "audit",
    "list all changes, of one policy, or the moves of one alias",
    arg("name", nargs="?", metavar="POLICY[@ALIAS]"),
    _LIMIT,
    _after("entry's id"),
)
def _audit(args: argparse.Namespace, catalog: Catalog) -> Result:
    options = {"after": _number(args.after), "limit": args.limit}
    policy, at, alias = (args.name or "").partition("@")
    if at:
        entries = catalog.audit(policy, alias=alias, **options)
        named = [one.name for one in catalog.aliases(policy)]
        if not entries and args.after is None and alias not in named:
            raise UserError(
                f"policy {policy!r} never had an alias {alias!r}: show lists its aliases"
            )
    else:
        entries = catalog.audit(policy or None, **options)
    last = entries[-1].id if len(entries) == args.limit else None
    return _page({"entries": entries}, last)


@command(
    "rollouts",
    "list a policy's stored rollouts, or show those of one step",
    arg("action", choices=("list", "show")),
    arg("policy"),
    arg("--step", type=NATURAL, metavar="N", help="to show (default: the newest)"),
    _LIMIT,
)
def _rollouts(args: argparse.Namespace, catalog: Catalog) -> Result:
    found = catalog.rollouts(args.policy, args.limit)
    if args.action == "list":
        return _shown({"rollouts": found})
    chosen = [one for one in found if args.step in (None, one.step)]
    if not chosen:
        step = "" if args.step is None else f" of step {args.step}"
        raise UserError(f"policy {args.policy!r} has no rollouts{step}: list them")
    batch = unpack_rollouts(catalog.read_rollout(chosen[0]))
    samples = [
        {
            "prompt": prompt,
            "tokens": tokens,
            "logprobs": batch.logprobs[q][g],
            "revisions": batch.revisions[q][g],
            "reward": float(batch.rewards[q, g]),
        }
        for q, prompt in enumerate(batch.prompts)
        for g, tokens in enumerate(batch.tokens[q])
    ]
    return _shown({"policy": args.policy, "step": batch.step, "samples": samples})


@command(
    "verify",
    "read everything, or one revision, and list what is damaged",
    arg("name", nargs="?", help=REVISION),
)
def _verify(args: argparse.Namespace, catalog: Catalog) -> Result:
    checked = [0, 0]
    if args.name is not None:
        checked = [1, catalog.resolve(args.name).place.length]
        findings = list(catalog.verify(args.name))
    else:
        with progress("verify: payloads", catalog.stats()["payloads"]) as advance:

            def at(payloads: int, bytes: int) -> None:
                checked[:] = payloads, bytes
                advance(payloads)

            findings = list(catalog.verify(progress=at))
    data = {"payloads": checked[0], "bytes": checked[1], "findings": findings}
    return _shown(data, "" if findings else "nothing is damaged", 1 if findings else 0)


@command(
    "promote",
    "point an alias at a revision",
    arg("policy", help=EITHER),
    arg("revision", nargs="?", help="number, alias or digest"),
    _ALIAS,
    *SIGNED,
)
def _promote(args: argparse.Namespace, catalog: Catalog) -> Result:
    policy, at, which = args.policy.partition("@")
    if at and args.revision is not None:
        raise UserError(f"two revisions are given, {which!r} and {args.revision!r}: name one")
    revision = which if at else args.revision
    if not revision:
        raise UserError(
            f"no revision is given for {args.alias!r}: write {policy}@NUMBER, an alias or a digest"
        )
    return _moved(catalog.promote(policy, _which(revision), args.alias, by=args.by, why=args.why))


@command(
    "rollback",
    "point an alias back at its revision before",
    arg("policy"),
    arg("--to", metavar="REVISION", help="an earlier revision of the alias"),
    _ALIAS,
    *SIGNED,
)
def _rollback(args: argparse.Namespace, catalog: Catalog) -> Result:
    to = None if args.to is None else _which(args.to)
    return _moved(catalog.rollback(args.policy, args.alias, to=to, by=args.by, why=args.why))


def _which(text: str) -> int | str:
    return int(text) if names.is_number(text) else text


def _moved(alias: Alias) -> Result:
    return _shown({"alias": alias})


def _set(args: argparse.Namespace, catalog: Catalog, method: str, done: str) -> Result:
    """Runs a method of the catalog on a policy or a revision; pins are of revisions only."""
    policy, at, which = args.name.partition("@")
    if "pin" in method and not at:
        raise UserError(f"{args.name!r} names no revision: write {args.name}@NUMBER, or an alias")
    if at and not which:
        raise UserError(f"{args.name!r} ends with '@': add a number or an alias, or leave '@' out")
    one = [_which(which)] if at else []
    getattr(catalog, method)(policy, *one, by=args.by, why=args.why)
    return _shown({"name": args.name, "is": done})


for _name, _done, _help, _subject in (
    ("retire", "retired", "take a policy or a revision out of use", EITHER),
    ("restore", "restored", "undo retire", EITHER),
    ("pin", "pinned", "keep a revision regardless of retention", "policy@revision"),
    ("unpin", "unpinned", "undo pin", "policy@revision"),
):
    command(_name, _help, arg("name", help=_subject), *SIGNED)(
        functools.partial(_set, method=_name, done=_done)
    )


@command(
    "tag",
    "label a policy or a revision",
    arg("name", help=EITHER),
    arg("tags", nargs="*", type=_tag, metavar="KEY=VALUE"),
    arg("--remove", action="append", default=[], metavar="KEY", help="may be repeated"),
    *SIGNED,
)
def _set_tags(args: argparse.Namespace, catalog: Catalog) -> Result:
    changes: dict[str, str | None] = dict(args.tags)
    if both := changes.keys() & set(args.remove):
        raise UserError(f"tag {sorted(both)[0]!r} is to be set and removed: choose one")
    if not (changes or args.remove):
        raise UserError(f"no tags of {args.name} are given: write KEY=VALUE, or --remove KEY")
    changes |= dict.fromkeys(args.remove)
    now = catalog.tag(args.name, changes, by=args.by, why=args.why)
    return _shown({"name": args.name, "tags": now})


@command("delete", "remove a retired policy; gc then frees its bytes", arg("policy"), *SIGNED)
def _delete(args: argparse.Namespace, catalog: Catalog) -> Result:
    catalog.delete(args.policy, by=args.by, why=args.why)
    note = "gc frees the bytes that nothing else refers to"
    return _shown({"policy": args.policy, "is": "deleted"}, note)


@command(
    "keep-last",
    "set how many newest revisions gc keeps",
    arg("policy"),
    arg("count", type=_count_or_all, metavar="N", help="a number, or all"),
    *SIGNED,
)
def _keep_last(args: argparse.Namespace, catalog: Catalog) -> Result:
    catalog.keep_last(args.policy, args.count, by=args.by, why=args.why)
    note = "gc also keeps what aliases, pins, leases and branches name"
    return _shown({"policy": args.policy, "keep_last": args.count}, note)


@command(
    "gc",
    "remove what retention gives up and nothing refers to",
    arg("--dry-run", action="store_true", help="only report"),
    arg("--no-compact", action="store_true", help="do not join small packs"),
    arg(
        "--grace",
        type=_seconds,
        default=3600.0,
        metavar="SECONDS",
        help="time for writers and readers (default 3600)",
    ),
    *SIGNED,
)
def _gc(args: argparse.Namespace, catalog: Catalog) -> Result:
    report = catalog.gc(
        dry_run=args.dry_run,
        compact=not args.no_compact,
        grace_s=args.grace,
        by=args.by,
        why=args.why,
    )
    note = "would be removed" if report.dry_run else "removed"
    return Result(report, {}, f"{len(report.revisions)} revisions {note}")


@command(
    "export",
    "write a revision to files",
    arg("name", help=REVISION),
    arg("directory", nargs="?", type=path, help="a new directory"),
    arg(
        "--format",
        choices=("peft", "orbax"),
        default="peft",
        help="of the directory (default peft)",
    ),
    arg(
        "--base-name",
        metavar="NAME",
        help="the base's name in a PEFT directory: a hub name, or a directory",
    ),
    arg(
        "--packed",
        type=path,
        metavar="FILE",
        help="write the packed object, one safetensors file, instead of a directory",
    ),
    *BASE,
)
def _export(args: argparse.Namespace, catalog: Catalog) -> Result:
    if (args.directory is None) == (args.packed is None):
        raise UserError("give either a new directory, or --packed FILE")
    found = catalog.resolve(args.name)
    data = catalog.load(found.digest)
    written = {"policy": found.policy, "number": found.number, "digest": found.digest}
    if args.packed is not None:
        _write_new(Path(args.packed), data.data)
        written["packed"] = args.packed
    else:
        if args.format == "orbax":
            from mint_jax.catalog import orbax_files  # imports Orbax, which takes seconds

            orbax_files.write(args.directory, data, written)
        else:
            written["base_name"] = _write_peft(args, found, data)
        written["directory"] = args.directory
    return _shown(written)


def _write_peft(args: argparse.Namespace, found: Resolved, data: np.ndarray) -> str:
    """Writes a PEFT directory; returns the base's name in it."""
    if args.base is None:
        raise UserError(
            "a PEFT directory needs the base's names: give --base, or choose --format=orbax or"
            " --packed FILE"
        )
    from mint_jax.lora import peft, tree
    from mint_jax.models import hf
    from mint_jax.models.base import public_name
    from mint_jax.models.outline import outline

    base = outline(args.base, args.fingerprint)
    adapter, schema = unpack(data)
    if schema.base != base.fingerprint:
        raise UserError(
            f"{found.policy}@{found.number} was trained on base {schema.base[:12]}, {args.base!r}"
            f" is {base.fingerprint[:12]}: give its own base"
        )
    tree.check_fits(adapter, schema.config, base.specs, args.name, finite=False)
    name, is_moe = args.base_name or public_name(args.base), hf.is_moe_type(base.cfg)
    try:
        peft.write_peft(args.directory, adapter, schema.config, base.tables[0], name, is_moe)
    except OSError as error:
        raise _unwritable(args.directory, error) from None
    return name


def _write_new(target: Path, data: memoryview) -> None:
    if target.exists():
        raise UserError(f"output {target} exists: choose a new file, or remove it")
    try:
        write_file(target, bytes(data), replace=False)
    except OSError as error:
        raise _unwritable(target, error) from None


def _unwritable(target: str | Path, error: OSError) -> UserError:
    return UserError(
        f"output {target} cannot be written ({error.strerror or error}): choose another place"
    )
