"""The XLA form of latent attention to a paged cache: a run of all rows at a time, up to the longest
row.

Axes: B rows, T new tokens, M queries of a row (T times heads), C latent, J rotary dimensions, S
positions of a run.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import paged
from pallas_kernels.paged import Rows
from pallas_kernels.partial import MASKED, Partial, partial_softmax


def scored(
    q_BMC: jax.Array,
    q_BMJ: jax.Array,
    latent_BSC: jax.Array,
    rope_BSJ: jax.Array,
    seen_BTS: jax.Array,
    scale: float,
) -> Partial:
    """Attends to given latents; queries of a token, or of a team's rows, have one mask."""
    s = jnp.einsum("BMC,BSC->BMS", q_BMC, latent_BSC, preferred_element_type=jnp.float32)
    s += jnp.einsum("BMJ,BSJ->BMS", q_BMJ, rope_BSJ, preferred_element_type=jnp.float32)
    s = (s * scale).reshape(len(s), seen_BTS.shape[1], -1, s.shape[-1])
    s = jnp.where(seen_BTS[:, :, None], s, MASKED).reshape(len(s), -1, s.shape[-1])

    def weigh(w: jax.Array) -> jax.Array:
        w = w.astype(latent_BSC.dtype)
        return jnp.einsum("BMS,BSC->BMC", w, latent_BSC, preferred_element_type=jnp.float32)

    return partial_softmax(s, weigh)


def attend(
    q_latent: jax.Array,
    q_rope: jax.Array,
    latent: jax.Array,
    rope: jax.Array,
    rows: Rows,
    chosen: jax.Array | None = None,
    *,
    scale: float,
) -> Partial:
    """Implements ``latent_attention``."""

    def score(
        queries: tuple[jax.Array, jax.Array], pages: jax.Array, visible: jax.Array
    ) -> Partial:
        latent_BSC, rope_BSJ = (
            paged.read(pool, rows.layer, pages, q.shape[-1])
            for pool, q in zip((latent, rope), queries)
        )
        seen_BTS = visible[:, None] if visible.ndim == 2 else visible
        return scored(
            *queries, paged.clean(latent_BSC, jnp.any(seen_BTS, axis=1)), rope_BSJ, seen_BTS, scale
        )

    return paged.attend(score, (q_latent, q_rope), rows, chosen)
