"""Slot LoRA on CPUs (``native/slot_lora.cc``): rows of one slot together, each distinct adapter
read once, nothing gathered.

Float32 only, and both matmuls at once: on a mesh that splits the inputs the caller's form runs.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import native


def require_add(x: jax.Array, a: jax.Array, b: jax.Array, onto: jax.Array) -> None:
    """Raises NotImplementedError with the reason if ``add`` cannot serve these arrays."""
    if any(one.dtype != jnp.float32 for one in (x, a, b, onto)):
        raise NotImplementedError(
            f"dtypes {x.dtype}, {a.dtype}, {b.dtype} and {onto.dtype}, and not float32"
        )
    native.require()


def require_shrink(*args: jax.Array) -> None:
    """Raises NotImplementedError: there are no separate halves here."""
    raise NotImplementedError("a mesh splits inputs")


require_expand = require_shrink


def add(
    x: jax.Array,
    a: jax.Array,
    b: jax.Array,
    onto: jax.Array,
    slot: jax.Array,
    scale: jax.Array | None = None,
    first: jax.Array | int = 0,
    interpret: Any = False,
) -> jax.Array:
    """Implements ``pallas_tpu.add``."""
    del interpret
    scale = jnp.ones(x.shape[:1], jnp.float32) if scale is None else scale
    out = jax.ShapeDtypeStruct(onto.shape, jnp.float32)
    return native.call(
        "mint_slot_lora", out, x, a, b, onto, slot, scale, jnp.int32(first), aliases={3: 0}
    )
