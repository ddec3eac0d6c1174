"""Grouped matmul group by group in float64, the oracle of the other forms."""

from typing import Any

import numpy as np


def grouped_matmul(
    x: Any, w: Any, sizes: Any, index: Any = None, transposed: bool = False
) -> np.ndarray:
    """Implements ``grouped_matmul.grouped_matmul``."""
    x, w = np.asarray(x, np.float64), np.asarray(w, np.float64)
    w = w.swapaxes(1, 2) if transposed else w
    y, first = np.zeros((x.shape[0], w.shape[2])), 0
    if np.ndim(index) == 0:
        index = np.arange(len(sizes)) + (0 if index is None else index)
    for size, at in zip(np.asarray(sizes), index):
        rows = slice(first, first + size)
        y[rows], first = x[rows] @ w[at], first + size
    return y
