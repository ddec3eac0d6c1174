"""The kernel of GPUs against float64, and its isolation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import pallas_gpu, reference

SMALL = pallas_gpu.Config(rows=16, columns=32, depth=16, warps=4)  # several tiles, blocks and steps


@functools.partial(jax.jit, static_argnames=("transposed", "how"))
def kernel(x, w, sizes, index, transposed, how):
    return pallas_gpu.grouped_matmul(x, w, sizes, index, transposed, how, interpret=True)


def problem(rng, sizes, behind, K, N, index, transposed, dtype, stored):
    G, M = len(sizes), sum(sizes) + behind
    w = rng.normal(size=(G + 2, *((N, K) if transposed else (K, N))))
    w = jnp.array(np.rint(20 * w), jnp.int8) if stored == "int8" else jnp.array(w, stored)
    index = jnp.array(rng.permutation(G + 2)[:G], jnp.int32) if index else None
    return jnp.array(rng.normal(size=(M, K)), dtype), w, jnp.array(sizes, jnp.int32), index


# Of the largest entry. float32: sums of up to 100 products in another order; bfloat16: the result
# is rounded once.
TOLERANCE = {"float32": 1e-6, "bfloat16": 2**-8}

CASES = [
    # sizes, rows behind, K, N, index, transposed, rows, matrices, blocks
    ((5, 0, 40, 16, 0), 7, 40, 50, True, False, "float32", "float32", SMALL),
    ((5, 0, 40, 16, 0), 7, 40, 50, True, True, "bfloat16", "bfloat16", SMALL),
    ((0, 0, 33), 0, 64, 64, False, True, "float32", "bfloat16", SMALL),
    ((1, 2, 3), 90, 100, 16, False, False, "bfloat16", "int8", SMALL),
    ((20, 70), 0, 16, 100, False, False, "bfloat16", "float8_e4m3fn", SMALL),
    ((0, 0), 9, 16, 16, False, False, "float32", "float32", SMALL),
    ((30, 3), 4, 3, 1, True, False, "float32", "float32", None),  # less than any block
    ((150, 7), 4, 200, 130, False, True, "bfloat16", "bfloat16", None),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_products_are_those_of_float64(rng, case):
    *made, how = case
    x, w, sizes, index = problem(rng, *made)
    got = kernel(x, w, sizes, index, made[5], how)
    want = reference.grouped_matmul(x, w, sizes, index, made[5])
    assert got.dtype == x.dtype
    most = TOLERANCE[made[6]] * np.abs(want).max(initial=1e-30)
    np.testing.assert_allclose(np.array(got, np.float64), want, atol=most, rtol=0)
    assert not np.array(got, np.float32)[sum(made[0]) :].any(), "rows behind the last group"


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_in_one_group_stays_there(rng, value):
    """In its rows, or in its matrix; rows behind the last group give zeros."""
    made = (5, 9, 0, 13), 4, 40, 50, False, False, "float32", "float32"
    x, w, sizes, _ = problem(rng, *made)
    others = np.r_[0:5, 14:31]
    want = np.array(kernel(x, w, sizes, None, False, SMALL))
    bad_x, bad_w = x.at[np.array([7, -1]), 3].set(value), w.at[1, 2, 2].set(value)
    for rows, matrices in ((bad_x, w), (x, bad_w), (bad_x, bad_w)):
        got = np.array(kernel(rows, matrices, sizes, None, False, SMALL))
        np.testing.assert_array_equal(got[others], want[others])
        assert not np.isfinite(got[5:14]).all()
        assert not got[27:].any()
