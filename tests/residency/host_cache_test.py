"""The host cache: budget, scores and leases; against a model, from many threads, and in bytes of
memory.
"""

import threading

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mint_jax.residency.host_cache import HostCache
from tests.residency.clock import Clock


def put(cache, digest, n, seconds=1.0) -> bool:
    if cache.reserve(digest, np.zeros(n, np.uint8)) is None:
        return False
    cache.confirm(digest, seconds)
    cache.release(digest)
    return True


def test_the_lowest_score_is_evicted_first():
    """Seconds to load again per byte; frequency halves with time and yields to the clock."""
    cache = HostCache(100, clock=Clock())
    for name, n, seconds in (("x", 40, 4.0), ("y", 40, 2.0), ("z", 20, 1.5)):
        put(cache, name, n, seconds)
    assert put(cache, "n", 30)
    assert [name for name in "xyzn" if name in cache] == ["x", "z", "n"]
    assert cache.nbytes == 90
    clock, evicted = Clock(), []
    cache = HostCache(2, half_life_s=10.0, clock=clock, on_evict=evicted.append)
    put(cache, "x", 1)
    for wait in (*[0] * 7, 10):  # frequency 8 / 2 + 1 at the end
        clock.advance(wait)
        cache.lease("x")
        cache.release("x")
    for k in range(6):
        put(cache, f"y{k}", 1)  # each 1 above the one before, which it evicts
    assert evicted == ["y0", "y1", "y2", "y3", "x"]


def test_a_buffer_keeps_no_more_memory_than_its_bytes(tmp_path, rng):
    """Slices of large reads and small mappings are copied; large mappings are not."""
    data = rng.integers(0, 256, 3 << 20, dtype=np.uint8)
    file = tmp_path / "pack"
    data.tofile(file)
    mapped = np.memmap(file, np.uint8, "r")
    cache = HostCache(1 << 30)
    for name, buffer, copied in [
        ("slice", data[100:5000], True),
        ("bytes", np.frombuffer(data.tobytes(), np.uint8)[7:999], True),
        ("whole", np.frombuffer(data.tobytes(), np.uint8), False),
        ("small map", mapped[4096:8192], True),
        ("large map", mapped[4096 : 2 << 20], False),
        ("array of the map", np.asarray(mapped)[4096 : 2 << 20], False),
    ]:
        kept = cache.reserve(name, buffer)
        assert np.array_equal(kept, buffer), name
        assert (not np.shares_memory(kept, buffer)) == copied, name


class Against(RuleBasedStateMachine):
    """Random use against a plain model: what is kept, what must never happen."""

    @initialize(budget=st.integers(1, 30))
    def start(self, budget):
        self.clock, self.evicted = Clock(), []
        self.cache = HostCache(budget, 10.0, self.clock, self.evicted.append)
        self.cached: dict[str, int] = {}  # digest -> bytes
        self.leases: dict[str, int] = {}
        self.doomed: set[str] = set()

    @rule(name=st.integers(0, 7), n=st.integers(1, 12), s=st.floats(0.1, 5), good=st.booleans())
    def put(self, name, n, s, good):
        digest = f"d{name}"
        leased = sum(self.cached[d] for d, count in self.leases.items() if count)
        possible = digest not in self.cached and leased + n <= self.cache.budget_bytes
        kept = self.cache.reserve(digest, np.zeros(n, np.uint8))
        for victim in self.evicted:
            assert not self.leases.get(victim)
            del self.cached[victim]
        assert (kept is not None) == possible
        assert possible or not self.evicted
        self.evicted.clear()
        if kept is not None:
            assert digest not in self.cache
            assert self.cache.lease(digest) is None, "not confirmed"
            if good:
                self.cache.confirm(digest, s)
                self.cache.release(digest)
                self.cached[digest] = n
            else:
                self.cache.discard(digest)

    @rule(name=st.integers(0, 7))
    def lease(self, name):
        digest = f"d{name}"
        found = self.cache.lease(digest)
        assert (found is not None) == (digest in self.cached)
        if found is not None:
            assert found.nbytes == self.cached[digest]
            self.leases[digest] = self.leases.get(digest, 0) + 1
            self.doomed.discard(digest)

    @rule(name=st.integers(0, 7))
    def release(self, name):
        digest = f"d{name}"
        if self.leases.get(digest):
            self.cache.release(digest)
            self.leases[digest] -= 1
            if digest in self.doomed and not self.leases[digest]:
                self.doomed.remove(digest)
                del self.cached[digest]

    @rule(name=st.integers(0, 7))
    def drop(self, name):
        digest = f"d{name}"
        leased = bool(self.leases.get(digest))
        assert self.cache.drop(digest) != leased
        if leased:
            self.doomed.add(digest)
        else:
            self.cached.pop(digest, None)

    @rule(seconds=st.floats(0, 30))
    def wait(self, seconds):
        self.clock.advance(seconds)

    @invariant()
    def counts_agree(self):
        assert self.cache.nbytes == sum(self.cached.values()) <= self.cache.budget_bytes
        assert {f"d{i}" for i in range(8) if f"d{i}" in self.cache} == self.cached.keys()
        assert self.cache.state()["leased"] == sum(bool(n) for n in self.leases.values())


Against.TestCase.settings = settings(max_examples=40, stateful_step_count=40)
TestAgainstAModel = Against.TestCase


def test_threads_never_exceed_the_budget_or_lose_a_lease(rng):
    cache, wrong, seeds = HostCache(40), [], rng.integers(2**31, size=6)

    def use(seed):
        mine = np.random.default_rng(seed)
        for _ in range(400):
            i = int(mine.integers(12))
            digest = f"d{i}"
            if (buffer := cache.lease(digest)) is None:
                buffer = cache.reserve(digest, np.full(i + 1, i, np.uint8))
                if buffer is None:
                    continue
                cache.confirm(digest, 1.0)
            if cache.nbytes > 40 or (buffer != i).any() or digest not in cache:
                wrong.append(digest)
            cache.release(digest)

    threads = [threading.Thread(target=use, args=(seed,)) for seed in seeds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert cache.state()["leased"] == 0
    assert cache.nbytes == sum(i + 1 for i in range(12) if f"d{i}" in cache)
    with pytest.raises((AssertionError, KeyError)):
        cache.release("d0")
