"""EvictionScore is (seconds x decayed frequency) / bytes, and the ranking gives the lowest, whatever was added and removed."""

import math

import hypothesis.strategies as st
import pytest
from hypothesis import given

from mint_jax.residency.eviction_score import EvictionScore, Ranking

HALF = 10.0


def score_at(seconds: float, nbytes: int, uses: list[float], now: float) -> float:
    """The definition."""
    return seconds * sum(2 ** -((now - u) / HALF) for u in uses) / nbytes


@given(
    st.lists(
        st.tuples(st.floats(0.01, 10), st.integers(1, 10**9), st.lists(st.floats(0, 100), min_size=1, max_size=5)),
        min_size=2,
        max_size=8,
    )
)
def test_keys_order_copies_as_the_definition_does(copies):
    keys, wanted = [], []
    for seconds, nbytes, uses in copies:
        uses = sorted(uses)
        score = EvictionScore(nbytes, seconds, 1.0, uses[0])
        for u in uses[1:]:
            score.use(u, HALF)
        keys.append(score.key(HALF))
        wanted.append(math.log2(score_at(seconds, nbytes, uses, 100.0)) + 10.0)  # 100 s are ten half-lives
    assert keys == pytest.approx(wanted, abs=1e-9)


def test_a_clock_that_steps_back_does_no_harm():
    score = EvictionScore(1, 1.0, 1.0, 50.0)
    score.use(40.0, HALF)
    assert (score.frequency, score.used_at) == (2.0, 50.0)


ACTION = st.tuples(st.sampled_from(["add", "remove"]), st.integers(0, 9), st.integers(0, 2), st.integers(0, 5))


@given(st.lists(ACTION, max_size=400))
def test_the_ranking_equals_a_sorted_dict(actions):
    ranking, model = Ranking(), {}
    for action, name, tenant, key in actions:
        digest = f"d{name}"
        if action == "add":
            ranking.add(digest, f"t{tenant}", float(key))
            model[digest] = (float(key), f"t{tenant}")
        else:
            ranking.remove(digest)
            model.pop(digest, None)
        assert len(ranking) == len(model)
        for owner in (None, "t0", "t1", "t2", "nobody"):
            mine = [(key, digest) for digest, (key, t) in model.items() if owner in (None, t)]
            found = ranking.lowest(owner)
            assert (found is None) == (not mine)
            assert found is None or model[found][0] == min(mine)[0]
    assert sum(map(len, ranking._heaps.values())) <= 4 * (64 + 4 * 10)  # old entries do not pile up
