"""Named adapters over the slots of one base: the loading path of all jobs.

    names --source.look_up--> digests, configs, bytes; checked against the base before anything runs
    hold(names) --residency--> slots, leased for a block; the next ones are fetched meanwhile
    run(call): rows of any number of adapters, in batches of as many adapters as fit

Which rows run together depends on the input only, not on loading times.
"""

import contextlib
import dataclasses
import functools
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from mint_jax import multihost
from mint_jax.errors import UserError
from mint_jax.lora import tree as lora_tree
from mint_jax.lora.tree import AdapterConfig, Slot, Stacks
from mint_jax.models import transformer
from mint_jax.models.base import Base
from mint_jax.residency.admission import Admission
from mint_jax.residency.residency import Fetch, Residency, Unpack
from mint_jax.residency.slots import DeviceSlots

Result = TypeVar("Result")
# Bytes of a large adapter written between two decode steps: about 1 ms, of which 0.1 ms is
# overhead.
PIECE_BYTES = 4 << 20


@dataclasses.dataclass(frozen=True)
class Known:
    """Facts about a revision before it is loaded; ``finite`` if its weights were found so."""

    config: AdapterConfig
    dtype: str
    finite: bool


class AdapterEntry(NamedTuple):
    """A resolved name: the digest and size of its packed object, and what is known of it."""

    digest: str
    known: Known
    nbytes: int


class PoolSource(Protocol):
    """Source of adapters, such as a catalog or directories; ``renew`` and ``release`` prolong and
    end the protection of what was looked up.
    """

    def look_up(self, names: Sequence[str]) -> dict[str, AdapterEntry]:
        """Resolves names, and protects the results from garbage collection. All or none."""
        ...

    def fetch(self, digest: str) -> np.ndarray: ...

    @property
    def unpack(self) -> Unpack: ...

    def load(self, name: str) -> tuple[AdapterConfig, Any]:
        """Loads an adapter into this host's memory; called in all processes."""
        ...

    def renew(self) -> None: ...
    def release(self, digests: Iterable[str]) -> None: ...


@dataclasses.dataclass(frozen=True)
class ResidentAdapters:
    """Adapters that are resident together; ``slots`` are by name."""

    slots: dict[str, Slot]
    stacks: Stacks

    def slot(self, name: str | None) -> Slot | None:
        """Returns an adapter's slot; None for the bare base."""
        return self.slots[name] if name else None


@dataclasses.dataclass(frozen=True)
class AdapterBatch(ResidentAdapters):
    """Indices of rows whose adapters are resident together; earlier batches had ``before`` rows."""

    rows: list[int]
    before: int


class Pool:
    """Named adapters of a job; see the module. A context that stops its loads and releases the
    source's protection. Raises ``UserError`` for an unknown name, or an adapter of another base.

    Args:
        names: adapter of each row; None or empty is the bare base. Each is resolved once.
        slots: maximum device slots of each rank bucket.
        say: prints a line for the user.
    """

    def __init__(
        self,
        base: Base,
        source: PoolSource,
        names: Sequence[str | None],
        slots: int,
        say: Callable[[str], None] = lambda text: None,
    ):
        if isinstance(slots, bool) or not isinstance(slots, int) or slots < 1:
            raise UserError(
                f"slots is {slots!r}; expected the number of adapters of a rank bucket on the"
                " device at once, at least 1"
            )
        self.base, self.names = base, [name or None for name in names]
        self._source, self._slots, self._say = source, slots, say
        self._specs = transformer.abstract(base.cfg)
        self._residency: Residency | None = None
        self._announced: set[str] = set()
        self._entries = source.look_up(list(dict.fromkeys(name for name in self.names if name)))
        self.digests = {name: entry.digest for name, entry in self._entries.items()}
        # With several processes each has all adapters in its host's memory, and builds stacks for
        # every block.
        self._whole: dict[str, tuple[AdapterConfig, Any]] = {}
        try:
            for entry in self._entries.values():
                lora_tree.projections(self._specs, entry.known.config.names)
            if multihost.count() > 1:
                self._whole = {name: source.load(name) for name in self._entries}
        except BaseException:
            self.__exit__()
            raise
        self._known = {entry.digest: entry for entry in self._entries.values()}
        self._plan = self._batches()

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        if self._residency is not None:
            self._residency.close()
        self._source.release(list(self.digests.values()))

    def run(self, call: Callable[[AdapterBatch], Sequence[Result]]) -> list[Result]:
        """Returns every row's result in input order; ``call`` returns those of one batch. Raises
        ``UserError`` as ``hold``.
        """
        if len(self._plan) > 1:
            self._say(
                f"{len(self._known)} adapters run in {len(self._plan)} batches over"
                f" {self._slots} slots of each rank bucket"
            )
        results: dict[int, Result] = {}
        plan = self._plan or [[]]
        batch_of = {digest: k for k, digests in enumerate(plan) for digest in digests}
        rows_of: list[list[int]] = [[] for _ in plan]
        for i, name in enumerate(self.names):  # rows of the bare base run in the first batch
            rows_of[0 if name is None else batch_of[self.digests[name]]].append(i)
        for digests, rows, following in zip(plan, rows_of, [*plan[1:], []]):
            with self.hold([self.names[i] for i in rows], following) as resident:
                batch = AdapterBatch(resident.slots, resident.stacks, rows, len(results))
                results.update(zip(rows, call(batch), strict=True))
            self._source.release(digests)
        return [results[i] for i in range(len(self.names))]

    @contextlib.contextmanager
    def hold(
        self, names: Iterable[str | None], following: Iterable[str] = ()
    ) -> Iterator[ResidentAdapters]:
        """Keeps adapters in slots until the block ends, and fetches the digests in ``following``
        meanwhile. The names must be among the pool's. Raises ``UserError`` for a payload that is
        damaged or does not fit, or more adapters of a rank bucket than slots.
        """
        wanted = [name for name in dict.fromkeys(names) if name]
        if self._whole or not wanted:
            stacks, slots = lora_tree.stack_adapters(
                self._specs, {name: self._whole[name] for name in wanted}
            )
            yield ResidentAdapters(slots, multihost.replicate(stacks, self.base.mesh))
            return
        digests = list(dict.fromkeys(self.digests[name] for name in wanted))
        counts = Counter(self._known[digest].known.config.bucket for digest in digests)
        if max(counts.values()) > self._slots:
            raise UserError(
                f"{max(counts.values())} adapters of one rank bucket are needed together, but"
                f" slots is {self._slots}: raise it"
            )
        residency = self._open()
        self._source.renew()
        leases = {lease.digest: lease for lease in residency.wait_for(digests)}
        try:
            for digest in following:
                residency.prefetch(digest)
            for name in wanted:
                if name not in self._announced:
                    lease, size = leases[self.digests[name]], self._entries[name].known.config.size
                    self._say(f"adapter {name}: {size}, {lease.modules} modules bound")
                    self._announced.add(name)
            yield ResidentAdapters(
                {name: leases[self.digests[name]].slot for name in wanted}, residency.stacks
            )
        finally:
            for lease in leases.values():
                lease.release()

    def _batches(self) -> list[list[str]]:
        """Returns the digests of each batch, as many of a rank bucket as it has slots."""
        plan: list[list[str]] = []
        used: Counter[int] = Counter()
        for digest, entry in self._known.items():
            bucket = entry.known.config.bucket
            k = used[bucket] // self._slots
            used[bucket] += 1
            if k == len(plan):
                plan.append([])
            plan[k].append(digest)
        return plan

    def _open(self) -> Residency:
        if self._residency is None:
            sizes = [sum(self._known[digest].nbytes for digest in batch) for batch in self._plan]
            self._residency = open_residency(
                self._source.fetch,
                self._source.unpack,
                self.base.fingerprint,
                self._specs,
                {digest: entry.known for digest, entry in self._known.items()},
                self._slots,
                host_bytes=2 * max(sizes),  # this batch and the next
                mesh=self.base.mesh,
                depth=1 + 2 * max(map(len, self._plan)),
            )
        return self._residency


def open_residency(
    fetch: Fetch,
    unpack: Unpack,
    base: str,
    base_specs: Any,
    revisions: Mapping[str, Known],
    slots: int,
    host_bytes: int,
    *,
    mesh: Mesh | None = None,
    depth: int = 256,
) -> Residency:
    """Opens residency for revisions, by digest, with at most ``slots`` slots of a rank bucket."""
    configs = [known.config for known in revisions.values()]
    counts = Counter(config.bucket for config in configs)
    targets = dict.fromkeys(target for config in configs for target in config.names)
    # Promoted so that no stored number is rounded. 16-bit slots halve the bytes to write.
    dtype = functools.reduce(
        jnp.promote_types, (jnp.dtype(known.dtype) for known in revisions.values())
    )
    counts = {bucket: min(count, slots) for bucket, count in counts.items()}
    device = DeviceSlots(base_specs, counts, targets, dtype, mesh, PIECE_BYTES)
    finite = {digest for digest, known in revisions.items() if known.finite}
    projections = {bucket: device.targets(bucket) for bucket in counts}
    admission = Admission(base, base_specs, projections, finite)
    workers = os.cpu_count() or 1
    return Residency(fetch, unpack, admission, device, host_bytes, workers=workers, depth=depth)
