"""Pairs of blocks of queries and keys that can interact, so that rows of several texts cost what
their texts cost.

Axes: B rows, T tokens, I blocks of queries, J blocks of keys.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels import tuning


def key_of(q: jax.Array, v: jax.Array, window: int | None) -> str:
    """Returns the tuning key of a call with ``q [B, K, G, T, H]`` and ``v [B, K, T, V]``."""
    B, K, G, T, H = q.shape
    return (
        f"{q.dtype} rows {tuning.power(B)} tokens {tuning.power(T)} heads {K}x{G} {H}>{v.shape[3]}"
        f"{'' if window is None else f' window {window}'}"
    )


def require_one_dtype(q: jax.Array, k: jax.Array, v: jax.Array) -> None:
    """Raises ``NotImplementedError`` with the reason if a kernel cannot serve these dtypes."""
    if len({x.dtype for x in (q, k, v)}) > 1 or q.dtype not in (jnp.bfloat16, jnp.float32):
        raise NotImplementedError(
            f"queries, keys and values are {q.dtype}, {k.dtype}, {v.dtype}; all bfloat16 or all"
            " float32 are served"
        )


def segments(
    own: jax.Array, parent: jax.Array, position: jax.Array | None, window: int | None
) -> tuple[jax.Array, ...]:
    """Returns the arrays that the mask depends on."""
    if window is None:
        return own, parent
    if position is None:
        raise ValueError(f"a window of {window} needs positions")
    return own, parent, position


def pairs(T: int, window: int | None) -> int:
    """Returns the most pairs of a query and a key in a row."""
    return T * T // 2 if window is None else T * min(T // 2, window)


def meeting(of: Sequence[jax.Array], window: int | None, queries: int, keys: int) -> jax.Array:
    """Returns ``[B, I, J]`` bool: a query of block i may attend to a key of block j.

    Args:
        of: segments of each token and of its parent, and with a window positions, ``[B, T]`` each.
    """
    own, parent, *position = of
    B, T = own.shape
    # The range of a block's keys meets each query by itself: where a text ends within a block of
    # queries, the small positions of the next text would reach all keys of the first.
    low, high = _least(own, keys)[:, None], -_least(-own, keys)[:, None]
    meet = jnp.arange(T)[None, :, None] >= (jnp.arange(T // keys) * keys)[None, None]
    own, parent = own[..., None], parent[..., None]
    meet &= ((low <= own) & (own <= high)) | ((low <= parent) & (parent <= high))
    if window is not None:
        meet &= position[0][..., None] + _least(-position[0], keys)[:, None] < window
    return jnp.any(meet.reshape(B, -1, queries, T // keys), axis=2)


def _least(x: jax.Array, keys: int) -> jax.Array:
    """Returns the least number of each block of keys, ``[B, J]``."""
    # A reshape to blocks fails for 4 x 2 rows of 2,048 tokens (gpt-oss-120b on four v5p chips) in
    # libtpu 0.0.42.1: "Reshape should have supported layout before reaching the emitter".
    most = jnp.iinfo(x.dtype).max
    return jax.lax.reduce_window(x, most, jax.lax.min, (1, keys), (1, keys), "valid")


def visits(meet: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the blocks that each block of ``meet [B, I, J]`` meets, in order and then the last of
    them again, ``[B, I, J]`` int32, and their number ``[B, I]``.
    """
    blocks = jnp.where(meet, jnp.arange(meet.shape[2], dtype=jnp.int32), 0)
    last = jnp.max(blocks, axis=2, keepdims=True)
    return jnp.sort(jnp.where(meet, blocks, last), axis=2), jnp.sum(meet, axis=2, dtype=jnp.int32)
