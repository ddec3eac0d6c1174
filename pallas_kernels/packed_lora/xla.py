"""The XLA form of packed LoRA, one run of rows at a time: serves every shape with small
temporaries, and is slow for many runs.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.packed_lora.runs import COUNT, runs_of
from pallas_kernels.products import dot

TILE = 128


def _over_runs(body: Any, carry: Any, factor: jax.Array, tile: int) -> Any:
    """Runs ``body(first row, own [T, 1], factor, carry)`` over the runs of all tiles."""
    runs = runs_of(factor, tile)

    def of_tile(t: jax.Array, carry: Any) -> Any:
        def of_run(j: jax.Array, carry: Any) -> Any:
            return body(t * tile, (runs.local[t, 0] == j)[:, None], runs.meta[t, 0, j], carry)

        return jax.lax.fori_loop(0, runs.meta[t, 0, tile + COUNT], of_run, carry)

    return jax.lax.fori_loop(0, runs.local.shape[0], of_tile, carry)


def _padded(x: jax.Array, tile: int) -> jax.Array:
    return jnp.pad(x, ((0, -x.shape[0] % tile), (0, 0)))


def _own(x: jax.Array, row: jax.Array, own: jax.Array) -> jax.Array:
    """Zeroes a tile's rows of other runs: they may be NaN, and 0 x NaN is NaN."""
    return jnp.where(
        own, jax.lax.dynamic_slice_in_dim(x, row, own.shape[0]), jnp.zeros((), x.dtype)
    )


def _at(w: jax.Array, i: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(w, i, keepdims=False)


def _put(y: jax.Array, row: jax.Array, own: jax.Array, delta: jax.Array) -> jax.Array:
    old = jax.lax.dynamic_slice_in_dim(y, row, own.shape[0])
    return jax.lax.dynamic_update_slice_in_dim(
        y, jnp.where(own, (old + delta).astype(y.dtype), old), row, 0
    )


def add(
    x: jax.Array,
    a: Sequence[jax.Array],
    b: Sequence[jax.Array],
    onto: Sequence[jax.Array],
    factor: jax.Array,
    scale: jax.Array | None = None,
) -> tuple[jax.Array, ...]:
    """Implements ``packed_lora``; ``scale [M]`` is per row."""
    M, tile = x.shape[0], min(TILE, x.shape[0])
    x, onto = _padded(x, tile), [_padded(y, tile) for y in onto]
    s = None if scale is None else _padded(scale[:, None], tile)

    def body(row: jax.Array, own: jax.Array, w: jax.Array, out: Any) -> Any:
        rows = _own(x, row, own)
        new = []
        for a_k, b_k, y in zip(a, b, out):
            h = dot(rows, _at(a_k, w), (1, 1))
            h = (h if s is None else h * _own(s, row, own)).astype(x.dtype)
            new.append(_put(y, row, own, dot(h, _at(b_k, w), (1, 0))))
        return new

    return tuple(y[:M] for y in _over_runs(body, onto, factor, tile))


def backward(
    x: jax.Array,
    a: Sequence[jax.Array],
    b: Sequence[jax.Array],
    g: Sequence[jax.Array],
    dx_onto: jax.Array,
    factor: jax.Array,
) -> tuple[jax.Array, tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Returns the gradients of ``add``: of x, added to ``dx_onto``, and of the factors."""
    M, tile = x.shape[0], min(TILE, x.shape[0])
    x, g, dx = _padded(x, tile), [_padded(y, tile) for y in g], _padded(dx_onto, tile)

    def added(sums: jax.Array, w: jax.Array, part: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(sums, _at(sums, w) + part, w, 0)

    def body(row: jax.Array, own: jax.Array, w: jax.Array, carry: Any) -> Any:
        dx, da, db = carry
        rows, new_a, new_b, delta = _own(x, row, own), [], [], jnp.zeros((), jnp.float32)
        for a_k, b_k, g_k, sum_a, sum_b in zip(a, b, g, da, db):
            current = _own(g_k, row, own)
            pairs = (rows, a_k), (current, b_k)
            h, dh = (dot(left, _at(of, w), (1, 1)).astype(x.dtype) for left, of in pairs)
            h, dh = (jnp.where(own, part, jnp.zeros((), x.dtype)) for part in (h, dh))
            new_a.append(added(sum_a, w, dot(dh, rows, (0, 0))))
            new_b.append(added(sum_b, w, dot(h, current, (0, 0))))
            delta = delta + dot(dh, _at(a_k, w), (1, 0))
        return _put(dx, row, own, delta), new_a, new_b

    sums = [[jnp.zeros(w.shape, jnp.float32) for w in of] for of in (a, b)]
    dx, *sums = _over_runs(body, (dx, *sums), factor, tile)
    da, db = (tuple(s.astype(w.dtype) for s, w in zip(of, like)) for of, like in zip(sums, (a, b)))
    return dx[:M], da, db
