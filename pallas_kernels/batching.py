"""Batching rules of the grouped matmuls: ``vmap`` over policies adds rows to one matmul, never more
matmuls.

JAX's own rule for the inner loop or ragged product would copy matrices that all policies share, or
run once per policy. These rules merge the rows of all policies in one order: by group if matrices
are shared, so that each matrix is read once for all policies; by policy, then group, if every
policy has its own matrices. Each rule calls its own function again, so nested ``vmap`` merges too.
The functions here have no derivative; the ``custom_vjp`` of the matmuls is outside.

Axes: P policies, M rows of one policy, G groups, W matrices of one policy.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


class Merged:
    """Merged order of the rows of P policies, each sorted by group; rows after a policy's last
    group come last.

    Args:
        sizes_PG: rows of each policy's groups.
        M: rows of a policy.
        by_group: rows of group 0 of all policies come first; otherwise all rows of policy 0.
    """

    def __init__(self, sizes_PG: jax.Array, M: int, by_group: bool):
        P, G = sizes_PG.shape
        stop_PG = jnp.cumsum(sizes_PG, axis=1, dtype=jnp.int32)
        rest_P1 = M - stop_PG[:, -1:]
        if by_group:
            first_PG = _exclusive_sum(sizes_PG.T).T
        else:
            first_PG = _exclusive_sum(sizes_PG)
        first_P1 = _exclusive_sum(rest_P1) + jnp.sum(stop_PG[:, -1])
        # J: the G groups and the rest.
        moved_PJ = jnp.concatenate(
            [first_PG - (stop_PG - sizes_PG), first_P1 - stop_PG[:, -1:]], axis=1
        )
        row_M = jnp.arange(M, dtype=jnp.int32)
        group_PM = jax.vmap(lambda stop_G: jnp.searchsorted(stop_G, row_M, side="right"))(stop_PG)
        self.place_PM = row_M[None] + jnp.take_along_axis(moved_PJ, group_PM, axis=1)
        source = jnp.arange(P * M, dtype=jnp.int32)
        self.source = (
            jnp.zeros_like(source).at[self.place_PM.reshape(-1)].set(source, unique_indices=True)
        )

    def take(self, x: jax.Array, batched: bool) -> jax.Array:
        """Brings ``[P, M, K]``, or ``[M, K]`` shared by all policies, to the merged order ``[P * M,
        K]``.
        """
        return x.reshape(-1, x.shape[-1])[self.source] if batched else x[self.source % x.shape[0]]

    def back(self, y: jax.Array) -> jax.Array:
        """Brings ``[P * M, N]`` from the merged order to ``[P, M, N]``."""
        return y[self.place_PM]


def _exclusive_sum(x: jax.Array) -> jax.Array:
    """Returns for each entry the sum of those before it, row by row."""
    flat = x.reshape(-1)
    return (jnp.cumsum(flat, dtype=jnp.int32) - flat).reshape(x.shape)


def each(x: jax.Array, batched: bool, P: int) -> jax.Array:
    return x if batched else jnp.broadcast_to(x[None], (P, *x.shape))


def joined(x: jax.Array, batched: bool, P: int) -> jax.Array:
    """Reshapes ``[P, W, ...]`` to ``[P * W, ...]``."""
    x = each(x, batched, P)
    return x.reshape(-1, *x.shape[2:])


def following(index: jax.Array | None, G: int, batched: bool = False) -> jax.Array:
    """Returns the matrix of each of G groups, ``[G]``, from the ``index`` of ``grouped_matmul``;
    ``[P, G]`` from a ``batched`` one.
    """
    if index is not None and index.ndim > batched:
        return index
    places = jnp.arange(G, dtype=jnp.int32)
    return places if index is None else index[..., None] + (places[None] if batched else places)


def _own_index(index: jax.Array, batched: bool, P: int, W: int) -> jax.Array:
    """Returns the joined matrices of each policy's groups."""
    return (each(index, batched, P) + W * jnp.arange(P, dtype=index.dtype)[:, None]).reshape(-1)


def batched_product(fn: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Adds the batching rule to ``fn(x [M, K], w [W, K, N], sizes [G], index [G], a number or None)
    -> [M, N]``, see ``grouped.grouped_matmul``.
    """
    call = jax.custom_batching.custom_vmap(fn)

    @call.def_vmap
    def rule(
        P: int, batched: Any, x: jax.Array, w: jax.Array, sizes: jax.Array, index: jax.Array | None
    ):
        of_x, of_w, of_sizes, of_index = batched
        sizes_PG, shared = each(sizes, of_sizes, P), not of_w and not of_index
        rows = Merged(sizes_PG, x.shape[-2], shared)
        x = rows.take(x, of_x)
        if shared:
            return rows.back(call(x, w, jnp.sum(sizes_PG, axis=0, dtype=sizes.dtype), index)), True
        index = following(index, sizes_PG.shape[1], bool(of_index))
        if of_w:
            index, w = _own_index(index, bool(of_index), P, w.shape[1]), joined(w, True, P)
        else:
            index = joined(index, True, P)
        return rows.back(call(x, w, sizes_PG.reshape(-1), index)), True

    return call


def batched_outer(fn: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Adds the batching rule to ``fn(left [M, A], right [M, B], sizes [G]) -> [G, A, B]``, the
    gradient of the matrices.
    """
    call = jax.custom_batching.custom_vmap(fn)

    @call.def_vmap
    def rule(P: int, batched: Any, left: jax.Array, right: jax.Array, sizes: jax.Array):
        of_left, of_right, of_sizes = batched
        sizes_PG = each(sizes, of_sizes, P)
        rows = Merged(sizes_PG, left.shape[-2], by_group=False)
        out = call(rows.take(left, of_left), rows.take(right, of_right), sizes_PG.reshape(-1))
        return out.reshape(*sizes_PG.shape, *out.shape[1:]), True

    return call
