"""Grouped matmul by ``jax.lax.ragged_dot``. XLA has kernels for it on TPUs only; elsewhere it is
dense.

Axes: M rows, G groups, W matrices, K in, N out.
"""

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from pallas_kernels.grouped_matmul.tiles import group_at


def grouped_matmul(
    x: jax.Array, w: jax.Array, sizes: jax.Array, index: jax.Array | None, transposed: bool
) -> jax.Array:
    """Implements ``grouped_matmul``."""
    if index is not None and index.ndim == 0:
        # The slice is taken in the stack's layout. The transposed product wants the other one, and
        # XLA would transpose the whole stack before the loop over layers: a copy of two of three
        # matrices of all experts (Qwen3-30B-A3B on eight v5p chips 4.8 GB a device, Kimi-K2 on 128
        # 21 GB).
        w = with_layout_constraint(
            jax.lax.dynamic_slice_in_dim(w, index, sizes.shape[0]), Layout((0, 1, 2))
        )
        index = None
    # Matrices shared by the groups are the base's, which is finite. Matrices selected by an index
    # may be single policies', and a ragged product may multiply another group's NaN by 0. It gets
    # finite operands, and rows whose own matrix was not finite get their NaN back afterwards.
    w, bad_G = (w, None) if index is None else finite(w[index])
    w = w.astype(x.dtype)
    w = w.swapaxes(1, 2) if transposed else w
    y = jax.lax.ragged_dot(x, w, sizes, preferred_element_type=jnp.float32).astype(x.dtype)
    if bad_G is not None:
        bad_M = bad_G.at[group_of_rows(x.shape[0], sizes)].get(mode="fill", fill_value=False)
        y = jnp.where(bad_M[:, None], jnp.full((), jnp.nan, y.dtype), y)
    return _inside(y, sizes)


def _inside(x_MN: jax.Array, sizes_G: jax.Array) -> jax.Array:
    """Zeroes rows after the last group."""
    return jnp.where(
        (jnp.arange(x_MN.shape[0]) < jnp.sum(sizes_G))[:, None], x_MN, jnp.zeros((), x_MN.dtype)
    )


def finite(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Replaces non-finite numbers by 0; also returns which entries of the first axis had any."""
    fine = jnp.isfinite(x)
    return jnp.where(fine, x, jnp.zeros((), x.dtype)), ~jnp.all(fine, axis=tuple(range(1, x.ndim)))


def group_of_rows(M: int, sizes_G: jax.Array) -> jax.Array:
    """Returns the group of each row, ``[M]``; G after the last group."""
    return group_at(jnp.cumsum(sizes_G), jnp.arange(M, dtype=sizes_G.dtype))
