"""Shared parts of the GPU kernels: blocks of arrays for Triton through Pallas.

Triton's blocks have power-of-two sizes, and its dots sides of at least 16.

Axes: T rows of a tile.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallas_kernels.naturals import div, rem

LEAST = 16  # minimum rows and columns of a dot
# Compute capabilities with 99 KiB of shared memory per program; others from 8.0 on have 163 or 227.
SMALL = {8.6, 8.9, 12.0, 12.1}


def attached() -> list[float]:
    """Returns the compute capabilities of the attached GPUs; empty without any."""
    try:
        return [float(device.compute_capability) for device in jax.local_devices(backend="cuda")]
    except RuntimeError:
        return []


def require_shared_memory(what: str) -> None:
    """Raises ``NotImplementedError`` if an attached GPU has no more than 99 KiB."""
    if small := sorted(SMALL.intersection(attached())):
        raise NotImplementedError(
            f"this GPU is of compute capability {small[0]}, whose 99 KiB of shared memory do not"
            f" hold {what}"
        )


def require_float8(w: jax.Array) -> None:
    """Raises ``NotImplementedError`` for float8 if an attached GPU cannot read it."""
    if w.dtype == jnp.float8_e4m3fn and (least := min(attached(), default=8.9)) < 8.9:
        # Triton would abort.
        raise NotImplementedError(
            f"this GPU is of compute capability {least}, and float8 is read from 8.9 on"
        )


def power_of_two(n: int, most: int) -> int:
    """Returns the smallest power of two of at least ``n``, between LEAST and ``most``."""
    return min(most, max(LEAST, 1 << (n - 1).bit_length()))


class Span:
    """``size`` places of an axis from ``start`` on; those before ``stop``, or all, are valid."""

    def __init__(self, start: Any, size: int, stop: Any = None):
        self.at: Any = pl.ds(start, size)
        self.size = size
        self.there = None if stop is None else start + jax.lax.iota(jnp.int32, size) < stop

    @classmethod
    def of(cls, places: jax.Array, there: jax.Array) -> "Span":
        """Makes a span of places in any order; invalid ones must be beyond the axis."""
        out = cls(0, places.shape[0])
        out.at, out.there = places, there
        return out

    @property
    def places(self) -> jax.Array:
        """Returns the places, ``[size]`` int32."""
        if isinstance(self.at, jax.Array):
            return self.at
        return self.at.start + jax.lax.iota(jnp.int32, self.size)


def unravel(program: jax.Array, *sizes: int) -> list[jax.Array]:
    """Returns a program's coordinates in a grid whose axes except the first have these sizes."""
    out = []
    for size in reversed(sizes):
        out.append(rem(program, size))
        program = div(program, size)
    return [program, *reversed(out)]


def columns(block: Any, size: int, n: int) -> Span:
    """Returns block number ``block`` of an axis of ``n``."""
    return Span(block * size, size, None if n % size == 0 else n)


def pieces(n: int, most: int, zero: Any) -> list[Span]:
    """Splits an axis of ``n`` into blocks of at most ``most``; ``zero`` is no constant."""
    # From JAX 0.12 on a constant start is rejected if its block extends beyond the array.
    out, start = [], 0
    while start < n:
        size = min(most, max(LEAST, 1 << ((n - start).bit_length() - 1)))
        out.append(Span(start, size) if start + size <= n else Span(zero + start, size, n))
        start += size
    return out


# What lies beyond an array or its rows is not read and counts as zeros, by a select: non-finite
# values beyond stay out.
def _at_and_mask(index: tuple[Any, ...]) -> tuple[tuple[Any, ...], jax.Array | None]:
    spans = [one for one in index if isinstance(one, Span)]

    def along(values: jax.Array, n: int) -> jax.Array:
        return jax.lax.expand_dims(values, [axis for axis in range(len(spans)) if axis != n])

    # Then all are numbers: Pallas' interpreter does not mix these with blocks.
    if any(isinstance(one.at, jax.Array) for one in spans):
        at = tuple(
            along(one.places, spans.index(one)) if isinstance(one, Span) else one for one in index
        )
    else:
        at = tuple(one.at if isinstance(one, Span) else one for one in index)
    masks = [along(span.there, n) for n, span in enumerate(spans) if span.there is not None]
    return at, (
        jnp.broadcast_to(functools.reduce(jnp.logical_and, masks), [one.size for one in spans])
        if masks
        else None
    )


def read(ref: Any, *index: Any, beyond: int = 0) -> jax.Array:
    """Reads the block at the spans that end ``index``; ``beyond`` outside them."""
    at, mask = _at_and_mask(index)
    return triton.load(
        ref.at[at], mask=mask, other=None if mask is None else jnp.full((), beyond, ref.dtype)
    )


def write(ref: Any, value: jax.Array, *index: Any) -> None:
    """Stores the part of ``value`` within the spans, in the dtype of ``ref``."""
    at, mask = _at_and_mask(index)
    triton.store(ref.at[at], value.astype(ref.dtype), mask=mask)


def cost(flops: int, *arrays: jax.Array | jax.ShapeDtypeStruct) -> pl.CostEstimate:
    """Returns the cost estimate of a kernel that moves these arrays once, see ``aot/flops.py``."""
    nbytes = sum(x.size * x.dtype.itemsize for x in arrays)
    return pl.CostEstimate(flops=flops, bytes_accessed=nbytes, transcendentals=0)
