"""TPU kernel of latent attention to a paged cache: ``paged_tpu`` with one head, whose latents are
both keys and values.
"""

from typing import Any

import jax

from pallas_kernels import paged_tpu
from pallas_kernels.paged import Rows
from pallas_kernels.paged_tpu import Config
from pallas_kernels.partial import Partial


def require(
    q_latent: jax.Array,
    q_rope: jax.Array,
    latent: jax.Array,
    rope: jax.Array,
    rows: Rows,
    chosen: jax.Array | None = None,
) -> None:
    """Raises if ``attend`` cannot serve these arrays.

    Raises:
        NotImplementedError: with the reason.
    """
    if chosen is not None:
        raise NotImplementedError("an indexer chooses the keys")
    heads = [
        jax.ShapeDtypeStruct((x.shape[0], 1, *x.shape[1:]), x.dtype) for x in (q_latent, q_rope)
    ]
    paged_tpu.require(heads, [latent, rope], 0, q_latent.shape[2])  # type: ignore[arg-type]


def attend(
    q_latent: jax.Array,
    q_rope: jax.Array,
    latent: jax.Array,
    rope: jax.Array,
    rows: Rows,
    chosen: None = None,
    *,
    scale: float,
    config: Config | None = None,
    interpret: Any = False,
) -> Partial:
    """Implements ``latent_attention``."""
    queries, pools = [q_latent[:, None], q_rope[:, None]], [latent[:, :, None], rope[:, :, None]]
    out = paged_tpu.attend(queries, pools, 0, q_latent.shape[2], rows, scale, config, interpret)
    return Partial(*(x[:, 0] for x in out))
