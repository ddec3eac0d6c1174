"""Grouped matmul: rows are sorted by group, and each group has its own matrix. Rows after the last
group give zeros.

On accelerators this is ``pallas_kernels.grouped_matmul``: ``jax.lax.ragged_dot`` on TPUs, a kernel
on NVIDIA GPUs. XLA's CPU form of ``ragged_dot`` multiplies every row by every matrix, so on CPUs
the product runs in a loop over tiles of one group's rows, exact for any distribution of rows.

No group reads another's rows or matrix, even multiplied by 0: 0 times NaN is NaN. Tiles mask both
operands.

Axes: M rows, G groups, W matrices, K in, N out.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp

from pallas_kernels import grouped_matmul as op
from pallas_kernels.dispatch import named
from pallas_kernels.grouped_matmul.tiles import schedule
from pallas_kernels.grouped_matmul.xla import finite, group_of_rows

# Rows of a CPU tile: a multiple of STEP, about MAX_TILE at most. A tile costs a pass over its
# matrix, so small tiles read the experts repeatedly; rows past a group's end are wasted work. On
# two AVX-512 cores, float32, 2,048 rows and matrices of 512 x 256: for 128 experts tiles of 24 rows
# (chosen here) take 17 ms, of 8 rows 27, of 160 rows 33, of 512 rows 70; for 16 experts tiles of
# 152 rows (chosen) 5 ms, of 8 rows 14, of 512 rows 9. ``ragged_dot`` takes 518 and 88 ms.
STEP, MAX_TILE = 8, 160


def grouped_matmul(
    x_MK: jax.Array,
    w_WKN: jax.Array,
    sizes_G: jax.Array,
    index_G: jax.Array | None = None,
    transposed: bool = False,
    kernel: str = "auto",
) -> jax.Array:
    """Returns ``x[m] @ w[index[group of m]]``, ``[M, N]`` in the dtype of ``x``, accumulated in
    float32.

    Args:
        x_MK: rows, those of group 0 first.
        w_WKN: matrices, in the dtype of ``x`` or a smaller one; ``[W, N, K]`` if ``transposed``.
        sizes_G: int32 rows of each group, zero allowed; their sum is at most M.
        index_G: matrix of each group; a scalar means that group g has matrix ``index + g`` of a
            stack, whose slice would be a copy; None: group g has matrix g.
        kernel: ``config.Kernels.grouped_matmul``.
    """
    chex.assert_rank([x_MK, w_WKN, sizes_G], [2, 3, 1])
    chex.assert_axis_dimension(w_WKN, 2 if transposed else 1, x_MK.shape[1])
    return _grouped(x_MK, w_WKN, sizes_G, index_G, transposed, kernel)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _grouped(x, w, sizes, index, transposed, kernel):
    return _product(transposed, kernel)(x, w, sizes, index)


def _forward(x, w, sizes, index, transposed, kernel):
    # Kept as structure, not as a value, so that a frozen base adds no matmul to the backward pass.
    trained = (True,) if w.perturbed else ()
    x, w, sizes, index = jax.tree.map(
        lambda arg: arg.value, (x, w, sizes, index), is_leaf=lambda arg: hasattr(arg, "perturbed")
    )
    return _product(transposed, kernel)(x, w, sizes, index), (x, w, sizes, index, trained)


def _backward(transposed, kernel, residuals, g):
    x, w, sizes, index, trained = residuals
    dx = _product(not transposed, kernel)(g, w, sizes, index)
    if not trained:
        return dx, None, None, None
    left, right = (g, x) if transposed else (x, g)
    return dx, in_place(outer(left, right, sizes), w, index), None, None


_grouped.defvjp(_forward, _backward, symbolic_zeros=True)


def following(index: jax.Array, G: int) -> jax.Array:
    """Returns the matrix of each of G groups, ``[G]``, from the ``index`` of ``grouped_matmul``."""
    return index if index.ndim else index + jnp.arange(G, dtype=jnp.int32)


def in_place(dw_G: jax.Array, w: jax.Array, index: jax.Array | None) -> jax.Array:
    """Scatters the groups' gradients into the shape of ``w``, with zeros elsewhere: for a trainable
    base every layer pays for the whole stack.
    """
    if index is not None:
        dw_G = jnp.zeros(w.shape, jnp.float32).at[following(index, dw_G.shape[0])].add(dw_G)
    return dw_G.astype(w.dtype)


def outer(left_MA: jax.Array, right_MB: jax.Array, sizes_G: jax.Array) -> jax.Array:
    """Returns each group's sum of outer products of its rows, ``[G, A, B]`` float32."""
    return jax.lax.platform_dependent(
        left_MA, right_MB, sizes_G, cpu=_outer_tiles, default=_outer_ragged
    )


@functools.cache
def _product(transposed: bool, kernel: str) -> Callable[..., jax.Array]:
    """Returns the product as a function of rows, matrices, sizes and index."""

    product = functools.partial(op.grouped_matmul, transposed=transposed, implementation=kernel)
    if named(kernel):
        return product
    tiles = functools.partial(tiled_matmul, transposed=transposed)
    return lambda *args: jax.lax.platform_dependent(*args, cpu=tiles, default=product)


_OUTER = jax.lax.RaggedDotDimensionNumbers(
    (([0], [0]), ([], [])), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
)


def _outer_ragged(left_MA, right_MB, sizes):
    (left_MA, bad_left), (right_MB, bad_right) = finite(left_MA), finite(right_MB)
    sums = jax.lax.ragged_dot_general(
        left_MA, right_MB, sizes, _OUTER, preferred_element_type=jnp.float32
    )
    group_M = group_of_rows(left_MA.shape[0], sizes)
    bad_G = jnp.zeros(sizes.shape, bool).at[group_M].max(bad_left | bad_right, mode="drop")
    return jnp.where(bad_G[:, None, None], jnp.nan, sums)


def tile_rows(rows: int, groups: int) -> int:
    """Returns the rows of a tile, such that most groups of about average size fill a whole number
    of tiles.
    """
    average = rows / max(1, groups)
    most = average + 2 * average**0.5
    tiles = max(1, math.ceil(most / MAX_TILE))
    return STEP * max(1, math.ceil(most / tiles / STEP))


class Tile:
    """One tile of a group's rows inside a loop; reads and writes leave rows of other groups
    alone.
    """

    def __init__(self, first: jax.Array, stop: jax.Array, rows: int, M: int):
        self.start, self.rows = jnp.minimum(first, M - rows), rows
        row = self.start + jnp.arange(rows, dtype=jnp.int32)
        self.is_own = ((row >= first) & (row < stop))[:, None]

    def read(self, x: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(x, self.start, self.rows)

    def own(self, x: jax.Array) -> jax.Array:
        """Reads with zeros in rows of other groups."""
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
    """Returns zeros for a loop to write into. Each buffer needs its own ``key``: XLA merges equal
    constants, and then copies them for every loop.
    """
    # A value that XLA cannot prove to be zero is not merged. With ``jnp.zeros`` the backward pass
    # of two projections of 32 experts with adapters takes 13 % longer, because each loop copies the
    # shared constant first.
    never = jnp.sum(sizes) < -key
    return jnp.broadcast_to(jnp.where(never, 1, 0).astype(dtype), shape)


def at(w: jax.Array, i: jax.Array) -> jax.Array:
    """Returns ``w[i]`` without its axis."""
    return jax.lax.dynamic_index_in_dim(w, i, keepdims=False)


def dot(left: jax.Array, right: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """Contracts one dimension of each, accumulated in float32."""
    numbers = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(
        left, right.astype(left.dtype), numbers, preferred_element_type=jnp.float32
    )


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
    """Computes ``grouped_matmul`` on CPU.

    Args:
        onto: ``[M, N]`` to add to, instead of zeros.
        scaled: maps ``(group, float32 product)`` to the value to write.
        key: see ``blank``.
    """
    M, N = x.shape[0], w.shape[1 if transposed else 2]
    y = blank((M, N), x.dtype, sizes, key) if onto is None else onto
    index = None if index is None else following(index, sizes.shape[0])

    def body(tile, group, y):
        out = dot(
            tile.read(x),
            at(w, group if index is None else index[group]),
            (1, 1 if transposed else 0),
        )
        return tile.add(y, out if scaled is None else scaled(group, out))

    return over_tiles(body, y, M, sizes)


def _outer_tiles(left_MA, right_MB, sizes):
    def body(tile, group, sums):
        part = dot(tile.own(left_MA), tile.own(right_MB), (0, 0))
        return jax.lax.dynamic_update_index_in_dim(sums, at(sums, group) + part, group, 0)

    return over_tiles(
        body,
        blank((sizes.shape[0], left_MA.shape[1], right_MB.shape[1]), jnp.float32, sizes, 0),
        left_MA.shape[0],
        sizes,
    )
