"""The score by which copies are kept: (seconds to bring one back x how often it is asked for) / bytes it takes.

This is GreedyDual-Size-Frequency (Cherkasova 1998, "Improving WWW proxies performance with greedy-dual-size-frequency
caching policy", HP Labs HPL-98-69) with another way of ageing: there a clock is raised to the score of each victim; here
the frequency halves every ``half_life_s``, so that age counts in seconds and does not depend on who was evicted:

    F(t) = sum over uses u of 2^-((t - u) / half_life)          score(t) = seconds F(t) / bytes

All scores decay alike, so their order changes only when a copy is used, and
``log2(seconds F(u) / bytes) + u / half_life``, u the last use, is a key that stays valid meanwhile.
"""

import dataclasses
import heapq
import math

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

    def key(self, half_life_s: float) -> float:
        """Sorts copies by score, at any time until the next use."""
        return math.log2(max(self.seconds, _LEAST_S) * max(self.frequency, 2**-60) / max(self.nbytes, 1)) + self.used_at / half_life_s


class Ranking:
    """Copies that may be evicted, by score: over all, and within a tenant. Adding and removing cost O(log n)."""

    def __init__(self) -> None:
        self._keys: dict[str, tuple[float, str]] = {}  # digest -> (key, tenant)
        self._heaps: dict[str | None, list[tuple[float, str]]] = {None: []}

    def __contains__(self, digest: str) -> bool:
        return digest in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, digest: str, tenant: str, key: float) -> None:
        """Adds a copy, or gives it another key."""
        self._keys[digest] = (key, tenant)
        for owner in (None, tenant):
            heap = self._heaps.setdefault(owner, [])
            heapq.heappush(heap, (key, digest))
            if len(heap) > 64 + 4 * len(self._keys):
                self._heaps[owner] = self._living(heap, owner)

    def remove(self, digest: str) -> None:
        """Takes a copy out (it is leased, pinned or gone); its entries in the heaps are skipped later."""
        self._keys.pop(digest, None)

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
