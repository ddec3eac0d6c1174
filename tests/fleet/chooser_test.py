"""The chooser of engines: who is offered a request first, and what nothing can change."""

import dataclasses
import math

import pytest

from mint_jax.fleet.chooser import BOUND, HOST_SHARE, Load, choose, homes_of

NOW = 1000.0
DIGESTS = [f"{i:064x}" for i in range(2000)]


def random_load(rng) -> Load:
    some = [str(d) for d in rng.choice(DIGESTS[:20], 5)]
    return Load(
        at=NOW - float(rng.exponential(3.0)),
        in_flight=int(rng.integers(0, 40)),
        wait_s=float(rng.exponential(0.1)),
        load_s=float(rng.uniform(0.01, 0.1)),
        slots=frozenset(some[:3]),
        host=frozenset(some),
        refused_until=NOW + float(rng.normal()) if rng.random() < 0.3 else 0.0,
    )


def random_fleet(rng, n):
    names = [f"engine-{i}" for i in range(n)]
    return names, {name: random_load(rng) for name in names if rng.random() < 0.9}


@pytest.mark.parametrize("n", [0, 1, 2, 7, 64])
def test_every_member_is_offered_once_in_an_order_that_theirs_does_not_change(rng, n):
    for draw in range(30):
        names, view = random_fleet(rng, n)
        digest = DIGESTS[draw] if draw % 3 else None
        replicas = int(rng.integers(1, 4))
        found = [*choose(digest, names, view, NOW, replicas, draw)]
        assert sorted(choice.engine for choice in found) == sorted(names)
        again = [str(name) for name in rng.permutation(names)]
        assert [*choose(digest, again, view, NOW, replicas, draw)] == found
        assert all(math.isfinite(choice.eta_s) and choice.eta_s >= 0 for choice in found)
        untils = [view[c.engine].refused_until for c in found if c.reason == "refused"]
        assert untils == sorted(untils)
        assert [c.reason == "refused" for c in found] == [False] * (n - len(untils)) + [True] * len(
            untils
        )
        rest = [c.eta_s for c in found[1 : n - len(untils)]]
        assert rest == sorted(rest)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_member_that_joins_enters_homes_and_moves_nothing_else(count):
    """At most count / N of the digests move, up to chance; every member has its share."""
    few = [f"engine-{i}" for i in range(19)]
    many = [*few[:7], "new", *few[7:]]
    moved, shares = 0, dict.fromkeys(many, 0)
    for digest in DIGESTS:
        before, after = (homes_of(digest, tuple(names), count) for names in (few, many))
        assert [name for name in after if name != "new"] == list(before[: count - ("new" in after)])
        moved += before != after
        shares[after[0]] += 1
    share = count / len(many)
    sigma = math.sqrt(len(DIGESTS) * share * (1 - share))
    assert abs(moved - len(DIGESTS) * share) < 5 * sigma  # names are fixed: no new draw each run
    assert all(abs(n - 100) < 5 * math.sqrt(100) for n in shares.values())


def first(view, digest=DIGESTS[0], now=NOW, replicas=1, draw=0):
    return next(choose(digest, list(view), view, now, replicas, draw))


def test_a_copy_is_used_until_waiting_takes_twice_as_long_as_making_another():
    names = tuple(f"engine-{i}" for i in range(16))
    home, second = homes_of(DIGESTS[0], names, 2)
    view = {name: Load(NOW, in_flight=10, load_s=0.05) for name in names}

    def change(name, **changes):
        view[name] = dataclasses.replace(view[name], **changes)

    assert {first(view, draw=draw)[0::2] for draw in range(50)} == {(home, "cold")}
    change(second, host={DIGESTS[0]})
    assert first(view) == (second, pytest.approx(0.05 * HOST_SHARE), "host")
    change(home, slots={DIGESTS[0]}, wait_s=0.01)
    assert first(view) == (home, 0.01, "resident")
    change(home, wait_s=0.02)
    assert first(view).engine == second
    change(second, host=())
    change(home, wait_s=0.09)
    assert first(view)[0::2] == (home, "resident")
    change(home, wait_s=0.11)
    assert first(view)[0::2] == (second, "cold")
    change(second, wait_s=0.01)
    spilled = [first(view, draw=draw) for draw in range(200)]
    assert {c.engine for c in spilled if c.reason == "spill"} == {*names} - {home, second}
    assert sum(c.reason == "spill" for c in spilled) > 150  # but where both picks are homes
    assert first(view, replicas=2)[0::2] == (second, "cold")


def test_an_engine_above_the_bound_is_passed_over_while_another_candidate_is_below(rng):
    for draw in range(200):
        names, view = random_fleet(rng, 8)
        view = {n: dataclasses.replace(x, at=NOW, refused_until=0.0) for n, x in view.items()}
        choice = first(view, DIGESTS[draw % 20], draw=draw)
        limit = BOUND * sum(load.in_flight for load in view.values()) / len(view) + 1
        if view[choice.engine].in_flight > limit:
            homes = homes_of(DIGESTS[draw % 20], tuple(view), 2)
            assert all(view[name].in_flight > limit for name in homes)
    home, other = homes_of(DIGESTS[0], ("a", "b"), 2)
    for in_flight, engine in ((47, home), (50, other)):  # limits of 47.9 and 49.75
        loads = Load(NOW, in_flight, slots={DIGESTS[0]}), Load(NOW, 28)
        assert first(dict(zip((home, other), loads))).engine == engine


def test_a_report_loses_weight_with_age_until_it_counts_as_none(rng):
    names, view = random_fleet(rng, 6)
    view = {n: dataclasses.replace(random_load(rng), at=NOW, refused_until=0.0) for n in names}
    old = view.pop("engine-0")
    old = dataclasses.replace(old, wait_s=5.0, slots={DIGESTS[0]})
    etas = []
    for age in (0.0, 1.9, 3.0, 6.0, 200.0):
        aged = view | {"engine-0": dataclasses.replace(old, at=NOW - age)}
        found = [*choose(DIGESTS[0], names, aged, NOW)]
        etas += [choice.eta_s for choice in found if choice.engine == "engine-0"]
    assert etas[0] == etas[1] == 5.0
    assert etas == sorted(etas, reverse=True)
    [missing] = [c for c in choose(DIGESTS[0], names, view, NOW) if c.engine == "engine-0"]
    assert etas[-1] == pytest.approx(missing.eta_s)
    mean = sum(load.wait_s + load.load_s for load in view.values()) / 5
    assert missing.eta_s == pytest.approx(mean)
    assert [c.eta_s for c in choose(DIGESTS[0], names, {}, NOW)] == [Load(NOW).load_s] * 6


def test_the_base_goes_to_the_soonest_then_to_the_least_loaded_engine(rng):
    names, view = random_fleet(rng, 9)
    view = {n: dataclasses.replace(random_load(rng), at=NOW, refused_until=0.0) for n in names}
    view["engine-4"] = Load(NOW, in_flight=1, wait_s=0.0)
    view["engine-5"] = Load(NOW, in_flight=0, wait_s=0.0)
    found = [*choose(None, names, view, NOW)]
    assert found[0] == ("engine-5", 0.0, "base")
    assert found[1] == ("engine-4", 0.0, "base")
    view["engine-5"] = dataclasses.replace(view["engine-5"], refused_until=NOW + 2.0)
    found = [*choose(None, names, view, NOW)]
    assert found[0].engine == "engine-4"
    assert found[-1] == ("engine-5", 2.0, "refused")
    idle = {name: Load(NOW) for name in names}
    assert len({next(choose(None, names, idle, NOW, draw=draw)).engine for draw in range(100)}) == 9
