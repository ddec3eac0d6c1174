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
    """Raises NotImplementedError: there is no such kernel."""
    raise NotImplementedError("inputs are split over devices, and no kernel makes the inner products of a part")


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
    order = jnp.argsort(slot, stable=True)
    back = jnp.zeros_like(order).at[order].set(jnp.arange(order.shape[0], dtype=order.dtype))
    scales = None if scale is None else scale[order]
    return packed.add(x[order], [a], [b], [onto[order]], jnp.where(slot < 0, -1, slot + first)[order], scales, how, interpret)[0][back]
