"""Small packed adapters, one per number."""

import functools

import numpy as np

from mint_jax.catalog.packed import Schema, pack
from mint_jax.lora.tree import AdapterConfig

SCHEMA = Schema("ab" * 32, AdapterConfig(1, 2.0, ("q",)))


@functools.lru_cache(4096)
def packed(value: int, schema: Schema = SCHEMA, width: int = 8) -> bytes:
    """A packed adapter whose bytes are unique to ``value``, in two numbers: float32 tells halves
    apart up to four million only.
    """
    a, b = np.zeros((1, 1, width), np.float32), np.full((1, 1, 8), value % 4096 + 0.5, np.float32)
    a[0, 0, 0] = value // 4096
    return pack({"dense": {"attn": {"q": {"a": a, "b": b}}}}, schema)
