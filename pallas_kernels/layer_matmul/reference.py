"""Rows times one layer's matrix in float64, the oracle of the other forms."""

from typing import Any

import numpy as np

from pallas_kernels.layer_matmul import blocks


def layer_matmul(
    x: Any, w: Any, layer: int, transposed: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Returns ``x w[layer]``, ``[M, F]``, and the sums of magnitudes that bound float32's error."""
    one = blocks.unpack(w[layer]) if blocks.is_packed(w) else w[layer].astype("float32")
    x, w_DF = np.array(x, np.float64), np.array(one, np.float64)
    w_DF = w_DF.T if transposed else w_DF
    return x @ w_DF, np.abs(x) @ np.abs(w_DF)
