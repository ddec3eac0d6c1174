"""The host cache: packed adapters in host memory, one buffer per revision, within a byte budget.

Buffers stay packed; views of the tensors are made for each transfer and then dropped. Large buffers
are stored without a copy, for instance memory-mapped. A buffer that would hold more memory than its
own bytes (a small mapping, a slice of a large read) is copied.
"""

import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from mint_jax.residency.eviction_score import EvictionScore, Ranking

# A mapping takes whole pages, and one of the 65,530 mappings that a process may have.
COPY_BELOW = 1 << 20


@dataclasses.dataclass(slots=True)
class _Entry:
    buffer: np.ndarray
    score: EvictionScore
    leases: int
    ready: bool = False
    doomed: bool = False  # dropped when the last lease ends


class HostCache:
    """Packed buffers by digest. All methods may be called from any thread.

    Args:
        budget_bytes: limit on the bytes of all buffers.
        half_life_s: seconds after which a use counts half (see ``eviction_score``).
        clock: seconds, monotonic.
        on_evict: called with each evicted digest, under the cache's lock.
    """

    def __init__(
        self,
        budget_bytes: int,
        half_life_s: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
        on_evict: Callable[[str], None] = lambda digest: None,
    ):
        self.budget_bytes, self.half_life_s = budget_bytes, half_life_s
        self._clock, self._on_evict = clock, on_evict
        self._lock = threading.RLock()
        self._entries: dict[str, _Entry] = {}
        self._idle = Ranking()  # not leased
        self._bytes = self._idle_bytes = 0

    @property
    def nbytes(self) -> int:
        """Total bytes of all buffers."""
        return self._bytes

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, digest: str) -> bool:
        with self._lock:
            entry = self._entries.get(digest)
            return entry is not None and entry.ready

    def lease(self, digest: str) -> np.ndarray | None:
        """Returns the buffer, which stays until ``release``; None if it is not cached."""
        with self._lock:
            entry = self._entries.get(digest)
            if entry is None or not entry.ready:
                return None
            if not entry.leases:
                self._idle.remove(digest)
                self._idle_bytes -= entry.score.nbytes
            entry.leases += 1
            entry.doomed = False
            entry.score.use(self._clock(), self.half_life_s)
            return entry.buffer

    def release(self, digest: str) -> None:
        """Ends a lease."""
        with self._lock:
            entry = self._entries[digest]
            assert entry.leases > 0, f"{digest} has no lease"
            entry.leases -= 1
            if entry.doomed and not entry.leases:
                self._remove(digest)
            elif not entry.leases:
                self._idle.add(digest, entry.score.value)
                self._idle_bytes += entry.score.nbytes

    def reserve(self, digest: str, buffer: np.ndarray) -> np.ndarray | None:
        """Stores a fetched buffer, leased but not yet visible; evicts others for it. ``confirm`` or
        ``discard`` must follow.

        Returns:
            The stored buffer; None, with nothing evicted, if leased copies leave too little room or
            if it is cached already.
        """
        n = buffer.nbytes
        with self._lock:
            if digest in self._entries or self._bytes - self._idle_bytes + n > self.budget_bytes:
                return None
            while self._bytes + n > self.budget_bytes:
                victim = self._idle.pop()
                assert victim is not None, "the bytes of idle copies were counted wrongly"
                self._idle_bytes -= self._entries[victim].score.nbytes
                self._remove(victim)
                self._on_evict(victim)
            kept = _compact(buffer)
            score = EvictionScore(n, 0.0, 1.0, self._clock())
            self._entries[digest] = _Entry(kept, score, leases=1)
            self._bytes += n
            return kept

    def confirm(self, digest: str, seconds: float) -> None:
        """Makes a reserved buffer visible after verification; ``seconds`` is the time it took to
        load.
        """
        with self._lock:
            entry = self._entries[digest]
            entry.ready = True
            entry.score.seconds = seconds

    def discard(self, digest: str) -> None:
        """Removes a reserved buffer that failed verification."""
        with self._lock:
            assert not self._entries[digest].ready, f"{digest} is confirmed: release it"
            self._remove(digest)

    def drop(self, digest: str) -> bool:
        """Removes a revision; a leased one when its last lease ends. Returns True if it is removed
        now.
        """
        with self._lock:
            entry = self._entries.get(digest)
            if entry is not None and entry.leases:
                entry.doomed = True
            elif entry is not None:
                self._idle.remove(digest)
                self._idle_bytes -= entry.score.nbytes
                self._remove(digest)
            return digest not in self._entries

    def state(self) -> dict[str, Any]:
        """Returns current counts and bytes."""
        with self._lock:
            return {
                "bytes": self._bytes,
                "budget_bytes": self.budget_bytes,
                "entries": len(self._entries),
                "leased": sum(entry.leases > 0 for entry in self._entries.values()),
            }

    def _remove(self, digest: str) -> None:
        self._bytes -= self._entries.pop(digest).score.nbytes


def _compact(buffer: np.ndarray) -> np.ndarray:
    """Returns the buffer, or a copy if it would hold more memory than it has bytes."""
    owner = buffer
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    if owner.base is None:
        wasteful = owner.nbytes > 1.1 * buffer.nbytes
    elif isinstance(owner.base, bytes | bytearray | memoryview):
        wasteful = memoryview(owner.base).nbytes > 1.1 * buffer.nbytes
    else:  # a mapping: unread pages cost nothing
        wasteful = buffer.nbytes < COPY_BELOW
    if wasteful:
        buffer = buffer.copy()
        buffer.flags.writeable = False
    return buffer
