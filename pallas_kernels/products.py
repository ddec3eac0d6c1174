"""The product that kernels and their forms in XLA share."""

import jax
import jax.numpy as jnp


def dot(x: jax.Array, y: jax.Array, contract: tuple[int, int], batch: int = 0) -> jax.Array:
    """One axis of each summed over, in the dtype of ``x`` and accumulated in float32; the first
    ``batch`` axes go together.
    """
    # by default a TPU multiplies float32 as bfloat16
    exact = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    dims = ((contract[0],), (contract[1],)), (tuple(range(batch)),) * 2
    return jax.lax.dot_general(
        x, y.astype(x.dtype), dims, precision=exact, preferred_element_type=jnp.float32
    )
