"""Schedules with phases that only take notes: order of calls, real overlap, errors and resuming."""

import itertools
import random
import threading
import time
from collections import Counter, defaultdict

import pytest

from mint_jax.errors import UserError
from mint_jax.train import phases as schedule_lib
from mint_jax.train.phases import units_of

WAIT_S = 60  # only reached when a test fails


class Notes:
    """Notes every device call, and checks that each phase gets what the one before it returned."""

    def __init__(self):
        self.calls = []
        self.device = threading.get_ident()
        self.in_reward = Counter()

    def rollout(self, names, step):
        assert threading.get_ident() == self.device
        self.calls.append(("rollout", tuple(names), step))
        return {name: (name, step) for name in names}

    def reward(self, name, samples):
        assert threading.get_ident() != self.device
        assert samples[0] == name
        self.in_reward[samples] += 1
        return (*samples, "scored")

    def update(self, scored, step):
        assert threading.get_ident() == self.device
        assert scored == {name: (name, step, "scored") for name in scored}
        self.calls.append(("update", tuple(scored), step))

    def run(self, units, steps, overlap, first=None, look=None, **replaced):
        vars(self).update(replaced)
        first_step = dict.fromkeys((n for unit in units for n in unit), 0) | (first or {})
        with schedule_lib.Phases(units, first_step, steps, overlap=overlap, look=look) as phases:
            for phase, unit in phases:
                if phase == schedule_lib.ROLLOUT:
                    unit.score(self.reward, self.rollout(unit.names, unit.step))
                else:
                    self.update(unit.scored(), unit.step)


def test_an_update_that_scores_further_samples_comes_again():
    calls, units = [], units_of(["a", "b"], "overlapped")
    with schedule_lib.Phases(units, {"a": 0, "b": 0}, 2, overlap=True) as phases:
        for phase, unit in phases:
            if phase == schedule_lib.ROLLOUT:
                unit.score(lambda name, n: n, dict.fromkeys(unit.names, 1))
            elif (n := unit.scored()[unit.names[0]]) < 3:
                unit.score(lambda name, n: n + 1, dict.fromkeys(unit.names, n))
            else:
                calls.append((unit.names[0], unit.step, n))
    assert sorted(calls) == [("a", 0, 3), ("a", 1, 3), ("b", 0, 3), ("b", 1, 3)]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("ahead", [0, 1, 2, 9])
def test_rollouts_ahead_follow_one_schedule_whatever_rewards_take(ahead, overlap, rng):
    """Rollout k comes between the updates k - ahead - 1 and k - ahead, in a resumed run too."""
    steps, stop = 5, int(rng.integers(1, 9))
    units, calls, flights = [["a", "c"], ["b"]], defaultdict(list), {}

    def reward(name, sample):
        time.sleep(random.uniform(0, 0.004))
        return sample, "scored"

    def run(first):
        how = units, first, steps, overlap, 4, None, ahead
        with schedule_lib.Phases(*how) as phases:
            for unit in phases.units:
                for step, samples in flights.get(unit.names[0], {}).items():
                    unit.step = step
                    unit.score(reward, samples)
            for count, (phase, unit) in enumerate(phases):
                calls[unit.names[0]].append((phase, unit.step))
                if phase == schedule_lib.ROLLOUT:
                    unit.score(reward, {name: (name, unit.step) for name in unit.names})
                    continue
                assert unit.scored() == {n: ((n, unit.step), "scored") for n in unit.names}
                if count < stop:
                    continue
                flights.update({u.names[0]: u.in_flight() for u in phases.units})
                del flights[unit.names[0]][unit.step]  # its update is done
                return {n: u.done + (u is unit) for u in phases.units for n in u.names}
        return None

    left = run(dict.fromkeys("abc", 0))
    while left is not None:
        stop = 99
        left = run(left)
    expected = [("rollout", k) for k in range(min(ahead + 1, steps))]
    for k in range(steps):
        expected += [("update", k)] + [("rollout", k + ahead + 1)] * (k + ahead + 1 < steps)
    assert calls == {"a": expected, "b": expected}


@pytest.mark.parametrize(("turns", "ahead"), [(1, 1), (3, 0), (4, 1), (5, 2)])
def test_further_turns_follow_one_schedule_whatever_rewards_take(turns, ahead):
    """Turns are spread evenly over the updates that a rollout waits for; those of one step are
    drawn while another step's are scored.
    """
    steps, at_once, drawn, done = 5, -(-turns // (ahead + 1)), {}, []

    def reward(name, turn):
        time.sleep(random.uniform(0, 0.004))
        return turn

    def goes_on(samples, left):
        return samples["a"] < (turns if not left else (ahead + 1 - left) * at_once)

    how = {"a": 0}, steps, True, 4, None, ahead, goes_on
    with schedule_lib.Phases([["a"]], *how) as phases:
        for phase, unit in phases:
            turn = 1 if phase == schedule_lib.ROLLOUT else unit.scored()["a"] + 1
            if turn > turns:
                assert unit.step == unit.done == len(done)
                done.append(unit.step)
                continue
            drawn[unit.step, turn] = unit.done
            unit.score(reward, {"a": turn})
    assert done == list(range(steps))
    assert drawn == {
        (step, turn): max(0, step - ahead - 1 + -(-turn // at_once))
        for step in range(steps)
        for turn in range(1, turns + 1)
    }


def test_batched_cohorts_are_one_call_each_and_overlap():
    """The rewards of one cohort's policies run at the same time, and while the other cohort is
    rolled out.
    """
    phases, together = Notes(), threading.Barrier(3)  # a, c and the rollout of b and d
    score, sample = phases.reward, phases.rollout

    def reward(name, samples):
        if name in ("a", "c") and samples[1] == 0:
            together.wait(WAIT_S)
        return score(name, samples)

    def rollout(names, step):
        if "b" in names and step == 0:
            together.wait(WAIT_S)
        return sample(names, step)

    units = units_of(["a", "b", "c", "d"], "batched", 2)
    phases.run(units, 2, overlap=True, reward=reward, rollout=rollout)
    assert phases.calls[:2] == [("rollout", ("a", "c"), 0), ("rollout", ("b", "d"), 0)]
    calls = itertools.product(("rollout", "update"), (("a", "c"), ("b", "d")), (0, 1))
    assert sorted(phases.calls) == sorted(calls)


def test_a_unit_whose_policies_stand_at_different_steps_is_refused():
    phases, says = Notes(), r"policies \['a', 'b'\] resume at different steps \[1, 2\]"
    with pytest.raises(UserError, match=says):
        phases.run([["c"], ["a", "b"]], 5, overlap=True, first={"a": 1, "b": 2})
    assert phases.calls == []


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("phase", ["rollout", "reward", "update"])
def test_an_error_comes_out_and_ends_the_device_calls(phase, overlap):
    phases = Notes()

    def fail(*args):
        raise ZeroDivisionError(f"in {phase}")

    with pytest.raises(ZeroDivisionError, match=f"in {phase}"):
        phases.run([["a"]], 3, overlap=overlap, **{phase: fail})
    assert phases.calls == ([] if phase == "rollout" else [("rollout", ("a",), 0)])


def test_who_waits_is_looked_after(monkeypatch):
    """Every second, with how long and for how many; and a reward that hangs is found while the
    devices have other work.
    """
    monkeypatch.setattr("mint_jax.train.phases.LOOK_S", 0.01)
    phases, looks = Notes(), []

    def look(waited, waiting):
        looks.append((waited, waiting))
        if waited > 0.05:
            raise UserError("too long")

    release = threading.Event()
    try:
        hangs = {"reward": lambda name, samples: release.wait(WAIT_S), "look": look}
        with pytest.raises(UserError, match="too long"):
            phases.run([["a"], ["b"]], 2, overlap=True, **hangs)
        assert looks[0] == (0.0, 0)
        assert (0.0, 1) in looks
        assert looks[-1][1] == 2
        assert [call[0] for call in phases.calls] == ["rollout", "rollout"]
    finally:
        release.set()
