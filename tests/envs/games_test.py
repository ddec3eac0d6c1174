"""Games: a player that halves the range wins, and answers of other kinds earn what is said."""

import math

import pytest

from mint_jax.envs.games import higher_lower


def test_halving_the_range_always_wins(rng):
    most = int(rng.integers(2, 40))
    game = higher_lower(most, guesses=math.floor(math.log2(most)) + 1, seed=int(rng.integers(99)))
    secrets = [int(example.answer) for example in [*game.train, *game.held_out]]
    assert sorted(secrets) == list(range(1, most + 1))
    for example in game.train:
        low, high, texts = 1, most, []
        while True:
            texts.append(f" {(low + high) // 2}.")
            found = game.step(texts, example)
            if found.done:
                break
            [read] = found.observation
            guess = int(texts[-1].strip(" ."))
            low, high = (guess + 1, high) if "higher" in read["content"] else (low, guess - 1)
        assert found.reward == 1.0


@pytest.mark.parametrize(
    ("texts", "reward"), [(["a 5"], 0.0), (["1", "2", "3"], 0.45), (["1", "20", "20"], 0.0)]
)
def test_rewards_of_guesses_that_miss(texts, reward):
    game = higher_lower(20, guesses=3)
    example = next(e for e in [*game.train, *game.held_out] if e.answer == "4")
    found = game.step(texts, example)
    assert (found.done, pytest.approx(found.reward)) == (True, reward)
