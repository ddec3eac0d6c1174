"""What the GPU kernels share: blocks of arrays by Triton through Pallas.

Triton's blocks have powers of two as sizes, and its dots no side below 16. So a block may reach beyond its array or its rows: what lies
there is not read, and stands as zeros. That is a select, never a product by 0, and what is not finite there stays there.

Axes: T rows of a tile.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

LEAST = 16  # rows and columns of a dot


def power_of_two(n: int, most: int) -> int:
    """The smallest that is not below ``n``, between LEAST and ``most``."""
    return min(most, max(LEAST, 1 << (n - 1).bit_length()))


class Span:
    """``size`` places of an axis from ``start`` on, of which those before ``stop`` are there.

    Args:
        stop: None: all are.
    """

    def __init__(self, start: Any, size: int, stop: Any = None):
        self.at = pl.ds(start, size)
        self.there = None if stop is None else start + jax.lax.iota(jnp.int32, size) < stop


def columns(block: Any, size: int, n: int) -> Span:
    """Block number ``block`` of an axis of ``n``."""
    return Span(block * size, size, None if n % size == 0 else n)


def _mask(rows: Span, across: Span) -> jax.Array | None:
    masks = [] if rows.there is None else [rows.there[:, None]]
    masks += [] if across.there is None else [across.there[None]]
    return jnp.broadcast_to(functools.reduce(jnp.logical_and, masks), (rows.at.size, across.at.size)) if masks else None


def read(ref: Any, *index: Any) -> jax.Array:
    """The block at the spans that end ``index``, zeros where it reaches beyond them."""
    mask = _mask(*index[-2:])
    at = tuple(one.at if isinstance(one, Span) else one for one in index)
    return triton.load(ref.at[at], mask=mask, other=None if mask is None else jnp.zeros((), ref.dtype))


def write(ref: Any, value: jax.Array, *index: Any) -> None:
    """Stores what of ``value`` is within the spans, in the dtype of ``ref``."""
    at = tuple(one.at if isinstance(one, Span) else one for one in index)
    triton.store(ref.at[at], value.astype(ref.dtype), mask=_mask(*index[-2:]))


def cost(flops: int, *arrays: jax.Array) -> pl.CostEstimate:
    """Of a kernel that reads or writes these once: for those who count what a program does, see ``aot/flops.py``."""
    return pl.CostEstimate(flops=flops, bytes_accessed=sum(x.size * x.dtype.itemsize for x in arrays), transcendentals=0)


def dot(x: jax.Array, y: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """The product over one axis of each, in float32; ``y`` as ``x`` is. Float32 goes through no TF32, whose 10 bits are too few."""
    exact = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    y = y.astype(x.dtype)
    return jax.lax.dot_general(x, y, (((contract[0],), (contract[1],)), ((), ())), precision=exact, preferred_element_type=jnp.float32)
