"""Packed LoRA: adds each row's own adapter, selected from stacks, to the base's result.

``onto_k[m] + (x[m] a_k[w]^T) b_k[w]`` with ``w`` the row's factor: an adapter, or an adapter's part
of one expert. The projections k have the same rows (an expert's gate and up), which are read once
for all of them.

Axes: M rows, D in, F out, R rank, W factors, K projections of the same rows.
"""

from collections.abc import Sequence
from typing import Any

import jax

from pallas_kernels import dispatch
from pallas_kernels.dispatch import Implementation
from pallas_kernels.packed_lora import pallas_gpu, pallas_tpu, xla

Stacks = Sequence[jax.Array]


ADD = (
    Implementation("pallas_tpu", "tpu", pallas_tpu.add, pallas_tpu.require_add),
    Implementation("pallas_gpu", "cuda", pallas_gpu.add, pallas_gpu.require_add),
    Implementation("xla", None, xla.add, dispatch.anything),
)
BACKWARD = (
    Implementation("pallas_tpu", "tpu", pallas_tpu.backward, pallas_tpu.require_backward),
    Implementation("pallas_gpu", "cuda", pallas_gpu.backward, pallas_gpu.require_backward),
    Implementation("xla", None, xla.backward, dispatch.anything),
)


def packed_lora(
    x: jax.Array,
    a: Stacks,
    b: Stacks,
    onto: Stacks,
    factor: jax.Array,
    implementation: str = "auto",
    interpret: Any = None,
) -> tuple[jax.Array, ...]:
    """Returns ``onto_k + (x a_k^T) b_k`` by each row's factor, ``[M, F_k]`` of each projection.

    Has no rule for ``grad``; ``mint_jax/models/packed_lora.py`` has it.

    Args:
        x: ``[M, D]``.
        a, b: ``[W, R, D]`` and ``[W, R, F_k]``; ``b`` includes the scale.
        onto: ``[M, F_k]``; its memory is reused if possible.
        factor: ``[M]`` int32; equal ones are adjacent, -1 is none, anywhere.
    """
    for a_k, b_k, y in zip(a, b, onto, strict=True):
        shapes = x.shape, a_k.shape, b_k.shape, y.shape
        if (
            a_k.shape[2] != x.shape[1]
            or a_k.shape[:2] != b_k.shape[:2]
            or y.shape != (x.shape[0], b_k.shape[2])
        ):
            raise ValueError(
                f"x, a, b and onto have shapes {shapes}; expected [M, D], [W, R, D], [W, R, F] and"
                " [M, F]"
            )
    if factor.shape != x.shape[:1]:
        raise ValueError(
            f"factor has shape {factor.shape}; expected one for each of {x.shape[0]} rows"
        )
    args = x, tuple(a), tuple(b), tuple(onto), factor
    return dispatch.run("packed_lora", ADD, implementation, args, interpret)


def gradients(
    x: jax.Array,
    a: Stacks,
    b: Stacks,
    g: Stacks,
    dx_onto: jax.Array,
    factor: jax.Array,
    implementation: str = "auto",
    interpret: Any = None,
) -> tuple[jax.Array, tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Returns the gradients of x, added to ``dx_onto [M, D]``, and of a and b; ``g [M, F_k]``."""
    args = x, tuple(a), tuple(b), tuple(g), dx_onto, factor
    return dispatch.run("packed_lora backward", BACKWARD, implementation, args, interpret)
