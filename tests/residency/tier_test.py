"""Copies of a tier: order of eviction, leases and capacity, against a model and in threads."""

import threading
from types import SimpleNamespace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from benchmarks import hot_set, traffic
from mint_jax.residency.tier import Tier
from tests.residency.clock import Clock


def put(tier, digest, size=1, seconds=1.0) -> bool:
    if tier.reserve(digest, size) is None:
        return False
    tier.confirm(digest, seconds)
    tier.release(digest)
    return True


def test_the_lowest_score_is_evicted_first():
    """Seconds to load again per size; frequency halves with time and yields to the clock."""
    tier = Tier(100, clock=Clock())
    for name, n, seconds in (("x", 40, 4.0), ("y", 40, 2.0), ("z", 20, 1.5)):
        put(tier, name, n, seconds)
    assert put(tier, "n", 30)
    assert [name for name in "xyzn" if name in tier] == ["x", "z", "n"]
    assert tier.size == 90
    assert tier.reserve("m", 20, evict=False) is None
    clock, evicted = Clock(), []
    tier = Tier(2, half_life_s=10.0, clock=clock, on_evict=evicted.append)
    put(tier, "x")
    for wait in (*[0] * 7, 10):  # frequency 8 / 2 + 1 at the end
        clock.advance(wait)
        tier.lease("x")
        tier.release("x")
    for k in range(6):
        put(tier, f"y{k}")  # each 1 above the one before, which it evicts
    assert evicted == ["y0", "y1", "y2", "y3", "x"]


def test_hit_rates_under_bursts_and_zipf(rng):
    """Near LRU, the better policy for bursts, and above it under Zipf's law."""
    config = SimpleNamespace(names=100_000, zipf=1.0, request_s=0.01, half_life_s=600.0)
    rates = {}
    for kind in ("bursts", "zipf"):
        trace = traffic.draws(kind, config.names, 20_000, config.zipf, rng).tolist()
        rates[kind] = hot_set.slots(trace, 128, config) / hot_set.lru(trace, 128, config)
    assert rates["bursts"] > 0.85
    assert rates["zipf"] > 1.05


class Against(RuleBasedStateMachine):
    """Random use against a plain model: what is kept, what must never happen."""

    @initialize(capacity=st.integers(1, 30))
    def start(self, capacity):
        self.clock, self.evicted = Clock(), []
        self.tier = Tier(capacity, 10.0, self.clock, self.evicted.append)
        self.copies: dict[str, int] = {}  # digest -> size
        self.leases: dict[str, int] = {}
        self.filling: set[str] = set()
        self.doomed: set[str] = set()

    @rule(name=st.integers(0, 7), n=st.integers(1, 12), evict=st.booleans())
    def reserve(self, name, n, evict):
        digest = f"d{name}"
        kept = sum(size for d, size in self.copies.items() if self.leases.get(d) or not evict)
        possible = digest not in self.copies and kept + n <= self.tier.capacity
        copy = self.tier.reserve(digest, n, evict)
        assert (copy is not None) == possible
        assert (possible and evict) or not self.evicted
        for victim in self.evicted:
            assert not self.leases.get(victim)
            del self.copies[victim]
        self.evicted.clear()
        if copy is not None:
            self.copies[digest], self.leases[digest] = n, 1
            self.filling.add(digest)

    @rule(name=st.integers(0, 7), s=st.floats(0, 5), good=st.booleans())
    def end_filling(self, name, s, good):
        digest = f"d{name}"
        if digest in self.filling:
            assert digest not in self.tier
            assert self.tier.lease(digest) is None, "not confirmed"
            self.filling.remove(digest)
            if good:
                self.tier.confirm(digest, s)
            else:
                self.tier.discard(digest)
                self.doomed.discard(digest)
                del self.copies[digest], self.leases[digest]

    @rule(name=st.integers(0, 7))
    def lease(self, name):
        digest = f"d{name}"
        copy = self.tier.lease(digest)
        assert (copy is not None) == (digest in self.copies and digest not in self.filling)
        if copy is not None:
            self.leases[digest] = self.leases.get(digest, 0) + 1
            self.doomed.discard(digest)

    @rule(name=st.integers(0, 7))
    def release(self, name):
        digest = f"d{name}"
        if self.leases.get(digest) and digest not in self.filling:
            self.leases[digest] -= 1
            assert self.tier.release(digest) == (not self.leases[digest])
            if digest in self.doomed and not self.leases[digest]:
                self.doomed.remove(digest)
                del self.copies[digest]

    @rule(name=st.integers(0, 7))
    def drop(self, name):
        digest = f"d{name}"
        leased = bool(self.leases.get(digest))
        assert self.tier.drop(digest) != leased
        if leased:
            self.doomed.add(digest)
        else:
            self.copies.pop(digest, None)

    @rule(seconds=st.floats(-3, 30))
    def wait(self, seconds):
        self.clock.advance(seconds)

    @invariant()
    def counts_agree(self):
        assert self.tier.size == sum(self.copies.values()) <= self.tier.capacity
        assert set(self.tier.resident()) == self.copies.keys() - self.filling
        state = self.tier.state()
        assert state["filling"] == len(self.filling)
        assert state["leases"] == sum(n for d, n in self.leases.items() if d not in self.filling)


Against.TestCase.settings = settings(max_examples=40, stateful_step_count=40)
TestAgainstAModel = Against.TestCase


def test_threads_never_exceed_the_capacity_or_lose_a_lease(rng):
    tier, wrong, seeds = Tier(40), [], rng.integers(2**31, size=6)

    def use(seed):
        mine = np.random.default_rng(seed)
        for _ in range(400):
            i = int(mine.integers(12))
            digest = f"d{i}"
            if (copy := tier.lease(digest)) is None:
                if (copy := tier.reserve(digest, i + 1)) is None:
                    continue
                copy.value = i
                tier.confirm(digest, 1.0)
            if tier.size > 40 or copy.value != i or digest not in tier:
                wrong.append(digest)
            tier.release(digest)

    threads = [threading.Thread(target=use, args=(seed,)) for seed in seeds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert tier.state()["leases"] == 0
    assert tier.size == sum(i + 1 for i in range(12) if f"d{i}" in tier)
    with pytest.raises((AssertionError, KeyError)):
        tier.release("d0")
