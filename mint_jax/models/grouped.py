"""Grouped matmul: rows sorted by group, each group with a matrix of its own; rows behind the last group give zeros.

On accelerators this is ``jax.lax.ragged_dot``. XLA's CPU form of that multiplies every row by every matrix, so there the
product runs in tiles of one group's rows, in a loop as long as there are tiles: exact for any distribution of rows.

No group reads another's rows or matrix, though a product by 0 would hide them as long as they are finite: 0 times NaN is
NaN. Tiles mask both operands. What a ragged product does with the rest of an operand is its implementation's affair (JAX's
own contracts over all groups), so that it is given finite operands, and NaN is put where a group had others.

Axes: M rows, G groups, W matrices, K in, N out.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp

from mint_jax.models.grouped_batching import batched_outer, batched_product

# Rows of a tile on CPU: a multiple of STEP, about MAX_TILE at most. A tile costs a pass over its matrix, so many small ones read the
# experts again and again; rows beyond a group's last are computed in vain. On two AVX-512 cores, float32, 2,048 rows and matrices of
# 512 x 256: of 128 experts tiles of 24 rows (chosen here) take 17 ms, of 8 rows 27, of 160 rows 33, of 512 rows 70; of 16 experts
# tiles of 152 rows (chosen) 5 ms, of 8 rows 14, of 512 rows 9. ``ragged_dot``, which XLA's CPU form runs as every row by
# every matrix, takes 518 and 88 ms.
STEP, MAX_TILE = 8, 160


def grouped_matmul(
    x_MK: jax.Array,
    w_WKN: jax.Array,
    sizes_G: jax.Array,
    index_G: jax.Array | None = None,
    transposed: bool = False,
) -> jax.Array:
    """``x[m] @ w[index[group of m]]``, ``[M, N]`` in the dtype of ``x``, accumulated in float32.

    Args:
        x_MK: rows, those of group 0 first.
        w_WKN: matrices, of the dtype of ``x`` or a smaller one; ``[W, N, K]`` when ``transposed``.
        sizes_G: int32 rows of each group, zero allowed; their sum is at most M.
        index_G: which matrix each group has; None: group g has matrix g.
    """
    chex.assert_rank([x_MK, w_WKN, sizes_G], [2, 3, 1])
    chex.assert_axis_dimension(w_WKN, 2 if transposed else 1, x_MK.shape[1])
    return _grouped(x_MK, w_WKN, sizes_G, index_G, transposed)  # type: ignore[return-value]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _grouped(x, w, sizes, index, transposed):
    return _product(x, w, sizes, index, transposed)


def _forward(x, w, sizes, index, transposed):
    trained = (True,) if w.perturbed else ()  # as structure, not as a value: a frozen base costs no product backwards
    x, w, sizes, index = jax.tree.map(lambda arg: arg.value, (x, w, sizes, index), is_leaf=lambda arg: hasattr(arg, "perturbed"))
    return _product(x, w, sizes, index, transposed), (x, w, sizes, index, trained)


def _backward(transposed, residuals, g):
    x, w, sizes, index, trained = residuals
    dx = _product(g, w, sizes, index, not transposed)
    if not trained:
        return dx, None, None, None
    left, right = (g, x) if transposed else (x, g)
    dw_G = outer(left, right, sizes)
    dw = dw_G if index is None else jnp.zeros(w.shape, jnp.float32).at[index].add(dw_G)
    return dx, dw.astype(w.dtype), None, None


_grouped.defvjp(_forward, _backward, symbolic_zeros=True)


@batched_outer
def outer(left_MA: jax.Array, right_MB: jax.Array, sizes_G: jax.Array) -> jax.Array:
    """Each group's sum of outer products of its rows, ``[G, A, B]`` float32."""
    return jax.lax.platform_dependent(left_MA, right_MB, sizes_G, cpu=_outer_tiles, default=_outer_ragged)


def _product(x, w, sizes, index, transposed):
    return (_times_transposed if transposed else _times)(x, w, sizes, index)


def _product_of_one(x, w, sizes, index, transposed):
    forms = {"cpu": tiled_matmul, "default": _ragged}
    return jax.lax.platform_dependent(x, w, sizes, index, **{k: functools.partial(f, transposed=transposed) for k, f in forms.items()})


@batched_product
def _times(x, w, sizes, index):
    return _product_of_one(x, w, sizes, index, False)


@batched_product
def _times_transposed(x, w, sizes, index):
    return _product_of_one(x, w, sizes, index, True)


def _inside(x_MN: jax.Array, sizes_G: jax.Array) -> jax.Array:
    """Zero behind the last group."""
    return jnp.where((jnp.arange(x_MN.shape[0]) < jnp.sum(sizes_G))[:, None], x_MN, jnp.zeros((), x_MN.dtype))


def _finite(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """``x`` with 0 for all that is not finite, and of each entry of its first axis whether any was."""
    fine = jnp.isfinite(x)
    return jnp.where(fine, x, jnp.zeros((), x.dtype)), ~jnp.all(fine, axis=tuple(range(1, x.ndim)))


def _group_of_rows(M: int, sizes_G: jax.Array) -> jax.Array:
    """``[M]``; G for rows behind the last group."""
    return jnp.searchsorted(jnp.cumsum(sizes_G), jnp.arange(M, dtype=sizes_G.dtype), side="right")


def _ragged(x, w, sizes, index, transposed):
    # Matrices that the groups share are the base's: finite, or no policy's results are. Those that an index gives are single
    # policies', and a ragged product may multiply another group's NaN by 0 where it only means to leave it out. So it gets
    # finite operands, and the rows whose own matrix was not finite get their NaN back afterwards.
    w, bad_G = (w, None) if index is None else _finite(w[index])
    w = w.astype(x.dtype)
    w = w.swapaxes(1, 2) if transposed else w
    y = jax.lax.ragged_dot(x, w, sizes, preferred_element_type=jnp.float32).astype(x.dtype)
    if bad_G is not None:
        bad_M = bad_G.at[_group_of_rows(x.shape[0], sizes)].get(mode="fill", fill_value=False)
        y = jnp.where(bad_M[:, None], jnp.full((), jnp.nan, y.dtype), y)
    return _inside(y, sizes)


_OUTER = jax.lax.RaggedDotDimensionNumbers((([0], [0]), ([], [])), lhs_ragged_dimensions=[0], rhs_group_dimensions=[])


def _outer_ragged(left_MA, right_MB, sizes):
    (left_MA, bad_left), (right_MB, bad_right) = _finite(left_MA), _finite(right_MB)
    sums = jax.lax.ragged_dot_general(left_MA, right_MB, sizes, _OUTER, preferred_element_type=jnp.float32)
    group_M = _group_of_rows(left_MA.shape[0], sizes)
    bad_G = jnp.zeros(sizes.shape, bool).at[group_M].max(bad_left | bad_right, mode="drop")
    return jnp.where(bad_G[:, None, None], jnp.nan, sums)


def tile_rows(rows: int, groups: int) -> int:
    """Rows of a tile: most groups of average size, give or take what chance does to it, fill a whole number of tiles."""
    average = rows / max(1, groups)
    most = average + 2 * average**0.5
    tiles = max(1, math.ceil(most / MAX_TILE))
    return STEP * max(1, math.ceil(most / tiles / STEP))


def schedule(M: int, sizes: jax.Array, tile: int, first: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Tiles of rows sorted by group: of each its group and first row, in order; and how many there are.

    Args:
        sizes, first: ``[G]`` rows and first row of each group.
    """
    G = sizes.shape[0]
    tiles_G = -(-sizes // tile)
    last_G = jnp.cumsum(tiles_G)
    n = jnp.arange(M // tile + min(G, M), dtype=jnp.int32)
    group_n = jnp.clip(jnp.searchsorted(last_G, n, side="right"), 0, G - 1)
    first_n = first[group_n] + (n - (last_G - tiles_G)[group_n]) * tile
    return group_n, first_n, last_G[-1]


class Tile:
    """One tile of a group's rows inside a loop: reads and writes that leave rows of other groups alone."""

    def __init__(self, first: jax.Array, stop: jax.Array, rows: int, M: int):
        self.start, self.rows = jnp.minimum(first, M - rows), rows
        row = self.start + jnp.arange(rows, dtype=jnp.int32)
        self.mine = ((row >= first) & (row < stop))[:, None]

    def read(self, x: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(x, self.start, self.rows)

    def own(self, x: jax.Array) -> jax.Array:
        """As ``read``, with zeros in rows of other groups."""
        return jnp.where(self.mine, self.read(x), jnp.zeros((), x.dtype))

    def add(self, x: jax.Array, part: jax.Array) -> jax.Array:
        """Adds ``part`` to this tile's own rows of ``x``."""
        old = self.read(x)
        return jax.lax.dynamic_update_slice_in_dim(x, jnp.where(self.mine, (old + part).astype(x.dtype), old), self.start, 0)


def over_tiles(body: Callable[[Tile, jax.Array, Any], Any], carry: Any, M: int, sizes: jax.Array, first: jax.Array | None = None) -> Any:
    """``body(tile, group, carry)`` over all tiles, in order; see ``schedule``."""
    rows = min(tile_rows(M, sizes.shape[0]), M)
    first_G = jnp.cumsum(sizes) - sizes if first is None else first
    group, first_n, total = schedule(M, sizes, rows, first_G)
    stop_G = first_G + sizes

    def step(i, carry):
        return body(Tile(first_n[i], stop_G[group[i]], rows, M), group[i], carry)

    return jax.lax.fori_loop(0, total, step, carry)


def blank(shape: tuple[int, ...], dtype: Any, sizes: jax.Array, key: int) -> jax.Array:
    """Zeros for a loop to write into. Each needs a ``key`` of its own: equal constants are merged, and then copied for every loop."""
    # What XLA cannot know to be zero it does not merge. With ``jnp.zeros`` the backward pass of two projections of 32 experts with
    # adapters takes 13 % longer: each loop first copies the shared constant into the buffer that it may write.
    never = jnp.sum(sizes) < -key
    return jnp.broadcast_to(jnp.where(never, 1, 0).astype(dtype), shape)


def at(w: jax.Array, i: jax.Array) -> jax.Array:
    """``w[i]`` without its axis."""
    return jax.lax.dynamic_index_in_dim(w, i, keepdims=False)


def dot(left: jax.Array, right: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """The product over one dimension of each, accumulated in float32."""
    numbers = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(left, right.astype(left.dtype), numbers, preferred_element_type=jnp.float32)


def tiled_matmul(
    x: jax.Array,
    w: jax.Array,
    sizes: jax.Array,
    index: jax.Array | None,
    transposed: bool,
    onto: jax.Array | None = None,
    scaled: Callable[[jax.Array, jax.Array], jax.Array] | None = None,
    key: int = 0,
) -> jax.Array:
    """The form of the CPU.

    Args:
        onto: ``[M, N]`` to add to, instead of zeros.
        scaled: ``(group, its product in float32) -> what to write``.
        key: see ``blank``.
    """
    M, N = x.shape[0], w.shape[1 if transposed else 2]
    y = blank((M, N), x.dtype, sizes, key) if onto is None else onto

    def body(tile, group, y):
        out = dot(tile.read(x), at(w, group if index is None else index[group]), (1, 1 if transposed else 0))
        return tile.add(y, out if scaled is None else scaled(group, out))

    return over_tiles(body, y, M, sizes)


def _outer_tiles(left_MA, right_MB, sizes):
    def body(tile, group, sums):
        part = dot(tile.own(left_MA), tile.own(right_MB), (0, 0))
        return jax.lax.dynamic_update_index_in_dim(sums, at(sums, group) + part, group, 0)

    return over_tiles(body, blank((sizes.shape[0], left_MA.shape[1], right_MB.shape[1]), jnp.float32, sizes, 0), left_MA.shape[0], sizes)
