"""One token of heads whose memory is a state ``S [K, V]``: ``S' = exp(g) S + k beta v^T``, or with
corrections ``exp(g) S + k beta (v - k exp(g) S)^T``, and ``o = q S'``. Forward only.

Axes: L layers, S slots, B rows, N heads, K key dim, V value dim.
"""

import jax

from pallas_kernels import dispatch
from pallas_kernels.dispatch import Implementation
from pallas_kernels.state_step import cpu, xla

STEP = (
    Implementation("cpu", "cpu", cpu.step, cpu.require),
    Implementation("xla", None, xla.step, dispatch.anything),
)


def state_step(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    decay: jax.Array,
    beta: jax.Array,
    pool: jax.Array,
    layer: jax.Array,
    load: jax.Array,
    save: jax.Array,
    *,
    corrects: bool,
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Returns ``o [B, N, V]``, and the pool with the states after the token.

    Args:
        q, k, v, beta: ``[B, N, K]`` twice, ``[B, N, V]``, ``[B, N]``; all float32.
        decay: ``g [B, N, 1]``, or ``[B, N, K]`` of channels; at most 0.
        pool: states ``[L, S, N, K, V]``.
        load, save: ``[B]`` int32 slots; no row's ``save`` is another's ``load``. A negative
            ``load`` is an empty state, a ``save`` out of range discards.
    """
    args = q, k, v, decay, beta, pool, layer, load, save
    return dispatch.run("state_step", STEP, implementation, args, corrects=corrects)
