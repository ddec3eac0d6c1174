"""Grouped-query attention to a paged cache by the kernels of ``pallas_kernels.paged``: one pool of
keys and one of values.
"""

from typing import Any

import jax

from pallas_kernels.paged import Rows
from pallas_kernels.partial import Partial


def require(kernel: Any, q: jax.Array, k: jax.Array, v: jax.Array, rows: Rows) -> None:
    """Raises NotImplementedError with the reason if ``attend`` cannot serve these arrays."""
    kernel.require([q], [k, v], 1, q.shape[3])


def attend(
    kernel: Any,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    rows: Rows,
    *,
    scale: float,
    how: Any = None,
    interpret: Any = False,
) -> Partial:
    """Implements ``paged_attention``.

    Args:
        kernel: ``paged.pallas_tpu`` or ``paged.pallas_gpu``.
        how: the kernel's ``Config``; None: measured sizes, or the rule's.
    """
    return kernel.attend([q], [k, v], 1, q.shape[3], rows, scale, how, interpret)
