"""EvictionScore is (seconds x decayed frequency) / bytes; the ranking gives the lowest, and ages
the others by its victims.
"""

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


def test_a_clock_that_steps_back_does_no_harm():
    score = EvictionScore(1, 1.0, 1.0, 50.0)
    score.use(40.0, HALF)
    assert (score.frequency, score.used_at) == (2.0, 50.0)


ACTION = st.tuples(
    st.sampled_from(["add", "add", "remove", "evict", "evict a tenant's"]),
    st.integers(0, 9),
    st.integers(0, 2),
    st.integers(0, 5),
)


@given(st.lists(ACTION, max_size=400))
def test_the_ranking_equals_a_sorted_dict(actions):
    ranking, model, clock = Ranking(), {}, 0.0
    for action, name, tenant, value in actions:
        digest = f"d{name}"
        if action == "add":
            ranking.add(digest, f"t{tenant}", float(value))
            model[digest] = (clock + value, f"t{tenant}")
        elif action == "remove":
            ranking.remove(digest)
            model.pop(digest, None)
        elif (victim := ranking.lowest(f"t{tenant}" if action != "evict" else None)) is not None:
            ranking.evict(victim)
            key, _ = model.pop(victim)
            if all(key <= other for other, _ in model.values()):
                clock = key
        assert (len(ranking), ranking.clock) == (len(model), clock)
        for owner in (None, "t0", "t1", "t2", "nobody"):
            mine = [(key, digest) for digest, (key, t) in model.items() if owner in (None, t)]
            found = ranking.lowest(owner)
            assert (found is None) == (not mine)
            assert found is None or model[found][0] == min(mine)[0]
    assert sum(map(len, ranking._heaps.values())) <= 4 * (64 + 4 * 10)  # old entries do not pile up


@pytest.mark.parametrize("policy", [hot_set.slots, hot_set.host], ids=["slots", "host"])
def test_sessions_that_ended_make_room_and_what_is_asked_for_most_stays(rng, policy):
    """LRU is the better policy of bursts, and frequency that of Zipf's law; ours is near the one,
    and above LRU in the other.
    """
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
