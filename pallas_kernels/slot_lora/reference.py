"""Slot LoRA row by row in float64, the oracle of the other forms."""

from typing import Any

import numpy as np

from pallas_kernels.packed_lora.reference import packed_lora


def add(x: Any, a: Any, b: Any, onto: Any, slot: Any, scale: Any = None) -> np.ndarray:
    """Returns ``onto[m] + scale[m] (x[m] a[w]^T) b[w]`` with ``w`` the row's slot, -1 none."""
    return packed_lora(x, [a], [b], [onto], slot, scale)[0]
