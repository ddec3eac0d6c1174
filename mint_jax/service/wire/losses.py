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
from typing import Any

from mint_jax.errors import UserError, choice
from mint_jax.service.tinker_types import FLOAT32_MAX
from mint_jax.service.validation import shown
from mint_jax.train.config import KINDS
from mint_jax.train.losses import NO_LOSS, LossCoefs

CLIP, SAMPLED = ("clip_low_threshold", "clip_high_threshold"), ("logprobs", "advantages")
INPUTS = ("target_tokens", "weights", *SAMPLED, "sequence_ratio_mask")
# inputs besides ``target_tokens``, and options with their defaults; None: required
LOSSES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "cross_entropy": (("weights",), {}),
    "importance_sampling": (SAMPLED, {}),
    "ppo": (SAMPLED, dict(zip(CLIP, (0.8, 1.2)))),
    "cispo": (SAMPLED, dict(zip(CLIP, (0.0, 4.0)))),
    # the contract has no default, and peers differ by a hundred
    "dro": (SAMPLED, {"beta": None}),
    "gspo": ((*SAMPLED, "sequence_ratio_mask"), dict(zip(CLIP, (0.8, 1.2)))),
}


def coefs(name: str, config: Mapping[str, Any]) -> LossCoefs:
    """Returns a loss and its options as numbers; thresholds are ratios, not distances from 1.
    Raises ``UserError`` for an unknown loss or option, or a bad value.
    """
    if name in ("stable_reinforce", "custom"):
        instead = "send importance_sampling, or let the client differentiate its own loss"
        raise UserError(f"loss_fn {name!r} is not computed here: {instead}")
    if name not in LOSSES:
        raise choice("loss_fn", name[:80], LOSSES)
    options = LOSSES[name][1]
    numbers = options | dict(config)
    for key, value in numbers.items():
        if key not in options:
            takes = ", ".join(options) or "no options"
            raise UserError(f"loss_fn_config has {shown(key)}; {name} takes {takes}")
        if value is None and key not in config:
            raise UserError(f"loss_fn_config has no {key}; {name} needs it: give a number")
        if (
            not isinstance(value, int | float)
            or isinstance(value, bool)
            or not abs(value) <= FLOAT32_MAX
        ):
            raise UserError(f"loss_fn_config.{key} is {shown(value)}; expected a finite number")
    low, high = (float(numbers.get(key, default)) for key, default in zip(CLIP, (0, math.inf)))
    beta = float(numbers.get("beta", 0))
    if not 0 <= low <= high:
        found = f"clip_low_threshold is {low} and clip_high_threshold {high}"
        raise UserError(f"{found}; expected ratios, 0 <= low <= high, 0.8 and 1.2 say")
    if beta < 0:
        raise UserError(f"beta is {beta}; expected at least 0")
    return NO_LOSS._replace(kind=KINDS.index(name), ratio_low=low, ratio_high=high, beta=beta)
