"""Grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245) over packed rows, and over a cache.

A row may hold several segments. A token attends to earlier tokens of its own segment and of its *parent* segment: with
a prompt as the parent of its rollouts, a GRPO group keeps its prompt once. Scores are computed in blocks of queries
against only the keys before them, and recomputed in the backward pass (FlashAttention, arXiv 2205.14135, section 3.1).

Axes: B rows, T query tokens, S key positions, N query heads, K kv heads, G query heads per kv head, H head dim,
M = G T queries of a kv head.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

MAX_CAUSAL_BLOCKS = 8  # static query blocks of a row: each sees only the keys before its end
MIN_BLOCK = 64
SCORE_BYTES = 256 << 20  # bound on one block's scores; larger ones are computed in slices
MASKED = -1e30


class Segments(NamedTuple):
    """Which tokens of a packed row belong together.

    Attributes:
        own: ``[B, T]`` int32 segment of each token.
        parent: ``[B, T]`` segment whose tokens it also sees; equal to ``own`` where there is none.
    """

    own: jax.Array
    parent: jax.Array


class Past(NamedTuple):
    """Cached keys and values that precede the current tokens, in one or more parts.

    Attributes:
        k, v: per part ``[C, S, K, H]``, shared by ``B / C`` consecutive rows each.
        length: per part ``[C]`` or scalar int32: how many positions are valid.
    """

    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]
    length: tuple[jax.Array, ...]


def packed_attention(q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, segments: Segments, scale: float) -> jax.Array:
    """Causal attention within segments and their parents; ``[B, T, N, H]`` in the dtype of ``q``."""
    B, T, N, H = q_BTNH.shape
    K = k_BTKH.shape[2]
    q = checkpoint_name(q_BTNH.reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4), "query")  # B K G T H
    k = checkpoint_name(k_BTKH.transpose(0, 2, 1, 3), "key")
    v = checkpoint_name(v_BTKH.transpose(0, 2, 1, 3), "value")
    size = max(MIN_BLOCK, -(-T // MAX_CAUSAL_BLOCKS))
    out = []
    for start in range(0, T, size):
        stop = min(start + size, T)
        queries = segments.own[:, start:stop], segments.parent[:, start:stop]
        out.append(_block(q[:, :, :, start:stop], k[:, :, :stop], v[:, :, :stop], *queries, segments.own[:, :stop], start, scale))
    o = out[0] if len(out) == 1 else jnp.concatenate(out, axis=3)
    return o.transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)


def cached_attention(q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, past: Past, scale: float) -> jax.Array:
    """Attention of T new tokens to all valid cached positions and causally to each other; ``[B, T, N, H]``."""
    B, T, N, H = q_BTNH.shape
    K = k_BTKH.shape[2]
    G = N // K
    scores, values = [], []
    for k, v, length in zip(past.k, past.v, past.length):
        C, S = k.shape[:2]
        shared = B // C  # rows that read the same cached prompt
        q = q_BTNH.reshape(C, shared, T, K, G, H).transpose(0, 3, 1, 2, 4, 5).reshape(C, K, shared * T * G, H)
        s = jnp.einsum("CKMH,CSKH->CKMS", q, k, preferred_element_type=jnp.float32) * scale
        valid = jnp.arange(S)[None] < jnp.broadcast_to(length, (C,))[:, None]
        s = jnp.where(valid[:, None, None], s, MASKED).reshape(C, K, shared, T, G, S)
        scores.append(s.transpose(0, 2, 1, 3, 4, 5).reshape(B, K, T, G, S))
        values.append(v)
    own = jnp.einsum("BTKGH,BSKH->BKTGS", q_BTNH.reshape(B, T, K, G, H), k_BTKH, preferred_element_type=jnp.float32) * scale
    causal = jnp.arange(T)[:, None] >= jnp.arange(T)[None]
    scores.append(jnp.where(causal[None, None, :, None], own, MASKED))

    weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1).astype(v_BTKH.dtype)
    out, start = jnp.zeros((B, T, K, G, H), jnp.float32), 0
    for v in values:
        C, S = v.shape[:2]
        shared = B // C
        w = weights[..., start : start + S].reshape(C, shared, K, T, G, S).transpose(0, 2, 1, 3, 4, 5).reshape(C, K, shared * T * G, S)
        o = jnp.einsum("CKMS,CSKH->CKMH", w, v, preferred_element_type=jnp.float32).reshape(C, K, shared, T, G, H)
        out = out + o.transpose(0, 2, 3, 1, 4, 5).reshape(B, T, K, G, H)
        start += S
    out = out + jnp.einsum("BKTGS,BSKH->BTKGH", weights[..., start:], v_BTKH, preferred_element_type=jnp.float32)
    return out.reshape(B, T, N, H).astype(q_BTNH.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def _block(q, k, v, own_q, parent_q, own_k, start, scale):
    """One block of queries ``q [B, K, G, t, H]`` against ``k, v [B, K, S, H]``; ``start`` is its first query's index."""
    return _block_forward(q, k, v, own_q, parent_q, own_k, start, scale)[0]


def _allowed(own_q, parent_q, own_k, start):
    """``[B, 1, 1, t, S]``: may query t attend to key s."""
    t, S = own_q.shape[1], own_k.shape[1]
    causal = start + jnp.arange(t)[:, None] >= jnp.arange(S)[None]
    own = (own_q[:, :, None] == own_k[:, None]) | (parent_q[:, :, None] == own_k[:, None])
    return (own & causal[None])[:, None, None]


def _slices(q, S):
    """Into how many slices of queries a block falls so that scores stay below ``SCORE_BYTES``."""
    B, K, G, t, _ = q.shape
    wanted = math.ceil(4 * B * K * G * t * S / SCORE_BYTES)
    return next((n for n in range(max(1, wanted), t + 1) if t % n == 0), t)


def _scores(q, k, own_q, parent_q, own_k, start, scale):
    B, K, G, t, H = q.shape
    s = jnp.einsum("BKMH,BKSH->BKMS", q.reshape(B, K, G * t, H), k, preferred_element_type=jnp.float32) * scale
    return jnp.where(_allowed(own_q, parent_q, own_k, start), s.reshape(B, K, G, t, -1), MASKED).reshape(s.shape)


def _slice_forward(q, k, v, own_q, parent_q, own_k, start, scale):
    s = _scores(q, k, own_q, parent_q, own_k, start, scale)
    top = jnp.max(s, axis=-1, keepdims=True)
    p = jnp.exp(s - top)
    total = jnp.sum(p, axis=-1, keepdims=True)
    o = jnp.einsum("BKMS,BKSH->BKMH", p.astype(v.dtype), v, preferred_element_type=jnp.float32) / total
    return o.reshape(q.shape).astype(q.dtype), (top + jnp.log(total)).reshape(*q.shape[:-1], 1)


def _slice_backward(q, k, v, own_q, parent_q, own_k, start, scale, o, lse, g):
    # P = exp(S - lse), dV = P^T dO, dP = dO V^T, dS = P (dP - rowsum(dO O)), dQ = dS K, dK = dS^T Q
    B, K, G, t, H = q.shape
    flat = (B, K, G * t, H)
    p = jnp.exp(_scores(q, k, own_q, parent_q, own_k, start, scale) - lse.reshape(B, K, G * t, 1))
    g_flat = g.reshape(flat)
    dv = jnp.einsum("BKMS,BKMH->BKSH", p.astype(v.dtype), g_flat, preferred_element_type=jnp.float32)
    dp = jnp.einsum("BKMH,BKSH->BKMS", g_flat, v, preferred_element_type=jnp.float32)
    along = jnp.sum(g_flat.astype(jnp.float32) * o.reshape(flat).astype(jnp.float32), axis=-1, keepdims=True)
    ds = (p * (dp - along) * scale).astype(k.dtype)
    dq = jnp.einsum("BKMS,BKSH->BKMH", ds, k, preferred_element_type=jnp.float32).reshape(q.shape)
    dk = jnp.einsum("BKMS,BKMH->BKSH", ds, q.reshape(flat), preferred_element_type=jnp.float32)
    return dq.astype(q.dtype), dk, dv


def _split(x, n, axis):
    """``n`` slices of an axis, stacked in front."""
    return jnp.stack(jnp.split(x, n, axis=axis))


def _merge(x, axis):
    """The inverse of ``_split``."""
    return jnp.concatenate(list(x), axis=axis)


def _block_forward(q, k, v, own_q, parent_q, own_k, start, scale):
    n = _slices(q, k.shape[2])
    if n == 1:
        o, lse = _slice_forward(q, k, v, own_q, parent_q, own_k, start, scale)
    else:
        starts = start + jnp.arange(n) * (q.shape[3] // n)
        parts = _split(q, n, 3), _split(own_q, n, 1), _split(parent_q, n, 1), starts
        o, lse = jax.lax.map(lambda s: _slice_forward(s[0], k, v, s[1], s[2], own_k, s[3], scale), parts)
        o, lse = _merge(o, 3), _merge(lse, 3)
    o, lse = checkpoint_name(o, "attended"), checkpoint_name(lse, "logsumexp")
    return o, (q, k, v, own_q, parent_q, own_k, o, lse)


def _block_backward(start, scale, residuals, g):
    q, k, v, own_q, parent_q, own_k, o, lse = residuals
    n = _slices(q, k.shape[2])
    if n == 1:
        dq, dk, dv = _slice_backward(q, k, v, own_q, parent_q, own_k, start, scale, o, lse, g)
    else:
        starts = start + jnp.arange(n) * (q.shape[3] // n)
        parts = *(_split(x, n, 3) for x in (q, o, lse, g)), _split(own_q, n, 1), _split(parent_q, n, 1), starts

        def add(sums, s):
            dq, dk, dv = _slice_backward(s[0], k, v, s[4], s[5], own_k, s[6], scale, s[1], s[2], s[3])
            return (sums[0] + dk, sums[1] + dv), dq

        zeros = jnp.zeros(k.shape, jnp.float32)
        (dk, dv), dq = jax.lax.scan(add, (zeros, zeros), parts)
        dq = _merge(dq, 3)
    return dq, dk.astype(k.dtype), dv.astype(v.dtype), None, None, None


_block.defvjp(_block_forward, _block_backward)
