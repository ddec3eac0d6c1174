"""Whether a revision that is served among others is the revision itself: the rule by which a score may be recorded.

The same prompts are sampled with the same seeds twice, with the revision loaded alone and in one batch with all others. Exact
equality cannot be asked for: in a batch of another shape sums are taken in another order, and logits differ a little. Two things
are asked for.

Until a row's first other token both samplings read the same text, so their log-probabilities must agree up to rounding,
``ALLOWED_GAP``. This finds an adapter that is wrong but near, whose tokens would mostly be the same.

Few rows may differ. A token is the argmax of logits plus Gumbel noise, so it differs only where the two best are closer than
``d``, twice the error of a logit over the temperature; the largest gap seen stands for that error. Whatever the distribution, the
best leads by less than ``d`` with probability at most ``exp(d) - 1``: ``i`` leads by more with probability ``p_i / (p_i + e^d (1 -
p_i))``, and 1 minus their sum is ``sum p_i (1 - p_i) (e^d - 1) / (p_i + e^d (1 - p_i)) <= e^d - 1``. After its first other token a
row goes its own way. So of N rows of at most T tokens ``N T (exp(d) - 1)`` are expected to differ at most; three standard
deviations of a Poisson count and one row are allowed on top. Greedy rows have no noise; they are held to the same bound with
temperature 1, for logits of the two best that lie a nat apart or so, as a trained model's do.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from mint_jax.rollout.engine import Completion

# Rounding of a log-probability by the base's dtype: 2**-24 and 2**-9 relative, logits of some tens, tens of layers.
ALLOWED_GAP = {"float32": 1e-3, "bfloat16": 0.25}


@dataclasses.dataclass(frozen=True)
class Agreement:
    """What two samplings of the same rows have in common.

    Attributes:
        rows: compared.
        differ: those whose tokens are not the same; ``allowed``: how many may differ.
        gap: largest difference of a log-probability before a row's first other token; ``allowed_gap``: how large it may be.
        isolated, shared: mean rewards.
        tolerance: by how much the means may differ: ``allowed`` rows with the rewards furthest apart.
    """

    rows: int
    differ: int
    allowed: int
    gap: float
    allowed_gap: float
    isolated: float
    shared: float
    tolerance: float

    @property
    def holds(self) -> bool:
        """Whether the score may be recorded."""
        return self.differ <= self.allowed and self.gap <= self.allowed_gap and abs(self.isolated - self.shared) <= self.tolerance

    def __str__(self) -> str:
        return (
            f"score {self.isolated:.4f} loaded alone and {self.shared:.4f} in a shared batch: {self.differ} of {self.rows} rows have "
            f"other tokens ({self.allowed} may), log-probabilities differ by {self.gap:.2g} ({self.allowed_gap:.2g} may)"
        )


def compare(
    alone: Sequence[Completion],
    among: Sequence[Completion],
    rewards: tuple[Sequence[float], Sequence[float]],
    dtype: str,
    temperature: float,
) -> Agreement:
    """Compares the same rows sampled alone and among others.

    Args:
        rewards: of ``alone`` and of ``among``.
        dtype: the base's.
        temperature: of the sampling; 0 is greedy.
    """
    differ, gap = 0, 0.0
    for a, b in zip(alone, among, strict=True):
        same = next((i for i, (x, y) in enumerate(zip(a.tokens, b.tokens)) if x != y), min(len(a.tokens), len(b.tokens)))
        differ += a.tokens != b.tokens
        if same:
            gap = max(gap, float(np.abs(np.subtract(a.logprobs[:same], b.logprobs[:same])).max()))
    longest = max(len(c.tokens) for rows in (alone, among) for c in rows)
    expected = len(alone) * longest * math.expm1(min(1.0, 2 * gap / (temperature or 1.0)))
    allowed = min(len(alone), math.floor(expected + 3 * math.sqrt(expected)) + 1)
    both = [*rewards[0], *rewards[1]]
    tolerance = allowed * (max(both) - min(both)) / len(alone) + 1e-9
    isolated, shared = (float(np.mean(values)) for values in rewards)
    return Agreement(len(alone), differ, allowed, gap, ALLOWED_GAP[dtype], isolated, shared, tolerance)
