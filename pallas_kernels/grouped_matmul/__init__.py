"""Grouped matmul: rows sorted by group, each group with a matrix of its own; rows behind the last
group give zeros.

Axes: M rows, G groups, W matrices, K in, N out.
"""

import functools
from typing import Any

import jax

from pallas_kernels import dispatch
from pallas_kernels.dispatch import Implementation
from pallas_kernels.grouped_matmul import pallas_gpu, xla


def table(transposed: bool) -> tuple[Implementation, ...]:
    """Implementations of ``grouped_matmul``."""
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
    """``x[m] @ w[index[group of m]]``, ``[M, N]`` in the dtype of ``x``, accumulated in float32.

    It has no rules for ``grad`` and ``vmap``: the gradient of x is the same product with
    ``transposed`` turned, and what ``vmap`` should be is in ``batching``.
    ``mint_jax/models/grouped.py`` has both.

    Args:
        x: ``[M, K]``, rows of group 0 first.
        w: ``[W, K, N]``, of the dtype of ``x`` or a smaller one; ``[W, N, K]`` when ``transposed``.
        sizes: ``[G]`` int32 rows of each group, zero allowed; their sum is at most M.
        index: ``[G]`` int32, which matrix each group has; one number: group g has matrix ``index +
            g``; None: matrix g.
        implementation: ``auto``, ``xla`` or ``pallas_gpu``, see ``dispatch``.
        interpret: run a kernel that is named in Pallas' interpreter; None: on a CPU.

    Raises:
        ValueError: an implementation that there is not, or that cannot serve.
    """
    return dispatch.run(
        "grouped_matmul", table(transposed), implementation, (x, w, sizes, index), interpret
    )
