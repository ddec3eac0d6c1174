"""The XLA form of packed matmul in two passes: grouped matmul, then packed LoRA. Serves every
shape.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul import xla as grouped
from pallas_kernels.packed_lora import xla as lora


def matmul(
    x: jax.Array,
    w: Sequence[jax.Array],
    sizes: jax.Array,
    a: Sequence[jax.Array],
    b: Sequence[jax.Array],
    factor: jax.Array,
    scale: jax.Array | None = None,
) -> tuple[jax.Array, ...]:
    """Implements ``packed_matmul``; ``scale [M]`` is per row."""
    onto = [grouped.grouped_matmul(x, one, sizes, None, False) for one in w]
    return lora.add(x, a, b, onto, inside(factor, sizes), scale)


def inside(factor: jax.Array, sizes: jax.Array) -> jax.Array:
    """Sets factors after the last expert to -1."""
    return jnp.where(jnp.arange(factor.shape[0]) < jnp.sum(sizes), factor, -1)
