"""TPU kernels of packed LoRA: rows in tiles, the adapters of a tile side by side in the matrix unit.

A tile's runs come in chunks of as many adapters as fill 128 columns: eight of rank 16. Their factors are fetched from where the stacks
lie, the next chunk's while this one is computed; rows are multiplied by all of a chunk's adapters at once, and what is not a row's own
is set to zero before it goes on. So the work follows the runs that are there, and nothing is made of the size of a stack.

Projections of the same rows share the first product. A chunk's columns of two of them fill a matrix unit that is 256 wide; where a tile has
no more than half a chunk of adapters, theirs fill one that is 128 wide, and the product takes half as many squares.

Side by side, 0 x NaN is NaN: an adapter's NaN would reach its neighbours in the second product, and a row's NaN its neighbours' gradients.
So each such product has some rows of zeros more, which are not zero afterwards where an operand was not finite. A tile that meets one is
computed again with zeros for what is not finite, and NaN is put where it belongs. Sums that were finite are the same then, bit for
bit: only terms are replaced that were zero. (-0.0 may become 0.0 in rows without an adapter beside others that have one.)

Axes: M rows, T rows of a tile, D in, F out, R rank, C adapters of a chunk, K projections of the same rows, W factors.
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


def require_add(x: jax.Array, a: Sequence[jax.Array], b: Sequence[jax.Array], onto: Sequence[jax.Array], *rest: Any) -> None:
    """Whether ``add`` can serve these.

    Raises:
        NotImplementedError: with the reason.
    """
    tiles.require(x, a, b, pairs=True)
    tile = tiles.tile_rows(x, Config())
    tiles.require_room(_add_scratch(x, a, b, Config()), [(tile, y.shape[1], y.dtype) for y in (x, *onto, *onto)], x)


def require_backward(
    x: jax.Array, a: Sequence[jax.Array], b: Sequence[jax.Array], g: Sequence[jax.Array], dx_onto: jax.Array, *rest: Any
) -> None:
    """Whether ``backward`` can serve these.

    Raises:
        NotImplementedError: with the reason.
    """
    tiles.require(x, a, b)
    tile = tiles.tile_rows(x, Config())
    tiles.require_room(_back_scratch(x, a, b, Config()), [(tile, y.shape[1], y.dtype) for y in (x, *g, dx_onto, dx_onto)], x)


def _add_kernel(meta, local, x, *refs, K: int, C: int, R: int, columns: int, scaled: bool, pairs: bool) -> None:
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

    def computed(chunk: jax.Array, first: bool, safe: bool, halves: bool) -> jax.Array:
        slot, strange = rem(chunk, 2), jnp.int32(0)
        if halves:
            own = [rows.own(chunk, k) for k in range(K)]
            [both] = tiles.shrink(x, [one.at[:, : C // 2] for one in a_buf], slot, own[0] | own[1], columns, scale)
            h = [jnp.where(mine, both, 0.0) for mine in own]
        else:
            h = tiles.shrink(x, a_buf, slot, rows.own(chunk), columns, scale)
        for ref, mine in zip(h_refs, h):
            ref[:T] = mine.astype(x.dtype)
        for k in range(K):
            term = tiles.Term(h_refs[k], b_buf[k], k if halves else None)
            strange += tiles.expand([term], slot, rows, chunk, onto[k] if first else out[k], out[k], columns, safe)
        return strange

    def chunk_of(chunk: jax.Array, first: bool, safe: bool) -> jax.Array:
        if first and K == 2 and C > 1:
            both = [functools.partial(computed, chunk, first, safe, halves) for halves in (True, False)]
            return jax.lax.cond(count <= C // 2, *both)
        return computed(chunk, first, safe, False)

    @pl.when(count > 0)
    def _some() -> None:
        for ref in h_refs:
            ref[T:] = jnp.zeros((tiles.ZEROS, C * R), ref.dtype)
        strange = tiles.over_chunks(count, C, fetch, functools.partial(chunk_of, safe=False))

        @pl.when(strange > 0)
        def _again() -> None:
            tiles.over_chunks(count, C, fetch, functools.partial(chunk_of, safe=True))


def _add_scratch(x: jax.Array, a: Sequence[jax.Array], b: Sequence[jax.Array], config: Config) -> list[Any]:
    R = 2 if tiles.in_pairs(a) else a[0].shape[1]
    buffers = [pltpu.VMEM((2, tiles.chunk_size(R), R, w.shape[2]), w.dtype) for w in (*a, *b)]
    return [*buffers, *(pltpu.VMEM((tiles.tile_rows(x, config) + tiles.ZEROS, tiles.chunk_size(R) * R), x.dtype) for _ in a)]


def add(
    x: jax.Array,
    a: Sequence[jax.Array],
    b: Sequence[jax.Array],
    onto: Sequence[jax.Array],
    factor: jax.Array,
    scale: jax.Array | None = None,
    config: Config = Config(),
    interpret: Any = False,
    grouping: Callable[[jax.Array, int], Runs] = runs_of,
) -> tuple[jax.Array, ...]:
    """``onto_k + scale (x a_k^T) b_k`` of each row's factor; see ``packed_lora``.

    Args:
        grouping: the runs of a tile's rows.
    """
    (M, D), K, pairs = x.shape, len(a), tiles.in_pairs(a)
    R = 2 if pairs else a[0].shape[1]
    C, tile = tiles.chunk_size(R), tiles.tile_rows(x, config)
    runs = grouping(jnp.minimum(factor, a[0].shape[0] - 1), tile)
    if pairs:  # which of a run's two columns is the row's own
        second = jnp.take_along_axis(runs.meta[..., :tile], jnp.maximum(runs.local, 0), axis=2) % 2
        runs = runs._replace(local=jnp.where(runs.local < 0, -1, 2 * runs.local + second))
    widths, scratch, stacks = [w.shape[2] for w in b], _add_scratch(x, a, b, config), [w[:, 0] if pairs else w for w in (*a, *b)]
    scales = [] if scale is None else [jnp.pad(scale.astype(jnp.float32), (0, runs.local.size - M)).reshape(runs.local.shape)]
    kernel = functools.partial(_add_kernel, K=K, C=C, R=R, columns=config.columns, scaled=scale is not None, pairs=pairs)
    anywhere = [pl.BlockSpec(memory_space=pl.ANY)] * (2 * K)
    per_row = [pl.BlockSpec((1, 1, tile), lambda t: (t, 0, 0))] * len(scales)
    out = pl.pallas_call(
        kernel,
        grid=(runs.local.shape[0],),
        in_specs=[*tiles.meta_specs(tile, runs.meta), *tiles.row_specs(tile, [D]), *per_row, *anywhere, *tiles.row_specs(tile, widths)],
        out_specs=tiles.row_specs(tile, widths),
        out_shape=[jax.ShapeDtypeStruct(y.shape, y.dtype) for y in onto],
        scratch_shapes=[*scratch, pltpu.SemaphoreType.DMA((2,))],
        input_output_aliases={3 + len(scales) + 2 * K + k: k for k in range(K)},
        compiler_params=tiles.PARAMS,
        cost_estimate=tiles.estimate(cost.packed_lora(x, a, b, onto)),
        interpret=interpret,
        name="packed_lora",
    )(*runs, x, *scales, *stacks, *onto)
    return tuple(out)


class _Sums:
    """Gradients of one projection's factors: summed over the rows of a run, over tiles where it is longer, then put where they belong.

    Args:
        out: ``[W, R, N]``, zeros where nothing is put.
        carry: ``[2, R, N]`` float32 of the run that comes from the tile before, and of the one that goes on in the next.
        stage: ``[C, R, N]`` of a chunk, on its way out.
        part: ``[C, R, block]`` float32.
    """

    def __init__(self, meta: Any, out: Any, carry: Any, stage: Any, part: Any, sem: Any, T: int):
        self.meta, self.out, self.stage, self.part, self.sem = meta, out, stage, part, sem
        tile = pl.program_id(0)
        self.before, self.behind = carry.at[rem(tile + 1, 2)], carry.at[rem(tile, 2)]
        self.count, self.comes, self.goes_on = (meta[0, 0, T + n] for n in (COUNT, BEFORE, BEHIND))

    def add(self, chunk: jax.Array, first: bool, left_ref: Any, right_ref: Any, own: jax.Array, safe: bool) -> jax.Array:
        """The chunk's, from ``left [C R + ZEROS, T]``, which has zeros where a column is not of the row's run, and ``right [T, N]``.

        Args:
            own: ``[C R, T]``, which are.

        Returns:
            Whether an entry of ``right`` was not finite.
        """
        C, R, N = self.stage.shape
        block, last = self.part.shape[2], self.count - 1 - chunk * C

        def part(at: Any, strange: jax.Array) -> jax.Array:
            left, right = left_ref[...], right_ref[:, at]
            if safe:
                mine = jnp.where(own, 1.0, 0.0).astype(right.dtype)
                bad = dot(mine, jnp.where(tiles.fine(right), 0.0, 1.0).astype(right.dtype), (1, 0))
                bad += dot(jnp.where(tiles.fine(left[: C * R]), 0.0, 1.0).astype(left.dtype), jnp.ones(right.shape, right.dtype), (1, 0))
                sums = dot(tiles.cleaned(left), tiles.cleaned(right), (1, 0))
                self.part[...] = jnp.where(bad > 0, jnp.nan, sums[: C * R]).reshape(C, R, block)
            else:
                sums = dot(left, right, (1, 0))
                self.part[...] = sums[: C * R].reshape(C, R, block)
            if first:

                @pl.when(self.comes > 0)
                def _continued() -> None:
                    self.part[0] += self.before[:, at]

            self.stage[:, :, at] = self.part[...].astype(self.stage.dtype)

            @pl.when((self.goes_on > 0) & (last < C))
            def _to_be_continued() -> None:
                self.behind[:, at] = self.part[last]

            return strange + tiles.folded(sums[C * R :])

        return tiles.not_zero(tiles.over(N, block, part, jnp.zeros((8, tiles.LANES), jnp.float32)))

    def _each(self, chunk: jax.Array, what: str) -> None:
        """Every run of a chunk that ends in this tile."""
        C = self.stage.shape[0]
        ended = self.count - jnp.where(self.goes_on > 0, 1, 0)

        def one(i: jax.Array, _: None) -> None:
            copy = pltpu.make_async_copy(self.stage.at[i], self.out.at[self.meta[0, 0, chunk * C + i]], self.sem)
            getattr(copy, what)()

        jax.lax.fori_loop(0, jnp.minimum(C, ended - chunk * C), one, None)

    def send(self, chunk: jax.Array) -> None:
        self._each(chunk, "start")

    def wait(self, chunk: jax.Array) -> None:
        self._each(chunk, "wait")


def _back_kernel(meta, local, x, *refs, K: int, C: int, R: int, columns: int) -> None:
    g, refs = refs[:K], refs[K:]
    a, b, dx_onto, refs = refs[:K], refs[K : 2 * K], refs[2 * K], refs[4 * K + 1 :]  # behind it zeros, which the sums begin as
    dx, da, db, refs = refs[0], refs[1 : 1 + K], refs[1 + K : 1 + 2 * K], refs[1 + 2 * K :]
    buffers, carries, stages, parts = (refs[2 * K * i : 2 * K * (i + 1)] for i in range(4))
    h_refs, dh_refs, (left_ref, in_sem, out_sem) = refs[8 * K : 9 * K], refs[9 * K : 10 * K], refs[10 * K :]
    T = x.shape[0]
    count = meta[0, 0, T + COUNT]
    rows = tiles.Rows(local, T, C, R)
    fetch = tiles.Fetch(meta, [*zip((*a, *b), buffers)], in_sem, C, count)
    fetch.clear()
    of_factors = enumerate(zip((*da, *db), carries, stages, parts))
    sums = [_Sums(meta, out, carry, stage, part, out_sem.at[n], T) for n, (out, carry, stage, part) in of_factors]

    @pl.when(count == 0)
    def _none() -> None:
        dx[...] = dx_onto[...]

    def chunk_of(chunk: jax.Array, first: bool, safe: bool) -> jax.Array:
        if not first:
            for one in sums:
                one.wait(chunk - 1)
        slot, own, strange = rem(chunk, 2), rows.own(chunk), jnp.int32(0)
        own_across = div(jax.lax.broadcasted_iota(jnp.int32, (C * R, T), 0), R) + chunk * C == local[0]
        for ref, h in zip(h_refs, tiles.shrink(x, buffers[:K], slot, own, columns)):
            ref[...] = h.astype(x.dtype)
        for k in range(K):
            left_ref[: C * R] = _turned(h_refs[k][...])
            strange += sums[K + k].add(chunk, first, left_ref, g[k], own_across, safe)
            [dh] = tiles.shrink(g[k], [buffers[K + k]], slot, own, columns)
            dh_refs[k][:T] = dh.astype(x.dtype)
            left_ref[: C * R] = _turned(dh_refs[k][:T])
            strange += sums[k].add(chunk, first, left_ref, x, own_across, safe)
        old = dx_onto if first else dx
        strange += tiles.expand([*map(tiles.Term, dh_refs, buffers[:K])], slot, rows, chunk, old, dx, columns, safe)
        for one in sums:
            one.send(chunk)
        return strange

    def all_chunks(safe: bool) -> jax.Array:
        strange = tiles.over_chunks(count, C, fetch, functools.partial(chunk_of, safe=safe))
        for one in sums:
            one.wait(div(count + C - 1, C) - 1)
        return strange

    @pl.when(count > 0)
    def _some() -> None:
        left_ref[C * R :] = jnp.zeros((tiles.ZEROS, T), left_ref.dtype)
        for ref in dh_refs:
            ref[T:] = jnp.zeros((tiles.ZEROS, C * R), ref.dtype)
        strange = all_chunks(False)

        @pl.when(strange > 0)
        def _again() -> None:
            all_chunks(True)


def _turned(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32).T.astype(x.dtype)  # 32-bit entries alone can be turned around


def _back_scratch(x: jax.Array, a: Sequence[jax.Array], b: Sequence[jax.Array], config: Config) -> list[Any]:
    R, vmem, factors = a[0].shape[1], pltpu.VMEM, [*a, *b]
    C, tile = tiles.chunk_size(R), tiles.tile_rows(x, config)
    return [
        *(vmem((2, C, *w.shape[1:]), w.dtype) for w in factors),
        *(vmem((2, *w.shape[1:]), jnp.float32) for w in factors),
        *(vmem((C, *w.shape[1:]), w.dtype) for w in factors),
        *(vmem((C, R, tiles.block_of(w.shape[2], config.columns)), jnp.float32) for w in factors),
        *(vmem((tile, C * R), x.dtype) for _ in a),
        *(vmem((tile + tiles.ZEROS, C * R), x.dtype) for _ in a),
        vmem((C * R + tiles.ZEROS, tile), x.dtype),
    ]


def backward(
    x: jax.Array,
    a: Sequence[jax.Array],
    b: Sequence[jax.Array],
    g: Sequence[jax.Array],
    dx_onto: jax.Array,
    factor: jax.Array,
    config: Config = Config(),
    interpret: Any = False,
) -> tuple[jax.Array, tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Gradients of ``add``: of x, added to ``dx_onto [M, D]``, and of the factors, zeros where no row names them."""
    D, K, R = x.shape[1], len(a), a[0].shape[1]
    C, tile = tiles.chunk_size(R), tiles.tile_rows(x, config)
    runs = runs_of(jnp.minimum(factor, a[0].shape[0] - 1), tile)
    widths, factors = [w.shape[2] for w in b], [*a, *b]
    zeros = [jnp.zeros(w.shape, w.dtype) for w in factors]
    anywhere = [pl.BlockSpec(memory_space=pl.ANY)] * (2 * K)
    semaphores = [pltpu.SemaphoreType.DMA((2,)), pltpu.SemaphoreType.DMA((2 * K,))]
    kernel = functools.partial(_back_kernel, K=K, C=C, R=R, columns=config.columns)
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
        out_shape=[jax.ShapeDtypeStruct(y.shape, y.dtype) for y in (dx_onto, *factors)],
        scratch_shapes=[*_back_scratch(x, a, b, config), *semaphores],
        input_output_aliases={first: 0} | {first + 1 + n: 1 + n for n in range(2 * K)},
        compiler_params=tiles.PARAMS,
        cost_estimate=tiles.estimate(cost.packed_lora(x, a, b, g, backward=True)),
        interpret=interpret,
        name="packed_lora_backward",
    )(*runs, x, *g, *a, *b, dx_onto, *zeros)
    return dx, tuple(grads[:K]), tuple(grads[K:])
