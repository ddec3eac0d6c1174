"""Named adapters over the slots of one base: the one way by which jobs bring adapters to the
devices.

    names --source.look_up--> digests, configs, bytes      checked against the base before anything
    runs hold(names)  --residency--> slots, leased for a block   what comes next is fetched
    meanwhile run(call)                                               rows of any number of
    adapters, in turns of as many as fit

Which rows run together depends on the input alone, not on how fast anything loads. Of several
processes each has all adapters in its host's memory, for scores and samples of a block are called
in all of them, and a load has no leader there (``others``); a block's adapters then become stacks
of their own.
"""

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from mint_jax import multihost
from mint_jax.errors import UserError
from mint_jax.lora import tree as lora_tree
from mint_jax.lora.tree import AdapterConfig, Slot, Stacks
from mint_jax.models import transformer
from mint_jax.models.base import Base
from mint_jax.residency.opening import Known, open_residency
from mint_jax.residency.residency import Residency

Result = TypeVar("Result")


class Entry(NamedTuple):
    """What a name stands for, before it is loaded.

    Attributes:
        digest: of the packed object.
        nbytes: of it.
    """

    digest: str
    known: Known
    nbytes: int


class Source(Protocol):
    """Where adapters come from: a catalog, directories."""

    def look_up(self, names: Sequence[str]) -> dict[str, Entry]:
        """What names stand for, and from now on keeps that from being collected. All or none."""
        ...

    def fetch(self, digest: str) -> np.ndarray:
        """A packed object; the caller verifies it."""
        ...

    @property
    def unpack(self) -> Callable[[np.ndarray], tuple[Any, Any]]:
        """From a packed object to its factors, and its schema with ``base`` and ``config``."""
        ...

    def load(self, name: str) -> tuple[AdapterConfig, Any]:
        """An adapter in this host's memory, verified; all processes call it."""
        ...

    def renew(self) -> None:
        """Goes on keeping what was looked up."""
        ...

    def let_go(self, digests: Iterable[str]) -> None:
        """Keeps these no longer."""
        ...


@dataclasses.dataclass(frozen=True)
class Held:
    """Adapters that are resident together.

    Attributes:
        slots: by name.
    """

    slots: dict[str, Slot]
    stacks: Stacks

    def slot(self, name: str | None) -> Slot | None:
        """Where an adapter is; None for the bare base."""
        return self.slots[name] if name else None


@dataclasses.dataclass(frozen=True)
class Turn(Held):
    """Rows whose adapters are resident together.

    Attributes:
        rows: indices into the names of the pool.
        before: how many rows had their turn.
    """

    rows: list[int]
    before: int


class Pool:
    """See the module. A context that ends its loads and gives back what the source keeps.

    Args:
        names: of rows; None, and empty, is the bare base. Each is resolved once, here.
        slots: on the device, of each rank bucket.
        say: lines for the person watching.

    Attributes:
        digests: by name.

    Raises:
        UserError: an unknown name, or an adapter for another base.
    """

    def __init__(
        self,
        base: Base,
        source: Source,
        names: Sequence[str | None],
        slots: int,
        say: Callable[[str], None] = lambda text: None,
    ):
        if isinstance(slots, bool) or not isinstance(slots, int) or slots < 1:
            raise UserError(
                f"slots is {slots!r}; expected how many adapters of a rank bucket may be on the"
                " device at once, at least 1"
            )
        self.base, self.names, self._source, self._slots, self._say = (
            base,
            [name or None for name in names],
            source,
            slots,
            say,
        )
        self._specs = transformer.abstract(base.cfg)
        self._residency: Residency | None = None
        self._announced: set[str] = set()
        self._entries = source.look_up(list(dict.fromkeys(name for name in self.names if name)))
        self.digests = {name: entry.digest for name, entry in self._entries.items()}
        self._whole: dict[str, tuple[AdapterConfig, Any]] = {}
        try:
            for entry in self._entries.values():
                lora_tree.projections(self._specs, entry.known.config.targets)
            if multihost.count() > 1:
                self._whole = {name: source.load(name) for name in self._entries}
        except BaseException:
            self.__exit__()
            raise
        self._known = {entry.digest: entry for entry in self._entries.values()}
        self._plan = self._turns()

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        if self._residency is not None:
            self._residency.close()
        self._source.let_go(list(self.digests.values()))

    def run(self, call: Callable[[Turn], Sequence[Result]]) -> list[Result]:
        """Every row's result, in the order of the rows; ``call`` gives those of a turn's, in
        theirs.

        Raises:
            UserError: a payload that is damaged or does not fit.
        """
        if len(self._plan) > 1:
            self._say(
                f"{len(self._known)} adapters take {len(self._plan)} turns over {self._slots} slots"
                " of each rank bucket"
            )
        results: dict[int, Result] = {}
        plan = self._plan or [[]]
        turn_of = {digest: k for k, digests in enumerate(plan) for digest in digests}
        rows_of: list[list[int]] = [[] for _ in plan]
        for i, name in enumerate(self.names):  # those of the bare base come first
            rows_of[0 if name is None else turn_of[self.digests[name]]].append(i)
        for k, (digests, rows) in enumerate(zip(plan, rows_of)):
            with self.hold(
                [self.names[i] for i in rows], self._plan[k + 1] if k + 1 < len(self._plan) else ()
            ) as held:
                turn = Turn(held.slots, held.stacks, rows, len(results))
                results.update(zip(rows, call(turn), strict=True))
            self._source.let_go(digests)
        return [results[i] for i in range(len(self.names))]

    @contextlib.contextmanager
    def hold(self, names: Iterable[str | None], following: Iterable[str] = ()) -> Iterator[Held]:
        """Adapters in slots until the block ends; names among those of the pool.

        Args:
            following: digests to fetch meanwhile.

        Raises:
            UserError: a payload that is damaged or does not fit; more adapters of a rank bucket
                than there are slots.
        """
        wanted = [name for name in dict.fromkeys(names) if name]
        if self._whole or not wanted:
            stacks, slots = lora_tree.stack_adapters(
                self._specs, {name: self._whole[name] for name in wanted}
            )
            yield Held(slots, multihost.replicate(stacks, self.base.mesh))
            return
        digests = list(dict.fromkeys(self.digests[name] for name in wanted))
        counts = Counter(self._known[digest].known.config.bucket for digest in digests)
        if counts and max(counts.values()) > self._slots:
            raise UserError(
                f"{max(counts.values())} adapters of one rank bucket are asked for together, slots"
                f" is {self._slots}: set more"
            )
        residency = self._open()
        self._source.renew()
        leases = {lease.digest: lease for lease in residency.wait_for(digests)}
        try:
            for digest in following:
                residency.prefetch(digest)
            for name in wanted:
                if name not in self._announced:
                    lease, rank = leases[self.digests[name]], self._entries[name].known.config.rank
                    self._say(f"adapter {name}: rank {rank}, {lease.modules} modules bound")
                    self._announced.add(name)
            yield Held({name: leases[self.digests[name]].slot for name in wanted}, residency.stacks)
        finally:
            for lease in leases.values():
                lease.release()

    def _turns(self) -> list[list[str]]:
        """Digests of each turn: of every rank bucket as many as there are slots, in the order in
        which rows name them.
        """
        plan: list[list[str]] = []
        seen: Counter[int] = Counter()
        for digest, entry in self._known.items():
            bucket = entry.known.config.bucket
            turn = seen[bucket] // self._slots
            seen[bucket] += 1
            if turn == len(plan):
                plan.append([])
            plan[turn].append(digest)
        return plan

    def _open(self) -> Residency:
        """Residency with as many slots as are needed and allowed; its host cache has two turns."""
        if self._residency is None:
            base, known = (
                self.base.fingerprint,
                {digest: entry.known for digest, entry in self._known.items()},
            )
            host_bytes = 2 * max(
                sum(self._known[digest].nbytes for digest in digests) for digests in self._plan
            )
            depth, fetch, unpack = (
                1 + 2 * max(map(len, self._plan)),
                self._source.fetch,
                self._source.unpack,
            )
            self._residency = open_residency(
                fetch,
                unpack,
                base,
                self._specs,
                known,
                self._slots,
                host_bytes,
                mesh=self.base.mesh,
                depth=depth,
            )
        return self._residency
