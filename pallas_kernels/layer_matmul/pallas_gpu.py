"""GPU kernel of ``layer_matmul`` for the few rows of decoding, which reads matrices in place.
Matrices of the same rows are one launch.

Axes: M rows, L layers, D in, F out, S parts of D.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallas_kernels import native, tuning
from pallas_kernels.products import dot
from pallas_kernels.triton import columns, cost, power_of_two, read, require_float8, unravel, write

MOST = 256  # rows; with more, a matmul takes longer than a copy of its matrix
PROGRAMS = 512  # about four per processor of an H100


class Config(NamedTuple):
    """Block sizes, powers of two of at least 16, and the number of parts."""

    rows: int  # rows of a tile
    columns: int  # columns of a block of the result
    depth: int  # part of D in one step
    parts: int  # S
    warps: int
    stages: int = 4  # pipelined loads


def config(x: jax.Array, stacks: tuple[jax.Array, ...], transposed: bool) -> Config:
    """Returns measured sizes, or tiles of up to 64 rows and parts of at least 256 of the depth."""
    (M, D), widths = x.shape, [w.shape[1 if transposed else 2] for w in stacks]
    # Steps of 128 of the depth took an H100 0.62 of the time of steps of 64, with four warps.
    rows, wide, deep = power_of_two(M, 64), power_of_two(max(widths), 64), power_of_two(D, 128)
    blocks = pl.cdiv(M, rows) * sum(pl.cdiv(F, wide) for F in widths)
    parts = max(1, min(round(PROGRAMS / blocks), D // 256))
    key = key_of(x, stacks, transposed)
    return tuning.chosen("layer_matmul", "cuda", key, Config(rows, wide, deep, parts, 4))


def key_of(x: jax.Array, stacks: tuple[jax.Array, ...], transposed: bool = False) -> str:
    """The key of a call in tables of measured sizes."""
    widths = "+".join(str(w.shape[1 if transposed else 2]) for w in stacks)
    M, D = x.shape
    of = f"{x.dtype} rows {tuning.power(M)} {D}>{widths}"
    return f"{of}{' transposed' * transposed} {stacks[0].dtype}"


def require(
    x: jax.Array,
    stacks: tuple[jax.Array, ...],
    layer: jax.Array,
    rows: jax.Array | None = None,
    transposed: bool = False,
) -> None:
    """Raises NotImplementedError with the reason if ``matmul`` cannot serve these arrays."""
    # XLA's float32 matmuls follow jax_default_matmul_precision as in training.
    if x.dtype != jnp.bfloat16:
        raise NotImplementedError(f"rows are {x.dtype}; bfloat16 is served")
    M = x[..., 0].size
    if not 0 < M <= MOST:
        raise NotImplementedError(f"{M} rows; 1 to {MOST} are served")
    for w in stacks:
        if w.dtype not in (jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn):
            raise NotImplementedError(
                f"weights are {w.dtype}; bfloat16, int8 and float8_e4m3fn are served"
            )
        if w.dtype.itemsize == 1 and 1 << 31 <= w.size <= 1 << 32:  # as in grouped matmul
            raise NotImplementedError(
                "a stack of one byte an element is between 2 and 4 GiB: offsets overflow"
            )
        require_float8(w)
    native.require_one_device()


def _layer_matmul(layer: Any, used: Any, x: Any, *refs: Any, transposed: bool, how: Config) -> None:
    # Programs are numbered matrix by matrix; those of one block of columns, which read the same
    # weights, are neighbours.
    (M, D), program, start = x.shape, pl.program_id(0), 0
    tiles, steps, number = pl.cdiv(M, how.rows), pl.cdiv(D, how.depth), layer[0]
    each = pl.cdiv(steps, how.parts)
    for w, out in zip(refs[: len(refs) // 2], refs[len(refs) // 2 :]):
        F = out.shape[2]
        blocks = pl.cdiv(F, how.columns)
        own = program - start

        def multiply(w: Any = w, out: Any = out, F: int = F, own: Any = own) -> None:
            share, block, tile = unravel(own, pl.cdiv(F, how.columns), tiles)
            rows, across = columns(tile, how.rows, M), columns(block, how.columns, F)
            first, last = share * each, jnp.minimum((share + 1) * each, steps)

            def step(i: jax.Array, sums: jax.Array) -> jax.Array:
                deep = columns(i, how.depth, D)
                part = (
                    read(w, number, across, deep) if transposed else read(w, number, deep, across)
                )
                return sums + dot(read(x, rows, deep), part, (1, 1 if transposed else 0))

            last = jnp.where(tile * how.rows < used[0], last, first)
            none = jnp.zeros((how.rows, how.columns), jnp.float32)
            write(out, jax.lax.fori_loop(first, last, step, none), share, rows, across)

        if len(refs) == 2:
            multiply()
        else:
            pl.when((own >= 0) & (own < tiles * blocks * how.parts))(multiply)
        start += tiles * blocks * how.parts


# XLA copies a layer out of its stack first: of Qwen3-4B 8 GB are read, written and read again (an
# H100 took 13.2 ms for 64 rows; 8 GB take 2.7). Here a program multiplies all rows by a block of
# columns of a part of the depth; XLA adds the parts in order.
def matmul(
    x: jax.Array,
    stacks: tuple[jax.Array, ...],
    layer: jax.Array,
    rows: jax.Array | None = None,
    transposed: bool = False,
    how: Config | None = None,
    interpret: Any = False,
    in_parts: bool = False,
) -> tuple[jax.Array, ...]:
    """See ``layer_matmul``; one kernel for all matrices. Unused row tiles get zeros. ``in_parts``:
    results are ``[S, M, F]``, of M rows, and their sum over S is the product.
    """
    x_MD = x.reshape(-1, x.shape[-1])
    scalars = [
        jnp.reshape(jnp.int32(one), 1) for one in (layer, x_MD.shape[0] if rows is None else rows)
    ]
    sizes = config(x_MD, stacks, transposed) if how is None else how
    (M, D), widths = x_MD.shape, [w.shape[1 if transposed else 2] for w in stacks]
    tiles = pl.cdiv(M, sizes.rows)
    results = [jax.ShapeDtypeStruct((sizes.parts, M, F), jnp.float32) for F in widths]
    parts = pl.pallas_call(
        functools.partial(_layer_matmul, transposed=transposed, how=sizes),
        grid=(sum(tiles * pl.cdiv(F, sizes.columns) * sizes.parts for F in widths),),
        out_shape=results,
        compiler_params=triton.CompilerParams(num_warps=sizes.warps, num_stages=sizes.stages),
        cost_estimate=cost(
            2 * M * D * sum(widths),
            x_MD,
            *(jax.ShapeDtypeStruct((D, F), w.dtype) for w, F in zip(stacks, widths)),
            *(jax.ShapeDtypeStruct((M, F), jnp.float32) for F in widths),
        ),
        interpret=interpret,
    )(*scalars, x_MD, *stacks)
    if in_parts:
        return tuple(parts)
    return tuple(jnp.sum(part, axis=0).reshape(*x.shape[:-1], -1) for part in parts)
