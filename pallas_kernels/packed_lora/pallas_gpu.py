"""GPU kernels of packed LoRA: a program has rows of one run only, so no adapter meets another's
rows.

Axes: M rows, T rows of a tile, D in, F out, R rank, K projections of the same rows, W factors, V
tiles, J runs.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallas_kernels import tuning
from pallas_kernels.grouped_matmul.tiles import tiles
from pallas_kernels.packed_lora.runs import whole_runs
from pallas_kernels.products import dot
from pallas_kernels.triton import LEAST, Span, columns, cost, power_of_two, read, write

MOST = 256  # largest rank


class Config(NamedTuple):
    """Block sizes, powers of two of at least 16."""

    rows: int  # rows of a tile, T
    depth: int  # columns of wide arrays in one step
    sums: int  # columns of wide arrays in a block of the factors' gradients
    warps: int
    stages: int = 3  # pipelined loads


def config(op: str, x: jax.Array, a: Sequence[jax.Array]) -> Config:
    """Returns the sizes for ``packed_lora``, or its ``backward``: measured, or the rule."""
    (M, D), (W, R, _) = x.shape, a[0].shape
    key = (
        f"{x.dtype} rows {tuning.power(M)} {D} {a[0].dtype} x {len(a)} rank {R} factors"
        f" {tuning.power(W)}"
    )
    return tuning.chosen(op, "cuda", key, _rule(x, a))


def _rule(x: jax.Array, a: Sequence[jax.Array]) -> Config:
    """Returns tiles of about an average run, with loads of at most 96 KiB."""
    (W, R, _), K, M = a[0].shape, len(a), x.shape[0]
    # Exact: without tensor cores, operands occupy registers too.
    exact, R = x.dtype == jnp.float32, power_of_two(R, MOST)
    most = (8192 if exact else 16384) // (K * R)  # sums of a program are 32 or 64 KiB of registers
    rows = max(LEAST, min(power_of_two(-(-M // min(W, M)), 32 if exact else 64), most))
    stages = 3 if R <= 64 else 2
    depths = (64, 32, 16) if exact and rows > 16 else (128, 64, 32, 16)
    depth = next(
        d
        for d in depths
        if (rows + K * R) * d * x.dtype.itemsize * stages <= 96 << 10 or d == LEAST
    )
    sums, warps = max(LEAST, min(64 if exact else 128, most)), 4 if K * rows * R < 8192 else 8
    return Config(rows, depth, sums, 8 if exact else warps, stages)


def require_add(x: jax.Array, a: Sequence[jax.Array], b: Sequence[jax.Array], *rest: Any) -> None:
    """Raises NotImplementedError with the reason if ``add`` cannot serve these arrays."""
    R = a[0].shape[1]
    if x.dtype not in (jnp.bfloat16, jnp.float32):
        raise NotImplementedError(f"rows are {x.dtype}; bfloat16 and float32 are served")
    if any(w.dtype not in (jnp.bfloat16, jnp.float32) for w in (*a, *b)):
        raise NotImplementedError("factors are neither bfloat16 nor float32")
    if any(w.shape[1] != R for w in (*a, *b)):
        raise NotImplementedError("projections of the same rows have several ranks")
    if R > MOST:
        raise NotImplementedError(f"rank {R} is above {MOST}")
    if not x.size:
        raise NotImplementedError("no rows")


require_backward = require_add


def _tile(of_tiles: Sequence[Any], how: Config) -> tuple[jax.Array, Span, jax.Array]:
    """Returns this program's factor and rows, and True if it has any."""
    factor, first, stop = (ref[pl.program_id(0)] for ref in of_tiles)
    return factor, Span(first, how.rows, stop), stop > first


def ranks_of(R: int, w: jax.Array) -> Span:
    # The start is 0, computed from ``w``: from JAX 0.12 on a constant start is rejected if the
    # block extends beyond its array.
    return columns(0 * w, power_of_two(R, MOST), R)


def _shrink(
    x: Any, rows: Span, stacks: Sequence[Any], w: jax.Array, how: Config
) -> tuple[jax.Array, ...]:
    """Returns the rows times factor w of each stack ``[W, R, D]``, ``[T, R]`` float32."""
    R, D = stacks[0].shape[1:]
    ranks = ranks_of(R, w)

    def step(i: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        at = columns(i, how.depth, D)
        part = read(x, rows, at)
        return tuple(h + dot(part, read(one, w, ranks, at), (1, 1)) for h, one in zip(sums, stacks))

    return jax.lax.fori_loop(
        0,
        pl.cdiv(D, how.depth),
        step,
        (jnp.zeros((how.rows, ranks.at.size), jnp.float32),) * len(stacks),
    )


def _expand(
    terms: Sequence[tuple[jax.Array, Any]],
    rows: Span,
    w: jax.Array,
    old: Any,
    new: Any,
    how: Config,
) -> None:
    """Adds ``h [T, R]`` times factor w of a stack of each term to ``old``, into ``new``."""
    R, F = terms[0][1].shape[1:]
    ranks = ranks_of(R, w)

    def step(i: jax.Array, _: None) -> None:
        at = columns(i, how.depth, F)
        delta = functools.reduce(
            jnp.add, [dot(h, read(stack, w, ranks, at), (1, 0)) for h, stack in terms]
        )
        write(new, read(old, rows, at).astype(jnp.float32) + delta, rows, at)

    jax.lax.fori_loop(0, pl.cdiv(F, how.depth), step, None)


def _packed_lora(*refs: Any, K: int, how: Config, scaled: bool) -> None:
    of_tiles, x, refs = refs[:3], refs[3], refs[4:]
    scale, refs = (refs[0], refs[1:]) if scaled else (None, refs)
    a, b, onto, out = (refs[i * K : (i + 1) * K] for i in range(4))
    w, rows, there = _tile(of_tiles, how)

    @pl.when(there)
    def _some() -> None:
        s = (
            None
            if scale is None
            else triton.load(scale.at[rows.at], mask=rows.there, other=0.0)[:, None]
        )
        for k, h in enumerate(_shrink(x, rows, a, w, how)):
            _expand(
                [((h if s is None else h * s).astype(x.dtype), b[k])], rows, w, onto[k], out[k], how
            )


def _tiles_of(factor: jax.Array, W: int, how: Config) -> tuple[Any, Any]:
    """Returns factor, first row and end of run of each tile, and of each whole run."""
    w_J, first_J, sizes_J = whole_runs(factor, W)
    run_V, first_V, stop_V = tiles(factor.shape[0], sizes_J, how.rows, first_J)
    return (w_J[run_V], first_V, stop_V), (w_J, first_J, first_J + sizes_J)


def _like(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def add(
    x: jax.Array,
    a: Sequence[jax.Array],
    b: Sequence[jax.Array],
    onto: Sequence[jax.Array],
    factor: jax.Array,
    scale: jax.Array | None = None,
    how: Config | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, ...]:
    """Returns ``onto_k + scale (x a_k^T) b_k`` by each row's factor; see ``packed_lora``."""
    K, how = len(a), config("packed_lora", x, a) if how is None else how
    of_tiles, _ = _tiles_of(factor, a[0].shape[0], how)
    scales = [] if scale is None else [scale.astype(jnp.float32)]
    out = pl.pallas_call(
        functools.partial(_packed_lora, K=K, how=how, scaled=scale is not None),
        grid=of_tiles[0].shape,
        out_shape=[_like(y) for y in onto],
        input_output_aliases={4 + len(scales) + 2 * K + k: k for k in range(K)},
        compiler_params=triton.CompilerParams(num_warps=how.warps, num_stages=how.stages),
        cost_estimate=cost(
            2 * x.shape[0] * sum(w.size // w.shape[0] for w in (*a, *b)), x, *a, *b, *onto, *onto
        ),
        interpret=interpret,
    )(*of_tiles, x, *scales, *a, *b, *onto)
    return tuple(out)


def _packed_lora_rows(*refs: Any, K: int, how: Config) -> None:
    of_tiles, x, dx_onto, refs = refs[:3], refs[3], refs[4], refs[5:]
    g, a, b = (refs[i * K : (i + 1) * K] for i in range(3))
    dx, outs = refs[3 * K], refs[3 * K + 1 :]
    w, rows, there = _tile(of_tiles, how)
    ranks = ranks_of(a[0].shape[1], w)

    @pl.when(there)
    def _some() -> None:
        for h, out in zip(_shrink(x, rows, a, w, how), outs[:K]):
            write(out, h, rows, ranks)
        dh = [_shrink(g_k, rows, [b_k], w, how)[0].astype(x.dtype) for g_k, b_k in zip(g, b)]
        for one, out in zip(dh, outs[K:]):
            write(out, one, rows, ranks)
        _expand([*zip(dh, a)], rows, w, dx_onto, dx, how)


def _packed_lora_factors(*refs: Any, K: int, how: Config) -> None:
    of_runs, right, left, out = refs[:3], refs[3], refs[4 : 4 + K], refs[4 + 2 * K :]
    R, N = out[0].shape[1:]
    blocks = pl.cdiv(N, how.sums)
    program = pl.program_id(0)
    run = jax.lax.div(program, blocks)
    w, first, stop = (ref[run] for ref in of_runs)
    at, ranks = columns(program - run * blocks, how.sums, N), ranks_of(R, w)

    def step(i: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        rows = Span(first + i * how.rows, how.rows, stop)
        part = read(right, rows, at)
        return tuple(
            total + dot(read(one, rows, ranks), part, (0, 0)) for total, one in zip(sums, left)
        )

    @pl.when(stop > first)
    def _some() -> None:
        steps = jax.lax.div(stop - first + (how.rows - 1), how.rows)
        zeros = (jnp.zeros((ranks.at.size, how.sums), jnp.float32),) * K
        for total, one in zip(jax.lax.fori_loop(0, steps, step, zeros), out):
            write(one, total, w, ranks, at)


def _outer(
    of_runs: Any,
    left: Sequence[jax.Array],
    right: jax.Array,
    like: Sequence[jax.Array],
    how: Config,
    interpret: Any,
) -> Any:
    """Returns each run's sum of outer products, at its factor in zeros like ``[W, R, N]``."""
    K = len(left)
    return pl.pallas_call(
        functools.partial(_packed_lora_factors, K=K, how=how),
        grid=(of_runs[0].shape[0] * pl.cdiv(right.shape[1], how.sums),),
        out_shape=[_like(w) for w in like],
        input_output_aliases={4 + K + k: k for k in range(K)},
        compiler_params=triton.CompilerParams(num_warps=how.warps, num_stages=how.stages),
        cost_estimate=cost(2 * right.size * K * left[0].shape[1], right, *left, *like),
        interpret=interpret,
    )(*of_runs, right, *left, *(jnp.zeros(w.shape, w.dtype) for w in like))


# One kernel does as the forward pass with A and B exchanged, and stores ``x A^T`` and ``g B^T``;
# then others sum a run's outer products tile by tile in order, so sums do not depend on the
# schedule.
def backward(
    x: jax.Array,
    a: Sequence[jax.Array],
    b: Sequence[jax.Array],
    g: Sequence[jax.Array],
    dx_onto: jax.Array,
    factor: jax.Array,
    how: Config | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Returns the gradients of x, added to ``dx_onto``, and of all factors."""
    K, (W, R, _) = len(a), a[0].shape
    how = how or config("packed_lora backward", x, a)
    of_tiles, of_runs = _tiles_of(factor, W, how)
    narrow = jax.ShapeDtypeStruct((x.shape[0], R), x.dtype)
    dx, *inner = pl.pallas_call(
        functools.partial(_packed_lora_rows, K=K, how=how),
        grid=of_tiles[0].shape,
        out_shape=[_like(dx_onto), *[narrow] * (2 * K)],
        input_output_aliases={4: 0},
        compiler_params=triton.CompilerParams(num_warps=how.warps, num_stages=how.stages),
        cost_estimate=cost(
            2 * x.shape[0] * sum(w.size // W for w in (*a, *a, *b)), x, *g, *a, *b, dx_onto, dx_onto
        ),
        interpret=interpret,
    )(*of_tiles, x, dx_onto, *g, *a, *b)
    da = _outer(of_runs, inner[K:], x, a, how, interpret)
    db = [_outer(of_runs, [h], g_k, [b_k], how, interpret)[0] for h, g_k, b_k in zip(inner, g, b)]
    return dx, tuple(da), tuple(db)


def require_outer(left: jax.Array, right: jax.Array, like: jax.Array, *rest: Any) -> None:
    """Raises NotImplementedError with the reason if ``outer`` cannot serve these arrays."""
    require_add(right, [like], [])


def outer(
    left: jax.Array,
    right: jax.Array,
    like: jax.Array,
    factor: jax.Array,
    how: Config | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Implements ``pallas_tpu.outer``."""
    how = config("packed_lora backward", right, [like]) if how is None else how
    _, of_runs = _tiles_of(factor, like.shape[0], how)
    return _outer(of_runs, [left], right, [like], how, interpret)[0]
