"""Packed LoRA row by row in float64, the oracle of the other forms."""

from collections.abc import Sequence
from typing import Any

import numpy as np


def packed_lora(
    x: Any, a: Sequence[Any], b: Sequence[Any], onto: Sequence[Any], factor: Any, scale: Any = None
) -> list[np.ndarray]:
    """Implements ``packed_lora.packed_lora``."""
    x, a, b, onto = _wide(x), [_wide(w) for w in a], [_wide(w) for w in b], [_wide(y) for y in onto]
    for m, w in enumerate(np.asarray(factor)):
        for a_k, b_k, y_k in zip(a, b, onto):
            if w >= 0:
                y_k[m] += (1.0 if scale is None else float(scale[m])) * (a_k[w] @ x[m]) @ b_k[w]
    return onto


def gradients(
    x: Any, a: Sequence[Any], b: Sequence[Any], g: Sequence[Any], factor: Any
) -> tuple[np.ndarray, list[np.ndarray], list[np.ndarray]]:
    """Returns the gradients of x, a and b, where ``g`` are the results'."""
    x, a, b, g = _wide(x), [_wide(w) for w in a], [_wide(w) for w in b], [_wide(y) for y in g]
    dx, da, db = np.zeros_like(x), [np.zeros_like(w) for w in a], [np.zeros_like(w) for w in b]
    for m, w in enumerate(np.asarray(factor)):
        for k in range(len(a)):
            if w >= 0:
                h, dh = a[k][w] @ x[m], b[k][w] @ g[k][m]
                db[k][w] += np.outer(h, g[k][m])
                da[k][w] += np.outer(dh, x[m])
                dx[m] += dh @ a[k][w]
    return dx, da, db


def _wide(x: Any) -> np.ndarray:
    return np.array(x, np.float64)
