"""Grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245) over packed rows, and over a cache.

A row may hold several segments. A token attends to earlier tokens of its own segment and of its *parent* segment: with
a prompt as the parent of its rollouts, a GRPO group keeps its prompt once. Scores are computed in blocks of queries
against only the keys before them, and recomputed in the backward pass (FlashAttention, arXiv 2205.14135, section 3.1).

With a cache, attention to each of its parts is a softmax of its own; ``merge`` makes one of them by the statistics that
blocks leave (section 3.1 there, Algorithm 1 line 12), so that neither caches nor scores are ever concatenated. Cached keys
and values are stored as decoding reads them, heads before positions: each head's are one matrix.

Axes: B rows, T query tokens, S key positions, N query heads, K kv heads, G query heads per kv head, H head dim of queries
and keys, V head dim of values, M = G T queries of a kv head, Q rows of a cache part, W = B / Q rows that share one of them.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from mint_jax import sharding

# Static query blocks of a row: each sees only the keys before its end, so that half of the scores are never computed. Forward and
# backward, 4 rows of 1,024 tokens, 9 heads of 64, two AVX-512 cores: 1 block 479 ms, 2 348, 4 268, 8 220, 16 204. Each block is code
# of its own in every layer's program.
MAX_CAUSAL_BLOCKS = 8
MIN_BLOCK = 64
SCORE_BYTES = 256 << 20  # bound on one device's scores of a block; larger ones are computed in slices
# What a masked score is: so low that its weight underflows to 0, and finite, for a row of padding sees no key at all. With -inf
# its largest score would be -inf too, and -inf - -inf is NaN, in that row's output and, backwards, in every weight.
MASKED = -1e30


class Segments(NamedTuple):
    """Which tokens of a packed row belong together.

    Attributes:
        own: ``[B, T]`` int32 segment of each token.
        parent: ``[B, T]`` segment whose tokens it also sees; equal to ``own`` where there is none.
    """

    own: jax.Array
    parent: jax.Array


class Context(NamedTuple):
    """What every layer of one call shares.

    Attributes:
        cos, sin: rotary tables ``[B, T, rope_dim / 2]``.
        segments: packed rows; None when a cache is read.
        lengths: valid positions of each cache part, ``[Q]`` or scalar int32; None without a cache.
    """

    cos: jax.Array
    sin: jax.Array
    segments: Segments | None
    lengths: tuple[jax.Array, ...] | None


class Past(NamedTuple):
    """Cached keys and values that precede the current tokens, in one or more parts.

    Attributes:
        k, v: per part ``[Q, K, S, H]``, shared by ``W`` consecutive rows each.
        length: per part ``[Q]`` or scalar int32: how many positions are valid.
    """

    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]
    length: tuple[jax.Array, ...]


class Partial(NamedTuple):
    """Attention to some of the keys, before it is divided by the sum of its weights.

    Attributes:
        top: ``[..., 1]`` float32, the largest score.
        total: ``[..., 1]``, sum of ``exp(score - top)``.
        value: ``[..., V]``, sum of ``exp(score - top) v``.
    """

    top: jax.Array
    total: jax.Array
    value: jax.Array


def packed_attention(
    q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKV: jax.Array, segments: Segments, scale: float, chosen: jax.Array | None = None
) -> jax.Array:
    """Causal attention within segments and their parents; ``[B, T, N, V]`` in the dtype of ``q``.

    Args:
        chosen: the keys that each query may see at all, ``[B, T, ceil(T / 8)]`` as ``pack_keys`` packs them; None for all.
    """
    chex.assert_rank([q_BTNH, v_BTKV], 4)
    B, T, N, H = q_BTNH.shape
    K, V = v_BTKV.shape[2:]
    chex.assert_shape([k_BTKH, v_BTKV], [(B, T, K, H), (B, T, K, V)])
    chex.assert_shape(list(segments), (B, T))
    q = q_BTNH.reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4)  # B K G T H
    q = checkpoint_name(sharding.constrain(q, "batch", "kv_heads", None, "tokens", None), "query")
    k, v = (sharding.constrain(x.transpose(0, 2, 1, 3), "batch", "kv_heads", "tokens", None) for x in (k_BTKH, v_BTKV))
    k, v = checkpoint_name(k, "key"), checkpoint_name(v, "value")
    size = max(MIN_BLOCK, -(-T // MAX_CAUSAL_BLOCKS))
    out = []
    for start in range(0, T, size):
        stop = min(start + size, T)
        queries = segments.own[:, start:stop], segments.parent[:, start:stop]
        bits = None if chosen is None else chosen[:, start:stop, : -(-stop // 8)]
        out.append(_block(q[:, :, :, start:stop], k[:, :, :stop], v[:, :, :stop], *queries, segments.own[:, :stop], bits, start, scale))
    o = out[0] if len(out) == 1 else jnp.concatenate(out, axis=3)
    return o.transpose(0, 3, 1, 2, 4).reshape(B, T, N, V)


def cached_attention(q_BTNH: jax.Array, k_BKTH: jax.Array, v_BKTH: jax.Array, past: Past, scale: float) -> jax.Array:
    """Attention of T new tokens to all valid cached positions and causally to each other; ``[B, T, N, H]``."""
    chex.assert_rank([q_BTNH, k_BKTH], 4)
    B, T, N, H = q_BTNH.shape
    K = k_BKTH.shape[1]
    chex.assert_shape([k_BKTH, v_BKTH], (B, K, T, H))
    G = N // K

    def part(k_QKSH: jax.Array, v_QKSH: jax.Array, allowed: jax.Array) -> Partial:
        Q, _, S, _ = k_QKSH.shape
        W = B // Q
        rows, heads, positions, _ = axes = sharding.cache_axes(k_QKSH.shape)
        k_QKSH, v_QKSH = sharding.constrain(k_QKSH, *axes), sharding.constrain(v_QKSH, *axes)
        q_QKMH = q_BTNH.reshape(Q, W, T, K, G, H).transpose(0, 3, 1, 2, 4, 5).reshape(Q, K, W * T * G, H)
        q_QKMH = sharding.constrain(q_QKMH, rows, heads, None, None)
        s = jnp.einsum("QKMH,QKSH->QKMS", q_QKMH, k_QKSH, preferred_element_type=jnp.float32) * scale
        s = sharding.constrain(s, rows, heads, None, positions)

        def weigh(p: jax.Array) -> jax.Array:
            o = jnp.einsum("QKMS,QKSH->QKMH", p.astype(v_QKSH.dtype), v_QKSH, preferred_element_type=jnp.float32)
            return sharding.constrain(o, rows, heads, None, None)

        stats = partial_softmax(jnp.where(allowed, s.reshape(Q, K, W, T, G, S), MASKED).reshape(s.shape), weigh)
        return Partial(*(x.reshape(Q, K, W, T, G, -1).transpose(0, 2, 3, 1, 4, 5).reshape(B, T, N, -1) for x in stats))

    parts = [part(k, v, valid(length, len(k), k.shape[2])[:, None, None, None, None]) for k, v, length in zip(past.k, past.v, past.length)]
    own = part(k_BKTH, v_BKTH, causal(T)[None, None, None, :, None])
    return sharding.constrain(merge([*parts, own]).astype(q_BTNH.dtype), "batch", None, "q_heads", None)


def partial_softmax(s: jax.Array, weigh: Callable[[jax.Array], jax.Array]) -> Partial:
    """Attention over the last axis of masked scores ``s``; ``weigh`` sums values by weights of the shape of ``s``."""
    top = jnp.max(s, axis=-1, keepdims=True)
    p = jnp.exp(s - top)
    return Partial(top, jnp.sum(p, axis=-1, keepdims=True), weigh(p))


def merge(parts: Sequence[Partial]) -> jax.Array:
    """Attention to the keys of all parts, ``[..., V]`` float32. A part whose keys are all masked has no weight."""

    # Each part has divided by nothing yet: with the larger of both maxima as the common reference no weight overflows, and
    # a part that lies far below, all masked ones among them, vanishes as it would have in one softmax over all keys.
    def both(x: Partial, y: Partial) -> Partial:
        top = jnp.maximum(x.top, y.top)
        a, b = jnp.exp(x.top - top), jnp.exp(y.top - top)
        return Partial(top, a * x.total + b * y.total, a * x.value + b * y.value)

    whole = functools.reduce(both, parts)
    return whole.value / whole.total


def valid(length: jax.Array, Q: int, S: int) -> jax.Array:
    """``[Q, S]``: which of a cache part's S positions hold a token."""
    return jnp.arange(S)[None] < jnp.broadcast_to(length, (Q,))[:, None]


def causal(T: int) -> jax.Array:
    """``[T, T]``: may a new token see another."""
    return jnp.arange(T)[:, None] >= jnp.arange(T)[None]


def pack_keys(mask: jax.Array) -> jax.Array:
    """``[..., S]`` bool -> ``[..., ceil(S / 8)]`` uint8: what a layer keeps for its backward pass is a bit a pair."""
    return jnp.packbits(mask, axis=-1)


def unpack_keys(bits: jax.Array, S: int) -> jax.Array:
    """The inverse of ``pack_keys``."""
    return jnp.unpackbits(bits, axis=-1, count=S).astype(bool)


@functools.partial(jax.custom_vjp, nondiff_argnums=(7, 8))
def _block(q, k, v, own_q, parent_q, own_k, chosen, start, scale):
    """One block of queries ``q [B, K, G, t, H]`` against ``k, v [B, K, S, .]``; ``start`` is its first query's index."""
    return _block_forward(q, k, v, own_q, parent_q, own_k, chosen, start, scale)[0]


def seen(own_q, parent_q, own_k, start):
    """``[B, t, S]``: does key s stand before query ``start + t``, in its segment or its parent."""
    t, S = own_q.shape[1], own_k.shape[1]
    before = start + jnp.arange(t)[:, None] >= jnp.arange(S)[None]
    own = (own_q[:, :, None] == own_k[:, None]) | (parent_q[:, :, None] == own_k[:, None])
    return own & before[None]


def _slices(q, S):
    """Into how many slices of queries a block falls so that scores stay below ``SCORE_BYTES``."""
    B, K, G, t, _ = q.shape
    devices = sharding.parts_here(B, "batch") * sharding.parts_here(K, "kv_heads")
    return slice_count(t, 4 * B * K * G * t * S // devices)


def slice_count(n: int, nbytes: int) -> int:
    """The least divisor of ``n`` that cuts ``nbytes`` into slices of at most ``SCORE_BYTES``; ``n`` where none does."""
    wanted = math.ceil(nbytes / SCORE_BYTES)
    return next((count for count in range(max(1, wanted), n + 1) if n % count == 0), n)


def _scores(q, k, own_q, parent_q, own_k, chosen, start, scale):
    B, K, G, t, H = q.shape
    s = jnp.einsum("BKMH,BKSH->BKMS", q.reshape(B, K, G * t, H), k, preferred_element_type=jnp.float32) * scale
    allowed = seen(own_q, parent_q, own_k, start)
    if chosen is not None:
        allowed &= unpack_keys(chosen, k.shape[2])
    return jnp.where(allowed[:, None, None], s.reshape(B, K, G, t, -1), MASKED).reshape(s.shape)


def _slice_forward(q, k, v, own_q, parent_q, own_k, chosen, start, scale):
    s = _scores(q, k, own_q, parent_q, own_k, chosen, start, scale)
    top, total, value = partial_softmax(
        s, lambda p: jnp.einsum("BKMS,BKSV->BKMV", p.astype(v.dtype), v, preferred_element_type=jnp.float32)
    )
    return (value / total).reshape(*q.shape[:-1], -1).astype(q.dtype), (top + jnp.log(total)).reshape(*q.shape[:-1], 1)


def _slice_backward(q, k, v, own_q, parent_q, own_k, chosen, start, scale, o, lse, g):
    # P = exp(S - lse), dV = P^T dO, dP = dO V^T, dS = P (dP - rowsum(dO O)), dQ = dS K, dK = dS^T Q
    B, K, G, t, H = q.shape
    p = jnp.exp(_scores(q, k, own_q, parent_q, own_k, chosen, start, scale) - lse.reshape(B, K, G * t, 1))
    g_flat, o_flat = (x.reshape(B, K, G * t, -1) for x in (g, o))
    dv = jnp.einsum("BKMS,BKMV->BKSV", p.astype(v.dtype), g_flat, preferred_element_type=jnp.float32)
    dp = jnp.einsum("BKMV,BKSV->BKMS", g_flat, v, preferred_element_type=jnp.float32)
    along = jnp.sum(g_flat.astype(jnp.float32) * o_flat.astype(jnp.float32), axis=-1, keepdims=True)
    ds = (p * (dp - along) * scale).astype(k.dtype)
    dq = jnp.einsum("BKMS,BKSH->BKMH", ds, k, preferred_element_type=jnp.float32).reshape(q.shape)
    dk = jnp.einsum("BKMS,BKMH->BKSH", ds, q.reshape(B, K, G * t, H), preferred_element_type=jnp.float32)
    return dq.astype(q.dtype), dk, dv


def split(x, n, axis):
    """``n`` slices of an axis, stacked in front; None stays None."""
    return jax.tree.map(lambda leaf: jnp.stack(jnp.split(leaf, n, axis=axis)), x)


def unsplit(x, axis):
    """The inverse of ``split``."""
    return jnp.concatenate(list(x), axis=axis)


def _split_queries(own_q, parent_q, chosen, start, n):
    """Slices of the masks' inputs: which keys a block's queries may see."""
    size = own_q.shape[1] // n
    return *(split(x, n, 1) for x in (own_q, parent_q, chosen)), start + jnp.arange(n) * size


def _block_forward(q, k, v, own_q, parent_q, own_k, chosen, start, scale):
    n = _slices(q, k.shape[2])
    if n == 1:
        o, lse = _slice_forward(q, k, v, own_q, parent_q, own_k, chosen, start, scale)
    else:

        def one(slices):
            q, (own, parent, bits, at) = slices
            return _slice_forward(q, k, v, own, parent, own_k, bits, at, scale)

        o, lse = jax.lax.map(one, (split(q, n, 3), _split_queries(own_q, parent_q, chosen, start, n)))
        o, lse = unsplit(o, 3), unsplit(lse, 3)
    # Kept for the backward pass are the output and one number a query. The weights, which JAX's own derivative of a softmax
    # would keep, are t times S numbers a head, and are computed again from these.
    o, lse = checkpoint_name(o, "attended"), checkpoint_name(lse, "logsumexp")
    return o, (q, k, v, own_q, parent_q, own_k, chosen, o, lse)


def _block_backward(start, scale, residuals, g):
    q, k, v, own_q, parent_q, own_k, chosen, o, lse = residuals
    n = _slices(q, k.shape[2])
    if n == 1:
        dq, dk, dv = _slice_backward(q, k, v, own_q, parent_q, own_k, chosen, start, scale, o, lse, g)
    else:

        def add(sums, slices):
            q, o, lse, g, (own, parent, bits, at) = slices
            dq, dk, dv = _slice_backward(q, k, v, own, parent, own_k, bits, at, scale, o, lse, g)
            return (sums[0] + dk, sums[1] + dv), dq

        slices = *(split(x, n, 3) for x in (q, o, lse, g)), _split_queries(own_q, parent_q, chosen, start, n)
        (dk, dv), dq = jax.lax.scan(add, (jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)), slices)
        dq = unsplit(dq, 3)
    return dq, dk.astype(k.dtype), dv.astype(v.dtype), None, None, None, None


_block.defvjp(_block_forward, _block_backward)
