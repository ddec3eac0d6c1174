"""Matmuls of grouped rows on a CPU, and sums of outer products on accelerators, against float64.

Axes: M rows, G groups, W matrices, K in, N out.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mint_jax.models.grouped import tiled_matmul
from mint_jax.models.packed_lora import outer
from pallas_kernels.grouped_matmul import pallas_gpu, xla

K, N = 11, 13
SIZES = {
    "even": (8, 8, 8, 8),
    "zeros": (0, 5, 0, 0, 17, 0),
    "skewed": (1, 290, 0, 2),  # more than two of the largest tiles
    "none": (0, 0),
}


def _normal(rng, *shape):
    return jnp.asarray(rng.normal(size=shape), jnp.float32)


def _bounds(sizes):
    ends = np.cumsum(sizes)
    return [slice(end - size, end) for size, end in zip(sizes, ends)]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_products_equal_a_loop_wherever_matrices_begin_in_a_stack(sizes, transposed, rng):
    """Other matrices of the stack are NaN; rows after the last group give zeros."""
    G, M, first = len(sizes), sum(sizes) + 9, 2
    x, w = _normal(rng, M, K), _normal(rng, G, *((N, K) if transposed else (K, N)))
    stack = jnp.full((G + 5, *w.shape[1:]), jnp.nan).at[first : first + G].set(w)
    run = jax.jit(tiled_matmul, static_argnums=4)
    got = run(x, stack, np.array(sizes, np.int32), jnp.int32(first), transposed)
    want = np.zeros((M, N))
    for rows, matrix in zip(_bounds(sizes), np.asarray(w, np.float64)):
        want[rows] = np.asarray(x[rows], np.float64) @ (matrix.T if transposed else matrix)
    # float32 sums of 11 terms
    np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("sizes", [SIZES["zeros"], SIZES["skewed"]], ids=["zeros", "skewed"])
def test_sums_of_outer_products_equal_a_loop(sizes, rng):
    x, g = (_normal(rng, sum(sizes) + 9, width) for width in (K, N))
    got = jax.jit(outer)(x, g, np.array(sizes, np.int32))
    left, right = (np.asarray(v, np.float64) for v in (x, g))
    want = np.stack([left[rows].T @ right[rows] for rows in _bounds(sizes)])
    # float32 sums of at most 290 terms
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())


FORMS = {
    "cpu": None,
    "accelerators": xla.grouped_matmul,
    "gpu": functools.partial(
        pallas_gpu.grouped_matmul, how=pallas_gpu.Config(16, 16, 16, 4), interpret=True
    ),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_in_one_group_stays_there(value, form, rng):
    """In its rows or in its matrix; and in rows behind the last group, whose products are 0
    whatever they are.
    """

    def product(x, w):
        if form == "cpu":
            return np.asarray(jax.jit(tiled_matmul)(x, w, size))
        index = jnp.arange(len(sizes), dtype=jnp.int32)
        return np.asarray(jax.jit(FORMS[form], static_argnums=4)(x, w, size, index, False))

    sizes, mine = (5, 9, 0, 13), slice(5, 14)  # the second group is the one
    size, others = np.array(sizes, np.int32), np.r_[0:5, 14:27]
    x, w, g = _normal(rng, 31, K), _normal(rng, 4, K, N), _normal(rng, 31, N)
    bad_x, bad_g, bad_w = np.array(x), np.array(g), np.array(w)
    bad_w[1, 2, 2] = value
    for rows in (bad_x, bad_g):
        rows[7, 3] = rows[-1] = value
    want = product(x, w)
    for rows, matrices in ((bad_x, w), (x, bad_w), (bad_x, bad_w)):
        got = product(rows, matrices)
        np.testing.assert_array_equal(got[others], want[others])
        assert not np.isfinite(got[mine]).all()
        assert not got[27:].any()
    if form == "accelerators":
        want = np.asarray(jax.jit(outer)(x, g, size))
        for left, right in ((bad_x, g), (x, bad_g), (bad_x, bad_g)):
            got = np.asarray(jax.jit(outer)(left, right, size))
            np.testing.assert_array_equal(got[[0, 2, 3]], want[[0, 2, 3]])
            assert not np.isfinite(got[1]).all()
