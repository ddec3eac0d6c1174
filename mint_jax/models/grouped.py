"""The CPU form of matmuls of grouped rows: a loop over tiles of one group's rows.

XLA's CPU form of ``jax.lax.ragged_dot`` multiplies every row by every matrix; a loop over tiles is
exact for any distribution of rows.

Axes: M rows, G groups, W matrices, K in, N out.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul.tiles import schedule
from pallas_kernels.products import dot

# Rows of a tile: a multiple of STEP, about MAX_TILE at most. A tile costs a pass over its matrix,
# so small tiles read the experts repeatedly; rows past a group's end are wasted work. On two
# AVX-512 cores, float32, 2,048 rows and matrices of 512 x 256: for 128 experts tiles of 24 rows
# (chosen here) take 17 ms, of 8 rows 27, of 160 rows 33, of 512 rows 70; for 16 experts tiles of
# 152 rows (chosen) 5 ms, of 8 rows 14, of 512 rows 9. ``ragged_dot`` takes 518 and 88 ms.
STEP, MAX_TILE = 8, 160


def tile_rows(rows: int, groups: int) -> int:
    """Returns the rows of a tile, such that most groups of about average size fill whole tiles."""
    average = rows / max(1, groups)
    most = average + 2 * average**0.5
    tiles = max(1, math.ceil(most / MAX_TILE))
    return STEP * max(1, math.ceil(most / tiles / STEP))


class Tile:
    """One tile of a group's rows inside a loop, which leaves rows of other groups alone."""

    def __init__(self, first: jax.Array, stop: jax.Array, rows: int, M: int):
        self.start, self.rows = jnp.minimum(first, M - rows), rows
        row = self.start + jnp.arange(rows, dtype=jnp.int32)
        self.is_own = ((row >= first) & (row < stop))[:, None]

    def read(self, x: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(x, self.start, self.rows)

    def own(self, x: jax.Array) -> jax.Array:
        # A select on both sides of a sum: another group's row may be NaN, and 0 times NaN is NaN.
        return jnp.where(self.is_own, self.read(x), jnp.zeros((), x.dtype))

    def add(self, x: jax.Array, part: jax.Array) -> jax.Array:
        """Adds ``part`` to this tile's own rows of ``x``."""
        old = self.read(x)
        return jax.lax.dynamic_update_slice_in_dim(
            x, jnp.where(self.is_own, (old + part).astype(x.dtype), old), self.start, 0
        )


def over_tiles(
    body: Callable[[Tile, jax.Array, Any], Any],
    carry: Any,
    M: int,
    sizes: jax.Array,
    first: jax.Array | None = None,
) -> Any:
    """Runs ``body(tile, group, carry)`` over all tiles in order; see ``schedule``."""
    rows = min(tile_rows(M, sizes.shape[0]), M)
    first_G = jnp.cumsum(sizes) - sizes if first is None else first
    group, first_n, total = schedule(M, sizes, rows, first_G)
    stop_G = first_G + sizes

    def step(i, carry):
        return body(Tile(first_n[i], stop_G[group[i]], rows, M), group[i], carry)

    return jax.lax.fori_loop(0, total, step, carry)


def blank(shape: tuple[int, ...], dtype: Any, sizes: jax.Array, key: int) -> jax.Array:
    """Returns zeros for a loop to write into; each buffer needs its own ``key``."""
    # A value that XLA cannot prove to be zero is not merged. With ``jnp.zeros`` the backward pass
    # of two projections of 32 experts with adapters takes 13 % longer, because each loop copies the
    # shared constant first.
    never = jnp.sum(sizes) < -key
    return jnp.broadcast_to(jnp.where(never, 1, 0).astype(dtype), shape)


def at(w: jax.Array, i: jax.Array) -> jax.Array:
    """Returns ``w[i]`` without its axis."""
    return jax.lax.dynamic_index_in_dim(w, i, keepdims=False)


def tiled_matmul(
    x: jax.Array,
    w: jax.Array,
    sizes: jax.Array,
    index: jax.Array | None = None,
    transposed: bool = False,
    onto: jax.Array | None = None,
    scaled: Callable[[jax.Array, jax.Array], jax.Array] | None = None,
    key: int = 0,
) -> jax.Array:
    """Returns ``x[m] @ w[index + group of m]``, ``[M, N]`` in the dtype of ``x``; zeros after the
    last group.

    Args:
        x: ``[M, K]``, rows of group 0 first.
        w: ``[W, K, N]``; ``[W, N, K]`` if ``transposed``.
        sizes: ``[G]`` int32 rows of each group.
        index: matrix of group 0 in a stack, whose slice would be a copy; None is 0.
        onto: ``[M, N]`` to add to, instead of zeros.
        scaled: maps ``(group, float32 product)`` to the value to write.
    """
    M, N = x.shape[0], w.shape[1 if transposed else 2]
    y = blank((M, N), x.dtype, sizes, key) if onto is None else onto

    def body(tile, group, y):
        matrix = at(w, group if index is None else index + group)
        out = dot(tile.read(x), matrix, (1, 1 if transposed else 0))
        return tile.add(y, out if scaled is None else scaled(group, out))

    return over_tiles(body, y, M, sizes)
