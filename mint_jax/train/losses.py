"""Losses of one policy, ``Tokens -> loss of each token [B, M]``, built in or registered at run
time. The kind is data: policies of one step may differ. Weights carry the normalisation, so losses
of micro-batches add. k = exp(first_logp - old_logp) corrects for the distribution that drew the
tokens, and a clip of r = exp(logp - first_logp) bounds how far updates move the policy (decoupled
PPO, arXiv 2110.00641).

Axes: B rows, M target positions of a row, Z pairs.
"""

import functools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from mint_jax import ordered
from mint_jax.errors import UserError, own_traceback
from mint_jax.train import config
from mint_jax.train.config import KINDS, KL_KINDS, PAIRED, LossConfig, registered

MAX_LOG_RATIO = 20.0  # exp of larger ones would overflow in products


class LossCoefs(NamedTuple):
    """One policy's ``LossConfig`` as data: scalars here, ``[P]`` in a batch.

    Attributes:
        kind, kl_kind: indices into ``KINDS`` and ``KL_KINDS``; larger kinds index the registered
            functions given to ``policy_loss``.
        ratio_low, ratio_high: bounds of the ratio r, or of s; a ``ratio_low`` of 0 disables the
            lower bound.
        band_low, band_high: tokens whose k is outside are masked; 0 and inf disable it.
        beta: of DPO and SimPO the inverse temperature, of IPO tau, of DRO the weight of the squared
            log-ratio.
        ratio_dual: upper bound of the ratio where the advantage is negative.
        sampler_cap: upper bound of k.
        margin: SimPO's gamma.
        smoothing: probability that a pair's order is wrong.
        entropy: coefficient of the entropy bonus.
    """

    kind: Any
    ratio_low: Any
    ratio_high: Any
    kl_kind: Any
    kl: Any
    band_low: Any
    band_high: Any
    beta: Any
    ratio_dual: Any = np.inf
    sampler_cap: Any = np.inf
    margin: Any = 0.0
    smoothing: Any = 0.0
    entropy: Any = 0.0


DTYPES = [np.int32 if "kind" in name else np.float32 for name in LossCoefs._fields]
# Loss of blocks that only pad a step, and of requests for log-probabilities.
NO_LOSS = LossCoefs(KINDS.index("cross_entropy"), 0.0, np.inf, 0, 0.0, 0.0, np.inf, 0.0)


def coefs_of(loss: LossConfig, custom: tuple["LossFn", ...] = ()) -> LossCoefs:
    """Returns a loss as coefficients, for a program with these registered losses."""
    kind, kl_kind = index_of(loss.kind, custom), KL_KINDS.index(loss.kl_kind)
    beta = {"dro": loss.dro_beta, "simpo": loss.simpo_beta}.get(loss.kind, loss.dpo_beta)
    clip, band = (1.0 - loss.low, 1.0 + loss.clip_high), (loss.band_low, loss.band_high)
    margin = loss.simpo_margin if loss.kind == "simpo" else 0.0
    more = loss.dual_clip, loss.sampler_cap, margin, loss.label_smoothing, loss.entropy
    return LossCoefs(kind, *clip, kl_kind, loss.kl, *band, beta, *more)


def stack_coefs(losses: Sequence[LossConfig | LossCoefs], blocks: int = 0) -> LossCoefs:
    """Returns the losses of a step's blocks as ``[P]`` arrays; P is at least ``blocks``, and
    further blocks have no loss.
    """
    rows = [coefs_of(one) if isinstance(one, LossConfig) else one for one in losses]
    rows += [NO_LOSS] * (blocks - len(rows))
    columns = (np.array(column, dtype) for column, dtype in zip(zip(*rows), DTYPES))
    return LossCoefs(*columns)


@struct.dataclass
class Targets:
    """Inputs of one policy's loss, as in ``Tokens``, float32 ``[B, M]`` unless noted. Tokens of
    weight 0, such as padding, are excluded from loss, gradient and metrics, even if their values
    are infinite or NaN.

    Attributes:
        sequence: int32; pair z is sequences 2z (chosen) and 2z + 1 (rejected) of the policy's
            batch.
        pair_weights: ``[Z]``, 0 where there is no pair.
        first_logp: NaN where this is the first update, None if it is so for all.
        in_ratio: 1 for tokens that count in their sequence's ratio s, 0 for others (which also get
            s); None counts all tokens of non-zero weight.
    """

    weights: Any
    advantages: Any
    old_logp: Any
    ref_logp: Any
    sequence: Any
    pair_weights: Any
    first_logp: Any = None
    in_ratio: Any = None


class Tokens(NamedTuple):
    """Input of a loss function: one policy's tokens. Arrays are float32 ``[B, M]`` unless noted;
    padding has ``mask`` 0.

    Attributes:
        logp: log-probability of each target under the policy now. Gradients flow through it and the
            two ratios.
        advantages: per token, minus the KL penalty if ``kl_kind`` is ``k1``.
        old_logp, first_logp, ref_logp: log-probability under the sampler that drew the token, under
            the policy before the first update on these tokens, and under the reference.
        ratio: ``exp(logp - first_logp)``; 1 in the first update.
        sequence_ratio: ``exp`` of the mean of ``logp - first_logp`` over the token's sequence; its
            gradient at a token is that of ``ratio`` times itself.
        sampler_ratio: ``exp(first_logp - old_logp)``, at most ``sampler_cap``, the correction for
            tokens drawn by another policy.
        mask: 1 at target tokens, 0 elsewhere.
        sequence: int32, number of the token's sequence.
        coefs: coefficients of the policy's ``LossConfig``: ``ratio_low``, ``ratio_high``, ``beta``,
            ...
    """

    logp: jax.Array
    advantages: jax.Array
    old_logp: jax.Array
    first_logp: jax.Array
    ref_logp: jax.Array
    ratio: jax.Array
    sequence_ratio: jax.Array
    sampler_ratio: jax.Array
    mask: jax.Array
    sequence: jax.Array
    coefs: LossCoefs


LossFn = Callable[[Tokens], jax.Array]


def _clipped(ratio: jax.Array, c: LossCoefs) -> jax.Array:
    return jnp.clip(ratio, c.ratio_low, c.ratio_high)


def _bounded(ratio: jax.Array, advantages: jax.Array, c: LossCoefs) -> jax.Array:
    """Returns the ratio, clipped where the clip lowers ``ratio * advantages`` or, of negative
    advantages, where the ratio exceeds ``ratio_dual``.
    """
    clipped = _clipped(ratio, c)
    above = jnp.minimum(jnp.maximum(ratio, clipped), c.ratio_dual)
    return jnp.where(advantages < 0, above, jnp.minimum(ratio, clipped))


def _ppo(ratio: jax.Array, t: Tokens) -> jax.Array:
    return -t.sampler_ratio * (_bounded(ratio, t.advantages, t.coefs) * t.advantages)


def _cispo(clipped: jax.Array, t: Tokens) -> jax.Array:
    return -t.sampler_ratio * clipped * t.advantages * t.logp


# With A the advantage and sg the stopped gradient.
BUILT_IN: dict[str, LossFn] = {
    "cross_entropy": lambda t: -t.logp,
    # -A logp, Williams 1992
    "reinforce": lambda t: -t.advantages * t.logp,
    # -k A r, off-policy REINFORCE
    "importance_sampling": lambda t: -t.sampler_ratio * t.advantages * t.ratio,
    # -k min(r A, clip(r) A), arXiv 1707.06347 eq. 7; GRPO: arXiv 2402.03300 eq. 3; DAPO, with
    # unequal bounds: arXiv 2503.14476 eq. 10. With dual clip c and A < 0: -k max(min(r A, clip(r)
    # A), c A), arXiv 1912.09729 eq. 2
    "ppo": lambda t: _ppo(t.ratio, t),
    # -k sg(clip(r)) A logp, arXiv 2506.13585 eq. 4
    "cispo": lambda t: _cispo(jax.lax.stop_gradient(_clipped(t.ratio, t.coefs)), t),
    # -log sigmoid(m) over pairs, m = beta ((c - c_ref) - (j - j_ref)), arXiv 2305.18290 eq. 7: see
    # _pair_losses. With label smoothing e: -(1 - e) log sigmoid(m) - e log sigmoid(-m), cDPO
    "dpo": lambda t: jnp.zeros_like(t.logp),
    # ppo with s = exp(mean(logp - first_logp)) of the sequence for r and the gradient of sg(s)
    # exp(logp - sg(logp)): GSPO-token, arXiv 2507.18071 eqs. 13, 14. With one advantage and weight
    # in a sequence, value and gradient are those of GSPO, eqs. 5, 7
    "gspo": lambda t: _ppo(t.sequence_ratio, t),
    # -(A logp - beta/2 (logp - old_logp)^2), arXiv 2405.19107 eq. 6, with its value in A
    "dro": lambda t: -t.advantages * t.logp + 0.5 * t.coefs.beta * (t.logp - t.old_logp) ** 2,
    # (mean(c - c_ref) - mean(j - j_ref) - 1 / (2 tau))^2 over pairs, arXiv 2310.12036 eq. 17, with
    # means over the answers' tokens, as its authors computed it
    "ipo": lambda t: jnp.zeros_like(t.logp),
    # -log sigmoid(beta (mean(c) - mean(j)) - gamma) over pairs, arXiv 2405.14734 eq. 6
    "simpo": lambda t: jnp.zeros_like(t.logp),
}
CLIPPING = ("ppo", "gspo", "cispo")  # losses that report how often a clip binds


def register_loss(name: str, fn: LossFn) -> None:
    """Adds a loss under a name for ``LossConfig(name)`` and ``loss.kind`` in configs, or replaces
    it.

        def clipped_reinforce(t):  # t is a Tokens; returns the loss of each token, [B, M]
            return -jnp.clip(t.advantages, -1, 1) * t.logp

        mint.register_loss("clipped_reinforce", clipped_reinforce)

    The policy's loss is the sum over its target tokens of weight times the output of ``fn``, which
    is traced by JAX. The fields that it reads determine what its policies must be given:
    ``advantages``, ``old_logp`` (also through ``sampler_ratio``), or a reference for ``ref_logp``.
    Raises ``UserError`` if the name is a built-in loss, or ``fn`` is not such a function.
    """
    if not isinstance(name, str) or not re.fullmatch(r"\w[\w.-]*", name):
        raise UserError(
            f"the name of a loss is {name!r}; expected letters, digits and _, such as 'my_loss'"
        )
    if name in BUILT_IN:
        raise UserError(f"loss {name!r} is built in: choose another name")
    if not callable(fn):
        raise UserError(
            f"loss {name!r} is {fn!r:.80}; expected a function of mint.Tokens that returns the loss"
            " of each token"
        )
    try:
        found = reads(fn)
    except Exception as error:
        if isinstance(error, UserError):
            raise UserError(f"loss {name!r} {error}") from None
        what = (
            f"loss {name!r} raised {type(error).__name__}: {error}: expected a function of"
            " mint.Tokens, in jax.numpy"
        )
        raise UserError(f"{what}\n{own_traceback(error)}") from None
    needed = {"old_logp" if read == "sampler_ratio" else read for read in found} & {
        "advantages",
        "old_logp",
        "ref_logp",
    }
    registered[name] = config.Registered(fn, frozenset(needed))


def name_of(fn: LossFn) -> str:
    """Returns the registered name of a loss function; registers it if it has none."""
    for name, known in registered.items():
        if known.fn is fn:
            return name
    own = re.sub(r"\W", "", getattr(fn, "__name__", "")) or type(fn).__name__
    name = own = "loss" if own == "lambda" else own
    number = 2
    while name in config.known_kinds():
        name, number = f"{own}_{number}", number + 1
    register_loss(name, fn)
    return name


def functions_of(kinds: Iterable[str]) -> tuple[LossFn, ...]:
    """Returns the registered functions among these losses, in the order that programs take them."""
    return tuple(registered[kind].fn for kind in sorted(set(kinds)) if kind in registered)


def index_of(kind: str, custom: tuple[LossFn, ...] = ()) -> int:
    return KINDS.index(kind) if kind in KINDS else len(KINDS) + custom.index(registered[kind].fn)


@functools.lru_cache(maxsize=256)
def reads(fn: LossFn) -> frozenset[str]:
    """Returns the fields of ``Tokens`` that a loss function reads, found by tracing it. Raises
    ``UserError`` if it does not return one float per token.
    """
    shape = (2, 3)
    fields: dict[str, Any] = dict.fromkeys(Tokens._fields, jax.ShapeDtypeStruct(shape, jnp.float32))
    fields["sequence"] = jax.ShapeDtypeStruct(shape, jnp.int32)
    fields["coefs"] = LossCoefs(*(jax.ShapeDtypeStruct((), dtype) for dtype in DTYPES))
    tokens = Tokens(**fields)
    closed, out = jax.make_jaxpr(fn, return_shape=True)(tokens)
    if getattr(out, "shape", None) != shape or not jnp.issubdtype(out.dtype, jnp.floating):
        is_array = hasattr(out, "dtype")
        what = f"{out.dtype} of shape {out.shape}" if is_array else type(out).__name__
        raise UserError(
            f"returns {what} for tokens of shape {shape}; expected one float per token: the trainer"
            " computes the sum"
        )
    used = {id(x) for eqn in closed.jaxpr.eqns for x in eqn.invars}
    used |= {id(x) for x in closed.jaxpr.outvars}
    paths = (path for path, _ in jax.tree_util.tree_leaves_with_path(tokens))
    return frozenset(
        path[0].name for path, x in zip(paths, closed.jaxpr.invars, strict=True) if id(x) in used
    )


def policy_loss(
    logp_BM: jax.Array,
    targets: Targets,
    coefs: LossCoefs,
    entropy_BM: jax.Array | None = None,
    custom: tuple[LossFn, ...] = (),
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns the loss of one policy and its metrics; ``jax.vmap`` over a leading axis of the first
    four arguments gives many. Metrics are float32 scalars that sum over micro-batches, except
    ``max_gap``, a maximum. Names ending in ``_sum`` are sums over target tokens: ``clipped`` is 1
    if a clip binds, ``gap`` is |log k|, ``sampler_kl`` k - log k - 1, whose mean is the KL of the
    sampler from the policy, and ``share`` the weight of a token by k. ``entropy_BM`` is that of the
    distributions of the targets: ``coefs.entropy`` times it is subtracted from a token's loss.

    KL ``k1`` subtracts ``kl sg(logp - ref_logp)`` from the advantage, which gives the gradient of
    the KL; ``k2`` adds ``kl d^2 / 2``, whose gradient is the same for tokens of the policy, and
    ``k3`` adds ``kl (exp(d) - d - 1)``, d = ref_logp - logp (Schulman 2020; GRPO eq. 4). A token
    whose k leaves [band_low, band_high] has weight zero (IcePop, Ring-1T, arXiv 2510.18855), and k
    is at most ``sampler_cap`` (truncated importance sampling, arXiv 1802.01561 eq. 1).
    """
    chex.assert_rank(logp_BM, 2)
    t = targets
    chex.assert_equal_shape([logp_BM, t.weights, t.advantages, t.old_logp, t.ref_logp, t.sequence])
    live = t.weights != 0

    # 0 * inf is NaN, also in the backward pass, so values of weight 0 are replaced before any use.
    def used(x: jax.Array) -> jax.Array:
        return jnp.where(live, x, 0.0)

    logp_BM, advantages, old_logp, ref_logp = map(
        used, (logp_BM, t.advantages, t.old_logp, t.ref_logp)
    )
    is_kind = {kind: coefs.kind == i for i, kind in enumerate(KINDS)}
    mask = live.astype(jnp.float32)
    present = jax.lax.stop_gradient(logp_BM)
    first = (
        present
        if t.first_logp is None
        else jnp.where(jnp.isnan(t.first_logp), present, used(t.first_logp))
    )
    log_gap = first - old_logp
    is_paired = functools.reduce(jnp.logical_or, [is_kind[kind] for kind in PAIRED])
    is_sampled = ~is_kind["cross_entropy"] & ~is_paired
    gap = jnp.exp(jnp.clip(log_gap, -MAX_LOG_RATIO, MAX_LOG_RATIO))  # k
    inside = (gap >= coefs.band_low) & (gap <= coefs.band_high)
    gap = jnp.where(is_sampled, jnp.minimum(gap, coefs.sampler_cap), 1.0)
    log_ratio = logp_BM - first
    ratio = jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))  # r

    to_ref = ref_logp - logp_BM  # d
    uses_k1 = coefs.kl_kind == KL_KINDS.index("k1")
    uses_k2 = coefs.kl_kind == KL_KINDS.index("k2")
    uses_k3 = coefs.kl_kind == KL_KINDS.index("k3")
    advantage = advantages + jnp.where(uses_k1, coefs.kl * jax.lax.stop_gradient(to_ref), 0.0)

    counted = mask if t.in_ratio is None else used(t.in_ratio)
    # s in value, with the gradient of each token's own logp
    whole = _of_sequences(log_ratio, counted, t.sequence)
    keep = jnp.where(is_sampled, inside, True)
    tokens = Tokens(
        logp_BM, advantage, old_logp, first, ref_logp, ratio, whole, gap, mask, t.sequence, coefs
    )
    per_token = [
        _applied(fn, tokens, live & keep & (coefs.kind == i))
        for i, fn in enumerate((*map(BUILT_IN.__getitem__, KINDS), *custom))
    ]
    token_loss = jax.lax.select_n(coefs.kind, *per_token)
    token_loss = token_loss + jnp.where(
        uses_k3, coefs.kl * _k3(jnp.where(uses_k3, to_ref, 0.0)), 0.0
    )
    token_loss = token_loss + 0.5 * coefs.kl * jnp.where(uses_k2, to_ref, 0.0) ** 2
    entropy_BM = jnp.zeros_like(logp_BM) if entropy_BM is None else used(entropy_BM)
    token_loss = token_loss - coefs.entropy * entropy_BM
    loss = jnp.sum(t.weights * jnp.where(live & keep, token_loss, 0.0))
    one = jnp.where(is_kind["gspo"], whole, ratio)
    bounded = jnp.where(advantage == 0, one, _bounded(one, advantage, coefs))
    binds = ((is_kind["ppo"] | is_kind["gspo"]) & (bounded != one)) | (
        is_kind["cispo"] & (_clipped(ratio, coefs) != ratio)
    )

    gain = jnp.where(is_kind["simpo"], logp_BM, -to_ref)
    total_Z2, tokens_Z2 = _of_pairs(gain, t), _of_pairs(mask, t)
    is_mean = is_kind["ipo"] | is_kind["simpo"]
    reward_Z2 = coefs.beta * total_Z2 / jnp.where(is_mean, jnp.maximum(tokens_Z2, 1.0), 1.0)
    margin = reward_Z2[:, 0] - reward_Z2[:, 1]
    paired = is_paired & (t.pair_weights != 0)
    pair_loss = _pair_losses(jnp.where(paired, margin, 0.0), is_kind["ipo"], coefs)
    loss = loss + jnp.sum(jnp.where(paired, t.pair_weights * pair_loss, 0.0))
    reward_Z2, margin = jax.lax.stop_gradient((reward_Z2, margin))

    share = jnp.where(keep, gap, 0.0)

    def total(x: jax.Array) -> jax.Array:
        return jnp.sum(used(jax.lax.stop_gradient(x)))

    return loss, {
        "tokens": jnp.sum(mask),
        "logp_sum": total(logp_BM),
        "entropy_sum": total(entropy_BM),
        "kl_sum": total(_k3(to_ref)),
        "clipped_sum": total((binds & inside).astype(jnp.float32)),
        "masked_sum": total(1.0 - inside.astype(jnp.float32)),
        "gap_sum": total(jnp.abs(log_gap)),
        "sampler_kl_sum": total(_k3(log_gap)),
        "share_sum": total(share),
        "share_square_sum": total(share**2),
        "max_gap": jnp.max(jnp.abs(jax.lax.stop_gradient(log_gap))),
        "pairs": jnp.sum((t.pair_weights > 0).astype(jnp.float32)),
        "margin_sum": jnp.sum(jnp.where(t.pair_weights > 0, margin, 0.0)),
        "chosen_sum": jnp.sum(jnp.where(t.pair_weights > 0, reward_Z2[:, 0], 0.0)),
        "rejected_sum": jnp.sum(jnp.where(t.pair_weights > 0, reward_Z2[:, 1], 0.0)),
        "preferred_sum": jnp.sum((t.pair_weights > 0) & (margin > 0)).astype(jnp.float32),
    }


def _applied(fn: LossFn, t: Tokens, applies: jax.Array) -> jax.Array:
    # Tokens of other policies and padding enter as constants: the derivative may be infinite at
    # their values, and zero times infinity would be a NaN gradient.
    logp, ratio, whole = (
        jnp.where(applies, x, safe)
        for x, safe in ((t.logp, -1.0), (t.ratio, 1.0), (t.sequence_ratio, 1.0))
    )
    return fn(t._replace(logp=logp, ratio=ratio, sequence_ratio=whole)).astype(jnp.float32)


def _of_sequences(log_ratio: jax.Array, mask: jax.Array, sequence: jax.Array) -> jax.Array:
    """Returns ``exp`` of each sequence's mean log-ratio over its masked-in places, at each of its
    places ``[B, M]``.
    """
    many = mask.size  # upper bound on the number of sequences
    counted = jnp.where(mask != 0, jax.lax.stop_gradient(log_ratio), 0.0)
    total = ordered.segment_sum(counted.ravel(), sequence.ravel(), many)
    count = ordered.segment_sum(mask.ravel(), sequence.ravel(), many)
    mean = (total / jnp.maximum(count, 1.0))[sequence]
    ratio = jnp.exp(jnp.clip(mean, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    return ratio * jnp.exp(log_ratio - jax.lax.stop_gradient(log_ratio))


def _k3(to_ref: jax.Array) -> jax.Array:
    return jnp.exp(jnp.clip(to_ref, -MAX_LOG_RATIO, MAX_LOG_RATIO)) - to_ref - 1.0


def _of_pairs(x_BM: jax.Array, t: Targets) -> jax.Array:
    """Returns sums over the chosen and the rejected sequence of each pair, ``[Z, 2]``."""
    pairs = t.pair_weights.shape[0]
    if not pairs:
        return jnp.zeros((0, 2), jnp.float32)
    return ordered.segment_sum(x_BM.ravel(), t.sequence.ravel(), 2 * pairs).reshape(pairs, 2)


def _pair_losses(margin: jax.Array, is_ipo: jax.Array, c: LossCoefs) -> jax.Array:
    tau = jnp.where(is_ipo, c.beta, 1.0)
    right, wrong = jax.nn.log_sigmoid(margin - c.margin), jax.nn.log_sigmoid(c.margin - margin)
    logistic = -(1.0 - c.smoothing) * right - c.smoothing * wrong
    return jnp.where(is_ipo, ((margin - 0.5) / tau) ** 2, logistic)
