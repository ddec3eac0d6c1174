"""Rows times one layer's matrix of a stack: what every frozen projection of a scan over layers is. Forward only.

Axes: M rows, L layers, D in, F out.
"""

import jax

from pallas_kernels import dispatch
from pallas_kernels.dispatch import Implementation
from pallas_kernels.layer_matmul import cpu, xla

MATMUL = (
    Implementation("cpu", "cpu", cpu.matmul, cpu.require),
    Implementation("xla", None, xla.matmul, dispatch.anything),
)


def layer_matmul(x: jax.Array, w: jax.Array, layer: jax.Array, *, implementation: str = "auto") -> jax.Array:
    """``x w[layer]``, ``[..., F]`` float32.

    Args:
        x: ``[..., D]`` float32 or bfloat16.
        w: ``[L, D, F]`` float32, bfloat16, int8 or float8_e4m3fn.
        layer: int32, at most L - 1.
        implementation: ``auto``, ``xla`` or ``cpu``, see ``dispatch``.

    Raises:
        ValueError: shapes that do not fit, or an implementation that cannot serve them.
    """
    if w.ndim != 3 or x.shape[-1] != w.shape[1] or layer.shape:
        raise ValueError(f"x has shape {x.shape}, w {w.shape}, layer {layer.shape}; expected [..., D], [L, D, F] and a scalar")
    return dispatch.run("layer_matmul", MATMUL, implementation, (x, w, layer))
