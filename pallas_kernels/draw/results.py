"""What a draw gives."""

from typing import NamedTuple

import jax


class Drawn(NamedTuple):
    """Of each row, ``[R]``.

    Attributes:
        token: int32; 0 in a row with a NaN, and where the largest number is infinite and the
            temperature is not 0.
        top: the largest number; of no use in a row with a NaN.
        total: ``log(sum(exp(z)))``; not finite where a number is NaN or infinite.
        warm: ``log(sum(exp((z - top) / temperature)))``; at temperature 0 as at 1.
    """

    token: jax.Array
    top: jax.Array
    total: jax.Array
    warm: jax.Array
