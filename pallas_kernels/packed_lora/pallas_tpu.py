"""TPU kernels of packed LoRA: rows in tiles, their adapters side by side in the matrix unit.

Axes: M rows, T rows of a tile, D in, F out, R rank, C adapters of a chunk, K projections of the
same rows, W factors.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import cost
from pallas_kernels.naturals import div, rem
from pallas_kernels.packed_lora import tpu_tiles as tiles
from pallas_kernels.packed_lora.runs import BEFORE, BEHIND, COUNT, Runs, runs_of
from pallas_kernels.packed_lora.tpu_tiles import Config
from pallas_kernels.products import dot


def require_add(
    x: jax.Array,
    a: Sequence[jax.Array],
    b: Sequence[jax.Array],
    onto: Sequence[jax.Array],
    *rest: Any,
) -> None:
    """Raises NotImplementedError with the reason if ``add`` cannot serve these arrays."""
    tiles.require(x, a, b, pairs=True)
    config = tiles.config("packed_lora", x, a, b)
    tile = tiles.tile_rows(x, config)
    blocks = [(tile, y.shape[1], y.dtype) for y in (x, *onto, *onto)]
    tiles.require_room(_add_scratch(x, a, b, config), blocks, x, config=config)


def require_backward(
    x: jax.Array,
    a: Sequence[jax.Array],
    b: Sequence[jax.Array],
    g: Sequence[jax.Array],
    dx_onto: jax.Array,
    *rest: Any,
) -> None:
    """Raises NotImplementedError with the reason if ``backward`` cannot serve these arrays."""
    tiles.require(x, a, b, pairs=True)
    config = tiles.config("packed_lora backward", x, a, b)
    tile, R = tiles.tile_rows(x, config), tiles.held_rank(a)
    blocks = [(tile, y.shape[1], y.dtype) for y in (x, *g, dx_onto, dx_onto)]
    tiles.require_room(
        _back_scratch(x, a, b, config), blocks, x, len(a) * tiles.chunk_size(R) * R, config
    )


# A tile's runs come in chunks of adapters that fill 128 columns, fetched while the chunk before is
# computed. Rows are multiplied by all of a chunk's adapters at once, and products with other rows'
# adapters are zeroed before the next step.
def _add_kernel(
    meta, local, x, *refs, K: int, C: int, R: int, columns: int, scaled: bool, pairs: bool
) -> None:
    scale, refs = (tiles.as_column(refs[0][0], x.shape[0]), refs[1:]) if scaled else (None, refs)
    a, b, onto, out = (refs[i * K : (i + 1) * K] for i in range(4))
    a_buf, b_buf = refs[4 * K : 5 * K], refs[5 * K : 6 * K]
    *h_refs, sem = refs[6 * K :]
    T = x.shape[0]
    count = meta[0, 0, T + COUNT]
    rows = tiles.Rows(local, T, 2 * C, 1) if pairs else tiles.Rows(local, T, C, R)
    fetch = tiles.Fetch(meta, [*zip(a, a_buf), *zip(b, b_buf)], sem, C, count)
    fetch.clear()

    @pl.when(count == 0)
    def _none() -> None:
        for k in range(K):
            out[k][...] = onto[k][...]

    # Side by side, 0 x NaN is NaN: an adapter's NaN would reach its neighbours in the second
    # matmul, and a row's NaN its neighbours' gradients. It reaches all rows of such a matmul, so
    # its first eight reveal it. Such a tile is computed again with zeros for non-finite values, and
    # NaN is put where it belongs. Finite sums keep their bits, since only zero terms are replaced.
    # With at most half a chunk of adapters, two projections fill one matrix unit of 128 columns.
    def computed(chunk: jax.Array, first: bool, safe: bool, halves: bool) -> jax.Array:
        slot, strange = rem(chunk, 2), jnp.zeros((8, tiles.LANES), jnp.float32)
        if halves:
            own, factors = (
                [rows.own(chunk, k) for k in range(K)],
                [[one.at[:, : C // 2]] * 2 for one in b_buf],
            )
            h = (
                tiles.shrink(
                    x, [one.at[:, : C // 2] for one in a_buf], slot, own[0] | own[1], columns, scale
                )
                * 2
            )
        else:
            own, factors = [rows.own(chunk)] * K, [[one] for one in b_buf]
            h = tiles.shrink(x, a_buf, slot, own[0], columns, scale)
        for k in range(K):
            h_refs[k][...] = jnp.where(own[k], h[k], 0.0).astype(x.dtype)
            strange += tiles.expand(
                h_refs[k],
                factors[k],
                [own[k]],
                slot,
                onto[k] if first else out[k],
                out[k],
                columns,
                safe,
            )
        return tiles.not_finite(strange)

    def chunk_of(chunk: jax.Array, first: bool, safe: bool) -> jax.Array:
        if first and K == 2 and C > 1:
            both = [
                functools.partial(computed, chunk, first, safe, halves) for halves in (True, False)
            ]
            return jax.lax.cond(count <= C // 2, *both)
        return computed(chunk, first, safe, False)

    @pl.when(count > 0)
    def _some() -> None:
        strange = tiles.over_chunks(count, C, fetch, functools.partial(chunk_of, safe=False))

        @pl.when(strange > 0)
        def _again() -> None:
            tiles.over_chunks(count, C, fetch, functools.partial(chunk_of, safe=True))


def _of_pairs(runs: Runs, tile: int) -> Runs:
    """Returns runs whose factors come in pairs: a row's number selects one of two columns."""
    second = jnp.take_along_axis(runs.meta[..., :tile], jnp.maximum(runs.local, 0), axis=2) % 2
    return runs._replace(local=jnp.where(runs.local < 0, -1, 2 * runs.local + second))


def _add_scratch(
    x: jax.Array, a: Sequence[jax.Array], b: Sequence[jax.Array], config: Config
) -> list[Any]:
    R, tile = tiles.held_rank(a), tiles.tile_rows(x, config)
    C = tiles.chunk_size(R)
    buffers = [pltpu.VMEM((2, C, R, w.shape[2]), w.dtype) for w in (*a, *b)]
    return [*buffers, *(pltpu.VMEM((tile, C * R), x.dtype) for _ in a)]


def add(
    x: jax.Array,
    a: Sequence[jax.Array],
    b: Sequence[jax.Array],
    onto: Sequence[jax.Array],
    factor: jax.Array,
    scale: jax.Array | None = None,
    config: Config | None = None,
    interpret: Any = False,
    grouping: Callable[[jax.Array, int], Runs] = runs_of,
) -> tuple[jax.Array, ...]:
    """Returns ``onto_k + scale (x a_k^T) b_k``; ``grouping`` makes runs of a tile's rows."""
    config = config or tiles.config("packed_lora", x, a, b)
    (M, D), K, pairs = x.shape, len(a), tiles.in_pairs(a)
    R = tiles.held_rank(a)
    C, tile = tiles.chunk_size(R), tiles.tile_rows(x, config)
    runs = grouping(jnp.minimum(factor, a[0].shape[0] - 1), tile)
    if pairs:
        runs = _of_pairs(runs, tile)
    widths, stacks = [w.shape[2] for w in b], [w[:, 0] if pairs else w for w in (*a, *b)]
    scales = []
    if scale is not None:
        padded = jnp.pad(scale.astype(jnp.float32), (0, runs.local.size - M))
        scales = [padded.reshape(runs.local.shape)]
    kernel = functools.partial(
        _add_kernel, K=K, C=C, R=R, columns=config.columns, scaled=scale is not None, pairs=pairs
    )
    anywhere = [pl.BlockSpec(memory_space=pl.ANY)] * (2 * K)
    per_row = [pl.BlockSpec((1, 1, tile), lambda t: (t, 0, 0))] * len(scales)
    out = pl.pallas_call(
        kernel,
        grid=(runs.local.shape[0],),
        in_specs=[
            *tiles.meta_specs(tile, runs.meta),
            *tiles.row_specs(tile, [D]),
            *per_row,
            *anywhere,
            *tiles.row_specs(tile, widths),
        ],
        out_specs=tiles.row_specs(tile, widths),
        out_shape=[jax.ShapeDtypeStruct(y.shape, y.dtype) for y in onto],
        scratch_shapes=[*_add_scratch(x, a, b, config), pltpu.SemaphoreType.DMA((2,))],
        input_output_aliases={3 + len(scales) + 2 * K + k: k for k in range(K)},
        compiler_params=tiles.PARAMS,
        cost_estimate=tiles.estimate(cost.packed_lora(x, a, b, onto)),
        interpret=interpret,
        name="packed_lora",
    )(*runs, x, *scales, *stacks, *onto)
    return tuple(out)


class _Sums:
    """Gradients of one projection's factors, summed over the rows of a run, across tiles if it is
    longer.

    Args:
        carry: ``[2, R, N]`` float32 of the run continued from the tile before, and in the next.
        stage: ``[C, R, N]`` of a chunk, to be written out.
        pairs: sums of a run come with its neighbour's, which are zeros.
    """

    def __init__(self, meta: Any, carry: Any, stage: Any, T: int, pairs: bool):
        self.stage, self.pairs = stage, pairs
        tile = pl.program_id(0)
        self.before, self.behind = carry.at[rem(tile + 1, 2)], carry.at[rem(tile, 2)]
        self.count, self.comes = meta[0, 0, T + COUNT], meta[0, 0, T + BEFORE]

    def put(self, chunk: jax.Array, first: bool, sums: jax.Array, at: Any) -> None:
        """Stores this tile's ``[n, .]`` of the chunk's first n / R runs, for some columns."""
        R = self.stage.shape[1] * (2 if self.pairs else 1)
        runs = [sums[row : row + R] for row in range(0, sums.shape[0], R)]
        if self.pairs:
            runs = [one[:1] + one[1:] for one in runs]
        if first:
            runs[0] = jnp.where(self.comes > 0, runs[0] + self.before[:, at], runs[0])
        self.stage[: len(runs), :, at] = (
            jnp.concatenate(runs)
            .reshape(len(runs), *self.stage.shape[1:2], -1)
            .astype(self.stage.dtype)
        )
        # The tile's last run, if it continues; the last chunk writes last. A select between
        # registers: with all runs as float32 in memory, this was a fifth of the kernel's stores.
        last = self.count - 1 - chunk * self.stage.shape[0]
        self.behind[:, at] = functools.reduce(
            lambda stored, c: jnp.where(last == c, runs[c], stored), range(1, len(runs)), runs[0]
        )


def _outer(
    sums: Sequence[_Sums],
    chunk: jax.Array,
    first: bool,
    left_ref: Any,
    right_ref: Any,
    own: jax.Array,
    columns: int,
    safe: bool,
) -> jax.Array:
    """Stores a chunk's sums of rows' outer products; returns ``not_finite`` of ``right_ref [T,
    N]``.

    Args:
        sums: of factors with the same right side.
        left_ref: ``[len(sums) n, T]``, zeros where a row of the tile is not in a column's run.
        own: ``[n, T]``, True where it is.
    """
    n, N = own.shape[0], right_ref.shape[1]

    def part(at: Any, strange: jax.Array) -> jax.Array:
        left, right = left_ref[...], right_ref[:, at]
        if safe:
            current = jnp.where(own, 1.0, 0.0).astype(right.dtype)
            bad = dot(current, jnp.where(tiles.fine(right), 0.0, 1.0).astype(right.dtype), (1, 0))
            spoilt = jnp.where(tiles.fine(left), 0.0, 1.0).astype(left.dtype)
            bad = jnp.concatenate([bad] * len(sums)) + dot(
                spoilt, jnp.ones(right.shape, right.dtype), (1, 0)
            )
            left, right = tiles.cleaned(left), tiles.cleaned(right)
        made = dot(left, right, (1, 0))
        stored = jnp.where(bad > 0, jnp.nan, made) if safe else made
        for k, one in enumerate(sums):
            one.put(chunk, first, stored[k * n : (k + 1) * n], at)
        return strange + tiles.folded(made[:8])

    return tiles.over(
        N,
        tiles.block_of(N, tiles.narrower(columns, left_ref.shape[0])),
        part,
        jnp.zeros((8, tiles.LANES), jnp.float32),
    )


class _Sends:
    """Writes gradients of runs that end in this tile from stages ``[C, R, N]`` to outputs."""

    def __init__(self, meta: Any, pairs: Sequence[tuple[Any, Any]], sem: Any, C: int, T: int):
        self.meta, self.pairs, self.sem, self.C = meta, pairs, sem, C
        self.ended = meta[0, 0, T + COUNT] - jnp.where(meta[0, 0, T + BEHIND] > 0, 1, 0)

    def _each(self, chunk: jax.Array, what: str) -> None:
        def one(i: jax.Array, _: None) -> None:
            w = self.meta[0, 0, chunk * self.C + i]
            for out, stage in self.pairs:
                getattr(pltpu.make_async_copy(stage.at[i], out.at[w], self.sem), what)()

        jax.lax.fori_loop(0, jnp.minimum(self.C, self.ended - chunk * self.C), one, None)

    def start(self, chunk: jax.Array) -> None:
        self._each(chunk, "start")

    def wait(self, chunk: jax.Array) -> None:
        self._each(chunk, "wait")


def _back_kernel(meta, local, x, *refs, K: int, C: int, R: int, columns: int, pairs: bool) -> None:
    g, refs = refs[:K], refs[K:]
    # Followed by zeros, the initial value of the sums.
    a, b, dx_onto, refs = refs[:K], refs[K : 2 * K], refs[2 * K], refs[4 * K + 1 :]
    dx, grads, refs = refs[0], refs[1 : 1 + 2 * K], refs[1 + 2 * K :]
    buffers, carries, stages = (refs[2 * K * i : 2 * K * (i + 1)] for i in range(3))
    dh_ref, turned, in_sem, out_sem = refs[6 * K :]
    dh_left, h_left = (turned.at[i * K * C * R : (i + 1) * K * C * R] for i in range(2))
    T = x.shape[0]
    count = meta[0, 0, T + COUNT]
    numbers, of = (2, 1) if pairs else (1, R)  # of a run, and columns of each
    rows = tiles.Rows(local, T, numbers * C, of)
    fetch = tiles.Fetch(meta, [*zip((*a, *b), buffers)], in_sem, C, count)
    fetch.clear()
    sums = [_Sums(meta, carry, stage, T, pairs) for carry, stage in zip(carries, stages)]
    sends = _Sends(meta, [*zip(grads, stages)], out_sem, C, T)

    @pl.when(count == 0)
    def _none() -> None:
        dx[...] = dx_onto[...]

    def computed(chunk: jax.Array, first: bool, safe: bool, halves: bool) -> jax.Array:
        slot, stored = rem(chunk, 2), C // 2 if halves else C
        n, m = C * R, stored * R
        if halves and K == 2:  # both projections' columns side by side
            a_buf, current = (
                [one.at[:, :stored] for one in buffers[:K]],
                [rows.own(chunk, k) for k in range(K)],
            )
            own = [current[0] | current[1]]
            dh = [
                sum(
                    tiles.shrink(
                        g[k], [buffers[K + k].at[:, :stored]] * 2, slot, current[k], columns
                    )[0]
                    for k in range(K)
                )
            ]
        else:
            a_buf, own = buffers[:K], [rows.own(chunk)] * K
            dh = [tiles.shrink(g[k], [buffers[K + k]], slot, own[k], columns)[0] for k in range(K)]
        for k, one in enumerate(dh):
            dh_ref[:, k * n : (k + 1) * n] = one.astype(x.dtype)
        # Of nine orders of these and the following operations none took fewer bundles on v6e and
        # TPU7x: transposes are not waited for.
        _turn(dh, dh_left, K * m)
        _turn(tiles.shrink(x, a_buf, slot, own[0], columns), h_left, K * m)
        across = (
            div(jax.lax.broadcasted_iota(jnp.int32, (m, T), 0), of) + chunk * numbers * C
            == local[0]
        )
        outer = functools.partial(_outer, own=across, columns=columns, safe=safe)
        strange = outer(sums[:K], chunk, first, dh_left.at[: K * m], x)
        strange += sum(
            outer([sums[K + k]], chunk, first, h_left.at[k * m : (k + 1) * m], g[k])
            for k in range(K)
        )
        h = dh_ref.at[:, : len(dh) * n]
        strange += tiles.expand(h, a_buf, own, slot, dx_onto if first else dx, dx, columns, safe)
        return tiles.not_finite(strange)

    def chunk_of(chunk: jax.Array, first: bool, safe: bool) -> jax.Array:
        if not first:
            sends.wait(chunk - 1)
        if first and C > 1:
            both = [
                functools.partial(computed, chunk, first, safe, halves) for halves in (True, False)
            ]
            strange = jax.lax.cond(count <= C // 2, *both)
        else:
            strange = computed(chunk, first, safe, False)
        sends.start(chunk)
        return strange

    def all_chunks(safe: bool) -> jax.Array:
        strange = tiles.over_chunks(count, C, fetch, functools.partial(chunk_of, safe=safe))
        sends.wait(div(count + C - 1, C) - 1)
        return strange

    @pl.when(count > 0)
    def _some() -> None:
        strange = all_chunks(False)

        @pl.when(strange > 0)
        def _again() -> None:
            all_chunks(True)


def _turn(sheets: Sequence[jax.Array], out_ref: Any, n: int) -> None:
    """Transposes float32 ``[T, .]`` arrays into the first n rows, as only 32 bits can be."""
    each = n // len(sheets)
    for k, one in enumerate(sheets):
        out_ref[k * each : (k + 1) * each] = one.T[:each].astype(out_ref.dtype)


def _back_scratch(
    x: jax.Array, a: Sequence[jax.Array], b: Sequence[jax.Array], config: Config
) -> list[Any]:
    K, R, vmem, factors, sums = len(a), tiles.held_rank(a), pltpu.VMEM, [*a, *b], _sums_dtype(a)
    C, tile = tiles.chunk_size(R), tiles.tile_rows(x, config)
    return [
        *(vmem((2, C, R, w.shape[2]), w.dtype) for w in factors),
        *(vmem((2, *w.shape[1:]), jnp.float32) for w in factors),
        *(vmem((C, *w.shape[1:]), sums) for w in factors),
        vmem((tile, K * C * R), x.dtype),
        vmem((2 * K * C * R, tile), x.dtype),
    ]


def _sums_dtype(a: Sequence[jax.Array]) -> Any:
    """Returns float32 for pairs: copying one bfloat16 would overwrite its neighbour."""
    return jnp.float32 if tiles.in_pairs(a) else a[0].dtype


def backward(
    x: jax.Array,
    a: Sequence[jax.Array],
    b: Sequence[jax.Array],
    g: Sequence[jax.Array],
    dx_onto: jax.Array,
    factor: jax.Array,
    config: Config | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Returns the gradients of x, added to ``dx_onto``, and of all factors."""
    config = config or tiles.config("packed_lora backward", x, a, b)
    D, K, R, pairs = x.shape[1], len(a), tiles.held_rank(a), tiles.in_pairs(a)
    C, tile = tiles.chunk_size(R), tiles.tile_rows(x, config)
    runs = runs_of(jnp.minimum(factor, a[0].shape[0] - 1), tile)
    if pairs:
        runs = _of_pairs(runs, tile)
    widths, factors = [w.shape[2] for w in b], [*a, *b]
    zeros = [jnp.zeros(w.shape, _sums_dtype(a)) for w in factors]
    stacks = [w[:, 0] if pairs else w for w in factors]
    anywhere = [pl.BlockSpec(memory_space=pl.ANY)] * (2 * K)
    semaphores = [pltpu.SemaphoreType.DMA((2,)), pltpu.SemaphoreType.DMA(())]
    kernel = functools.partial(_back_kernel, K=K, C=C, R=R, columns=config.columns, pairs=pairs)
    first = 3 + K + 2 * K  # inputs before ``dx_onto``
    dx, *grads = pl.pallas_call(
        kernel,
        grid=(runs.local.shape[0],),
        in_specs=[
            *tiles.meta_specs(tile, runs.meta),
            *tiles.row_specs(tile, [D, *widths]),
            *anywhere,
            *tiles.row_specs(tile, [D]),
            *anywhere,
        ],
        out_specs=[*tiles.row_specs(tile, [D]), *anywhere],
        out_shape=[jax.ShapeDtypeStruct(y.shape, y.dtype) for y in (dx_onto, *zeros)],
        scratch_shapes=[*_back_scratch(x, a, b, config), *semaphores],
        input_output_aliases={first: 0} | {first + 1 + n: 1 + n for n in range(2 * K)},
        compiler_params=tiles.PARAMS,
        cost_estimate=tiles.estimate(cost.packed_lora(x, a, b, g, backward=True)),
        interpret=interpret,
        name="packed_lora_backward",
    )(*runs, x, *g, *stacks, dx_onto, *zeros)
    grads = [one.astype(w.dtype) for one, w in zip(grads, factors)]
    return dx, tuple(grads[:K]), tuple(grads[K:])


def require_outer(left: jax.Array, right: jax.Array, like: jax.Array, *rest: Any) -> None:
    """Raises NotImplementedError with the reason if ``outer`` cannot serve these arrays."""
    tiles.require(right, [like], [])
    tile, n = tiles.tile_rows(right, Config()), tiles.chunk_size(like.shape[1]) * like.shape[1]
    blocks = [(tile, y.shape[1], y.dtype) for y in (left, right)]
    tiles.require_room(_outer_scratch(right, like, Config()), blocks, right, n)


def _outer_kernel(
    meta, local, left, right, zeros, out, carry, stage, turned, sem, *, C: int, R: int, columns: int
) -> None:
    T = right.shape[0]
    count, rows = meta[0, 0, T + COUNT], tiles.Rows(local, T, C, R)
    sums, sends = _Sums(meta, carry, stage, T, False), _Sends(meta, [(out, stage)], sem, C, T)

    def chunk_of(chunk: jax.Array, first: bool, safe: bool) -> jax.Array:
        if not first:
            sends.wait(chunk - 1)
        wide = dot(left[...].astype(jnp.float32), tiles.fold(C * R, R), (1, 1))
        _turn([jnp.where(rows.own(chunk), wide, 0.0)], turned, C * R)
        across = div(jax.lax.broadcasted_iota(jnp.int32, (C * R, T), 0), R) + chunk * C == local[0]
        strange = _outer([sums], chunk, first, turned, right, across, columns, safe)
        sends.start(chunk)
        return tiles.not_finite(strange)

    def all_chunks(safe: bool) -> jax.Array:
        chunks, total = div(count + C - 1, C), chunk_of(jnp.int32(0), True, safe)
        total = jax.lax.fori_loop(1, chunks, lambda i, n: n + chunk_of(i, False, safe), total)
        sends.wait(chunks - 1)
        return total

    @pl.when(count > 0)
    def _some() -> None:
        strange = all_chunks(False)

        @pl.when(strange > 0)
        def _again() -> None:
            all_chunks(True)


def _outer_scratch(right: jax.Array, like: jax.Array, config: Config) -> list[Any]:
    (_, R, N), tile = like.shape, tiles.tile_rows(right, config)
    C = tiles.chunk_size(R)
    shapes = ((2, R, N), jnp.float32), ((C, R, N), like.dtype), ((C * R, tile), right.dtype)
    return [pltpu.VMEM(*one) for one in shapes]


def outer(
    left: jax.Array,
    right: jax.Array,
    like: jax.Array,
    factor: jax.Array,
    config: Config = Config(),
    interpret: Any = False,
) -> jax.Array:
    """Returns the sums of outer products of rows ``left [M, R]`` and ``right [M, N]`` by factor,
    ``[W, R, N]`` in the dtype of ``like``.
    """
    (M, N), (W, R, _), tile = right.shape, like.shape, tiles.tile_rows(right, config)
    runs = runs_of(jnp.minimum(factor, W - 1), tile)
    kernel = functools.partial(_outer_kernel, C=tiles.chunk_size(R), R=R, columns=config.columns)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    moved = left.nbytes + right.nbytes + min(M, W) * like.nbytes // W
    return pl.pallas_call(
        kernel,
        grid=(runs.local.shape[0],),
        in_specs=[*tiles.meta_specs(tile, runs.meta), *tiles.row_specs(tile, [R, N]), anywhere],
        out_specs=anywhere,
        out_shape=jax.ShapeDtypeStruct(like.shape, like.dtype),
        scratch_shapes=[*_outer_scratch(right, like, config), pltpu.SemaphoreType.DMA(())],
        input_output_aliases={4: 0},
        compiler_params=tiles.PARAMS,
        cost_estimate=pl.CostEstimate(flops=2 * M * R * N, bytes_accessed=moved, transcendentals=0),
        interpret=interpret,
        name="packed_lora_outer",
    )(*runs, left, right, jnp.zeros(like.shape, like.dtype))
