"""Grouped matmul: rows sorted by group, each group with its own matrix; rows after the last group
give zeros.

Axes: M rows, G groups, W matrices, K in, N out.
"""

import functools
from typing import Any

import jax

from pallas_kernels import dispatch
from pallas_kernels.dispatch import Implementation
from pallas_kernels.grouped_matmul import pallas_gpu, xla


def table(transposed: bool) -> tuple[Implementation, ...]:
    """Returns the implementations of ``grouped_matmul``."""
    forms = (
        ("pallas_gpu", "cuda", pallas_gpu.grouped_matmul, pallas_gpu.require),
        ("xla", None, xla.grouped_matmul, dispatch.anything),
    )
    return tuple(
        Implementation(name, on, functools.partial(call, transposed=transposed), require)
        for name, on, call, require in forms
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
    return dispatch.run(
        "grouped_matmul", table(transposed), implementation, (x, w, sizes, index), interpret
    )
