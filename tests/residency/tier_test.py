"""Copies of a tier: order of eviction, leases and capacity."""

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


def test_leased_and_unfinished_copies_stay_and_nothing_exceeds_the_capacity(rng):
    """Random use against a plain count of leases."""
    tier, leases = Tier(30), dict.fromkeys("abcdefgh", 0)
    for _ in range(4000):
        name, what = str(rng.choice(list(leases))), rng.integers(3)
        size = 1 + ord(name) % 7
        if what == 0 and name not in tier.copies:
            kept = sum(1 + ord(n) % 7 for n, count in leases.items() if count)
            evict = bool(rng.integers(2))
            possible = (kept if evict else tier.size) + size <= 30
            copy = tier.reserve(name, size, evict)
            assert (copy is not None) == possible
            if copy is None:
                continue
            assert tier.lease(name) is None, "not confirmed"
            if rng.integers(4):
                tier.confirm(name, float(rng.random()))
                leases[name] = 1
            else:
                tier.discard(name)
        elif what == 1 and tier.lease(name) is not None:
            leases[name] += 1
        elif what == 2 and leases[name]:
            leases[name] -= 1
            assert tier.release(name) == (not leases[name])
        assert all(n in tier for n, count in leases.items() if count)
        assert tier.size == sum(c.size for c in tier.copies.values()) <= 30
        assert tier.state()["leases"] == sum(leases.values())
