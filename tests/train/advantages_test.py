"""Advantages and token weights against the papers' formulas, written element by element."""

import math

import numpy as np
import pytest

from mint_jax.errors import UserError
from mint_jax.train.advantages import group_advantages, token_weights


@pytest.mark.parametrize("divide_by_std", [True, False])
@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out", "none"])
def test_advantages_match_the_formula_of_each_rollout(baseline, divide_by_std, rng):
    """GRPO: group_mean with division; Dr. GRPO: group_mean without; RLOO: leave_one_out without."""
    rewards_QG = rng.normal(3, 2, (5, 4))
    rewards_QG[2] = 0.75  # no variance: advantages are 0, not NaN
    got = group_advantages(rewards_QG, baseline, divide_by_std, eps=1e-3)
    assert got.dtype == np.float32
    for q, rewards in enumerate(rewards_QG.tolist()):
        mean = sum(rewards) / 4
        std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / 4)
        for g, r in enumerate(rewards):
            others = [x for i, x in enumerate(rewards) if i != g]
            expected = (
                r - {"group_mean": mean, "leave_one_out": sum(others) / 3, "none": 0.0}[baseline]
            )
            expected /= (std + 1e-3) if divide_by_std else 1.0
            # float64, rounded to float32 at the end
            np.testing.assert_allclose(got[q, g], expected, rtol=1e-6, atol=1e-12)


def test_each_baseline_divides_as_its_paper_does():
    rewards = np.array([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
    std = math.sqrt(3) / 4  # of one 1 among four
    expected = {
        # GRPO: 1.732, -0.577
        "group_mean": [[0.75 / (std + 1e-4)] + [-0.25 / (std + 1e-4)] * 3, [0.0] * 4],
        # RLOO: r_i - mean of the others
        "leave_one_out": [[1.0, -1 / 3, -1 / 3, -1 / 3], [0.0] * 4],
        "none": rewards.tolist(),  # REINFORCE
    }
    for baseline, values in expected.items():
        # rounded to float32
        np.testing.assert_allclose(
            group_advantages(rewards, baseline), values, rtol=1e-6, err_msg=baseline
        )
    assert group_advantages(rewards, "leave_one_out", divide_by_std=True)[0, 0] == pytest.approx(
        1 / (std + 1e-4)
    )
    assert group_advantages(rewards, "group_mean", divide_by_std=False)[0, 0] == 0.75


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


@pytest.mark.parametrize("scale", [1e-300, 1e-160, 1e-30, 1e30, 1e160, 1e300])
def test_advantages_divided_by_std_do_not_depend_on_the_size_of_rewards(scale, rng):
    rewards = rng.normal(size=(4, 6))
    wanted = group_advantages(rewards, eps=0.0)
    # float32
    np.testing.assert_allclose(group_advantages(rewards * scale, eps=0.0), wanted, rtol=1e-6)


def test_rewards_too_large_for_float32_are_refused():
    with pytest.raises(UserError, match=r"rewards of up to 1e\+200 give advantages beyond float32"):
        group_advantages(np.array([[1e200, 0.0]]), divide_by_std=False)


def test_rewards_of_one_prompt_do_not_touch_another(rng):
    rewards_QG = rng.normal(size=(3, 4))
    changed = rewards_QG.copy()
    changed[1] += rng.normal(size=4)
    before, after = group_advantages(rewards_QG), group_advantages(changed)
    np.testing.assert_array_equal(before[[0, 2]], after[[0, 2]])
    assert np.any(before[1] != after[1])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_reward_that_is_not_finite_is_refused_with_its_place(bad, rng):
    rewards_QG = rng.normal(size=(3, 4))
    rewards_QG[2, 1] = bad
    with pytest.raises(
        UserError, match=rf"reward at \(prompt, rollout\) \(2, 1\) is {bad}; rewards must be finite"
    ):
        group_advantages(rewards_QG)


@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out"])
def test_a_group_of_one_has_no_baseline(baseline, rng):
    rewards_QG = rng.normal(size=(3, 1))
    with pytest.raises(
        UserError, match=f"baseline '{baseline}' needs at least 2 rollouts a prompt, got 1"
    ):
        group_advantages(rewards_QG, baseline)
    # rounded to float32
    np.testing.assert_allclose(
        group_advantages(rewards_QG, "none", divide_by_std=False), rewards_QG, rtol=1e-7
    )


def test_unknown_names_are_refused_with_the_choices():
    with pytest.raises(
        UserError,
        match="advantage baseline is 'mean'; choose one of: group_mean, leave_one_out, none",
    ):
        group_advantages(np.ones((1, 2)), "mean")
    with pytest.raises(
        UserError, match="normalisation is 'mean'; choose one of: sequence, token, constant, sum"
    ):
        token_weights([1], "mean")


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


@pytest.mark.parametrize("normalisation", ["sequence", "token", "constant", "sum"])
def test_no_tokens_give_finite_weights(normalisation):
    assert token_weights([], normalisation) == []
    assert np.isfinite(token_weights([0, 0], normalisation)).all()
