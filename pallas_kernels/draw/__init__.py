"""Draw of the next token of each row of logits, greedy or at a temperature, and the sums that its
log-probability needs.

A token is drawn by the Gumbel-max rule (Maddison et al. 2014, arXiv:1411.0030): the argmax of ``z /
temperature + G``, where the noise ``G`` depends on (key, token) only.

Axes: R rows, V vocab.
"""

import jax

from pallas_kernels import dispatch
from pallas_kernels.dispatch import Implementation
from pallas_kernels.draw import cpu, xla
from pallas_kernels.draw.xla import Drawn

DRAW = (
    Implementation("cpu", "cpu", cpu.draw, cpu.require),
    Implementation("xla", None, xla.draw, dispatch.anything),
)


def draw(
    z: jax.Array,
    temperature: jax.Array,
    keys: jax.Array,
    rows: jax.Array | None = None,
    *,
    implementation: str = "auto",
) -> Drawn:
    """Draws a token for each row of ``z [R, V]`` float32.

    Args:
        temperature: ``[R]`` float32; 0 takes the first of the largest.
        keys: ``[R, 2]`` uint32, the data of threefry keys.
        rows: int32, number of rows in use, at the front; others are undefined. None: all.
    """
    R = z.shape[0]
    if z.ndim != 2 or not z.shape[1] or temperature.shape != (R,) or keys.shape != (R, 2):
        shapes = f"z has shape {z.shape}, temperature {temperature.shape}, keys {keys.shape}"
        raise ValueError(
            f"{shapes}; expected [R, V] with at least one number a row, [R] and [R, 2]"
        )
    return dispatch.run("draw", DRAW, implementation, (z, temperature, keys, rows))
