"""Grouped-query attention (arXiv 2305.13245) over packed rows; over a KV cache see ``paged.py``.

A token attends to earlier tokens of its own segment and of its *parent*: with a prompt as the
parent of its rollouts, a GRPO group stores its prompt once. Scores are computed in blocks of
queries and recomputed in the backward pass (FlashAttention, arXiv 2205.14135, section 3.1).

Axes: B rows, T query tokens, S key positions, N query heads, K kv heads, G query heads per kv head,
H head dim of queries and keys, V of values, M = G T queries of a kv head.
"""

import functools
import math
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from mint_jax import sharding
from pallas_kernels import packed_attention as kernels
from pallas_kernels.dispatch import Implementation, anything, run
from pallas_kernels.partial import MASKED, partial_softmax

# Static query blocks of a row. Each attends only to the keys before its end, which skips half of
# the scores. Forward and backward of 4 rows of 1,024 tokens, 9 heads of 64, on two AVX-512 cores: 1
# block 479 ms, 2 348, 4 268, 8 220, 16 204. Every block adds code to each layer's program.
MAX_CAUSAL_BLOCKS = 8
MIN_BLOCK = 64
# Bound on one device's scores of a block; larger ones are computed in slices.
SCORE_BYTES = 256 << 20


class Segments(NamedTuple):
    """Segments of the tokens of packed rows."""

    own: jax.Array  # `[B, T]` int32 segment of each token
    parent: jax.Array  # `[B, T]` segment that it also attends to, or `own`


class Context(NamedTuple):
    """Inputs shared by all layers of one kind in one call."""

    cos: jax.Array  # this and sin: rotary tables `[B, T, rope_dim / 2]`
    sin: jax.Array
    segments: Segments | None  # of packed rows; None with a KV cache
    lineage: Any = None  # of packed rows with layers that have a state, see `state.Lineage`
    growth: jax.Array | None = None  # `[B, T]` factor on queries
    window: int | None = None  # positions that a token attends to; None: all
    positions: jax.Array | None = None  # `[B, T]`, of packed rows with a window


def packed_attention(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKV: jax.Array,
    segments: Segments,
    scale: float,
    chosen: jax.Array | None = None,
    kernel: str = "auto",
    keep: tuple[str, ...] = ("query", "key", "value"),
    sinks_N: jax.Array | None = None,
    window: int | None = None,
    positions_BT: jax.Array | None = None,
) -> jax.Array:
    """Computes causal attention within segments and their parents, ``[B, T, N, V]`` like ``q``.

    Args:
        chosen: keys that each query may attend to, as packed by ``pack_keys``; None for all.
        keep: those to name for ``transformer.REMAT``; the others' inputs are named.
        sinks_N: score of each head that only adds to the sum of its weights.
        window: with positions, a token attends to keys fewer positions before it; None for all.
    """
    chex.assert_rank([q_BTNH, v_BTKV], 4)
    B, T, N, H = q_BTNH.shape
    K, V = v_BTKV.shape[2:]
    chex.assert_shape([k_BTKH, v_BTKV], [(B, T, K, H), (B, T, K, V)])
    chex.assert_shape(list(segments), (B, T))
    assert window is None or chosen is None, "no layer has an indexer and a window"
    q = q_BTNH.reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4)  # B K G T H
    q = sharding.constrain(q, "batch", "kv_heads", None, "tokens", None)
    k, v = (
        sharding.constrain(x.transpose(0, 2, 1, 3), "batch", "kv_heads", "tokens", None)
        for x in (k_BTKH, v_BTKV)
    )
    named = zip(("query", "key", "value"), (q, k, v))
    q, k, v = (checkpoint_name(x, name) if name in keep else x for name, x in named)
    sinks = None if sinks_N is None else sinks_N.astype(jnp.float32).reshape(K, -1)
    args = q, k, v, *segments, positions_BT, chosen
    o: jax.Array = _attended(args, sinks, scale, kernel, window)
    return o.transpose(0, 3, 1, 2, 4).reshape(B, T, N, V)


def causal(T: int) -> jax.Array:
    """Returns the causal mask of new tokens, ``[T, T]`` bool."""
    return jnp.arange(T)[:, None] >= jnp.arange(T)[None]


def pack_keys(mask: jax.Array) -> jax.Array:
    """Packs ``[..., S]`` bool to ``[..., ceil(S / 8)]`` uint8: a layer stores a bit per pair."""
    return jnp.packbits(mask, axis=-1)


def unpack_keys(bits: jax.Array, S: int) -> jax.Array:
    """Inverts ``pack_keys``."""
    return jnp.unpackbits(bits, axis=-1, count=S).astype(bool)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _attended(args, sinks, scale, kernel, window):
    """Returns ``[B, K, G, T, V]`` from ``q [B, K, G, T, H]``, ``k, v [B, K, T, .]``, own, parent,
    positions and chosen, and ``sinks [K, G]``.
    """
    return _attended_forward(args, sinks, scale, kernel, window)[0]


def _attended_forward(args, sinks, scale, kernel, window):
    o, lse = run("packed_attention", FORWARD, kernel, args, scale=scale, window=window)
    if sinks is not None:
        # Whatever the kernel: a sink is a key without a value, so it only enlarges the sum.
        total = jnp.logaddexp(lse, sinks[None, :, :, None])
        o, lse = (o * jnp.exp(lse - total)[..., None]).astype(o.dtype), total
    # The backward pass needs the output and one number per query. JAX's derivative of a softmax
    # would store the weights, T x S numbers per head; they are recomputed instead.
    o, lse = checkpoint_name(o, "attended"), checkpoint_name(lse, "logsumexp")
    return o, (sinks, (*args, o, lse))


def _attended_backward(scale, kernel, window, residuals, g):
    (sinks, rest), dsinks = residuals, None
    how = {"scale": scale, "window": window}
    of_args = *run("packed_attention backward", BACKWARD, kernel, (*rest, g), **how), *(None,) * 4
    if sinks is not None:
        o, lse = rest[-2:]
        along = jnp.sum(g.astype(jnp.float32) * o.astype(jnp.float32), axis=-1)
        dsinks = -jnp.sum(jnp.exp(sinks[None, :, :, None] - lse) * along, axis=(0, 3))
    return of_args, dsinks


_attended.defvjp(_attended_forward, _attended_backward)


def segment_mask(own_q, parent_q, own_k, start):
    """Returns ``[B, t, S]`` bool: key s precedes query ``start + t`` in its segment or parent."""
    t, S = own_q.shape[1], own_k.shape[1]
    before = start + jnp.arange(t)[:, None] >= jnp.arange(S)[None]
    own = (own_q[:, :, None] == own_k[:, None]) | (parent_q[:, :, None] == own_k[:, None])
    return own & before[None]


def _slices(q, S):
    B, K, G, t, _ = q.shape
    devices = sharding.parts_here(B, "batch") * sharding.parts_here(K, "kv_heads")
    return slice_count(t, 4 * B * K * G * t * S // devices)


def slice_count(n: int, nbytes: int) -> int:
    """Returns the least divisor of ``n`` that splits ``nbytes`` to ``SCORE_BYTES``, or ``n``."""
    wanted = math.ceil(nbytes / SCORE_BYTES)
    return next((count for count in range(max(1, wanted), n + 1) if n % count == 0), n)


def _scores(q, k, own_q, parent_q, own_k, chosen, start, scale):
    B, K, G, t, H = q.shape
    q = q.reshape(B, K, G * t, H)
    s = jnp.einsum("BKMH,BKSH->BKMS", q, k, preferred_element_type=jnp.float32) * scale
    allowed = segment_mask(own_q, parent_q, own_k, start)
    if chosen is not None:
        allowed &= unpack_keys(chosen, k.shape[2])
    return jnp.where(allowed[:, None, None], s.reshape(B, K, G, t, -1), MASKED).reshape(s.shape)


def _slice_forward(q, k, v, own_q, parent_q, own_k, chosen, start, scale):
    s = _scores(q, k, own_q, parent_q, own_k, chosen, start, scale)

    def weighted(p):
        return jnp.einsum(
            "BKMS,BKSV->BKMV", p.astype(v.dtype), v, preferred_element_type=jnp.float32
        )

    top, total, value = partial_softmax(s, weighted)
    o = (value / total).reshape(*q.shape[:-1], -1).astype(q.dtype)
    return o, (top + jnp.log(total)).reshape(*q.shape[:-1], 1)


def _slice_backward(q, k, v, own_q, parent_q, own_k, chosen, start, scale, o, lse, g):
    # P = exp(S - lse), dV = P^T dO, dP = dO V^T, dS = P (dP - rowsum(dO O)), dQ = dS K, dK = dS^T Q
    B, K, G, t, H = q.shape
    s = _scores(q, k, own_q, parent_q, own_k, chosen, start, scale)
    p = jnp.exp(s - lse.reshape(B, K, G * t, 1))
    q_flat, g_flat, o_flat = (x.reshape(B, K, G * t, -1) for x in (q, g, o))
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    dv = product("BKMS,BKMV->BKSV", p.astype(v.dtype), g_flat)
    dp = product("BKMV,BKSV->BKMS", g_flat, v)
    along = jnp.sum(g_flat.astype(jnp.float32) * o_flat.astype(jnp.float32), axis=-1, keepdims=True)
    ds = (p * (dp - along) * scale).astype(k.dtype)
    dq = product("BKMS,BKSH->BKMH", ds, k).reshape(q.shape)
    return dq.astype(q.dtype), product("BKMS,BKMH->BKSH", ds, q_flat), dv


def split(x, n, axis):
    """Splits an axis into ``n`` slices, stacked in front; None stays None."""
    return jax.tree.map(lambda leaf: jnp.stack(jnp.split(leaf, n, axis=axis)), x)


def unsplit(x, axis):
    """Inverts ``split``."""
    return jnp.concatenate(list(x), axis=axis)


def _split_queries(own_q, parent_q, chosen, start, n):
    size = own_q.shape[1] // n
    return *(split(x, n, 1) for x in (own_q, parent_q, chosen)), start + jnp.arange(n) * size


# XLA: blocks of queries one after another, in slices.


def _blocks(q, own, parent, positions, chosen, window):
    """Yields start, stop, own, parent and bits of blocks of queries, and keys before their end."""
    T = q.shape[3]
    size = max(MIN_BLOCK, -(-T // MAX_CAUSAL_BLOCKS))
    for start in range(0, T, size):
        stop = min(start + size, T)
        bits = None if chosen is None else chosen[:, start:stop, : -(-stop // 8)]
        if window is not None:
            ago = positions[:, start:stop, None] - positions[:, None, :stop]
            bits = pack_keys(ago < window)
        yield start, stop, own[:, start:stop], parent[:, start:stop], bits


def _forward_by_xla(q, k, v, own, parent, positions, chosen, *, scale, window):
    out = []
    blocks = _blocks(q, own, parent, positions, chosen, window)
    for start, stop, own_q, parent_q, bits in blocks:
        q_block, own_k = q[:, :, :, start:stop], own[:, :stop]

        def one(slices, k=k[:, :, :stop], v=v[:, :, :stop], own_k=own_k):
            q, (own, parent, bits, at) = slices
            return _slice_forward(q, k, v, own, parent, own_k, bits, at, scale)

        n = _slices(q_block, stop)
        if n == 1:
            out.append(one((q_block, (own_q, parent_q, bits, start))))
            continue
        slices = split(q_block, n, 3), _split_queries(own_q, parent_q, bits, start, n)
        out.append(tuple(unsplit(x, 3) for x in jax.lax.map(one, slices)))
    o, lse = out[0] if len(out) == 1 else (jnp.concatenate(parts, axis=3) for parts in zip(*out))
    return o, lse[..., 0]


def _backward_by_xla(q, k, v, own, parent, positions, chosen, o, lse, g, *, scale, window):
    dq, dk, dv = [], jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    blocks = _blocks(q, own, parent, positions, chosen, window)
    for start, stop, own_q, parent_q, bits in blocks:
        k_block, v_block, own_k = k[:, :, :stop], v[:, :, :stop], own[:, :stop]
        rows = [x[:, :, :, start:stop] for x in (q, o, lse[..., None], g)]

        def one(slices, k=k_block, v=v_block, own_k=own_k):
            q, o, lse, g, (own, parent, bits, at) = slices
            return _slice_backward(q, k, v, own, parent, own_k, bits, at, scale, o, lse, g)

        n = _slices(rows[0], stop)
        if n == 1:
            dq_block, dk_block, dv_block = one((*rows, (own_q, parent_q, bits, start)))
        else:

            def add(sums, slices, one=one):
                dq, *parts = one(slices)
                return jax.tree.map(jnp.add, sums, tuple(parts)), dq

            of_queries = _split_queries(own_q, parent_q, bits, start, n)
            none = jnp.zeros(k_block.shape, jnp.float32), jnp.zeros(v_block.shape, jnp.float32)
            slices = *(split(x, n, 3) for x in rows), of_queries
            (dk_block, dv_block), dq_block = jax.lax.scan(add, none, slices)
            dq_block = unsplit(dq_block, 3)
        dq.append(dq_block)
        dk, dv = dk.at[:, :, :stop].add(dk_block), dv.at[:, :, :stop].add(dv_block)
    dq = dq[0] if len(dq) == 1 else jnp.concatenate(dq, axis=3)
    return dq, dk.astype(k.dtype), dv.astype(v.dtype)


# Kernels.


def _by_kernel(
    q, k, v, own, parent, positions, chosen, *rest, scale, window, call, outputs, interpret=False
):
    rows, heads = sharding.fitting(k.shape[:2], "batch", "kv_heads")
    specs = *((rows, heads),) * 3, *((rows,),) * 3, *((rows, heads),) * len(rest)
    local = functools.partial(call, scale=scale, window=window, interpret=interpret)
    out = ((rows, heads),) * outputs
    return sharding.over_devices(local, (q, k, v, own, parent, positions, *rest), specs, out)


def _by(name: str, platform: str, kernel, call, outputs: int) -> Implementation:
    def require(q, k, v, own, parent, positions, chosen, *rest, **_):
        if chosen is not None:
            raise NotImplementedError("an indexer chooses the keys")
        kernel.require(q, k, v)

    of_kernel = functools.partial(_by_kernel, call=call, outputs=outputs)
    return Implementation(name, platform, of_kernel, require)


KERNELS = (("pallas_tpu", "tpu", kernels.pallas_tpu), ("pallas_gpu", "cuda", kernels.pallas_gpu))
FORWARD = (
    *(_by(name, on, kernel, kernel.forward, 2) for name, on, kernel in KERNELS),
    Implementation("xla", None, _forward_by_xla, anything),
)
BACKWARD = (
    *(_by(name, on, kernel, kernel.backward, 3) for name, on, kernel in KERNELS),
    Implementation("xla", None, _backward_by_xla, anything),
)
