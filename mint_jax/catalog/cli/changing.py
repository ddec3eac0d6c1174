"""Commands that change the catalog: promote, rollback, retire, pin, tag, delete, gc."""

import argparse
from collections.abc import Callable

from mint_jax.catalog.cli.listing import tags_text
from mint_jax.catalog.cli.output import Result, size, table
from mint_jax.catalog.lifecycle import Catalog
from mint_jax.catalog.records import names
from mint_jax.catalog.records.aliases import Alias
from mint_jax.errors import UserError


def promote(args: argparse.Namespace, catalog: Catalog) -> Result:
    """Points an alias at a revision."""
    policy, at, which = args.policy.partition("@")
    if at and args.revision is not None:
        raise UserError(f"two revisions are given, {which!r} and {args.revision!r}: name one")
    revision = which if at else args.revision
    if not revision:
        raise UserError(
            f"no revision is given for {args.alias!r}: write {policy}@NUMBER, an alias or a digest"
        )
    return _moved(catalog.promote(policy, _which(revision), args.alias, by=args.by, why=args.why))


def rollback(args: argparse.Namespace, catalog: Catalog) -> Result:
    """Points an alias back."""
    to = None if args.to is None else _which(args.to)
    return _moved(catalog.rollback(args.policy, args.alias, to=to, by=args.by, why=args.why))


def _which(text: str) -> int | str:
    return int(text) if names.is_number(text) else text


def _moved(alias: Alias) -> Result:
    text = f"{alias.policy}@{alias.name} is revision {alias.number}, {alias.digest[:12]}"
    return Result({"alias": alias}, [text])


def _set(
    args: argparse.Namespace, change: Callable[..., None], done: str, of_revision: bool = False
) -> Result:
    policy, at, which = args.name.partition("@")
    if of_revision and not at:
        raise UserError(f"{args.name!r} names no revision: write {args.name}@NUMBER, or an alias")
    if at and not which:
        raise UserError(f"{args.name!r} ends with '@': add a number or an alias, or leave '@' out")
    change(policy, *([_which(which)] if at else []), by=args.by, why=args.why)
    return Result({"name": args.name, "is": done}, [f"{args.name} is {done}"])


def retire(args: argparse.Namespace, catalog: Catalog) -> Result:
    """Takes a policy or a revision out of use."""
    return _set(args, catalog.retire, "retired")


def restore(args: argparse.Namespace, catalog: Catalog) -> Result:
    """Undoes ``retire``."""
    return _set(args, catalog.restore, "restored")


def pin(args: argparse.Namespace, catalog: Catalog) -> Result:
    """Keeps a revision."""
    return _set(args, catalog.pin, "pinned", of_revision=True)


def unpin(args: argparse.Namespace, catalog: Catalog) -> Result:
    """Undoes ``pin``."""
    return _set(args, catalog.unpin, "unpinned", of_revision=True)


def tag(args: argparse.Namespace, catalog: Catalog) -> Result:
    """Sets and removes tags."""
    changes: dict[str, str | None] = dict(args.tags)
    if both := changes.keys() & set(args.remove):
        raise UserError(f"tag {sorted(both)[0]!r} is to be set and removed: choose one")
    if not (changes or args.remove):
        raise UserError(f"no tags of {args.name} are given: write KEY=VALUE, or --remove KEY")
    changes |= dict.fromkeys(args.remove)
    now = catalog.tag(args.name, changes, by=args.by, why=args.why)
    text = f"{args.name} has {tags_text(now) or 'no tags'}"
    return Result({"name": args.name, "tags": now}, [text])


def delete(args: argparse.Namespace, catalog: Catalog) -> Result:
    """Removes a retired policy."""
    catalog.delete(args.policy, by=args.by, why=args.why)
    text = f"{args.policy} is deleted; gc frees the bytes that nothing else refers to"
    return Result({"policy": args.policy, "is": "deleted"}, [text])


def keep_last(args: argparse.Namespace, catalog: Catalog) -> Result:
    """Sets how many of a policy's newest revisions gc keeps."""
    catalog.keep_last(args.policy, args.count, by=args.by, why=args.why)
    kept = "all revisions"
    if args.count is not None:
        kept = f"the last {args.count}, and what aliases, pins, leases and branches name"
    data = {"policy": args.policy, "keep_last": args.count}
    return Result(data, [f"gc keeps {kept} of {args.policy}"])


def gc(args: argparse.Namespace, catalog: Catalog) -> Result:
    """Removes what may go, and lists it."""
    report = catalog.gc(
        dry_run=args.dry_run,
        compact=not args.no_compact,
        grace_s=args.grace,
        by=args.by,
        why=args.why,
    )
    rows = [
        (name, f"{count:,}", None if bytes is None else size(bytes))
        for name, count, bytes in (
            ("revisions", len(report.revisions), None),
            ("payloads", report.payloads, report.payload_bytes),
            ("packs", report.packs, report.pack_bytes),
            ("of these, packs that were never committed", report.abandoned, None),
            ("other leftovers of killed writers", report.leftovers, None),
            ("expired leases", report.leases, None),
            ("payloads moved into larger packs", report.moved, report.moved_bytes),
            ("packs in their grace period", report.waiting, report.waiting_bytes),
        )
    ]
    title = "would be removed" if report.dry_run else "removed"
    parts: list = [table(title, ("what", "#count", "#bytes"), rows)]
    if report.revisions:
        parts.append(table("", ("revision",), ((name,) for name in report.revisions)))
    return Result(report, parts)
