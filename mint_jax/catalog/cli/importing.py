"""Import in bulk: readers in parallel, some thousand adapters a transaction, and a second run goes
on where one was stopped.

A source becomes a revision of the policy that the template names. What a policy has already, by
digest, is not imported again. What cannot be imported is reported with its reason and keeps nothing
else from being imported.
"""

import argparse
import collections
import dataclasses
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from mint_jax.catalog.cli.output import Progress, Result, facts, size, table
from mint_jax.catalog.cli.sources import Refusal, Source, find
from mint_jax.catalog.lifecycle import Catalog
from mint_jax.catalog.packed import digest_of
from mint_jax.catalog.records import exports, names
from mint_jax.catalog.records.database import DatabaseFailed
from mint_jax.catalog.records.exports import Export
from mint_jax.catalog.records.names import full_name
from mint_jax.catalog.storage.payloads import StorageFailed
from mint_jax.errors import UserError

BATCH_BYTES = 256 << 20


@dataclasses.dataclass(frozen=True)
class Ready:
    """An adapter read and packed."""

    source: Source
    policy: str
    data: bytes
    digest: str


@dataclasses.dataclass
class Tally:
    """What was done so far."""

    imported: int = 0
    present: int = 0
    bytes: int = 0
    refused: list[Refusal] = dataclasses.field(default_factory=list)

    @property
    def done(self) -> int:
        return self.imported + self.present + len(self.refused)


def run(args: argparse.Namespace, catalog: Catalog | None) -> Result:
    """Imports all sources; status 1 where one was refused. ``catalog`` None: there is none yet, in
    a dry run.
    """
    sources, refused = find(args.paths, args.follow_links)
    if not sources and not refused:
        raise UserError(
            f"{', '.join(args.paths)}: there is no PEFT directory, no safetensors file, and no"
            " Orbax checkpoint of a revision"
        )
    if args.base is None and (count := sum(source.peft for source in sources)):
        raise UserError(
            f"{count} PEFT directories need the base that they were trained on: give --base"
        )
    tally = Tally(refused=refused)
    planned = _plan(sources, args.policy, args.tenant, tally)
    progress = Progress("check" if args.dry_run else "import", len(sources) + len(refused))
    batch: list[Ready] = []
    held = 0
    try:
        for found in _read(planned, args):
            if isinstance(found, Refusal):
                tally.refused.append(found)
            else:
                batch.append(found)
                held += len(found.data)
            if len(batch) >= args.batch or held >= BATCH_BYTES:
                _commit(batch, args, catalog, tally)
                batch, held = [], 0
            progress.at(tally.done, f"{len(tally.refused)} refused, {size(tally.bytes)}")
        _commit(batch, args, catalog, tally)
    except UserError as error:
        raise UserError(
            f"{error} ({tally.imported:,} were imported before; the same command goes on behind"
            " them)"
        ) from None
    progress.end(tally.done, f"{len(tally.refused)} refused, {size(tally.bytes)}")
    return _report(tally, args.dry_run)


def _report(tally: Tally, dry_run: bool) -> Result:
    data = {
        "dry_run": dry_run,
        "imported": tally.imported,
        "present": tally.present,
        "bytes": tally.bytes,
        "refused": tally.refused,
    }
    imported = "would be imported" if dry_run else "imported"
    counts = [
        (imported, f"{tally.imported:,}"),
        ("present already", f"{tally.present:,}"),
        ("refused", f"{len(tally.refused):,}"),
    ]
    parts: list = [facts("", [*counts, ("bytes", f"{tally.bytes:,}")])]
    if tally.refused:
        parts.append(
            table("refused", ("path", "reason"), ((one.path, one.reason) for one in tally.refused))
        )
    return Result(data, parts, 1 if tally.refused else 0)


def policy_name(template: str, path: Path, tenant: str | None) -> str:
    """The policy a source becomes, by the template.

    Raises:
        UserError: an unknown field, or a name that is not allowed.
    """
    path = path.absolute()
    fields = {
        "name": path.stem if path.suffix == ".safetensors" else path.name,
        "parent": path.parent.name,
    }

    def fill(match: re.Match) -> str:
        if match[1] not in fields:
            raise UserError(
                f"--policy {template[:80]!r} has {match[0][:40]!r}; known are {{name}} and"
                " {parent}"
            )
        return fields[match[1]]

    name = re.sub(r"\{([^{}]*)\}", fill, template)
    return full_name(*names.parse_policy(name, tenant))


def _plan(
    sources: Sequence[Source], template: str, tenant: str | None, tally: Tally
) -> list[tuple[Source, str]]:
    """Each source with its policy; two of one policy would become its revisions in an arbitrary
    order.
    """
    # a wrong template is one error, not thousands
    policy_name(template, Path("/parent/name"), tenant)
    taken: dict[str, Path] = {}
    planned = []
    for source in sources:
        try:
            policy = policy_name(template, source.path, tenant)
            if (first := taken.setdefault(policy, source.path)) != source.path:
                raise UserError(
                    f"policy {policy!r} is that of {first} already: choose another --policy, such"
                    " as '{parent}-{name}'"
                )
            planned.append((source, policy))
        except UserError as error:
            tally.refused.append(Refusal(str(source.path), str(error)))
    return planned


def _read(
    planned: Sequence[tuple[Source, str]], args: argparse.Namespace
) -> Iterator[Ready | Refusal]:
    """Reads sources in order, several at once, and only so far ahead that they fit in memory."""
    from mint_jax.catalog.cli.peft_files import packed_object
    from mint_jax.models.outline import outline

    base = None if args.base is None else outline(args.base, args.fingerprint)
    if base is not None:
        assert base.tables and base.specs  # noqa: PT018 - made once, before there are threads

    def read(source: Source, policy: str) -> Ready | Refusal:
        try:
            data = packed_object(source, base, args.dtype, args.force, args.max_bytes)
            return Ready(source, policy, data, digest_of(data))
        except UserError as error:
            return Refusal(str(source.path), str(error))
        except OSError as error:
            return Refusal(
                str(source.path),
                f"{error.filename or source.path} cannot be read ({error.strerror or error})",
            )
        except Exception as error:  # one malformed file must not keep thousands of others out
            return Refusal(
                str(source.path), f"it cannot be read ({type(error).__name__}: {str(error)[:300]})"
            )

    with ThreadPoolExecutor(args.readers, "reader") as pool:
        under_way: collections.deque[Future] = collections.deque()
        try:
            for source, policy in planned:
                under_way.append(pool.submit(read, source, policy))
                if len(under_way) >= 2 * args.readers:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        finally:
            for future in under_way:
                future.cancel()


def _commit(
    batch: Sequence[Ready], args: argparse.Namespace, catalog: Catalog | None, tally: Tally
) -> None:
    """Makes revisions of a batch, without those that are there already."""
    if not batch:
        return
    there = (
        [False] * len(batch)
        if catalog is None
        else catalog.holds([(one.policy, one.digest) for one in batch])
    )
    tally.present += sum(there)
    new = [one for one, present in zip(batch, there) if not present]
    if not args.dry_run:
        assert catalog is not None
        _export(new, args, catalog, tally)
        return
    for one in new:
        reason = None if catalog is None else _would_refuse(one, catalog, args)
        if reason is None:
            tally.imported, tally.bytes = tally.imported + 1, tally.bytes + len(one.data)
        else:
            tally.refused.append(Refusal(str(one.source.path), reason))


def _as_export(one: Ready, args: argparse.Namespace) -> Export:
    origin = f"import of {one.source.path}".encode("utf-8", "backslashreplace").decode()
    return Export(one.policy, one.data, args.step, origin=origin[:4000], force=args.force)


def _would_refuse(one: Ready, catalog: Catalog, args: argparse.Namespace) -> str | None:
    key = names.parse_policy(one.policy)
    try:
        record = catalog.policy(one.policy)
    except UserError:
        return None  # a new one
    try:
        if record.state != "active":
            raise UserError(f"policy {one.policy!r} is retired: restore it first")
        exports.check_schema(exports.prepare(*key, _as_export(one, args)), record.schema)
    except UserError as error:
        return str(error)
    return None


def _export(
    some: Sequence[Ready], args: argparse.Namespace, catalog: Catalog, tally: Tally
) -> None:
    """One transaction; where the catalog refuses it, its halves, down to the adapters that are at
    fault.

    Raises:
        UserError: not an adapter is at fault but storage or database.
    """
    pending = collections.deque([list(some)] if some else [])
    while pending:
        part = pending.popleft()
        try:
            catalog.export_many(
                [_as_export(one, args) for one in part], create=True, by=args.by, why=args.why
            )
        except (StorageFailed, DatabaseFailed):
            raise
        except UserError as error:
            if len(part) == 1:
                tally.refused.append(Refusal(str(part[0].source.path), str(error)))
            else:
                middle = len(part) // 2
                pending.extendleft([part[middle:], part[:middle]])
            continue
        tally.imported += len(part)
        tally.bytes += sum(len(one.data) for one in part)
