"""Advantages and token weights against the papers' formulas, written element by element."""

import math

import numpy as np
import pytest

from mint_jax.errors import UserError
from mint_jax.train.advantages import group_advantages, token_weights


@pytest.mark.parametrize("divide_by_std", [True, False, None])
@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out", "none"])
def test_advantages_match_the_formula_of_each_rollout(baseline, divide_by_std, rng):
    """GRPO: group_mean with division; Dr. GRPO: without; RLOO: leave_one_out without. None follows
    the paper of the baseline.
    """
    rewards_QG = rng.normal(3, 2, (5, 4))
    rewards_QG[2] = 0.75  # no variance: advantages are 0, not NaN
    got = group_advantages(rewards_QG, baseline, divide_by_std, eps=1e-3)
    assert got.dtype == np.float32
    divides = baseline == "group_mean" if divide_by_std is None else divide_by_std
    for q, rewards in enumerate(rewards_QG.tolist()):
        mean = sum(rewards) / 4
        std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / 4)
        for g, r in enumerate(rewards):
            others = [x for i, x in enumerate(rewards) if i != g]
            expected = (
                r - {"group_mean": mean, "leave_one_out": sum(others) / 3, "none": 0.0}[baseline]
            )
            expected /= (std + 1e-3) if divides else 1.0
            # float64, rounded to float32 at the end
            np.testing.assert_allclose(got[q, g], expected, rtol=1e-6, atol=1e-12)


VALUES = [0.0, 0.1, -1 / 3, 7.0, 1e-5, 1e30, 1e-45, 5e-324, 1e-310, 1e200, -1.7e308]


@pytest.mark.parametrize("dtype", [np.float64, np.float32, "list"], ids=str)
@pytest.mark.parametrize("divide_by_std", [None, True, False])
@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out"])
def test_equal_rewards_give_exactly_zero(baseline, divide_by_std, dtype):
    """Adam makes a full step of an advantage of 1e-17, and ``zero_advantage`` misses it."""
    for group in (2, 3, 6, 7, 8, 100):
        groups = [[value] * group for value in VALUES if dtype != np.float32 or abs(value) < 3e38]
        rewards = groups if dtype == "list" else np.array(groups, dtype)
        assert not group_advantages(rewards, baseline, divide_by_std).any()


@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out"])
def test_rewards_that_differ_by_rounding_are_equal(baseline, rng):
    """Sums of the same parts in other orders."""
    for dtype in (np.float64, np.float32):
        parts = rng.uniform(0, 1, (20, 3)).astype(dtype)
        orders = [(0, 1, 2), (1, 2, 0), (2, 0, 1)]
        rewards = np.stack([parts[:, a] + parts[:, b] + parts[:, c] for a, b, c in orders], axis=1)
        assert (np.ptp(rewards, axis=1) > 0).any()
        assert not group_advantages(rewards, baseline).any()
    apart = group_advantages(np.array([[1.0, 1.0 + 1e-12, 1.0]]), baseline, divide_by_std=False)
    assert apart[0, 1] > 0 > apart[0, 0], "a difference that is more than rounding counts"


def test_token_weights_turn_a_sum_over_tokens_into_each_paper_s_mean(rng):
    lengths = rng.integers(1, 30, 7).tolist()
    losses = [rng.normal(size=n) for n in lengths]
    expected = {
        "sequence": np.mean([np.mean(x) for x in losses]),  # GRPO eq. 3
        "token": np.mean(np.concatenate(losses)),  # DAPO
        # Dr. GRPO, at most 50 tokens a rollout
        "constant": np.mean([np.sum(x) / 50 for x in losses]),
        "sum": np.sum(np.concatenate(losses)),
    }
    for name, value in expected.items():
        weights = token_weights(lengths, name, max_tokens=50)
        # float64
        np.testing.assert_allclose(
            sum(w * x.sum() for w, x in zip(weights, losses)), value, rtol=1e-12, err_msg=name
        )


@pytest.mark.parametrize(
    ("rewards", "baseline", "message"),
    [
        ([[0.0, np.nan]], "group_mean", r"reward at \(prompt, rollout\) \(0, 1\) is nan"),
        ([[1e200, 0.0]], "none", r"rewards of up to 1e\+200 give advantages beyond float32"),
        ([[1.0]], "leave_one_out", "needs at least 2 rollouts a prompt, got 1"),
        ([[1.0, 2.0]], "mean", "advantage baseline is 'mean'; choose one of: group_mean"),
    ],
)
def test_rewards_without_advantages_are_refused(rewards, baseline, message):
    with pytest.raises(UserError, match=message):
        group_advantages(np.array(rewards), baseline)
