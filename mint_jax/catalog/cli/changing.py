"""Commands that change the catalog (promote, tag, rename, retire, delete, gc and the like), and
export.
"""

import argparse
from pathlib import Path

from mint_jax.catalog.cli.looking import policy_data, tags_text
from mint_jax.catalog.cli.output import Progress, Result, Stages, facts, size, table
from mint_jax.catalog.lifecycle import Catalog
from mint_jax.catalog.packed import unpack
from mint_jax.catalog.records import names
from mint_jax.catalog.records.aliases import Alias
from mint_jax.errors import UserError
from mint_jax.files import write_file


def promote(args: argparse.Namespace, catalog: Catalog) -> Result:
    """Points an alias at a revision."""
    policy, at, which = args.policy.partition("@")
    if at and args.revision is not None:
        raise UserError(f"two revisions are given, {which!r} and {args.revision!r}: name one")
    revision = which if at else args.revision
    if not revision:
        raise UserError(
            f"which revision of {policy!r} shall {args.alias!r} name? give {policy}@NUMBER, an"
            " alias or a digest"
        )
    return _moved(catalog.promote(policy, _which(revision), args.alias, by=args.by, why=args.why))


def rollback(args: argparse.Namespace, catalog: Catalog) -> Result:
    """Points an alias back."""
    to = None if args.to is None else _which(args.to)
    return _moved(catalog.rollback(args.policy, args.alias, to=to, by=args.by, why=args.why))


def _which(text: str) -> int | str:
    return int(text) if names.is_number(text) else text


def _moved(alias: Alias) -> Result:
    return Result(
        {"alias": alias},
        [f"{alias.policy}@{alias.name} is revision {alias.number}, {alias.digest[:12]}"],
    )


def branch(args: argparse.Namespace, catalog: Catalog) -> Result:
    """Makes a policy from a revision."""
    made = catalog.branch(
        args.name, args.revision, keep_last=args.keep_last, by=args.by, why=args.why
    )
    return Result(
        {"policy": policy_data(made)}, [f"{made.policy} begins with the bytes of {made.parent}"]
    )


def _set(args: argparse.Namespace, change, done: str, needs_revision: bool) -> Result:
    policy, at, which = args.name.partition("@")
    if needs_revision and not at:
        raise UserError(f"{args.name!r} names no revision: write {args.name}@NUMBER, or an alias")
    if at and not which:
        raise UserError(
            f"{args.name!r} ends with '@': write a number or an alias behind it, or leave it out"
        )
    if at:
        change(policy, _which(which), by=args.by, why=args.why)
    else:
        change(policy, by=args.by, why=args.why)
    return Result({"name": args.name, "is": done}, [f"{args.name} is {done}"])


def retire(args: argparse.Namespace, catalog: Catalog) -> Result:
    """Takes a policy or a revision out of use."""
    return _set(args, catalog.retire, "retired", False)


def restore(args: argparse.Namespace, catalog: Catalog) -> Result:
    """Undoes ``retire``."""
    return _set(args, catalog.restore, "restored", False)


def pin(args: argparse.Namespace, catalog: Catalog) -> Result:
    """Keeps a revision."""
    return _set(args, catalog.pin, "pinned", True)


def unpin(args: argparse.Namespace, catalog: Catalog) -> Result:
    """Undoes ``pin``."""
    return _set(args, catalog.unpin, "unpinned", True)


def tag(args: argparse.Namespace, catalog: Catalog) -> Result:
    """Sets and removes tags."""
    changes: dict[str, str | None] = dict(args.tags)
    if both := changes.keys() & set(args.remove):
        raise UserError(f"tag {sorted(both)[0]!r} is to be set and removed: choose one")
    if not (changes or args.remove):
        raise UserError(f"which tags shall {args.name} have? give KEY=VALUE, or --remove KEY")
    now = catalog.tag(args.name, changes | dict.fromkeys(args.remove), by=args.by, why=args.why)
    return Result(
        {"name": args.name, "tags": now}, [f"{args.name} has {tags_text(now) or 'no tags'}"]
    )


def rename(args: argparse.Namespace, catalog: Catalog) -> Result:
    """Gives a policy another name."""
    made = catalog.rename(args.policy, args.name, by=args.by, why=args.why)
    return Result({"policy": policy_data(made)}, [f"{args.policy} is now {made.policy}"])


def delete(args: argparse.Namespace, catalog: Catalog) -> Result:
    """Removes a retired policy."""
    catalog.delete(args.policy, by=args.by, why=args.why)
    return Result(
        {"policy": args.policy, "is": "deleted"},
        [f"{args.policy} is deleted; gc frees the bytes that nothing else names"],
    )


def keep_last(args: argparse.Namespace, catalog: Catalog) -> Result:
    """Sets how many of its newest revisions gc keeps of a policy."""
    beyond = catalog.keep_last(args.policy, args.count, by=args.by, why=args.why)
    kept = (
        "all revisions"
        if args.count is None
        else f"the last {args.count}, and what aliases, pins, leases and branches name"
    )
    parts: list = [f"gc keeps {kept} of {args.policy}"]
    if beyond:
        parts.append(
            table(
                "older ones that stay",
                ("#revision", "because"),
                ((one.number, ", ".join(one.because)) for one in beyond),
            )
        )
    return Result({"policy": args.policy, "keep_last": args.count, "kept_beyond": beyond}, parts)


def gc(args: argparse.Namespace, catalog: Catalog) -> Result:
    """Removes what may go, and says what it was."""
    stages = Stages("gc")
    options = {
        "dry_run": args.dry_run,
        "compact": not args.no_compact,
        "grace_s": args.grace,
        "accept_losses": args.accept_losses,
    }
    report = catalog.gc(**options, by=args.by, why=args.why, progress=stages.at)
    stages.end()
    counts = [
        ("revisions", len(report.revisions), None),
        ("payloads", report.payloads, report.payload_bytes),
        ("packs", report.packs, report.pack_bytes),
        ("packs that were never committed, of these", report.abandoned, None),
        ("other leftovers of killed writers", report.leftovers, None),
        ("leases that had expired", report.leases, None),
        ("ended operations", report.operations, None),
        ("payloads moved into larger packs", report.moved, report.moved_bytes),
        ("packs in their grace period", report.waiting, report.waiting_bytes),
    ]
    rows = [
        (what, f"{count:,}", None if bytes is None else size(bytes))
        for what, count, bytes in counts
    ]
    title = "would be removed" if report.dry_run else "removed"
    parts: list = [table(title, ("what", "#count", "#bytes"), rows)]
    if report.revisions:
        parts.append(table("", ("revision",), ((name,) for name in report.revisions)))
    return Result(report, parts)


def recover(args: argparse.Namespace, catalog: Catalog) -> Result:
    """Makes revisions of adapters that no record names."""
    progress = Progress("recover: packs", None)
    report = catalog.recover(
        args.policy,
        dry_run=args.dry_run,
        grace_s=args.grace,
        by=args.by,
        why=args.why,
        progress=progress.at,
    )
    progress.leave()
    title = "would be recovered" if report.dry_run else "recovered"
    rows = [
        (one["name"], one["rank"], str(one["base"])[:12], size(int(one["bytes"])))
        for one in report.revisions
    ]
    parts: list = [table(f"{title}: {len(rows):,}", ("policy", "#rank", "base", "#bytes"), rows)]
    if report.left:
        parts.append(table("left where it is", ("why",), ((what,) for what in report.left)))
    return Result(report, parts)


def export(args: argparse.Namespace, catalog: Catalog) -> Result:
    """Writes a revision to files."""
    if (args.directory is None) == (args.packed is None):
        raise UserError("give either a new directory, or --packed FILE")
    found = catalog.resolve(args.name)
    data = catalog.load(found.digest)
    answer = {"policy": found.policy, "number": found.number, "digest": found.digest}
    if args.packed is not None:
        _write_new(Path(args.packed), data.data)
        return Result(
            answer | {"packed": args.packed},
            [f"wrote {args.packed}, {size(data.size)}, {found.digest}"],
        )
    shown = [
        ("directory", args.directory),
        ("revision", f"{found.policy}@{found.number}"),
        ("digest", found.digest),
    ]
    if args.format == "orbax":
        from mint_jax.catalog import orbax_files  # with Orbax, which takes seconds to import

        orbax_files.write(args.directory, data, answer)
        return Result(
            answer | {"directory": args.directory}, [facts("wrote an Orbax checkpoint", shown)]
        )
    if args.base is None:
        raise UserError(
            "a PEFT directory needs the base's names: give --base, or choose --format=orbax or"
            " --packed FILE"
        )
    from mint_jax.lora import peft, tree
    from mint_jax.models import hf
    from mint_jax.models.base import PACKAGED, public_name
    from mint_jax.models.outline import outline

    base = outline(args.base, args.fingerprint)
    adapter, schema = unpack(data)
    if schema.base != base.fingerprint:
        raise UserError(
            f"{found.policy}@{found.number} was trained on base {schema.base[:12]}, {args.base!r}"
            f" is {base.fingerprint[:12]}: give its own base"
        )
    tree.check_fits(adapter, schema.config, base.specs, args.name, finite=False)
    base_name = args.base_name or public_name(args.base)
    try:
        peft.write_peft(
            args.directory,
            adapter,
            schema.config,
            base.tables[0],
            base_name,
            hf.is_moe_type(base.cfg),
        )
    except OSError as error:
        raise UserError(
            f"output {args.directory} cannot be written ({error.strerror or error}): choose another"
            " place"
        ) from None
    shown.append(("base named in it", base_name))
    if not args.base_name and args.base.lower() in PACKAGED:
        shown.append(
            (
                "note",
                (
                    "the hub has the full weights of this base; here it is a 4-bit GGUF file, so"
                    " outputs there differ a little"
                ),
            )
        )
    return Result(
        answer | {"directory": args.directory, "base_name": base_name}, [facts("wrote", shown)]
    )


def _write_new(target: Path, data: memoryview) -> None:
    """Writes a file that is not there yet."""
    if target.exists():
        raise UserError(f"output {target} exists: choose a new file, or remove it")
    try:
        write_file(target, bytes(data), replace=False)
    except OSError as error:
        raise UserError(
            f"output {target} cannot be written ({error.strerror or error}): choose another place"
        ) from None
