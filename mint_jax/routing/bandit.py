"""A contextual bandit over the policies that a prompt may go to: expected rewards, learned from the
rewards of answers, and a draw whose probabilities are known.

The expected reward of policy a for a prompt is ``w . f(c, c - max c) + r_a``: weights of the cosine
c of prompt and policy that all policies share, and an offset of each policy. Both minimise the same
squared error, with a ridge penalty on each: a mixed model (Henderson 1975, Biometrics 31:423). The
offsets explain what is particular to a policy, so that its rewards hardly move those of others,
however many they are. The utility is the expected reward less ``cost`` times the seconds until the
policy could start. Draws are weighted by the inverse of the gap to the best utility (SquareCB,
Foster and Rakhlin 2020, arXiv 2002.04926, algorithm 1): ``p(a) = 1 / (K + g gap(a))`` for all of
the K policies but the best one, which gets the rest. ``g`` grows with the square root of the
rewards.
"""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

PRIOR = np.array([0.0, 1.0, 0.0])  # weights before any reward: it is the cosine, 0 of the base
NOTHING = np.zeros((5, 5))  # moments of an arm without rewards
# Penalties, in rewards. With 1 in place of 20, one reward of nothing pulls a policy's untried
# neighbours below a mediocre base, which then answers (tests/routing/bandit_test.py).
RIDGE, SHRINK = 20.0, 4.0  # of the weights' distance from the prior, and of the offsets
SHARPNESS, GROWTH = 200.0, 20.0  # of g: at no reward, and per square root of K times rewards


class Arm(NamedTuple):
    """A policy that a request may go to, or the bare base, whose cosine is None."""

    key: Hashable
    cosine: float | None
    eta_s: float


class Option(NamedTuple):
    """An arm with its expected reward and the probability that it is drawn."""

    arm: Arm
    reward: float
    propensity: float


class Bandit:
    """One tenant's bandit.

    Args:
        cost: reward that a second of waiting costs.
        explore: False: the arm of the largest utility is always drawn.

    Attributes:
        arms: moments of each arm, ``[5, 5]``: sums of ``v vᵀ`` over its rewards, where v is the
            draw's features, 1, and the reward less what the prior expected.
    """

    def __init__(self, cost: float = 0.1, explore: bool = True):
        self.cost, self.explore = cost, explore
        self.arms: dict[Hashable, np.ndarray] = {}
        self.rewards = 0
        # Normal equations of the weights, from which the offsets are eliminated.
        self._gram, self._target = RIDGE * np.eye(len(PRIOR)), np.zeros(len(PRIOR))

    def put(self, key: Hashable, moments: np.ndarray) -> None:
        """Replaces an arm's moments."""
        for sign, some in (-1, self.arms.get(key, NOTHING)), (1, moments):
            sums, count = some[:-2, -2], some[-2, -2]
            self._gram += sign * (some[:-2, :-2] - np.outer(sums, sums) / (count + SHRINK))
            self._target += sign * (some[:-2, -1] - sums * some[-2, -1] / (count + SHRINK))
            self.rewards += sign * round(count)
        self.arms[key] = moments

    def features(self, arms: Sequence[Arm]) -> np.ndarray:
        """Returns ``[K, 3]``; zeros for the base."""
        cosines = [arm.cosine for arm in arms if arm.cosine is not None]
        most = max(cosines, default=0.0)
        rows = [(0.0,) * 3 if a.cosine is None else (1.0, a.cosine, a.cosine - most) for a in arms]
        return np.array(rows).reshape(-1, len(PRIOR))

    def options(self, arms: Sequence[Arm]) -> list[Option]:
        """Returns all arms with their probabilities; there is at least one."""
        change = np.linalg.solve(self._gram, self._target)
        own = np.array([self.arms.get(arm.key, NOTHING)[-2] for arm in arms])
        offsets = (own[:, -1] - own[:, :-2] @ change) / (own[:, -2] + SHRINK)
        expected = self.features(arms) @ (PRIOR + change) + offsets
        utility = expected - self.cost * np.array([arm.eta_s for arm in arms])
        best = int(np.argmax(utility))
        propensity = np.zeros(len(arms))
        if self.explore:
            sharp = SHARPNESS + GROWTH * np.sqrt(len(arms) * self.rewards)
            propensity = 1 / (len(arms) + sharp * (utility[best] - utility))
        propensity[best] = 0.0
        propensity[best] = 1 - propensity.sum()
        found = zip(arms, expected.tolist(), propensity.tolist())
        return [Option(*one) for one in found]

    def draw(self, options: Sequence[Option], uniform: float) -> Option:
        """Returns the option that a number in [0, 1) draws."""
        sums = np.cumsum([option.propensity for option in options])
        at = int(np.searchsorted(sums, uniform * sums[-1], side="right"))
        return options[min(at, len(options) - 1)]

    def learn(self, key: Hashable, features: np.ndarray, reward: float) -> None:
        """Learns from the reward of an answer; ``features`` are those of its draw, ``[3]``."""
        v = np.array([*features, 1.0, reward - features @ PRIOR])
        self.put(key, self.arms.get(key, NOTHING) + np.outer(v, v))
