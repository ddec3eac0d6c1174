"""RMSNorm: values and both gradients against torch's autograd in float64."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

from mint_jax.models.norm import rms_norm


def _torch(x, scale, g, eps):
    """Value and gradients of ``x / sqrt(mean(x^2) + eps) * scale`` in float64."""
    x, scale = (torch.tensor(np.asarray(a, np.float64), requires_grad=True) for a in (x, scale))
    y = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * scale
    return y.detach().numpy(), *(
        a.numpy()
        for a in torch.autograd.grad(y, (x, scale), torch.tensor(np.asarray(g, np.float64)))
    )


@pytest.mark.parametrize("shape", [(48,), (5, 16), (2, 3, 4, 16)])
@pytest.mark.parametrize("eps", [1e-6, 0.3])  # one that only guards, one that matters
def test_values_and_gradients_equal_torch(shape, eps, rng):
    x, g = (rng.normal(size=shape).astype(np.float32) for _ in range(2))
    # rows of very different sizes
    x = x * rng.lognormal(sigma=2, size=(*shape[:-1], 1)).astype(np.float32)
    scale = rng.normal(size=shape[-1]).astype(np.float32)
    y, vjp = jax.vjp(lambda x, s: rms_norm(x, s, eps), x, scale)
    want = _torch(x, scale, g, eps)
    for ours, theirs in zip((y, *vjp(g)), want):
        # float32 sums of a row
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5 * np.abs(theirs).max())


def test_tiny_and_huge_rows_stay_finite(rng):
    x = rng.normal(size=(3, 64)).astype(np.float32) * np.array([[0.0], [1e-12], [1e15]], np.float32)
    y, vjp = jax.vjp(lambda x: rms_norm(x, jnp.ones(64), 1e-6), x)
    want, dx, _ = _torch(x, np.ones(64), np.ones_like(x), 1e-6)
    np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-12)  # float32
    # float32, cancellation in g - x mean(g x)
    np.testing.assert_allclose(vjp(np.ones_like(x))[0][:2], dx[:2], rtol=1e-4)
    assert np.isfinite(vjp(np.ones_like(x))[0]).all()


def test_bfloat16_rounds_once(rng):
    x = rng.normal(size=(7, 48)).astype(ml_dtypes.bfloat16)
    scale, g = (rng.normal(size=n).astype(ml_dtypes.bfloat16) for n in (48, (7, 48)))
    y, vjp = jax.vjp(lambda x, s: rms_norm(x, s, 1e-5), x, scale)
    want = _torch(x, scale, g, 1e-5)
    for ours, theirs in zip((y, *vjp(jnp.asarray(g))), want):
        assert ours.dtype == jnp.bfloat16
        # one rounding: half of bfloat16's 2**-7, and a little for float32 results that lie in the
        # middle of two
        np.testing.assert_allclose(
            np.asarray(ours, np.float64), theirs, rtol=1.01 * 2**-8, atol=2e-6
        )
