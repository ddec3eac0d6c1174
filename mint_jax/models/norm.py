"""RMSNorm (Zhang and Sennrich 2019, arXiv 1910.07467), computed in float32.

The gradient is written out so that the backward pass stores only ``x`` and one scalar per row.
"""

import functools

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Returns ``x / rms(x) * scale`` over the last axis, in the dtype of ``x``."""
    return _rms_norm(x, scale, eps)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _rms_norm(x, scale, eps):
    return _forward(x, scale, eps)[0]


def _forward(x, scale, eps):
    x32 = x.astype(jnp.float32)
    inv = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * inv * _wide(scale, x)).astype(x.dtype), (x, inv, scale)


def _wide(scale, x):
    """Returns the scale in float32, with as many axes as ``x``."""
    return jnp.expand_dims(scale.astype(jnp.float32), tuple(range(x.ndim - 1)))


def _backward(eps, residuals, g):
    # y = x r s with r = (mean(x^2) + eps)^(-1/2):  dx = r (g s - x r^2 mean(g s x))
    del eps
    x, inv, scale = residuals
    x32, g32 = x.astype(jnp.float32), g.astype(jnp.float32)
    gs = g32 * _wide(scale, x)
    dx = inv * (gs - x32 * (inv * inv) * jnp.mean(gs * x32, axis=-1, keepdims=True))
    dscale = jnp.sum(g32 * x32 * inv, axis=tuple(range(x.ndim - 1)))
    return dx.astype(x.dtype), dscale.astype(scale.dtype)


_rms_norm.defvjp(_forward, _backward)
