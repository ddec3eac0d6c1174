"""One-digit arithmetic: every prompt is right, the splits are apart, rewards on cases written by
hand.
"""

import pytest

from mint_jax.envs import digits
from mint_jax.envs.env import Example


@pytest.mark.parametrize(
    ("factory", "count"), [(digits.digit_sum, 100), (digits.larger_of_two, 90)]
)
@pytest.mark.parametrize("seed", [0, 7])
def test_splits_are_apart_and_complete(factory, count, seed):
    env = factory(seed=seed)
    train, held = ({e.messages for e in split} for split in (env.train, env.held_out))
    assert not train & held
    assert len(train) + len(held) == len(env.train) + len(env.held_out) == count
    assert len(held) == round(0.3 * count)


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("12", 1.0),
        ("12.", 0.2),
        ("It is 12, I think", 0.2),
        ("12 12", 0.1),
        ("112", 0.0),
        ("", 0.0),
    ],
)
@pytest.mark.parametrize("factory", [digits.digit_sum, digits.larger_of_two])
def test_rewards(factory, completion, reward):
    assert factory().reward(completion, Example("9 + 3 =", "12")) == reward
