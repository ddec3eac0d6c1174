"""What a reward may return, whose traceback is shown, and what becomes of a reward that is slow or
never ends.
"""

import io
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from mint_jax.envs import env as env_lib
from mint_jax.envs import scoring
from mint_jax.envs.env import Example, ListEnvironment
from mint_jax.errors import UserError

EXAMPLE = Example(
    ({"role": "system", "content": "s"}, {"role": "user", "content": "what is 2 + 2?"}), "4"
)
OWN = """
from mint_jax.envs.env import Example, ListEnvironment

def score(text, example):
    return helper(5)

def helper(value):
    return len(value)

def task():
    return ListEnvironment([Example("q", "a")], [Example("h", "a")], score)

def broken():
    return helper(7)
"""


def env_of(score) -> ListEnvironment:
    return ListEnvironment([EXAMPLE], [EXAMPLE], score)


@pytest.fixture
def own(tmp_path, monkeypatch) -> str:
    (tmp_path / "own_rewards_for_test.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    return "own_rewards_for_test"


def test_a_mistake_in_a_reward_keeps_the_users_frames_and_none_of_ours(own):
    with pytest.raises(UserError) as caught:
        scoring.score("ada", env_lib.make(f"{own}:task"), "four", EXAMPLE)
    first, *rest = str(caught.value).splitlines()
    call = "policy 'ada', completion 'four' of prompt 'what is 2 + 2?'"
    assert f"raised TypeError: object of type 'int' has no len(); {call}" in first
    text = "\n".join(rest)
    assert f"{own}.py" in text
    assert "return helper(5)" in text
    assert "return len(value)" in text
    assert "mint_jax" not in text


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (None, r"returned None \(NoneType\); expected a number"),
        (True, r"returned True \(bool\); expected a number, such as float\(\.\.\.\)"),
        (np.ones(1), r"returned array\(\[1\.\]\) \(ndarray\)"),
        (float("nan"), "returned nan; expected a finite number"),
    ],
)
def test_results_that_are_no_numbers_are_refused(value, told):
    call = r"policy 'ada', completion 'text' of prompt 'what is 2 \+ 2\?'"
    with pytest.raises(UserError, match=f"{told}.*{call}.*fix it and resume"):
        scoring.score("ada", env_of(lambda text, example: value), "text", EXAMPLE)


def test_a_slow_reward_is_shown_and_one_that_hangs_ends_at_the_timeout(monkeypatch):
    ended, out, began = threading.Event(), io.StringIO(), time.monotonic()
    env = env_of(lambda text, example: float(ended.wait(60)))
    monkeypatch.setattr(scoring, "SHOWN_S", 0.05)
    monkeypatch.setattr(scoring, "LOOK_S", 0.02)
    message = r"a reward has taken .*'ada', completion 'hm' of prompt 'what.*reward_timeout is 0\.5"
    try:
        with pytest.raises(UserError, match=message):
            scoring.Watch(0.5, out).over(lambda: scoring.score("ada", env, "hm", EXAMPLE))
        assert time.monotonic() - began < 30
    finally:
        ended.set()
    shown = out.getvalue().splitlines()
    assert 1 <= len(shown) <= 6, "each time the wait has doubled"
    text = (
        "1 to come, 1 completions at work; the longest runs for 0 s: policy 'ada', completion 'hm'"
    )
    assert text in shown[0]


HANGS = """
import threading
from mint_jax.envs import scoring
from mint_jax.envs.env import Example, ListEnvironment
from mint_jax.errors import UserError
from mint_jax.train import phases as phases_lib
example = Example("prompt", "")
env = ListEnvironment([example], [example], lambda text, example: float(threading.Event().wait()))
try:
    with phases_lib.Phases([["a"]], {"a": 0}, 1, False, 1, scoring.Watch(1.5).look) as phases:
        for phase, unit in phases:
            unit.score(lambda name, text: scoring.score(name, env, text, example), {"a": ""})
except UserError as error:
    print(error)
"""


def test_the_process_does_not_wait_for_a_reward_that_hangs():
    done = subprocess.run(
        [sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "a reward has taken" in done.stdout
    assert "policy 'a', completion '' of prompt 'prompt'" in done.stdout
