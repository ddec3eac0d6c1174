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
            expected = r - {"group_mean": mean, "leave_one_out": sum(others) / 3, "none": 0.0}[baseline]
            expected /= (std + 1e-3) if divide_by_std else 1.0
            np.testing.assert_allclose(got[q, g], expected, rtol=1e-6, atol=1e-12)  # float64, rounded to float32 at the end


def test_each_baseline_divides_as_its_paper_does():
    rewards = np.array([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
    std = math.sqrt(3) / 4  # of one 1 among four
    expected = {
        "group_mean": [[0.75 / (std + 1e-4)] + [-0.25 / (std + 1e-4)] * 3, [0.0] * 4],  # GRPO: 1.732, -0.577
        "leave_one_out": [[1.0, -1 / 3, -1 / 3, -1 / 3], [0.0] * 4],  # RLOO: r_i - mean of the others
        "none": rewards.tolist(),  # REINFORCE
    }
    for baseline, values in expected.items():
        np.testing.assert_allclose(group_advantages(rewards, baseline), values, rtol=1e-6, err_msg=baseline)  # rounded to float32
    assert group_advantages(rewards, "leave_one_out", divide_by_std=True)[0, 0] == pytest.approx(1 / (std + 1e-4))
    assert group_advantages(rewards, "group_mean", divide_by_std=False)[0, 0] == 0.75


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
    with pytest.raises(UserError, match=rf"reward at \(prompt, rollout\) \(2, 1\) is {bad}; rewards must be finite"):
        group_advantages(rewards_QG)


@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out"])
def test_a_group_of_one_has_no_baseline(baseline, rng):
    rewards_QG = rng.normal(size=(3, 1))
    with pytest.raises(UserError, match=f"baseline '{baseline}' needs at least 2 rollouts a prompt, there is 1"):
        group_advantages(rewards_QG, baseline)
    np.testing.assert_allclose(group_advantages(rewards_QG, "none", divide_by_std=False), rewards_QG, rtol=1e-7)  # rounded to float32


def test_unknown_names_are_refused_with_the_choices():
    with pytest.raises(UserError, match="advantage baseline is 'mean'; choose one of: group_mean, leave_one_out, none"):
        group_advantages(np.ones((1, 2)), "mean")
    with pytest.raises(UserError, match="normalisation is 'mean'; choose one of: sequence, token, constant, sum"):
        token_weights([1], "mean")


def test_token_weights_turn_a_sum_over_tokens_into_each_paper_s_mean(rng):
    lengths = rng.integers(1, 30, 7).tolist()
    losses = [rng.normal(size=n) for n in lengths]
    expected = {
        "sequence": np.mean([np.mean(x) for x in losses]),  # GRPO eq. 3
        "token": np.mean(np.concatenate(losses)),  # DAPO
        "constant": np.mean([np.sum(x) / 50 for x in losses]),  # Dr. GRPO, at most 50 tokens a rollout
        "sum": np.sum(np.concatenate(losses)),
    }
    for name, value in expected.items():
        weights = token_weights(lengths, name, max_tokens=50)
        np.testing.assert_allclose(sum(w * x.sum() for w, x in zip(weights, losses)), value, rtol=1e-12, err_msg=name)  # float64


@pytest.mark.parametrize("normalisation", ["sequence", "token", "constant", "sum"])
def test_no_tokens_give_finite_weights(normalisation):
    assert token_weights([], normalisation) == []
    assert np.isfinite(token_weights([0, 0], normalisation)).all()
