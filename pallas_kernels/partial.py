"""Attention to a part of the keys, and the join of two parts.

Each part is a softmax of its own. ``join`` merges two by their block statistics (FlashAttention,
arXiv 2205.14135, section 3.1, Algorithm 1 line 12), so neither keys nor scores are concatenated.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

# Score of a masked key: low enough that its weight underflows to 0, and finite, because a row of
# padding has no visible key. With -inf its maximum would be -inf, and -inf - -inf is NaN, in that
# row's output and, in the backward pass, in every weight.
MASKED = -1e30


class Partial(NamedTuple):
    """Attention to some of the keys, before division by the sum of weights."""

    top: jax.Array  # `[..., 1]` float32, the largest score
    total: jax.Array  # `[..., 1]`, sum of `exp(score - top)`
    value: jax.Array  # `[..., V]`, sum of `exp(score - top) v`


def partial_softmax(s: jax.Array, weigh: Callable[[jax.Array], jax.Array]) -> Partial:
    """Attends over the last axis of masked scores; ``weigh`` sums values with such weights."""
    top = jnp.max(s, axis=-1, keepdims=True)
    p = jnp.exp(s - top)
    return Partial(top, jnp.sum(p, axis=-1, keepdims=True), weigh(p))


def join(x: Partial, y: Partial) -> Partial:
    """Joins attention to two sets of keys. A part whose keys are all masked has no weight."""
    # Neither part is divided yet. Relative to the larger maximum no weight overflows, and a part
    # far below it, or fully masked, vanishes as in one softmax over all keys.
    top = jnp.maximum(x.top, y.top)
    a, b = jnp.exp(x.top - top), jnp.exp(y.top - top)
    return Partial(top, a * x.total + b * y.total, a * x.value + b * y.value)


def join_all(parts: Partial) -> Partial:
    """Joins all parts along the first axis."""
    top = jnp.max(parts.top, axis=0)
    weight = jnp.exp(parts.top - top[None])
    return Partial(top, *(jnp.sum(weight * x, axis=0) for x in parts[1:]))


def nothing(like: Partial) -> Partial:
    """Returns attention to no key, with these shapes."""
    return Partial(
        jnp.full(like.top.shape, MASKED, jnp.float32),
        *(jnp.zeros(x.shape, jnp.float32) for x in like[1:]),
    )
