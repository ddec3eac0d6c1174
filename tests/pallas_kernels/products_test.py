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
