"""Log-probabilities of given tokens, in slices over tokens: one definition for training, scoring and rollout checks.

The unembedding is frozen, so with ``p = softmax(W h)`` the gradient of ``log p[y]`` with respect to ``h`` is
``W[y] - p W``: it needs nothing from later in the loss. The forward pass of a training step computes it while the logits
of a slice are at hand, and the backward pass is one multiplication: no logits are kept and none are computed twice.

Axes: B rows, M target positions of a row, V vocab, D model width, C tokens of a slice.
"""

from typing import Any

import jax
import jax.numpy as jnp

from mint_jax.lora.apply import Bound
from mint_jax.models.transformer import logits, unembed_table

SLICE_BYTES = 64 << 20  # bound on the float32 logits of one slice


def target_logprobs(params: Any, lora: Bound | None, h_BMD: jax.Array, targets_BM: jax.Array) -> jax.Array:
    """``log p(target | h)`` in float32, ``[B, M]``; differentiable in ``h`` and in adapters of ``unembed``.

    Memory is bounded by ``SLICE_BYTES`` whatever B, M and V are.
    """
    if lora is not None and any(lora.at("unembed").buckets):
        return _with_adapters(params, lora, h_BMD, targets_BM)
    return _frozen(h_BMD, jax.lax.stop_gradient(unembed_table(params)), targets_BM)


def _slice_count(tokens: int, vocab: int) -> int:
    """The fewest slices of ``tokens`` whose logits respect ``SLICE_BYTES``."""
    return max(1, min(tokens, -(-tokens * vocab * 4 // SLICE_BYTES)))


def _sliced(x: jax.Array, n: int, axis: int) -> jax.Array:
    """``n`` equal slices of an axis stacked in front; the last one is padded with zeros."""
    size = -(-x.shape[axis] // n)
    pad = [(0, 0)] * x.ndim
    pad[axis] = (0, n * size - x.shape[axis])
    return jnp.moveaxis(jnp.pad(x, pad).reshape(*x.shape[:axis], n, size, *x.shape[axis + 1 :]), axis, 0)


def _pick(z_CV: jax.Array, y_C: jax.Array) -> jax.Array:
    return jnp.take_along_axis(z_CV, y_C[:, None], axis=1)[:, 0]


@jax.custom_vjp
def _frozen(h_BMD, table_VD, targets_BM):
    def one(slice_):
        h_CD, y_C = slice_
        z_CV = jnp.einsum("CD,VD->CV", h_CD, table_VD, preferred_element_type=jnp.float32)
        return _pick(z_CV, y_C) - jax.nn.logsumexp(z_CV, axis=-1)

    return _over_slices(one, h_BMD, targets_BM, table_VD.shape[0]).reshape(targets_BM.shape)


def _over_slices(one, h_BMD, targets_BM, vocab):
    """``one(h[C, D], y[C])`` over slices of all tokens; the results, tokens leading."""
    tokens = targets_BM.size
    flat = h_BMD.reshape(tokens, -1), targets_BM.reshape(tokens)
    n = _slice_count(tokens, vocab)
    with jax.named_scope("unembed"):
        if n == 1:
            return one(flat)
        out = jax.lax.map(one, jax.tree.map(lambda x: _sliced(x, n, 0), flat))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:tokens], out)


def _frozen_forward(h_BMD, table_VD, targets_BM):
    def one(slice_):
        h_CD, y_C = slice_
        z_CV = jnp.einsum("CD,VD->CV", h_CD, table_VD, preferred_element_type=jnp.float32)
        top_C1 = jnp.max(z_CV, axis=-1, keepdims=True)
        e_CV = jnp.exp(z_CV - top_C1)
        total_C1 = jnp.sum(e_CV, axis=-1, keepdims=True)
        logp_C = _pick(z_CV, y_C) - (top_C1 + jnp.log(total_C1))[:, 0]
        mean_CD = jnp.einsum("CV,VD->CD", e_CV.astype(table_VD.dtype), table_VD, preferred_element_type=jnp.float32) / total_C1
        return logp_C, table_VD[y_C].astype(jnp.float32) - mean_CD

    logp, dh = _over_slices(one, h_BMD, targets_BM, table_VD.shape[0])
    return logp.reshape(targets_BM.shape), dh.reshape(h_BMD.shape).astype(h_BMD.dtype)


def _frozen_backward(dh_BMD, g_BM):
    return (dh_BMD * g_BM[..., None]).astype(dh_BMD.dtype), None, None


_frozen.defvjp(_frozen_forward, _frozen_backward)


def _with_adapters(params, lora, h_BMD, targets_BM):
    """Adapters on the unembedding need the logits' own gradient: slices over positions, recomputed backwards."""
    B, M, _ = h_BMD.shape
    n = min(M, _slice_count(B * M, unembed_table(params).shape[0]))

    @jax.checkpoint
    def one(slice_):
        h_BCD, y_BC = slice_
        z_BCV = logits(params, lora, h_BCD)
        return jnp.take_along_axis(z_BCV, y_BC[..., None], axis=-1)[..., 0] - jax.nn.logsumexp(z_BCV, axis=-1)

    out_nBC = jax.lax.map(one, (_sliced(h_BMD, n, 1), _sliced(targets_BM, n, 1)))
    return out_nBC.swapaxes(0, 1).reshape(B, -1)[:, :M]
