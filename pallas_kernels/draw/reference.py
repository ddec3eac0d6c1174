"""The draw of a token in float64, the oracle of the other forms."""

from typing import Any

import numpy as np

from pallas_kernels.draw.xla import exponential


def draw(z: Any, temperature: Any, keys: Any) -> tuple[np.ndarray, ...]:
    """Returns both log-sums of ``Drawn``, and the scores ``[R, V]`` whose largest is drawn."""
    exact, temperature = np.array(z, np.float64), np.array(temperature, np.float64)[:, None]
    over = np.where(temperature > 0, temperature, 1)
    top = exact.max(-1, keepdims=True)
    total = top[:, 0] + np.log(np.exp(exact - top).sum(-1))
    warm = np.log(np.exp((exact - top) / over).sum(-1))
    gumbel = -np.log(np.array(exponential(keys, exact.shape[1]), np.float64))
    return total, warm, exact / over + np.where(temperature > 0, gumbel, 0.0)
