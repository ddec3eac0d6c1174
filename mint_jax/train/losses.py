"""Losses of one policy, all with one signature; which one applies is data, so that policies of one step may differ.

Every loss is a sum over target tokens of ``weight * per-token loss`` (or over pairs, for DPO). Weights carry the
normalisation, computed on the host when the batch is built (``advantages.token_weights``), so that a gradient
accumulated over micro-batches equals that of the whole batch.

A token's log-probability is known three times: of the *sampler* when it was drawn (``old_logp``), of the trainer before the
*first* update on it (``first_logp``; in that update itself it is the present one), and of the trainer now. With
k = exp(first_logp - old_logp), r = exp(logp - first_logp), A the advantage, sg the stopped gradient:

    cross_entropy          -logp
    reinforce              -A logp                                            Williams 1992
    importance_sampling    -k A r                                             off-policy REINFORCE; k r = exp(logp - old_logp)
    ppo                    -k min(r A, clip(r, 1 - low, 1 + high) A)          arXiv 1707.06347 eq. 7; GRPO arXiv 2402.03300
                                                                              eq. 3; low != high: DAPO arXiv 2503.14476 eq. 10
    cispo                  -k sg(clip(r, 1 - low, 1 + high)) A logp           MiniMax-M1 arXiv 2506.13585 eq. 4
    gspo                   as ppo, with one s = exp(mean(logp - first_logp))  arXiv 2507.18071 eqs. 5 and 13: the gradient at a
                           of the whole sequence for r                        token is s times that of its logp
    dro                    -(A logp - beta/2 (logp - old_logp)^2)             arXiv 2405.19107 eq. 6, its value given as A
    dpo                    -log sigmoid(beta ((c - c_ref) - (j - j_ref)))     arXiv 2305.18290 eq. 7, on pairs of sequences

So the clip bounds what updates do to the policy, and k corrects for who drew the tokens: another engine, or an older policy
(decoupled PPO, arXiv 2110.00641). A token whose k leaves [band_low, band_high] has weight zero (IcePop, Ring-1T,
arXiv 2510.18855): later updates do not move it in or out of the band. PPO as first written, clipped against the
sampler, is ``first_logp = old_logp``.

KL to the reference, ``ref_logp``: ``k1`` subtracts ``kl * sg(logp - ref_logp)`` from the advantage (its gradient is then that
of the KL; the estimator itself has a zero-mean gradient), ``k3`` adds ``kl * (exp(d) - d - 1)``, d = ref_logp - logp
(Schulman 2020; GRPO eq. 4).

Axes: B rows, M target positions of a row, Z pairs.
"""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from flax import struct

from mint_jax import ordered

KINDS = ("cross_entropy", "reinforce", "importance_sampling", "ppo", "cispo", "dpo", "gspo", "dro")
KL_KINDS = ("none", "k1", "k3")
MAX_LOG_RATIO = 20.0  # exp of a larger one would overflow in products


class LossCoefs(NamedTuple):
    """One policy's loss as data: scalars here, ``[P]`` in a batch.

    Attributes:
        kind: index into ``KINDS``.
        ratio_low, ratio_high: bounds of the ratio r, or of s; a ``ratio_low`` of 0 leaves the lower side open.
        kl_kind: index into ``KL_KINDS``.
        kl: weight of the KL to the reference.
        band_low, band_high: tokens whose k is outside are masked; 0 and inf switch it off.
        beta: of DPO the inverse temperature, of DRO the weight of the squared log-ratio.
    """

    kind: jax.Array
    ratio_low: jax.Array
    ratio_high: jax.Array
    kl_kind: jax.Array
    kl: jax.Array
    band_low: jax.Array
    band_high: jax.Array
    beta: jax.Array


@struct.dataclass
class Targets:
    """What the loss of one policy is computed from, all ``[B, M]`` unless said; padding has weight 0.

    Tokens of weight 0 are left out of loss, gradient and metrics, whatever stands there, infinities and NaN included.

    Attributes:
        weights: float32, normalised.
        advantages: float32.
        old_logp: of the sampler, when the tokens were drawn.
        ref_logp: of the reference.
        sequence: int32, which sequence of the policy's batch a token is in; pair z is sequences 2z (chosen), 2z + 1.
        pair_weights: ``[Z]``, 0 where there is no pair.
        first_logp: of the trainer before the first update on these tokens; NaN where this is the first, None where it is for all.
    """

    weights: jax.Array
    advantages: jax.Array
    old_logp: jax.Array
    ref_logp: jax.Array
    sequence: jax.Array
    pair_weights: jax.Array
    first_logp: jax.Array | None = None


def policy_loss(logp_BM: jax.Array, targets: Targets, coefs: LossCoefs) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The loss of one policy and its metrics; ``jax.vmap`` over a leading axis of all three gives many.

    Returns:
        A scalar, and float32 scalars that sum over micro-batches: ``tokens`` counts target tokens, and names ending in
        ``_sum`` are sums over them: ``clipped`` counts those that a clip binds, ``gap`` is |log k|; ``max_gap`` is a maximum.
    """
    chex.assert_rank(logp_BM, 2)
    t = targets
    chex.assert_equal_shape([logp_BM, t.weights, t.advantages, t.old_logp, t.ref_logp, t.sequence])
    live = t.weights != 0

    def used(x: jax.Array) -> jax.Array:  # 0 * inf is NaN, also backwards: nothing is computed from what has no weight
        return jnp.where(live, x, 0.0)

    logp_BM, advantages, old_logp, ref_logp = map(used, (logp_BM, t.advantages, t.old_logp, t.ref_logp))
    is_kind = {kind: coefs.kind == i for i, kind in enumerate(KINDS)}
    mask = live.astype(jnp.float32)
    present = jax.lax.stop_gradient(logp_BM)
    first = present if t.first_logp is None else jnp.where(jnp.isnan(t.first_logp), present, used(t.first_logp))
    log_gap = first - old_logp
    is_sampled = ~is_kind["cross_entropy"] & ~is_kind["dpo"]
    gap = jnp.exp(jnp.clip(log_gap, -MAX_LOG_RATIO, MAX_LOG_RATIO))  # k
    inside = (gap >= coefs.band_low) & (gap <= coefs.band_high)
    gap = jnp.where(is_sampled, gap, 1.0)
    log_ratio = logp_BM - first
    ratio = jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))  # r

    to_ref = ref_logp - logp_BM  # d
    uses_k1 = coefs.kl_kind == KL_KINDS.index("k1")
    uses_k3 = coefs.kl_kind == KL_KINDS.index("k3")
    advantage = advantages + jnp.where(uses_k1, coefs.kl * jax.lax.stop_gradient(to_ref), 0.0)

    clipped = jnp.clip(ratio, coefs.ratio_low, coefs.ratio_high)
    whole = _of_sequences(log_ratio, mask, t.sequence)  # s, with the gradient of each token's own logp
    whole_clipped = jnp.clip(whole, coefs.ratio_low, coefs.ratio_high)
    from_sampler = jnp.where(is_kind["dro"], logp_BM - old_logp, 0.0)  # squared below, where inf * 0 is NaN for the other kinds
    per_token = {
        "cross_entropy": -logp_BM,
        "reinforce": -advantage * logp_BM,
        "importance_sampling": -gap * advantage * ratio,
        "ppo": -gap * jnp.minimum(ratio * advantage, clipped * advantage),
        "cispo": -gap * jax.lax.stop_gradient(clipped) * advantage * logp_BM,
        "dpo": jnp.zeros_like(logp_BM),
        "gspo": -gap * jnp.minimum(whole * advantage, whole_clipped * advantage),
        "dro": -advantage * logp_BM + 0.5 * coefs.beta * from_sampler * from_sampler,
    }
    token_loss = jax.lax.select_n(coefs.kind, *(per_token[kind] for kind in KINDS))
    token_loss = token_loss + jnp.where(uses_k3, coefs.kl * _k3(jnp.where(uses_k3, to_ref, 0.0)), 0.0)
    keep = jnp.where(is_sampled, inside, True)
    loss = jnp.sum(t.weights * jnp.where(live & keep, token_loss, 0.0))
    binds = (
        (is_kind["ppo"] & (ratio * advantage > clipped * advantage))
        | (is_kind["gspo"] & (whole * advantage > whole_clipped * advantage))
        | (is_kind["cispo"] & (clipped != ratio))
    )

    reward_Z2 = coefs.beta * _gains(to_ref, t)
    margin = reward_Z2[:, 0] - reward_Z2[:, 1]
    paired = is_kind["dpo"] & (t.pair_weights != 0)
    pair_loss = t.pair_weights * -jax.nn.log_sigmoid(jnp.where(paired, margin, 0.0))
    loss = loss + jnp.sum(jnp.where(paired, pair_loss, 0.0))
    reward_Z2, margin = jax.lax.stop_gradient((reward_Z2, margin))

    def total(x: jax.Array) -> jax.Array:
        return jnp.sum(used(jax.lax.stop_gradient(x)))

    return loss, {
        "tokens": jnp.sum(mask),
        "logp_sum": total(logp_BM),
        "kl_sum": total(_k3(to_ref)),
        "clipped_sum": total((binds & inside).astype(jnp.float32)),
        "masked_sum": total(1.0 - inside.astype(jnp.float32)),
        "gap_sum": total(jnp.abs(log_gap)),
        "max_gap": jnp.max(jnp.abs(jax.lax.stop_gradient(log_gap))),
        "pairs": jnp.sum((t.pair_weights > 0).astype(jnp.float32)),
        "margin_sum": jnp.sum(jnp.where(t.pair_weights > 0, margin, 0.0)),
        "chosen_sum": jnp.sum(jnp.where(t.pair_weights > 0, reward_Z2[:, 0], 0.0)),
        "rejected_sum": jnp.sum(jnp.where(t.pair_weights > 0, reward_Z2[:, 1], 0.0)),
        "preferred_sum": jnp.sum((t.pair_weights > 0) & (margin > 0)).astype(jnp.float32),
    }


def _of_sequences(log_ratio: jax.Array, mask: jax.Array, sequence: jax.Array) -> jax.Array:
    """``exp`` of each sequence's mean log-ratio over its targets, at each of its places ``[B, M]``."""
    many = mask.size  # as many sequences as there are places at most
    total = ordered.segment_sum(jax.lax.stop_gradient(log_ratio).ravel(), sequence.ravel(), many)
    count = ordered.segment_sum(mask.ravel(), sequence.ravel(), many)
    mean = (total / jnp.maximum(count, 1.0))[sequence]
    ratio = jnp.exp(jnp.clip(mean, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    return ratio * jnp.exp(log_ratio - jax.lax.stop_gradient(log_ratio))


def _k3(to_ref: jax.Array) -> jax.Array:
    return jnp.exp(jnp.clip(to_ref, -MAX_LOG_RATIO, MAX_LOG_RATIO)) - to_ref - 1.0


def _gains(to_ref: jax.Array, t: Targets) -> jax.Array:
    """``logp - ref_logp`` of chosen and rejected, summed over each sequence, ``[Z, 2]``."""
    pairs = t.pair_weights.shape[0]
    if not pairs:
        return jnp.zeros((0, 2), jnp.float32)
    total = ordered.segment_sum((-to_ref).ravel(), t.sequence.ravel(), 2 * pairs)
    return total.reshape(pairs, 2)
