"""TPU kernel of grouped-query attention to a paged cache: ``paged_tpu`` with pools of keys and of
values.
"""

from typing import Any

import jax

from pallas_kernels import paged_tpu
from pallas_kernels.paged import Rows
from pallas_kernels.paged_tpu import Config
from pallas_kernels.partial import Partial


def require(q: jax.Array, k: jax.Array, v: jax.Array, *rest: Any) -> None:
    """Raises if ``attend`` cannot serve these arrays.

    Raises:
        NotImplementedError: with the reason.
    """
    paged_tpu.require([q], [k, v], 1, q.shape[3])


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    rows: Rows,
    *,
    scale: float,
    config: Config | None = None,
    interpret: Any = False,
) -> Partial:
    """Implements ``paged_attention``."""
    return paged_tpu.attend([q], [k, v], 1, q.shape[3], rows, scale, config, interpret)
