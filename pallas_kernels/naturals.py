"""Division of non-negative integers in kernels."""

from typing import Any

import jax
import jax.numpy as jnp


# ``//`` and ``%`` of traced numbers look at signs, and lowering a sign for a TPU needs to know
# which TPU. Such a kernel could be lowered only with an attached TPU or a named topology.
def div(x: Any, n: int) -> jax.Array:
    """Returns ``x // n``."""
    return jax.lax.div(x, jnp.int32(n))


def rem(x: Any, n: int) -> jax.Array:
    """Returns ``x % n``."""
    return jax.lax.rem(x, jnp.int32(n))
