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
from mint_jax.residency.quotas import ResidencyQuotas, Use, within

# A mapping takes whole pages, and one of the 65,530 mappings that a process may have.
COPY_BELOW = 1 << 20


@dataclasses.dataclass(slots=True)
class _Entry:
    buffer: np.ndarray
    tenant: str
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
        quotas: ResidencyQuotas | None = None,
        half_life_s: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
        on_evict: Callable[[str], None] | None = None,
    ):
        self.budget_bytes, self.half_life_s = budget_bytes, half_life_s
        self._quotas, self._clock, self._on_evict = quotas or ResidencyQuotas(), clock, on_evict
        self._lock = threading.RLock()
        self._entries: dict[str, _Entry] = {}
        self._pinned: set[str] = set()
        self._idle = Ranking()  # neither leased nor pinned
        self._use, self._idle_use = Use(), Use()
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
            self._unrank(digest, entry)
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
            else:
                self._rank(digest, entry)

    def reserve(self, digest: str, buffer: np.ndarray, tenant: str) -> np.ndarray | None:
        """Stores a fetched buffer, leased but not yet visible; ``confirm`` or ``discard`` must
        follow.

        Evicts others for it, of the same tenant if its quota requires that.

        Returns:
            The stored buffer; None if it cannot be stored, because every other copy is leased or
            pinned, or because it is cached already.
        """
        n = buffer.nbytes
        with self._lock:
            if digest in self._entries or not self._make_room(n, tenant):
                return None
            kept = _compact(buffer)
            self._entries[digest] = _Entry(
                kept, tenant, EvictionScore(n, 0.0, 1.0, self._clock()), leases=1
            )
            self._bytes += n
            self._use.add(tenant, n)
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

    def pin(self, digest: str) -> None:
        """Protects a revision from eviction, now or once it is cached."""
        with self._lock:
            self._pinned.add(digest)
            if entry := self._entries.get(digest):
                self._unrank(digest, entry)

    def unpin(self, digest: str) -> None:
        """Removes a pin, if there is one."""
        with self._lock:
            self._pinned.discard(digest)
            if entry := self._entries.get(digest):
                self._rank(digest, entry)

    def drop(self, digest: str) -> bool:
        """Removes a revision, pinned or not; a leased one when its last lease ends. Returns True if
        it is removed now.
        """
        with self._lock:
            self._pinned.discard(digest)
            entry = self._entries.get(digest)
            if entry is not None and entry.leases:
                entry.doomed = True
            elif entry is not None:
                self._unrank(digest, entry)
                self._remove(digest)
            return digest not in self._entries

    def state(self) -> dict[str, Any]:
        """Returns current counts and bytes."""
        with self._lock:
            leased = sum(1 for entry in self._entries.values() if entry.leases)
            return {
                "bytes": self._bytes,
                "budget_bytes": self.budget_bytes,
                "entries": len(self._entries),
                "leased": leased,
                "pinned": len(self._pinned & self._entries.keys()),
            }

    def _make_room(self, n: int, tenant: str) -> bool:
        """Evicts enough for ``n`` bytes and returns True; else evicts nothing."""
        quota, used, idle = self._quotas.of(tenant), self._use, self._idle_use
        in_use = (
            used.entries(tenant) - idle.entries(tenant) + 1,
            used.bytes(tenant) - idle.bytes(tenant) + n,
        )
        if not (within(in_use[0], quota.host_entries) and within(in_use[1], quota.host_bytes)):
            return False
        if self._bytes - self._idle_bytes + n > self.budget_bytes:
            return False
        while not (
            within(used.entries(tenant) + 1, quota.host_entries)
            and within(used.bytes(tenant) + n, quota.host_bytes)
        ):
            self._evict(self._idle.lowest(tenant))
        while self._bytes + n > self.budget_bytes:
            self._evict(self._idle.lowest())
        return True

    def _evict(self, digest: str | None) -> None:
        assert digest is not None, "the bytes of idle copies were counted wrongly"
        self._unrank(digest, self._entries[digest], evicted=True)
        self._remove(digest)
        if self._on_evict is not None:
            self._on_evict(digest)

    def _remove(self, digest: str) -> None:
        entry = self._entries.pop(digest)
        self._bytes -= entry.score.nbytes
        self._use.add(entry.tenant, -entry.score.nbytes, -1)

    def _rank(self, digest: str, entry: _Entry) -> None:
        """Makes a copy evictable, unless it is leased or pinned."""
        if not entry.leases and digest not in self._pinned and digest not in self._idle:
            self._idle.add(digest, entry.tenant, entry.score.value)
            self._idle_bytes += entry.score.nbytes
            self._idle_use.add(entry.tenant, entry.score.nbytes)

    def _unrank(self, digest: str, entry: _Entry, evicted: bool = False) -> None:
        """Removes a copy from the evictable ones."""
        if digest in self._idle:
            (self._idle.evict if evicted else self._idle.remove)(digest)
            self._idle_bytes -= entry.score.nbytes
            self._idle_use.add(entry.tenant, -entry.score.nbytes, -1)


def _compact(buffer: np.ndarray) -> np.ndarray:
    """Returns the buffer, or a copy if it would hold more memory than it has bytes."""
    owner = buffer
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    if owner.base is None or isinstance(owner.base, bytes | bytearray | memoryview):
        wasteful = (
            owner.nbytes if owner.base is None else memoryview(owner.base).nbytes
        ) > 1.1 * buffer.nbytes
    else:  # a mapping: unread pages cost nothing
        wasteful = buffer.nbytes < COPY_BELOW
    if wasteful:
        buffer = buffer.copy()
        buffer.flags.writeable = False
    return buffer
