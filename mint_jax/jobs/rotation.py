"""The adapters of a batch job in turns: any number of them over a given number of device slots.

A turn is as many adapters as there are slots for, and the rows that name them; while it runs the next one's come to the host.
Which rows run together depends on the input alone, not on how fast anything loads.
"""

import dataclasses
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from mint_jax import multihost
from mint_jax.catalog.packed import Schema, pack, unpack
from mint_jax.catalog.records import Lease as PayloadLease
from mint_jax.errors import UserError
from mint_jax.jobs import adapters
from mint_jax.jobs.catalogs import JobCatalog
from mint_jax.jobs.common import say
from mint_jax.lora import tree as lora_tree
from mint_jax.lora.tree import Slot, Stacks
from mint_jax.models import transformer
from mint_jax.models.base import Base
from mint_jax.residency.opening import Known, open_residency
from mint_jax.residency.residency import Residency

Result = TypeVar("Result")
LEASE_S = 86400.0  # payloads of later turns are kept from collection so long, and anew while turns go on


@dataclasses.dataclass(frozen=True)
class Turn:
    """Rows whose adapters are resident together.

    Attributes:
        rows: indices into the names that the rotation was made of.
        before: how many rows had their turn.
        slots: by name.
    """

    rows: list[int]
    before: int
    slots: dict[str, Slot]
    stacks: Stacks

    def slot(self, name: str | None) -> Slot | None:
        """Where an adapter of this turn is; None for the bare base."""
        return self.slots[name] if name else None


class Rotation:
    """Adapters by name, checked against their records before anything runs; a context that ends its loads and leases.

    Args:
        names: of each row; None is the bare base. A PEFT directory, or a revision of ``catalog``, resolved here once.
        slots: on the device, of each rank bucket.

    Raises:
        UserError: an unknown name, an adapter for another base, or, on several processes, which load all before they begin,
            more adapters than there are slots for.
    """

    def __init__(self, base: Base, names: Sequence[str | None], catalog: JobCatalog | None, slots: int):
        if isinstance(slots, bool) or not isinstance(slots, int) or slots < 1:
            raise UserError(f"slots is {slots!r}; expected how many adapters of a rank bucket may be on the device at once, at least 1")
        self.base, self.names, self._catalog, self._slots = base, [name or None for name in names], catalog, slots
        self.digests: dict[str, str] = {}  # name -> revision or, of a PEFT directory, what it would be
        self._known: dict[str, Known] = {}
        self._bytes: dict[str, int] = {}
        self._given: dict[str, np.ndarray] = {}  # packed objects that come from PEFT directories
        self._held: dict[str, PayloadLease] = {}  # keep what the names stood for, whatever becomes of the names
        self._residency: Residency | None = None
        self._loaded: dict[str, adapters.Loaded] = {}
        try:
            self._look_up_all()
            self._plan = self._turns()
            if self._loaded and len(self._plan) > 1:
                raise UserError(
                    f"{len(self._known)} adapters are named and slots is {slots}: several processes load all before they begin; "
                    "set --config.slots as high, or run one process"
                )
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> "Rotation":
        return self

    def __exit__(self, *_: object) -> None:
        if self._residency is not None:
            self._residency.close()
        self._let_go(list(self._held))

    def run(self, call: Callable[[Turn], Sequence[Result]]) -> list[Result]:
        """Every row's result, in the order of the rows; ``call`` gives those of a turn's, in theirs.

        Raises:
            UserError: a payload that is damaged or does not fit.
        """
        results: dict[int, Result] = {}
        for turn in self._each():
            results.update(zip(turn.rows, call(turn), strict=True))
        return [results[i] for i in range(len(self.names))]

    def _each(self) -> Iterator[Turn]:
        """The turns in order; each one's adapters stay until the next is asked for."""
        if self._loaded or not self._known:
            stacks, slots = adapters.make_resident(self._loaded, self.base)
            yield Turn(list(range(len(self.names))), 0, slots, stacks)
            return
        residency = self._residency = self._open()
        if len(self._plan) > 1:
            say(f"{len(self._known)} adapters take {len(self._plan)} turns over {self._slots} slots of each rank bucket")
        before = 0
        for k, digests in enumerate(self._plan):
            self._renew()
            leases = {lease.digest: lease for lease in residency.wait_for(digests)}
            for digest in self._plan[k + 1] if k + 1 < len(self._plan) else ():
                residency.prefetch(digest)
            slots = {name: leases[digest].slot for name, digest in self.digests.items() if digest in leases}
            for name in slots:
                digest = self.digests[name]
                if digest not in self._given:
                    say(f"adapter {name}: rank {self._known[digest].config.rank}, {leases[digest].modules} modules bound")
            rows = [i for i, name in enumerate(self.names) if (k == 0 if name is None else name in slots)]
            yield Turn(rows, before, slots, residency.stacks)
            before += len(rows)
            for lease in leases.values():
                lease.release()
            self._let_go(digests)

    def _look_up_all(self) -> None:
        """What each name stands for, whether it can fit, and where its bytes are."""
        if multihost.count() > 1:
            self._loaded = adapters.read_all(self.names, self.base, self._catalog)
            for name, loaded in self._loaded.items():
                self.digests[name], self._known[loaded.digest] = loaded.digest, Known(loaded.config, "float32", True)
            return
        named = []
        for name in dict.fromkeys(name for name in self.names if name):
            if adapters.is_directory(name):
                loaded = adapters.read_adapter(name, self.base)
                data = np.frombuffer(pack(loaded.adapter, Schema(self.base.fingerprint, loaded.config)), np.uint8)
                self._given[loaded.digest] = data
                self._take_in(name, loaded.digest, Known(loaded.config, "float32", True), data.nbytes)
            else:
                adapters.need_catalog(name, self._catalog)
                named.append(name)
        if named:
            assert self._catalog is not None
            specs = transformer.abstract(self.base.cfg)
            for name, found in zip(named, self._catalog.main.resolve_many(named)):
                schema = Schema.from_json(found.schema)
                adapters.check_base(schema, f"{found.policy}@{found.number}", self.base)
                lora_tree.projections(specs, schema.config.targets)
                self._take_in(name, found.digest, Known(schema.config, schema.dtype, found.finite), found.place.length)
            digests = sorted({self.digests[name] for name in named})
            held = self._catalog.main.lease_many(digests, f"turns of process {os.getpid()}", LEASE_S)
            self._held = dict(zip(digests, held))
        self._order_as_named()

    def _take_in(self, name: str, digest: str, known: Known, nbytes: int) -> None:
        self.digests[name], self._known[digest], self._bytes[digest] = digest, known, nbytes

    def _order_as_named(self) -> None:
        """Turns go by the order in which rows name adapters, whichever way they were looked up."""
        order = dict.fromkeys(self.digests[name] for name in self.names if name)
        self._known = {digest: self._known[digest] for digest in order}

    def _turns(self) -> list[list[str]]:
        """Digests of each turn: of every rank bucket as many as there are slots, in the order in which rows name them."""
        plan: list[list[str]] = []
        seen: dict[int, int] = {}
        for digest, known in self._known.items():
            bucket = known.config.bucket
            turn = seen.get(bucket, 0) // self._slots
            seen[bucket] = seen.get(bucket, 0) + 1
            if turn == len(plan):
                plan.append([])
            plan[turn].append(digest)
        return plan

    def _open(self) -> Residency:
        """Residency with as many slots as are needed and allowed."""
        base, specs = self.base.fingerprint, transformer.abstract(self.base.cfg)
        host_bytes = 2 * max(sum(self._bytes[digest] for digest in digests) for digests in self._plan)
        depth = 1 + 2 * max(map(len, self._plan))
        return open_residency(self._fetch, unpack, base, specs, self._known, self._slots, host_bytes, mesh=self.base.mesh, depth=depth)

    def _fetch(self, digest: str) -> np.ndarray:
        if digest in self._given:
            return self._given[digest]
        assert self._catalog is not None
        return self._catalog.main.read_leased(self._held[digest], verified=False)  # residency does

    def _renew(self) -> None:
        """Keeps the payloads of turns to come."""
        for digest, lease in self._held.items():
            if lease.expires_at < time.time() + LEASE_S / 2:
                assert self._catalog is not None
                self._held[digest] = self._catalog.main.renew_lease(lease, LEASE_S)

    def _let_go(self, digests: Iterable[str]) -> None:
        """Ends the leases on payloads."""
        held = [self._held.pop(digest) for digest in list(digests) if digest in self._held]
        if held:
            assert self._catalog is not None
            self._catalog.main.release(*held)
