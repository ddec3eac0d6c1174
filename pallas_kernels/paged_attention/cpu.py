"""The CPU kernel of grouped-query attention to a paged cache (``native/paged_attention.cc``), which
reads each row's pages in place.

XLA's form gathers a run of every row up to the longest, transposes it, and multiplies. Axes as in
``paged_attention``.
"""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import native
from pallas_kernels.paged import Rows
from pallas_kernels.partial import Partial

LANES = 16  # of the widest vectors; a head is a multiple


def require(q: jax.Array, k: jax.Array, v: jax.Array, rows: Rows, **_: float) -> None:
    """Raises NotImplementedError with the reason if ``attend`` cannot serve these arrays."""
    if any(one.dtype != jnp.float32 for one in (q, k, v)):
        raise NotImplementedError(f"dtypes {q.dtype}, {k.dtype} and {v.dtype}, and not float32")
    if q.shape[-1] % LANES or k.shape[-1] != v.shape[-1]:
        raise NotImplementedError(
            f"heads of {q.shape[-1]} in pools of {k.shape[-1]} and {v.shape[-1]}: a multiple of"
            f" {LANES} in pools alike"
        )
    native.require()


def attend(q: jax.Array, k: jax.Array, v: jax.Array, rows: Rows, *, scale: float) -> Partial:
    """Implements ``paged_attention``."""
    layer, *of_rows = (jnp.int32(x) for x in rows)
    B, K, M, H = q.shape
    one = jax.ShapeDtypeStruct((B, K, M, 1), jnp.float32)
    out = one, one, jax.ShapeDtypeStruct(q.shape, jnp.float32)
    return Partial(
        *native.call("mint_paged_attention", out, q, k, v, layer, *of_rows, scale=np.float32(scale))
    )
