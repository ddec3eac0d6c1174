"""GPU kernel of grouped matmul: a program computes a block of columns of one tile of rows of one
group.

Tiles begin where groups begin, so no result depends on other groups' row counts. Rows after the
last group have tiles too, which are written as zeros.

Axes: M rows, T rows of a tile, G groups, W matrices, K in, N out, V tiles.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallas_kernels import tuning
from pallas_kernels.grouped_matmul.tiles import tiles
from pallas_kernels.products import dot
from pallas_kernels.triton import Span, columns, cost, power_of_two, read, require_float8, write


class Config(NamedTuple):
    """Block sizes, powers of two of at least 16."""

    rows: int  # rows of a tile, T
    columns: int  # columns of a block of the result
    depth: int  # part of K in one step
    warps: int
    stages: int = 3  # pipelined loads


def config(x: jax.Array, w: jax.Array, sizes: jax.Array, transposed: bool) -> Config:
    """Returns measured sizes, or tiles of about an average group with loads of at most 96 KiB."""
    exact = x.dtype == jnp.float32  # without tensor cores, operands occupy registers too
    rows = power_of_two(-(-x.shape[0] // sizes.shape[0]), 64 if exact else 128)
    wide = power_of_two(w.shape[1 if transposed else 2], 64 if exact or rows < 64 else 128)
    deep = power_of_two(x.shape[1], 32 if exact else 128 if rows < 64 else 64)
    (M, K), back = x.shape, " transposed" * transposed
    key = (
        f"{x.dtype} rows {tuning.power(M)} {K}>{w.shape[1 if transposed else 2]}{back} {w.dtype}"
        f" groups {sizes.shape[0]}"
    )
    return tuning.chosen(
        "grouped_matmul", "cuda", key, Config(rows, wide, deep, 8 if exact or rows == 128 else 4)
    )


def require(
    x: jax.Array, w: jax.Array, sizes: jax.Array, index: jax.Array | None, **_: Any
) -> None:
    """Raises NotImplementedError with the reason if the kernel cannot serve these arrays."""
    if x.dtype not in (jnp.bfloat16, jnp.float32):
        raise NotImplementedError(f"rows are {x.dtype}; bfloat16 and float32 are served")
    if w.dtype not in (jnp.bfloat16, jnp.float32, jnp.int8, jnp.float8_e4m3fn):
        raise NotImplementedError(
            f"matrices are {w.dtype}; bfloat16, float32, int8 and float8_e4m3fn are served"
        )
    if _overflows(w) and (index is None or index.ndim):
        raise NotImplementedError(
            "matrices of one byte an element are between 2 and 4 GiB: offsets overflow"
        )
    require_float8(w)
    if not x.size or not sizes.size:
        raise NotImplementedError("no rows or no groups")


def _overflows(w: jax.Array) -> bool:
    """Returns True if offsets overflow."""
    # Pallas counts elements in 32 bits up to 4 GiB, and Triton takes them as signed.
    return w.dtype.itemsize == 1 and 1 << 31 <= w.size <= 1 << 32


def _grouped_matmul(
    matrix: Any, first: Any, stop: Any, x: Any, w: Any, y: Any, *, transposed: bool, how: Config
) -> None:
    (K, N), blocks = (x.shape[1], y.shape[1]), pl.cdiv(y.shape[1], how.columns)
    program = pl.program_id(0)
    tile = jax.lax.div(program, blocks)
    at, g = first[tile], matrix[tile]
    rows, across = Span(at, how.rows, stop[tile]), columns(program - tile * blocks, how.columns, N)

    def step(i: jax.Array, sums: jax.Array) -> jax.Array:
        inner = columns(i, how.depth, K)
        part = read(w, g, across, inner) if transposed else read(w, g, inner, across)
        return sums + dot(read(x, rows, inner), part, (1, 1 if transposed else 0))

    # Pallas 0.10 makes a select between two constants one of booleans.
    steps = (g >= 0).astype(jnp.int32) * pl.cdiv(K, how.depth)
    write(
        y,
        jax.lax.fori_loop(0, steps, step, jnp.zeros((how.rows, how.columns), jnp.float32)),
        rows,
        across,
    )


def _tiles(
    M: int, sizes: jax.Array, index: jax.Array | None, tile: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns ``schedule.tiles`` with a tile's matrix for its group: -1 after the last one."""
    index = (
        jnp.arange(sizes.shape[0], dtype=jnp.int32) if index is None else index.astype(jnp.int32)
    )
    sizes = jnp.concatenate(
        [sizes.astype(jnp.int32), M - jnp.sum(sizes, keepdims=True, dtype=jnp.int32)]
    )
    group_V, first_V, stop_V = tiles(M, sizes, tile, jnp.cumsum(sizes) - sizes)
    return jnp.concatenate([index, jnp.full((1,), -1, jnp.int32)])[group_V], first_V, stop_V


def grouped_matmul(
    x: jax.Array,
    w: jax.Array,
    sizes: jax.Array,
    index: jax.Array | None,
    transposed: bool,
    how: Config | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Implements ``grouped_matmul``."""
    M, N = x.shape[0], w.shape[1 if transposed else 2]
    how = config(x, w, sizes, transposed) if how is None else how
    if index is not None and index.ndim == 0:
        if _overflows(w):
            w, index = jax.lax.dynamic_slice_in_dim(w, index, sizes.shape[0]), None
        else:
            index = index + jnp.arange(sizes.shape[0], dtype=jnp.int32)
    of_tiles = _tiles(M, sizes, index, how.rows)
    return pl.pallas_call(
        functools.partial(_grouped_matmul, transposed=transposed, how=how),
        grid=(of_tiles[0].shape[0] * pl.cdiv(N, how.columns),),
        out_shape=jax.ShapeDtypeStruct((M, N), x.dtype),
        compiler_params=triton.CompilerParams(num_warps=how.warps, num_stages=how.stages),
        cost_estimate=cost(
            2 * x.size * N,
            x,
            jax.ShapeDtypeStruct((min(M, sizes.shape[0], w.shape[0]), *w.shape[1:]), w.dtype),
        ),
        interpret=interpret,
    )(*of_tiles, x, w)
