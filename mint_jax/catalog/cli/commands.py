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
from mint_jax.catalog.records.canaries import Canary
from mint_jax.catalog.records.lookup import Resolved
from mint_jax.catalog.records.policies import PolicyRecord
from mint_jax.catalog.records.training_records import Evaluation
from mint_jax.catalog.rollouts import unpack_rollouts
from mint_jax.errors import UserError
from mint_jax.files import write_file
from mint_jax.lora.merge import METHODS, MergeConfig

Args = argparse.Namespace
Run = Callable[[Args, Any], Result]
Argument = tuple[tuple[str, ...], dict[str, Any]]  # arguments of ``add_argument``
COMMANDS: dict[str, tuple[Run, str, tuple[Argument, ...]]] = {}  # function, help, arguments


def command(name: str, help: str, *arguments: Argument) -> Callable[[Run], Run]:
    """Registers a function as a command."""

    def register(run: Run) -> Run:
        COMMANDS[name] = run, help, arguments
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
    if not (_is_number(text) and int(text) >= least):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number above {least - 1}")
    return int(text)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 19


def _tag(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not (key and equals and value):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not KEY=VALUE")
    return key, value


NATURAL = functools.partial(count, least=0)
FORMATS = "peft", "sglang", "miles", "orbax"
REVISION = "policy@alias, policy@number or a digest"
POLICY = "policy, or tenant/policy"
EITHER = "policy, or policy@revision"
SIGNED = (
    arg("--by", help="author of the change (default: user and host)"),
    arg("--why", default="", help="reason, for the audit log"),
)
BASE = (
    arg("--base", type=path, help="name or directory of the base; its weights are not loaded"),
    arg("--fingerprint", metavar="HEX", help="of the base, if --base has only config.json"),
)
_LIMIT = arg("--limit", type=count, default=100, metavar="N", help="at most N (default 100)")
_SHOWN = arg("--limit", type=count, default=20, metavar="N", help="at most N rows (default 20)")
_ALIAS = arg("--alias", default="serving", help="alias to move (default serving)")
_AFTER = arg("--after", metavar="LAST", help="continue after the last policy, number or id")


def _page(data: dict[str, Any], args: Args, last: Callable[[Any], Any]) -> Result:
    """A page; ``next`` is the argument of ``--after`` for the next one, null at the end."""
    [found] = data.values()
    following = str(last(found[-1])) if len(found) == args.limit else None
    more = "" if following is None else f"There may be more: --after {following}"
    return Result(data | {"next": following}, more)


def _after(args: Args) -> int:
    if args.after is not None and not _is_number(args.after):
        raise UserError(f"--after is {args.after[:40]!r}; the page before ended with a number")
    return int(args.after or 0)


_KEY_VALUE = {"metavar": "KEY=VALUE", "type": _tag}


@command(
    "ls",
    "list policies, or the revisions of one",
    arg("policy", nargs="?", help="list its revisions (default: all policies)"),
    arg("--tenant", help="only this tenant's policies"),
    arg("--state", choices=("active", "retired", "deleted"), help="only policies in this state"),
    arg("--tag", action="append", default=[], help="only with this tag; repeatable", **_KEY_VALUE),
    arg("--match", metavar="TEXT", default="", help="only policies whose name contains TEXT"),
    _LIMIT,
    _AFTER,
)
def _ls(args: Args, catalog: Catalog) -> Result:
    if args.policy is not None:
        if args.tenant or args.state or args.match or args.tag:
            raise UserError(
                "ls of one policy lists all its revisions: leave --tenant, --state, --tag and"
                " --match out"
            )
        found = catalog.revisions(args.policy, _after(args), args.limit)
        return _page({"revisions": found}, args, lambda one: one.number)
    tagged = dict(args.tag)
    page = catalog.policies(args.tenant, args.after, args.limit, args.state, args.match, tagged)
    aliases, tags = catalog.aliases_of(page), catalog.tags_of(page)
    data = [
        _policy_data(one) | {"aliases": aliases[one.policy], "tags": tags[one.policy]}
        for one in page
    ]
    return _page({"policies": data}, args, lambda one: one["policy"])


def _policy_data(record: PolicyRecord) -> dict[str, Any]:
    """Returns a policy for JSON, with its full name and its schema as an object."""
    fields = dataclasses.asdict(record) | {"schema": json.loads(record.schema)}
    return {"policy": record.policy} | fields


@command("show", "show a policy or a revision", arg("name", help=f"policy, {REVISION}"), _SHOWN)
def _show(args: Args, catalog: Catalog) -> Result:
    name, limit = args.name, args.limit
    if "@" in name or names.is_digest(name):
        policy, at, which = name.partition("@")
        if not at:
            found = catalog.resolve(name)
            policy, which = found.policy, found.number
        revision = catalog.revision(policy, which)  # retired ones too
        policy, named = revision.policy, f"{revision.policy}@{revision.number}"
        aliases = [one for one in catalog.aliases(policy) if one.number == revision.number]
        data: dict[str, Any] = {"revision": revision}
        scored = revision.digest
    else:
        policy = named = scored = name
        aliases, data = catalog.aliases(name), {}
    record = catalog.policy(policy)
    data |= {"policy": _policy_data(record), "tags": catalog.tags(named), "aliases": aliases}
    if named == policy:
        data["revisions"] = catalog.revisions(name, max(0, record.revisions - limit), limit)
    found = [_without_rewards(one) for one in catalog.evaluations(scored, limit)]
    return Result(data | {"evaluations": found})


def _without_rewards(one: Evaluation) -> Evaluation:
    """Returns an evaluation without the rewards of single prompts, which cards use."""
    metrics = {name: value for name, value in one.metrics.items() if name != "rewards"}
    return dataclasses.replace(one, metrics=metrics)


@command(
    "card",
    "compare a revision with its parent",
    arg("name", help="policy, policy@alias, policy@number or a digest"),
    arg("--parent", metavar="REVISION", help="number, alias or digest (default: the one before)"),
)
def _card(args: Args, catalog: Catalog) -> Result:
    found = catalog.resolve(args.name)
    return Result(catalog.card(found.policy, found.number, args.parent))


def _numbers(text: str) -> list[float]:
    try:
        return [float(one) for one in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not numbers with commas") from None


@command(
    "merge",
    "make one revision of several",
    arg("policy", help="of the merge; created if it is missing"),
    arg("members", nargs="+", metavar="REVISION", help=REVISION),
    arg("--weights", type=_numbers, metavar="W,W,…", help="default: the average"),
    arg("--method", choices=METHODS, default=METHODS[0], help="default sum"),
    arg("--density", type=float, default=1.0, help="share of entries kept by ties and dare"),
    arg("--rank", type=NATURAL, default=0, help="default: the sum of the members' ranks"),
    arg("--seed", type=NATURAL, default=0, help="of dare's choice"),
    *SIGNED,
)
def _merge(args: Args, catalog: Catalog) -> Result:
    how = MergeConfig(args.method, args.density, args.rank, args.seed)
    about = {"by": args.by, "why": args.why}
    return Result(
        {"revision": catalog.merge(args.policy, args.members, args.weights, how, **about)}
    )


@command(
    "descriptions",
    "list the policies that the model auto may go to, or leave one out",
    arg("--remove", metavar="POLICY", help="auto goes there no more"),
    arg("--tenant", help="of this tenant only"),
    _LIMIT,
    *SIGNED,
)
def _descriptions(args: Args, catalog: Catalog) -> Result:
    if args.remove is not None:
        catalog.describe(args.remove, None, by=args.by, why=args.why)
        return Result({"policy": args.remove, "examples": 0})
    found, _ = catalog.descriptions(args.tenant, limit=args.limit)
    rows = [dataclasses.asdict(one) | {"dims": one.vector.size} for one in found]
    for row in rows:
        del row["vector"]
    return Result({"descriptions": rows})


@command(
    "audit",
    "list all changes, of one policy, or the moves of one alias",
    arg("name", nargs="?", metavar="POLICY[@ALIAS]", help="default: the whole catalog"),
    _LIMIT,
    _AFTER,
)
def _audit(args: Args, catalog: Catalog) -> Result:
    policy, at, alias = (args.name or "").partition("@")
    moved = alias if at else None
    entries = catalog.audit(policy or None, alias=moved, after=_after(args), limit=args.limit)
    if at and not entries and alias not in [one.name for one in catalog.aliases(policy)]:
        raise UserError(f"policy {policy!r} never had an alias {alias!r}: show lists its aliases")
    return _page({"entries": entries}, args, lambda one: one.id)


@command(
    "rollouts",
    "list a policy's stored rollouts, or show those of one step",
    arg("action", choices=("list", "show"), help="list steps, or show one step's samples"),
    arg("policy", help=POLICY),
    arg("--step", type=NATURAL, metavar="N", help="to show (default: the newest)"),
    _LIMIT,
)
def _rollouts(args: Args, catalog: Catalog) -> Result:
    found = catalog.rollouts(args.policy, args.limit)
    if args.action == "list":
        return Result({"rollouts": found})
    chosen = [one for one in found if args.step in (None, one.step)]
    if not chosen:
        step = "" if args.step is None else f" of step {args.step}"
        raise UserError(f"policy {args.policy!r} has no rollouts{step}: list them")
    batch = unpack_rollouts(catalog.load_payload(chosen[0].digest))
    samples = [
        {
            "prompt": prompt,
            "tokens": tokens,
            "logprobs": batch.logprobs[q][g],
            "revisions": batch.revisions[q][g],
            "reward": float(r) if (r := batch.rewards[q, g]) == r else None,
        }
        for q, prompt in enumerate(batch.prompts)
        for g, tokens in enumerate(batch.tokens[q])
    ]
    return Result({"policy": args.policy, "step": batch.step, "samples": samples})


@command(
    "verify",
    "read everything, or one revision, and list what is damaged",
    arg("name", nargs="?", help=f"{REVISION} (default: everything)"),
)
def _verify(args: Args, catalog: Catalog) -> Result:
    if args.name is not None:
        checked = (1, catalog.resolve(args.name).place.length)
        findings = list(catalog.verify(args.name))
    else:
        checked = (0, 0)
        with progress("verify: payloads", catalog.stats()["payloads"]) as advance:

            def at(payloads: int, bytes: int) -> None:
                nonlocal checked
                checked = payloads, bytes
                advance(payloads)

            findings = list(catalog.verify(progress=at))
    data = {"payloads": checked[0], "bytes": checked[1], "findings": findings}
    return Result(data, "" if findings else "nothing is damaged", 1 if findings else 0)


@command(
    "promote",
    "point an alias at a revision, or give it a share of the alias's requests first",
    arg("name", help=REVISION),
    _ALIAS,
    arg("--canary", type=float, metavar="SHARE", help="share of requests, above 0, to 0.5"),
    arg("--guard", metavar="GUARD", help="with --canary: reward>=parent-0.02, for example"),
    arg("--alpha", type=float, default=0.05, help="with --canary: of both errors (default 0.05)"),
    *SIGNED,
)
def _promote(args: Args, catalog: Catalog) -> Result:
    policy, _, which = args.name.partition("@")
    if not which:
        raise UserError(
            f"no revision is given for {args.alias!r}: write {policy}@NUMBER, an alias or a digest"
        )
    if (args.canary is None) != (args.guard is None):
        raise UserError("--canary and --guard need each other: give both, or neither")
    about: Any = {"by": args.by, "why": args.why}
    if args.canary is None:
        return Result({"alias": catalog.promote(policy, which, args.alias, **about)})
    about |= {"share": args.canary, "guard": args.guard, "alpha": args.alpha}
    return Result(_canary_data(catalog.open_canary(policy, which, args.alias, **about)))


@command(
    "canary",
    "show the canaries of a policy or of one alias, or end an open one",
    arg("name", metavar="POLICY[@ALIAS]", help="with --end: of the alias, by default serving"),
    arg("--end", action="store_true", help="end the open canary; the alias stays"),
    _LIMIT,
    *SIGNED,
)
def _canary(args: Args, catalog: Catalog) -> Result:
    policy, at, alias = args.name.partition("@")
    if args.end:
        ended = catalog.end_canary(policy, alias if at else "serving", by=args.by, why=args.why)
        return Result(_canary_data(ended))
    found = catalog.canaries(policy, alias if at else None, args.limit)
    return Result({"canaries": [_canary_data(one) for one in found]})


def _canary_data(one: Canary) -> dict[str, Any]:
    """Returns a canary for people and JSON: its evidence by arm."""
    fields, evidence = dataclasses.asdict(one), one.evidence
    del fields["evidence"]
    fields |= {"e_worse": evidence.e_worse, "e_fit": evidence.e_fit, "e_needed": 1 / one.alpha}
    for name, *about in zip(("parent", "candidate"), evidence.answers, evidence.means):
        fields[f"{name}_answers"], fields[f"{name}_reward"] = about
    return fields


@command(
    "rollback",
    "point an alias back at its previous revision",
    arg("policy", help=POLICY),
    arg("--to", metavar="REVISION", help="an earlier revision of the alias"),
    _ALIAS,
    *SIGNED,
)
def _rollback(args: Args, catalog: Catalog) -> Result:
    moved = catalog.rollback(args.policy, args.alias, to=args.to, by=args.by, why=args.why)
    return Result({"alias": moved})


def _set(args: Args, catalog: Catalog, method: str, done: str) -> Result:
    """Runs a method of the catalog on a policy or a revision; pins are of revisions only."""
    policy, at, which = args.name.partition("@")
    if "pin" in method and not at:
        raise UserError(f"{args.name!r} names no revision: write {args.name}@NUMBER, or an alias")
    if at and not which:
        raise UserError(f"{args.name!r} ends with '@': add a number or an alias, or leave '@' out")
    named = [which] if at else []
    getattr(catalog, method)(policy, *named, by=args.by, why=args.why)
    return Result({"name": args.name, "is": done})


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
    arg("tags", nargs="*", **_KEY_VALUE),
    arg("--remove", action="append", default=[], metavar="KEY", help="may be repeated"),
    *SIGNED,
)
def _set_tags(args: Args, catalog: Catalog) -> Result:
    changes: dict[str, str | None] = dict(args.tags)
    if both := changes.keys() & set(args.remove):
        raise UserError(f"tag {min(both)!r} is to be set and removed: choose one")
    changes |= dict.fromkeys(args.remove)
    if not changes:
        raise UserError(f"no tags of {args.name} are given: write KEY=VALUE, or --remove KEY")
    now = catalog.tag(args.name, changes, by=args.by, why=args.why)
    return Result({"name": args.name, "tags": now})


@command(
    "delete",
    "remove a retired policy; gc then frees its bytes",
    arg("policy", help=POLICY),
    *SIGNED,
)
def _delete(args: Args, catalog: Catalog) -> Result:
    catalog.delete(args.policy, by=args.by, why=args.why)
    note = "gc frees the bytes that nothing else refers to"
    return Result({"policy": args.policy, "is": "deleted"}, note)


@command(
    "stand-in",
    "name the revision that answers while another one of a policy is loaded",
    arg("policy", help=POLICY),
    arg("revision", nargs="?", help=f"of the same base: {REVISION} (default: requests wait)"),
    *SIGNED,
)
def _stand_in(args: Args, catalog: Catalog) -> Result:
    found = catalog.stand_in(args.policy, args.revision, by=args.by, why=args.why)
    return Result({"policy": args.policy, "stand_in": found})


@command(
    "keep-last",
    "set how many newest revisions gc keeps",
    arg("policy", help=POLICY),
    arg(
        "count",
        type=lambda text: None if text == "all" else count(text),
        metavar="N|all",
        help="number of revisions; all: every one, the default of a new policy",
    ),
    *SIGNED,
)
def _keep_last(args: Args, catalog: Catalog) -> Result:
    catalog.keep_last(args.policy, args.count, by=args.by, why=args.why)
    note = "gc also keeps what aliases, pins and leases name"
    return Result({"policy": args.policy, "keep_last": args.count}, note)


_GRACE = "time that files stay for their readers and writers (default 3600)"


@command(
    "gc",
    "remove what retention gives up and nothing refers to",
    arg("--dry-run", action="store_true", help="only report"),
    arg("--no-compact", dest="compact", action="store_false", help="do not join small packs"),
    arg("--grace", dest="grace_s", type=NATURAL, default=3600, metavar="SECONDS", help=_GRACE),
    *SIGNED,
)
def _gc(args: Args, catalog: Catalog) -> Result:
    options = ("dry_run", "compact", "grace_s", "by", "why")
    report = catalog.gc(**{name: getattr(args, name) for name in options})
    note = "would be removed" if report.dry_run else "removed"
    return Result(report, f"{len(report.revisions)} revisions {note}")


@command(
    "export",
    "write a revision to files",
    arg("name", help=REVISION),
    arg("directory", nargs="?", type=path, help="a new directory"),
    arg("--format", choices=FORMATS, default=FORMATS[0], help="of the directory"),
    arg("--base-name", metavar="NAME", help="the base in a PEFT directory: hub name, or directory"),
    arg("--packed", type=path, metavar="FILE", help="write one safetensors file instead"),
    *BASE,
)
def _export(args: Args, catalog: Catalog) -> Result:
    if (args.directory is None) == (args.packed is None):
        raise UserError("give either a new directory, or --packed FILE")
    found = catalog.resolve(args.name)
    data = catalog.load(found.digest)
    written = {"policy": found.policy, "number": found.number, "digest": found.digest}
    try:
        if args.packed is not None:
            if Path(args.packed).exists():
                raise UserError(f"output {args.packed} exists: choose a new file, or remove it")
            write_file(Path(args.packed), data.tobytes(), replace=False)
            return Result(written | {"packed": args.packed})
        if args.format != "orbax":
            written["base_name"] = _write_peft(args, found, data)
        else:
            from mint_jax.catalog import orbax_files  # imports Orbax, which takes seconds

            orbax_files.write(args.directory, data, written)
    except OSError as error:
        raise UserError(
            f"output {args.packed or args.directory} cannot be written"
            f" ({error.strerror or error}): choose another place"
        ) from None
    return Result(written | {"directory": args.directory})


def _write_peft(args: Args, found: Resolved, data: np.ndarray) -> str:
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
    modules = base.tables[0], name, is_moe, args.format
    peft.write_peft(args.directory, adapter, schema.config, *modules)
    return name
