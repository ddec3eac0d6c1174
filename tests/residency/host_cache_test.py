"""The host cache: budget, scores, leases, pins, quotas; against a model, from many threads, and in
bytes of memory.
"""

import gc
import threading
import tracemalloc

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mint_jax.residency.host_cache import HostCache
from mint_jax.residency.quotas import ResidencyQuota, ResidencyQuotas
from tests.residency.clock import Clock


def put(cache, digest, n, tenant="a", seconds=1.0) -> bool:
    if cache.reserve(digest, np.zeros(n, np.uint8), tenant) is None:
        return False
    cache.confirm(digest, seconds)
    cache.release(digest)
    return True


def held(cache, names) -> str:
    return "".join(name for name in names if name in cache)


def touch(cache, digest) -> None:
    cache.lease(digest)
    cache.release(digest)


def test_the_cheapest_to_bring_back_per_byte_goes_first():
    cache = HostCache(100, clock=Clock())
    put(cache, "x", 40, seconds=4.0)  # 0.1 s a byte
    put(cache, "y", 40, seconds=2.0)  # 0.05
    put(cache, "z", 20, seconds=1.5)  # 0.075
    assert put(cache, "n", 30)
    assert held(cache, "xyzn") == "xzn"
    assert cache.nbytes == 90


def test_frequency_outweighs_recency_until_as_many_were_evicted_and_halves_with_time():
    clock, gone = Clock(), []
    cache = HostCache(2, half_life_s=10.0, clock=clock, on_evict=gone.append)
    put(cache, "x", 1)
    for _ in range(7):
        touch(cache, "x")
    clock.advance(10)
    touch(cache, "x")  # 8 / 2 + 1
    for k in range(6):
        put(cache, f"y{k}", 1)  # 1 above the one before, which it evicts: 1 to 6
    assert gone == ["y0", "y1", "y2", "y3", "x"]


def test_what_is_leased_or_pinned_stays_and_the_new_one_is_not_kept():
    gone = []
    cache = HostCache(3, clock=Clock(), on_evict=gone.append)
    for name in "xyz":
        put(cache, name, 1)
    cache.pin("y")
    first, second = cache.lease("x"), cache.lease("x")
    assert first is second
    assert not put(cache, "big", 2), "only z may go"
    assert gone == [], "nothing goes where that would not be enough"
    assert put(cache, "n", 1)
    assert gone == ["z"]
    cache.release("x")
    assert put(cache, "m", 1)
    assert gone == ["z", "n"]
    cache.release("x")
    cache.unpin("y")
    assert put(cache, "big", 3)
    assert held(cache, "xymb") == ""


def test_a_reserved_buffer_is_seen_only_when_confirmed_and_takes_room_at_once():
    cache = HostCache(10, clock=Clock())
    cache.reserve("x", np.zeros(6, np.uint8), "a")
    assert "x" not in cache
    assert cache.lease("x") is None
    assert cache.nbytes == 6
    assert not put(cache, "y", 5), "x is on its way and stays"
    cache.discard("x")
    assert cache.nbytes == 0
    assert put(cache, "y", 5)


def test_a_quota_makes_a_tenant_evict_its_own():
    quotas = ResidencyQuotas(named={"small": ResidencyQuota(host_bytes=10, host_entries=2)})
    cache = HostCache(100, quotas, clock=Clock())
    put(cache, "others", 50, "big", seconds=1e-3)  # of the lowest score
    put(cache, "x", 4, "small")
    put(cache, "y", 4, "small", seconds=2.0)
    assert put(cache, "z", 4, "small", seconds=3.0)
    assert [name for name in ("others", "x", "y", "z") if name in cache] == ["others", "y", "z"]
    cache.pin("y")
    cache.lease("z")
    assert not put(cache, "n", 1, "small"), "its own are in use"
    assert put(cache, "n", 1, "big")
    assert not put(cache, "huge", 11, "small")


def test_a_dropped_entry_goes_when_its_last_lease_ends():
    cache = HostCache(10, clock=Clock())
    put(cache, "x", 1)
    cache.pin("x")
    cache.lease("x")
    assert not cache.drop("x")
    assert "x" in cache
    cache.release("x")
    assert "x" not in cache
    assert cache.drop("never seen")
    put(cache, "x", 1)
    assert put(cache, "y", 10), "the pin is gone with the drop"


def test_the_cache_keeps_no_more_memory_than_the_bytes_it_counts(tmp_path, rng):
    """Slices of large reads and small mappings are copied; large mappings stay as they are."""
    data = rng.integers(0, 256, 3 << 20, dtype=np.uint8)
    file = tmp_path / "pack"
    data.tofile(file)
    mapped = np.memmap(file, np.uint8, "r")
    cache = HostCache(1 << 30)
    for name, buffer, own in [
        ("slice", data[100:5000], True),
        ("bytes", np.frombuffer(data.tobytes(), np.uint8)[7:999], True),
        ("whole", np.frombuffer(data.tobytes(), np.uint8), False),
        ("small map", mapped[4096:8192], True),
        ("large map", mapped[4096 : 2 << 20], False),
        ("array of the map", np.asarray(mapped)[4096 : 2 << 20], False),
    ]:
        kept = cache.reserve(name, buffer, "a")
        assert np.array_equal(kept, buffer), name
        assert (not np.shares_memory(kept, buffer)) == own, name


def test_ten_thousand_small_entries_cost_a_tenth_more_than_their_bytes():
    size, count = 12288, 10_000  # rank 1 on a small base
    cache = HostCache(size * count)
    gc.collect()
    tracemalloc.start()
    for i in range(count):
        put(cache, f"{i:064x}", size)
    gc.collect()
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert cache.nbytes == size * count
    assert grown <= 1.1 * size * count, grown / size / count


class Against(RuleBasedStateMachine):
    """Random use against a plain model: what is kept, what must never happen."""

    @initialize(budget=st.integers(1, 30), quota=st.integers(0, 12), entries=st.integers(0, 4))
    def start(self, budget, quota, entries):
        self.clock, self.evicted = Clock(), []
        self.quota = ResidencyQuota(host_bytes=quota, host_entries=entries)
        self.cache = HostCache(
            budget, ResidencyQuotas(named={"t1": self.quota}), 10.0, self.clock, self.evicted.append
        )
        self.here: dict[str, tuple[int, str]] = {}  # digest -> bytes, tenant
        self.leases: dict[str, int] = {}
        self.pinned: set[str] = set()

    def keeps(self, digest) -> bool:
        return bool(self.leases.get(digest)) or digest in self.pinned

    @rule(
        name=st.integers(0, 7),
        n=st.integers(1, 12),
        tenant=st.sampled_from(["t0", "t1"]),
        seconds=st.floats(0.1, 5),
        good=st.booleans(),
    )
    def put(self, name, n, tenant, seconds, good):
        digest, before = f"d{name}", dict(self.here)
        kept = self.cache.reserve(digest, np.zeros(n, np.uint8), tenant)
        gone, self.evicted[:] = list(self.evicted), []
        for victim in gone:
            assert not self.keeps(victim), "leased or pinned"
            del self.here[victim]
        stuck = [d for d in before if self.keeps(d)]
        own = [d for d in stuck if before[d][1] == tenant]
        possible = (
            digest not in before and sum(before[d][0] for d in stuck) + n <= self.cache.budget_bytes
        )
        if tenant == "t1":
            possible &= (
                sum(before[d][0] for d in own) + n <= self.quota.host_bytes
                and len(own) + 1 <= self.quota.host_entries
            )
        assert (kept is not None) == possible
        if kept is None:
            assert not gone
        elif good:
            self.cache.confirm(digest, seconds)
            self.cache.release(digest)
            self.here[digest] = (n, tenant)
        else:
            self.cache.discard(digest)

    @rule(name=st.integers(0, 7))
    def lease(self, name):
        digest = f"d{name}"
        found = self.cache.lease(digest)
        assert (found is not None) == (digest in self.here)
        if found is not None:
            assert found.nbytes == self.here[digest][0]
            self.leases[digest] = self.leases.get(digest, 0) + 1

    @rule(name=st.integers(0, 7))
    def release(self, name):
        if self.leases.get(digest := f"d{name}"):
            self.cache.release(digest)
            self.leases[digest] -= 1

    @rule(name=st.integers(0, 7), on=st.booleans())
    def pin(self, name, on):
        digest = f"d{name}"
        (self.cache.pin if on else self.cache.unpin)(digest)
        (self.pinned.add if on else self.pinned.discard)(digest)

    @rule(name=st.integers(0, 7))
    def drop(self, name):
        digest = f"d{name}"
        if not self.leases.get(digest):
            assert self.cache.drop(digest)
            self.here.pop(digest, None)
            self.pinned.discard(digest)

    @rule(seconds=st.floats(0, 30))
    def wait(self, seconds):
        self.clock.advance(seconds)

    @invariant()
    def books_balance(self):
        assert self.cache.nbytes == sum(n for n, _ in self.here.values()) <= self.cache.budget_bytes
        mine = [n for n, tenant in self.here.values() if tenant == "t1"]
        assert sum(mine) <= self.quota.host_bytes
        assert len(mine) <= self.quota.host_entries
        assert {f"d{i}" for i in range(8) if f"d{i}" in self.cache} == self.here.keys()
        assert self.cache.state()["leased"] == sum(bool(n) for n in self.leases.values())


Against.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestAgainstAModel = Against.TestCase


def test_many_threads_never_break_the_budget_or_a_lease(rng):
    cache, wrong, seeds = HostCache(40), [], rng.integers(2**31, size=6)

    def use(seed):
        mine = np.random.default_rng(seed)
        for _ in range(400):
            i = int(mine.integers(12))
            digest = f"d{i}"
            if (buffer := cache.lease(digest)) is None:
                buffer = cache.reserve(digest, np.full(i + 1, i, np.uint8), "a")
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


def test_a_release_too_many_is_an_error():
    cache = HostCache(10)
    put(cache, "x", 1)
    with pytest.raises(AssertionError, match="no lease"):
        cache.release("x")
