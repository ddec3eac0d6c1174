"""A layer's matrices read from where they lie in their stacks, by the kernel for CPUs
(``native/layer_matmul.cc``).

XLA copies the layer out of the stack before it multiplies: SmolLM2-135M's layers, 425 MB, were read
twice and written once in every step of decoding. Here a thread takes panels of columns: up to eight
rows read a matrix in one go, and for many rows a panel is put side by side in the cache once,
converted where the weights are of fewer bits. Transposed, as an unembedding is, a sum has a part in
every lane. Sums are in float32 whatever the weights are: those in bfloat16 are half the bytes of a
step, and the products the same as of float32 weights of these values. Matrices of the same rows, as
those of queries, keys and values, are one call: threads come together once, which is 3 to 6 % of
SmolLM2-135M's products of 1 and of 8 rows.

Matrices in blocks of 4 bits (``native/block_matmul.cc``) are unpacked in registers, or for more
than two rows block by block in the first cache: SmolLM2-135M's layers take 3.9 ms of 1 row where
float32 takes 15.8, 7.2 where it takes 18.4 of 8, 18 where it takes 30 of 32 and 63 where it takes
75 of 128 (medians of 15 in turn, two cores), and the bits are the same.

A row's bits do not depend on how many other rows there are. So only those in use are multiplied: a
program of 128 rows that reads a prompt of ten tokens does the work of one block of 32.
"""

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
    """Whether ``matmul`` can serve these, or their shapes.

    Raises:
        NotImplementedError: with the reason.
    """
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
        if blocks.are(w) and w.shape[3] != stacks[0].shape[3]:
            raise NotImplementedError("matrices in blocks of two kinds are not one call")
    native.require_one_device()
    native.require()


def matmul(
    x: jax.Array,
    stacks: tuple[jax.Array, ...],
    layer: jax.Array,
    rows: jax.Array | None = None,
    transposed: bool = False,
) -> tuple[jax.Array, ...]:
    """See ``layer_matmul``; rows that are not in use get zeros."""
    x_MD = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
    in_blocks = blocks.are(stacks[0])
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
