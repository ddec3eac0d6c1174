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
from pallas_kernels.naturals import div, rem
from pallas_kernels.packed_attention.segments import key_of, meeting
from pallas_kernels.partial import MASKED
from pallas_kernels.products import dot

LANES = 128
VMEM_LIMIT = 56 << 20  # of 64 MiB per core on a TPU7x, the smallest
WIDEST = 256  # with blocks of 512 everything is below 16 MiB then


class Config(NamedTuple):
    """Sizes."""

    block: int = 512  # maximum queries and keys of one matmul; a power of two times 128


def config(op: str, q: jax.Array, v: jax.Array) -> Config:
    """Returns the sizes for ``packed_attention`` or its ``backward``: measured, or the rule."""
    return tuning.chosen(op, "tpu", key_of(q, v), Config())


def require(q: jax.Array, k: jax.Array, v: jax.Array, *rest: Any) -> None:
    """Raises ``NotImplementedError`` with the reason if these arrays cannot be served."""
    if len({x.dtype for x in (q, k, v)}) > 1 or q.dtype not in (jnp.bfloat16, jnp.float32):
        raise NotImplementedError(
            f"queries, keys and values are {q.dtype}, {k.dtype}, {v.dtype}; all bfloat16 or all"
            " float32 are served"
        )
    if wrong := [n for n in (q.shape[-1], v.shape[-1]) if n % 8 or n > WIDEST]:
        raise NotImplementedError(
            f"heads are {wrong[0]} wide; multiples of 8 up to {WIDEST} are served"
        )


class _Blocks:
    """Division of T tokens into blocks.

    Attributes:
        size: tokens of a block.
        count: blocks of a row, padding included.
    """

    def __init__(self, T: int, config: Config):
        tiles = -(-T // LANES)
        self.size = LANES * max(
            n for n in range(1, config.block // LANES + 1) if tiles % n == 0 or n == 1
        )
        self.count, self.padding = tiles * LANES // self.size, tiles * LANES - T

    def padded(self, x: jax.Array, axis: int, fill: int = 0) -> jax.Array:
        pads = [(0, 0)] * x.ndim
        pads[axis] = (0, self.padding)
        return jnp.pad(x, pads, constant_values=fill) if self.padding else x


def _segments(
    blocks: _Blocks, own: jax.Array, parent: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns segments ``[B, 1, T]`` twice, and which blocks meet, ``[B, blocks, blocks]``."""
    # Padding attends to itself.
    own, parent = (blocks.padded(x.astype(jnp.int32), 1, fill=-1) for x in (own, parent))
    return (
        own[:, None],
        parent[:, None],
        meeting(own, parent, blocks.size, blocks.size).astype(jnp.int32),
    )


def _column(row: jax.Array) -> jax.Array:
    """Transposes ``[1, Q]`` to ``[Q, 1]``; in memory columns would be padded to 128 lanes."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T[:, :1]


def _row(column: jax.Array) -> jax.Array:
    """Transposes ``[Q, 1]`` to ``[1, Q]``."""
    return jnp.broadcast_to(column, (column.shape[0], LANES)).T[:1]


def _visible(
    own_q: jax.Array, parent_q: jax.Array, own_k: jax.Array, i: jax.Array, j: jax.Array, axis: int
) -> jax.Array:
    """Returns the mask of keys of block j for each query of block i; queries are along ``axis``."""
    size = own_q.size
    query, key = (jax.lax.broadcasted_iota(jnp.int32, (size, size), n) for n in (axis, 1 - axis))
    return ((own_q == own_k) | (parent_q == own_k)) & (i * size + query >= j * size + key)


def _forward_kernel(
    meet, own_q, parent_q, own_k, q, k, v, out, lse, top, total, acc, *, scale: float
) -> None:
    i, j = pl.program_id(2), pl.program_id(3)

    @pl.when(j == 0)
    def _first() -> None:
        top[...] = jnp.full(top.shape, MASKED, jnp.float32)
        total[...] = jnp.zeros(total.shape, jnp.float32)
        acc[...] = jnp.zeros(acc.shape, jnp.float32)

    @pl.when(meet[0, 0, j] > 0)
    def _block() -> None:
        visible = _visible(_column(own_q[0]), _column(parent_q[0]), own_k[0], i, j, 0)
        s = jnp.where(visible, dot(q[0, 0], k[0, 0], (1, 1)) * scale, MASKED)
        old = top[...]
        new = jnp.maximum(old, jnp.max(s, axis=1, keepdims=True))
        # A select, because the maximum of a query without any visible key so far is the masked
        # score, whose weight would be 1.
        p, shrunk = jnp.where(visible, jnp.exp(s - new[:, :1]), 0.0), jnp.exp(old - new)
        top[...] = new
        total[...] = shrunk * total[...] + jnp.sum(p, axis=1, keepdims=True)
        acc[...] = shrunk[:, :1] * acc[...] + dot(p.astype(v.dtype), v[0, 0], (1, 0))

    @pl.when(j == pl.num_programs(3) - 1)
    def _last() -> None:
        # Every query attends to itself, so no sum is 0.
        out[0, 0] = (acc[...] / total[:, :1]).astype(out.dtype)
        lse[0, 0] = _row((top[...] + jnp.log(total[...]))[:, :1])


def _queries_kernel(
    meet, own_q, parent_q, own_k, q, k, v, g, lse, along, dq, acc, *, scale: float
) -> None:
    i, j = pl.program_id(2), pl.program_id(3)

    @pl.when(j == 0)
    def _first() -> None:
        acc[...] = jnp.zeros(acc.shape, jnp.float32)

    @pl.when(meet[0, 0, j] > 0)
    def _block() -> None:
        visible = _visible(_column(own_q[0]), _column(parent_q[0]), own_k[0], i, j, 0)
        p = jnp.where(
            visible, jnp.exp(dot(q[0, 0], k[0, 0], (1, 1)) * scale - _column(lse[0, 0])), 0.0
        )
        ds = jnp.where(
            visible, p * (dot(g[0, 0], v[0, 0], (1, 1)) - _column(along[0, 0])) * scale, 0.0
        )
        acc[...] += dot(ds.astype(k.dtype), k[0, 0], (1, 0))

    @pl.when(j == pl.num_programs(3) - 1)
    def _last() -> None:
        dq[0, 0] = acc[...].astype(dq.dtype)


def _keys_kernel(
    meet,
    own_q,
    parent_q,
    own_k,
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
    scale: float,
    blocks: int,
) -> None:
    j, t = pl.program_id(2), pl.program_id(3)
    i = rem(t, blocks)

    @pl.when(t == 0)
    def _first() -> None:
        dk_acc[...] = jnp.zeros(dk_acc.shape, jnp.float32)
        dv_acc[...] = jnp.zeros(dv_acc.shape, jnp.float32)

    @pl.when(meet[0, 0, i] > 0)
    def _block() -> None:
        visible = _visible(own_q[0], parent_q[0], _column(own_k[0]), i, j, 1)  # [S, Q]
        p = jnp.where(visible, jnp.exp(dot(k[0, 0], q[0, 0], (1, 1)) * scale - lse[0, 0]), 0.0)
        ds = jnp.where(visible, p * (dot(v[0, 0], g[0, 0], (1, 1)) - along[0, 0]) * scale, 0.0)
        dv_acc[...] += dot(p.astype(g.dtype), g[0, 0], (1, 0))
        dk_acc[...] += dot(ds.astype(q.dtype), q[0, 0], (1, 0))

    @pl.when(t == pl.num_programs(3) - 1)
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
    args: tuple[jax.Array, ...],
    interpret: Any,
    name: str,
    **how: Any,
) -> Any:
    nbytes = sum(x.nbytes for x in args) + sum(x.size * x.dtype.itemsize for x in how["out_shape"])
    return pl.pallas_call(
        kernel,
        grid=grid,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=VMEM_LIMIT,
        ),
        cost_estimate=pl.CostEstimate(
            flops=flops, bytes_accessed=nbytes, transcendentals=flops // 256
        ),
        interpret=interpret,
        name=name,
        **how,
    )(*args)


def _specs(blocks: _Blocks, G: int, H: int, V: int) -> tuple[list[Any], Any, Any]:
    """Returns the block specs of segments, q, k and v for a grid of (row, head, queries, keys)."""
    # Blocks above the diagonal are not fetched.
    size, last = blocks.size, lambda i, j: jnp.minimum(i, j)
    metas = [
        pl.BlockSpec(
            (1, 1, blocks.count),
            lambda b, n, i, j: (b * blocks.count + i, 0, 0),
            memory_space=pltpu.SMEM,
        ),
        *(pl.BlockSpec((1, 1, size), lambda b, n, i, j: (b, 0, i)),) * 2,
        pl.BlockSpec((1, 1, size), lambda b, n, i, j: (b, 0, last(i, j))),
    ]
    wide = [
        pl.BlockSpec((1, 1, size, n), lambda b, h, i, j: (b, div(h, G), last(i, j), 0))
        for n in (H, V)
    ]
    of_queries = lambda n: pl.BlockSpec((1, 1, size, n), lambda b, h, i, j: (b, h, i, 0))  # noqa: E731
    return (
        [*metas, of_queries(H), *wide],
        of_queries,
        pl.BlockSpec((1, 1, 1, size), lambda b, h, i, j: (b, h, 0, i)),
    )


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    own: jax.Array,
    parent: jax.Array,
    *,
    scale: float,
    how: Config | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Returns ``[B, K, G, T, V]`` like ``q``, and each query's log of the sum of weights ``[B, K,
    G, T]``.

    Args:
        q: ``[B, K, G, T, H]``.
        k, v: ``[B, K, T, H]`` and ``[B, K, T, V]``.
        own, parent: ``[B, T]`` int32, at least 0: segments that each token attends to.
    """
    (B, K, G, T, H), V = q.shape, v.shape[3]
    blocks = _Blocks(T, how or config("packed_attention", q, v))
    own, parent, meet = _segments(blocks, own, parent)
    specs, of_queries, of_numbers = _specs(blocks, G, H, V)
    N, S = K * G, blocks.size
    args = (
        meet.reshape(-1, 1, blocks.count),
        own,
        parent,
        own,
        _heads(blocks, q),
        blocks.padded(k, 2),
        blocks.padded(v, 2),
    )
    full = blocks.count * S
    out, lse = _call(
        functools.partial(_forward_kernel, scale=scale),
        (B, N, blocks.count, blocks.count),
        B * N * full * full * (H + V),  # half of the pairs
        args,
        interpret,
        "packed_attention",
        in_specs=specs,
        out_specs=[of_queries(V), of_numbers],
        out_shape=[
            jax.ShapeDtypeStruct((B, N, full, V), q.dtype),
            jax.ShapeDtypeStruct((B, N, 1, full), jnp.float32),
        ],
        scratch_shapes=[
            *(pltpu.VMEM((S, LANES), jnp.float32),) * 2,
            pltpu.VMEM((S, V), jnp.float32),
        ],
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
    out: jax.Array,
    lse: jax.Array,
    g: jax.Array,
    *,
    scale: float,
    how: Config | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the gradients of q, k and v; ``g`` is that of ``out``, a result of ``forward``."""
    (B, K, G, T, H), V = q.shape, v.shape[3]
    blocks = _Blocks(T, how or config("packed_attention backward", q, v))
    N, S, full = K * G, blocks.size, (T + blocks.padding)
    along = jnp.sum(g.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    own, parent, meet = _segments(blocks, own, parent)
    specs, of_queries, of_numbers = _specs(blocks, G, H, V)
    wide = (
        own,
        parent,
        own,
        _heads(blocks, q),
        blocks.padded(k, 2),
        blocks.padded(v, 2),
        _heads(blocks, g.astype(q.dtype)),
    )
    numbers = _rows(blocks, lse), _rows(blocks, along)
    vmem = lambda n: pltpu.VMEM((S, n), jnp.float32)  # noqa: E731
    [dq] = _call(
        functools.partial(_queries_kernel, scale=scale),
        (B, N, blocks.count, blocks.count),
        B * N * full * full * (2 * H + V),
        (meet.reshape(-1, 1, blocks.count), *wide, *numbers),
        interpret,
        "packed_attention_queries",
        in_specs=[*specs, of_queries(V), of_numbers, of_numbers],
        out_specs=[of_queries(H)],
        out_shape=[jax.ShapeDtypeStruct((B, N, full, H), q.dtype)],
        scratch_shapes=[vmem(H)],
    )
    # The block of queries; blocks that attend to none of these keys are not fetched.
    at = lambda t, j: jnp.maximum(rem(t, blocks.count), j)  # noqa: E731
    head = lambda n, t: n * G + div(t, blocks.count)  # noqa: E731
    of_q = lambda w: pl.BlockSpec((1, 1, S, w), lambda b, n, j, t: (b, head(n, t), at(t, j), 0))  # noqa: E731
    of_k = lambda w: pl.BlockSpec((1, 1, S, w), lambda b, n, j, t: (b, n, j, 0))  # noqa: E731
    of_segments = pl.BlockSpec((1, 1, S), lambda b, n, j, t: (b, 0, at(t, j)))
    row = pl.BlockSpec((1, 1, 1, S), lambda b, n, j, t: (b, head(n, t), 0, at(t, j)))
    dk, dv = _call(
        functools.partial(_keys_kernel, scale=scale, blocks=blocks.count),
        (B, K, blocks.count, G * blocks.count),
        2 * B * N * full * full * (H + V),
        (meet.swapaxes(1, 2).reshape(-1, 1, blocks.count), *wide, *numbers),
        interpret,
        "packed_attention_keys",
        in_specs=[
            pl.BlockSpec(
                (1, 1, blocks.count),
                lambda b, n, j, t: (b * blocks.count + j, 0, 0),
                memory_space=pltpu.SMEM,
            ),
            *(of_segments,) * 2,
            pl.BlockSpec((1, 1, S), lambda b, n, j, t: (b, 0, j)),
            *(of_q(H), of_k(H), of_k(V), of_q(V), row, row),
        ],
        out_specs=[of_k(H), of_k(V)],
        out_shape=[jax.ShapeDtypeStruct((B, K, full, n), x.dtype) for n, x in ((H, k), (V, v))],
        scratch_shapes=[vmem(H), vmem(V)],
    )
    return dq[:, :, :T].reshape(q.shape), dk[:, :, :T], dv[:, :, :T]
