"""Order of tenants: equal shares, and nothing saved up by a pause."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mint_jax.service.fairness import Counters


@settings(max_examples=50)
@given(st.integers(2, 5), st.integers(0, 2**31))
def test_tenants_with_work_all_the_time_are_served_alike(count, seed):
    rng = np.random.default_rng(seed)
    names = [f"t{i}" for i in range(count)]
    counters, largest = Counters(), 0.0
    for name in names:
        counters.begin(name)
    for _ in range(200):
        first = counters.order(names)[0]
        seconds = float(rng.uniform(0.1, 1))
        largest = max(largest, seconds)
        counters.charge(seconds, [(first, 1.0)])
    served = [counters.seconds[name] for name in names]
    # theorem 4.4: two counters differ by the largest slice of either at most
    assert max(served) - min(served) <= largest * (1 + 1e-9)


def test_a_pause_saves_nothing_up_and_costs_nothing():
    counters = Counters()
    counters.begin("a")
    counters.begin("b")
    counters.charge(10.0, [("a", 1.0), ("b", 3.0)])
    assert counters.order("ba") == ["a", "b"]
    assert dict(counters.seconds) == {"a": 2.5, "b": 7.5}
    counters.end("a")
    counters.charge(20.0, [("b", 1.0)])
    counters.begin("a")  # lifted to b's 27.5
    counters.charge(1.0, [("a", 1.0)])
    assert counters.order("ab") == ["b", "a"]
    counters.begin("new")
    counters.charge(0.5, [("b", 1.0)])
    assert counters.order(["a", "b", "new"]) == ["new", "b", "a"]
    for name in ("a", "b", "new"):
        counters.end(name)
    counters.begin("later")  # nobody is busy: as the last who was
    counters.begin("b")
    assert counters.order(["later", "b"]) == ["later", "b"]
