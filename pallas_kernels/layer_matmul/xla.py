"""A layer's matrix by XLA, which on TPUs and GPUs reads it inside the product, and on CPUs copies it first."""

import jax
import jax.numpy as jnp


def matmul(x: jax.Array, w: jax.Array, layer: jax.Array) -> jax.Array:
    """See ``layer_matmul``."""
    none = jnp.int32(0)
    w_DF = jax.lax.squeeze(jax.lax.dynamic_slice(w, (layer, none, none), (1, *w.shape[1:])), (0,))
    return jnp.einsum("...D,DF->...F", x, w_DF.astype(x.dtype) if w_DF.dtype.itemsize == 1 else w_DF, preferred_element_type=jnp.float32)
