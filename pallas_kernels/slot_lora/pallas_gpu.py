"""Slot LoRA on GPUs: two kernels that load and store rows by their numbers, which alone are sorted.

Axes: M rows, T rows of a tile, D in, F out, R rank, W slots, V tiles, S parts of D.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallas_kernels import tuning
from pallas_kernels.grouped_matmul.tiles import tiles
from pallas_kernels.packed_lora.pallas_gpu import MOST, ranks_of
from pallas_kernels.packed_lora.pallas_gpu import require_add as require_packed
from pallas_kernels.packed_lora.runs import whole_runs
from pallas_kernels.products import dot
from pallas_kernels.triton import Span, columns, cost, power_of_two, read, write

FEW = 512  # rows; with more, tiles are twice as large
PROGRAMS = 512  # about four per processor of an H100


# Tiles have rows of one slot only. Inner products are computed in parts of the depth, and a row's
# outputs block by block, each in its own program: a decode batch has few tiles and a GPU more than
# a hundred processors.
class Config(NamedTuple):
    """Block sizes, powers of two of at least 16, and the number of parts."""

    depth: int  # columns of the rows in one step
    parts: int  # S
    columns: int  # columns of a block of the result
    warps: int
    stages: int = 3  # pipelined loads


@struct.dataclass
class Turn:
    """Rows by slot, in tiles."""

    rows: jax.Array  # `[M]` int32, row numbers in the order of their slots
    # slot, first, stop: `[V]` int32, each tile's slot, -1 of rows without one, its start in `rows`
    # and the end of its slot's rows; unused tiles begin and end at 0
    slot: jax.Array
    first: jax.Array
    stop: jax.Array
    tile: int = struct.field(pytree_node=False)  # T
    scale: jax.Array | None = None  # `[M]` float32, of each row; None: given to each call


def turn(slot: jax.Array, W: int) -> Turn:
    """Returns order and tiles of rows that name slots ``[M]``, -1 none, of W."""
    M = slot.shape[0]
    tile, number = 16 if M <= FEW else 32, jnp.arange(M, dtype=jnp.int32)
    rows = jnp.argsort(slot, stable=True).astype(jnp.int32)
    current = slot[rows]
    leads = jnp.concatenate([jnp.ones((min(M, 1),), bool), current[1:] != current[:-1]])
    begins = jax.lax.cummax(jnp.where(leads, number, 0))
    ends = jax.lax.cummin(
        jnp.where(jnp.concatenate([leads[1:], jnp.ones((min(M, 1),), bool)]), number + 1, M),
        reverse=True,
    )
    starts = (number - begins) % tile == 0
    V = M // tile + min(W + 1, M)
    place = jnp.where(starts, jnp.cumsum(starts) - 1, V)

    def of_tiles(x: jax.Array) -> jax.Array:
        return jnp.zeros((V,), jnp.int32).at[place].set(x.astype(jnp.int32), mode="drop")

    return Turn(rows, of_tiles(current), of_tiles(number), of_tiles(ends), tile)


def turn_of_runs(factor: jax.Array, W: int) -> Turn:
    """Returns ``turn`` of rows whose equal factors are adjacent, in their own order."""
    M, (factor_J, first_J, sizes_J) = factor.shape[0], whole_runs(factor, W)
    tile = 16 if M <= FEW else 32
    run_V, *ends = tiles(M, sizes_J, tile, first_J)
    return Turn(jnp.arange(M, dtype=jnp.int32), factor_J[run_V], *ends, tile)


def config(x: jax.Array, a: jax.Array, F: int, how: Turn) -> Config:
    """Returns measured sizes, or the rule's."""
    (M, D), (W, R, _) = x.shape, a.shape
    exact, R = x.dtype == jnp.float32, power_of_two(R, MOST)
    depth = next(
        d
        for d in (128, 64, 32, 16)
        if (how.tile + R) * d * x.dtype.itemsize * 3 <= 96 << 10 or d == 16
    )
    across = max(16, min(64 if exact else 128, (8192 if exact else 16384) // R))
    tiles = max(1, min(how.slot.shape[0], M))
    parts = max(1, min(PROGRAMS // tiles, D // 256))
    key = (
        f"{x.dtype} rows {tuning.power(M)} {D}>{F} {a.dtype} rank {a.shape[1]} factors"
        f" {tuning.power(W)}"
    )
    return tuning.chosen(
        "slot_lora", "cuda", key, Config(min(depth, power_of_two(D, 128)), parts, across, 4)
    )


def require_add(x: jax.Array, a: jax.Array, b: jax.Array, onto: jax.Array) -> None:
    """Raises NotImplementedError with the reason if ``add`` cannot serve these arrays."""
    require_packed(x, [a], [b])


def require_shrink(x: jax.Array, a: jax.Array) -> None:
    """Raises if ``shrink`` cannot serve these, like ``require_add``."""
    require_packed(x, [a], [])


def require_expand(b: jax.Array, onto: jax.Array) -> None:
    """Raises if ``expand`` cannot serve these, like ``require_add``."""
    require_packed(onto, [b], [])


def _rows_of_tile(
    order: Any, of_tiles: Any, v: jax.Array, tile: int
) -> tuple[Span, jax.Array, jax.Array]:
    """Returns the row numbers of tile v, its slot, and True if it has any rows with a slot."""
    slot, first, stop = (ref[v] for ref in of_tiles)
    place = Span(first, tile, stop)
    rows = Span.of(read(order, place, beyond=order.shape[0]), place.there)
    return rows, slot, (stop > first) & (slot >= 0)


def _each(program: jax.Array, counts: Sequence[int], bodies: Sequence[Any]) -> None:
    """Runs the body of this program's projection; programs are numbered by projection."""
    start = 0
    for count, body in zip(counts, bodies):
        own = program - start
        if len(counts) == 1:
            body(own)
        else:
            pl.when((own >= 0) & (own < count))(functools.partial(body, own))
        start += count


def _slot_lora_shrink(order: Any, *refs: Any, tile: int, how: Config) -> None:
    of_tiles, first, x, factors = refs[:3], refs[3], refs[4], refs[5:]
    D, parts, tiles = x.shape[1], how.parts, refs[0].shape[0]

    def shrink(a: Any, h: Any, program: jax.Array) -> None:
        v, share = jax.lax.div(program, parts), jax.lax.rem(program, parts)
        rows, slot, there = _rows_of_tile(order, of_tiles, v, tile)
        w, steps = slot + first[0], pl.cdiv(D, how.depth)
        each, ranks = pl.cdiv(steps, parts), ranks_of(h.shape[2], slot)

        @pl.when(there)
        def _some() -> None:
            def step(i: jax.Array, sums: jax.Array) -> jax.Array:
                deep = columns(i, how.depth, D)
                return sums + dot(read(x, rows, deep), read(a, w, ranks, deep), (1, 1))

            begin, end = share * each, jnp.minimum((share + 1) * each, steps)
            none = jnp.zeros((tile, ranks.size), jnp.float32)
            write(h, jax.lax.fori_loop(begin, end, step, none), share, rows, ranks)

    n = len(factors) // 2
    bodies = [functools.partial(shrink, *one) for one in zip(factors[:n], factors[n:])]
    _each(pl.program_id(0), [tiles * parts] * n, bodies)


def _slot_lora_expand(order: Any, *refs: Any, tile: int, how: Config) -> None:
    of_tiles, first, scale, each = refs[:3], refs[3], refs[4], refs[5:]

    def summed(parts: Any, *at: Any) -> jax.Array:
        return jax.lax.fori_loop(
            0,
            parts.shape[0],
            lambda s, total: total + read(parts, s, *at),
            jnp.zeros([span.size for span in at], jnp.float32),
        )

    def expand(h: Any, b: Any, onto: Any, out: Any, program: jax.Array) -> None:
        R, F = h.shape[2], out.shape[1]
        blocks = pl.cdiv(F, how.columns)
        v = jax.lax.div(program, blocks)
        rows, slot, there = _rows_of_tile(order, of_tiles, v, tile)
        across, ranks = columns(program - v * blocks, how.columns, F), ranks_of(R, slot)

        def result() -> jax.Array:
            if onto.ndim == 2:
                return read(onto, rows, across)
            return summed(onto, rows, across).astype(out.dtype)

        @pl.when(there)
        def _some() -> None:
            inner = summed(h, rows, ranks) * read(scale, rows)[:, None]
            delta = dot(inner.astype(out.dtype), read(b, slot + first[0], ranks, across), (1, 0))
            write(out, result().astype(jnp.float32) + delta, rows, across)

        if onto.ndim == 3:

            @pl.when((slot < 0) & (of_tiles[2][v] > of_tiles[1][v]))
            def _none() -> None:
                write(out, result(), rows, across)

    n = len(each) // 4
    of_projections = list(zip(*(each[k * n : (k + 1) * n] for k in range(4))))
    counts = [refs[0].shape[0] * pl.cdiv(one[3].shape[1], how.columns) for one in of_projections]
    _each(pl.program_id(0), counts, [functools.partial(expand, *one) for one in of_projections])


def _parts(
    x: jax.Array,
    a: Sequence[jax.Array],
    order: Turn,
    first: jax.Array | int,
    how: Config,
    interpret: Any,
) -> list[jax.Array]:
    """Returns each projection's inner products of rows and factors in parts, ``[S, M, R]``."""
    M = x.shape[0]
    return pl.pallas_call(
        functools.partial(_slot_lora_shrink, tile=order.tile, how=how),
        grid=(order.slot.shape[0] * how.parts * len(a),),
        out_shape=[jax.ShapeDtypeStruct((how.parts, M, w.shape[1]), jnp.float32) for w in a],
        compiler_params=triton.CompilerParams(num_warps=how.warps, num_stages=how.stages),
        cost_estimate=cost(sum(2 * M * w.size // w.shape[0] for w in a), x, *a),
        interpret=interpret,
    )(order.rows, order.slot, order.first, order.stop, _one(first), x, *a)


def _onto(
    h: Sequence[jax.Array],
    b: Sequence[jax.Array],
    onto: Sequence[jax.Array],
    scale: jax.Array,
    order: Turn,
    first: jax.Array | int,
    how: Config,
    interpret: Any,
    dtype: Any = None,
) -> list[jax.Array]:
    """Returns ``onto + scale h b`` from inner products in parts, in the memory of ``onto`` if that
    is not in parts too.
    """
    n, M = len(h), scale.shape[0]
    return pl.pallas_call(
        functools.partial(_slot_lora_expand, tile=order.tile, how=how),
        grid=(order.slot.shape[0] * sum(pl.cdiv(y.shape[-1], how.columns) for y in onto),),
        out_shape=[
            jax.ShapeDtypeStruct(y.shape[-2:], y.dtype if y.ndim == 2 else dtype) for y in onto
        ],
        input_output_aliases={6 + 2 * n + k: k for k in range(n) if onto[k].ndim == 2},
        compiler_params=triton.CompilerParams(num_warps=how.warps, num_stages=how.stages),
        cost_estimate=cost(sum(2 * M * w.size // w.shape[0] for w in b), *b, *onto, *onto),
        interpret=interpret,
    )(order.rows, order.slot, order.first, order.stop, _one(first), scale, *h, *b, *onto)


def _one(first: jax.Array | int) -> jax.Array:
    return jnp.reshape(jnp.asarray(first, jnp.int32), 1)


def add_each(
    x: jax.Array,
    a: Sequence[jax.Array],
    b: Sequence[jax.Array],
    onto: Sequence[jax.Array],
    slot: jax.Array,
    scale: jax.Array | None = None,
    first: jax.Array | int = 0,
    order: Turn | None = None,
    how: Config | None = None,
    interpret: Any = False,
) -> list[jax.Array]:
    """Returns ``add`` for several projections of the same rows, in two launches. Results ``onto``
    may be in parts ``[S, M, F]`` float32, which the second launch sums in order and rounds.
    """
    order = turn(slot, a[0].shape[0]) if order is None else order
    how = config(x, a[0], sum(y.shape[-1] for y in onto), order) if how is None else how
    if order.scale is not None:
        scale = order.scale
    scale = jnp.ones((x.shape[0],), jnp.float32) if scale is None else scale.astype(jnp.float32)
    h = _parts(x, a, order, first, how, interpret)
    return _onto(h, b, onto, scale, order, first, how, interpret, x.dtype)


def add(
    x: jax.Array,
    a: jax.Array,
    b: jax.Array,
    onto: jax.Array,
    slot: jax.Array,
    scale: jax.Array | None = None,
    first: jax.Array | int = 0,
    how: Config | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Implements ``pallas_tpu.add``."""
    return add_each(x, [a], [b], [onto], slot, scale, first, None, how, interpret)[0]


def shrink(
    x: jax.Array,
    a: jax.Array,
    slot: jax.Array,
    first: jax.Array | int = 0,
    how: Config | None = None,
    interpret: Any = False,
    order: Turn | None = None,
) -> jax.Array:
    """Implements ``pallas_tpu.shrink``."""
    order = turn(slot, a.shape[0]) if order is None else order
    how = config(x, a, 0, order) if how is None else how
    [parts] = _parts(x, [a], order, first, how, interpret)
    return jnp.where((slot >= 0)[:, None], jnp.sum(parts, axis=0), 0.0)


def expand(
    h: jax.Array,
    b: jax.Array,
    onto: jax.Array,
    slot: jax.Array,
    first: jax.Array | int = 0,
    how: Config | None = None,
    interpret: Any = False,
    order: Turn | None = None,
) -> jax.Array:
    """Implements ``pallas_tpu.expand``."""
    order = turn(slot, b.shape[0]) if order is None else order
    how = config(onto, b, 0, order) if how is None else how
    one = jnp.ones((h.shape[0],), jnp.float32)
    return _onto([h[None]], [b], [onto], one, order, first, how, interpret)[0]
