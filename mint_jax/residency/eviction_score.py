"""The score by which copies are kept: (seconds to bring one back x how often it is asked for) /
bytes it takes, and a clock.

This is GreedyDual-Size-Frequency (Cherkasova 1998, "Improving WWW proxies performance with
greedy-dual-size-frequency caching policy", HP Labs HPL-98-69). The score of a use u is added to the
clock of that moment, and the clock is raised to what each victim had: so copies age by what others
are evicted after them. The frequency also halves every ``half_life_s``:

    F(u) = sum over uses v up to u of 2^-((u - v) / half_life)          key = clock(u) + seconds
    F(u) / bytes

Without the clock, by time alone, a session that ended kept its slot for minutes while new ones
evicted each other: 64 slots under bursts of 32 requests hit 0.03 of them, and 0.73 with it (LRU
0.91; under Zipf's law 0.37, 0.32 and 0.25: ``configs/bench/hot_set.py``).
"""

import dataclasses
import heapq

_LEAST_S = 1e-6  # a load measured as 0 s still costs something


@dataclasses.dataclass(slots=True)
class EvictionScore:
    """The score of one copy.

    Attributes:
        nbytes: what it takes.
        seconds: what bringing it back takes.
        frequency: F at the last use.
        used_at: that use, in seconds of the cache's clock.
    """

    nbytes: int
    seconds: float
    frequency: float
    used_at: float

    def use(self, now: float, half_life_s: float) -> None:
        """Counts a use."""
        idle = max(0.0, now - self.used_at)
        self.frequency = self.frequency * 2.0 ** -(idle / half_life_s) + 1.0
        self.used_at = max(now, self.used_at)

    @property
    def value(self) -> float:
        """As of the last use."""
        return max(self.seconds, _LEAST_S) * self.frequency / max(self.nbytes, 1)


class Ranking:
    """Copies that may be evicted, by score: over all, and within a tenant. Adding and removing cost
    O(log n).

    Attributes:
        clock: the key of the last victim.
    """

    def __init__(self) -> None:
        self.clock = 0.0
        self._keys: dict[str, tuple[float, str]] = {}  # digest -> (key, tenant)
        self._heaps: dict[str | None, list[tuple[float, str]]] = {None: []}

    def __contains__(self, digest: str) -> bool:
        return digest in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, digest: str, tenant: str, value: float) -> None:
        """Adds a copy that was just used, or gives it another score."""
        key = self.clock + value
        self._keys[digest] = (key, tenant)
        for owner in (None, tenant):
            heap = self._heaps.setdefault(owner, [])
            heapq.heappush(heap, (key, digest))
            if len(heap) > 64 + 4 * len(self._keys):
                self._heaps[owner] = self._living(heap, owner)

    def remove(self, digest: str) -> None:
        """Takes a copy out (it is leased, pinned or gone); its entries in the heaps are skipped
        later.
        """
        self._keys.pop(digest, None)

    def evict(self, digest: str) -> None:
        """Takes a victim out, whose key the clock is from now on. That of a tenant's own, which
        goes for its quota, may be above others' keys, and says nothing of their age.
        """
        key, _ = self._keys[digest]
        lowest = self.lowest()
        if lowest is not None and self._keys[lowest][0] >= key:
            self.clock = max(self.clock, key)
        self.remove(digest)

    def lowest(self, tenant: str | None = None) -> str | None:
        """The copy of the lowest score, of one tenant or of all; None when there is none."""
        heap = self._heaps.get(tenant, [])
        while heap and not self._is_current(heap[0], tenant):
            heapq.heappop(heap)
        if not heap and tenant is not None:
            self._heaps.pop(tenant, None)
        return heap[0][1] if heap else None

    def _is_current(self, entry: tuple[float, str], tenant: str | None) -> bool:
        key, owner = self._keys.get(entry[1], (None, None))
        return key == entry[0] and tenant in (None, owner)

    def _living(self, heap: list[tuple[float, str]], tenant: str | None) -> list[tuple[float, str]]:
        living = [entry for entry in set(heap) if self._is_current(entry, tenant)]
        heapq.heapify(living)
        return living
