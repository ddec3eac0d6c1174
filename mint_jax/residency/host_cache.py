"""The host cache: packed adapters in host memory, one buffer a revision, within a budget of bytes.

Nothing is unpacked here: the views of the tensors are made at each transfer and forgotten after it.
Large buffers are kept as they come, memory-mapped for instance; what would hold more memory than
its own bytes (a small mapping, a slice of a large read) is copied.
"""

import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from mint_jax.residency.eviction_score import EvictionScore, Ranking
from mint_jax.residency.quotas import Quotas, Use, within

# a mapping costs the kernel whole pages and one of the 65,530 that a process may have
COPY_BELOW = 1 << 20


@dataclasses.dataclass(slots=True)
class _Entry:
    buffer: np.ndarray
    tenant: str
    score: EvictionScore
    leases: int
    ready: bool = False
    doomed: bool = False  # to be dropped when the last lease ends


class HostCache:
    """Packed buffers by digest. All methods may be called from any thread.

    Args:
        budget_bytes: the buffers take no more.
        half_life_s: after so long a use counts half (see ``eviction_score``).
        clock: seconds, monotonic.
        on_evict: called with each digest that was evicted, under the cache's lock.
    """

    def __init__(
        self,
        budget_bytes: int,
        quotas: Quotas | None = None,
        half_life_s: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
        on_evict: Callable[[str], None] | None = None,
    ):
        self.budget_bytes, self.half_life_s = budget_bytes, half_life_s
        self._quotas, self._clock, self._on_evict = quotas or Quotas(), clock, on_evict
        self._lock = threading.RLock()
        self._entries: dict[str, _Entry] = {}
        self._pinned: set[str] = set()
        self._idle = Ranking()  # neither leased nor pinned
        self._use, self._idle_use = Use(), Use()
        self._bytes = self._idle_bytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return self._bytes

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, digest: str) -> bool:
        with self._lock:
            entry = self._entries.get(digest)
            return entry is not None and entry.ready

    def lease(self, digest: str) -> np.ndarray | None:
        """The buffer, which stays until ``release``; None when it is not here."""
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
        """Takes in a buffer that was just fetched, leased and not yet to be seen: ``confirm`` or
        ``discard`` must follow.

        Others are evicted for it, those of the same tenant where its quota demands that.

        Returns:
            The buffer as it is kept; None when it cannot be kept, because all that could go is
            leased or pinned, or it is here already.
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
        """Makes a reserved buffer visible: it is verified. ``seconds`` is what bringing it here
        took.
        """
        with self._lock:
            entry = self._entries[digest]
            entry.ready = True
            entry.score.seconds = seconds

    def discard(self, digest: str) -> None:
        """Takes a reserved buffer out again: it is not what it should be."""
        with self._lock:
            assert not self._entries[digest].ready, f"{digest} is confirmed: release it"
            self._remove(digest)

    def pin(self, digest: str) -> None:
        """Keeps a revision from being evicted, now or once it is here."""
        with self._lock:
            self._pinned.add(digest)
            if entry := self._entries.get(digest):
                self._unrank(digest, entry)

    def unpin(self, digest: str) -> None:
        """Takes a pin away; none is no error."""
        with self._lock:
            self._pinned.discard(digest)
            if entry := self._entries.get(digest):
                self._rank(digest, entry)

    def drop(self, digest: str) -> bool:
        """Removes a revision, pinned or not; a leased one goes when its last lease ends. Whether it
        is gone now.
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
        """Counts and bytes now."""
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
        """Evicts what must go; evicts nothing where that would not be enough."""
        quota, used, idle = self._quotas.of(tenant), self._use, self._idle_use
        held = (
            used.entries(tenant) - idle.entries(tenant) + 1,
            used.bytes(tenant) - idle.bytes(tenant) + n,
        )
        if not (within(held[0], quota.host_entries) and within(held[1], quota.host_bytes)):
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
        assert digest is not None, "what is idle was counted wrongly"
        self._unrank(digest, self._entries[digest], evicted=True)
        self._remove(digest)
        if self._on_evict is not None:
            self._on_evict(digest)

    def _remove(self, digest: str) -> None:
        entry = self._entries.pop(digest)
        self._bytes -= entry.score.nbytes
        self._use.add(entry.tenant, -entry.score.nbytes, -1)

    def _rank(self, digest: str, entry: _Entry) -> None:
        """Lets a copy be evicted, if nothing keeps it."""
        if not entry.leases and digest not in self._pinned and digest not in self._idle:
            self._idle.add(digest, entry.tenant, entry.score.value)
            self._idle_bytes += entry.score.nbytes
            self._idle_use.add(entry.tenant, entry.score.nbytes)

    def _unrank(self, digest: str, entry: _Entry, evicted: bool = False) -> None:
        """Keeps a copy from being evicted, or evicts it."""
        if digest in self._idle:
            (self._idle.evict if evicted else self._idle.remove)(digest)
            self._idle_bytes -= entry.score.nbytes
            self._idle_use.add(entry.tenant, -entry.score.nbytes, -1)


def _compact(buffer: np.ndarray) -> np.ndarray:
    """The buffer, or a copy where keeping it would keep more memory than it has bytes."""
    owner = buffer
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    if owner.base is None or isinstance(owner.base, bytes | bytearray | memoryview):
        wasteful = (
            owner.nbytes if owner.base is None else memoryview(owner.base).nbytes
        ) > 1.1 * buffer.nbytes
    else:  # a mapping: pages that are not read cost nothing
        wasteful = buffer.nbytes < COPY_BELOW
    if wasteful:
        buffer = buffer.copy()
        buffer.flags.writeable = False
    return buffer
