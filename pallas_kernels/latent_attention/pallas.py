"""Latent attention to a paged cache by the kernels of ``pallas_kernels.paged``, with one head whose
latents are both keys and values.
"""

from typing import Any

import jax

from pallas_kernels.paged import Rows
from pallas_kernels.partial import Partial


def require(
    kernel: Any,
    q_latent: jax.Array,
    q_rope: jax.Array,
    latent: jax.Array,
    rope: jax.Array,
    rows: Rows,
    chosen: jax.Array | None = None,
) -> None:
    """Raises NotImplementedError with the reason if ``attend`` cannot serve these arrays."""
    if chosen is not None:
        raise NotImplementedError("an indexer chooses the keys")
    heads = [
        jax.ShapeDtypeStruct((x.shape[0], 1, *x.shape[1:]), x.dtype) for x in (q_latent, q_rope)
    ]
    kernel.require(heads, [latent, rope], 0, q_latent.shape[2])


def attend(
    kernel: Any,
    q_latent: jax.Array,
    q_rope: jax.Array,
    latent: jax.Array,
    rope: jax.Array,
    rows: Rows,
    chosen: None = None,
    *,
    scale: float,
    how: Any = None,
    interpret: Any = False,
) -> Partial:
    """Implements ``latent_attention``.

    Args:
        kernel: ``paged.pallas_tpu`` or ``paged.pallas_gpu``.
        how: the kernel's ``Config``; None: measured sizes, or the rule's.
    """
    queries, pools = [q_latent[:, None], q_rope[:, None]], [latent[:, :, None], rope[:, :, None]]
    out = kernel.attend(queries, pools, 0, q_latent.shape[2], rows, scale, how, interpret)
    return Partial(*(x[:, 0] for x in out))
