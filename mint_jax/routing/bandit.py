"""A contextual bandit over the policies that a prompt may go to: expected rewards, learned from the
rewards of answers, and a draw whose probabilities are known.

The expected reward of policy a for a prompt is ``w . f(c, c - max c) + r_a``: a ridge regression on
the cosine c of prompt and policy, shared by all policies, and the policy's own mean residual,
shrunk to 0. Its utility is that less ``cost`` times the seconds until the policy could start. Draws
are weighted by the inverse of the gap to the best utility (SquareCB, Foster and Rakhlin 2020, arXiv
2002.04926, algorithm 1): ``p(a) = 1 / (K + g gap(a))`` for all of the K policies but the best one,
which gets the rest. ``g`` grows with the square root of the rewards.
"""

import dataclasses
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

PRIOR = np.array([0.0, 1.0, 0.0])  # weights before any reward: it is the cosine
BASE_REWARD = 0.0  # of the base before any reward
RIDGE = 1.0  # rewards that the prior is worth
SHRINK = 4.0  # the same, of a policy's own mean
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


@dataclasses.dataclass
class Residuals:
    """Rewards of one arm: their number, and the sum of what the regression does not explain."""

    count: int = 0
    total: float = 0.0

    @property
    def mean(self) -> float:
        return self.total / (self.count + SHRINK)


class Bandit:
    """One tenant's bandit.

    Args:
        cost: reward that a second of waiting costs.
        explore: False: the arm of the largest utility is always drawn.
    """

    def __init__(self, cost: float = 0.1, explore: bool = True):
        self.cost, self.explore = cost, explore
        self.gram, self.target = RIDGE * np.eye(len(PRIOR)), np.zeros(len(PRIOR))
        self.arms: dict[Hashable, Residuals] = {}
        self.rewards = 0

    def features(self, arms: Sequence[Arm]) -> np.ndarray:
        """Returns ``[K, 3]``; zeros for the base."""
        cosines = [arm.cosine for arm in arms if arm.cosine is not None]
        most = max(cosines, default=0.0)
        rows = [(0.0,) * 3 if a.cosine is None else (1.0, a.cosine, a.cosine - most) for a in arms]
        return np.array(rows).reshape(-1, len(PRIOR))

    def options(self, arms: Sequence[Arm]) -> list[Option]:
        """Returns all arms with their probabilities; there is at least one."""
        weights = PRIOR + np.linalg.solve(self.gram, self.target)
        own = [self.arms.get(arm.key, Residuals()).mean for arm in arms]
        floor = [BASE_REWARD if arm.cosine is None else 0.0 for arm in arms]
        expected = self.features(arms) @ weights + own + floor
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
        self.gram += np.outer(features, features)
        self.target += features * (reward - features @ PRIOR)
        weights = PRIOR + np.linalg.solve(self.gram, self.target)
        arm = self.arms.setdefault(key, Residuals())
        arm.count, arm.total = arm.count + 1, arm.total + reward - float(features @ weights)
        self.rewards += 1
