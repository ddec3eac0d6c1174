"""Latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1.2) of each row's absorbed queries to
the latents in its pages.

A token's latent is the key of all heads and, weighted, their value, so it is read once for both. A
rotary key is stored next to it.

Axes: L layers, U pages, B rows, T new tokens, M queries of a row (T times heads), C latent, J
rotary dimensions, D table entries, S positions of a run.
"""

import functools
from typing import Any

import jax

from pallas_kernels import dispatch, paged
from pallas_kernels.dispatch import Implementation
from pallas_kernels.latent_attention import xla
from pallas_kernels.paged import PAGE, Rows, pallas_gpu, pallas_tpu
from pallas_kernels.partial import Partial


def _require(
    kernel: Any,
    q_latent: jax.Array,
    q_rope: jax.Array,
    latent: jax.Array,
    rope: jax.Array,
    *rest: Any,
    **_: Any,
) -> None:
    if len(rest) > 1 and rest[1] is not None:
        raise NotImplementedError("an indexer chooses the keys")
    heads = [jax.ShapeDtypeStruct((len(x), 1, *x.shape[1:]), x.dtype) for x in (q_latent, q_rope)]
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
    """Implements ``latent_attention`` by a kernel of ``paged``, as one head of latents."""
    queries, pools = [q_latent[:, None], q_rope[:, None]], [latent[:, :, None], rope[:, :, None]]
    out = kernel.attend(queries, pools, 0, q_latent.shape[2], rows, scale, how, interpret)
    return Partial(*(x[:, 0] for x in out))


KERNELS = ("pallas_tpu", "tpu", pallas_tpu), ("pallas_gpu", "cuda", pallas_gpu)
ATTEND = (
    *(
        Implementation(name, on, *(functools.partial(f, kernel) for f in (attend, _require)))
        for name, on, kernel in KERNELS
    ),
    Implementation("xla", None, xla.attend, dispatch.anything),
)


def latent_attention(
    q_latent: jax.Array,
    q_rope: jax.Array,
    latent: jax.Array,
    rope: jax.Array,
    rows: Rows,
    chosen: jax.Array | None = None,
    *,
    scale: float,
    implementation: str = "auto",
    interpret: Any = None,
) -> Partial:
    """Attends to the cache; returns ``[B, M, 1]`` twice and ``[B, M, C]`` float32; MASKED, 0 and 0
    for empty rows.

    Args:
        q_latent, q_rope: ``[B, M, C]`` and ``[B, M, J]``.
        latent, rope: ``[L, U, PAGE, C']`` and ``[L, U, PAGE, J']``, padded to C' and J'.
        rows: pages of each row.
        chosen: ``[B, T, D / RUN_PAGES, S]`` bool, positions that a token attends to; None: all.
        scale: factor on scores.
    """
    queries, pools = (q_latent.shape, q_rope.shape), (latent.shape, rope.shape)
    if queries[0][:2] != queries[1][:2] or any(
        len(x) != 4 or x[2] != PAGE or x[3] < q[2] for x, q in zip(pools, queries)
    ):
        raise ValueError(
            f"queries have shapes {queries}, latents and rotary keys {pools}; expected [B, M, C]"
            f" and [L, U, {PAGE}, C]"
        )
    paged.check_rows(q_latent.shape[0], rows)
    args = q_latent, q_rope, latent, rope, rows, chosen
    return dispatch.run("latent_attention", ATTEND, implementation, args, interpret, scale=scale)
