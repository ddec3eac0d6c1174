"""Copies of revisions in one tier, host memory or the slots of a rank bucket: leases and evictions.

The victim is the copy without leases that has the lowest key. A use sets its copy's key to the
tier's clock plus (seconds to load again x frequency of use) / size, and the clock rises to the key
of each victim, so copies age as others are evicted: GreedyDual-Size-Frequency (Cherkasova 1998, HP
Labs HPL-98-69), with a frequency that also halves every ``half_life_s``.
"""

import dataclasses
import heapq
import threading
import time
from collections.abc import Callable
from typing import Any

_LEAST_S = 1e-6  # minimum cost of a load, even if measured as 0 s


@dataclasses.dataclass(slots=True)
class Copy:
    """One copy: ``value`` is packed bytes in host memory, or the slot; ``size`` is in the unit of
    the tier's capacity.

    Attributes:
        frequency: F at ``used_at``, the time of its last use.
        seconds: time to load it again.
        leases: uses that have not ended, the loader's included.
        ready: it can be leased.
        key: eviction key; None while leased.
    """

    value: Any
    size: int
    used_at: float
    frequency: float = 1.0
    seconds: float = 0.0
    leases: int = 1
    ready: bool = False
    key: float | None = None


class Tier:
    """The copies of one tier by digest, of at most ``capacity``; any thread may call its methods.
    ``on_evict`` is called with each evicted digest, under the lock.
    """

    def __init__(
        self,
        capacity: int,
        half_life_s: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
        on_evict: Callable[[str], None] = lambda digest: None,
    ):
        self.capacity, self.half_life_s = capacity, half_life_s
        self._now, self._on_evict = clock, on_evict
        self._lock = threading.RLock()
        self.copies: dict[str, Copy] = {}
        self.size = self._leased_size = 0
        self._clock = 0.0  # key of the last victim
        self._heap: list[tuple[float, str]] = []  # (key, digest), with entries that are outdated

    def __contains__(self, digest: str) -> bool:
        with self._lock:
            return digest in self.copies and self.copies[digest].ready

    def reserve(self, digest: str, size: int, evict: bool = True) -> Copy | None:
        """Adds a copy that its loader leases, and evicts others for it if ``evict``; ``confirm``
        and ``release``, or ``discard``, must follow. Returns None if there is no room, or a copy.
        """
        with self._lock:
            kept = self._leased_size if evict else self.size
            if digest in self.copies or kept + size > self.capacity:
                return None
            while self.size + size > self.capacity:
                self._evict()
            copy = self.copies[digest] = Copy(None, size, self._now())
            self.size += size
            self._leased_size += size
            return copy

    def confirm(self, digest: str, seconds: float) -> None:
        """Makes a reserved copy visible; ``seconds`` is the time that loading took."""
        with self._lock:
            copy = self.copies[digest]
            copy.ready, copy.seconds = True, seconds

    def discard(self, digest: str) -> None:
        with self._lock:
            copy = self.copies[digest]
            assert not copy.ready, f"{digest} is confirmed: release it"
            self._leased_size -= copy.size
            self._remove(digest)

    def lease(self, digest: str) -> Copy | None:
        """Returns a copy, which stays until ``release``; None if the digest has no copy yet."""
        with self._lock:
            copy = self.copies.get(digest)
            if copy is None or not copy.ready:
                return None
            if not copy.leases:
                copy.key = None
                self._leased_size += copy.size
            copy.leases += 1
            now = self._now()
            idle = max(0.0, now - copy.used_at)
            copy.frequency = copy.frequency * 2.0 ** -(idle / self.half_life_s) + 1.0
            copy.used_at = max(now, copy.used_at)
            return copy

    def release(self, digest: str) -> bool:
        """Ends a lease; returns True if it was the last."""
        with self._lock:
            copy = self.copies[digest]
            assert copy.leases > 0, f"{digest} has no lease"
            copy.leases -= 1
            if copy.leases:
                return False
            self._leased_size -= copy.size
            score = max(copy.seconds, _LEAST_S) * copy.frequency / max(copy.size, 1)
            copy.key = self._clock + score
            heapq.heappush(self._heap, (copy.key, digest))
            if len(self._heap) > 64 + 4 * len(self.copies):
                self._heap = [(c.key, d) for d, c in self.copies.items() if c.key is not None]
                heapq.heapify(self._heap)
            return True

    def state(self) -> dict[str, int]:
        with self._lock:
            copies = self.copies.values()
            return {
                "filling": sum(not copy.ready for copy in copies),
                "leased": sum(copy.ready and copy.leases > 0 for copy in copies),
                "leases": sum(copy.leases for copy in copies if copy.ready),
            }

    def resident(self) -> list[str]:
        """Returns the digests of the copies that can be leased."""
        with self._lock:
            return [digest for digest, copy in self.copies.items() if copy.ready]

    def _evict(self) -> None:
        while True:
            key, digest = heapq.heappop(self._heap)
            if digest in self.copies and self.copies[digest].key == key:
                self._clock = key
                self._remove(digest)
                self._on_evict(digest)
                return

    def _remove(self, digest: str) -> None:
        self.size -= self.copies.pop(digest).size
