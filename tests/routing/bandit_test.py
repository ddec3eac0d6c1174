"""The bandit: its probabilities, and what it learns, against closed forms in float64."""

import numpy as np
import pytest

from mint_jax.routing import bandit as module
from mint_jax.routing.bandit import PRIOR, RIDGE, SHRINK, Arm, Bandit


def arms(*cosines: float, etas=None) -> list[Arm]:
    etas = etas or [0.0] * len(cosines)
    found = [Arm(i, cosine, eta) for i, (cosine, eta) in enumerate(zip(cosines, etas))]
    return [Arm("base", None, 0.0), *found]


def test_probabilities_are_those_of_inverse_gap_weighting(rng):
    some = arms(*rng.uniform(-1, 1, 5))
    found = Bandit().options(some)
    reward = np.array([one.reward for one in found])
    assert reward == pytest.approx([0.0, *(arm.cosine for arm in some[1:])]), "the prior"
    best = reward.argmax()
    for i, one in enumerate(found):
        if i != best:
            gap = reward[best] - one.reward
            assert one.propensity == pytest.approx(1 / (6 + module.SHARPNESS * gap))
    assert sum(one.propensity for one in found) == pytest.approx(1, abs=1e-12)
    draws = [Bandit().draw(found, u).arm.key for u in rng.random(20_000)]
    for one in found:  # five standard deviations
        share, p = draws.count(one.arm.key) / 20_000, one.propensity
        assert abs(share - p) < 5 * np.sqrt(p * (1 - p) / 20_000) + 1e-9
    assert Bandit().draw(found, 0.0) is found[0]
    assert Bandit().draw(found, np.nextafter(1.0, 0.0)) in found


def test_of_equal_policies_the_one_that_could_start_sooner_is_drawn():
    found = Bandit(cost=0.1, explore=False).options(arms(0.8, 0.8, 0.82, etas=[0.0, 1.0, 1.0]))
    assert [one.propensity for one in found] == [0.0, 1.0, 0.0, 0.0]
    found = Bandit(cost=0.0, explore=False).options(arms(0.8, 0.8, 0.82, etas=[0.0, 1.0, 1.0]))
    assert [one.propensity for one in found] == [0.0, 0.0, 0.0, 1.0]


def test_weights_are_those_of_ridge_regression(rng):
    bandit, rows, rewards = Bandit(), [], []
    for _ in range(30):
        features = bandit.features(arms(*rng.uniform(-1, 1, 3)))
        at, reward = int(rng.integers(4)), float(rng.random())
        bandit.learn(at, features[at], reward)
        rows.append(features[at])
        rewards.append(reward)
    X, y = np.array(rows), np.array(rewards)
    wanted = PRIOR + np.linalg.solve(X.T @ X + RIDGE * np.eye(3), X.T @ (y - X @ PRIOR))
    found = PRIOR + np.linalg.solve(bandit.gram, bandit.target)
    np.testing.assert_allclose(found, wanted, rtol=1e-9)
    assert sum(arm.count for arm in bandit.arms.values()) == bandit.rewards == 30


def test_a_policy_that_disappoints_and_a_base_that_is_better_are_learned(rng):
    bandit = Bandit()
    for _ in range(300):
        some = arms(0.9, 0.85)
        one = bandit.draw(bandit.options(some), rng.random())
        reward = {0: 0.1, 1: 0.8, "base": 0.3}[one.arm.key]
        features = bandit.features(some)[some.index(one.arm)]
        bandit.learn(one.arm.key, features, reward)
    options = {one.arm.key: one for one in bandit.options(arms(0.9, 0.85))}
    assert max(options.values(), key=lambda one: one.propensity).arm.key == 1
    assert options[1].propensity > 0.9
    # far from what any policy is for, the base answers
    far = {one.arm.key: one.reward for one in bandit.options(arms(-0.9, -0.95))}
    for _ in range(200):
        some = arms(-0.9, -0.95)
        one = bandit.draw(bandit.options(some), rng.random())
        features = bandit.features(some)[some.index(one.arm)]
        bandit.learn(one.arm.key, features, 0.3 if one.arm.key == "base" else 0.0)
    best = max(bandit.options(arms(-0.9, -0.95)), key=lambda one: one.propensity)
    assert best.arm.key == "base", far


def test_one_policys_mean_is_shrunk():
    bandit = Bandit()
    bandit.learn("base", np.zeros(3), 1.0)
    [base] = bandit.options(arms())
    assert base.reward == pytest.approx(1 / (1 + SHRINK))
    assert base.propensity == 1.0
