"""Losses of one policy, all with one signature; which one applies is data, so that policies of one
step may differ.

Every loss is a sum over target tokens of ``weight * per-token loss`` (or over pairs, for DPO).
Weights carry the normalisation, computed on the host when the batch is built
(``advantages.token_weights``), so that a gradient accumulated over micro-batches equals that of the
whole batch.

A loss is one function, ``Tokens -> per-token loss [B, M]``. The built-in ones are in ``BUILT_IN``;
``register_loss`` adds others at run time. What a loss needs of the data is found by tracing it
once: the fields of ``Tokens`` that it reads.

A token's log-probability is known three times: of the *sampler* when it was drawn (``old_logp``),
of the trainer before the *first* update on it (``first_logp``; in that update itself it is the
present one), and of the trainer now. With k = exp(first_logp - old_logp), r = exp(logp -
first_logp), A the advantage, sg the stopped gradient:

    cross_entropy          -logp
    reinforce              -A logp                                            Williams 1992
    importance_sampling    -k A r                                             off-policy REINFORCE;
    k r = exp(logp - old_logp) ppo                    -k min(r A, clip(r, 1 - low, 1 + high) A)
    arXiv 1707.06347 eq. 7; GRPO arXiv 2402.03300
                                                                              eq. 3; low != high:
                                                                              DAPO arXiv 2503.14476
                                                                              eq. 10
    cispo                  -k sg(clip(r, 1 - low, 1 + high)) A logp           MiniMax-M1 arXiv
    2506.13585 eq. 4 gspo                   as ppo, with one s = exp(mean(logp - first_logp))  arXiv
    2507.18071 eqs. 5 and 13: the gradient at a
                           of the whole sequence for r                        token is s times that
                           of its logp
    dro                    -(A logp - beta/2 (logp - old_logp)^2)             arXiv 2405.19107 eq.
    6, its value given as A dpo                    -log sigmoid(beta ((c - c_ref) - (j - j_ref)))
    arXiv 2305.18290 eq. 7, on pairs of sequences

So the clip bounds what updates do to the policy, and k corrects for who drew the tokens: another
engine, or an older policy (decoupled PPO, arXiv 2110.00641). A token whose k leaves [band_low,
band_high] has weight zero (IcePop, Ring-1T, arXiv 2510.18855): later updates do not move it in or
out of the band. PPO as first written, clipped against the sampler, is ``first_logp = old_logp``.

KL to the reference, ``ref_logp``: ``k1`` subtracts ``kl * sg(logp - ref_logp)`` from the advantage
(its gradient is then that of the KL; the estimator itself has a zero-mean gradient), ``k3`` adds
``kl * (exp(d) - d - 1)``, d = ref_logp - logp (Schulman 2020; GRPO eq. 4).

Axes: B rows, M target positions of a row, Z pairs.
"""

import functools
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from flax import struct

from mint_jax import ordered
from mint_jax.errors import UserError, own_traceback
from mint_jax.train.config import KINDS, KL_KINDS, Registered, known_kinds, registered

MAX_LOG_RATIO = 20.0  # exp of a larger one would overflow in products


class LossCoefs(NamedTuple):
    """One policy's loss as data: scalars here, ``[P]`` in a batch.

    Attributes:
        kind: index into ``KINDS``; beyond it, into the registered functions that ``policy_loss`` is
            given.
        ratio_low, ratio_high: bounds of the ratio r, or of s; a ``ratio_low`` of 0 leaves the lower
            side open.
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
    """What the loss of one policy is computed from, all ``[B, M]`` unless said; padding has weight
    0.

    Tokens of weight 0 are left out of loss, gradient and metrics, whatever stands there, infinities
    and NaN included.

    Attributes:
        weights: float32, normalised.
        advantages: float32.
        old_logp: of the sampler, when the tokens were drawn.
        ref_logp: of the reference.
        sequence: int32, which sequence of the policy's batch a token is in; pair z is sequences 2z
            (chosen), 2z + 1.
        pair_weights: ``[Z]``, 0 where there is no pair.
        first_logp: of the trainer before the first update on these tokens; NaN where this is the
            first, None where it is for all.
        in_ratio: 1 for tokens that count in their sequence's ratio s, 0 for others, which have s
            too; None: all of weight other than 0.
    """

    weights: jax.Array
    advantages: jax.Array
    old_logp: jax.Array
    ref_logp: jax.Array
    sequence: jax.Array
    pair_weights: jax.Array
    first_logp: jax.Array | None = None
    in_ratio: jax.Array | None = None


class Tokens(NamedTuple):
    """What a loss function reads: one policy's tokens. Arrays are float32 ``[B, M]`` unless said;
    padding has ``mask`` 0.

    Attributes:
        logp: log-probability of each target under the policy now. Gradients flow through it and the
            two ratios.
        advantages: of each token, less the KL penalty where ``kl_kind`` is ``k1``.
        old_logp: log-probability under the sampler that drew the token.
        first_logp: log-probability under the policy before the first update on these tokens.
        ref_logp: log-probability under the reference.
        ratio: ``exp(logp - first_logp)``; 1 in the first update.
        sequence_ratio: ``exp`` of the mean of ``logp - first_logp`` over the token's sequence; its
            gradient at a token is that of ``ratio`` times itself.
        sampler_ratio: ``exp(first_logp - old_logp)``, the correction for tokens that another policy
            drew.
        mask: 1 at target tokens, 0 elsewhere.
        sequence: int32, the number of the token's sequence.
        coefs: the numbers of the policy's ``LossConfig``: ``ratio_low``, ``ratio_high``, ``beta``
            and others.
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


def _ppo(ratio: jax.Array, t: Tokens) -> jax.Array:
    return -t.sampler_ratio * jnp.minimum(
        ratio * t.advantages, _clipped(ratio, t.coefs) * t.advantages
    )


def _dro(t: Tokens) -> jax.Array:
    return -t.advantages * t.logp + 0.5 * t.coefs.beta * (t.logp - t.old_logp) ** 2


BUILT_IN: dict[str, LossFn] = {
    "cross_entropy": lambda t: -t.logp,
    "reinforce": lambda t: -t.advantages * t.logp,
    "importance_sampling": lambda t: -t.sampler_ratio * t.advantages * t.ratio,
    "ppo": lambda t: _ppo(t.ratio, t),
    "cispo": (
        lambda t: (
            -t.sampler_ratio
            * jax.lax.stop_gradient(_clipped(t.ratio, t.coefs))
            * t.advantages
            * t.logp
        )
    ),
    "dpo": lambda t: jnp.zeros_like(t.logp),  # its loss is of pairs: see policy_loss
    "gspo": lambda t: _ppo(t.sequence_ratio, t),
    "dro": _dro,
}
CLIPPING = ("ppo", "gspo", "cispo")  # whose metrics count the tokens at which a clip binds


def register_loss(name: str, fn: LossFn) -> None:
    """Adds a loss, which ``LossConfig(name)`` and ``loss.kind`` in a config then name. A second
    function of a name replaces the first.

        def clipped_reinforce(t):  # t is a Tokens; returns the loss of each token, [B, M]
            return -jnp.clip(t.advantages, -1, 1) * t.logp

        mint.register_loss("clipped_reinforce", clipped_reinforce)

    The policy's loss is the sum over its target tokens of weight times what ``fn`` returns. ``fn``
    is traced by JAX and must use ``jax.numpy``. What it reads of its argument decides what its
    policies must be given: ``advantages``, ``old_logp`` (also through ``sampler_ratio``), or a
    reference for ``ref_logp``.

    Raises:
        UserError: a built-in loss has the name, or ``fn`` is not such a function.
    """
    if not isinstance(name, str) or not re.fullmatch(r"\w[\w.-]*", name):
        raise UserError(
            f"name of a loss is {name!r}; expected text of letters, digits and _: 'my_loss', say"
        )
    if name in BUILT_IN:
        raise UserError(f"loss {name!r} is built in: register yours by another name")
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
    registered[name] = Registered(fn, frozenset(needed))


def name_of(fn: LossFn) -> str:
    """The name of a function among the registered losses; registers it where it has none."""
    for name, known in registered.items():
        if known.fn is fn:
            return name
    own = re.sub(r"\W", "", getattr(fn, "__name__", "")) or type(fn).__name__
    own = "loss" if own == "lambda" else own
    name = next(
        n
        for n in (own, *(f"{own}_{i}" for i in range(2, len(registered) + 4)))
        if n not in known_kinds()
    )
    register_loss(name, fn)
    return name


def functions_of(kinds: Iterable[str]) -> tuple[LossFn, ...]:
    """The registered functions among these losses, in one order, as a program takes them."""
    return tuple(registered[kind].fn for kind in sorted(set(kinds)) if kind in registered)


def index_of(kind: str, custom: tuple[LossFn, ...] = ()) -> int:
    """``LossCoefs.kind`` of a loss in a program that has these registered functions."""
    return KINDS.index(kind) if kind in KINDS else len(KINDS) + custom.index(registered[kind].fn)


@functools.lru_cache(maxsize=256)
def reads(fn: LossFn) -> frozenset[str]:
    """The fields of ``Tokens`` that a loss function reads, found by tracing it.

    Raises:
        UserError: it does not return one number a token.
    """
    found: set[str] = set()

    class Recorder:
        def __init__(self, tokens: Tokens):
            self._tokens = tokens

        def __getattr__(self, name: str) -> Any:
            if name not in Tokens._fields:
                raise UserError(f"reads {name!r}; a loss is given {', '.join(Tokens._fields)}")
            found.add(name)
            return getattr(self._tokens, name)

    shape = (2, 3)
    floats: dict[str, Any] = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32) for name in Tokens._fields
    }
    scalars: dict[str, Any] = {
        name: jax.ShapeDtypeStruct((), jnp.int32 if "kind" in name else jnp.float32)
        for name in LossCoefs._fields
    }
    tokens = Tokens(
        **floats
        | {
            "sequence": jax.ShapeDtypeStruct(shape, jnp.int32),
            "coefs": LossCoefs(**scalars),
        }
    )
    out = jax.eval_shape(lambda t: fn(Recorder(t)), tokens)  # type: ignore[arg-type]
    if getattr(out, "shape", None) != shape or not jnp.issubdtype(out.dtype, jnp.floating):
        what = (
            f"{out.dtype} of shape {out.shape}"
            if hasattr(out, "dtype")
            else f"{type(out).__name__}"
        )
        raise UserError(
            f"returns {what} for tokens of shape {shape}; expected a float for each token: leave"
            " the sum to the trainer"
        )
    return frozenset(found)


def policy_loss(
    logp_BM: jax.Array, targets: Targets, coefs: LossCoefs, custom: tuple[LossFn, ...] = ()
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The loss of one policy and its metrics; ``jax.vmap`` over a leading axis of the first three
    gives many.

    Args:
        custom: registered functions, which kinds beyond ``KINDS`` stand for.

    Returns:
        A scalar, and float32 scalars that sum over micro-batches: ``tokens`` counts target tokens,
        and names ending in ``_sum`` are sums over them: ``clipped`` counts those that a clip binds,
        ``gap`` is |log k|; ``max_gap`` is a maximum.
    """
    chex.assert_rank(logp_BM, 2)
    t = targets
    chex.assert_equal_shape([logp_BM, t.weights, t.advantages, t.old_logp, t.ref_logp, t.sequence])
    live = t.weights != 0

    # 0 * inf is NaN, also backwards: nothing is computed from what has no weight
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

    counted = mask if t.in_ratio is None else used(t.in_ratio)
    # s, with the gradient of each token's own logp
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
    loss = jnp.sum(t.weights * jnp.where(live & keep, token_loss, 0.0))
    clipped, whole_clipped = _clipped(ratio, coefs), _clipped(whole, coefs)
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


def _applied(fn: LossFn, t: Tokens, applies: jax.Array) -> jax.Array:
    """A loss at the tokens that it applies to; numbers without a meaning elsewhere.

    Other policies' tokens, and padding, enter it as constants: its derivative may be infinite at
    their values, and zero times infinity would become their gradient.
    """
    logp, ratio, whole = (
        jnp.where(applies, x, safe)
        for x, safe in ((t.logp, -1.0), (t.ratio, 1.0), (t.sequence_ratio, 1.0))
    )
    return fn(t._replace(logp=logp, ratio=ratio, sequence_ratio=whole)).astype(jnp.float32)


def _of_sequences(log_ratio: jax.Array, mask: jax.Array, sequence: jax.Array) -> jax.Array:
    """``exp`` of each sequence's mean log-ratio over its places in the mask, at each of its places
    ``[B, M]``.
    """
    many = mask.size  # as many sequences as there are places at most
    counted = jnp.where(mask != 0, jax.lax.stop_gradient(log_ratio), 0.0)
    total = ordered.segment_sum(counted.ravel(), sequence.ravel(), many)
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
