"""Rewards -> advantages and token weights, on the host in float64.

Axes: Q prompts, G rollouts of a prompt.
"""

from collections.abc import Sequence

import numpy as np

from mint_jax.errors import UserError, choice

BASELINES = ("group_mean", "leave_one_out", "none")
NORMALISATIONS = ("sequence", "token", "constant", "sum")


def group_advantages(
    rewards_QG: np.ndarray, baseline: str = "group_mean", divide_by_std: bool | None = None, eps: float = 1e-4
) -> np.ndarray:
    """Advantages ``[Q, G]`` float32 of each prompt's rollouts against each other.

    Args:
        baseline: ``group_mean`` (GRPO, arXiv 2402.03300 section 4.1.2), ``leave_one_out`` (RLOO, arXiv 2402.14740 eq. 9) or ``none``.
        divide_by_std: GRPO's division by the group's (population) standard deviation; False is Dr. GRPO (arXiv 2503.20783 section 3.2).
            None is as the baseline's paper has it: ``group_mean`` is divided, ``leave_one_out`` and ``none`` are not.
        eps: added to the standard deviation.

    Raises:
        UserError: an unknown baseline, a reward that is not finite, or a group too small for its baseline.
    """
    rewards = np.asarray(rewards_QG, np.float64)
    if baseline not in BASELINES:
        raise choice("advantage baseline", baseline, BASELINES)
    if not np.isfinite(rewards).all():
        where = tuple(int(i) for i in np.argwhere(~np.isfinite(rewards))[0])
        raise UserError(
            f"reward at (prompt, rollout) {where} is {rewards[where]}; rewards must be finite numbers: mend the reward function"
        )
    group = rewards.shape[1]
    if group < 2 and baseline != "none":
        raise UserError(
            f"baseline {baseline!r} needs at least 2 rollouts a prompt, there is {group}: raise group_size or use baseline 'none'"
        )
    mean = rewards.mean(axis=1, keepdims=True)
    if baseline == "group_mean":
        advantages = rewards - mean
    elif baseline == "leave_one_out":
        advantages = (rewards - mean) * group / (group - 1)
    else:
        advantages = rewards
    if baseline == "group_mean" if divide_by_std is None else divide_by_std:
        advantages = advantages / (rewards.std(axis=1, keepdims=True) + eps)
    return advantages.astype(np.float32)


def token_weights(lengths: Sequence[int], normalisation: str, max_tokens: int = 1) -> list[float]:
    """The weight of every token of each sequence, given the lengths of all sequences of one policy's update.

    ``sequence``: mean over each sequence, then over sequences (GRPO eq. 3). ``token``: mean over all tokens (DAPO,
    arXiv 2503.14476 section 3.3). ``constant``: sum over tokens divided by ``max_tokens`` and the number of sequences (Dr.
    GRPO, arXiv 2503.20783). ``sum``: weight 1.
    """
    if normalisation not in NORMALISATIONS:
        raise choice("normalisation", normalisation, NORMALISATIONS)
    count, total = max(1, len(lengths)), max(1, sum(lengths))
    if normalisation == "sequence":
        return [1.0 / (count * max(1, length)) for length in lengths]
    if normalisation == "token":
        return [1.0 / total] * len(lengths)
    if normalisation == "constant":
        return [1.0 / (count * max_tokens)] * len(lengths)
    return [1.0] * len(lengths)
