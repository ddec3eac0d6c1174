"""Operations of the TPU kernels of packed LoRA on one tile of rows and one chunk of its adapters;
see ``pallas_tpu``.

Axes: T rows of a tile, D in, F out, R rank, C adapters of a chunk.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import cost, tuning
from pallas_kernels.naturals import div, rem
from pallas_kernels.products import dot

LANES = 128

VMEM_LIMIT = 56 << 20  # of 64 MiB per core on a TPU7x, the smallest
# Usable part by our own count: 51 MiB compiled for all chips, 55 did not for a TPU7x.
ROOM = 54 << 20

# No bounds checks, since numbers beyond a stack mean its last entry: the checks were 57 of the 77
# bundles that start an adapter's copies (v5e's static schedule, gate and up of Qwen3-30B-A3B).
PARAMS = pltpu.CompilerParams(
    dimension_semantics=("arbitrary",), vmem_limit_bytes=VMEM_LIMIT, disable_bounds_checks=True
)


class Config(NamedTuple):
    """Sizes of tiles."""

    rows: int = 128  # rows of a tile; a multiple of 16
    columns: int = 2048  # columns of wide arrays in one matmul


def config(op: str, x: jax.Array, a: Sequence[jax.Array], b: Sequence[jax.Array]) -> Config:
    """Returns the sizes for ``packed_lora`` or ``packed_lora backward``: measured, or the rule."""
    return tuning.chosen(op, "tpu", key_of(x, a, b), Config())


def key_of(x: jax.Array, a: Sequence[jax.Array], b: Sequence[jax.Array]) -> str:
    """Returns the tuning key of a call."""
    (M, D), (W, R, _), widths = x.shape, a[0].shape, "+".join(str(one.shape[2]) for one in b)
    return (
        f"{x.dtype} rows {tuning.power(M)} {D}>{widths} {a[0].dtype} rank {R} factors"
        f" {tuning.power(W)}"
    )


def require_room(
    scratch: Sequence[Any],
    blocks: Sequence[tuple[int, int, Any]],
    x: jax.Array,
    made: int = 0,
    config: Config = Config(),
) -> None:
    """Raises ``NotImplementedError`` if VMEM lacks room for scratch, blocks and temporaries."""

    def nbytes(shape: Sequence[int], dtype: Any) -> int:
        size, (*outer, rows, columns) = jnp.dtype(dtype).itemsize, shape
        rows, columns = -(-rows // (32 // size)) * (32 // size), -(-columns // LANES) * LANES
        return math.prod(outer) * rows * columns * size

    stored = sum(nbytes(one.shape, one.dtype) for one in scratch) + 2 * sum(
        nbytes(block[:2], block[2]) for block in blocks
    )
    made = max(made, tile_rows(x, config))
    values = 3 * nbytes((made, narrower(config.columns, made)), jnp.float32)
    if stored + values > ROOM:
        raise NotImplementedError(
            f"tiles and factors need {(stored + values) >> 20} MiB of a core's memory, and"
            f" {ROOM >> 20} are there"
        )


def in_pairs(a: Sequence[jax.Array]) -> bool:
    """Returns True if factors are fetched two at a time: an even number of rank 1 in bfloat16."""
    W, R, _ = a[0].shape
    return R == 1 and W % 2 == 0 and a[0].dtype == jnp.bfloat16


def held_rank(a: Sequence[jax.Array]) -> int:
    """Returns the rows that a factor takes in its buffer."""
    return 2 if in_pairs(a) else a[0].shape[1]


def require(
    x: jax.Array, a: Sequence[jax.Array], b: Sequence[jax.Array], pairs: bool = False
) -> None:
    """Raises ``NotImplementedError`` unless the kernels can serve these, perhaps in ``pairs``."""
    D, R = x.shape[1], a[0].shape[1]
    if x.dtype not in (jnp.bfloat16, jnp.float32):
        raise NotImplementedError(f"rows are {x.dtype}; bfloat16 and float32 are served")
    dtypes = {w.dtype for w in (*a, *b)}
    if len(dtypes) > 1 or not dtypes <= {jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)}:
        raise NotImplementedError(
            "factors are of several dtypes, or of one that is neither bfloat16 nor float32"
        )
    if any(w.shape[1] != R for w in (*a, *b)):
        raise NotImplementedError("projections of the same rows have several ranks")
    if R == 1 and a[0].dtype == jnp.bfloat16 and not (pairs and in_pairs(a)):
        # XLA stores these with W in place of the rank; a kernel's operand would be a copy of the
        # whole stack in every call.
        raise NotImplementedError("rank 1 in bfloat16 would be copied whole")
    # XLA stores stacks of rank 12 in another order, and would copy them whole before each call.
    if R & (R - 1) and R % 8:
        raise NotImplementedError(f"rank {R} is neither a power of two nor a multiple of 8")
    # A block of 64 columns after whole ones compiles, as for the 576 columns of Kimi-K2's latents
    # and rotary keys. But the compilers for v5p and TPU7x store such stacks with another axis
    # innermost, and copy them whole before each call.
    if wrong := [n for n in (D, *(w.shape[2] for w in b)) if n % LANES]:
        raise NotImplementedError(f"width {wrong[0]} is not a multiple of {LANES}")


def tile_rows(x: jax.Array, config: Config) -> int:
    return min(config.rows, -(-x.shape[0] // 16) * 16)


def chunk_size(R: int) -> int:
    """Returns the adapters of a chunk: a power of two, so that some tiles can use half a chunk."""
    return 1 << max(0, (LANES // R).bit_length() - 1)


def row_specs(tile: int, wide: Sequence[int]) -> list[Any]:
    return [pl.BlockSpec((tile, n), lambda t: (t, 0)) for n in wide]


def meta_specs(tile: int, meta: jax.Array) -> list[Any]:
    per_tile = lambda t: (t, 0, 0)  # noqa: E731
    return [
        pl.BlockSpec((1, 1, meta.shape[2]), per_tile, memory_space=pltpu.SMEM),
        pl.BlockSpec((1, 1, tile), per_tile),
    ]


def estimate(of: cost.Cost) -> Any:
    return pl.CostEstimate(flops=of.flops, bytes_accessed=of.nbytes, transcendentals=0)


def block_of(n: int, most: int) -> int:
    """Returns the largest divisor of n that is a multiple of LANES and at most ``most``."""
    return max(d for d in range(LANES, min(n, max(most, LANES)) + 1, LANES) if n % d == 0)


def narrower(columns: int, rows: int) -> int:
    """Returns the columns of blocks of ``rows`` rows whose temporaries are those of 256 rows."""
    return columns * 2 * LANES // max(rows, 2 * LANES)


def over(n: int, block: int, body: Any, carry: Any = None) -> Any:
    """Runs ``body(slice, carry)`` over blocks of columns."""
    return jax.lax.fori_loop(
        0,
        n // block,
        lambda i, carry: body(pl.ds(pl.multiple_of(i * block, block), block), carry),
        carry,
    )


def fine(x: jax.Array) -> jax.Array:
    return jnp.abs(x.astype(jnp.float32)) < jnp.inf


def cleaned(x: jax.Array) -> jax.Array:
    return jnp.where(fine(x), x.astype(jnp.float32), 0.0).astype(x.dtype)


def as_column(row_1T: jax.Array, T: int) -> jax.Array:
    """Transposes ``[1, T]`` to ``[T, 1]``; in memory columns would be padded to 128 lanes."""
    return jnp.broadcast_to(row_1T, (LANES, T)).T[:, :1]


class Rows:
    """Number of each row's run in its tile, ``[T, 1]``; negative for none."""

    def __init__(self, local_ref: Any, T: int, C: int, R: int):
        self.run = as_column(local_ref[0], T)
        self.C, self.R, self.T = C, R, T

    def own(self, chunk: jax.Array, half: int | None = None) -> jax.Array:
        """Returns ``[T, C R]``: True if a column of the chunk is the row's own, or one of its
        halves, which hold the chunk's first C / 2 adapters twice.
        """
        column, stored = (
            div(jax.lax.broadcasted_iota(jnp.int32, (self.T, self.C * self.R), 1), self.R),
            self.C,
        )
        if half is not None:
            stored = self.C // 2
            # none of the first half
            column = jnp.where(div(column, stored) == half, rem(column, stored), self.C)
        return column + chunk * self.C == self.run


class Fetch:
    """Factors of chunks from stacks to buffers, the next chunk's while this one is used."""

    def __init__(
        self,
        meta: Any,
        pairs: Sequence[tuple[Any, Any]],
        sem: Any,
        C: int,
        count: jax.Array,
        begin: jax.Array | int = 0,
    ):
        self.meta, self.pairs, self.sem, self.C, self.count, self.begin = (
            meta,
            pairs,
            sem,
            C,
            count,
            begin,
        )

    def slot(self, chunk: jax.Array) -> jax.Array:
        """Returns the buffer half of a chunk."""
        return rem(chunk + self.begin, 2)

    def clear(self) -> None:
        """Clears the buffers at the first tile: NaN in unused columns is correct but slow."""

        @pl.when(pl.program_id(0) == 0)
        def _first() -> None:
            def one(i: jax.Array, _: None) -> None:
                for _stack, buffer in self.pairs:
                    buffer[div(i, self.C), rem(i, self.C)] = jnp.zeros(
                        buffer.shape[2:], buffer.dtype
                    )

            jax.lax.fori_loop(0, 2 * self.C, one, None)

    def _each(self, chunk: jax.Array, what: str) -> None:
        slot = self.slot(chunk)

        def one(i: jax.Array, _: None) -> None:
            # bfloat16 stacks of rank 1 come as [W, .], XLA's layout for them: a word of memory
            # holds two rows, so a factor's neighbour comes with it.
            w = self.meta[0, 0, chunk * self.C + i]
            for stack, buffer in self.pairs:
                at = w if len(stack.shape) == 3 else pl.ds(pl.multiple_of(div(w, 2) * 2, 2), 2)
                copy = pltpu.make_async_copy(stack.at[at], buffer.at[slot, i], self.sem.at[slot])
                getattr(copy, what)()

        jax.lax.fori_loop(0, jnp.minimum(self.C, self.count - chunk * self.C), one, None)

    def start(self, chunk: jax.Array) -> None:
        self._each(chunk, "start")

    def wait(self, chunk: jax.Array) -> None:
        self._each(chunk, "wait")


def shrink(
    x_ref: Any,
    w: Sequence[Any],
    slot: jax.Array,
    own: jax.Array,
    columns: int,
    scale: jax.Array | None = None,
) -> list[jax.Array]:
    """Multiplies rows by all adapters of the buffers ``w [2, C, R, D]``, side by side, in pieces as
    wide as ``own [T, n]``; ``[T, n]`` float32 each, zeros where a column is not the row's own.
    """
    (T, D), n = x_ref.shape, own.shape[1]
    pieces = sum(math.prod(one.shape[1:3]) for one in w) // n

    def part(at: Any, h: list[jax.Array]) -> list[jax.Array]:
        rows = jnp.concatenate(
            [one[slot, :, :, at].reshape(-1, at.size).astype(x_ref.dtype) for one in w]
        )
        # Two matmuls, with zeros set in between, and their sum: as one sum, a TPU7x left one of its
        # two matrix units idle.
        middle = at.size // LANES // 2 * LANES
        for columns in (slice(0, middle), slice(middle, None)) if middle else (slice(None),):
            made = dot(x_ref[:, at][:, columns], rows[:, columns], (1, 1))
            h = [one + jnp.where(own, made[:, k * n : (k + 1) * n], 0.0) for k, one in enumerate(h)]
        return h

    h = over(D, block_of(D, columns), part, [jnp.zeros((T, n), jnp.float32)] * pieces)
    return h if scale is None else [one * scale for one in h]


def expand(
    h_ref: Any,
    factors: Sequence[Any],
    own: Sequence[jax.Array],
    slot: jax.Array,
    old_ref: Any,
    out_ref: Any,
    columns: int,
    safe: bool,
) -> jax.Array:
    """Adds h ``[T, n]`` times a chunk's stacked factors ``[2, C, R, F]`` to ``old``; also returns
    ``not_finite``. ``safe`` masks non-finite values of factors that are not the row's ``own``.
    """
    F = out_ref.shape[1]

    def part(at: Any, strange: jax.Array) -> jax.Array:
        w = jnp.concatenate(
            [one[slot, :, :, at].reshape(-1, at.size).astype(h_ref.dtype) for one in factors]
        )
        if safe:
            current = jnp.concatenate(
                [jnp.where(one, 1.0, 0.0).astype(w.dtype) for one in own], axis=1
            )
            bad = dot(current, jnp.where(fine(w), 0.0, 1.0).astype(w.dtype), (1, 0))
            w = cleaned(w)
        delta = dot(h_ref[...], w, (1, 0))
        new = old_ref[:, at].astype(jnp.float32) + delta
        out_ref[:, at] = (jnp.where(bad > 0, jnp.nan, new) if safe else new).astype(out_ref.dtype)
        return strange + folded(delta[:8])

    return over(
        F, block_of(F, narrower(columns, h_ref.shape[1])), part, jnp.zeros((8, LANES), jnp.float32)
    )


def fold(n: int, R: int) -> jax.Array:
    """Returns ``[n, R]`` such that ``h [T, n] fold`` sums columns that are R apart."""
    row, column = (jax.lax.broadcasted_iota(jnp.int32, (n, R), i) for i in (0, 1))
    return jnp.where(rem(row, R) == column, 1.0, 0.0)


def folded(made: jax.Array) -> jax.Array:
    """Returns the ``[8, 128]`` sum of ``[T, n]``."""
    parts = [
        made[i : i + 8, j : j + LANES]
        for i in range(0, made.shape[0], 8)
        for j in range(0, made.shape[1], LANES)
    ]
    return functools.reduce(jnp.add, parts)


def not_finite(strange: jax.Array) -> jax.Array:
    """Returns 1 if a sum of matmuls' first eight rows is not finite."""
    return jnp.where(fine(jnp.sum(strange)), 0, 1)


def over_chunks(count: jax.Array, C: int, fetch: Fetch, body: Any) -> Any:
    """Sums ``body(chunk, first)`` over the chunks of a tile while the next one's factors come."""
    chunks = div(count + C - 1, C)

    def one(chunk: jax.Array, first: bool) -> jax.Array:
        @pl.when(chunk + 1 < chunks)
        def _next() -> None:
            fetch.start(chunk + 1)

        fetch.wait(chunk)
        return body(chunk, first)

    fetch.start(jnp.int32(0))
    total = one(jnp.int32(0), True)
    return jax.lax.fori_loop(1, chunks, lambda chunk, total: total + one(chunk, False), total)
