"""Grouped-query attention to a paged cache on CPUs (``native/paged_attention.cc``): pages are read
where they lie, as many as a row has.

XLA's form gathers a run of every row, as far as the longest reaches, turns it, and multiplies. Axes
as in ``paged_attention``.
"""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import native
from pallas_kernels.paged import Rows
from pallas_kernels.partial import Partial

LANES = 16  # of the widest vectors; a head is whole ones


def require(q: jax.Array, k: jax.Array, v: jax.Array, rows: Rows) -> None:
    """Whether ``attend`` can serve these, or their shapes.

    Raises:
        NotImplementedError: with the reason.
    """
    if any(one.dtype != jnp.float32 for one in (q, k, v)):
        raise NotImplementedError(f"dtypes {q.dtype}, {k.dtype} and {v.dtype}, and not float32")
    if q.shape[-1] % LANES or k.shape[-1] != v.shape[-1]:
        raise NotImplementedError(
            f"heads of {q.shape[-1]} in pools of {k.shape[-1]} and {v.shape[-1]}: a multiple of"
            f" {LANES} in pools alike"
        )
    native.require()


def attend(q: jax.Array, k: jax.Array, v: jax.Array, rows: Rows, *, scale: float) -> Partial:
    """See ``paged_attention``."""
    layer, *of_rows = (jnp.int32(x) for x in rows)
    B, K, M, H = q.shape
    one = jax.ShapeDtypeStruct((B, K, M, 1), jnp.float32)
    out = one, one, jax.ShapeDtypeStruct(q.shape, jnp.float32)
    return Partial(
        *native.call("mint_paged_attention", out, q, k, v, layer, *of_rows, scale=np.float32(scale))
    )
