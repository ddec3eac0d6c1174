"""Rows times one layer's matrices of stacks: the frozen projections in a scan over layers, and the
unembedding. Forward only.

Axes: M rows, L layers, D in, F out, P and N panels and blocks of a matrix in 4 or 8 bits, see
``blocks``.
"""

import jax

from pallas_kernels import dispatch
from pallas_kernels.dispatch import Implementation
from pallas_kernels.layer_matmul import blocks, cpu, pallas_gpu, xla

MATMUL = (
    Implementation("cpu", "cpu", cpu.matmul, cpu.require),
    Implementation("pallas_gpu", "cuda", pallas_gpu.matmul, pallas_gpu.require),
    Implementation("xla", None, xla.matmul, dispatch.anything),
)
UNPACK = (
    Implementation("cpu", "cpu", blocks.unpack_by_cpu, blocks.require_cpu),
    Implementation("xla", None, blocks.unpack, dispatch.anything),
)


def layer_matmul(
    x: jax.Array,
    stacks: tuple[jax.Array, ...],
    layer: jax.Array,
    rows: jax.Array | None = None,
    *,
    transposed: bool = False,
    implementation: str = "auto",
) -> tuple[jax.Array, ...]:
    """Returns ``x w[layer]`` of every stack, ``[..., F]`` float32 each.

    Args:
        x: ``[..., D]`` float32 or bfloat16.
        stacks: ``[L, D, F]`` of one dtype, float32, bfloat16, int8 or float8_e4m3fn, each with its
            own F; or all in blocks of one kind, ``[L, P, N, bytes]`` uint8. ``[L, F, D]`` if
            ``transposed``, for which only XLA serves 8 bits.
        layer: int32, at most L - 1.
        rows: int32, number of rows of x in use, at the front; others are undefined. None: all.
    """
    for w in stacks:
        shape = _shape(w)
        if (
            len(shape) != 3
            or x.shape[-1] != shape[2 if transposed else 1]
            or layer.shape
            or (transposed and blocks.is_packed(w))
        ):
            wanted = "[L, F, D]" if transposed else "[L, D, F]"
            raise ValueError(
                f"x has shape {x.shape}, w {shape}, layer {layer.shape}; expected [..., D],"
                f" {wanted} and a scalar"
            )
    args, of = (x, stacks, layer, rows), {"transposed": transposed}
    return dispatch.run("layer_matmul", MATMUL, implementation, args, **of)


def unpack(w: jax.Array, *, transposed: bool = False, implementation: str = "auto") -> jax.Array:
    """Returns the float32 matrix ``[D, F]`` of blocks ``[P, N, bytes]``, or its transpose."""
    return dispatch.run("unpack", UNPACK, implementation, (w,), transposed=transposed)


def _shape(w: jax.Array) -> tuple[int, ...]:
    return (
        (*w.shape[:-3], *blocks.matrix_shape(w)) if w.ndim == 4 and blocks.is_packed(w) else w.shape
    )
