"""Visits of tiles of rows to experts and adapters: small arrays that say what the TPU kernel
fetches in each step.

A *visit* is the rows of one tile that one expert has. A tile with rows of several experts is
visited once for each, consecutively; one without rows is visited once, to be written. Within a
visit, runs of rows with one factor count from 0.

Axes: M rows, N tiles, T rows of a tile, E experts, V visits.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.packed_lora.runs import COUNT, EXTRA, runs_of


class Visits(NamedTuple):
    """Steps of the kernel: the most visits and one more, which has no rows and no runs."""

    total: jax.Array  # `[]` int32, number of visits
    # tile, expert: `[V]` int32; a visit without rows has the previous expert, whose matrices are
    # already there
    tile: jax.Array
    expert: jax.Array
    # `[V, 1, T + EXTRA]` int32: the factor of each run, and their number at `T + COUNT`
    meta: jax.Array
    # `[V, 1, T]` int32: the run of each row; -1 for rows of the expert without an adapter, -2 for
    # rows of other experts
    local: jax.Array


def visits_of(sizes_E: jax.Array, factor_M: jax.Array, tile: int) -> Visits:
    """Returns the visits of rows sorted by expert; equal factors are adjacent, -1 is none."""
    M, E = factor_M.shape[0], sizes_E.shape[0]
    N, T = -(-M // tile), tile
    runs = runs_of(factor_M, T)
    expert = _count_up(jnp.cumsum(sizes_E, dtype=jnp.int32), N * T).reshape(N, T)
    here = expert < E
    begins = here & (
        expert != jnp.concatenate([jnp.full((N, 1), -1, jnp.int32), expert[:, :-1]], axis=1)
    )
    visit = jnp.where(here, jnp.cumsum(begins, axis=1, dtype=jnp.int32) - 1, -1)
    visits_N = jnp.maximum(1, jnp.sum(begins, axis=1, dtype=jnp.int32))
    stop_N = jnp.cumsum(visits_N, dtype=jnp.int32)
    V = N + min(E, M)
    tile_V = jnp.minimum(_count_up(stop_N, V), N - 1)
    current = (
        visit[tile_V] == (jnp.arange(V, dtype=jnp.int32) - (stop_N - visits_N)[tile_V])[:, None]
    )
    expert_V = jax.lax.cummax(jnp.max(jnp.where(current, expert[tile_V], 0), axis=1))
    run = runs.local[tile_V, 0]
    adapted = current & (run >= 0)
    low = jnp.min(jnp.where(adapted, run, T), axis=1, keepdims=True)
    local = jnp.where(adapted, run - low, jnp.where(current, -1, -2))
    ids = runs.meta[tile_V, 0, :T]
    at = jnp.minimum(low + jnp.arange(T, dtype=jnp.int32)[None], T - 1)
    ids = jnp.take_along_axis(ids, at, axis=1)
    count = jnp.maximum(0, jnp.max(local, axis=1, keepdims=True) + 1)
    behind = jnp.zeros((V, EXTRA), jnp.int32).at[:, COUNT].set(count[:, 0])
    total, meta = stop_N[-1], jnp.concatenate([ids, behind], axis=1)[:, None]
    return Visits(total, tile_V, expert_V, meta, local[:, None])


def _count_up(stop: jax.Array, n: int) -> jax.Array:
    """Returns how many of the ascending ``stop`` are at most i, for i below n, ``[n]``."""
    return jnp.cumsum(jnp.zeros((n,), jnp.int32).at[stop].add(1, mode="drop"), dtype=jnp.int32)
