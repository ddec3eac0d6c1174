"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864).

Half-split form: dimension i pairs with i + H/2. Where the weights were trained with neighbours as
pairs, ``rotate_pairs`` first brings them to that order; queries and keys alike, so their products
are the same.
"""

import jax
import jax.numpy as jnp
import numpy as np

from mint_jax.models.config import ModelConfig, rope_frequencies


def rope_tables(positions_BT: jax.Array, cfg: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """cos and sin, each ``[B, T, rope_dim / 2]`` float32, with the scaling's attention factor
    multiplied in.
    """
    inv, factor = rope_frequencies(cfg.rope_dim, cfg.rope_theta, cfg.rope_scaling)
    angle = positions_BT[..., None].astype(jnp.float32) * np.asarray(inv, np.float32)[None, None]
    tables = jnp.cos(angle) * factor, jnp.sin(angle) * factor
    # or XLA computes them anew inside every layer's fusion
    return jax.lax.optimization_barrier(tables)


def rotate(x_BTNH: jax.Array, cos_BTH: jax.Array, sin_BTH: jax.Array) -> jax.Array:
    """Rotates each head; tables are ``[B, T, H / 2]``; the result has the dtype of ``x``."""
    cos, sin = cos_BTH[:, :, None], sin_BTH[:, :, None]
    first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=-1
    ).astype(x_BTNH.dtype)


def rotate_pairs(x_BTNH: jax.Array, cos_BTH: jax.Array, sin_BTH: jax.Array) -> jax.Array:
    """``rotate`` for pairs (0, 1), (2, 3), ...; the result holds all first members, then all second
    ones.
    """
    return rotate(
        jnp.concatenate([x_BTNH[..., 0::2], x_BTNH[..., 1::2]], axis=-1), cos_BTH, sin_BTH
    )
