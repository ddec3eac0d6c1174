"""Log-probabilities of given tokens, in slices over positions: one definition for training, scoring and rollout checks.

The unembedding is frozen, so with ``p = softmax(W h)`` the gradient of ``log p[y]`` with respect to ``h`` is
``W[y] - p W``: it needs nothing from later in the loss. The forward pass of a training step computes it while the logits
of a slice are at hand, and the backward pass is one multiplication: no logits are kept and none are computed twice.

Axes: B rows, M target positions of a row, V vocab, D model width, C positions of a slice.
"""

from typing import Any

import chex
import jax
import jax.numpy as jnp

from mint_jax import sharding
from mint_jax.lora.apply import Bound
from mint_jax.models.transformer import logits, unembed_table

SLICE_BYTES = 64 << 20  # bound on one device's float32 logits of a slice, which has one position of every row at least


def target_logprobs(params: Any, lora: Bound | None, h_BMD: jax.Array, targets_BM: jax.Array) -> jax.Array:
    """``log p(target | h)`` in float32, ``[B, M]``; differentiable in ``h`` and in adapters of ``unembed``.

    Memory is bounded by ``SLICE_BYTES``, or one position of every row, whatever M and V are.
    """
    chex.assert_rank(targets_BM, 2)
    chex.assert_shape(h_BMD, (*targets_BM.shape, unembed_table(params).shape[1]))
    if lora is not None and any(lora.at("unembed").buckets):
        return _with_adapters(params, lora, h_BMD, targets_BM)
    return _frozen(h_BMD, jax.lax.stop_gradient(unembed_table(params)), targets_BM)


def _slice_count(rows: int, positions: int, vocab: int) -> int:
    """The fewest slices of ``positions`` whose logits, on one device, respect ``SLICE_BYTES``.

    Rows stay whole: they are what the mesh splits, and a slice of them would travel.
    """
    devices = sharding.parts_here(rows, "batch") * sharding.parts_here(vocab, "vocab")
    return max(1, min(positions, -(-rows * positions * vocab * 4 // (SLICE_BYTES * devices))))


def _sliced(x: jax.Array, n: int, axis: int) -> jax.Array:
    """``n`` equal slices of an axis stacked in front; the last one is padded with zeros."""
    size = -(-x.shape[axis] // n)
    pad = [(0, 0)] * x.ndim
    pad[axis] = (0, n * size - x.shape[axis])
    return jnp.moveaxis(jnp.pad(x, pad).reshape(*x.shape[:axis], n, size, *x.shape[axis + 1 :]), axis, 0)


def _pick(z_BCV: jax.Array, y_BC: jax.Array) -> jax.Array:
    return jnp.take_along_axis(z_BCV, y_BC[..., None], axis=-1)[..., 0]


@jax.custom_vjp
def _frozen(h_BMD, table_VD, targets_BM):
    def one(slice_):
        h_BCD, y_BC = slice_
        z_BCV = jnp.einsum("BCD,VD->BCV", h_BCD, table_VD, preferred_element_type=jnp.float32)
        return _pick(z_BCV, y_BC) - jax.nn.logsumexp(z_BCV, axis=-1)

    return _over_slices(one, h_BMD, targets_BM, table_VD.shape[0])


def _over_slices(one, h_BMD, targets_BM, vocab):
    """``one(h[B, C, D], y[B, C])`` over slices of the positions; the results put together again, ``[B, M, ...]``."""
    B, M = targets_BM.shape
    n = _slice_count(B, M, vocab)
    with jax.named_scope("unembed"):
        if n == 1:
            return one((h_BMD, targets_BM))
        out = jax.lax.map(one, (_sliced(h_BMD, n, 1), _sliced(targets_BM, n, 1)))
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(B, -1, *x.shape[3:])[:, :M], out)


def _frozen_forward(h_BMD, table_VD, targets_BM):
    def one(slice_):
        h_BCD, y_BC = slice_
        z_BCV = jnp.einsum("BCD,VD->BCV", h_BCD, table_VD, preferred_element_type=jnp.float32)
        top_BC1 = jnp.max(z_BCV, axis=-1, keepdims=True)
        e_BCV = jnp.exp(z_BCV - top_BC1)
        total_BC1 = jnp.sum(e_BCV, axis=-1, keepdims=True)
        logp_BC = _pick(z_BCV, y_BC) - (top_BC1 + jnp.log(total_BC1))[..., 0]
        mean_BCD = jnp.einsum("BCV,VD->BCD", e_BCV.astype(table_VD.dtype), table_VD, preferred_element_type=jnp.float32) / total_BC1
        return logp_BC, (table_VD[y_BC].astype(jnp.float32) - mean_BCD).astype(h_BCD.dtype)

    return _over_slices(one, h_BMD, targets_BM, table_VD.shape[0])


def _frozen_backward(dh_BMD, g_BM):
    return (dh_BMD * g_BM[..., None]).astype(dh_BMD.dtype), None, None


_frozen.defvjp(_frozen_forward, _frozen_backward)


def _with_adapters(params, lora, h_BMD, targets_BM):
    """Adapters on the unembedding need the logits' own gradient: slices over positions, recomputed backwards."""
    B, M, _ = h_BMD.shape
    n = _slice_count(B, M, unembed_table(params).shape[0])

    @jax.checkpoint
    def one(slice_):
        h_BCD, y_BC = slice_
        z_BCV = logits(params, lora, h_BCD)
        return jnp.take_along_axis(z_BCV, y_BC[..., None], axis=-1)[..., 0] - jax.nn.logsumexp(z_BCV, axis=-1)

    out_nBC = jax.lax.map(one, (_sliced(h_BMD, n, 1), _sliced(targets_BM, n, 1)))
    return out_nBC.swapaxes(0, 1).reshape(B, -1)[:, :M]
