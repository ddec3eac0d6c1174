"""Whether a revision that is served among others is the revision itself: the rule by which a score
may be recorded.

The same prompts are sampled with the same seeds twice, with the revision loaded alone and in one
batch with all others. Exact equality cannot be asked for: in a batch of another shape sums are
taken in another order, and logits differ a little. Three things are asked for.

What the shared batch gave must be the revision's own. The sampler reports the log-probability of
every token that it drew. The same tokens are scored again, teacher forced, with the revision loaded
alone, and the two differ by rounding only. How much rounding explains is measured with the same
adapter, on its own tokens: the sampler's log-probabilities of the rows drawn alone against their
scores. These are two programs of one model, so their difference is what the base's dtype does,
whatever the depth: 1e-6 in float32, a few hundredths in bfloat16. The shared batch may differ from
the scores by ``WHOLE`` times as much over all tokens, root mean square, and its worst row by
``WORST`` times as much as the worst row alone. An adapter that is served in another's place differs
by what the two make of the same text, tenths of a nat and more; one whose change is smaller than
the dtype's rounding cannot be distinguished from rounding, here or in use.

Few rows may differ. A token is the argmax of logits plus Gumbel noise, so it differs only where the
two best are closer than ``d``, twice the error of a logit over the temperature; the largest gap
between the two samplings before a row's first other token stands for that error. Whatever the
distribution, the best leads by less than ``d`` with probability at most ``exp(d) - 1``: ``i`` leads
by more with probability ``p_i / (p_i + e^d (1 - p_i))``, and 1 minus their sum is ``sum p_i (1 -
p_i) (e^d - 1) / (p_i + e^d (1 - p_i)) <= e^d - 1``. After its first other token a row goes its own
way. So of N rows of at most T tokens ``N T (exp(d) - 1)`` are expected to differ at most; three
standard deviations of a Poisson count and one row are allowed on top. Greedy rows have no noise;
they are held to the same bound with temperature 1, for logits of the two best that lie a nat apart
or so, as a trained model's do.

The scores must agree. A row's two rewards are equally distributed, so their difference is as likely
positive as negative, and by Hoeffding's bound the sum of all exceeds ``SPREAD`` times the root of
the sum of their squares in fewer than 1 in 100,000 comparisons.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from mint_jax.rollout.request import Completion

# rounding of a log-probability where the two programs happen to agree: 2**-17 and 2**-8
LEAST = {"float32": 1e-5, "bfloat16": 4e-3}
# a mean over hundreds of tokens varies little, a largest row is one draw from a tail
WHOLE, WORST = 2.0, 4.0
SPREAD = 5.0  # 2 exp(-SPREAD ** 2 / 2) = 7e-6


@dataclasses.dataclass(frozen=True)
class Sampled:
    """What one adapter drew in one batch.

    Attributes:
        completions: of its rows.
        scores: log-probabilities of the same tokens, one array a row, by teacher forcing with the
            adapter loaded alone.
        rewards: of its rows.
    """

    completions: Sequence[Completion]
    scores: Sequence[np.ndarray]
    rewards: Sequence[float]

    def errors(self) -> list[np.ndarray]:
        """Differences between the sampler's log-probabilities and the scores, one array a row."""
        return [
            np.subtract(c.logprobs, s) for c, s in zip(self.completions, self.scores, strict=True)
        ]


@dataclasses.dataclass(frozen=True)
class Agreement:
    """What two samplings of the same rows have in common.

    Attributes:
        rows: compared.
        differ: those whose tokens are not the same; ``allowed``: how many may differ.
        gap: largest difference of a log-probability between the two before a row's first other
            token.
        error: of the shared batch's log-probabilities from the scores of the adapter alone, root
            mean square, nats; ``allowed_error``: how large it may be.
        worst: the same of the worst row; ``allowed_worst``: how large it may be.
        isolated, shared: mean rewards.
        tolerance: by how much the means may differ.
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
        """Whether the score may be recorded."""
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
    """Compares the same rows sampled alone and among others.

    Args:
        dtype: the base's.
        temperature: of the sampling; 0 is greedy.
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
    """Root mean square over all tokens, and of the row where it is largest; infinite where a number
    is none.
    """
    rows = [float(np.sqrt(np.mean(np.square(row)))) for row in errors]
    return _largest(np.sqrt(np.mean(np.square(np.concatenate(errors))))), _largest(rows)


def _largest(values: object) -> float:
    found = float(np.max(np.asarray(values)))
    return found if math.isfinite(found) else math.inf
