"""Products in bfloat16 and their gradients against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.products import product, product_f32

STEP = 2.0**-7  # of bfloat16, between neighbours over their size


@pytest.mark.parametrize("fn", [product, product_f32])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("chosen", [None, "float32"])
def test_values_and_gradients_are_rounded_once(fn, dtype, chosen, rng):
    x, w, g = (jnp.asarray(rng.normal(size=s), dtype) for s in ((3, 700), (700, 50), (3, 50)))
    x64, w64, g64 = (np.asarray(v, np.float64) for v in (x, w, g))
    with jax.default_matmul_precision(chosen):
        y, vjp = jax.vjp(lambda x, w: fn("MD,DF->MF", x, w), x, w)
        dx, dw = vjp(g.astype(y.dtype))
    assert y.dtype == (jnp.float32 if fn is product_f32 else dtype)
    for made, want in ((y, x64 @ w64), (dx, g64 @ w64.T), (dw, x64.T @ g64)):
        # half a step each, and float32 sums of 700 terms
        exact = 0 if made.dtype == jnp.float32 else STEP / 2
        np.testing.assert_allclose(
            np.asarray(made, np.float64), want, rtol=exact, atol=2e-5 * np.abs(want).max()
        )


def test_only_a_cotangent_of_a_bfloat16_product_is_rounded(rng):
    x, w, g = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((3, 70), (70, 5), (3, 5)))

    def gradient(x, w):
        return jax.vjp(lambda x: product_f32("MD,DF->MF", x, w), x)[1](g)[0]

    np.testing.assert_allclose(gradient(x, w), g @ w.T, rtol=1e-5, atol=1e-5)
    x, w = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)
    exact = np.asarray(g, np.float64) @ np.asarray(w, np.float64).T
    rounded = np.asarray(g.astype(jnp.bfloat16), np.float64) @ np.asarray(w, np.float64).T

    def near(made, want):
        """Half a step of the result, and float32 sums of 5 terms."""
        error = np.abs(np.asarray(made, np.float64) - want)
        return (error <= STEP / 2 * np.abs(want) + 1e-5).all()

    assert near(gradient(x, w), rounded)
    assert not near(gradient(x, w), exact)
    with jax.default_matmul_precision("float32"):
        assert near(gradient(x, w), exact)
        assert not near(gradient(x, w), rounded)
