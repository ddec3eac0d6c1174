"""Division of integers that are not negative, in kernels.

``//`` and ``%`` of a traced number look at signs, and to lower a sign for a TPU Pallas must know
which one it is: such a kernel could be lowered only where a TPU is attached or a topology is named.
"""

from typing import Any

import jax
import jax.numpy as jnp


def div(x: Any, n: int) -> jax.Array:
    """``x // n``."""
    return jax.lax.div(x, jnp.int32(n))


def rem(x: Any, n: int) -> jax.Array:
    """``x % n``."""
    return jax.lax.rem(x, jnp.int32(n))
