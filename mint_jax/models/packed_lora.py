"""The packed adapter product of routed experts: each row's own adapter, added to the base's result.

``y[m] + (x[m] A[g]^T) B[g]`` with rows sorted by group g = (expert, adapter). On accelerators two grouped matmuls a
projection; on CPU one loop over tiles of a group's rows, which reads each activation once forward and once backward.

Axes: M rows, G groups, W adapter factors, D in, F out, R rank. Hu et al. 2021, arXiv 2106.09685, section 4.1.
"""

import jax
import jax.numpy as jnp

from mint_jax.models.grouped import grouped_matmul, schedule, tile_rows
from mint_jax.models.grouped_batching import batched_packed, batched_packed_backward


@jax.custom_vjp
@batched_packed
def _add_packed(y, x, a, b, sizes, index):
    return jax.lax.platform_dependent(y, x, a, b, sizes, index, cpu=_tiles, default=_grouped)


def add_packed_delta(
    y_MF: jax.Array, x_MD: jax.Array, a_WRD: jax.Array, b_WRF: jax.Array, sizes_G: jax.Array, index_G: jax.Array
) -> jax.Array:
    """``[M, F]`` in the dtype of ``y``; rows behind the last group keep ``y``.

    Args:
        y_MF: the base's result.
        x_MD: rows, those of group 0 first.
        a_WRD, b_WRF: factors, the scale already in B.
        sizes_G: int32 rows of each group.
        index_G: which factors each group has; no two groups have the same.
    """
    return _add_packed(y_MF, x_MD, a_WRD, b_WRF, sizes_G, index_G)  # type: ignore[return-value]


def _forward(y, x, a, b, sizes, index):
    return _add_packed(y, x, a, b, sizes, index), (x, a, b, sizes, index)


def _backward(residuals, g):
    dx, da, db = _gradients(g, *residuals)
    return g, dx, da, db, None, None


@batched_packed_backward
def _gradients(g, x, a, b, sizes, index):
    return jax.lax.platform_dependent(g, x, a, b, sizes, index, cpu=_tiles_backward, default=_grouped_backward)


_add_packed.defvjp(_forward, _backward)


def _grouped(y, x, a, b, sizes, index):
    h = grouped_matmul(x, a, sizes, index, transposed=True)
    return y + grouped_matmul(h, b, sizes, index).astype(y.dtype)


def _grouped_backward(g, x, a, b, sizes, index):
    _, vjp = jax.vjp(lambda x, a, b: _grouped(jnp.zeros_like(g), x, a, b, sizes, index), x, a, b)
    return vjp(g)


class _Tile:
    """One tile of a group's rows inside a loop: reads and writes that leave rows of other groups alone."""

    def __init__(self, first: jax.Array, stop: jax.Array, tile: int, M: int):
        self.start, self.rows = jnp.minimum(first, M - tile), tile
        row = self.start + jnp.arange(tile, dtype=jnp.int32)
        self.mine = ((row >= first) & (row < stop))[:, None]

    def read(self, x: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(x, self.start, self.rows)

    def write(self, x: jax.Array, part: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(x, part, self.start, 0)

    def product(self, x: jax.Array, w: jax.Array, contract: int) -> jax.Array:
        """``x w`` over dimension ``contract`` of ``w``, float32, zero in rows of other groups."""
        out = jax.lax.dot_general(x, w.astype(x.dtype), (((1,), (contract,)), ((), ())), preferred_element_type=jnp.float32)
        return jnp.where(self.mine, out, 0.0)


def _at(w: jax.Array, i: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(w, i, keepdims=False)


def _loop(body, carry, x, sizes, index):
    """``body(tile, factors' index, carry)`` over all tiles."""
    M = x.shape[0]
    tile = min(tile_rows(M, sizes.shape[0]), M)
    group, first, total = schedule(M, sizes, tile)
    stop_G = jnp.cumsum(sizes)

    def step(i, carry):
        return body(_Tile(first[i], stop_G[group[i]], tile, M), index[group[i]], carry)

    return jax.lax.fori_loop(0, total, step, carry)


def _tiles(y, x, a, b, sizes, index):
    def body(tile, i, y):
        h = tile.product(tile.read(x), _at(a, i), 1).astype(x.dtype)
        old = tile.read(y)
        return tile.write(y, old + tile.product(h, _at(b, i), 0).astype(old.dtype))

    return _loop(body, y, x, sizes, index)


def _tiles_backward(g, x, a, b, sizes, index):
    def body(tile, i, carry):
        dx, da, db = carry
        x_t, g_t, a_i, b_i = tile.read(x), tile.read(g), _at(a, i), _at(b, i)
        h = tile.product(x_t, a_i, 1).astype(x.dtype)
        back = tile.product(g_t, b_i, 1).astype(x.dtype)
        dx = tile.write(dx, tile.read(dx) + tile.product(back, a_i, 0).astype(dx.dtype))

        def add(total, left, right):
            part = jax.lax.dot_general(left, right, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
            return jax.lax.dynamic_update_index_in_dim(total, _at(total, i) + part, i, 0)

        return dx, add(da, back, x_t), add(db, h, g_t)

    zeros = jnp.zeros_like(x), jnp.zeros(a.shape, jnp.float32), jnp.zeros(b.shape, jnp.float32)
    dx, da, db = _loop(body, zeros, x, sizes, index)
    return dx, da.astype(a.dtype), db.astype(b.dtype)
