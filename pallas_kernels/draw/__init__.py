"""The next token of each row of logits, greedy or drawn at a temperature, and the sums that its
log-probability needs.

A token is drawn by the Gumbel-max rule (Maddison et al. 2014, arXiv:1411.0030): the argmax of ``z /
temperature + G``, ``G`` Gumbel noise that is a function of (key, token) alone. Other rows and
padding of the vocabulary change nothing, and logits that are off by rounding change a draw only
where two tokens all but tie. Taken as ``exp(z) / E``, ``E = exp(-G)`` exponential, the rule needs
one logarithm, a token of ``-inf`` has score 0 while the likeliest has more, and small ``E``, which
decide, keep float32's relative precision: with 32 random bits down to ``2**-33``, where ``G =
-log(-log(u))`` of a float32 ``u`` ends at 16.6 and is coarse long before.

Axes: R rows, V vocab.
"""

import jax

from pallas_kernels import dispatch
from pallas_kernels.dispatch import Implementation
from pallas_kernels.draw import cpu, xla
from pallas_kernels.draw.results import Drawn

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
    """Draws a token of each row.

    Args:
        z: ``[R, V]`` float32.
        temperature: ``[R]`` float32; 0 takes the first of the largest.
        keys: ``[R, 2]`` uint32, the data of threefry keys.
        rows: int32, how many of z are in use, the first ones; what the others get is of no use, and
            CPUs spend nothing on it. None: all.
        implementation: ``auto``, ``xla`` or ``cpu``, see ``dispatch``.

    Raises:
        ValueError: shapes that do not fit, or an implementation that cannot serve them.
    """
    R = z.shape[0]
    if z.ndim != 2 or not z.shape[1] or temperature.shape != (R,) or keys.shape != (R, 2):
        shapes = f"z has shape {z.shape}, temperature {temperature.shape}, keys {keys.shape}"
        raise ValueError(
            f"{shapes}; expected [R, V] with at least one number a row, [R] and [R, 2]"
        )
    return dispatch.run("draw", DRAW, implementation, (z, temperature, keys, rows))
