"""Grouped matmul against a loop in float64, in the form of the CPU and in that of accelerators.

Axes: M rows, G groups, W matrices, K in, N out.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mint_jax.models import grouped
from mint_jax.models.grouped import grouped_matmul
from pallas_kernels.grouped_matmul import pallas_gpu, xla
from tests.marks import first

K, N = 11, 13
SIZES = {
    "even": (8, 8, 8, 8),
    "zeros": (0, 5, 0, 0, 17, 0),
    "skewed": (1, 290, 0, 2),  # more than two of the largest tiles
    "one": (0, 0, 33),
    "none": (0, 0),
}
BEHIND = (0, 9)  # rows behind the last group


def _problem(rng, sizes, behind, index, transposed, dtype=np.float32):
    M, G = sum(sizes) + behind, len(sizes)
    # each matrix at most once, two without a group
    index_G = jnp.asarray(rng.permutation(G + 2)[:G], jnp.int32) if index else None
    shape = (G + 2 if index else G, *((N, K) if transposed else (K, N)))
    x_MK, w, g_MN = (jnp.asarray(rng.normal(size=s), dtype) for s in ((M, K), shape, (M, N)))
    return x_MK, w, jnp.array(sizes, jnp.int32), index_G, g_MN


def _loop(x_MK, w, sizes, index, g_MN, transposed):
    """The product, and the gradients of ``sum(product * g)``, all in float64."""
    x, w, g = (np.asarray(v, np.float64) for v in (x_MK, w, g_MN))
    w = w.swapaxes(1, 2) if transposed else w
    y, dx, dw, start = np.zeros(g.shape), np.zeros(x.shape), np.zeros(w.shape), 0
    for group, size in enumerate(np.asarray(sizes)):
        rows, matrix = slice(start, start + size), group if index is None else index[group]
        y[rows], dx[rows] = x[rows] @ w[matrix], g[rows] @ w[matrix].T
        dw[matrix] += x[rows].T @ g[rows]
        start += size
    return y, dx, dw.swapaxes(1, 2) if transposed else dw


@functools.partial(jax.jit, static_argnames="transposed")
def _ours(x, w, size, index, g, transposed=False):
    """As ``_loop``."""
    y, vjp = jax.vjp(lambda x, w: grouped_matmul(x, w, size, index, transposed=transposed), x, w)
    return y, *vjp(g)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("index", [False, True])
@pytest.mark.parametrize("sizes", first(3, SIZES))
def test_products_and_gradients_equal_a_loop(sizes, index, transposed, rng):
    for behind in BEHIND:
        if not sum(SIZES[sizes]) + behind:
            continue
        x, w, size, indices, g = _problem(rng, SIZES[sizes], behind, index, transposed)
        results = _ours(x, w, size, indices, g, transposed)
        for got, want in zip(results, _loop(x, w, size, indices, g, transposed), strict=True):
            # float32 sums of at most 290 terms
            np.testing.assert_allclose(got, want, atol=2e-6 * np.abs(want).max(initial=1.0))
        assert not np.any(np.asarray(results[0])[sum(SIZES[sizes]) :])


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("form", ["cpu", "accelerators", "pallas_gpu"])
def test_matrices_may_begin_anywhere_in_a_stack(form, transposed, request, rng):
    """One number in place of an index: those before and behind are not touched, be they NaN, and
    have no gradient.
    """
    if form == "accelerators":
        request.getfixturevalue("form_of_accelerators")
    x, w, size, _, g = _problem(rng, SIZES["zeros"], 3, False, transposed)
    G, first_ = len(w), 2
    stack = jnp.full((G + 5, *w.shape[1:]), jnp.nan).at[first_ : first_ + G].set(w)
    kernel = form if form == "pallas_gpu" else "auto"

    def run(w, index):
        y, vjp = jax.vjp(lambda x, w: grouped_matmul(x, w, size, index, transposed, kernel), x, w)
        return y, *vjp(g)

    (y, dx, dw), (y_, dx_, dw_) = jax.jit(run)(stack, jnp.int32(first_)), jax.jit(run)(w, None)
    np.testing.assert_array_equal(y, y_)
    np.testing.assert_array_equal(dx, dx_)
    np.testing.assert_array_equal(dw[first_ : first_ + G], dw_)
    assert not np.any(dw[:first_])
    assert not np.any(dw[first_ + G :])


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_bfloat16_is_rounded_once(sizes, transposed, rng):
    """Accumulated in float32: what comes out is the exact result to half a unit of bfloat16's last
    place.
    """
    x, w, size, _, g = _problem(rng, SIZES[sizes], 9, False, transposed, jnp.bfloat16)
    for got, want in zip(
        _ours(x, w, size, None, g, transposed), _loop(x, w, size, None, g, transposed), strict=True
    ):
        assert got.dtype == jnp.bfloat16
        np.testing.assert_allclose(
            np.asarray(got, np.float64), want, rtol=2**-8, atol=1e-5 * np.abs(want).max(initial=1.0)
        )


FORMS = {
    "cpu": (grouped.tiled_matmul, grouped._outer_tiles),
    "accelerators": (xla.grouped_matmul, grouped._outer_ragged),
    "gpu": (
        functools.partial(
            pallas_gpu.grouped_matmul, how=pallas_gpu.Config(16, 16, 16, 4), interpret=True
        ),
        grouped._outer_ragged,
    ),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_in_one_group_stays_there(value, form, rng):
    """In its rows or in its matrix; and in rows behind the last group, whose products are 0
    whatever they are.
    """
    product, outer = jax.jit(FORMS[form][0], static_argnums=4), jax.jit(FORMS[form][1])
    sizes, behind, mine = (5, 9, 0, 13), 4, slice(5, 14)  # the second group is the one
    others = np.r_[0:5, 14 : sum(sizes)]
    x, w, size, index, g = _problem(rng, sizes, behind, True, False)
    bad_x, bad_g, bad_w = np.array(x), np.array(g), np.array(w)
    bad_w[index[1], 2, 2] = value
    for rows in (bad_x, bad_g):
        rows[7, 3] = rows[-1] = value
    want = np.asarray(product(x, w, size, index, False))
    for rows, matrices in ((bad_x, w), (x, bad_w), (bad_x, bad_w)):
        got = np.asarray(product(rows, matrices, size, index, False))
        np.testing.assert_array_equal(got[others], want[others])
        assert not np.isfinite(got[mine]).all()
        assert not got[sum(sizes) :].any()
    want = np.asarray(outer(x, g, size))
    for left, right in ((bad_x, g), (x, bad_g), (bad_x, bad_g)):
        got = np.asarray(outer(left, right, size))
        np.testing.assert_array_equal(got[[0, 2, 3]], want[[0, 2, 3]])
        assert not np.isfinite(got[1]).all()


@pytest.mark.parametrize("transposed", [False, True])
def test_a_kernel_that_is_named_has_the_same_products_and_gradients(transposed, rng):
    """Interpreted, with its own choice of blocks; backwards it is the kernel once more."""
    x, w, size, index, g = _problem(rng, SIZES["zeros"], 9, True, transposed)
    call = functools.partial(grouped_matmul, transposed=transposed, kernel="pallas_gpu")
    y, vjp = jax.vjp(lambda x, w: call(x, w, size, index), x, w)
    for got, want in zip((y, *vjp(g)), _loop(x, w, size, index, g, transposed), strict=True):
        # float32 sums of at most 17 terms
        np.testing.assert_allclose(got, want, atol=2e-6 * np.abs(want).max(initial=1.0))
    assert (
        str(jax.make_jaxpr(lambda x: jax.vjp(lambda x: call(x, w, size, index), x)[1](g))(x)).count(
            "interpret=True"
        )
        == 2
    )


def test_a_frozen_matrix_gets_no_gradient(rng):
    x, w, size, _, g = _problem(rng, SIZES["zeros"], 9, False, False)
    _, vjp = jax.vjp(lambda x: grouped_matmul(x, w, size), x)
    # float32 sums of 13 terms
    np.testing.assert_allclose(vjp(g)[0], _loop(x, w, size, None, g, False)[1], atol=1e-5)

    def products(*which):
        grad = jax.grad(lambda x, w: jnp.sum(grouped_matmul(x, w, size)), which)
        return str(jax.make_jaxpr(grad)(x, w)).count("ragged_dot_general")

    assert products(0) < products(0, 1), "the gradient of a frozen matrix is formed"


def test_sizes_are_data(rng):
    """One compiled program serves every distribution of rows."""
    run = jax.jit(grouped_matmul)
    x, w = (
        rng.normal(size=(24, K)).astype(np.float32),
        rng.normal(size=(4, K, N)).astype(np.float32),
    )
    for sizes in ((6, 6, 6, 6), (24, 0, 0, 0), (0, 0, 1, 20)):
        got = run(x, w, np.array(sizes, np.int32))
        want, _, _ = _loop(x, w, sizes, None, np.zeros((24, N)), False)
        np.testing.assert_allclose(got, want, atol=1e-5)  # float32 sums of 11 terms
    assert run._cache_size() == 1
