"""Tiles of rows that are sorted by group: small arrays that say which rows a loop or a kernel
takes, and for which group.
"""

import jax
import jax.numpy as jnp


def group_at(end_G: jax.Array, n: jax.Array) -> jax.Array:
    """Returns the group of each place n, ``[N]`` int32, by the groups' ends; G behind the last."""
    # By default a search is a loop, on a GPU of 32 launches for 128 groups.
    return jnp.searchsorted(end_G, n, side="right", method="scan_unrolled")


def schedule(
    M: int, sizes: jax.Array, tile: int, first: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns group and first row of each tile in order, and the number of tiles."""
    G = sizes.shape[0]
    tiles_G = -(-sizes // tile)
    last_G = jnp.cumsum(tiles_G)
    n = jnp.arange(M // tile + min(G, M), dtype=jnp.int32)
    group_n = jnp.minimum(group_at(last_G, n), G - 1)
    first_n = first[group_n] + (n - (last_G - tiles_G)[group_n]) * tile
    return group_n, first_n, last_G[-1]


def tiles(
    M: int, sizes: jax.Array, tile: int, first: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns group, first row and end of each of the most tiles; 0 for unused ones."""
    group_V, first_V, total = schedule(M, sizes, tile, first)
    there = jnp.arange(group_V.shape[0], dtype=jnp.int32) < total
    return group_V, first_V, jnp.where(there, (first + sizes)[group_V], 0)
