"""Matmuls accumulated in float32, for kernels and frozen matrices."""

import functools
from typing import Any

import jax
import jax.numpy as jnp


def dot(x: jax.Array, y: jax.Array, contract: tuple[int, int], batch: int = 0) -> jax.Array:
    """Contracts one axis of each, like ``x``, in float32; the first ``batch`` axes are batched."""
    # By default a TPU multiplies float32 as bfloat16, and a GPU as TF32, of 10 bits.
    exact = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    dims = ((contract[0],), (contract[1],)), (tuple(range(batch)),) * 2
    return jax.lax.dot_general(
        x, y.astype(x.dtype), dims, precision=exact, preferred_element_type=jnp.float32
    )


def product(subscripts: str, x: jax.Array, w: jax.Array) -> jax.Array:
    """Computes ``einsum`` of two arrays in the dtype of ``x``, accumulated in float32."""
    kept = _of_gradients(x.dtype)
    return jnp.einsum(subscripts, x, w.astype(x.dtype), preferred_element_type=kept).astype(x.dtype)


# The gradient of a bfloat16 matmul is a bfloat16 matmul: its cotangent is rounded first. With
# float32 cotangents XLA converts the matrix, and a GPU multiplies in TF32: on an H100 that was 299
# ms of a training step of 1,042 ms (Qwen3-4B, 16,384 tokens), twice the time of bfloat16.
# ``jax_default_matmul_precision`` of ``float32`` or ``highest`` keeps float32 cotangents.
def _of_gradients(dtype: Any) -> Any:
    """Returns the dtype of the cotangents of matmuls in ``dtype``."""
    chosen = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    return jnp.dtype(jnp.float32) if chosen in ("float32", "highest") else dtype


def product_f32(subscripts: str, x: jax.Array, w: jax.Array) -> jax.Array:
    """Computes ``product`` without final rounding; rounds its cotangent to ``x``'s dtype."""
    out: Any = _product_f32(subscripts, x, w)
    return out


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product_f32(subscripts: str, x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, x, w.astype(x.dtype), preferred_element_type=jnp.float32)


def _forward(subscripts: str, x: Any, w: Any) -> tuple[jax.Array, Any]:
    # Kept as structure, not as a value, so that a frozen matrix adds no matmul to the backward
    # pass.
    return _product_f32(subscripts, x.value, w.value), (x.value, w.value, (True,) * w.perturbed)


def _backward(subscripts: str, kept: Any, g: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    x, w, trained = kept
    g = g.astype(_of_gradients(x.dtype))

    def again(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.einsum(subscripts, x, w.astype(x.dtype), preferred_element_type=g.dtype)

    if trained:
        return jax.vjp(again, x, w)[1](g)
    return *jax.vjp(lambda x: again(x, w), x)[1](g), None


_product_f32.defvjp(_forward, _backward, symbolic_zeros=True)
