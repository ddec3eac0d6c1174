"""Dropout of an adapter's inputs in training: the delta is ``scale * (m * x) A^T B``, where m is 0
with probability p and else ``1 / (1 - p)``, as in PEFT's ``lora_dropout``.

What is dropped depends on the policy's seed and updates, on the token's place in the policy's own
data, and on layer, projection and feature only. So a policy drops the same in every company, pass
and mesh, in the backward pass and after a restart.

Axes: P blocks, B rows, T tokens, N tokens of a datum, D in. arXiv 2106.09685, section 4.1.
"""

import dataclasses
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from mint_jax import params as params_lib


def numbers(seed: int, index: int, tokens_N: np.ndarray) -> np.ndarray:
    """Returns a random number of each token of a policy's ``index``-th datum, ``[N]`` uint32."""
    # Several calls may precede one update: without the tokens' checksum the first datum of each
    # would have the same mask.
    datum = index << 32 | zlib.crc32(np.ascontiguousarray(tokens_N).tobytes())
    key = np.array([seed & 0xFFFFFFFFFFFFFFFF, datum], np.uint64)
    return np.random.Philox(key=key).random_raw(tokens_N.size).astype(np.uint32)


@struct.dataclass
class Dropout:
    """Dropout of consecutive blocks of rows."""

    rate: Any  # `[P]` float32, probability that an input is dropped
    number: Any  # `[P, B, T]` uint32, random number of each token

    def fold(self, number: Any) -> "Dropout":
        """Returns the dropout after an update, of a layer or below a name; ``number`` is a scalar,
        or ``[P, 1, 1]``.
        """
        return dataclasses.replace(self, number=_mixed(self.number + jnp.uint32(number)))

    def below(self, name: str) -> "Dropout":
        return self.fold(params_lib.path_seed(name))

    def of_blocks(self, first: int, count: int) -> "Dropout":
        return jax.tree.map(lambda x: x[first : first + count], self)

    def keeps(self, D: int) -> jax.Array:
        """Returns True for features that are kept, ``[P, B, T, D]``."""
        feature_D = _mixed(jnp.arange(D, dtype=jnp.uint32))
        threshold_P = (jnp.asarray(self.rate) * 2.0**32).astype(jnp.uint32)
        random = _mixed(self.number[..., None] ^ feature_D[None, None, None])
        return random >= threshold_P[:, None, None, None]

    def apply(self, x_PBTD: jax.Array) -> jax.Array:
        """Returns ``m * x``; with rate 0 the same bits."""
        factor_P = 1 / (1 - jnp.asarray(self.rate))
        scaled = (x_PBTD * factor_P[:, None, None, None]).astype(x_PBTD.dtype)
        return jnp.where(self.keeps(x_PBTD.shape[-1]), scaled, jnp.zeros((), x_PBTD.dtype))


def _mixed(x: Any) -> Any:
    """Hashes uint32 by the finaliser of MurmurHash3: each bit of the input changes each bit of the
    result in half of the cases.
    """
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))
