"""TPU kernels of attention within packed rows, with scores in VMEM only.

Running maxima and sums as in FlashAttention, arXiv 2205.14135, Algorithm 1.

Axes: B rows, K kv heads, G query heads of each, N = K G, T tokens, H width of queries and keys, V
of values, Q queries and S keys of a block.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import tuning
from pallas_kernels.naturals import div
from pallas_kernels.packed_attention.segments import (
    key_of,
    meeting,
    pairs,
    require_one_dtype,
    segments,
    visits,
)
from pallas_kernels.partial import MASKED
from pallas_kernels.products import dot

LANES = 128
VMEM_LIMIT = 56 << 20  # of 64 MiB per core on a TPU7x, the smallest
LONGEST = 1 << 17  # the table of visits of a row this long takes 256 KiB of 1 MiB of SMEM
WIDEST = 256  # with blocks of 512 everything is below 16 MiB then


class Config(NamedTuple):
    """Sizes."""

    block: int = 512  # maximum queries and keys of one matmul; a power of two times 128


def config(op: str, q: jax.Array, v: jax.Array, window: int | None) -> Config:
    """Returns the sizes for ``packed_attention`` or its ``backward``: measured, or the rule."""
    return tuning.chosen(op, "tpu", key_of(q, v, window), Config())


def require(q: jax.Array, k: jax.Array, v: jax.Array, *rest: Any) -> None:
    """Raises ``NotImplementedError`` with the reason if these arrays cannot be served."""
    require_one_dtype(q, k, v)
    if wrong := [n for n in (q.shape[-1], v.shape[-1]) if n % 8 or n > WIDEST]:
        raise NotImplementedError(
            f"heads are {wrong[0]} wide; multiples of 8 up to {WIDEST} are served"
        )
    if q.shape[3] > LONGEST:
        raise NotImplementedError(f"rows have {q.shape[3]} tokens; up to {LONGEST} are served")


class _Blocks:
    """Division of T tokens into blocks; long rows are padded to whole blocks, so that their table
    of visits is small.

    Attributes:
        size: tokens of a block.
        count: blocks of a row, padding included.
    """

    def __init__(self, T: int, config: Config):
        tiles, most = -(-T // LANES), config.block // LANES
        if tiles > 16 * most:
            tiles = -(-tiles // most) * most
        self.size = LANES * max(n for n in range(1, most + 1) if tiles % n == 0 or n == 1)
        self.count, self.padding = tiles * LANES // self.size, tiles * LANES - T

    def padded(self, x: jax.Array, axis: int, fill: int = 0) -> jax.Array:
        pads = [(0, 0)] * x.ndim
        pads[axis] = (0, self.padding)
        return jnp.pad(x, pads, constant_values=fill) if self.padding else x


def _segments(
    blocks: _Blocks, of: tuple[jax.Array, ...], window: int | None
) -> tuple[jax.Array, jax.Array]:
    """Returns what the mask depends on, ``[B, 2 or 3, T]``, and which blocks meet, ``[B, blocks,
    blocks]``.
    """
    # Padding attends to itself.
    fills = -1, -1, 0
    of = tuple(blocks.padded(x.astype(jnp.int32), 1, fill) for x, fill in zip(of, fills))
    return jnp.stack(of, axis=1), meeting(of, window, blocks.size, blocks.size)


def _column(row: jax.Array) -> jax.Array:
    """Transposes ``[1, Q]`` to ``[Q, 1]``; in memory columns would be padded to 128 lanes."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T[:, :1]


def _row(column: jax.Array) -> jax.Array:
    """Transposes ``[Q, 1]`` to ``[1, Q]``."""
    return jnp.broadcast_to(column, (column.shape[0], LANES)).T[:1]


def _visible(
    of_q: Any, of_k: Any, i: jax.Array, j: jax.Array, axis: int, window: int | None
) -> jax.Array:
    """Returns the mask of keys of block j for each query of block i; queries are along ``axis``."""
    n, size = of_q.shape[1:]
    turn = (_column, lambda row: row) if axis == 0 else (lambda row: row, _column)
    own_q, parent_q, *position_q = (turn[0](of_q[0, at : at + 1]) for at in range(n))
    own_k, *position_k = (turn[1](of_k[0, at : at + 1]) for at in range(0, n, 2))
    query, key = (
        jax.lax.broadcasted_iota(jnp.int32, (size, size), one) for one in (axis, 1 - axis)
    )
    visible = ((own_q == own_k) | (parent_q == own_k)) & (i * size + query >= j * size + key)
    if window is not None:
        visible &= position_q[0] - position_k[0] < window
    return visible


class _Visit:
    """A program's place in the table of visits.

    Attributes:
        block: the program's own block.
        other: block that it visits.
        valid: False after the block's last visit.
        last: True at the last visit.
    """

    def __init__(self, table: Any, counts: Any, blocks: int, t: jax.Array):
        self.block = pl.program_id(2)
        row = pl.program_id(0) * blocks + self.block
        self.other = table[row * blocks + t]
        self.valid, self.last = t < counts[row], t == counts[row] - 1


def _forward_kernel(
    table, counts, of_q, of_k, q, k, v, out, lse, top, total, acc, *, scale, window, blocks
) -> None:
    t = pl.program_id(3)
    visit = _Visit(table, counts, blocks, t)

    @pl.when(t == 0)
    def _first() -> None:
        top[...] = jnp.full(top.shape, MASKED, jnp.float32)
        total[...] = jnp.zeros(total.shape, jnp.float32)
        acc[...] = jnp.zeros(acc.shape, jnp.float32)

    @pl.when(visit.valid)
    def _block() -> None:
        visible = _visible(of_q, of_k, visit.block, visit.other, 0, window)
        s = jnp.where(visible, dot(q[0, 0], k[0, 0], (1, 1)) * scale, MASKED)
        old = top[...]
        new = jnp.maximum(old, jnp.max(s, axis=1, keepdims=True))
        # A select, because the maximum of a query without any visible key so far is the masked
        # score, whose weight would be 1.
        p, shrunk = jnp.where(visible, jnp.exp(s - new[:, :1]), 0.0), jnp.exp(old - new)
        top[...] = new
        total[...] = shrunk * total[...] + jnp.sum(p, axis=1, keepdims=True)
        acc[...] = shrunk[:, :1] * acc[...] + dot(p.astype(v.dtype), v[0, 0], (1, 0))

    @pl.when(visit.last)
    def _last() -> None:
        # Every query attends to itself, so no sum is 0.
        out[0, 0] = (acc[...] / total[:, :1]).astype(out.dtype)
        lse[0, 0] = _row((top[...] + jnp.log(total[...]))[:, :1])


def _queries_kernel(
    table, counts, of_q, of_k, q, k, v, g, lse, along, dq, acc, *, scale, window, blocks
) -> None:
    t = pl.program_id(3)
    visit = _Visit(table, counts, blocks, t)

    @pl.when(t == 0)
    def _first() -> None:
        acc[...] = jnp.zeros(acc.shape, jnp.float32)

    @pl.when(visit.valid)
    def _block() -> None:
        visible = _visible(of_q, of_k, visit.block, visit.other, 0, window)
        p = jnp.where(
            visible, jnp.exp(dot(q[0, 0], k[0, 0], (1, 1)) * scale - _column(lse[0, 0])), 0.0
        )
        ds = jnp.where(
            visible, p * (dot(g[0, 0], v[0, 0], (1, 1)) - _column(along[0, 0])) * scale, 0.0
        )
        acc[...] += dot(ds.astype(k.dtype), k[0, 0], (1, 0))

    @pl.when(visit.last)
    def _last() -> None:
        dq[0, 0] = acc[...].astype(dq.dtype)


def _keys_kernel(
    table,
    counts,
    of_q,
    of_k,
    q,
    k,
    v,
    g,
    lse,
    along,
    dk,
    dv,
    dk_acc,
    dv_acc,
    *,
    scale,
    window,
    blocks,
    heads,
) -> None:
    head, t = pl.program_id(3), pl.program_id(4)
    visit = _Visit(table, counts, blocks, t)

    @pl.when((head == 0) & (t == 0))
    def _first() -> None:
        dk_acc[...] = jnp.zeros(dk_acc.shape, jnp.float32)
        dv_acc[...] = jnp.zeros(dv_acc.shape, jnp.float32)

    @pl.when(visit.valid)
    def _block() -> None:
        visible = _visible(of_q, of_k, visit.other, visit.block, 1, window)  # [S, Q]
        p = jnp.where(visible, jnp.exp(dot(k[0, 0], q[0, 0], (1, 1)) * scale - lse[0, 0]), 0.0)
        ds = jnp.where(visible, p * (dot(v[0, 0], g[0, 0], (1, 1)) - along[0, 0]) * scale, 0.0)
        dv_acc[...] += dot(p.astype(g.dtype), g[0, 0], (1, 0))
        dk_acc[...] += dot(ds.astype(q.dtype), q[0, 0], (1, 0))

    @pl.when((head == heads - 1) & visit.last)
    def _last() -> None:
        dk[0, 0], dv[0, 0] = dk_acc[...].astype(dk.dtype), dv_acc[...].astype(dv.dtype)


def _heads(blocks: _Blocks, x: jax.Array) -> jax.Array:
    return blocks.padded(x.reshape(x.shape[0], -1, *x.shape[3:]), 2)


def _rows(blocks: _Blocks, x: jax.Array) -> jax.Array:
    return blocks.padded(x.reshape(x.shape[0], -1, 1, x.shape[3]), 3)


def _call(
    kernel: Any,
    grid: tuple[int, ...],
    flops: int,
    meet: jax.Array,
    args: tuple[jax.Array, ...],
    interpret: Any,
    name: str,
    out_shape: list[Any],
    **how: Any,
) -> Any:
    """Calls a kernel; the last axis of its grid is the visits of the block with most of them."""
    table, counts = visits(meet)
    nbytes = sum(x.size * x.dtype.itemsize for x in (*args, *out_shape))
    return pl.pallas_call(
        functools.partial(kernel, blocks=meet.shape[1]),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2, grid=(*grid, jnp.max(counts)), **how
        ),
        out_shape=out_shape,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",) * 3 + ("arbitrary",) * (len(grid) - 2),
            vmem_limit_bytes=VMEM_LIMIT,
        ),
        cost_estimate=pl.CostEstimate(
            flops=flops, bytes_accessed=nbytes, transcendentals=flops // 256
        ),
        interpret=interpret,
        name=name,
    )(table.reshape(-1), counts.reshape(-1), *args)


def _visited(blocks: _Blocks, b: Any, i: Any, t: Any, table: Any) -> Any:
    """Returns the block that the program visits; after the last visit it stays, so that nothing
    more is fetched.
    """
    return table[(b * blocks.count + i) * blocks.count + t]


def _specs(blocks: _Blocks, n: int, G: int, H: int, V: int) -> tuple[list[Any], Any, Any]:
    """Returns the block specs of the n rows of segments, q, k and v for a grid of (row, head,
    queries, visit).
    """
    size, at = blocks.size, functools.partial(_visited, blocks)
    metas = [
        pl.BlockSpec((1, n, size), lambda b, h, i, t, *_: (b, 0, i)),
        pl.BlockSpec((1, n, size), lambda b, h, i, t, table, _: (b, 0, at(b, i, t, table))),
    ]
    wide = [
        pl.BlockSpec(
            (1, 1, size, n), lambda b, h, i, t, table, _: (b, div(h, G), at(b, i, t, table), 0)
        )
        for n in (H, V)
    ]
    of_queries = lambda n: pl.BlockSpec((1, 1, size, n), lambda b, h, i, t, *_: (b, h, i, 0))  # noqa: E731
    return (
        [*metas, of_queries(H), *wide],
        of_queries,
        pl.BlockSpec((1, 1, 1, size), lambda b, h, i, t, *_: (b, h, 0, i)),
    )


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    own: jax.Array,
    parent: jax.Array,
    position: jax.Array | None = None,
    *,
    scale: float,
    window: int | None = None,
    how: Config | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Returns ``[B, K, G, T, V]`` like ``q``, and each query's log of the sum of weights ``[B, K,
    G, T]``.

    Args:
        q: ``[B, K, G, T, H]``.
        k, v: ``[B, K, T, H]`` and ``[B, K, T, V]``.
        own, parent: ``[B, T]`` int32, at least 0: segments that each token attends to.
        position: ``[B, T]`` int32, needed with a window: how many tokens precede each token in its
            segment and its parent.
        window: a token attends to keys fewer positions before it; None for all.
    """
    (B, K, G, T, H), V = q.shape, v.shape[3]
    blocks = _Blocks(T, how or config("packed_attention", q, v, window))
    of, meet = _segments(blocks, segments(own, parent, position, window), window)
    specs, of_queries, of_numbers = _specs(blocks, of.shape[1], G, H, V)
    N, S = K * G, blocks.size
    args = (of, of, _heads(blocks, q), blocks.padded(k, 2), blocks.padded(v, 2))
    full = blocks.count * S
    shapes = ((B, N, full, V), q.dtype), ((B, N, 1, full), jnp.float32)
    out, lse = _call(
        functools.partial(_forward_kernel, scale=scale, window=window),
        (B, N, blocks.count),
        2 * B * N * pairs(full, window) * (H + V),
        meet,
        args,
        interpret,
        "packed_attention",
        in_specs=specs,
        out_specs=[of_queries(V), of_numbers],
        out_shape=[jax.ShapeDtypeStruct(*shape) for shape in shapes],
        scratch_shapes=[pltpu.VMEM((S, n), jnp.float32) for n in (LANES, LANES, V)],
    )
    return out[:, :, :T].reshape(B, K, G, T, V), lse[:, :, 0, :T].reshape(B, K, G, T)


# One kernel is for queries, one for keys and values (section B.4), whose scores are transposed so
# that per-query numbers are rows. Blocks above the diagonal or of unrelated segments are skipped.
def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    own: jax.Array,
    parent: jax.Array,
    position: jax.Array | None,
    out: jax.Array,
    lse: jax.Array,
    g: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    how: Config | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the gradients of q, k and v; ``g`` is that of ``out``, a result of ``forward``."""
    (B, K, G, T, H), V = q.shape, v.shape[3]
    blocks = _Blocks(T, how or config("packed_attention backward", q, v, window))
    N, S, full = K * G, blocks.size, (T + blocks.padding)
    flops = 2 * B * N * pairs(full, window)
    along = jnp.sum(g.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    of, meet = _segments(blocks, segments(own, parent, position, window), window)
    specs, of_queries, of_numbers = _specs(blocks, of.shape[1], G, H, V)
    args = (of, of, _heads(blocks, q), blocks.padded(k, 2), blocks.padded(v, 2))
    args += (_heads(blocks, g.astype(q.dtype)), _rows(blocks, lse), _rows(blocks, along))
    vmem = lambda n: pltpu.VMEM((S, n), jnp.float32)  # noqa: E731
    [dq] = _call(
        functools.partial(_queries_kernel, scale=scale, window=window),
        (B, N, blocks.count),
        flops * (2 * H + V),
        meet,
        args,
        interpret,
        "packed_attention_queries",
        in_specs=[*specs, of_queries(V), of_numbers, of_numbers],
        out_specs=[of_queries(H)],
        out_shape=[jax.ShapeDtypeStruct((B, N, full, H), q.dtype)],
        scratch_shapes=[vmem(H)],
    )
    at = functools.partial(_visited, blocks)
    of_q = lambda w: pl.BlockSpec(  # noqa: E731
        (1, 1, S, w), lambda b, n, j, g, t, table, _: (b, n * G + g, at(b, j, t, table), 0)
    )
    of_k = lambda w: pl.BlockSpec((1, 1, S, w), lambda b, n, j, *_: (b, n, j, 0))  # noqa: E731
    row = pl.BlockSpec(
        (1, 1, 1, S), lambda b, n, j, g, t, table, _: (b, n * G + g, 0, at(b, j, t, table))
    )
    meta = (1, of.shape[1], S)
    dk, dv = _call(
        functools.partial(_keys_kernel, scale=scale, window=window, heads=G),
        (B, K, blocks.count, G),
        2 * flops * (H + V),
        meet.swapaxes(1, 2),
        args,
        interpret,
        "packed_attention_keys",
        in_specs=[
            pl.BlockSpec(meta, lambda b, n, j, g, t, table, _: (b, 0, at(b, j, t, table))),
            pl.BlockSpec(meta, lambda b, n, j, *_: (b, 0, j)),
            *(of_q(H), of_k(H), of_k(V), of_q(V), row, row),
        ],
        out_specs=[of_k(H), of_k(V)],
        out_shape=[jax.ShapeDtypeStruct((B, K, full, n), x.dtype) for n, x in ((H, k), (V, v))],
        scratch_shapes=[vmem(H), vmem(V)],
    )
    return dq[:, :, :T].reshape(q.shape), dk[:, :, :T], dv[:, :, :T]
