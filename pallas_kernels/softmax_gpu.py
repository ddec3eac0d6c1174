"""The running softmax of the GPU attention kernels: a program's queries process their keys block by
block (FlashAttention, arXiv 2205.14135, Algorithm 1), with values in pieces of power-of-two widths.

Axes: Q queries, S keys of a block, V width of a piece.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.partial import MASKED
from pallas_kernels.products import dot
from pallas_kernels.triton import Span


class Running(NamedTuple):
    """Attention to the keys so far, all float32."""

    top: jax.Array  # `[Q]`, the largest score; MASKED initially
    total: jax.Array  # `[Q]`, sum of `exp(score - top)`
    values: tuple[jax.Array, ...]  # for each piece `[Q, V]`, sum of `exp(score - top) v`


def begin(queries: int, values: Sequence[Span]) -> Running:
    """Returns attention to no key."""
    zero = jnp.zeros((queries,), jnp.float32)
    return Running(
        zero + MASKED, zero, tuple(jnp.zeros((queries, one.at.size), jnp.float32) for one in values)
    )


def scores(queries: Sequence[jax.Array], keys: Sequence[jax.Array]) -> jax.Array:
    """Returns scores ``[Q, S]`` float32 from pieces ``[Q, H]`` and ``[S, H]``."""
    s, *more = (dot(q, k, (1, 1)) for q, k in zip(queries, keys, strict=True))
    return sum(more, s)


def meet(so_far: Running, s: jax.Array, visible: jax.Array, values: Sequence[jax.Array]) -> Running:
    """Adds keys with scores ``s [Q, S]``, where ``visible``, and pieces of values ``[S, V]``."""
    s = jnp.where(visible, s, -jnp.inf)  # the maximum so far is finite, so the weight of -inf is 0
    top = jnp.maximum(so_far.top, jnp.max(s, axis=1))
    p, shrunk = jnp.exp(s - top[:, None]), jnp.exp(so_far.top - top)
    new = (
        shrunk[:, None] * old + dot(p.astype(v.dtype), v, (1, 0))
        for old, v in zip(so_far.values, values, strict=True)
    )
    return Running(top, shrunk * so_far.total + jnp.sum(p, axis=1), tuple(new))
