"""Rewards in worker processes: values and errors as in threads; what hangs or dies is given up."""

import math
import time

import pytest

from mint_jax.envs import env as env_lib
from mint_jax.envs import processes, scoring
from mint_jax.errors import UserError

OWN = """
import ctypes, os, re, time
from mint_jax.envs.env import Example, ListConversation, ListEnvironment, StepResult, Unscored

def unscored():
    raise Unscored("no score")

HOW = {
    "gives up": unscored,
    "value": lambda: 0.25,
    "prints": lambda: print("noise") or 0.5,
    "hangs": lambda: float(bool(re.match(r"(a+)+b", "a" * 60))),
    "sleeps": lambda: time.sleep(60),
    "exits": lambda: os._exit(0),
    "crashes": lambda: ctypes.string_at(0),
    "raises": lambda: [][1],
    "text": lambda: "1",
    "function": lambda: (lambda: 1),
}
examples = [Example("p", how) for how in HOW]

def make(mark="m"):
    return ListEnvironment(examples, examples, lambda text, example: HOW[example.answer]())

def play():
    def answer(texts, example):
        return StepResult(",".join(texts), HOW[example.answer]())
    return ListConversation(examples, examples, answer)
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """``own(factory)`` is an environment of two workers, and its examples by what they do."""
    (tmp_path / "own_slow_rewards.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    pool = processes.WorkerPool(2, 1.0)

    def make(factory, **options):
        name = f"own_slow_rewards:{factory}"
        env = processes.remote(env_lib.make(name, **options), pool, name, options)
        return env, {example.answer: example for example in env.train}

    make.pool = pool
    yield make
    pool.close()


def test_values_and_errors_are_those_of_threads(own):
    env, examples = own("make", mark="x")
    assert scoring.score("ada", env, "t", examples["value"]) == 0.25
    assert scoring.score("ada", env, "t", examples["prints"]) == 0.5
    message = r"raised IndexError: list index .*'ada', completion 't'"
    with pytest.raises(UserError, match=message) as e:
        scoring.score("ada", env, "t", examples["raises"])
    assert 'own_slow_rewards.py"' in str(e.value)
    assert "mint_jax" not in str(e.value).split("\n", 1)[1]
    with pytest.raises(UserError, match=r"returned '1' \(str\); expected a number"):
        scoring.score("ada", env, "t", examples["text"])
    with pytest.raises(UserError, match=r"raised an answer that cannot be sent: .*pickle"):
        scoring.score("ada", env, "t", examples["function"])
    play, examples = own("play")
    found = scoring.step("ada", play, ("a", "b"), examples["value"])
    assert found == env_lib.StepResult("a,b", 0.25)


@pytest.mark.parametrize("how", ["hangs", "sleeps", "exits", "crashes", "gives up"])
def test_a_reward_that_does_not_return_costs_its_row_only(own, how, capfd):
    env, examples = own("make")
    began = time.monotonic()
    rows = ["value", how, "value", "value"]
    [scores] = scoring.each(lambda how: scoring.score("ada", env, "hm", examples[how]), [rows], env)
    assert time.monotonic() - began < 30
    assert math.isnan(scores[1])
    assert [scores[0], *scores[2:]] == [0.25] * 3
    reasons = dict.fromkeys(("hangs", "sleeps"), "took more than 1 s") | {"gives up": "no score"}
    reason = reasons.get(how, "its process died")
    said = capfd.readouterr().err
    assert f"{reason}: policy 'ada', completion 'hm' of prompt 'p'; its row trains nothing" in said
    play, examples = own("play")
    found = scoring.step("ada", play, ("a",), examples[how])
    assert found.done
    assert math.isnan(found.reward)


def test_an_environment_that_workers_cannot_make_is_refused(own, monkeypatch):
    monkeypatch.setitem(env_lib.REGISTRY, "only_here", lambda: None)
    env = processes.remote(env_lib.ListEnvironment([], [], None), own.pool, "only_here", {})
    with pytest.raises(UserError, match="environment is 'only_here'; choose one of"):
        scoring.score("ada", env, "t", env_lib.Example("p", ""))
