"""A layer's matrix read from where it lies in the stack, by the kernel for CPUs (``native/layer_matmul.cc``).

XLA copies the layer out of the stack before it multiplies: SmolLM2-135M's layers, 425 MB, were read twice and written once in every step
of decoding. Here a thread takes panels of 64 columns; what a few rows multiply is read in one go, and for many rows a panel is put side
by side in the cache once, converted where the weights are of fewer bits. Sums are in float32 whatever these are: weights in bfloat16 are
half the bytes of a step, and the products the same as of float32 weights of these values.

A row's bits do not depend on how many other rows there are.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import native

WEIGHTS = (jnp.float32, jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn)


def require(x: jax.Array, w: jax.Array, layer: jax.Array) -> None:
    """Whether ``matmul`` can serve these, or their shapes.

    Raises:
        NotImplementedError: with the reason.
    """
    if w.dtype not in WEIGHTS or x.dtype not in (jnp.float32, jnp.bfloat16):
        raise NotImplementedError(f"products of {x.dtype} and {w.dtype} have no kernel")
    native.require_one_device()
    native.require()


def matmul(x: jax.Array, w: jax.Array, layer: jax.Array) -> jax.Array:
    """See ``layer_matmul``."""
    x_MD = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
    out = jax.ShapeDtypeStruct((x_MD.shape[0], w.shape[2]), jnp.float32)
    return native.call("mint_layer_matmul", out, x_MD, w, jnp.int32(layer)).reshape(*x.shape[:-1], -1)
