"""The CPU kernel of ``draw`` (``native/draw.cc``): two passes over the rows in use, where XLA has
ten over all rows of a program.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import native
from pallas_kernels.draw.xla import Drawn


def require(
    z: jax.Array, temperature: jax.Array, keys: jax.Array, rows: jax.Array | None = None
) -> None:
    """Raises NotImplementedError with the reason if ``draw`` cannot serve these arrays."""
    if z.dtype != jnp.float32:
        raise NotImplementedError(f"logits in {z.dtype} have no kernel")
    native.require_one_device()
    native.require()


def draw(
    z: jax.Array, temperature: jax.Array, keys: jax.Array, rows: jax.Array | None = None
) -> Drawn:
    """Implements ``pallas_kernels.draw.draw``; unused rows get zeros."""
    dtypes = jnp.int32, *[jnp.float32] * 3
    results = [jax.ShapeDtypeStruct(z.shape[:1], dtype) for dtype in dtypes]
    count = jnp.int32(z.shape[0] if rows is None else rows)
    return Drawn(
        *native.call("mint_draw", results, z, temperature.astype(jnp.float32), keys, count)
    )
