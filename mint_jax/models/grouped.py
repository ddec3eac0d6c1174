"""Grouped matmul: rows sorted by group, each group with a matrix of its own; rows behind the last group give zeros.

On accelerators this is ``jax.lax.ragged_dot``. XLA's CPU form of that multiplies every row by every matrix, so there the
product runs in tiles of one group's rows, in a loop as long as there are tiles: exact for any distribution of rows.

Axes: M rows, G groups, W matrices, K in, N out.
"""

import functools

import jax
import jax.numpy as jnp

from mint_jax.models.grouped_batching import batched_outer, batched_product

MIN_TILE, MAX_TILE = 8, 128  # rows of a tile on CPU


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
    dw_G = _outer(left, right, sizes)
    dw = dw_G if index is None else jnp.zeros(w.shape, jnp.float32).at[index].add(dw_G)
    return dx, dw.astype(w.dtype), None, None


_grouped.defvjp(_forward, _backward, symbolic_zeros=True)


def _product(x, w, sizes, index, transposed):
    return (_times_transposed if transposed else _times)(x, w, sizes, index)


def _product_of_one(x, w, sizes, index, transposed):
    forms = {"cpu": _tiles, "default": _ragged}
    return jax.lax.platform_dependent(x, w, sizes, index, **{k: functools.partial(f, transposed=transposed) for k, f in forms.items()})


@batched_product
def _times(x, w, sizes, index):
    return _product_of_one(x, w, sizes, index, False)


@batched_product
def _times_transposed(x, w, sizes, index):
    return _product_of_one(x, w, sizes, index, True)


@batched_outer
def _outer(left, right, sizes):
    return jax.lax.platform_dependent(left, right, sizes, cpu=_outer_tiles, default=_outer_ragged)


def _inside(x_MN: jax.Array, sizes_G: jax.Array) -> jax.Array:
    """Zero behind the last group."""
    return jnp.where((jnp.arange(x_MN.shape[0]) < jnp.sum(sizes_G))[:, None], x_MN, jnp.zeros((), x_MN.dtype))


def _ragged(x, w, sizes, index, transposed):
    w = (w if index is None else w[index]).astype(x.dtype)
    w = w.swapaxes(1, 2) if transposed else w
    return _inside(jax.lax.ragged_dot(x, w, sizes, preferred_element_type=jnp.float32).astype(x.dtype), sizes)


_OUTER = jax.lax.RaggedDotDimensionNumbers((([0], [0]), ([], [])), lhs_ragged_dimensions=[0], rhs_group_dimensions=[])


def _outer_ragged(left_MA, right_MB, sizes):
    return jax.lax.ragged_dot_general(left_MA, right_MB, sizes, _OUTER, preferred_element_type=jnp.float32)


def tile_rows(rows: int, groups: int) -> int:
    """Rows of a tile: about those of an average group, a power of two within ``MIN_TILE`` and ``MAX_TILE``."""
    average = max(1, rows // max(1, groups))
    return min(MAX_TILE, max(MIN_TILE, 1 << (average - 1).bit_length()))


def schedule(M: int, sizes: jax.Array, tile: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Tiles of rows sorted by group: of each its group and first row, in order; and how many there are."""
    G = sizes.shape[0]
    stop_G = jnp.cumsum(sizes)
    tiles_G = -(-sizes // tile)
    last_G = jnp.cumsum(tiles_G)
    n = jnp.arange(M // tile + min(G, M), dtype=jnp.int32)
    group_n = jnp.clip(jnp.searchsorted(last_G, n, side="right"), 0, G - 1)
    first_n = (stop_G - sizes)[group_n] + (n - (last_G - tiles_G)[group_n]) * tile
    return group_n, first_n, last_G[-1]


def _tiles(x, w, sizes, index, transposed):
    M = x.shape[0]
    tile = min(tile_rows(M, sizes.shape[0]), M)
    group, first, total = schedule(M, sizes, tile)
    matrix = group if index is None else index[group]
    contract = (((1,), (1 if transposed else 0,)), ((), ()))

    def body(i, y):
        start = jnp.minimum(first[i], M - tile)
        rows = jax.lax.dynamic_slice_in_dim(x, start, tile)
        mine = jax.lax.dynamic_index_in_dim(w, matrix[i], keepdims=False).astype(x.dtype)
        out = jax.lax.dot_general(rows, mine, contract, preferred_element_type=jnp.float32).astype(y.dtype)
        # Rows before ``first`` are done; those behind the group's last are overwritten by the next group's own tile.
        before = (start + jnp.arange(tile, dtype=jnp.int32) < first[i])[:, None]
        return jax.lax.dynamic_update_slice_in_dim(y, jnp.where(before, jax.lax.dynamic_slice_in_dim(y, start, tile), out), start, 0)

    y = jax.lax.fori_loop(0, total, body, jnp.zeros((M, w.shape[1 if transposed else 2]), x.dtype))
    return _inside(y, sizes)


def _outer_tiles(left_MA, right_MB, sizes):
    M = left_MA.shape[0]
    tile = min(tile_rows(M, sizes.shape[0]), M)
    group, first, total = schedule(M, sizes, tile)
    stop_G = jnp.cumsum(sizes)

    def body(i, sums):
        start = jnp.minimum(first[i], M - tile)
        row = start + jnp.arange(tile, dtype=jnp.int32)
        mine = ((row >= first[i]) & (row < stop_G[group[i]]))[:, None]
        rows = jnp.where(mine, jax.lax.dynamic_slice_in_dim(left_MA, start, tile), jnp.zeros((), left_MA.dtype))
        others = jax.lax.dynamic_slice_in_dim(right_MB, start, tile)
        part = jax.lax.dot_general(rows, others, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        old = jax.lax.dynamic_index_in_dim(sums, group[i], keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(sums, old + part, group[i], 0)

    shape = (sizes.shape[0], left_MA.shape[1], right_MB.shape[1])
    return jax.lax.fori_loop(0, total, body, jnp.zeros(shape, jnp.float32))
