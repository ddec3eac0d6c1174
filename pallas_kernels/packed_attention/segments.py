"""Which blocks of keys a block of queries has anything to do with: rows of several texts cost what
their texts cost.

Axes: B rows, T tokens, I blocks of queries, J blocks of keys.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import tuning


def key_of(q: jax.Array, v: jax.Array) -> str:
    """What a call's speed depends on, for tables of ``tuning``; of ``q [B, K, G, T, H]`` and ``v
    [B, K, T, V]``.
    """
    B, K, G, T, H = q.shape
    return (
        f"{q.dtype} rows {tuning.power(B)} tokens {tuning.power(T)} heads {K}x{G} {H}>{v.shape[3]}"
    )


def meeting(own: jax.Array, parent: jax.Array, queries: int, keys: int) -> jax.Array:
    """``[B, I, J]`` bool: may a query of block i see a key of block j.

    Ranges of segments that overlap say may; those that do not overlap say no, and so does what is
    above the diagonal.

    Args:
        own, parent: ``[B, T]``, T a multiple of both sizes.
        queries, keys: tokens of a block.
    """

    def ends(x: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
        x = x.reshape(x.shape[0], -1, size)
        return jnp.min(x, axis=2), jnp.max(x, axis=2)

    low, high = (x[:, None] for x in ends(own, keys))

    def overlap(of_queries: jax.Array) -> jax.Array:
        least, most = (x[:, :, None] for x in ends(of_queries, queries))
        return (least <= high) & (low <= most)

    last = (jnp.arange(own.shape[1] // queries) + 1) * queries - 1
    below = last[:, None] >= (jnp.arange(own.shape[1] // keys) * keys)[None]
    return (overlap(own) | overlap(parent)) & below[None]
