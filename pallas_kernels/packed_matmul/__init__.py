"""Packed matmul: rows sorted by expert, each times its expert's frozen matrix and its own adapter.

``y_k[m] = x[m] w_k[e] + (x[m] a_k[f]^T) b_k[f]`` with ``e`` the row's expert and ``f`` its factor:
``grouped_matmul`` and ``packed_lora`` in one pass.

Axes: M rows, E experts, D in, F out, R rank, W factors, K projections of the same rows.
"""

from collections.abc import Sequence
from typing import Any

import jax

from pallas_kernels import dispatch
from pallas_kernels.dispatch import Implementation
from pallas_kernels.packed_matmul import pallas_tpu, xla

Stacks = Sequence[jax.Array]

# Gradients use the kernels of ``grouped_matmul`` and ``packed_lora``, because a fused kernel would
# recompute inner products that they need, see docs/kernels.md.
MATMUL = (
    Implementation("pallas_tpu", "tpu", pallas_tpu.matmul, pallas_tpu.require),
    Implementation("xla", None, xla.matmul, dispatch.anything),
)


def packed_matmul(
    x: jax.Array,
    w: Stacks,
    sizes: jax.Array,
    a: Stacks,
    b: Stacks,
    factor: jax.Array,
    implementation: str = "auto",
    interpret: Any = None,
) -> tuple[jax.Array, ...]:
    """Returns ``x w_k + (x a_k^T) b_k`` by each row's expert and factor, ``[M, F_k]`` of each
    projection; zeros after the last expert.

    Has no rule for ``grad``; ``mint_jax/models/packed_lora.py`` has it.

    Args:
        x: ``[M, D]``, rows of expert 0 first.
        w: ``[E, D, F_k]``.
        sizes: ``[E]`` int32 rows of each expert; their sum is at most M.
        a, b, factor: as in ``packed_lora``.
    """
    for w_k, a_k, b_k in zip(w, a, b, strict=True):
        (E, D, F), (W, R, _) = w_k.shape, a_k.shape
        if (x.shape[1], a_k.shape[2], b_k.shape) != (D, D, (W, R, F)) or sizes.shape != (E,):
            shapes = x.shape, w_k.shape, sizes.shape, a_k.shape, b_k.shape
            raise ValueError(
                f"x, w, sizes, a and b have shapes {shapes}; expected [M, D], [E, D, F], [E], [W,"
                " R, D] and [W, R, F]"
            )
    if factor.shape != x.shape[:1]:
        raise ValueError(
            f"factor has shape {factor.shape}; expected one for each of {x.shape[0]} rows"
        )
    args = x, tuple(w), sizes, tuple(a), tuple(b), factor
    return dispatch.run("packed_matmul", MATMUL, implementation, args, interpret)
