"""Segment sums in a fixed order. On a GPU a scatter adds in the order of its threads.

With a scatter an embedding adapter's gradient changed from run to run (an H100; two of 388 numbers,
by one unit in the last place), which looked as if one policy had affected another.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp


def segment_sum(values: jax.Array, ids: jax.Array, many: int) -> jax.Array:
    """Returns ``[many, ...]``: sums of the values ``[N, ...]`` by their ids ``[N]``; ids >=
    ``many`` are dropped.
    """
    out: Any = _segment_sum(values, ids, many)
    return out


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _segment_sum(values: jax.Array, ids: jax.Array, many: int) -> jax.Array:
    plain = functools.partial(jax.ops.segment_sum, num_segments=many)
    return jax.lax.platform_dependent(
        values, ids, cuda=functools.partial(sorted_sum, many=many), default=plain
    )


def _forward(values: jax.Array, ids: jax.Array, many: int) -> tuple[jax.Array, jax.Array]:
    return segment_sum(values, ids, many), ids


def _backward(many: int, ids: jax.Array, g: jax.Array) -> tuple[jax.Array, None]:
    return g.at[ids].get(mode="fill", fill_value=0), None


_segment_sum.defvjp(_forward, _backward)


def sorted_sum(values: jax.Array, ids: jax.Array, many: int) -> jax.Array:
    """Computes ``segment_sum`` by a scan over the values sorted by id."""
    order = jnp.argsort(ids, stable=True)
    present, dtype = ids[order], values.dtype
    values = values[order].astype(jnp.promote_types(dtype, jnp.float32))
    changes = present[1:] != present[:-1]
    one = jnp.ones((1,), bool)
    leads = jnp.concatenate([one, changes]).reshape(-1, *(1,) * (values.ndim - 1))

    def meet(left: tuple[jax.Array, jax.Array], right: tuple[jax.Array, jax.Array]) -> Any:
        return left[0] | right[0], jnp.where(right[0], right[1], left[1] + right[1])

    _, sums = jax.lax.associative_scan(meet, (leads, values))
    ends = jnp.concatenate([changes, one])
    places = jnp.where(ends, present, many)
    out = jnp.zeros((many, *values.shape[1:]), dtype)
    return out.at[places].set(sums.astype(dtype), mode="drop")


@jax.custom_vjp
def columns(table_RV: jax.Array, ids_N: jax.Array) -> jax.Array:
    """Returns ``table[:, ids]`` as ``[N, R]``; its gradient is a ``segment_sum``."""
    return table_RV[:, ids_N].T


def _columns_forward(
    table_RV: jax.Array, ids_N: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return columns(table_RV, ids_N), (jnp.zeros((0, table_RV.shape[1]), table_RV.dtype), ids_N)


def _columns_backward(kept: tuple[jax.Array, jax.Array], g_NR: jax.Array) -> tuple[jax.Array, None]:
    like, ids_N = kept
    return segment_sum(g_NR, ids_N, like.shape[1]).T, None


columns.defvjp(_columns_forward, _columns_backward)
