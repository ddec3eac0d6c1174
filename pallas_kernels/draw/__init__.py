"""Draw of the next token of each row of logits, greedy or at a temperature, and the sums that its
log-probability needs.

A token is drawn by the Gumbel-max rule (Maddison et al. 2014, arXiv:1411.0030): the argmax of ``z /
temperature + G``, where the Gumbel noise ``G`` depends on (key, token) only. Other rows and padding
of the vocabulary change nothing, and rounding errors of logits change a draw only if two tokens
nearly tie. It is computed as ``exp(z) / E`` with exponential ``E = exp(-G)``. That needs one
logarithm, gives a token of ``-inf`` the score 0, and keeps float32's relative precision for the
small ``E`` that decide: with 32 random bits down to ``2**-33``, where ``G = -log(-log(u))`` of a
float32 ``u`` ends at 16.6 and is coarse long before.

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
    """Draws a token for each row.

    Args:
        z: ``[R, V]`` float32.
        temperature: ``[R]`` float32; 0 takes the first of the largest.
        keys: ``[R, 2]`` uint32, the data of threefry keys.
        rows: int32, number of rows in use, at the front; the output of the others is undefined, and
            CPUs skip them. None: all.
        implementation: ``auto``, ``xla`` or ``cpu``, see ``dispatch``.

    Raises:
        ValueError: shapes that do not match, or an implementation that cannot serve them.
    """
    R = z.shape[0]
    if z.ndim != 2 or not z.shape[1] or temperature.shape != (R,) or keys.shape != (R, 2):
        shapes = f"z has shape {z.shape}, temperature {temperature.shape}, keys {keys.shape}"
        raise ValueError(
            f"{shapes}; expected [R, V] with at least one number a row, [R] and [R, 2]"
        )
    return dispatch.run("draw", DRAW, implementation, (z, temperature, keys, rows))
