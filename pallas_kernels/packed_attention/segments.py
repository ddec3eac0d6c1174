"""Pairs of blocks of queries and keys that can interact, so that rows of several texts cost what
their texts cost.

Axes: B rows, T tokens, I blocks of queries, J blocks of keys.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import tuning


def key_of(q: jax.Array, v: jax.Array) -> str:
    """Returns the tuning key of a call with ``q [B, K, G, T, H]`` and ``v [B, K, T, V]``."""
    B, K, G, T, H = q.shape
    return (
        f"{q.dtype} rows {tuning.power(B)} tokens {tuning.power(T)} heads {K}x{G} {H}>{v.shape[3]}"
    )


def meeting(own: jax.Array, parent: jax.Array, queries: int, keys: int) -> jax.Array:
    """Returns ``[B, I, J]`` bool: a query of block i may attend to a key of block j."""

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
