"""Evidence about rewards in [0, 1] that is valid at every look: bets against a hypothesis.

A hypothesis says that some gains have a mean of at most 0 given the past. A gambler who bets a
fraction f of what cannot be lost then has the expected wealth 1 at every time,

    wealth_t = mean over f of prod_{i <= t} (1 + f gain_i / bound_i),   gain_i >= -bound_i,

and by Ville's inequality P(wealth_t >= 1 / alpha at any t) <= alpha: whoever stops there is wrong
with a probability of at most alpha, however often he looks. The bets of all fractions run at once,
so that none has to be chosen. The bound of a gain may depend on the past, not on the gain.

Papers: Waudby-Smith and Ramdas 2020, "Estimating means of bounded random variables by betting",
arXiv:2010.09686; with logged propensities Waudby-Smith, Wu, Ramdas, Karampatziakis and Mineiro
2022, "Anytime-valid off-policy inference for contextual bandits", arXiv:2210.10768. All numbers are
float64.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mint_jax.errors import UserError

FRACTIONS = 0.98 * 2.0 ** -np.arange(10.0)  # of the largest bet, `[K]`


class ArmReward(NamedTuple):
    """The reward of one answer, in [0, 1].

    Attributes:
        is_candidate: the candidate answered, not the parent.
        propensity: probability with which this arm was drawn, above 0.
    """

    is_candidate: bool
    propensity: float
    reward: float


@dataclasses.dataclass(frozen=True)
class CanaryEvidence:
    """Evidence about a candidate against its parent, so far.

    Attributes:
        worse: log wealth `[K]` of bets that the candidate is worse than parent - margin.
        fit: log wealth `[K]` of bets that it is not.
        answers, total: number of rewards and their sum, of the parent and of the candidate.
    """

    worse: tuple[float, ...] = (0.0,) * len(FRACTIONS)
    fit: tuple[float, ...] = (0.0,) * len(FRACTIONS)
    answers: tuple[int, int] = (0, 0)
    total: tuple[float, float] = (0.0, 0.0)

    @property
    def e_worse(self) -> float:
        """E-value against "at least parent - margin"."""
        return e_value(np.asarray(self.worse))

    @property
    def e_fit(self) -> float:
        """E-value against "at most parent - margin"."""
        return e_value(np.asarray(self.fit))

    @property
    def means(self) -> tuple[float | None, float | None]:
        """Mean rewards of the parent and of the candidate; None without a reward."""
        parent, candidate = (t / n if n else None for t, n in zip(self.total, self.answers))
        return parent, candidate

    def after(self, one: ArmReward, margin: float) -> "CanaryEvidence":
        """Returns the evidence after one more reward R of arm A, which is 1 for the candidate.

        With the candidate's propensity q and a centre m that depends on earlier rewards only,

            Z = (A / q - (1 - A) / (1 - q)) (R - m),   E[Z | past] = E[R(1) - R(0) | past],

        since the first factor has the mean 0. No arm has to be stationary. Z is between -low and
        high, low = max(m / q, (1 - m) / (1 - q)) and high = max((1 - m) / q, m / (1 - q)). Bets on
        "worse" gain -(Z + margin), bets on "fit" Z + margin.

        Raises:
            UserError: reward or propensity are out of range.
        """
        check_reward(one.reward)
        if not 0 < one.propensity < 1:
            raise UserError(
                f"propensity is {one.propensity}; expected a probability between 0 and 1: log it"
                " when the arm is drawn"
            )
        q = one.propensity if one.is_candidate else 1 - one.propensity
        m = (self.total[0] + 0.5) / (self.answers[0] + 1)
        z = (one.reward - m) * (1 / q if one.is_candidate else -1 / (1 - q))
        low, high = max(m / q, (1 - m) / (1 - q)), max((1 - m) / q, m / (1 - q))
        arm = (not one.is_candidate, one.is_candidate)
        return CanaryEvidence(
            tuple(grown(np.asarray(self.worse), -(z + margin), high + margin).tolist()),
            tuple(grown(np.asarray(self.fit), z + margin, low - margin).tolist()),
            (self.answers[0] + arm[0], self.answers[1] + arm[1]),
            (self.total[0] + arm[0] * one.reward, self.total[1] + arm[1] * one.reward),
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields for JSON, from which ``from_dict`` makes the same evidence."""
        return {name: list(value) for name, value in dataclasses.asdict(self).items()}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "CanaryEvidence":
        """Returns the evidence of ``to_dict``."""
        return cls(**{name: tuple(value) for name, value in fields.items()})


def check_reward(reward: float) -> None:
    """Raises ``UserError`` for a reward outside [0, 1]."""
    if not 0 <= reward <= 1:
        raise UserError(f"reward is {reward}; expected a number from 0 to 1: scale it")


def grown(log_wealth: np.ndarray, gain: Any, bound: Any) -> np.ndarray:
    """Returns log wealth `[..., K]` after a gain that is at least -``bound``."""
    ratio = np.maximum(np.asarray(gain, np.float64) / bound, -1.0)  # rounding may pass the bound
    return log_wealth + np.log1p(ratio[..., None] * FRACTIONS)


def e_value(log_wealth: np.ndarray) -> float:
    """Returns the mean wealth of the bets `[K]`, 1e304 at most."""
    most = log_wealth.max()
    return math.exp(min(700.0, most + math.log(np.exp(log_wealth - most).mean())))


def interval(rewards: Sequence[float] | np.ndarray, alpha: float = 0.05) -> tuple[float, float]:
    """Returns bounds of the mean of rewards in [0, 1] that hold at every look with probability
    1 - ``alpha``: the means that bets on "more" and on "less" have not refuted at ``alpha`` / 2.

    Raises:
        UserError: there is no reward, or one is out of range.
    """
    x = np.asarray(rewards, np.float64)
    if not x.size:
        raise UserError("there are no rewards: an interval needs one at least")
    check_reward(float(x.min()))  # NaN too
    check_reward(float(x.max()))
    return _least(x, alpha), 1.0 - _least(1.0 - x, alpha)


def _least(x: np.ndarray, alpha: float) -> float:
    """Returns the smallest mean m that bets with gains x - m do not refute; wealth falls in m."""
    low, high = 0.0, 1.0
    for _ in range(50):
        m = (low + high) / 2
        wealth = grown(np.zeros(len(FRACTIONS)), x - m, m).sum(0)
        low, high = (m, high) if e_value(wealth) >= 2 / alpha else (low, m)
    return low
