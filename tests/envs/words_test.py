"""Word tasks: the splits are apart, rewards on cases written by hand."""

import pytest

from mint_jax.envs import words
from mint_jax.envs.env import Example


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("apple", 1.0),
        (" apple\n", 1.0),
        ("APPLE.", 0.5),
        ("The word is Apple!", 0.1),
        ("cat", 0.0),
    ],
)
def test_copy_rewards(completion, reward):
    assert words.copy_word().reward(completion, Example((), "apple")) == reward


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("[apple]", 1.0),
        (" [apple]\n", 1.0),
        ("[ apple ]", 0.3),
        ("[apple", 0.2),
        ("apple", 0.1),
        ("[cat]", 0.2),
        ("cat", 0.0),
    ],
)
def test_bracket_rewards(completion, reward):
    # sums of 0.1
    assert words.bracket_word().reward(completion, Example("", "apple")) == pytest.approx(reward)
