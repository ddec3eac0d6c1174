"""TPU kernels of slot LoRA, built from those of packed LoRA: the runs of a tile are its distinct
slots, in any order of its rows.

Axes: M rows, T rows of a tile, D in, F out, R rank, C adapters of a chunk, W slots.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.naturals import rem
from pallas_kernels.packed_lora import pallas_tpu as packed
from pallas_kernels.packed_lora import tpu_tiles as tiles
from pallas_kernels.packed_lora.runs import COUNT, slots_of
from pallas_kernels.packed_lora.tpu_tiles import Config
from pallas_kernels.products import dot


def require_add(x: jax.Array, a: jax.Array, b: jax.Array, onto: jax.Array) -> None:
    """Raises NotImplementedError with the reason if ``add`` cannot serve these arrays."""
    packed.require_add(x, [a], [b], [onto])


def require_shrink(x: jax.Array, a: jax.Array) -> None:
    """Raises if ``shrink`` cannot serve these, like ``require_add``."""
    tiles.require(x, [a], [])
    tiles.require_room(_shrink_scratch(a), [(tiles.tile_rows(x, Config()), x.shape[1], x.dtype)], x)


def require_expand(b: jax.Array, onto: jax.Array) -> None:
    """Raises if ``expand`` cannot serve these, like ``require_add``."""
    tiles.require(onto, [b], [])
    blocks = [(tiles.tile_rows(onto, Config()), onto.shape[1], onto.dtype)] * 2
    tiles.require_room(_expand_scratch(b, onto, Config()), blocks, onto)


def add(
    x: jax.Array,
    a: jax.Array,
    b: jax.Array,
    onto: jax.Array,
    slot: jax.Array,
    scale: jax.Array | None = None,
    first: jax.Array | int = 0,
    config: Config | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Returns ``onto + scale (x a^T) b`` by each row's slot, ``[M, F]``.

    Args:
        a, b: ``[W, R, D]`` and ``[W, R, F]``.
        onto: ``[M, F]``; its memory is reused if possible.
        slot: ``[M]`` int32, in any order; -1 is none.
        first: index of slot 0 in the stacks.
    """
    grouping = functools.partial(slots_of, first=first)
    return packed.add(x, [a], [b], [onto], slot, scale, config, interpret, grouping)[0]


def _shrink_kernel(meta, local, x, a, out, a_buf, sem, *, C: int, R: int, columns: int) -> None:
    T = x.shape[0]
    count, rows = meta[0, 0, T + COUNT], tiles.Rows(local, T, C, R)
    fetch = tiles.Fetch(meta, [(a, a_buf)], sem, C, count)
    fetch.clear()
    out[...] = jnp.zeros(out.shape, out.dtype)

    def chunk_of(chunk: jax.Array, first: bool) -> jax.Array:
        [h] = tiles.shrink(x, [a_buf], rem(chunk, 2), rows.own(chunk), columns)
        out[...] += dot(h, tiles.fold(C * R, R), (1, 0))  # a row is zero in all columns but its own
        return jnp.int32(0)

    @pl.when(count > 0)
    def _some() -> None:
        tiles.over_chunks(count, C, fetch, chunk_of)


def _expand_kernel(
    meta, local, h, b, onto, out, b_buf, h_ref, sem, *, C: int, R: int, columns: int
) -> None:
    T = h.shape[0]
    count, rows = meta[0, 0, T + COUNT], tiles.Rows(local, T, C, R)
    fetch = tiles.Fetch(meta, [(b, b_buf)], sem, C, count)
    fetch.clear()

    @pl.when(count == 0)
    def _none() -> None:
        out[...] = onto[...]

    def chunk_of(chunk: jax.Array, first: bool, safe: bool) -> jax.Array:
        across = dot(h[...].astype(jnp.float32), tiles.fold(C * R, R), (1, 1))
        own = rows.own(chunk)
        h_ref[...] = jnp.where(own, across, 0.0).astype(h_ref.dtype)
        return tiles.not_finite(
            tiles.expand(
                h_ref, [b_buf], [own], rem(chunk, 2), onto if first else out, out, columns, safe
            )
        )

    @pl.when(count > 0)
    def _some() -> None:
        strange = tiles.over_chunks(count, C, fetch, functools.partial(chunk_of, safe=False))

        @pl.when(strange > 0)
        def _again() -> None:
            tiles.over_chunks(count, C, fetch, functools.partial(chunk_of, safe=True))


def _shrink_scratch(a: jax.Array) -> list[Any]:
    return [pltpu.VMEM((2, tiles.chunk_size(a.shape[1]), *a.shape[1:]), a.dtype)]


def _expand_scratch(b: jax.Array, onto: jax.Array, config: Config) -> list[Any]:
    C, R = tiles.chunk_size(b.shape[1]), b.shape[1]
    return [*_shrink_scratch(b), pltpu.VMEM((tiles.tile_rows(onto, config), C * R), onto.dtype)]


def shrink(
    x: jax.Array,
    a: jax.Array,
    slot: jax.Array,
    first: jax.Array | int = 0,
    config: Config = Config(),
    interpret: Any = False,
) -> jax.Array:
    """Returns ``x a^T`` by each row's slot, ``[M, R]`` float32; zeros for none."""
    (M, D), R, tile = x.shape, a.shape[1], tiles.tile_rows(x, config)
    out = jax.ShapeDtypeStruct((M, R), jnp.float32)
    kernel = functools.partial(_shrink_kernel, C=tiles.chunk_size(R), R=R, columns=config.columns)
    specs = [*tiles.row_specs(tile, [D]), pl.BlockSpec(memory_space=pl.ANY)]
    how = {"name": "slot_lora_shrink", "input_output_aliases": {}, "interpret": interpret}
    return _call(kernel, slot, first, (x, a), specs, out, _shrink_scratch(a), **how)


def expand(
    h: jax.Array,
    b: jax.Array,
    onto: jax.Array,
    slot: jax.Array,
    first: jax.Array | int = 0,
    config: Config = Config(),
    interpret: Any = False,
) -> jax.Array:
    """Returns ``onto + h b`` by each row's slot, ``[M, F]``; ``h [M, R]`` is rounded first."""
    F, R, tile = onto.shape[1], b.shape[1], tiles.tile_rows(onto, config)
    kernel = functools.partial(_expand_kernel, C=tiles.chunk_size(R), R=R, columns=config.columns)
    inner, across = tiles.row_specs(tile, [R, F])
    specs = [inner, pl.BlockSpec(memory_space=pl.ANY), across]
    out, scratch = jax.ShapeDtypeStruct(onto.shape, onto.dtype), _expand_scratch(b, onto, config)
    how = {"name": "slot_lora_expand", "input_output_aliases": {4: 0}, "interpret": interpret}
    return _call(kernel, slot, first, (h, b, onto), specs, out, scratch, **how)


def _call(
    kernel: Any,
    slot: jax.Array,
    first: jax.Array | int,
    args: Sequence[jax.Array],
    in_specs: Sequence[Any],
    out: jax.ShapeDtypeStruct,
    scratch: Sequence[Any],
    **how: Any,
) -> jax.Array:
    rows, factors, *onto = args
    tile = in_specs[0].block_shape[0]
    # Numbers beyond the stack mean its last entry.
    runs = slots_of(jnp.minimum(slot, factors.shape[0] - 1), tile, first)
    # At most one factor per row is read, whatever the size of the stack.
    moved = min(factors.nbytes, rows.shape[0] * factors.nbytes // factors.shape[0])
    moved += rows.nbytes + 2 * sum(y.nbytes for y in onto)
    flops = 2 * rows.shape[0] * factors.shape[1] * factors.shape[2]
    return pl.pallas_call(
        kernel,
        grid=(runs.local.shape[0],),
        in_specs=[*tiles.meta_specs(tile, runs.meta), *in_specs],
        out_specs=tiles.row_specs(tile, [out.shape[1]]),
        out_shape=[out],
        scratch_shapes=[*scratch, pltpu.SemaphoreType.DMA((2,))],
        compiler_params=tiles.PARAMS,
        cost_estimate=pl.CostEstimate(flops=flops, bytes_accessed=moved, transcendentals=0),
        **how,
    )(*runs, *args)[0]
