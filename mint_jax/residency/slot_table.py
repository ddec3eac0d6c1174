"""Assignment of device slots to revisions: leases and eviction. Plain Python, no arrays.

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


@dataclasses.dataclass(slots=True)
class _Occupant:
    slot: Slot
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
        half_life_s: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
        on_evict: Callable[[str], None] = lambda digest: None,
    ):
        self.capacities, self.half_life_s = dict(capacities), half_life_s
        self._slot_bytes, self._clock, self._on_evict = slot_bytes, clock, on_evict
        self._free = {bucket: list(range(n))[::-1] for bucket, n in capacities.items()}
        self._occupants: dict[str, _Occupant] = {}
        self._idle = {bucket: Ranking() for bucket in capacities}

    def find(self, digest: str) -> Slot | None:
        """Returns the slot in which a revision is resident; None if it is not."""
        occupant = self._occupants.get(digest)
        return None if occupant is None or occupant.filling else occupant.slot

    def lease(self, digest: str) -> Slot | None:
        """Leases a resident revision's slot until ``release``; None if it is not resident."""
        if (slot := self.find(digest)) is not None:
            occupant = self._occupants[digest]
            self._idle[slot.bucket].remove(digest)
            occupant.leases += 1
            occupant.doomed = False
            occupant.score.use(self._clock(), self.half_life_s)
        return slot

    def release(self, digest: str) -> bool:
        """Ends a lease; returns True if the slot can now be reassigned."""
        occupant = self._occupants[digest]
        assert occupant.leases > 0, f"{digest} has no lease"
        occupant.leases -= 1
        if occupant.doomed and not occupant.leases:
            self._clear(digest)
        elif not occupant.leases:
            self._idle[occupant.slot.bucket].add(digest, occupant.score.value)
        return not occupant.leases

    def reserve(self, bucket: int, digest: str, evict: bool = True) -> Slot | None:
        """Reserves a slot for a revision: a free one, or the one with the lowest score among those
        without lease. ``fill`` or ``abandon`` must follow.

        Returns:
            None if a lease must end first, or, without ``evict``, if none is free.

        Raises:
            UserError: the bucket has no slots.
        """
        assert digest not in self._occupants, f"{digest} has a slot"
        if not self.capacities.get(bucket):
            have = ", ".join(str(b) for b, n in sorted(self.capacities.items()) if n) or "none"
            raise UserError(
                f"an adapter of rank bucket {bucket} needs a slot, and there are slots for {have}:"
                " configure slots for this bucket"
            )
        if not self._free[bucket]:
            if not evict or (victim := self._idle[bucket].pop()) is None:
                return None
            self._clear(victim)
            self._on_evict(victim)
        slot = Slot(bucket, self._free[bucket].pop())
        score = EvictionScore(self._slot_bytes[bucket], 0.0, 1.0, self._clock())
        self._occupants[digest] = _Occupant(slot, score)
        return slot

    def fill(self, digest: str, seconds: float, modules: int = 0) -> None:
        """Marks a reserved slot as resident with ``modules`` modules; ``seconds`` is the time that
        loading took.
        """
        occupant = self._occupants[digest]
        occupant.filling, occupant.modules = False, modules
        occupant.score.seconds = seconds
        self._idle[occupant.slot.bucket].add(digest, occupant.score.value)

    def abandon(self, digest: str) -> None:
        """Frees a reserved slot after its load failed."""
        assert self._occupants[digest].filling, f"{digest} is resident"
        self._clear(digest)

    def modules(self, digest: str) -> int:
        """Returns the number of modules that a resident revision binds to."""
        return self._occupants[digest].modules

    def drop(self, digest: str) -> bool:
        """Clears a revision's slot; a leased one when its last lease ends. Returns True if it is
        cleared now.
        """
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
            own = [o for o in self._occupants.values() if o.slot.bucket == bucket]
            out[bucket] = {
                "slots": capacity,
                "free": len(self._free[bucket]),
                "filling": sum(o.filling for o in own),
                "leased": sum(o.leases > 0 for o in own),
                "leases": sum(o.leases for o in own),
            }
        return out
