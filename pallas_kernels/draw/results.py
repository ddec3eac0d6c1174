"""Result of ``draw``."""

from typing import NamedTuple

import jax


class Drawn(NamedTuple):
    """Result for each row, ``[R]``.

    Attributes:
        token: int32; 0 in a row with a NaN, and if the largest number is infinite and the
            temperature is not 0.
        top: the largest number; meaningless in a row with a NaN.
        total: ``log(sum(exp(z)))``; not finite if a number is NaN or infinite.
        warm: ``log(sum(exp((z - top) / temperature)))``; at temperature 0 as at 1.
    """

    token: jax.Array
    top: jax.Array
    total: jax.Array
    warm: jax.Array
