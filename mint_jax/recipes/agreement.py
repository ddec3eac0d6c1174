"""Tells whether a revision that is served in a batch with others is the revision itself: only then
is its score recorded.

The same prompts are sampled with the same seeds twice: with the revision alone, and in one batch
with all others. Batches of other shapes take sums in another order, so exact equality is not
expected. Three conditions must hold.

1. The batch's log-probabilities are the revision's own. The sampled tokens are scored again,
teacher forced, with the revision alone; the two differ by rounding only. The rounding of the dtype
is measured on the rows drawn alone, by the same two programs: 1e-6 in float32, a few hundredths in
bfloat16. The batch may differ by ``WHOLE`` times as much over all tokens (root mean square), and
its worst row by ``WORST`` times the worst row alone. Another adapter differs by tenths of a nat;
one that changes less than the rounding cannot be distinguished from it.

2. Few rows have other tokens. A token is the argmax of logits plus Gumbel noise, so it changes only
where the two best are closer than ``d``, twice the error of a logit over the temperature; the
largest gap of log-probabilities before a row's first other token estimates that error. For any
distribution this has probability at most ``exp(d) - 1``: token ``i`` leads by more with probability
``p_i / (p_i + e^d (1 - p_i))``, and 1 minus their sum is ``sum p_i (1 - p_i) (e^d - 1) / (p_i + e^d
(1 - p_i)) <= e^d - 1``. So of N rows of at most T tokens at most ``N T (exp(d) - 1)`` are expected
to differ; three standard deviations of a Poisson count and one row are allowed on top. Greedy rows
are held to the bound of temperature 1.

3. The scores agree. A row's two rewards have the same distribution, so by Hoeffding's bound the sum
of their differences exceeds ``SPREAD`` times the root of the sum of their squares in fewer than 1
in 100,000 comparisons.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from mint_jax.rollout.request import Completion

# least rounding of a log-probability: 2**-17 and 2**-8
LEAST = {"float32": 1e-5, "bfloat16": 4e-3}
# a mean over hundreds of tokens varies little, a largest row is one draw from a tail
WHOLE, WORST = 2.0, 4.0
SPREAD = 5.0  # 2 exp(-SPREAD ** 2 / 2) = 7e-6


@dataclasses.dataclass(frozen=True)
class Sampled:
    """Rows that one adapter drew in one batch.

    Attributes:
        completions: one a row.
        scores: log-probabilities of their tokens under the adapter alone, one array a row.
        rewards: one a row.
    """

    completions: Sequence[Completion]
    scores: Sequence[np.ndarray]
    rewards: Sequence[float]

    def errors(self) -> list[np.ndarray]:
        """Returns sampled log-probabilities minus scores, one array a row."""
        return [
            np.subtract(c.logprobs, s) for c, s in zip(self.completions, self.scores, strict=True)
        ]


@dataclasses.dataclass(frozen=True)
class Agreement:
    """Comparison of two samplings of the same rows.

    Attributes:
        rows: number of rows compared.
        differ, allowed: number of rows with other tokens, and its bound.
        gap: largest difference of a log-probability before a row's first other token, nats.
        error, allowed_error: root mean square of the batch's log-probabilities minus the adapter's
            own, nats, and its bound.
        worst, allowed_worst: the same of the worst row.
        isolated, shared: mean rewards alone and in the batch.
        tolerance: bound of their difference.
    """

    rows: int
    differ: int
    allowed: int
    gap: float
    error: float
    allowed_error: float
    worst: float
    allowed_worst: float
    isolated: float
    shared: float
    tolerance: float

    @property
    def holds(self) -> bool:
        """True where the score may be recorded."""
        served = self.error <= self.allowed_error and self.worst <= self.allowed_worst
        return (
            math.isfinite(self.worst)
            and served
            and self.differ <= self.allowed
            and abs(self.isolated - self.shared) <= self.tolerance
        )

    def __str__(self) -> str:
        return (
            f"score {self.isolated:.4f} loaded alone and {self.shared:.4f} in a shared batch:"
            f" {self.differ} of {self.rows} rows have other tokens ({self.allowed} may), the shared"
            f" batch's log-probabilities are off by {self.error:.2g} nats ({self.allowed_error:.2g}"
            f" may be rounding), those of its worst row by {self.worst:.2g}"
            f" ({self.allowed_worst:.2g} may)"
        )


def compare(alone: Sampled, among: Sampled, dtype: str, temperature: float) -> Agreement:
    """Compares the same rows sampled alone and in a batch with others.

    Args:
        dtype: of the base.
        temperature: 0 is greedy.
    """
    differ, gap = 0, 0.0
    for a, b in zip(alone.completions, among.completions, strict=True):
        same = next(
            (i for i, (x, y) in enumerate(zip(a.tokens, b.tokens)) if x != y),
            min(len(a.tokens), len(b.tokens)),
        )
        differ += a.tokens != b.tokens
        if same:
            with np.errstate(invalid="ignore"):  # infinity less infinity
                gap = max(gap, _largest(np.abs(np.subtract(a.logprobs[:same], b.logprobs[:same]))))
    rows = len(alone.completions)
    longest = max(len(c.tokens) for sampled in (alone, among) for c in sampled.completions)
    d = 2 * gap / (temperature or 1.0)
    expected = rows * longest * math.expm1(d if d < 1.0 else 1.0)
    allowed = min(rows, math.floor(expected + 3 * math.sqrt(expected)) + 1)
    (noise, noisiest), (error, worst) = (_sizes(sampled.errors()) for sampled in (alone, among))
    difference = np.subtract(alone.rewards, among.rewards)
    most = allowed * float(
        max(*alone.rewards, *among.rewards) - min(*alone.rewards, *among.rewards)
    )
    tolerance = min(most, SPREAD * float(np.sqrt(np.sum(difference**2)))) / rows + 1e-9
    isolated, shared = float(np.mean(alone.rewards)), float(np.mean(among.rewards))
    least = LEAST[dtype]
    bounds = WHOLE * max(noise, least), WORST * max(noisiest, least)
    return Agreement(
        rows, differ, allowed, gap, error, bounds[0], worst, bounds[1], isolated, shared, tolerance
    )


def _sizes(errors: Sequence[np.ndarray]) -> tuple[float, float]:
    """Returns the root mean square over all tokens, and that of the worst row; infinite for NaN."""
    rows = [float(np.sqrt(np.mean(np.square(row)))) for row in errors]
    return _largest(np.sqrt(np.mean(np.square(np.concatenate(errors))))), _largest(rows)


def _largest(values: object) -> float:
    found = float(np.max(np.asarray(values)))
    return found if math.isfinite(found) else math.inf
