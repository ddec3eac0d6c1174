"""Slot LoRA on GPUs: rows are sorted by their slots, added to by the kernel of packed LoRA, and put back.

What moves are the rows of one step, 128 of them at most in decoding, and every distinct adapter once; XLA's form gathers an adapter for
every row, writes the copies and reads these.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.packed_lora import pallas_gpu as packed


def require_add(x: jax.Array, a: jax.Array, b: jax.Array, onto: jax.Array) -> None:
    """Whether ``add`` can serve these, or their shapes.

    Raises:
        NotImplementedError: with the reason.
    """
    packed.require_add(x, [a], [b])


def require_shrink(x: jax.Array, a: jax.Array) -> None:
    """As ``require_add``, of ``shrink``."""
    packed.require_add(x, [a], [])


def require_expand(b: jax.Array, onto: jax.Array) -> None:
    """As ``require_add``, of ``expand``."""
    packed.require_add(onto, [b], [])


def _sorted(slot: jax.Array, first: jax.Array | int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rows in the order of their slots, where each is in that order, and the factors of these."""
    order = jnp.argsort(slot, stable=True)
    back = jnp.zeros_like(order).at[order].set(jnp.arange(order.shape[0], dtype=order.dtype))
    return order, back, jnp.where(slot < 0, -1, slot + first)[order]


def add(
    x: jax.Array,
    a: jax.Array,
    b: jax.Array,
    onto: jax.Array,
    slot: jax.Array,
    scale: jax.Array | None = None,
    first: jax.Array | int = 0,
    how: packed.Config | None = None,
    interpret: Any = False,
) -> jax.Array:
    """As ``pallas_tpu.add``."""
    order, back, factor = _sorted(slot, first)
    scales = None if scale is None else scale[order]
    return packed.add(x[order], [a], [b], [onto[order]], factor, scales, how, interpret)[0][back]


def shrink(
    x: jax.Array, a: jax.Array, slot: jax.Array, first: jax.Array | int = 0, how: packed.Config | None = None, interpret: Any = False
) -> jax.Array:
    """As ``pallas_tpu.shrink``."""
    order, back, factor = _sorted(slot, first)
    return packed.shrink(x[order], a, factor, how, interpret)[back]


def expand(
    h: jax.Array,
    b: jax.Array,
    onto: jax.Array,
    slot: jax.Array,
    first: jax.Array | int = 0,
    how: packed.Config | None = None,
    interpret: Any = False,
) -> jax.Array:
    """As ``pallas_tpu.expand``."""
    order, back, factor = _sorted(slot, first)
    return packed.expand(h[order], b, onto[order], factor, how, interpret)[back]
