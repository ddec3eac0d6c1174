"""The rollout object: exact both ways, and nothing else is taken for one."""

import dataclasses

import numpy as np
import pytest

from mint_jax.catalog.rollouts import Rollouts, pack_rollouts, unpack_rollouts


def example(rng, prompts=3, group=2) -> Rollouts:
    tokens = [
        [rng.integers(0, 2**31 - 1, rng.integers(0, 6)).tolist() for _ in range(group)]
        for _ in range(prompts)
    ]
    logprobs = [
        [(-rng.exponential(size=len(row))).astype(np.float32).tolist() for row in g] for g in tokens
    ]
    revisions = [[[f"{t % 3:064x}" for t in row] for row in g] for g in tokens]
    texts = [rng.integers(0, 97, rng.integers(1, 5)).tolist() for _ in range(prompts)]
    return Rollouts(
        "team/p", 7, texts, tokens, logprobs, revisions, rng.normal(size=(prompts, group))
    )


def test_it_comes_back_as_it_was(rng):
    for prompts, group in ((3, 2), (1, 1), (4, 8)):
        made = example(rng, prompts, group)
        data = pack_rollouts(made)
        assert data == pack_rollouts(made)
        found = unpack_rollouts(data)
        for field in ("policy", "step", "prompts", "tokens", "logprobs", "revisions"):
            assert getattr(found, field) == getattr(made, field)
        np.testing.assert_array_equal(found.rewards, made.rewards)
    lacking = dataclasses.replace(made, revisions=[[row[1:] for row in g] for g in made.revisions])
    with pytest.raises(ValueError, match="one revision"):
        pack_rollouts(lacking)
