"""Attention to a part of the keys, and how two parts become one.

Each part is a softmax of its own; ``join`` makes one of two by the statistics that blocks leave
(FlashAttention, arXiv 2205.14135, section 3.1, Algorithm 1 line 12), so that neither keys nor
scores are ever concatenated.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

# What a masked score is: so low that its weight underflows to 0, and finite, for a row of padding
# sees no key at all. With -inf its largest score would be -inf too, and -inf - -inf is NaN, in that
# row's output and, backwards, in every weight.
MASKED = -1e30


class Partial(NamedTuple):
    """Attention to some of the keys, before it is divided by the sum of its weights.

    Attributes:
        top: ``[..., 1]`` float32, the largest score.
        total: ``[..., 1]``, sum of ``exp(score - top)``.
        value: ``[..., V]``, sum of ``exp(score - top) v``.
    """

    top: jax.Array
    total: jax.Array
    value: jax.Array


def partial_softmax(s: jax.Array, weigh: Callable[[jax.Array], jax.Array]) -> Partial:
    """Attention over the last axis of masked scores ``s``; ``weigh`` sums values by weights of the
    shape of ``s``.
    """
    top = jnp.max(s, axis=-1, keepdims=True)
    p = jnp.exp(s - top)
    return Partial(top, jnp.sum(p, axis=-1, keepdims=True), weigh(p))


def join(x: Partial, y: Partial) -> Partial:
    """Attention to the keys of both. A part whose keys are all masked has no weight."""
    # Neither has divided by anything yet: with the larger of both maxima as the common reference no
    # weight overflows, and a part that lies far below, one that is all masked too, vanishes as it
    # would have in one softmax over all keys.
    top = jnp.maximum(x.top, y.top)
    a, b = jnp.exp(x.top - top), jnp.exp(y.top - top)
    return Partial(top, a * x.total + b * y.total, a * x.value + b * y.value)


def join_all(parts: Partial) -> Partial:
    """``join`` of as many as the first axis has."""
    top = jnp.max(parts.top, axis=0)
    weight = jnp.exp(parts.top - top[None])
    return Partial(top, *(jnp.sum(weight * x, axis=0) for x in parts[1:]))


def nothing(like: Partial) -> Partial:
    """Attention to no key at all, of these shapes."""
    return Partial(
        jnp.full(like.top.shape, MASKED, jnp.float32),
        *(jnp.zeros(x.shape, jnp.float32) for x in like[1:]),
    )
