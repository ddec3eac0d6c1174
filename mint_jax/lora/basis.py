"""The output basis: B of policies of kind ``basis``, which all of them share and none trains or
stores.

Its rows are ``±1/sqrt(F)``, with the signs of bits of BLAKE3 of the projection's path: the same
numbers on every machine, of length 1 and nearly at right angles. Those of rank 4 are the first of
rank 8.
"""

import math
from collections.abc import Mapping
from typing import Any

import blake3
import numpy as np


def basis(path: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns B ``[L, (E,) R, F]`` of the projection at ``path``, float32."""
    *stack, R, F = shape
    stream = blake3.blake3(f"mint_jax output basis {path}".encode())
    bits = np.frombuffer(stream.digest(-(-math.prod(shape) // 8)), np.uint8)
    signs = np.unpackbits(bits, count=math.prod(shape)).reshape(R, *stack, F)
    rows = (2 * signs.astype(np.float32) - 1) * np.float32(F**-0.5)
    return np.ascontiguousarray(np.moveaxis(rows, 0, -2))


def with_basis(factors: Mapping[str, Any], widths: Mapping[str, int]) -> dict[str, Any]:
    """Returns factors by path, with the basis of each projection that has A alone; ``widths``: F of
    each projection, by its path.
    """
    out = dict(factors)
    for path, a in factors.items():
        owner, _, factor = path.rpartition("/")
        if factor == "a" and f"{owner}/b" not in out:
            out[f"{owner}/b"] = basis(owner, (*np.shape(a)[:-1], widths[owner]))
    return out
