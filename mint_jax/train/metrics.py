"""Metrics of a policy's loss, and the inputs that the loss needs."""

from collections.abc import Iterator, Sequence

import numpy as np

from mint_jax.errors import UserError
from mint_jax.train import losses
from mint_jax.train.batch import Group, TrainSequence
from mint_jax.train.blocks import TrainRequest
from mint_jax.train.config import LossConfig


def _sequences(groups: Sequence[Group]) -> Iterator[TrainSequence]:
    return (s for g in groups for s in g.sequences)


def check_needs(name: str, loss: LossConfig, groups: Sequence[Group]) -> None:
    """Raises ``UserError`` if groups lack inputs of the loss, which would then train nothing or
    something else.
    """
    if not groups:
        raise UserError(
            f"policy {name!r} has no sequences to train on: leave it out of this update"
        )
    what = {"advantages": "advantages", "old_logp": "old_logp, the sampler's log-probabilities"}
    needed = sorted(loss.needs & set(what))
    for field in needed:
        for i, s in enumerate(_sequences(groups)):
            if getattr(s, field) is None:
                raise UserError(
                    f"policy {name!r}: loss {loss.kind!r} needs"
                    f" {' and '.join(what[f] for f in needed)}, and sequence {i} has no {field}:"
                    " train on scored completions (see mint_jax.groups), or use loss"
                    " 'cross_entropy' to train on texts"
                )
    if "pairs" in loss.needs and not all(g.pair_weight for g in groups):
        raise UserError(
            f"policy {name!r}: loss {loss.kind!r} needs pairs of a chosen and a rejected answer,"
            " and a group has no pair_weight: give rows with prompt, chosen and rejected, or"
            " choose another loss"
        )
    if "pairs" not in loss.needs and any(g.pair_weight for g in groups):
        raise UserError(
            f"policy {name!r}: loss {loss.kind!r} does not use the pairs of these groups: choose"
            " loss 'dpo', 'ipo' or 'simpo'"
        )


def of_loss(work: TrainRequest, loss: LossConfig, groups: Sequence[Group]) -> dict[str, float]:
    """Returns the summed metrics that are meaningful for a loss and its data; ``unrouted`` counts
    targets without recorded experts, which are left out.
    """
    drawn = loss.samples and all(s.old_logp is not None for s in _sequences(groups))
    means = {
        "kl_sum": loss.needs_reference,
        "clipped_sum": loss.kind in losses.CLIPPING,
        "masked_sum": loss.is_banded,
        "entropy_sum": work.width == 1,
    }
    means |= dict.fromkeys(
        ("gap_sum", "max_gap", "sampler_kl_sum", "share_sum", "share_square_sum"), drawn
    )
    means |= dict.fromkeys(
        ("pairs", "margin_sum", "chosen_sum", "rejected_sum", "preferred_sum"),
        "pairs" in loss.needs,
    )
    out = {name: value for name, value in work.totals.items() if means.get(name, True)}
    targets = sum(np.count_nonzero(s.weights) for s in _sequences(groups))
    unrouted = targets - sum(len(datum.targets) for datum in work.data)
    return ({"unrouted": float(unrouted)} if unrouted else {}) | out


def summarise(totals: dict[str, float]) -> dict[str, float]:
    """Converts sums over tokens and pairs to means. ``effective`` is the effective sample size over
    the number of tokens, (sum of w)^2 / (n sum of w^2) with weights w = k.
    """
    of_pairs = ("margin", "preferred", "chosen", "rejected")
    as_they_are = ("loss", "tokens", "unrouted", "max_gap")
    out = {name: totals[name] for name in as_they_are if name in totals}
    for key, total in totals.items():
        if key.endswith("_sum"):
            name = key.removesuffix("_sum")
            out[name] = total / max(totals["pairs" if name in of_pairs else "tokens"], 1.0)
    if "share" in out:
        share, square = out.pop("share"), out.pop("share_square")
        out["effective"] = share**2 / square if square else 0.0
    return out
