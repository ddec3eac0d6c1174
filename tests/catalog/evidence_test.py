"""Evidence against brute force, exact expectations, and the error rates of simulated streams."""

import itertools
import math

import numpy as np
import pytest

from mint_jax.catalog.evidence import FRACTIONS, ArmReward, CanaryEvidence, interval
from mint_jax.errors import UserError


def after(stream, margin: float) -> CanaryEvidence:
    evidence = CanaryEvidence()
    for one in stream:
        evidence = evidence.after(one, margin)
    return evidence


def wealth(stream, margin: float, sign: int) -> float:
    """Mean product of the bets by the formulas of the docstrings, number by number."""
    products = [1.0] * len(FRACTIONS)
    seen: list[float] = []
    for is_candidate, propensity, reward in stream:
        q = propensity if is_candidate else 1 - propensity
        m = (sum(seen) + 0.5) / (len(seen) + 1)
        z = (reward - m) / q if is_candidate else -(reward - m) / (1 - q)
        values = [(r - m) / q for r in (0, 1)] + [-(r - m) / (1 - q) for r in (0, 1)]
        bound = -min(sign * (value + margin) for value in values)
        products = [w * (1 + f * sign * (z + margin) / bound) for w, f in zip(products, FRACTIONS)]
        seen += [] if is_candidate else [reward]
    return math.fsum(products) / len(products)


def test_e_values_are_the_products_of_their_bets(rng):
    shares = rng.choice([0.05, 0.2, 0.5], 60)  # the share may change: propensities are logged
    arms = rng.random(60) < shares
    propensities = np.where(arms, shares, 1 - shares)
    stream = [
        ArmReward(bool(a), float(p), float(r))
        for a, p, r in zip(arms, propensities, rng.random(60))
    ]
    found = after(stream, 0.1)
    np.testing.assert_allclose(found.e_worse, wealth(stream, 0.1, -1), rtol=1e-9)
    np.testing.assert_allclose(found.e_fit, wealth(stream, 0.1, 1), rtol=1e-9)
    assert found.answers == (60 - arms.sum(), arms.sum())
    means = [np.mean([one.reward for one in stream if one.is_candidate == arm]) for arm in (0, 1)]
    np.testing.assert_allclose(found.means, means)
    assert CanaryEvidence.from_dict(found.to_dict()) == found


@pytest.mark.parametrize("better", [0.0, 0.2])
def test_the_expected_wealth_is_one_at_the_edge_of_the_hypothesis(better):
    """Over all outcomes of four requests, each with its exact probability."""
    share, margin, parent = 0.25, 0.1, 0.6
    candidate = parent - margin + better
    worse = fit = 0.0
    outcomes = list(itertools.product((False, True), (0.0, 1.0)))
    for four in itertools.product(outcomes, repeat=4):
        p, stream = 1.0, []
        for is_candidate, reward in four:
            drawn, mean = (share, candidate) if is_candidate else (1 - share, parent)
            p *= drawn * (mean if reward else 1 - mean)
            stream.append(ArmReward(is_candidate, drawn, reward))
        found = after(stream, margin)
        worse, fit = worse + p * found.e_worse, fit + p * found.e_fit
    if better:
        assert worse < 1 < fit
    else:
        np.testing.assert_allclose((worse, fit), 1.0, rtol=1e-12)


def decided(rng, candidate: float, parent: float, count: int, share: float = 0.2) -> int:
    """1 once the candidate is found worse, -1 once it is found fit, looking at every request."""
    evidence = CanaryEvidence()
    for is_candidate, uniform in zip(rng.random(count) < share, rng.random(count)):
        drawn, mean = (share, candidate) if is_candidate else (1 - share, parent)
        evidence = evidence.after(ArmReward(bool(is_candidate), drawn, float(uniform < mean)), 0.1)
        if max(evidence.e_worse, evidence.e_fit) >= 20:
            return 1 if evidence.e_worse >= 20 else -1
    return 0


def test_a_collapsed_and_a_better_candidate_are_found(rng):
    assert [decided(rng, 0.0, 0.6, 300) for _ in range(10)] == [1] * 10
    assert [decided(rng, 0.9, 0.6, 600) for _ in range(10)] == [-1] * 10


def test_intervals_are_those_of_a_search_and_cover(rng):
    x = rng.random(40) ** 2
    low, high = interval(x, 0.1)

    def refuted(m: float, sign: int) -> bool:
        bound = m if sign > 0 else 1 - m
        products = [np.prod(1 + f * sign * (x - m) / bound) for f in FRACTIONS]
        return bool(np.mean(products) >= 20)

    grid = np.linspace(0.0005, 0.9995, 1000)
    left = [m for m in grid if not (refuted(m, 1) or refuted(m, -1))]
    np.testing.assert_allclose((low, high), (left[0], left[-1]), atol=1.1e-3)
    assert interval([0.0, 0.0])[0] == 0.0
    assert interval([1.0])[1] == 1.0
    missed = sum(not a <= 0.3 <= b for a, b in (interval(rng.random(60) < 0.3) for _ in range(200)))
    assert missed <= 22  # binomial(200, 0.05) exceeds 22 with probability 0.0003


@pytest.mark.parametrize("reward", [-0.1, 1.5, float("nan"), float("inf")])
def test_rewards_outside_0_to_1_are_refused_by_value(reward):
    with pytest.raises(UserError, match=f"reward is {reward}; expected a number from 0 to 1"):
        CanaryEvidence().after(ArmReward(True, 0.5, reward), 0.1)
    with pytest.raises(UserError, match="expected a number from 0 to 1"):
        interval([0.5, reward])
    with pytest.raises(UserError, match="there are no rewards"):
        interval([])
    for propensity in (0.0, 1.0, float("nan")):
        with pytest.raises(UserError, match="propensity is"):
            CanaryEvidence().after(ArmReward(True, propensity, 0.5), 0.1)
