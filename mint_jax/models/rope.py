"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864).

Half-split form: dimension i pairs with i + H/2. For weights trained with neighbours as pairs,
``rotate_pairs`` reorders queries and keys alike first, which leaves their products unchanged.
"""

import jax
import jax.numpy as jnp
import numpy as np

from mint_jax.models.config import ModelConfig, rope_frequencies


def rope_tables(positions_BT: jax.Array, cfg: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """Returns cos and sin ``[B, T, rope_dim / 2]`` float32, times the attention factor."""
    inv, factor = rope_frequencies(cfg.rope_dim, cfg.rope_theta, cfg.rope_scaling)
    angle = positions_BT[..., None].astype(jnp.float32) * np.asarray(inv, np.float32)[None, None]
    tables = jnp.cos(angle) * factor, jnp.sin(angle) * factor
    # Otherwise XLA recomputes them inside every layer's fusion.
    return jax.lax.optimization_barrier(tables)


def rotate(x_BTNH: jax.Array, cos_BTH: jax.Array, sin_BTH: jax.Array) -> jax.Array:
    """Rotates each head; tables are ``[B, T, H / 2]``; returns the dtype of ``x``."""
    cos, sin = cos_BTH[:, :, None], sin_BTH[:, :, None]
    first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(rotated, axis=-1).astype(x_BTNH.dtype)


def rotate_pairs(x_BTNH: jax.Array, cos_BTH: jax.Array, sin_BTH: jax.Array) -> jax.Array:
    """Rotates pairs (0, 1), (2, 3), ...; first members come first in the result."""
    halves = jnp.concatenate([x_BTNH[..., 0::2], x_BTNH[..., 1::2]], axis=-1)
    return rotate(halves, cos_BTH, sin_BTH)
