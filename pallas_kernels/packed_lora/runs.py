"""Runs of rows by adapter: small arrays that say what a kernel fetches and for which rows.

A *run* is the rows of a tile with one factor. If equal factors are adjacent (``runs_of``), a run
may continue in the next tile; if they are in any order (``slots_of``), each tile has its own runs.

Axes: M rows, N tiles, T rows of a tile, W factors, J whole runs.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

# After a tile's ids: its number of runs, and whether the first continues from the tile before and
# the last in the next.
COUNT, BEFORE, BEHIND = range(3)
EXTRA = 3


class Runs(NamedTuple):
    """Rows with the same factor, tile by tile."""

    meta: jax.Array
    local: jax.Array


def runs_of(factor_M: jax.Array, tile: int) -> Runs:
    """Returns the runs of rows whose equal factors are adjacent; -1 is none."""
    M = factor_M.shape[0]
    N = -(-M // tile)
    factor = jnp.pad(factor_M.astype(jnp.int32), (0, N * tile - M), constant_values=-1)
    before = jnp.concatenate([jnp.full((1,), -1, jnp.int32), factor[:-1]])
    there = (factor >= 0).reshape(N, tile)
    same = (factor == before).reshape(N, tile)
    begins = there & ~same.at[:, 0].set(False)
    local = jnp.where(there, jnp.cumsum(begins, axis=1, dtype=jnp.int32) - 1, -1)
    factor = factor.reshape(N, tile)
    ids = jnp.zeros((N, tile), jnp.int32)
    at = jnp.arange(N, dtype=jnp.int32)[:, None], jnp.where(begins, local, tile)
    ids = ids.at[at].set(factor, mode="drop")
    goes_on = there[:, 0] & same[:, 0]
    behind = jnp.concatenate([goes_on[1:], jnp.zeros((1,), bool)])
    count = jnp.sum(begins, axis=1, dtype=jnp.int32)
    last = jnp.stack([count, goes_on.astype(jnp.int32), behind.astype(jnp.int32)], axis=1)
    return Runs(jnp.concatenate([ids, last], axis=1)[:, None], local[:, None])


def slots_of(slot_M: jax.Array, tile: int, first: jax.Array | int = 0) -> Runs:
    """Returns the distinct slots of each tile, whose rows are in any order; slot 0 is ``first``."""
    # If a loop over layers changes only `first`, the rest is computed once before it.
    M = slot_M.shape[0]
    N = -(-M // tile)
    slot = jnp.pad(slot_M.astype(jnp.int32), (0, N * tile - M), constant_values=-1).reshape(N, tile)
    # Tile x tile comparisons: for 128 rows faster than a sort, and no loop.
    # of the rows with the same slot
    leader = jnp.argmax(slot[:, :, None] == slot[:, None], axis=2).astype(jnp.int32)
    leads = (leader == jnp.arange(tile, dtype=jnp.int32)[None]) & (slot >= 0)
    number = jnp.cumsum(leads, axis=1, dtype=jnp.int32) - 1
    local = jnp.where(slot >= 0, jnp.take_along_axis(number, leader, axis=1), -1)
    at = jnp.arange(N, dtype=jnp.int32)[:, None], jnp.where(leads, number, tile)
    ids = jnp.zeros((N, tile), jnp.int32).at[at].set(slot, mode="drop")
    count = jnp.sum(leads, axis=1, dtype=jnp.int32)
    last = jnp.stack([count, jnp.zeros_like(count), jnp.zeros_like(count)], axis=1)
    return Runs(jnp.concatenate([ids + first, last], axis=1)[:, None], local[:, None])


def whole_runs(factor_M: jax.Array, W: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns factor, first row and size of each whole run, the most ``[J]`` of W factors."""
    M = factor_M.shape[0]
    J, row = min(W, M), jnp.arange(M, dtype=jnp.int32)
    # Numbers beyond the stack mean its last entry, as in XLA.
    factor = jnp.minimum(factor_M.astype(jnp.int32), W - 1)
    none = jnp.full((1,), -1, jnp.int32)
    begins = (factor >= 0) & (factor != jnp.concatenate([none, factor[:-1]]))
    ends = (factor >= 0) & (factor != jnp.concatenate([factor[1:], none]))
    stop = jax.lax.cummin(jnp.where(ends, row + 1, M), reverse=True)
    at = jnp.where(begins, jnp.cumsum(begins, dtype=jnp.int32) - 1, J)
    # One scatter: on a GPU each is two launches.
    runs = jnp.stack([factor, row, stop - row], axis=1)
    return tuple(jnp.zeros((J, 3), jnp.int32).at[at].set(runs, mode="drop").T)
