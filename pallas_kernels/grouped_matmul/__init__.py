"""Grouped matmul: rows sorted by group, each group with its own matrix; rows after the last group
give zeros.

Axes: M rows, G groups, W matrices, K in, N out.
"""

from typing import Any

import jax

from pallas_kernels import dispatch
from pallas_kernels.dispatch import Implementation
from pallas_kernels.grouped_matmul import pallas_gpu, xla

GROUPED = (
    Implementation("pallas_gpu", "cuda", pallas_gpu.grouped_matmul, pallas_gpu.require),
    Implementation("xla", None, xla.grouped_matmul, dispatch.anything),
)


def grouped_matmul(
    x: jax.Array,
    w: jax.Array,
    sizes: jax.Array,
    index: jax.Array | None = None,
    transposed: bool = False,
    implementation: str = "auto",
    interpret: Any = None,
) -> jax.Array:
    """Returns ``x[m] @ w[index[group of m]]``, ``[M, N]`` in the dtype of ``x``, accumulated in
    float32.

    Has no rule for ``grad``; ``mint_jax/models/packed_lora.py`` has it.

    Args:
        x: ``[M, K]``, rows of group 0 first.
        w: ``[W, K, N]``, in the dtype of ``x`` or a smaller one; ``[W, N, K]`` if ``transposed``.
        sizes: ``[G]`` int32 rows of each group, zero allowed; their sum is at most M.
        index: ``[G]`` int32, matrix of each group; or a scalar, of group 0; None: matrix g.
    """
    args, of = (x, w, sizes, index), {"transposed": transposed}
    return dispatch.run("grouped_matmul", GROUPED, implementation, args, interpret, **of)
