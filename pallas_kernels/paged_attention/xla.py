"""The XLA form of grouped-query attention to a paged cache: a run of all rows at a time, up to the
longest row.

Axes: B rows, K kv heads, M queries of one, H head dim, S positions of a run.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import paged
from pallas_kernels.paged import Rows
from pallas_kernels.partial import MASKED, Partial, partial_softmax


def scored(
    q_BKMH: jax.Array, k_BKSH: jax.Array, v_BKSH: jax.Array, visible: jax.Array, scale: float
) -> Partial:
    """Attends to given keys; ``visible`` broadcasts to ``[B, K, M, S]``."""
    s = jnp.einsum("BKMH,BKSH->BKMS", q_BKMH, k_BKSH, preferred_element_type=jnp.float32) * scale
    return partial_softmax(
        jnp.where(visible, s, MASKED),
        lambda p: jnp.einsum(
            "BKMS,BKSH->BKMH", p.astype(v_BKSH.dtype), v_BKSH, preferred_element_type=jnp.float32
        ),
    )


def attend(q: jax.Array, k: jax.Array, v: jax.Array, rows: Rows, *, scale: float) -> Partial:
    """Implements ``paged_attention``."""

    def score(q_BKMH: jax.Array, pages: jax.Array, seen_BS: jax.Array) -> Partial:
        k_BKSH, v_BKSH = (paged.read(pool, rows.layer, pages, q_BKMH.shape[-1]) for pool in (k, v))
        return scored(
            q_BKMH, k_BKSH, paged.clean(v_BKSH, seen_BS[:, None]), seen_BS[:, None, None], scale
        )

    return paged.attend(score, q, rows)
