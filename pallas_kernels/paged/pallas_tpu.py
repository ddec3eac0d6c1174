"""TPU kernel of attention to a paged cache: each row iterates over its own pages, fetched in place.

Axes: L layers, U pages, B rows, D table entries, K kv heads, M queries of one, X width in the pool,
V of values, S positions of a chunk, N slots.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import tuning
from pallas_kernels.naturals import div, rem
from pallas_kernels.paged import PAGE, RUN, RUN_PAGES, Rows, key_of, op_of, require_one_dtype
from pallas_kernels.partial import MASKED, Partial
from pallas_kernels.products import dot

LANES = 128
SUBLANES = 8
VMEM_LIMIT = 56 << 20  # of 64 MiB per core on a TPU7x, the smallest
ROOM = 54 << 20
# Scalars of the stream of chunks.
ROW, CHUNK, NEXT, STARTED, TAKEN, ENTERED = range(6)


class Config(NamedTuple):
    """Sizes."""

    runs: int = 8  # maximum runs of a chunk; a power of two
    chunk_bytes: int = 1 << 20  # maximum bytes of a chunk, unless one run is more
    slots: int = 4  # chunks in VMEM: one being read, the others in transfer
    rows: int = 256  # maximum queries of one matmul
    # parts that rows are split into if their number divides: v4 and v5p have two cores that share a
    # device's grid
    parts: int = 2


def sized(queries: Sequence[jax.Array], pools: Sequence[jax.Array]) -> Config:
    """Returns measured sizes, or the rule's."""
    return tuning.chosen(op_of(queries), "tpu", key_of(queries, pools), Config())


class _Sizes(NamedTuple):
    """Runs of a chunk, heads and queries of one matmul, and queries of a head with padding."""

    runs: int
    heads: int
    rows: int
    M: int


def _sizes(queries: Sequence[jax.Array], pools: Sequence[jax.Array], config: Config) -> _Sizes:
    K, M = queries[0].shape[1:3]
    M = -(-M // SUBLANES) * SUBLANES
    run_bytes = sum(K * RUN * pool.shape[-1] * pool.dtype.itemsize for pool in pools)
    runs = config.runs
    while runs > 1 and runs * run_bytes > config.chunk_bytes:
        runs //= 2
    rows = max(
        n for n in range(SUBLANES, max(min(M, config.rows), SUBLANES) + 1, SUBLANES) if M % n == 0
    )
    heads = 1
    if rows == M:
        heads = max(
            n for n in range(1, K + 1) if K % n == 0 and (n == 1 or n * rows <= config.rows)
        )
    return _Sizes(runs, heads, rows, M)


def require(
    queries: Sequence[jax.Array], pools: Sequence[jax.Array], value: int, width: int
) -> None:
    """Raises ``NotImplementedError`` if ``attend`` cannot serve these arrays."""
    require_one_dtype(queries, pools)
    if wrong := [pool.shape[-1] for pool in pools if pool.shape[-1] % LANES]:
        raise NotImplementedError(f"a pool's width {wrong[0]} is not a multiple of {LANES}")
    config = sized(queries, pools)
    sizes = _sizes(queries, pools, config)

    def nbytes(rows: int, columns: int, dtype: Any) -> int:
        rows, columns = -(-rows // SUBLANES) * SUBLANES, -(-columns // LANES) * LANES
        return rows * columns * jnp.dtype(dtype).itemsize

    K, S, M = queries[0].shape[1], sizes.runs * RUN, sizes.M
    stored = config.slots * sum(K * nbytes(S, pool.shape[-1], pool.dtype) for pool in pools)
    stored += 2 * K * sum(nbytes(M, q.shape[-1], q.dtype) for q in queries)
    stored += 2 * K * (nbytes(M, width, jnp.float32) + nbytes(M, LANES, jnp.float32))
    stored += 2 * nbytes(2, K * M, jnp.float32)
    values = nbytes(LANES, K * M, jnp.float32) + sizes.heads * (
        3 * nbytes(sizes.rows, S, jnp.float32) + 2 * nbytes(sizes.rows, width, jnp.float32)
    )
    if stored + values > ROOM:
        raise NotImplementedError(
            f"queries and chunks need {(stored + values) >> 20} MiB of a core's memory, and"
            f" {ROOM >> 20} are there"
        )


def _runs(tokens: jax.Array) -> jax.Array:
    return div(tokens + RUN - 1, RUN)


class _Positions:
    """Positions of each row's tokens."""

    def __init__(self, prefix: Any, own: Any, first: Any, runs: int):
        self.prefix, self.own, self.first, self.runs = prefix, own, first, runs

    def begin(self, b: jax.Array) -> jax.Array:
        """Returns the position at which the row's own tokens begin."""
        return _runs(self.prefix[b]) * RUN

    def chunks(self, b: jax.Array) -> jax.Array:
        last = _runs(self.prefix[b]) + _runs(self.own[b])
        return div(jnp.maximum(last - self.first[b], 0) + self.runs - 1, self.runs)

    def position(self, b: jax.Array, chunk: jax.Array) -> jax.Array:
        """Returns the first position of a chunk."""
        return (self.first[b] + chunk * self.runs) * RUN

    def visible(self, b: jax.Array, position: jax.Array) -> jax.Array:
        """Returns which positions hold a token."""
        begin = self.begin(b)
        return (position < self.prefix[b]) | (
            (position >= begin) & (position < begin + self.own[b])
        )

    def filled(self, b: jax.Array, position: jax.Array, count: int) -> jax.Array:
        """Returns True if ``count`` positions from this one on, which are whole runs, all do."""
        begin = self.begin(b)
        return (position + count <= self.prefix[b]) | (
            (position >= begin) & (position + count <= begin + self.own[b])
        )


class _Stream:
    """The chunks of rows up to ``stop`` in sequence: one is read while the next ones are in
    transfer.

    Args:
        pools: ``[L, U, K, PAGE, X]``, and the slots ``[N, K, S, X]`` of each.
        tables: ``[2, 1, D]`` of the row whose chunks are being started and of the next one.
    """

    def __init__(
        self,
        rows: _Positions,
        stop: jax.Array,
        layer: Any,
        table: Any,
        pools: Any,
        tables: Any,
        state: Any,
        sem: Any,
        table_sem: Any,
    ):
        self.rows, self.stop, self.layer, self.table, self.pools = rows, stop, layer, table, pools
        self.tables, self.state, self.sem, self.table_sem = tables, state, sem, table_sem
        self.slots = pools[0][1].shape[0]

    def begin(self, start: jax.Array) -> None:
        for at in (STARTED, TAKEN, ENTERED):
            self.state[at] = 0
        row = self._following(start)
        self.state[ROW] = row

        @pl.when(row < self.stop)
        def _some() -> None:
            self._table(row, 0).start()
            self._enter(row)
            jax.lax.fori_loop(0, self.slots - 1, lambda i, _: self._start(), None)

    def take(self, b: jax.Array, chunk: jax.Array) -> jax.Array:
        """Waits for the next chunk, which is this one, and starts another; returns its slot."""
        slot = rem(self.state[TAKEN], self.slots)
        self._each_page(b, chunk, slot, "wait")
        self._start()
        self.state[TAKEN] = self.state[TAKEN] + 1
        return slot

    def _following(self, b: jax.Array) -> jax.Array:
        """Returns the first row from this one on that has tokens to read."""
        last = self.stop - 1
        empty = lambda b: (b < self.stop) & (self.rows.chunks(jnp.minimum(b, last)) == 0)  # noqa: E731
        return jax.lax.while_loop(empty, lambda b: b + 1, b)

    # One row's at a time: as prefetched scalars the tables of 128 rows of 65,536 tokens would fill
    # all of a core's 1 MiB.
    def _table(self, b: jax.Array, slot: Any) -> Any:
        return pltpu.make_async_copy(
            self.table.at[b], self.tables.at[slot], self.table_sem.at[slot]
        )

    def _enter(self, row: jax.Array) -> None:
        """Starts chunks of this row: waits for its table, and fetches the following row's."""
        slot = rem(self.state[ENTERED], 2)
        self._table(row, slot).wait()
        following = self._following(row + 1)
        self.state[ROW], self.state[CHUNK], self.state[NEXT] = row, 0, following
        self.state[ENTERED] = self.state[ENTERED] + 1

        @pl.when(following < self.stop)
        def _some() -> None:
            self._table(following, 1 - slot).start()

    def _start(self) -> None:
        """Starts the transfer of the next chunk, if there is one."""
        row = self.state[ROW]

        @pl.when(row < self.stop)
        def _some() -> None:
            chunk, following = self.state[CHUNK], self.state[NEXT]
            self._each_page(row, chunk, rem(self.state[STARTED], self.slots), "start")
            self.state[STARTED] = self.state[STARTED] + 1
            more = chunk + 1 < self.rows.chunks(row)

            @pl.when(more)
            def _same_row() -> None:
                self.state[CHUNK] = chunk + 1

            @pl.when(~more & (following < self.stop))
            def _next_row() -> None:
                self._enter(following)

            @pl.when(~more & (following >= self.stop))
            def _end() -> None:
                self.state[ROW] = self.stop

    def _each_page(self, b: jax.Array, chunk: jax.Array, slot: jax.Array, what: str) -> None:
        position, table = self.rows.position(b, chunk), rem(self.state[ENTERED] - 1, 2)
        pages = self.rows.runs * RUN_PAGES
        full = self.rows.filled(b, position, pages * PAGE)

        def one(j: Any) -> None:
            # Waiting only needs the number of bytes.
            page = self.tables[table, 0, div(position, PAGE) + j] if what == "start" else 0
            for n, (pool, slots) in enumerate(self.pools):
                to = slots.at[slot, :, pl.ds(pl.multiple_of(j * PAGE, PAGE), PAGE)]
                getattr(
                    pltpu.make_async_copy(pool.at[self.layer[0], page], to, self.sem.at[slot, n]),
                    what,
                )()

        @pl.when(full)
        def _all() -> None:
            if what == "start":
                for j in range(pages):
                    one(j)
            else:  # all at once
                for n, (_pool, slots) in enumerate(self.pools):
                    pltpu.make_async_copy(
                        slots.at[slot], slots.at[slot], self.sem.at[slot, n]
                    ).wait()

        @pl.when(~full)
        def _some() -> None:
            # Entries after a part's pages may be out of range.
            jax.lax.fori_loop(
                0,
                pages,
                lambda j, _: pl.when(self.rows.visible(b, position + j * PAGE))(lambda: one(j)),
                None,
            )


def _clean(
    rows: _Positions, b: jax.Array, position: jax.Array, values: Any, slot: jax.Array
) -> None:
    """Zeroes a slot's values ``[K, S, X]`` where no token is."""
    S = values.shape[2]

    @pl.when(~rows.filled(b, position, S))
    def _some() -> None:
        def one(j: jax.Array, _: None) -> None:
            at = pl.ds(pl.multiple_of(j * PAGE, PAGE), PAGE)
            here = position + j * PAGE + jax.lax.broadcasted_iota(jnp.int32, (1, PAGE, 1), 1)
            old = values[slot, :, at].astype(jnp.float32)
            values[slot, :, at] = jnp.where(rows.visible(b, here), old, 0.0).astype(values.dtype)

        jax.lax.fori_loop(0, S // PAGE, one, None)


# A program is a row with all its queries. Its tokens come in chunks of a few runs, whose pages are
# copied side by side into one of several VMEM slots while earlier chunks are computed. Scores are
# sums over pools of keys; one pool has the values, perhaps a latent that is both.
def _kernel(
    layer, prefix, own, first, *refs, value: int, scale: float, keys: int, pools: int, sizes: _Sizes
) -> None:
    queries, table, refs = refs[:keys], refs[keys], refs[keys + 1 :]
    of_pools, (stats, out), slots, refs = (
        refs[:pools],
        refs[pools : pools + 2],
        refs[pools + 2 : 2 * pools + 2],
        refs[2 * pools + 2 :],
    )
    tables, state, top, total, sem, table_sem = refs
    each = pl.num_programs(1)
    b = pl.program_id(0) * each + pl.program_id(1)
    rows = _Positions(prefix, own, first, sizes.runs)
    stream = _Stream(
        rows,
        (pl.program_id(0) + 1) * each,
        layer,
        table,
        [*zip(of_pools, slots)],
        tables,
        state,
        sem,
        table_sem,
    )

    @pl.when(pl.program_id(1) == 0)
    def _first() -> None:
        stream.begin(b)

    top[...] = jnp.full(top.shape, MASKED, jnp.float32)
    total[...] = jnp.zeros(total.shape, jnp.float32)
    out[...] = jnp.zeros(out.shape, jnp.float32)
    (K, M, _), S, V = top.shape, slots[0].shape[2], out.shape[3]

    def of_chunk(chunk: jax.Array, _: None) -> None:
        slot, position = stream.take(b, chunk), rows.position(b, chunk)
        _clean(rows, b, position, slots[value], slot)
        visible = rows.visible(b, position + jax.lax.broadcasted_iota(jnp.int32, (1, 1, S), 2))

        def of_block(i: jax.Array, _: None) -> None:
            blocks = M // sizes.rows
            heads = pl.ds(div(i, blocks) * sizes.heads, sizes.heads)
            current = pl.ds(pl.multiple_of(rem(i, blocks) * sizes.rows, sizes.rows), sizes.rows)
            s = jnp.zeros((), jnp.float32)
            for q, key in zip(queries, slots):
                s = s + dot(q[0, heads, current], key[slot, heads, :, : q.shape[3]], (2, 2), 1)
            # The maximum so far is finite, so the weight of -inf is 0.
            s = jnp.where(visible, s * scale, -jnp.inf)
            old = top[heads, current]
            new = jnp.maximum(old, jnp.max(s, axis=2, keepdims=True))
            p, shrunk = jnp.exp(s - new[..., :1]), jnp.exp(old - new)
            top[heads, current] = new
            total[heads, current] = shrunk * total[heads, current] + jnp.sum(
                p, axis=2, keepdims=True
            )
            v = slots[value][slot, heads, :, :V]
            out[0, heads, current] = shrunk[..., :1] * out[0, heads, current] + dot(
                p.astype(v.dtype), v, (2, 1), 1
            )

        jax.lax.fori_loop(0, K // sizes.heads * (M // sizes.rows), of_block, None)

    jax.lax.fori_loop(0, rows.chunks(b), of_chunk, None)
    # Per-query numbers as columns would be padded to 128 lanes in the result, so they are stored as
    # rows.
    for n, column in enumerate((top, total)):
        stats[0, n : n + 1] = column[...].reshape(K * M, LANES).T[:1]


@functools.partial(jax.jit, static_argnames=("value", "width", "scale", "how", "interpret"))
def attend(
    queries: Sequence[jax.Array],
    pools: Sequence[jax.Array],
    value: int,
    width: int,
    rows: Rows,
    scale: float,
    how: Config | None = None,
    interpret: Any = False,
) -> Partial:
    """Attends from each row's queries to its runs from ``first`` on; ``[B, K, M, 1]`` twice and
    ``[B, K, M, width]``.

    Args:
        queries: ``[B, K, M, H_i]`` for the keys of the i-th pool; scores are the sum over them.
        pools: ``[L, U, K, PAGE, X_i]``, X_i at least H_i.
        value: index of the pool of values, of which the first ``width`` dimensions are summed.
    """
    how = how or sized(queries, pools)
    layer, table, prefix, own, first = rows
    (B, K, M, _), D = queries[0].shape, table.shape[1]
    sizes = _sizes(queries, pools, how)
    queries = [jnp.pad(q, ((0, 0), (0, 0), (0, sizes.M - M), (0, 0))) for q in queries]
    parts = how.parts if B % how.parts == 0 else 1
    each, S = B // parts, sizes.runs * RUN

    def of_row(*shape: int) -> Any:
        return pl.BlockSpec((1, *shape), lambda p, i, *_: (p * each + i, *(0 for _ in shape)))

    if not interpret:
        # Otherwise a pool that fits VMEM is copied there whole before each call.
        pools = [pltpu.with_memory_space_constraint(pool, pltpu.HBM) for pool in pools]
    where_it_is = [pl.BlockSpec(memory_space=pl.ANY)] * (1 + len(pools))
    positions = D * PAGE  # the maximum; the actual number is data
    flops = 2 * B * K * sizes.M * positions * (sum(q.shape[3] for q in queries) + width)
    nbytes = B * K * positions * sum(pool.shape[-1] * pool.dtype.itemsize for pool in pools)
    stats, out = pl.pallas_call(
        functools.partial(
            _kernel, value=value, scale=scale, keys=len(queries), pools=len(pools), sizes=sizes
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(parts, each),
            in_specs=[*(of_row(*q.shape[1:]) for q in queries), *where_it_is],
            out_specs=[of_row(2, K * sizes.M), of_row(K, sizes.M, width)],
            scratch_shapes=[
                *(pltpu.VMEM((how.slots, K, S, pool.shape[-1]), pool.dtype) for pool in pools),
                pltpu.SMEM((2, 1, D), jnp.int32),
                pltpu.SMEM((6,), jnp.int32),
                *(pltpu.VMEM((K, sizes.M, LANES), jnp.float32),) * 2,
                pltpu.SemaphoreType.DMA((how.slots, len(pools))),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(shape, jnp.float32)
            for shape in ((B, 2, K * sizes.M), (B, K, sizes.M, width))
        ],
        # With bounds checks a page's two copies are some 90 bundles of a v5p's program, without
        # them 20, while attention to it is 40. Only pages of positions with a token are looked up.
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=VMEM_LIMIT,
            disable_bounds_checks=True,
        ),
        cost_estimate=pl.CostEstimate(
            flops=flops, bytes_accessed=nbytes, transcendentals=B * K * sizes.M * positions
        ),
        interpret=interpret,
        name="paged_attention" if len(queries) == 1 else "latent_attention",
    )(layer.reshape(1), prefix, own, first, *queries, table[:, None], *pools)
    top, total = (stats[:, n].reshape(B, K, sizes.M)[:, :, :M, None] for n in range(2))
    return Partial(top, total, out[:, :, :M])
