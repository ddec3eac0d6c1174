"""Names to environments: the registry, the user's own factories, and what is refused."""

import sys
import types

import pytest

from mint_jax.envs import env as env_lib
from mint_jax.errors import UserError

OWN = """
from mint_jax.envs.env import Example, ListEnvironment

def task(n=2):
    score = lambda text, example: float(text == example.answer)
    return ListEnvironment([Example("q", str(i)) for i in range(n)], [Example("h", "h")], score)
"""


@pytest.fixture
def own(tmp_path, monkeypatch) -> str:
    """A module of the user's own, importable by the name returned."""
    (tmp_path / "own_envs_for_test.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    return "own_envs_for_test"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("digit_sums", {}, "environment is 'digit_sums'; choose one of: digit_sum, .*:factory"),
        ("digit_sum", {"sed": 1}, "'digit_sum' does not take these options .*sed"),
        ("no_such_module:task", {}, "could not be imported .*no_such_module"),
        ("own_envs_for_test:task:more", {}, "environment is 'own_envs_for_test:task:more'"),
        ("own_envs_for_test:other", {}, "has no 'other'.*: it has .*task"),
        ("own_envs_for_test:task", {"n": 0}, "has no train examples"),
    ],
)
def test_bad_names_and_options_are_refused(own, name, options, message):
    with pytest.raises(UserError, match=message):
        env_lib.make(name, **options)


class Bare:
    train = held_out = [env_lib.Example("q", "a")]

    def reward(self, completion, example):
        return 1.0


class Plays:
    train = held_out = [env_lib.Example("q", "a")]

    def step(self, completions, example):
        return env_lib.StepResult(reward=1.0, done=True)


async def reward(completion, example):
    return 1.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": None}, r"train of .* is None \(NoneType\); expected a list of"),
        ({"held_out": [("q", "a")]}, r"held_out\[0\] of .* \(tuple\); expected an envs.env.Ex"),
        ({"reward": 3}, r"reward of .* is 3 \(int\); expected a function of"),
        ({"reward": staticmethod(reward)}, "reward of .* is async; .*use a plain function"),
        ({"step": Plays.step}, "has both reward and step: keep reward for one turn"),
    ],
)
def test_objects_beside_the_protocol_are_refused(monkeypatch, changes, message):
    module = types.ModuleType("own_made_for_test")
    monkeypatch.setitem(sys.modules, "own_made_for_test", module)
    module.make = type("Own", (Bare,), changes)
    with pytest.raises(UserError, match=message):
        env_lib.make("own_made_for_test:make")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "'talk' is a conversation, .* one turn .*: use the jobs evaluate or"),
        ({"step": 3}, r"step of .* is 3 \(int\); expected a function of \(completions, example\)"),
        ({"step": staticmethod(reward)}, "step of .* is async; .*use a plain function"),
        ({"held_out": []}, "has no held_out examples"),
    ],
)
def test_conversations_are_checked(monkeypatch, changes, message):
    monkeypatch.setitem(env_lib.REGISTRY, "talk", type("Own", (Plays,), changes))
    with pytest.raises(UserError, match=message):
        env_lib.need_single_turn("talk", env_lib.make("talk"))
