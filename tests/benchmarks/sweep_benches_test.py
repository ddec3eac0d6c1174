"""What the sweeps' benches compute without a device: traffic, hit rates against a search of all
policies, the fleet's model.
"""

import functools
import json
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from ml_collections import ConfigDict

from benchmarks import fleet_model, hot_set, traffic
from mint_jax.errors import UserError
from tests.benchmarks.benches_test import load

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
        for policy in (hot_set.slots, hot_set.host, hot_set.lru):
            assert policy(trace, capacity, CLOCK) <= best


def test_a_cache_that_holds_all_misses_each_name_once(rng):
    trace = rng.integers(0, 9, 200).tolist()
    for policy in hot_set.POLICIES.values():
        assert policy(trace, 9, CLOCK) == len(trace) - len(set(trace))


def test_where_all_are_used_alike_ours_evict_as_lru_does():
    trace = [0, 1, 2, 3, 1, 2, 3, 4, 0, 4]
    assert hot_set.lru(trace, 3, CLOCK) == 4
    quick = SimpleNamespace(request_s=1.0, half_life_s=1e-3)  # a use is forgotten at once
    assert hot_set.slots(trace, 3, quick) == hot_set.host(trace, 3, quick) == 4


CURVE = [(1, 0.1), (11, 0.2), (21, 0.4)]


@pytest.mark.parametrize(
    ("limit", "held"),
    [(0.05, 0), (0.1, 1), (0.151, 6), (0.2, 11), (0.301, 16), (0.4, 21), (9.0, 21)],
)
def test_the_most_adapters_within_a_step(limit, held):
    assert fleet_model.fastest(CURVE, limit) == held


def test_engines_are_the_most_of_three_bounds():
    asked = ConfigDict(
        {"wave": 100, "tokens_per_s": 5.0, "tokens": 50, "cold_rate": 0.5, "load_share": 0.5}
    )
    found = fleet_model.engines(asked, CURVE, 0.2)
    assert found["adapters_an_engine"] == 11
    assert found["cold_loads_per_s"] == 5.0
    assert [found[f"engines_{name}"] for name in ("slots", "speed", "cold")] == [5, 10, 2]
    assert found["engines"] == 10
    asked.tokens_per_s = 11.0
    with pytest.raises(UserError, match="ask for at most 10"):
        fleet_model.engines(asked, CURVE, 0.2)


def test_the_model_names_what_it_read_and_refuses_what_is_missing(tmp_path):
    config = load("fleet_model")
    report = fleet_model.run(config, tmp_path)
    read = report["read"]
    assert [read[name]["config"] for name in ("active_wave", "cold_load")] == [
        "active_wave",
        "packed_load",
    ]
    assert all(read[name]["commit"] for name in ("active_wave", "cold_load"))
    assert (
        report["engines"]["interval"][0]
        <= report["engines"]["median"]
        <= report["engines"]["interval"][1]
    )
    with pytest.raises(UserError, match="has no step with adapters of rank 3"):
        fleet_model.run(load("fleet_model", "--config.rank=3"), tmp_path)
    for name in ("active_wave", "cold_load"):
        with pytest.raises(UserError, match="run that sweep or bench first"):
            fleet_model.run(
                load("fleet_model", f"--config.{name}={tmp_path / 'none.json'}"),
                tmp_path,
            )
    failed = tmp_path / "failed.json"
    failed.write_text(
        json.dumps({"sweep": "cold_staircase", "points": [{"grid": "at_once", "rows": []}]})
    )
    with pytest.raises(UserError, match="all of its points failed"):
        fleet_model.run(load("fleet_model", f"--config.cold_load={failed}"), tmp_path)


def test_steps_and_loads_of_sweeps_are_read(rng):
    low, middle, high = sorted(rng.uniform(0.1, 1.0, 3).tolist())
    figure = {"median": middle, "interval": [low, high], "n": 5}
    rows = [{"settings": {"rank": 1, "distinct": 8}, "figures": {"step_s": figure}}]
    rows += [{"settings": {"rank": 8, "distinct": 4}, "figures": {"step_s": figure}}]
    wave = {
        "points": [
            {"grid": "decode", "rows": rows},
            {"grid": "train", "rows": [{"settings": {}, "figures": {}}]},
        ]
    }
    assert fleet_model._steps(wave, 1) == {8: figure}
    cold = [
        {"settings": {"kind": kind, "count": count}, "figures": {"last_s": count}}
        for kind in ("identical", "distinct")
        for count in (4, 1)
    ]
    assert fleet_model._load({"points": [{"rows": cold}]}) == 1
    assert fleet_model._load({"points": []}) is None
    assert np.isclose(fleet_model._load({"load_ms": figure})["median"], middle / 1e3)
