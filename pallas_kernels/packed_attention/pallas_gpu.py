"""GPU kernels of attention within packed rows: a block of queries visits the blocks of keys that it
may attend to, which are listed in advance.

Running maxima and sums as in FlashAttention, arXiv 2205.14135, Algorithm 1. One kernel of the
backward pass sums over keys, the other over the queries of their group (section B.4).

Axes: B rows, K kv heads, G query heads of each, T tokens, H width of queries and keys, V of values,
Q queries and S keys of a block, I and J blocks of them.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallas_kernels import softmax_gpu as softmax
from pallas_kernels import tuning
from pallas_kernels.packed_attention.segments import (
    key_of,
    meeting,
    pairs,
    require_one_dtype,
    segments,
    visits,
)
from pallas_kernels.products import dot
from pallas_kernels.triton import Span, columns, pieces, read, require_shared_memory, unravel, write

WIDEST = 256
# Segments beyond a row: they attend to nothing and nothing attends to them.
NO_QUERY, NO_KEY = -1, -2


class Block(NamedTuple):
    """Block sizes of one kernel, powers of two of at least 16."""

    queries: int  # this and keys: sizes of a block, Q and S
    keys: int
    warps: int
    stages: int = 3  # pipelined loads


class Config(NamedTuple):
    """Sizes of the three kernels."""

    most: int  # maximum columns of one matmul
    forward: (
        Block  # this and of_queries, of_keys: the forward pass, and the kernels of both gradients
    )
    of_queries: Block
    of_keys: Block


def config(op: str, q: jax.Array, v: jax.Array, window: int | None) -> Config:
    """Returns the sizes for ``packed_attention`` or its ``backward``: measured, or the rule."""
    return tuning.chosen(op, "cuda", key_of(q, v, window), _rule(q, v))


def _rule(q: jax.Array, v: jax.Array) -> Config:
    """Returns sizes that fit an H200 processor, according to its compiler."""
    wide = max(q.shape[-1], v.shape[-1])
    if q.dtype == jnp.float32:  # without tensor cores, operands occupy registers too
        return Config(
            32, Block(32, 32, 8, 2), Block(32, 32, 8, 2), Block(32, 32 if wide <= 128 else 16, 8, 2)
        )
    if wide > 192:
        return Config(WIDEST, Block(64, 64, 8, 2), Block(64, 32, 8, 2), Block(32, 32, 8, 2))
    if wide > 128:
        return Config(WIDEST, Block(128, 64, 8, 2), Block(64, 32, 8, 2), Block(32, 64, 8, 2))
    return Config(WIDEST, Block(128, 64, 8), Block(128, 64, 8, 2), Block(64, 128, 8, 2))


def require(q: jax.Array, k: jax.Array, v: jax.Array, *rest: Any) -> None:
    """Raises ``NotImplementedError`` with the reason if these arrays cannot be served."""
    require_one_dtype(q, k, v)
    if wrong := [n for n in (q.shape[-1], v.shape[-1]) if n > WIDEST]:
        raise NotImplementedError(f"heads are {wrong[0]} wide; up to {WIDEST} are served")
    if not (q.size and v.size):
        raise NotImplementedError("no tokens")
    if (wide := max(q.shape[-1], v.shape[-1])) > 192:
        require_shared_memory(f"blocks of heads {wide} wide")


def _visits(
    of: Sequence[jax.Array], window: int | None, how: Block, of_keys: bool
) -> tuple[jax.Array, jax.Array]:
    """Returns the blocks that each block of queries, or of keys, visits, and their number."""
    T, wider = of[0].shape[1], max(how.queries, how.keys)
    padding = ((0, 0), (0, -T % wider))
    # Beyond the row a block's ranges are as without the padding.
    of = [jnp.pad(x.astype(jnp.int32), padding, mode="edge") for x in of]
    meet = meeting(of, window, how.queries, how.keys)
    visited, size = (meet.swapaxes(1, 2), how.queries) if of_keys else (meet, how.keys)
    # If the other kind's blocks are wider, some may lie beyond the row.
    return visits(visited & (jnp.arange(visited.shape[2]) * size < T)[None, None])


class _Row:
    """One row's data that a program reads."""

    def __init__(self, of: Any, b: jax.Array, most: int, widths: tuple[int, int], zero: jax.Array):
        self.of, self.b = of, b
        self.H, self.V = (pieces(n, most, zero) for n in widths)

    def queries(self, at: Span) -> list[jax.Array]:
        return [read(one, self.b, at, beyond=NO_QUERY) for one in self.of]

    def keys(self, at: Span) -> list[jax.Array]:
        return [read(one, self.b, at, beyond=NO_KEY) for one in self.of[::2]]


def _parts(ref: Any, *index: Any) -> list[jax.Array]:
    """Returns the block in pieces; pieces are the last index."""
    *index, spans = index
    return [read(ref, *index, at) for at in spans]


def _visible(
    of_q: list[jax.Array],
    of_k: list[jax.Array],
    queries: Span,
    keys: Span,
    axis: int,
    window: int | None,
) -> jax.Array:
    """Returns the mask of keys for each query; queries are along this axis."""
    (own_q, parent_q, *position_q, at_q), (own_k, *position_k, at_k) = (
        [jax.lax.expand_dims(x, [along]) for x in (*of, span.places)]
        for of, span, along in ((of_q, queries, 1 - axis), (of_k, keys, axis))
    )
    visible = ((own_q == own_k) | (parent_q == own_k)) & (at_q >= at_k)
    if window is not None:
        visible &= position_q[0] - position_k[0] < window
    return visible


def _packed_attention(
    visits,
    counts,
    of,
    q,
    k,
    v,
    out,
    lse,
    *,
    scale: float,
    window: int | None,
    most: int,
    how: Block,
) -> None:
    (B, K, G, T, H), V = q.shape, v.shape[3]
    i, b, h, g = unravel(pl.program_id(0), B, K, G)
    i = pl.cdiv(T, how.queries) - 1 - i  # the last blocks have most keys, so they start first
    row, current = _Row(of, b, most, (H, V), 0 * i), columns(i, how.queries, T)
    of_q, q_parts = row.queries(current), _parts(q, b, h, g, current, row.H)

    def step(n: jax.Array, so_far: softmax.Running) -> softmax.Running:
        at = columns(visits[b, i, n], how.keys, T)
        s = softmax.scores(q_parts, _parts(k, b, h, at, row.H)) * scale
        return softmax.meet(
            so_far,
            s,
            _visible(of_q, row.keys(at), current, at, 0, window),
            _parts(v, b, h, at, row.V),
        )

    made = jax.lax.fori_loop(0, counts[b, i], step, softmax.begin(how.queries, row.V))
    write(lse, made.top + jnp.log(made.total), b, h, g, current)
    for one, at in zip(made.values, row.V):
        # Every query attends to itself, so no sum is 0.
        write(out, one / made.total[:, None], b, h, g, current, at)


def _packed_attention_queries(
    visits,
    counts,
    of,
    q,
    k,
    v,
    g_out,
    lse,
    along,
    dq,
    *,
    scale: float,
    window: int | None,
    most: int,
    how: Block,
) -> None:
    (B, K, G, T, H), V = q.shape, v.shape[3]
    i, b, h, g = unravel(pl.program_id(0), B, K, G)
    i = pl.cdiv(T, how.queries) - 1 - i
    row, current = _Row(of, b, most, (H, V), 0 * i), columns(i, how.queries, T)
    of_q, q_parts, g_parts = (
        row.queries(current),
        _parts(q, b, h, g, current, row.H),
        _parts(g_out, b, h, g, current, row.V),
    )
    lse, along = read(lse, b, h, g, current)[:, None], read(along, b, h, g, current)[:, None]

    def step(n: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        at = columns(visits[b, i, n], how.keys, T)
        visible = _visible(of_q, row.keys(at), current, at, 0, window)
        k_parts = _parts(k, b, h, at, row.H)
        p = jnp.where(visible, jnp.exp(softmax.scores(q_parts, k_parts) * scale - lse), 0.0)
        ds = jnp.where(
            visible, p * (softmax.scores(g_parts, _parts(v, b, h, at, row.V)) - along) * scale, 0.0
        ).astype(k.dtype)
        return tuple(total + dot(ds, one, (1, 0)) for total, one in zip(sums, k_parts))

    zeros = tuple(jnp.zeros((how.queries, at.at.size), jnp.float32) for at in row.H)
    for one, at in zip(jax.lax.fori_loop(0, counts[b, i], step, zeros), row.H):
        write(dq, one, b, h, g, current, at)


def _packed_attention_keys(
    visits,
    counts,
    of,
    q,
    k,
    v,
    g_out,
    lse,
    along,
    dk,
    dv,
    *,
    scale: float,
    window: int | None,
    most: int,
    how: Block,
) -> None:
    (B, K, G, T, H), V = q.shape, v.shape[3]
    j, b, h = unravel(pl.program_id(0), B, K)  # the first blocks have most queries
    row, current = _Row(of, b, most, (H, V), 0 * j), columns(j, how.keys, T)
    of_k, k_parts, v_parts = (
        row.keys(current),
        _parts(k, b, h, current, row.H),
        _parts(v, b, h, current, row.V),
    )
    count = counts[b, j]

    def step(n: jax.Array, sums: Any) -> Any:
        g = jax.lax.div(n, count)
        at = columns(visits[b, j, n - g * count], how.queries, T)
        visible = _visible(row.queries(at), of_k, at, current, 1, window)
        q_parts, g_parts = _parts(q, b, h, g, at, row.H), _parts(g_out, b, h, g, at, row.V)
        # [S, Q]
        p = jnp.where(
            visible,
            jnp.exp(softmax.scores(k_parts, q_parts) * scale - read(lse, b, h, g, at)[None]),
            0.0,
        )
        dp = softmax.scores(v_parts, g_parts) - read(along, b, h, g, at)[None]
        ds = jnp.where(visible, p * dp * scale, 0.0).astype(q.dtype)
        return (
            tuple(total + dot(ds, one, (1, 0)) for total, one in zip(sums[0], q_parts)),
            tuple(
                total + dot(p.astype(g_out.dtype), one, (1, 0))
                for total, one in zip(sums[1], g_parts)
            ),
        )

    zeros = tuple(
        tuple(jnp.zeros((how.keys, at.at.size), jnp.float32) for at in spans)
        for spans in (row.H, row.V)
    )
    for ref, sums, spans in zip(
        (dk, dv), jax.lax.fori_loop(0, G * count, step, zeros), (row.H, row.V)
    ):
        for one, at in zip(sums, spans):
            write(ref, one, b, h, current, at)


def _call(
    kernel: Any,
    programs: int,
    flops: int,
    how: Block,
    args: Sequence[Any],
    out: Any,
    interpret: Any,
    **static: Any,
) -> Any:
    nbytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((args, out)))
    return pl.pallas_call(
        functools.partial(kernel, how=how, **static),
        grid=(programs,),
        out_shape=out,
        compiler_params=triton.CompilerParams(num_warps=how.warps, num_stages=how.stages),
        cost_estimate=pl.CostEstimate(
            flops=flops, bytes_accessed=nbytes, transcendentals=flops // 256
        ),
        interpret=interpret,
    )(*args)


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
    """Implements ``pallas_tpu.forward``."""
    (B, K, G, T, H), V = q.shape, v.shape[3]
    how = how or config("packed_attention", q, v, window)
    static = {"interpret": interpret, "scale": scale, "window": window, "most": how.most}
    shapes = ((B, K, G, T, V), q.dtype), ((B, K, G, T), jnp.float32)
    of, one = segments(own, parent, position, window), how.forward
    args = *_visits(of, window, one, False), of, q, k, v
    flops = B * K * G * pairs(T, window) * 2 * (H + V)
    programs = B * K * G * pl.cdiv(T, one.queries)
    out = tuple(jax.ShapeDtypeStruct(*shape) for shape in shapes)
    made, lse = _call(_packed_attention, programs, flops, one, args, out, **static)
    return made, lse


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
    """Implements ``pallas_tpu.backward``."""
    (B, K, G, T, H), V = q.shape, v.shape[3]
    how = how or config("packed_attention backward", q, v, window)
    along = jnp.sum(g.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    of = segments(own, parent, position, window)
    wide = of, q, k, v, g.astype(q.dtype), lse, along
    flops = 2 * B * K * G * pairs(T, window)
    out_q, out_k, out_v = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v))
    static = {"interpret": interpret, "scale": scale, "window": window, "most": how.most}
    one, args = how.of_queries, (*_visits(of, window, how.of_queries, False), *wide)
    programs = B * K * G * pl.cdiv(T, one.queries)
    kernel, flops_q, flops_k = _packed_attention_queries, flops * (2 * H + V), 2 * flops * (H + V)
    [dq] = _call(kernel, programs, flops_q, one, args, [out_q], **static)
    one, args = how.of_keys, (*_visits(of, window, how.of_keys, True), *wide)
    programs = B * K * pl.cdiv(T, one.keys)
    kernel = _packed_attention_keys
    dk, dv = _call(kernel, programs, flops_k, one, args, [out_k, out_v], **static)
    return dq, dk, dv
