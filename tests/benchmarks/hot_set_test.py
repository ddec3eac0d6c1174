"""Traffic has the shape of its name, and hit rates never exceed those of an exhaustive search."""

import functools
from collections import Counter
from types import SimpleNamespace

import pytest

from benchmarks import hot_set, traffic
from mint_jax.errors import UserError

CLOCK = SimpleNamespace(request_s=0.01, half_life_s=600.0)


def test_traffic_is_what_it_is_called(rng):
    n, count = 50, 20_000
    uniform, zipf, bursts = (
        Counter(traffic.draws(kind, n, count, 1.0, rng).tolist()) for kind in traffic.KINDS
    )
    for found in (uniform, zipf, bursts):
        assert sum(found.values()) == count
        assert set(found) <= set(range(n))
    expected = count / sum(1 / k for k in range(1, n + 1))  # of the most popular
    assert max(zipf.values()) == pytest.approx(expected, rel=0.2)
    assert max(uniform.values()) < 2 * count / n
    many = traffic.draws("bursts", 10**15, count, 1.0, rng).tolist()  # no name is drawn twice
    assert max(Counter(many).values()) <= traffic.REQUESTS
    with pytest.raises(UserError, match="traffic is 'x'"):
        traffic.draws("x", n, count, 1.0, rng)


def most_hits(trace, capacity):
    """The most hits of any policy, by trying them all."""

    @functools.cache
    def best(k, kept):
        if k == len(trace):
            return 0
        if trace[k] in kept:
            return 1 + best(k + 1, kept)
        if len(kept) < capacity:
            return best(k + 1, kept | {trace[k]})
        return max(best(k + 1, kept - {victim} | {trace[k]}) for victim in kept)

    return best(0, frozenset())


def test_the_optimal_policy_is_optimal_and_ours_are_none_better(rng):
    for _ in range(20):
        trace = rng.integers(0, 6, 30).tolist()
        capacity = int(rng.integers(1, 5))
        best = most_hits(tuple(trace), capacity)
        assert hot_set.optimal(trace, capacity, CLOCK) == best
        for policy in hot_set.POLICIES.values():
            assert policy(trace, capacity, CLOCK) <= best
            assert policy(trace, 6, CLOCK) == len(trace) - len(set(trace))


def test_where_all_are_used_alike_ours_evict_as_lru_does():
    trace = [0, 1, 2, 3, 1, 2, 3, 4, 0, 4]
    assert hot_set.lru(trace, 3, CLOCK) == 4
    quick = SimpleNamespace(request_s=1.0, half_life_s=1e-3)  # a use is forgotten at once
    assert hot_set.slots(trace, 3, quick) == 4
