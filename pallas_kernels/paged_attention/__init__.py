"""Grouped-query attention (arXiv 2305.13245) of each row's queries to its table of pages.

Axes: L layers, U pages, B rows, K kv heads, M queries of one (heads of its group times new tokens),
H head dim, X width in the pool.
"""

import functools
from typing import Any

import jax

from pallas_kernels import dispatch, paged
from pallas_kernels.dispatch import Implementation
from pallas_kernels.paged import PAGE, Rows, pallas_gpu, pallas_tpu
from pallas_kernels.paged_attention import cpu, xla
from pallas_kernels.partial import Partial


def _require(kernel: Any, q: jax.Array, k: jax.Array, v: jax.Array, rows: Rows, **_: Any) -> None:
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
    """Implements ``paged_attention`` by a kernel of ``paged``."""
    return kernel.attend([q], [k, v], 1, q.shape[3], rows, scale, how, interpret)


KERNELS = ("pallas_tpu", "tpu", pallas_tpu), ("pallas_gpu", "cuda", pallas_gpu)
ATTEND = (
    *(
        Implementation(name, on, *(functools.partial(f, kernel) for f in (attend, _require)))
        for name, on, kernel in KERNELS
    ),
    Implementation("cpu", "cpu", cpu.attend, cpu.require),
    Implementation("xla", None, xla.attend, dispatch.anything),
)


def paged_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    rows: Rows,
    *,
    scale: float,
    implementation: str = "auto",
    interpret: Any = None,
) -> Partial:
    """Attends to the cache; returns ``[B, K, M, 1]`` twice and ``[B, K, M, H]`` float32; MASKED, 0
    and 0 for empty rows.

    Args:
        q: ``[B, K, M, H]``.
        k, v: ``[L, U, K, PAGE, X]``, X at least H; the rest is padding.
        rows: pages of each row.
        scale: factor on scores.
    """
    (B, K, _, H), pools = q.shape, (k.shape, v.shape)
    if any(len(pool) != 5 or pool[2:4] != (K, PAGE) or pool[4] < H for pool in pools):
        raise ValueError(
            f"q has shape {q.shape}, k and v {pools}; expected [B, K, M, H] and [L, U, K, {PAGE},"
            " X], X at least H"
        )
    paged.check_rows(B, rows)
    return dispatch.run(
        "paged_attention", ATTEND, implementation, (q, k, v, rows), interpret, scale=scale
    )
