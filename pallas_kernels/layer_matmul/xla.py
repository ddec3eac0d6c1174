"""The XLA form of ``layer_matmul``, which reads the matrix within the matmul on TPUs and copies it
first on CPUs and GPUs.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.layer_matmul import blocks


def matmul(
    x: jax.Array,
    stacks: tuple[jax.Array, ...],
    layer: jax.Array,
    rows: jax.Array | None = None,
    transposed: bool = False,
) -> tuple[jax.Array, ...]:
    """Implements ``layer_matmul``; all rows are multiplied."""
    none, sums = jnp.int32(0), "...D,FD->...F" if transposed else "...D,DF->...F"

    def of_layer(w: jax.Array) -> jax.Array:
        return jax.lax.squeeze(
            jax.lax.dynamic_slice(w, (layer, *(none,) * (w.ndim - 1)), (1, *w.shape[1:])), (0,)
        )

    def product(w: jax.Array) -> jax.Array:
        one = blocks.unpack(of_layer(w)) if blocks.is_packed(w) else of_layer(w)
        one = one.astype(x.dtype) if one.dtype.itemsize == 1 else one
        return jnp.einsum(sums, x, one, preferred_element_type=jnp.float32)

    return tuple(map(product, stacks))
