"""Rows times one layer's matrices of stacks: what the frozen projections of a scan over layers are, and an unembedding. Forward only.

Axes: M rows, L layers, D in, F out.
"""

import functools

import jax

from pallas_kernels import dispatch
from pallas_kernels.dispatch import Implementation
from pallas_kernels.layer_matmul import cpu, xla


def table(transposed: bool) -> tuple[Implementation, ...]:
    """Implementations of ``layer_matmul``."""
    require = functools.partial(cpu.require, transposed=transposed)
    return (
        Implementation("cpu", "cpu", functools.partial(cpu.matmul, transposed=transposed), require),
        Implementation("xla", None, functools.partial(xla.matmul, transposed=transposed), dispatch.anything),
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
    """``x w[layer]`` of every stack, ``[..., F]`` float32 each.

    Args:
        x: ``[..., D]`` float32 or bfloat16.
        stacks: ``[L, D, F]`` of one dtype, float32, bfloat16, int8 or float8_e4m3fn, each with its own F; ``[L, F, D]`` when
            ``transposed``, of which only XLA serves 8 bits.
        layer: int32, at most L - 1.
        rows: int32, how many of x are in use, the first ones; what the others get is of no use, and CPUs spend nothing on it. None: all.
        implementation: ``auto``, ``xla`` or ``cpu``, see ``dispatch``.

    Raises:
        ValueError: shapes that do not fit, or an implementation that cannot serve them.
    """
    for w in stacks:
        if w.ndim != 3 or x.shape[-1] != w.shape[2 if transposed else 1] or layer.shape:
            wanted = "[L, F, D]" if transposed else "[L, D, F]"
            raise ValueError(f"x has shape {x.shape}, w {w.shape}, layer {layer.shape}; expected [..., D], {wanted} and a scalar")
    return dispatch.run("layer_matmul", table(transposed), implementation, (x, stacks, layer, rows))
