"""Tasks of digits and words: splits are complete and disjoint, rewards on cases written by hand."""

import pytest

from mint_jax.envs import small
from mint_jax.envs.env import Example

NUMBERS = {
    "12": 1.0,
    "12.": 0.2,
    "It is 12, I think": 0.2,
    "12 12": 0.1,
    "112": 0.0,
    "": 0.0,
}
WORDS = {" apple\n": 1.0, "APPLE.": 0.5, "The word is Apple!": 0.1, "cat": 0.0}
BRACKETS = {
    " [apple]\n": 1.0,
    "[ apple ]": 0.3,
    "[apple": 0.2,
    "apple": 0.1,
    "[cat]": 0.2,
    "cat": 0.0,
}


@pytest.mark.parametrize(("task", "count"), [(small.digit_sum, 100), (small.larger_of_two, 90)])
def test_splits_are_disjoint_and_complete(task, count):
    env = task(seed=7)
    train, held_out = ({e.messages for e in split} for split in (env.train, env.held_out))
    assert not train & held_out
    assert len(train) + len(held_out) == len(env.train) + len(env.held_out) == count
    assert len(held_out) == round(0.3 * count)


@pytest.mark.parametrize(
    ("task", "answer", "rewards"),
    [
        (small.digit_sum, "12", NUMBERS),
        (small.larger_of_two, "12", NUMBERS),
        (small.copy_word, "apple", WORDS),
        (small.bracket_word, "apple", BRACKETS),
    ],
)
def test_rewards(task, answer, rewards):
    for completion, reward in rewards.items():
        # sums of 0.1
        assert task().reward(completion, Example("", answer)) == pytest.approx(reward), completion
