"""Order of tenants: a pause saves nothing up and costs nothing."""

from mint_jax.service.fairness import Counters


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
