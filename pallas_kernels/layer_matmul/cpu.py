"""The CPU kernel of ``layer_matmul`` (``native/layer_matmul.cc``), which reads stacks in place."""

import jax
import jax.numpy as jnp

from pallas_kernels import native
from pallas_kernels.layer_matmul import blocks

WEIGHTS = (jnp.float32, jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn, jnp.uint8)


def require(
    x: jax.Array,
    stacks: tuple[jax.Array, ...],
    layer: jax.Array,
    rows: jax.Array | None = None,
    transposed: bool = False,
) -> None:
    """Raises NotImplementedError with the reason if ``matmul`` cannot serve these arrays."""
    for w in stacks:
        if (
            w.dtype not in WEIGHTS
            or w.dtype != stacks[0].dtype
            or x.dtype not in (jnp.float32, jnp.bfloat16)
        ):
            raise NotImplementedError(
                f"products of {x.dtype} and {w.dtype} have no kernel, or not in one call with"
                f" {stacks[0].dtype}"
            )
        if transposed and w.dtype.itemsize == 1:
            raise NotImplementedError(f"tables in {w.dtype} have no kernel")
        if blocks.is_packed(w) and w.shape[3] != stacks[0].shape[3]:
            raise NotImplementedError("matrices in blocks of two kinds are not one call")
    native.require_one_device()
    native.require()


# XLA copies the layer out of the stack first: SmolLM2-135M's layers, 425 MB, were read twice and
# written once in every decode step. Sums are float32, so bfloat16 weights halve the bytes and give
# the same results as float32 weights of these values. Matrices in 4-bit blocks
# (``native/block_matmul.cc``) take 3.9 ms for 1 row of SmolLM2-135M's layers where float32 takes
# 15.8, 7.2 instead of 18.4 for 8, and 63 instead of 75 for 128 (medians of 15 in turn, two cores).
def matmul(
    x: jax.Array,
    stacks: tuple[jax.Array, ...],
    layer: jax.Array,
    rows: jax.Array | None = None,
    transposed: bool = False,
) -> tuple[jax.Array, ...]:
    """Implements ``layer_matmul``; unused rows get zeros."""
    x_MD = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
    in_blocks = blocks.is_packed(stacks[0])
    widths = [
        blocks.matrix_shape(w)[1] if in_blocks else w.shape[1 if transposed else 2] for w in stacks
    ]
    results = [jax.ShapeDtypeStruct((x_MD.shape[0], width), jnp.float32) for width in widths]
    args = x_MD, jnp.int32(layer), jnp.int32(x_MD.shape[0] if rows is None else rows), *stacks
    if in_blocks:
        made = native.call("mint_block_matmul", results, *args)
    else:
        made = native.call("mint_layer_matmul", results, *args, transposed=transposed)
    return tuple(y.reshape(*x.shape[:-1], width) for y, width in zip(made, widths))
