"""GPU kernel of attention to a paged cache: a program reads a part of one row's pages.

Axes: L layers, U pages, B rows, D table entries, K kv heads, M queries of one, Q of a program, X
width in the pool, V of values, S positions of a step, N parts.
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
from pallas_kernels.naturals import div, rem
from pallas_kernels.paged import PAGE, RUN, Rows, key_of, op_of, require_one_dtype
from pallas_kernels.partial import Partial, join_all
from pallas_kernels.triton import (
    Span,
    columns,
    pieces,
    power_of_two,
    read,
    require_shared_memory,
    unravel,
    write,
)

# A row's runs are divided evenly among several programs, because a GPU has more than a hundred
# processors; XLA joins the parts (Flash-Decoding). Their number follows from shapes, and their ends
# from the row, so a row's result depends on the row only.
PROGRAMS = 8 * 132  # eight per processor of an H200
PARTS_BYTES = 16 << 20  # limit on the parts of all rows, if there are several
LEAST_RUNS = 4  # minimum runs of a part for a row that fills its table


class Config(NamedTuple):
    """Block sizes, powers of two of at least 16."""

    queries: int  # queries of a program, Q
    keys: int  # positions of a step, S; at most RUN
    most: int  # maximum columns of one matmul
    parts: int  # parts of a row, N
    warps: int
    stages: int  # pipelined loads


def config(
    queries: Sequence[jax.Array], pools: Sequence[jax.Array], width: int, positions: int
) -> Config:
    """Returns measured sizes, or sizes that fit an H200 processor, according to its compiler."""
    B, K, M, _ = queries[0].shape
    exact = pools[0].dtype == jnp.float32  # without tensor cores, operands occupy registers too
    wide = width > 256
    Q = power_of_two(M, 16 if exact else 64)
    parts, programs = 1, B * K * pl.cdiv(M, Q)
    room = min(positions // (LEAST_RUNS * RUN), PARTS_BYTES // (4 * B * K * M * width))
    while parts * programs < PROGRAMS and 2 * parts <= room:
        parts *= 2
    # Triton prefetches a step's keys and values only with stages beyond the table's entry: 3 stages
    # prefetch one step, 5 two. With 64 queries of 512 (latents) a third stage spills 8 bytes.
    stages = 2 if wide else 3 if exact or Q > 32 else 5
    keys, warps = 32 if exact or wide else 64, 8 if exact or Q * width > 64 * 128 or wide else 4
    rule = Config(Q, keys, 32 if exact else 512, parts, warps, stages)
    key = f"{key_of(queries, pools)} positions {tuning.power(positions)}"
    return tuning.chosen(op_of(queries), "cuda", key, rule)


def require(
    queries: Sequence[jax.Array], pools: Sequence[jax.Array], value: int, width: int
) -> None:
    """Raises ``NotImplementedError`` if ``attend`` cannot serve these arrays."""
    require_one_dtype(queries, pools)
    if not all(x.size for x in (*queries, *pools)):
        raise NotImplementedError("no queries or no pages")
    if width > 192:
        require_shared_memory(f"blocks of {width} wide values")


def _runs(tokens: jax.Array) -> jax.Array:
    return div(tokens + (RUN - 1), RUN)


def _kernel(
    layer, table, prefix, own, first, *refs, keys: int, value: int, scale: float, how: Config
) -> None:
    queries, pools, (top, total, out) = refs[:keys], refs[keys:-3], refs[-3:]
    (_, K, M, _), (parts, *_, V), S = queries[0].shape, out.shape, how.keys
    b, part, head, block = unravel(pl.program_id(0), parts, K, pl.cdiv(M, how.queries))
    current, zero = columns(block, how.queries, M), 0 * block
    begin = _runs(prefix[b]) * RUN  # of the row's own tokens
    last, end_of_prefix, end = _runs(prefix[b]) + _runs(own[b]), prefix[b], begin + own[b]
    each = div(jnp.maximum(last - first[b], 0) + (parts - 1), parts)
    start = first[b] + part * each
    runs = jnp.maximum(jnp.minimum(last - start, each), 0)

    of_keys = [pieces(q.shape[3], how.most, zero) for q in queries]
    of_values = pieces(V, how.most, zero)
    q = [read(ref, b, head, current, at) for ref, spans in zip(queries, of_keys) for at in spans]

    def step(i: jax.Array, so_far: softmax.Running) -> softmax.Running:
        position = start * RUN + i * S + jax.lax.iota(jnp.int32, S)
        visible = (position < end_of_prefix) | ((position >= begin) & (position < end))
        page = triton.load(table.at[b, div(position, PAGE)], mask=visible, other=0)
        place = rem(position, PAGE)

        def read_pages(pool: Any, at: Span) -> jax.Array:
            across = at.at.start + jax.lax.iota(jnp.int32, at.at.size)
            mask = visible[:, None] if at.there is None else visible[:, None] & at.there[None]
            index = layer[...], page[:, None], head, place[:, None], across[None]
            return triton.load(
                pool.at[index],
                mask=jnp.broadcast_to(mask, (S, at.at.size)),
                other=jnp.zeros((), pool.dtype),
            )

        k = [[read_pages(pool, at) for at in spans] for pool, spans in zip(pools, of_keys)]
        v = k[value] if value < keys else [read_pages(pools[value], at) for at in of_values]
        s = softmax.scores(q, [one for of_pool in k for one in of_pool]) * scale
        return softmax.meet(so_far, s, visible[None], v)

    made = jax.lax.fori_loop(0, runs * (RUN // S), step, softmax.begin(how.queries, of_values))
    for ref, numbers in ((top, made.top), (total, made.total)):
        write(ref, numbers, part, b, head, current)
    for one, at in zip(made.values, of_values):
        write(out, one, part, b, head, current, at)


def _paged_attention(*refs: Any, **how: Any) -> None:
    _kernel(*refs, **how)


def _latent_attention(*refs: Any, **how: Any) -> None:
    _kernel(*refs, **how)


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
    """Implements ``pallas_tpu.attend``."""
    (B, K, M, _), positions = queries[0].shape, rows.table.shape[1] * PAGE
    how = config(queries, pools, width, positions) if how is None else how
    # Maximum number of positions.
    flops = 2 * B * K * M * positions * (sum(q.shape[3] for q in queries) + width)
    nbytes = B * K * positions * sum(pool.shape[-1] * pool.dtype.itemsize for pool in pools)
    shape = how.parts, B, K, M
    kernel = _paged_attention if len(queries) == 1 else _latent_attention
    top, total, out = pl.pallas_call(
        functools.partial(kernel, keys=len(queries), value=value, scale=scale, how=how),
        grid=(B * how.parts * K * pl.cdiv(M, how.queries),),
        out_shape=[jax.ShapeDtypeStruct(s, jnp.float32) for s in (shape, shape, (*shape, width))],
        compiler_params=triton.CompilerParams(num_warps=how.warps, num_stages=how.stages),
        cost_estimate=pl.CostEstimate(
            flops=flops, bytes_accessed=nbytes, transcendentals=B * K * M * positions
        ),
        interpret=interpret,
    )(*rows, *queries, *pools)
    return join_all(Partial(top[..., None], total[..., None], out))
