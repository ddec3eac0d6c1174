"""Kernels of products with one factor of packed adapters, whose other factor is shared.

``shrink`` returns ``x w^T [M, R]``, ``expand`` adds ``h w`` to ``[M, F]``, ``outer`` sums
``left[m] right[m]^T`` over the rows of each factor. The first two are those of slot LoRA.

Axes: M rows, D in, F out, R rank, W factors.
"""

import functools
from typing import Any

import jax

from pallas_kernels import slot_lora
from pallas_kernels.dispatch import Implementation
from pallas_kernels.packed_lora import pallas_gpu, pallas_tpu


def _shrink(x: jax.Array, w: jax.Array, factor: jax.Array, op: Any, interpret: Any = False) -> Any:
    return op.shrink(x, w, factor, interpret=interpret, **_order(op, factor, w)).astype(x.dtype)


def _expand(
    h: jax.Array,
    w: jax.Array,
    onto: jax.Array,
    factor: jax.Array,
    op: Any,
    interpret: Any = False,
) -> jax.Array:
    return op.expand(h, w, onto, factor, interpret=interpret, **_order(op, factor, w))


def _order(op: Any, factor: jax.Array, w: jax.Array) -> dict[str, Any]:
    is_gpu = op is slot_lora.pallas_gpu
    return {"order": op.turn_of_runs(factor, w.shape[0])} if is_gpu else {}


def _table(name: str, platform: str, slots: Any, packed: Any) -> dict[str, Implementation]:
    def require_shrink(x: jax.Array, w: jax.Array, factor: jax.Array) -> None:
        slots.require_shrink(x, w)

    def require_expand(h: jax.Array, w: jax.Array, onto: jax.Array, factor: jax.Array) -> None:
        slots.require_expand(w, onto)

    shrink, expand = (functools.partial(fn, op=slots) for fn in (_shrink, _expand))
    return {
        "shrink": Implementation(name, platform, shrink, require_shrink),
        "expand": Implementation(name, platform, expand, require_expand),
        "outer": Implementation(name, platform, packed.outer, packed.require_outer),
    }


KERNELS = (
    _table("pallas_tpu", "tpu", slot_lora.pallas_tpu, pallas_tpu),
    _table("pallas_gpu", "cuda", slot_lora.pallas_gpu, pallas_gpu),
)
