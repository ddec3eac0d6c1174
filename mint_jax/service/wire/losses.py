"""The losses of the Tinker contract, as ``train.losses`` computes them.

With lp = log p(target), q = ``logprobs``, A = ``advantages``, r = exp(lp - q), sg = no gradient, w
= ``weights`` (1 unless sent), each summed over every position:

    cross_entropy          -w lp
    importance_sampling    -w r A
    ppo                    -w min(r A, clip(r, low, high) A)
    cispo                  -w sg(clip(r, low, high)) lp A
    dro                    -w (lp A - beta/2 (lp - q)^2)
    gspo                   as ppo; r = exp(mean of lp - q over ``sequence_ratio_mask``)

``blocks.fill`` passes the sampler's log-probabilities as the old ones, so that ``train.losses``' k
is 1 and its r is this one. Log-ratios are clamped to ``MAX_LOG_RATIO``.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from mint_jax.errors import UserError, choice
from mint_jax.service.validation import shown
from mint_jax.train.config import KINDS
from mint_jax.train.losses import LossCoefs

LARGEST = 3.4028234663852886e38  # of float32


class Loss(NamedTuple):
    """Inputs besides ``target_tokens``, and options with their defaults; None: required."""

    needs: tuple[str, ...]
    options: Mapping[str, float | None]


SAMPLED = ("logprobs", "advantages")
LOSSES = {
    "cross_entropy": Loss(("weights",), {}),
    "importance_sampling": Loss(SAMPLED, {}),
    "ppo": Loss(SAMPLED, {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
    "cispo": Loss(SAMPLED, {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}),
    # the contract has no default, and peers differ by a hundred
    "dro": Loss(SAMPLED, {"beta": None}),
    "gspo": Loss(
        (*SAMPLED, "sequence_ratio_mask"), {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
    ),
}
INPUTS = ("target_tokens", "weights", "logprobs", "advantages", "sequence_ratio_mask")


def coefs(name: str, config: Mapping[str, Any]) -> LossCoefs:
    """Returns a loss and its options as numbers.

    Args:
        config: options by name; thresholds are ratios, not distances from 1.

    Raises:
        UserError: an unknown loss or option, or a bad value.
    """
    if name in ("stable_reinforce", "custom"):
        raise UserError(
            f"loss_fn {name!r} is not computed here: send importance_sampling, or let the client"
            " differentiate its own loss"
        )
    if name not in LOSSES:
        raise choice("loss_fn", name[:80], LOSSES)
    options = LOSSES[name].options
    numbers: dict[str, Any] = {"clip_low_threshold": 0.0, "clip_high_threshold": math.inf}
    numbers |= {"beta": 0.0, **options}
    for key, value in config.items():
        if key not in options:
            takes = ", ".join(options) or "no options"
            raise UserError(f"loss_fn_config has {shown(key)}; {name} takes {takes}")
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not abs(value) <= LARGEST:
            raise UserError(f"loss_fn_config.{key} is {shown(value)}; expected a finite number")
        numbers[key] = float(value)
    low, high, beta = numbers["clip_low_threshold"], numbers["clip_high_threshold"], numbers["beta"]
    if beta is None:
        raise UserError(f"loss_fn_config has no beta; {name} needs it: give a number")
    if not 0 <= low <= high:
        raise UserError(
            f"clip_low_threshold is {low} and clip_high_threshold {high}; expected ratios, 0 <= low"
            " <= high, 0.8 and 1.2 say"
        )
    if beta < 0:
        raise UserError(f"beta is {beta}; expected at least 0")
    return LossCoefs(KINDS.index(name), low, high, 0, 0.0, 0.0, math.inf, beta)  # type: ignore[arg-type]
