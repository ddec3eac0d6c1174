"""TPU kernel of packed matmul: experts' matrices and their rows' adapters in one pass.

Axes: M rows, T rows of a tile, E experts, D in, F out, R rank, C adapters of a chunk, K projections
of the same rows, W factors.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import cost, tuning
from pallas_kernels.naturals import div
from pallas_kernels.packed_lora import tpu_tiles as tiles
from pallas_kernels.packed_lora.runs import COUNT
from pallas_kernels.packed_lora.tpu_tiles import Config
from pallas_kernels.packed_matmul.visits import visits_of
from pallas_kernels.products import dot

Arrays = Sequence[jax.Array]
# Dtypes of matrices other than the rows' dtype.
EIGHT = (jnp.dtype(jnp.int8), jnp.dtype(jnp.float8_e4m3fn))
MOST_VISITS = 1 << 16  # two numbers of each fit 1 MiB of scalar memory


def config(x: jax.Array, w: Arrays, sizes: jax.Array, a: Arrays, b: Arrays) -> Config:
    """Returns measured sizes, or tiles of 128 rows, fewer for experts of few rows."""
    average = -(-x.shape[0] // sizes.shape[0])
    rule = Config(rows=min(128, max(32, pl.next_power_of_2(2 * average))))
    key = f"{tiles.key_of(x, a, b)} {w[0].dtype} experts {sizes.shape[0]}"
    return tuning.chosen("packed_matmul", "tpu", key, rule)


def require(
    x: jax.Array,
    w: Arrays,
    sizes: jax.Array,
    a: Arrays,
    b: Arrays,
    factor: jax.Array,
    scale: jax.Array | None = None,
    first: jax.Array | None = None,
    w_scale: Arrays | None = None,
) -> None:
    """Raises NotImplementedError with the reason if ``matmul`` cannot serve these arrays."""
    tiles.require(x, a, b)
    for one in w:
        if w_scale is None and one.dtype != x.dtype:
            raise NotImplementedError(
                f"experts' matrices are {one.dtype} and rows {x.dtype}; without scales equal ones"
                " are served"
            )
        if w_scale is not None and one.dtype not in EIGHT:
            raise NotImplementedError(
                f"experts' matrices are {one.dtype} and have scales; int8 and float8_e4m3fn are"
                " served"
            )
    how, M = config(x, w, sizes, a, b), x.shape[0]
    tile = tiles.tile_rows(x, how)
    if not M or -(-M // tile) + min(M, sizes.shape[0]) > MOST_VISITS:
        raise NotImplementedError(
            f"{M} rows of {sizes.shape[0]} experts; from 1 row to {MOST_VISITS} visits are served"
        )
    blocks = [
        *((tile, one.shape[2], x.dtype) for one in w),
        (tile, x.shape[1], x.dtype),
        *((*one.shape[1:], one.dtype) for one in w),
    ]
    tiles.require_room(_scratch(x, a, b, how), blocks, x, config=how)


def _scratch(x: jax.Array, a: Arrays, b: Arrays, how: Config) -> list[Any]:
    T, R = tiles.tile_rows(x, how), a[0].shape[1]
    C = tiles.chunk_size(R)
    return [
        *(pltpu.VMEM((2, C, *one.shape[1:]), one.dtype) for one in (*a, *b)),
        *(pltpu.VMEM((T, C * R), x.dtype) for _ in a),
        *(pltpu.VMEM((T, one.shape[2]), jnp.float32) for one in b),
    ]


# A tile of rows visits its experts one after another (``visits``). The matrices of a visit are
# fetched one visit ahead, once for consecutive visits of an expert; the factors of its adapters
# come in chunks that fill 128 columns, as in ``packed_lora``. 8-bit matrices are converted in VMEM.
def _kernel(
    tile_V,
    expert_V,
    first,
    meta,
    ahead,
    local,
    *refs,
    K: int,
    C: int,
    R: int,
    columns: int,
    scaled: bool,
    eight: bool,
) -> None:
    del expert_V, first
    T = local.shape[2]
    scale, refs = (tiles.as_column(refs[0][0], T), refs[1:]) if scaled else (None, refs)
    x, [w, *w_scales, a, b, out, a_buf, b_buf, h_refs, bad_refs] = (
        refs[0],
        [refs[1 + K * i : 1 + K * (i + 1)] for i in range(8 + eight)],
    )
    sem, begin = refs[-2:]
    v, of = pl.program_id(0), tiles.Rows(local, T, C, R)
    # Nothing is written to the tile yet.
    fresh = (v == 0) | (tile_V[v] != tile_V[jnp.maximum(v - 1, 0)])
    current = of.run >= -1
    count, pairs = meta[0, 0, T + COUNT], [*zip(a, a_buf), *zip(b, b_buf)]
    chunks = div(count + C - 1, C)

    @pl.when(v == 0)
    def _start() -> None:
        begin[0] = 0

    fetch = tiles.Fetch(meta, pairs, sem, C, count, begin[0])
    coming = tiles.Fetch(ahead, pairs, sem, C, ahead[0, 0, T + COUNT], fetch.slot(chunks))
    fetch.clear()
    pl.when(v == 0)(lambda: fetch.start(jnp.int32(0)))

    def blocks(k: int, body: Any, carry: Any = None) -> Any:
        return tiles.over(out[k].shape[1], tiles.block_of(out[k].shape[1], columns), body, carry)

    def based(k: int, at: Any) -> jax.Array:
        made = dot(x[...], w[k][:, at], (1, 0))
        return made * w_scales[0][k][:, at] if eight else made

    def made(k: int, at: Any) -> jax.Array:
        return out[k][:, at].astype(jnp.float32)

    def write(k: int, at: Any, new: jax.Array, fresh: jax.Array | bool) -> None:
        out[k][:, at] = jnp.where(current, new, jnp.where(fresh, 0.0, made(k, at))).astype(
            out[k].dtype
        )

    @pl.when(count == 0)
    def _none() -> None:
        coming.start(jnp.int32(0))
        for k in range(K):
            blocks(k, lambda at, _, k=k: write(k, at, based(k, at), fresh))

    def shrink(chunk: jax.Array) -> None:
        """Stores rows times the chunk's A, zeros where a column is not the row's own."""
        slot = fetch.slot(chunk)

        def whole() -> None:
            for ref, h in zip(h_refs, tiles.shrink(x, a_buf, slot, of.own(chunk), columns, scale)):
                ref[...] = h.astype(ref.dtype)

        def halves() -> None:
            first, second = of.own(chunk, 0), of.own(chunk, 1)
            [both] = tiles.shrink(
                x, [one.at[:, : C // 2] for one in a_buf], slot, first | second, columns, scale
            )
            # Swapped, so that the second one's columns are where its adapters' B are.
            for ref, h in zip(h_refs, (both, pltpu.roll(both, C * R // 2, 1))):
                ref[...] = jnp.where(first, h, 0.0).astype(ref.dtype)

        if K == 2 and C > 1:
            jax.lax.cond(count <= C // 2, halves, whole)
        else:
            whole()

    def expand(chunk: jax.Array, k: int, base: Any, fresh: jax.Array | bool) -> jax.Array:
        """Writes ``base`` plus the chunk's part; returns sums of the result, ``[8, 128]``."""
        slot = fetch.slot(chunk)

        def part(at: Any, total: jax.Array) -> jax.Array:
            # The small matmul first: after the large one it took 480 bundles more on a v5e, 9 % of
            # the base's.
            delta = dot(
                h_refs[k][...],
                b_buf[k][slot, :, :, at].reshape(C * R, at.size).astype(x.dtype),
                (1, 0),
            )
            new = delta + base(k, at)
            write(k, at, new, fresh)
            return total + tiles.folded(new)

        return blocks(k, part, jnp.zeros((8, tiles.LANES), jnp.float32))

    def clean(chunk: jax.Array) -> None:
        """Zeroes non-finite values in the chunk's B; marks their own rows in ``bad_refs``."""
        slot, own = fetch.slot(chunk), jnp.where(of.own(chunk), 1.0, 0.0)
        for k in range(K):

            def part(at: Any, _: None, k: int = k) -> None:
                stored = b_buf[k][slot, :, :, at]
                bad_refs[k][:, at] = dot(
                    own, jnp.where(tiles.fine(stored), 0.0, 1.0).reshape(C * R, at.size), (1, 0)
                )
                b_buf[k][slot, :, :, at] = tiles.cleaned(stored)

            blocks(k, part)

    def poison() -> None:
        for k in range(K):
            blocks(
                k,
                lambda at, _, k=k: write(
                    k, at, jnp.where(bad_refs[k][:, at] > 0, jnp.nan, made(k, at)), False
                ),
            )

    def one(chunk: jax.Array, again: jax.Array, base: Any, fresh: jax.Array | bool) -> jax.Array:
        @pl.when(chunk + 1 < chunks)
        def _next() -> None:
            fetch.start(chunk + 1)

        fetch.wait(chunk)

        @pl.when((chunk + 1 == chunks) & ~again)
        def _ahead() -> None:
            coming.start(jnp.int32(0))

        shrink(chunk)
        pl.when(again)(lambda: clean(chunk))
        total = functools.reduce(jnp.add, [expand(chunk, k, base, fresh) for k in range(K)])
        pl.when(again)(poison)
        return jnp.where(jnp.abs(jnp.sum(total)) < jnp.inf, 0, 1)

    # Side by side 0 x NaN is NaN: an adapter's NaN in B would reach all rows of its visit, and the
    # sum of the results shows it. The visit is then computed again with zeros for non-finite values
    # in B, and NaN is put where it belongs: other rows keep their bits.
    def computed(turn: jax.Array) -> jax.Array:
        again = turn > 0

        @pl.when(again)
        def _fetched_once_more() -> None:
            coming.wait(jnp.int32(0))  # its buffer may be needed
            fetch.start(jnp.int32(0))

        strange = one(jnp.int32(0), again, based, fresh)
        strange = jax.lax.fori_loop(
            1, chunks, lambda chunk, strange: strange + one(chunk, again, made, False), strange
        )
        pl.when(again)(lambda: coming.start(jnp.int32(0)))
        return strange

    @pl.when(count > 0)
    def _some() -> None:
        # One copy of the code for both passes, because another might add in another order.
        jax.lax.fori_loop(
            0,
            2,
            lambda turn, strange: jax.lax.cond(
                (turn == 0) | (strange > 0), computed, jnp.zeros_like, turn
            ),
            jnp.int32(0),
        )

    begin[0] = fetch.slot(chunks)


def matmul(
    x: jax.Array,
    w: Arrays,
    sizes: jax.Array,
    a: Arrays,
    b: Arrays,
    factor: jax.Array,
    scale: jax.Array | None = None,
    first: jax.Array | None = None,
    w_scale: Arrays | None = None,
    how: Config | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, ...]:
    """Returns ``x w_k + scale (x a_k^T) b_k``; see ``packed_matmul``.

    Args:
        scale: ``[M]`` per row.
        first: int32, index of the first expert's matrix in ``w``, which may have other layers' too.
        w_scale: ``[E, F_k]`` float32, scales of 8-bit matrices for ``x w_k``.
    """
    how = how or config(x, w, sizes, a, b)
    (M, D), K, (W, R, _) = x.shape, len(w), a[0].shape
    T, C = tiles.tile_rows(x, how), tiles.chunk_size(R)
    widths = [one.shape[2] for one in w]
    visits = visits_of(sizes, jnp.minimum(factor, W - 1), T)
    N, last = -(-M // T), visits.tile.shape[0] - 1
    place = jnp.reshape(0 if first is None else first, (1,)).astype(jnp.int32)
    here = [jax.ShapeDtypeStruct((sizes.shape[0], *one.shape[1:]), one.dtype) for one in w]
    scales = [] if scale is None else [jnp.pad(scale.astype(jnp.float32), (0, N * T - M))]
    scales = [one.reshape(N, 1, T) for one in scales]
    rows, *results = (pl.BlockSpec((T, n), lambda v, tile, *_: (tile[v], 0)) for n in (D, *widths))
    w_scales = [] if w_scale is None else [one.astype(jnp.float32)[:, None] for one in w_scale]

    def runs(step: int) -> Any:
        return pl.BlockSpec(
            (1, 1, visits.meta.shape[2]),
            lambda v, *_: (jnp.minimum(v + step, last), 0, 0),
            memory_space=pltpu.SMEM,
        )

    def of_expert(shape: Sequence[int], place: Any) -> Any:
        return pl.BlockSpec((None, *shape), lambda v, tile, *rest: (place(v, *rest), 0, 0))

    semaphores = pltpu.SemaphoreType.DMA((2,)), pltpu.SMEM((1,), jnp.int32)
    of_visits = visits.meta, visits.meta, visits.local
    static = {"K": K, "C": C, "R": R, "columns": how.columns}
    made = pl.pallas_call(
        functools.partial(_kernel, **static, scaled=scale is not None, eight=w_scale is not None),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(visits.total,),
            in_specs=[
                runs(0),
                runs(1),
                pl.BlockSpec((1, 1, T), lambda v, *_: (v, 0, 0)),
                *(pl.BlockSpec((1, 1, T), lambda v, tile, *_: (tile[v], 0, 0)) for _ in scales),
                rows,
                *(of_expert(one.shape[1:], lambda v, at, first: at[v] + first[0]) for one in w),
                *(of_expert((1, one.shape[2]), lambda v, at, _: at[v]) for one in w_scales),
                *[pl.BlockSpec(memory_space=pl.ANY)] * (2 * K),
            ],
            out_specs=results,
            scratch_shapes=[*_scratch(x, a, b, how), *semaphores],
        ),
        out_shape=[jax.ShapeDtypeStruct((M, n), x.dtype) for n in widths],
        compiler_params=tiles.PARAMS,
        cost_estimate=tiles.estimate(cost.packed_matmul(x, here, a, b)),
        interpret=interpret,
        name="packed_matmul",
    )(visits.tile, visits.expert, place, *of_visits, *scales, x, *w, *w_scales, *a, *b)
    return tuple(made)
