"""Latent attention to a paged cache row by row in float64, the oracle of the other forms."""

from typing import Any

import numpy as np

from pallas_kernels.paged import Rows
from pallas_kernels.paged_attention.reference import paged_attention


def latent_attention(
    q_latent: Any, q_rope: Any, latent: Any, rope: Any, rows: Rows, scale: float
) -> list[np.ndarray]:
    """Implements ``latent_attention.latent_attention`` as one head with keys of both parts."""
    (C, J), wide = (q_latent.shape[-1], q_rope.shape[-1]), np.float64
    q = np.concatenate([np.array(q_latent, wide), np.array(q_rope, wide)], axis=-1)[:, None]
    keys = np.concatenate(
        [np.array(latent, wide)[..., :C], np.array(rope, wide)[..., :J]], axis=-1
    )[:, :, None]
    top, total, value = paged_attention(q, keys, keys, rows, scale)
    return [top[:, 0], total[:, 0], value[:, 0, :, :C]]
