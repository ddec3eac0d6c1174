"""Assignment of device slots to revisions: leases, pins and eviction. Plain Python, no arrays.

A slot is free, filling (reserved for a revision that is being loaded) or resident. Only resident
revisions are leased.
"""

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from mint_jax.errors import UserError
from mint_jax.lora.tree import Slot
from mint_jax.residency.eviction_score import EvictionScore, Ranking
from mint_jax.residency.quotas import ResidencyQuotas, Use, within


@dataclasses.dataclass(slots=True)
class _Occupant:
    slot: Slot
    tenant: str
    score: EvictionScore
    filling: bool = True
    leases: int = 0
    modules: int = 0
    doomed: bool = False  # cleared when the last lease ends


class SlotTable:
    """The slots of all rank buckets. Not thread-safe: its owner holds a lock.

    Args:
        capacities: slots of each bucket.
        slot_bytes: bytes of one slot of each bucket.
        half_life_s, clock: see ``HostCache``.
        on_evict: called with each evicted digest.
    """

    def __init__(
        self,
        capacities: Mapping[int, int],
        slot_bytes: Mapping[int, int],
        quotas: ResidencyQuotas | None = None,
        half_life_s: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
        on_evict: Callable[[str], None] | None = None,
    ):
        self.capacities, self.half_life_s = dict(capacities), half_life_s
        self._slot_bytes, self._quotas, self._clock, self._on_evict = (
            slot_bytes,
            quotas or ResidencyQuotas(),
            clock,
            on_evict,
        )
        self._free = {bucket: list(range(n))[::-1] for bucket, n in capacities.items()}
        self._occupants: dict[str, _Occupant] = {}
        self._pinned: set[str] = set()
        self._idle = {bucket: Ranking() for bucket in capacities}
        self._use = Use()

    def find(self, digest: str) -> Slot | None:
        """Returns the slot in which a revision is resident; None if it is not."""
        occupant = self._occupants.get(digest)
        return None if occupant is None or occupant.filling else occupant.slot

    def lease(self, digest: str) -> Slot | None:
        """Leases a resident revision's slot until ``release``; None if it is not resident."""
        occupant = self._occupants.get(digest)
        if occupant is None or occupant.filling:
            return None
        self._idle[occupant.slot.bucket].remove(digest)
        occupant.leases += 1
        occupant.doomed = False
        occupant.score.use(self._clock(), self.half_life_s)
        return occupant.slot

    def release(self, digest: str) -> bool:
        """Ends a lease; returns True if the slot can now be reassigned."""
        occupant = self._occupants[digest]
        assert occupant.leases > 0, f"{digest} has no lease"
        occupant.leases -= 1
        if occupant.doomed and not occupant.leases:
            self._clear(digest)
        else:
            self._rank(digest)
        return not occupant.leases

    def reserve(self, bucket: int, digest: str, tenant: str, evict: bool = True) -> Slot | None:
        """Reserves a slot for a revision: a free one, or the one with the lowest score among those
        without lease or pin. ``fill`` or ``abandon`` must follow.

        If the tenant's quota of slots is used up, only its own revisions are evicted.

        Returns:
            None if a lease must end first, or, without ``evict``, if none is free.

        Raises:
            UserError: no such slot can become free: the bucket has none, all are pinned, or the
                tenant's quota is 0.
        """
        assert digest not in self._occupants, f"{digest} has a slot"
        self._check_possible(bucket, tenant)
        victims = self._victims(bucket, tenant)
        if victims is None or (victims and not evict):
            return None
        for victim in victims:
            self._idle[self._occupants[victim].slot.bucket].evict(victim)
            self._clear(victim)
            if self._on_evict is not None:
                self._on_evict(victim)
        slot = Slot(bucket, self._free[bucket].pop())
        self._occupants[digest] = _Occupant(
            slot, tenant, EvictionScore(self._slot_bytes[bucket], 0.0, 1.0, self._clock())
        )
        self._use.add(tenant, self._slot_bytes[bucket])
        return slot

    def _victims(self, bucket: int, tenant: str) -> list[str] | None:
        """Returns the revisions to evict so that a tenant gets a slot of a bucket; None if they are
        leased or pinned.
        """
        victims = []
        if not within(self._use.entries(tenant) + 1, self._quotas.of(tenant).slots):
            # A slot of this bucket first.
            own = (
                self._idle[b].lowest(tenant)
                for b in sorted(self.capacities, key=lambda b: b != bucket)
            )
            if (victim := next((digest for digest in own if digest), None)) is None:
                return None
            victims.append(victim)
        if not self._free[bucket] and bucket not in (
            self._occupants[v].slot.bucket for v in victims
        ):
            if (victim := self._idle[bucket].lowest()) is None:
                return None
            victims.append(victim)
        return victims

    def _check_possible(self, bucket: int, tenant: str) -> None:
        if not self.capacities.get(bucket):
            have = ", ".join(str(b) for b, n in sorted(self.capacities.items()) if n) or "none"
            raise UserError(
                f"an adapter of rank bucket {bucket} needs a slot, and there are slots for {have}:"
                " configure slots for this bucket"
            )
        if self._quotas.of(tenant).slots == 0:
            raise UserError(f"tenant {tenant!r} has a quota of 0 device slots: raise it")
        pinned = sum(
            1
            for digest in self._pinned
            if (o := self._occupants.get(digest)) and o.slot.bucket == bucket
        )
        if pinned >= self.capacities[bucket]:
            raise UserError(
                f"all {pinned} slots of rank bucket {bucket} are pinned: unpin one or configure"
                " more"
            )

    def fill(self, digest: str, seconds: float, modules: int = 0) -> None:
        """Marks a reserved slot as resident with ``modules`` modules; ``seconds`` is the time that
        loading took.
        """
        occupant = self._occupants[digest]
        occupant.filling, occupant.modules = False, modules
        occupant.score.seconds = seconds
        self._rank(digest)

    def abandon(self, digest: str) -> None:
        """Frees a reserved slot after its load failed."""
        assert self._occupants[digest].filling, f"{digest} is resident"
        self._clear(digest)

    def pin(self, digest: str) -> None:
        """Protects a revision from eviction, now or once it is resident."""
        self._pinned.add(digest)
        if occupant := self._occupants.get(digest):
            self._idle[occupant.slot.bucket].remove(digest)

    def unpin(self, digest: str) -> None:
        """Removes a pin, if there is one."""
        self._pinned.discard(digest)
        if digest in self._occupants:
            self._rank(digest)

    def is_pinned(self, digest: str) -> bool:
        return digest in self._pinned

    def modules(self, digest: str) -> int:
        """Returns the number of modules that a resident revision binds to."""
        return self._occupants[digest].modules

    def drop(self, digest: str) -> bool:
        """Clears a revision's slot, pinned or not; a leased one when its last lease ends. Returns
        True if it is cleared now.
        """
        self._pinned.discard(digest)
        occupant = self._occupants.get(digest)
        if occupant is None or occupant.filling:
            return occupant is None
        if occupant.leases:
            occupant.doomed = True
            return False
        self._clear(digest)
        return True

    def _clear(self, digest: str) -> None:
        occupant = self._occupants.pop(digest)
        self._idle[occupant.slot.bucket].remove(digest)
        self._free[occupant.slot.bucket].append(occupant.slot.index)
        self._use.add(occupant.tenant, -occupant.score.nbytes, -1)

    def _rank(self, digest: str) -> None:
        """Makes a slot evictable, unless it is filling, leased or pinned."""
        occupant = self._occupants[digest]
        if not (occupant.filling or occupant.leases or digest in self._pinned):
            self._idle[occupant.slot.bucket].add(digest, occupant.tenant, occupant.score.value)

    @property
    def nbytes(self) -> int:
        """Total bytes of the slots in use."""
        return sum(occupant.score.nbytes for occupant in self._occupants.values())

    def resident(self) -> Iterable[str]:
        """Returns the digests of resident revisions."""
        return [digest for digest, occupant in self._occupants.items() if not occupant.filling]

    def state(self) -> dict[int, dict[str, Any]]:
        """Returns the number of slots by bucket and state."""
        out: dict[int, dict[str, Any]] = {}
        for bucket, capacity in self.capacities.items():
            own = {d: o for d, o in self._occupants.items() if o.slot.bucket == bucket}
            out[bucket] = {
                "slots": capacity,
                "free": len(self._free[bucket]),
                "filling": sum(o.filling for o in own.values()),
                "leased": sum(o.leases > 0 for o in own.values()),
                "leases": sum(o.leases for o in own.values()),
                "pinned": len(self._pinned & own.keys()),
            }
        return out
