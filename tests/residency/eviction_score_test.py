"""Eviction scores equal their definition; the ranking pops the lowest and ages the others."""

from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
from hypothesis import given

from benchmarks import hot_set, traffic
from mint_jax.residency.eviction_score import EvictionScore, Ranking

HALF = 10.0


def score_at(seconds: float, nbytes: int, uses: list[float], now: float) -> float:
    """The definition."""
    return seconds * sum(2 ** -((now - u) / HALF) for u in uses) / nbytes


@given(
    st.floats(0.01, 10), st.integers(1, 10**9), st.lists(st.floats(0, 100), min_size=1, max_size=5)
)
def test_a_value_is_the_definition_s_at_the_last_use(seconds, nbytes, uses):
    uses = sorted(uses)
    score = EvictionScore(nbytes, seconds, 1.0, uses[0])
    for u in uses[1:]:
        score.use(u, HALF)
    assert score.value == pytest.approx(score_at(seconds, nbytes, uses, uses[-1]), rel=1e-9)


ACTION = st.tuples(
    st.sampled_from(["add", "add", "remove", "pop"]), st.integers(0, 9), st.integers(0, 5)
)


@given(st.lists(ACTION, max_size=400))
def test_the_ranking_equals_a_sorted_dict(actions):
    ranking, model, clock = Ranking(), {}, 0.0
    for action, name, value in actions:
        digest = f"d{name}"
        if action == "add":
            ranking.add(digest, float(value))
            model[digest] = clock + value
        elif action == "remove":
            ranking.remove(digest)
            model.pop(digest, None)
        else:
            lowest = min(model.values(), default=None)
            victim = ranking.pop()
            assert (None if victim is None else model.pop(victim)) == lowest
            clock = clock if lowest is None else lowest
        assert (len(ranking), ranking.clock) == (len(model), clock)
    assert len(ranking._heap) <= 64 + 4 * 10  # outdated entries do not pile up


@pytest.mark.parametrize("policy", [hot_set.slots, hot_set.host], ids=["slots", "host"])
def test_hit_rates_under_bursts_and_zipf(rng, policy):
    """Near LRU, the better policy for bursts, and above it under Zipf's law."""
    config, capacity = (
        SimpleNamespace(names=100_000, zipf=1.0, request_s=0.01, half_life_s=600.0),
        128,
    )
    rates = {}
    for kind in ("bursts", "zipf"):
        trace = traffic.draws(kind, config.names, 20_000, config.zipf, rng).tolist()
        rates[kind] = policy(trace, capacity, config) / hot_set.lru(trace, capacity, config)
    assert rates["bursts"] > 0.85
    assert rates["zipf"] > 1.05
