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


def test_rewards_expected_are_those_of_one_regression_on_weights_and_offsets(rng):
    """Solved at once, with a column for each policy and for the base."""
    bandit, other, rows, rewards = Bandit(), Bandit(), [], []
    for _ in range(60):
        some = arms(*rng.uniform(-1, 1, 3))
        features, at = bandit.features(some), int(rng.integers(4))
        reward = float(rng.random())
        bandit.learn(some[at].key, features[at], reward)
        rows.append([*features[at], *np.eye(4)[at]])
        rewards.append(reward)
    X, y = np.array(rows), np.array(rewards)
    penalty = np.diag([RIDGE] * 3 + [SHRINK] * 4)
    solution = np.linalg.solve(X.T @ X + penalty, X.T @ (y - X[:, :3] @ PRIOR))
    some = arms(*rng.uniform(-1, 1, 3))
    wanted = bandit.features(some) @ (PRIOR + solution[:3]) + solution[3:]
    found = [one.reward for one in bandit.options(some)]
    np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-12)
    assert bandit.rewards == 60
    for key, moments in bandit.arms.items():  # as a server reads them after a restart
        other.put(key, moments)
    again = [one.reward for one in other.options(some)]
    np.testing.assert_allclose(again, found, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("cosines", [(0.9, 0.88, 0.87), (0.5, 0.45, 0.4), (0.9, 0.6, 0.5)])
def test_bad_policies_do_not_drag_down_their_neighbours(cosines):
    """After two that earn nothing the third is drawn, before a base that is known to earn 0.3."""
    bandit, drawn, some = Bandit(cost=0.0, explore=False), [], arms(*cosines)
    for _ in range(50):
        bandit.learn("base", np.zeros(3), 0.3)
    for _ in range(40):
        [one] = [o for o in bandit.options(some) if o.propensity]
        drawn.append(one.arm.key)
        reward = {0: 0.0, 1: 0.0, 2: 0.8, "base": 0.3}[one.arm.key]
        bandit.learn(one.arm.key, bandit.features(some)[some.index(one.arm)], reward)
    assert "base" not in drawn
    assert drawn[10:] == [2] * 30


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
