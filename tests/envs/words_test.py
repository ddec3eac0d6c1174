"""Word tasks: the splits are apart, rewards on cases written by hand."""

import pytest

from mint_jax.envs import words
from mint_jax.envs.env import Example


@pytest.mark.parametrize("factory", [words.copy_word, words.bracket_word])
@pytest.mark.parametrize("seed", [0, 7])
def test_splits_are_apart_and_complete(factory, seed):
    env = factory(seed=seed)
    train, held = ({e.answer for e in split} for split in (env.train, env.held_out))
    assert not train & held
    assert len(train) == len(env.train)
    assert len(held) == len(env.held_out) == round(0.3 * (len(train) + len(held)))
    assert not {"cat", "fish"} & (train | held), "the examples in the prompt give their answer away"


def test_splits_follow_the_seed():
    assert words.copy_word(seed=1).train == words.copy_word(seed=1).train
    assert words.copy_word(seed=1).train != words.copy_word(seed=2).train


def test_prompts_ask_for_their_answer():
    for e in words.copy_word().train:
        assert [m["role"] for m in e.messages] == ["system", "user", "assistant", "user"]
        assert e.messages[-1]["content"] == e.answer
    for e in words.bracket_word().train:
        assert e.messages == f"cat -> [cat]\nfish -> [fish]\n{e.answer} ->"


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
