"""Log-probabilities of given tokens, in slices over positions, for training, scoring and checks.

The unembedding is frozen, so with ``p = softmax(W h / T)`` the gradient of ``log p[y]`` with
respect to ``h`` is ``(W[y] - p W) / T``. A cap on the logits gives each row of ``W`` a factor, the
cap's slope at its logit. The forward pass of a training step computes ``p W`` while
a slice's logits are in memory: logits are neither kept nor recomputed. The entropy of ``p`` is
computed from the same exponentials; its gradient with respect to the logits, ``-p (log p + H)``,
takes one more product with ``W``.

Axes: B rows, M target positions of a row, V vocab, D model width, C positions of a slice, N = B C,
K targets of a position.
"""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp

from mint_jax import sharding
from mint_jax.lora.view import AdapterView, batch_delta
from mint_jax.models import stored
from mint_jax.models.transformer import capped, stored_unembed
from pallas_kernels import dispatch
from pallas_kernels.products import product_f32

# Bound on one device's float32 logits of a slice, which has at least one position of every row. On
# an H100 slices of 64 MiB are 128 rows of Qwen3's vocabulary: 149 of them took 86 ms, while the
# matmuls alone take 34.
SLICE_BYTES, GPU_SLICE_BYTES = 64 << 20, 1 << 30
GPU_SLICE_SHARE = 64  # a slice takes at most one part in this many of a GPU's memory
# Float32 bytes of a part of a table in fewer bits, which is read once with a running softmax, so
# neither the table nor the logits exist whole (SmolLM2's are 113 MB, and 25 for 128 positions).
PART_BYTES = 8 << 20


def logprobs_and_entropy(
    params: Any,
    lora: AdapterView | None,
    h_BMD: jax.Array,
    targets_BM: jax.Array,
    inverse_temperature_BM: jax.Array | None = None,
    cap: float | None = None,
    entropy_gradient: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Returns log-probabilities, differentiable in ``h`` and adapters of ``unembed``, and the
    entropy of each position's distribution in nats, ``[B, M]`` float32.

    Memory is bounded by ``_slice_bytes``, or one position of every row, whatever M and V are.

    Args:
        targets_BM: or ``[B, M, K]``, K soft targets of each position, whose result is ``[B, M,
            K]``.
        inverse_temperature_BM: float32 above 0, of the distribution; None is 1 everywhere.
        cap: ``ModelConfig.logit_cap``.
        entropy_gradient: the entropy is differentiable too; otherwise its gradient is 0.
    """
    chex.assert_rank(targets_BM, {2, 3})
    weights = stored_unembed(params)
    chex.assert_shape(h_BMD, (*targets_BM.shape[:2], stored.table_shape(weights)[1]))
    with jax.named_scope("unembed"):
        if lora is not None and lora.at("unembed").targeted:
            out = _with_adapters(weights, lora, h_BMD, targets_BM, inverse_temperature_BM, cap)
            return out if entropy_gradient else (out[0], jax.lax.stop_gradient(out[1]))
        table = weights if _in_parts(weights, h_BMD) else stored.table(weights, h_BMD.dtype)
        table, how = jax.lax.stop_gradient(table), (cap, entropy_gradient)
        return _frozen(h_BMD, table, targets_BM, inverse_temperature_BM, *how)


def _part_rows(table: jax.Array) -> int:
    """Returns the number of rows of a table's part: whole panels for a table in blocks."""
    return max(1, PART_BYTES // (4 * stored.table_shape(table)[1] * 64)) * 64


def _in_parts(table: jax.Array, h: jax.Array) -> bool:
    return stored.narrower(table, h) and stored.table_shape(table)[0] > _part_rows(table)


def _slice_count(rows: int, positions: int, vocab: int) -> int:
    """Returns the least number of slices of positions whose logits on one device fit."""
    # Rows stay whole: the mesh splits them, and a slice of rows would be communicated.
    devices = sharding.parts_here(rows, "batch") * sharding.parts_here(vocab, "vocab")
    return max(1, min(positions, -(-rows * positions * vocab * 4 // (_slice_bytes() * devices))))


def _slice_bytes() -> int:
    """Returns the bound on a slice's logits on the devices that a program is lowered for."""
    if dispatch.platform_of_mesh() != "cuda":
        return SLICE_BYTES
    stats = jax.local_devices()[0].memory_stats() or {}  # None on a CPU that compiles for others
    share = stats.get("bytes_limit", GPU_SLICE_SHARE * GPU_SLICE_BYTES) // GPU_SLICE_SHARE
    return max(SLICE_BYTES, min(GPU_SLICE_BYTES, share))


def _log_softmax_at(z_BCV, y_BC, sharp_BC):
    """Returns ``log softmax(sharp z)[y]`` and ``z[y]``, and ``exp(sharp (z - max z))`` with its
    sum.
    """
    z_NV = z_BCV.reshape(-1, z_BCV.shape[-1])
    picked_NK = jnp.take_along_axis(z_NV, y_BC.reshape(len(z_NV), -1), axis=-1)
    # The redundant max makes XLA gather the targets before the exp, so exp can reuse z's buffer.
    # Without it both arrays stay live.
    top_N1 = jnp.maximum(
        jnp.max(z_NV, axis=-1, keepdims=True), jnp.max(picked_NK, axis=-1, keepdims=True)
    )
    top_N1 = jax.lax.stop_gradient(top_N1)
    sharp_N1 = 1.0 if sharp_BC is None else sharp_BC.reshape(-1, 1)
    e_NV = jnp.exp((z_NV - top_N1) * sharp_N1)
    total_N1 = jnp.sum(e_NV, axis=-1, keepdims=True)
    logp_NK = (picked_NK - top_N1) * sharp_N1 - jnp.log(total_N1)
    return logp_NK.reshape(y_BC.shape), picked_NK.reshape(y_BC.shape), e_NV, total_N1


def _weighted_log(e):
    """Returns ``e log e``, whose sum gives the entropy; 0 where e is 0."""
    return e * jnp.log(jnp.maximum(e, jnp.finfo(jnp.float32).tiny))


def _entropy(e_NV, total_N1):
    return (jnp.log(total_N1) - jnp.sum(_weighted_log(e_NV), -1, keepdims=True) / total_N1)[:, 0]


def _slope(z, cap):
    """Returns the derivative of ``capped`` where its value is ``z``."""
    return 1 - jnp.square(z / cap)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _frozen(h_BMD, table, targets_BM, sharp_BM, cap, entropy_gradient):
    def one(slice_):
        logp, entropy, *_ = _of_slice(slice_, table, cap, with_mean=False)
        return logp, entropy

    return _over_slices(one, (h_BMD, targets_BM, sharp_BM), _logits_width(table, h_BMD))


def _of_slice(slice_, table, cap, with_mean, entropy_gradient=False) -> tuple[Any, ...]:
    """Returns the log-probabilities and entropies of a slice; ``p W``, the model's mean row of the
    table; the cap's slope at the targets; and with ``entropy_gradient`` ``-p (log p + H) W``.
    """
    h_BCD, y_BC, sharp_BC = slice_
    if _in_parts(table, h_BCD):
        return _by_parts(h_BCD, table, y_BC, sharp_BC, cap, with_mean, entropy_gradient)
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    z_BCV = capped(product("BCD,VD->BCV", h_BCD, table), cap)
    logp_BC, picked_BC, e_NV, total_N1 = _log_softmax_at(z_BCV, y_BC, sharp_BC)
    entropy_N = _entropy(e_NV, total_N1)
    entropy_BC = entropy_N.reshape(h_BCD.shape[:2])
    if not with_mean:
        return logp_BC, entropy_BC, None, None, None
    slopes = 1.0 if cap is None else _slope(z_BCV.reshape(e_NV.shape), cap)
    turn = None
    if entropy_gradient:
        level_N1 = jnp.log(total_N1) - entropy_N[:, None]  # mean of log e
        pull_NV = (e_NV * level_N1 - _weighted_log(e_NV)) * slopes
        turn = product("NV,VD->ND", pull_NV.astype(table.dtype), table) / total_N1
        turn = turn.reshape(h_BCD.shape)
    mean_ND = product("NV,VD->ND", (e_NV * slopes).astype(table.dtype), table) / total_N1
    slope_BC = None if cap is None else _slope(picked_BC, cap)
    return logp_BC, entropy_BC, mean_ND.reshape(h_BCD.shape), slope_BC, turn


def _logits_width(table, h):
    return _part_rows(table) if _in_parts(table, h) else table.shape[0]


def _over_slices(one, inputs, width):
    """Runs ``one`` over slices of the positions; concatenates the results, ``[B, M, ...]``."""
    B, M = inputs[0].shape[:2]
    n = _slice_count(B, M, width)
    if n == 1:
        return one(inputs)
    size = -(-M // n)

    def sliced(x):  # [n, B, size, ...], the last one padded
        x = jnp.pad(x, [(0, 0), (0, n * size - M)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(B, n, size, *x.shape[2:]), 1, 0)

    out = jax.lax.map(one, jax.tree.map(sliced, inputs))
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(B, -1, *x.shape[3:])[:, :M], out)


def _by_parts(h_BCD, table, y_BC, sharp_BC, cap, with_mean, entropy_gradient) -> tuple[Any, ...]:
    V, D = stored.table_shape(table)
    rows = _part_rows(table)
    h_ND = h_BCD.reshape(-1, D)
    N = h_ND.shape[0]
    y_NK = y_BC.reshape(N, -1)
    sharp_N1 = jnp.ones((N, 1), jnp.float32) if sharp_BC is None else sharp_BC.reshape(N, 1)

    def add(first, part, sums):
        """Adds a part, whose first row is ``first``, to sums relative to the largest logit."""
        top_N1, total_N1, logs_N1, picked_NK, mean_ND, turn_ND = sums
        w_VD = stored.table(part, h_ND.dtype)
        z_NV = jnp.einsum("ND,VD->NV", h_ND, w_VD, preferred_element_type=jnp.float32)
        z_NV = capped(z_NV, cap)
        at_NK = y_NK - first
        here_NK = jnp.take_along_axis(z_NV, jnp.clip(at_NK, 0, len(w_VD) - 1), axis=-1)
        picked_NK = jnp.where((at_NK >= 0) & (at_NK < len(w_VD)), here_NK, picked_NK)
        new_N1 = jnp.maximum(top_N1, jnp.max(z_NV, axis=-1, keepdims=True))
        # Without a part so far the difference is infinite, and the sums that it scales are 0.
        lower_N1 = jnp.where(top_N1 == -jnp.inf, 0.0, (top_N1 - new_N1) * sharp_N1)
        before_N1 = jnp.exp(lower_N1)
        e_NV = jnp.exp((z_NV - new_N1) * sharp_N1)
        log_NV = _weighted_log(e_NV)
        logs_N1 = (logs_N1 + lower_N1 * total_N1) * before_N1
        logs_N1 += jnp.sum(log_NV, axis=-1, keepdims=True)
        total_N1 = total_N1 * before_N1 + jnp.sum(e_NV, axis=-1, keepdims=True)
        if mean_ND is not None:
            slopes = 1.0 if cap is None else _slope(z_NV, cap)
            rows = functools.partial(jnp.einsum, "NV,VD->ND", preferred_element_type=jnp.float32)
            if turn_ND is not None:  # sums of e log e W until the end
                turn_ND = (turn_ND + lower_N1 * mean_ND) * before_N1 + rows(log_NV * slopes, w_VD)
            mean_ND = mean_ND * before_N1 + rows(e_NV * slopes, w_VD)
        return new_N1, total_N1, logs_N1, picked_NK, mean_ND, turn_ND

    each = table.shape[0] * rows // V  # panels, or rows
    whole = V // rows
    zero_N1 = jnp.zeros((N, 1), jnp.float32)
    sums = (
        zero_N1 - jnp.inf,
        zero_N1,
        zero_N1,
        jnp.zeros(y_NK.shape, jnp.float32),
        jnp.zeros((N, D), jnp.float32) if with_mean else None,
        jnp.zeros((N, D), jnp.float32) if entropy_gradient else None,
    )

    def step(i, sums):
        return add(i * rows, jax.lax.dynamic_slice_in_dim(table, i * each, each), sums)

    sums = jax.lax.fori_loop(0, whole, step, sums)
    if V % rows:
        sums = add(whole * rows, table[whole * each :], sums)
    top_N1, total_N1, logs_N1, picked_NK, mean_ND, turn_ND = sums
    logp_NK = (picked_NK - top_N1) * sharp_N1 - jnp.log(total_N1)
    mean = None if mean_ND is None else (mean_ND / total_N1).reshape(h_BCD.shape)
    slope = None if cap is None else _slope(picked_NK, cap).reshape(y_BC.shape)
    level_N1, turn = logs_N1 / total_N1, None
    if turn_ND is not None:
        turn = ((level_N1 * mean_ND - turn_ND) / total_N1).reshape(h_BCD.shape)
    entropy_BC = (jnp.log(total_N1) - level_N1).reshape(h_BCD.shape[:2])
    return logp_NK.reshape(y_BC.shape), entropy_BC, mean, slope, turn


def _frozen_forward(h_BMD, table, targets, sharp_BM, cap, entropy_gradient):
    def one(slice_):
        logp, entropy, mean_BCD, slope_BC, turn = _of_slice(
            slice_, table, cap, True, entropy_gradient
        )
        turn = None if turn is None else turn.astype(h_BMD.dtype)
        return logp, entropy, mean_BCD.astype(h_BMD.dtype), slope_BC, turn

    inputs = h_BMD, targets, sharp_BM
    logp, entropy, mean_BMD, slope, turn = _over_slices(one, inputs, _logits_width(table, h_BMD))
    return (logp, entropy), (mean_BMD, slope, turn, table, targets, sharp_BM)


def _frozen_backward(cap, entropy_gradient, kept, gs):
    del cap
    mean_BMD, slope, turn, table, targets, sharp_BM = kept
    g, of_entropy = gs
    B, M, D = mean_BMD.shape
    targets_BMK, g_BMK = targets.reshape(B, M, -1), g.reshape(B, M, -1)
    slope_BMK = None if slope is None else slope.reshape(B, M, -1)

    def one(slice_):
        mean_BCD, slope_BCK, y_BCK, g_BCK, sharp_BC = slice_
        of_rows = g_BCK if slope_BCK is None else g_BCK * slope_BCK
        rows_BCD = jnp.einsum("BCK,BCKD->BCD", of_rows, stored.rows(table, y_BCK, jnp.float32))
        dh_BCD = rows_BCD - jnp.sum(g_BCK, axis=-1, keepdims=True) * mean_BCD
        return (dh_BCD if sharp_BC is None else dh_BCD * sharp_BC[..., None]).astype(mean_BCD.dtype)

    inputs = mean_BMD, slope_BMK, targets_BMK, g_BMK, sharp_BM
    # Slices of the table's rows at the targets.
    dh_BMD = _over_slices(one, inputs, targets_BMK.shape[-1] * D)
    if entropy_gradient:
        also_BM = of_entropy if sharp_BM is None else of_entropy * sharp_BM
        dh_BMD = dh_BMD + (also_BM[..., None] * turn).astype(dh_BMD.dtype)
    return dh_BMD, None, None, None


_frozen.defvjp(_frozen_forward, _frozen_backward)


def _with_adapters(weights, lora, h_BMD, targets_BM, sharp_BM, cap):
    """Handles adapters on the unembedding, which need the logits' own gradient."""
    # Unpacked and gathered once, not for every slice.
    table, own = stored.table(weights, h_BMD.dtype), lora.at("unembed")

    @jax.checkpoint
    def one(slice_):
        h_BCD, y_BC, sharp_BC = slice_
        z_BCV = product_f32("BTD,VD->BTV", h_BCD, table)
        delta = batch_delta(h_BCD, own, z_BCV.shape[-1])
        z_BCV = capped(z_BCV if delta is None else z_BCV + delta.astype(jnp.float32), cap)
        logp, _, *rest = _log_softmax_at(z_BCV, y_BC, sharp_BC)
        return logp, _entropy(*rest).reshape(h_BCD.shape[:2])

    return _over_slices(one, (h_BMD, targets_BM, sharp_BM), table.shape[0])
