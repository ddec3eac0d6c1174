"""The losses of the Tinker contract, as ``train.losses`` computes them.

With lp = log p(target), q = ``logprobs``, A = ``advantages``, r = exp(lp - q), sg = no gradient, w
= ``weights`` (1 unless sent), each summed over every position:

    cross_entropy          -w lp
    importance_sampling    -w r A
    ppo                    -w min(r A, clip(r, low, high) A)
    cispo                  -w sg(clip(r, low, high)) lp A
    dro                    -w (lp A - beta/2 (lp - q)^2)
    gspo                   as ppo, with s = exp(mean over the positions of ``sequence_ratio_mask``
    of (lp - q)) for r

``blocks.fill`` passes the sampler's log-probabilities as the old ones, so that ``train.losses``' k
is 1 and its r is this one. Log-ratios are clamped to ``MAX_LOG_RATIO``.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

from mint_jax.errors import UserError, choice
from mint_jax.service.wire.reading import number, shown
from mint_jax.train.config import KINDS
from mint_jax.train.losses import LossCoefs

CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}


class Loss(NamedTuple):
    """A loss's inputs besides ``target_tokens``, and its options with their defaults; None: the
    option is required.
    """

    needs: tuple[str, ...]
    options: Mapping[str, float | None]


LOSSES = {
    "cross_entropy": Loss(("weights",), {}),
    "importance_sampling": Loss(("logprobs", "advantages"), {}),
    "ppo": Loss(("logprobs", "advantages"), CLIP),
    "cispo": Loss(
        ("logprobs", "advantages"), {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}
    ),
    # the contract has no default, and peers differ by a hundred
    "dro": Loss(("logprobs", "advantages"), {"beta": None}),
    "gspo": Loss(("logprobs", "advantages", "sequence_ratio_mask"), CLIP),
}
INPUTS = ("target_tokens", "weights", "logprobs", "advantages", "sequence_ratio_mask")


def coefs(name: str, config: Mapping[str, object]) -> LossCoefs:
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
    if unknown := [key for key in config if key not in options]:
        raise UserError(
            f"loss_fn_config has {shown(unknown[0])}; {name} takes"
            f" {', '.join(options) or 'no options'}"
        )
    values = {
        key: default if key not in config else number(config[key], f"loss_fn_config.{key}")
        for key, default in options.items()
    }
    if missing := [key for key, value in values.items() if value is None]:
        raise UserError(f"loss_fn_config has no {missing[0]}; {name} needs it: give a number")
    numbers = {"clip_low_threshold": 0.0, "clip_high_threshold": math.inf, "beta": 0.0} | {
        k: v for k, v in values.items() if v is not None
    }
    low, high, beta = numbers["clip_low_threshold"], numbers["clip_high_threshold"], numbers["beta"]
    if not 0 <= low <= high:
        raise UserError(
            f"clip_low_threshold is {low} and clip_high_threshold {high}; expected ratios, 0 <= low"
            " <= high, 0.8 and 1.2 say"
        )
    if beta < 0:
        raise UserError(f"beta is {beta}; expected at least 0")
    return LossCoefs(KINDS.index(name), low, high, 0, 0.0, 0.0, math.inf, beta)  # type: ignore[arg-type]
