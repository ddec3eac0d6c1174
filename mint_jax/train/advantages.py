"""Conversion of rewards to advantages and token weights, on the host in float64.

Axes: Q prompts, G rollouts of a prompt.
"""

from collections.abc import Sequence

import numpy as np

from mint_jax.errors import UserError, choice

BASELINES = ("group_mean", "leave_one_out", "none")
ROUNDINGS = 4  # tolerance in float spacings: rewards are often sums, and 0.1 + 0.2 is not 0.3
NORMALISATIONS = ("sequence", "token", "constant", "sum")


def group_advantages(
    rewards_QG: np.ndarray,
    baseline: str = "group_mean",
    divide_by_std: bool | None = None,
    eps: float = 1e-4,
) -> np.ndarray:
    """Returns the advantages of each prompt's rollouts against each other, ``[Q, G]`` float32.
    Rewards of a group that are equal up to rounding give exactly 0 (with baseline ``none``: the
    rewards).

    Args:
        baseline: ``group_mean`` (GRPO, arXiv 2402.03300 section 4.1.2), ``leave_one_out`` (RLOO,
            arXiv 2402.14740 eq. 9) or ``none``.
        divide_by_std: divide by the group's population standard deviation. False is Dr. GRPO (arXiv
            2503.20783 section 3.2). None follows the baseline's paper: True for ``group_mean``
            only.
        eps: added to the standard deviation.

    Raises:
        UserError: an unknown baseline, a reward that is not finite or too large for float32, or a
            group too small for its baseline.
    """
    given = np.asarray(rewards_QG)
    rewards = given.astype(np.float64)
    if baseline not in BASELINES:
        raise choice("advantage baseline", baseline, BASELINES)
    if not np.isfinite(rewards).all():
        where = tuple(int(i) for i in np.argwhere(~np.isfinite(rewards))[0])
        raise UserError(
            f"reward at (prompt, rollout) {where} is {rewards[where]}; rewards must be finite"
            " numbers: fix the reward function"
        )
    group = rewards.shape[1]
    if group < 2 and baseline != "none":
        raise UserError(
            f"baseline {baseline!r} needs at least 2 rollouts a prompt, got {group}: raise"
            " group_size or use baseline 'none'"
        )
    # The mean of equal numbers is off by rounding, and Adam turns an advantage of 1e-17 into a full
    # step. So rewards are taken relative to the group's first, a spread of a few roundings counts
    # as 0, and the unit is a power of two near the largest reward, so that no square over- or
    # underflows.
    size = np.abs(rewards).max(axis=1, keepdims=True, initial=0.0)
    unit = np.ldexp(1.0, np.maximum(np.frexp(size)[1] - 1, -1000))
    from_first = rewards / unit - rewards[:, :1] / unit
    precision = given.dtype if given.dtype.kind == "f" else np.float64
    from_first[np.ptp(from_first, axis=1) <= ROUNDINGS * np.finfo(precision).eps] = 0.0
    centred = from_first - from_first.mean(axis=1, keepdims=True)
    if baseline == "none":
        advantages = rewards / unit
    else:
        advantages = centred * (group / (group - 1) if baseline == "leave_one_out" else 1.0)
    divides = baseline == "group_mean" if divide_by_std is None else divide_by_std
    with np.errstate(over="ignore"):
        if divides:
            advantages = advantages / (centred.std(axis=1, keepdims=True) + eps / unit)
        else:
            advantages = advantages * unit
        result = advantages.astype(np.float32)
    if not np.isfinite(result).all():
        raise UserError(
            f"rewards of up to {size.max():g} give advantages beyond float32: scale them down"
        )
    return result


def token_weights(lengths: Sequence[int], normalisation: str, max_tokens: int = 1) -> list[float]:
    """Returns the weight of each sequence's tokens, given the lengths of all sequences of one
    policy's update.

    ``sequence``: mean over each sequence, then over sequences (GRPO eq. 3). ``token``: mean over
    all tokens (DAPO, arXiv 2503.14476 section 3.3). ``constant``: sum over tokens divided by
    ``max_tokens`` and the number of sequences (Dr. GRPO, arXiv 2503.20783). ``sum``: weight 1.
    """
    if normalisation not in NORMALISATIONS:
        raise choice("normalisation", normalisation, NORMALISATIONS)
    count = max(1, len(lengths))
    if normalisation == "sequence":
        return [1.0 / (count * max(1, length)) for length in lengths]
    sizes = {"token": max(1, sum(lengths)), "constant": count * max_tokens, "sum": 1}
    return [1.0 / sizes[normalisation]] * len(lengths)
