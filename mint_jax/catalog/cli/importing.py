"""Import in bulk: parallel readers, and about a thousand adapters per transaction.

A source becomes a revision of the policy that the template names. Adapters that the policy has
already, by digest, are skipped, so the same command continues a stopped import. A source that
cannot be imported is reported with its reason; the others are imported.
"""

import collections
import dataclasses
import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from mint_jax.catalog.cli.commands import BASE, NATURAL, SIGNED, Args, arg, command, count, path
from mint_jax.catalog.cli.output import Result, progress
from mint_jax.catalog.cli.sources import ImportRefusal, Source, find
from mint_jax.catalog.lifecycle import Catalog
from mint_jax.catalog.packed import digest_of
from mint_jax.catalog.records import exports, names
from mint_jax.catalog.records.database import DatabaseFailed
from mint_jax.catalog.records.exports import Export
from mint_jax.catalog.records.handle import check_active
from mint_jax.catalog.records.names import full_name
from mint_jax.catalog.storage.payloads import StorageFailed
from mint_jax.errors import UserError
from mint_jax.lora.config import FORMS

BATCH, BATCH_BYTES = 1000, 256 << 20  # adapters and bytes of a transaction
READERS = min(8, 2 * (os.cpu_count() or 1))


class Ready(NamedTuple):
    """An adapter read and packed."""

    source: Source
    export: Export
    digest: str


@dataclasses.dataclass
class Tally:
    """Counts of an import, as reported."""

    dry_run: bool
    imported: int = 0
    present: int = 0
    bytes: int = 0
    refused: list[ImportRefusal] = dataclasses.field(default_factory=list)


DTYPES = ("keep", "float32", "bfloat16", "float16")
_TEMPLATE = "policies' names (default {name}); {name} and {parent} are of the path"


@command(
    "import",
    "import PEFT directories, Orbax checkpoints, packed files",
    arg("paths", nargs="+", type=path, metavar="PATH", help="one of them, or a folder of them"),
    arg("--policy", default="{name}", metavar="TEMPLATE", help=_TEMPLATE),
    arg("--tenant", help="tenant of the policies"),
    arg("--step", type=NATURAL, default=0, metavar="N", help="number of optimizer steps done"),
    arg("--dtype", choices=DTYPES, default="keep", help="of the stored weights (default keep)"),
    arg("--experts", choices=FORMS, default="each", help="form of PEFT's factors of experts"),
    arg("--force", action="store_true", help="accept NaN and infinite weights"),
    arg("--follow-links", action="store_true", help="follow links that leave the given folder"),
    arg("--max-bytes", type=count, default=4 << 30, metavar="N", help="of a file (default 4 GiB)"),
    arg("--dry-run", action="store_true", help="read and check, write nothing"),
    *BASE,
    *SIGNED,
)
def _import(args: Args, catalog: Catalog | None) -> Result:
    """Imports all sources."""
    sources, refused = find(args.paths, args.follow_links)
    if not sources and not refused:
        raise UserError(
            f"{', '.join(args.paths)}: there is no PEFT directory, no safetensors file, and no"
            " Orbax checkpoint of a revision"
        )
    if args.base is None and (needing := sum(source.peft for source in sources)):
        raise UserError(
            f"{needing} PEFT directories need the base that they were trained on: give --base"
        )
    tally, total = Tally(args.dry_run, refused=refused), len(sources) + len(refused)
    planned = _plan(sources, args, tally)
    try:
        with progress("check" if args.dry_run else "import", total) as advance:
            for batch in _batches(_read(planned, args), tally):
                new = _without_present(batch, catalog)
                tally.present += len(batch) - len(new)
                _commit(new, args, catalog, tally)
                advance(tally.imported + tally.present + len(tally.refused))
    except UserError as error:
        raise UserError(
            f"{error} ({tally.imported:,} were imported before; the same command continues after"
            " them)"
        ) from None
    return Result(tally, code=1 if tally.refused else 0)


def _batches(found: Iterator[Ready | ImportRefusal], tally: Tally) -> Iterator[Sequence[Ready]]:
    """Splits adapters into transactions of bounded number and bytes; counts refusals."""
    batch: list[Ready] = []
    size = 0
    for one in found:
        if isinstance(one, ImportRefusal):
            tally.refused.append(one)
            continue
        batch.append(one)
        size += len(one.export.data)
        if len(batch) >= BATCH or size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    yield batch


def _policy_name(template: str, place: Path, tenant: str | None) -> str:
    """Returns the policy of a source. Raises ``UserError`` for an unknown field or a bad name."""
    place = place.absolute()
    stem = place.stem if place.suffix == ".safetensors" else place.name
    fields = {"name": stem, "parent": place.parent.name}
    pattern = r"\{([^{}]*)\}"
    if strange := [name for name in re.findall(pattern, template) if name not in fields]:
        raise UserError(
            f"--policy {template[:80]!r} has {{{strange[0][:40]}}}; known are {{name}} and"
            " {parent}"
        )
    name = re.sub(pattern, lambda found: fields[found[1]], template)
    return full_name(*names.parse_policy(name, tenant))


def _plan(sources: Sequence[Source], args: Args, tally: Tally) -> list[tuple[Source, str]]:
    """Pairs sources with policies, refusing a second source of a policy."""
    # a wrong template is one error, not thousands
    _policy_name(args.policy, Path("/parent/name"), args.tenant)
    taken: dict[str, Path] = {}
    planned = []
    for source in sources:
        try:
            policy = _policy_name(args.policy, source.path, args.tenant)
            if (first := taken.setdefault(policy, source.path)) != source.path:
                raise UserError(
                    f"policy {policy!r} is already that of {first}: choose another --policy, such"
                    " as '{parent}-{name}'"
                )
            planned.append((source, policy))
        except UserError as error:
            tally.refused.append(ImportRefusal(str(source.path), str(error)))
    return planned


def _read(planned: Sequence[tuple[Source, str]], args: Args) -> Iterator[Ready | ImportRefusal]:
    """Reads sources in order, several at once; the number read ahead bounds the memory."""
    from mint_jax.catalog.cli.peft_files import packed_object
    from mint_jax.models.outline import outline

    base = None if args.base is None else outline(args.base, args.fingerprint)
    if base is not None:
        assert base.tables and base.specs  # noqa: PT018 - made once, before there are threads

    def read(source: Source, policy: str) -> Ready | ImportRefusal:
        try:
            data = packed_object(source, base, args.dtype, args.force, args.max_bytes, args.experts)
            origin = f"import of {source.path}".encode("utf-8", "backslashreplace").decode()
            export = Export(policy, data, args.step, origin=origin[:4000], force=args.force)
            return Ready(source, export, digest_of(data))
        except UserError as error:
            reason = str(error)
        except OSError as error:
            place = error.filename or source.path
            reason = f"{place} cannot be read ({error.strerror or error})"
        except Exception as error:  # one malformed file must not keep thousands of others out
            reason = f"it cannot be read ({type(error).__name__}: {str(error)[:300]})"
        return ImportRefusal(str(source.path), reason)

    with ThreadPoolExecutor(READERS, "reader") as pool:
        under_way: collections.deque[Future] = collections.deque()
        try:
            for one in planned:
                under_way.append(pool.submit(read, *one))
                if len(under_way) >= 2 * READERS:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


def _without_present(batch: Sequence[Ready], catalog: Catalog | None) -> Sequence[Ready]:
    """Leaves out adapters that their policies have already."""
    if catalog is None:
        return batch
    present = catalog.holds([(one.export.policy, one.digest) for one in batch])
    return [one for one, there in zip(batch, present) if not there]


def _commit(some: Sequence[Ready], args: Args, catalog: Catalog | None, tally: Tally) -> None:
    """Exports in one transaction, or checks in a dry run; of a refused one, each alone."""
    try:
        items = [one.export for one in some]
        if not args.dry_run:
            assert catalog is not None
            catalog.export_many(items, create=True, by=args.by, why=args.why)
        elif catalog is not None:
            for item in items:
                _check(item, catalog)
        tally.imported += len(items)
        tally.bytes += sum(len(item.data) for item in items)
    except (StorageFailed, DatabaseFailed):
        raise
    except UserError as error:
        if len(some) == 1:
            tally.refused.append(ImportRefusal(str(some[0].source.path), str(error)))
            return
        for one in some:
            _commit([one], args, catalog, tally)


def _check(item: Export, catalog: Catalog) -> None:
    """Raises ``UserError`` if an export to an existing policy would be refused."""
    try:
        record = catalog.policy(item.policy)
    except UserError:  # a new one
        return
    check_active(record)
    exports.check_schema(exports.prepare(item), record.schema)
