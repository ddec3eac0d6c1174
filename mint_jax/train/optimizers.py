"""Directions of updates: AdamW (arXiv 1711.05101) and dimuon.

Tinker names dimuon and its settings, without a formula; the one here is ours. With the mean ``m``
of gradients of a factor, row sums ``r`` and column sums ``c`` of ``m * m`` relative to the largest:

    m <- b1 m + (1 - b1) g
    direction = sign((r + eps)^(-1/4) m (c + eps)^(-1/4))

The scales are Shampoo's (arXiv 1802.09568) with diagonal preconditioners, made of ``m`` alone. The
matrix sign ``U V^T`` of ``U S V^T`` is Muon's (https://kellerjordan.github.io/posts/muon): each
matrix moves by its learning rate in all directions of its row space.

Axes: R rank, D in or out.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

# Coefficients of a x + b x^3 + c x^5, for singular values: Muon's raises those of at least 1/1000
# of the norm to 0.7 to 1.2, the second then brings them within 1e-6 of 1.
STEPS = [(3.4445, -4.7750, 2.0315)] * 5 + [(15 / 8, -10 / 8, 3 / 8)] * 3


def adamw(
    hyper: Any, steps: jax.Array, grad: jax.Array, mu: jax.Array, nu: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the direction of an update after ``steps``, and the new moments."""
    moved: Any
    adam = optax.scale_by_adam(hyper.b1, hyper.b2, hyper.eps)
    change, moved = adam.update(grad, optax.ScaleByAdamState(steps, mu, nu))  # type: ignore[arg-type]
    return change, moved.mu, moved.nu  # type: ignore[return-value]


def dimuon(
    hyper: Any, steps: jax.Array, grad: jax.Array, mu: jax.Array, nu: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns what ``adamw`` does, for each matrix ``[R, D]``; ``nu`` stays as it is."""

    def layer(x: jax.Array) -> jax.Array:
        largest = jnp.max(jnp.abs(x), (-2, -1), keepdims=True)
        x, scales = x / _at_least_tiny(largest), 1.0  # its squares are finite
        for axis in (-2, -1):
            sums = jnp.sum(jnp.square(x), axis, keepdims=True)
            largest = _at_least_tiny(jnp.max(sums, (-2, -1), keepdims=True))
            scales *= (sums / largest + hyper.eps) ** -0.25
        return matrix_sign(x * scales)

    mu = hyper.b1 * mu + (1 - hyper.b1) * grad
    return jax.lax.map(layer, mu), mu, nu  # layer by layer: temporaries of all are large


def matrix_sign(x_RD: jax.Array) -> jax.Array:
    """Returns the matrices with all singular values 1; those below 1/1000 of the norm stay smaller,
    and zeros stay zero.
    """
    if x_RD.shape[-2] > x_RD.shape[-1]:
        return jnp.swapaxes(matrix_sign(jnp.swapaxes(x_RD, -1, -2)), -1, -2)
    x_RD = x_RD / _at_least_tiny(jnp.linalg.norm(x_RD, axis=(-2, -1), keepdims=True))

    def step(x_RD: jax.Array, coefs: jax.Array) -> tuple[jax.Array, None]:
        a, b, c = coefs
        # TPUs would round products to bfloat16
        einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
        x_RR = einsum("...RD,...SD->...RS", x_RD, x_RD)
        x_RR = b * x_RR + c * einsum("...RS,...ST->...RT", x_RR, x_RR)
        return a * x_RD + einsum("...RS,...SD->...RD", x_RR, x_RD), None

    return jax.lax.scan(step, x_RD, jnp.array(STEPS, x_RD.dtype))[0]


def _at_least_tiny(x: jax.Array) -> jax.Array:
    return jnp.maximum(x, jnp.finfo(x.dtype).tiny)


DIRECTIONS = {"adamw": adamw, "dimuon": dimuon}
