"""Packed matmul in float64, the oracle of the other forms."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from pallas_kernels.grouped_matmul.reference import grouped_matmul
from pallas_kernels.packed_lora import reference as lora


def packed_matmul(
    x: Any,
    w: Sequence[Any],
    sizes: Any,
    a: Sequence[Any],
    b: Sequence[Any],
    factor: Any,
    scale: Any = None,
) -> list[np.ndarray]:
    """Implements ``packed_matmul.packed_matmul``."""
    return lora.packed_lora(
        x, a, b, [grouped_matmul(x, one, sizes) for one in w], inside(factor, sizes), scale
    )


def inside(factor: Any, sizes: Any) -> np.ndarray:
    """Sets factors after the last expert to -1."""
    factor = np.asarray(factor)
    return np.where(np.arange(len(factor)) < np.sum(sizes), factor, -1)
