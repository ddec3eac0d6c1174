"""Packed LoRA: adds each row's own adapter, selected from stacks, to the base's result.

``onto_k[m] + (x[m] a_k[w]^T) b_k[w]`` with ``w`` the row's factor: an adapter, or an adapter's part
of one expert. The projections k have the same rows (an expert's gate and up), which are read once
for all of them.

Axes: M rows, D in, F out, R rank, W factors, K projections of the same rows.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.batching import each, joined
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

    Differentiable in x, a, b and onto; under ``vmap`` it is one product of all rows.

    Args:
        x: ``[M, D]``.
        a, b: ``[W, R, D]`` and ``[W, R, F_k]``; ``b`` includes the scale.
        onto: ``[M, F_k]``; its memory is reused if possible.
        factor: ``[M]`` int32; equal ones are adjacent, -1 is none, anywhere.
        implementation: ``auto``, ``xla``, ``pallas_tpu`` or ``pallas_gpu``, see ``dispatch``.
        interpret: run a named kernel in Pallas' interpreter; None: on a CPU.

    Raises:
        ValueError: shapes that do not match, or an implementation that cannot serve them.
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
    return _packed((implementation, interpret), x, tuple(a), tuple(b), tuple(onto), factor)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _packed(how: tuple[str, Any], x: Any, a: Any, b: Any, onto: Any, factor: Any) -> Any:
    return _add(how)(x, a, b, onto, factor)


def _forward(how: Any, x: Any, a: Any, b: Any, onto: Any, factor: Any) -> Any:
    return _add(how)(x, a, b, onto, factor), (x, a, b, factor)


def _backward(how: Any, residuals: Any, g: Any) -> Any:
    x, a, b, factor = residuals
    dx, da, db = gradients(how)(x, a, b, g, jnp.zeros_like(x), factor)
    return dx, da, db, g, None


_packed.defvjp(_forward, _backward)


def _add(how: tuple[str, Any]) -> Any:
    @jax.custom_batching.custom_vmap
    def call(x: Any, a: Any, b: Any, onto: Any, factor: Any) -> Any:
        return dispatch.run("packed_lora", ADD, how[0], (x, a, b, onto, factor), how[1])

    @call.def_vmap
    def rule(P: int, batched: Any, x: Any, a: Any, b: Any, onto: Any, factor: Any) -> Any:
        of_x, of_a, of_b, of_onto, of_factor = batched
        a, b, factor = of_policies(
            P, (a, b, factor), (of_a, of_b, of_factor), shared=not any((*of_a, *of_b))
        )
        x, onto = jax.tree.map(lambda v, of: joined(v, of, P), (x, onto), (of_x, of_onto))
        out = tuple(y.reshape(P, -1, y.shape[-1]) for y in call(x, a, b, onto, factor))
        return out, jax.tree.map(lambda _: True, out)

    return call


def gradients(how: tuple[str, Any]) -> Any:
    """Returns ``(x, a, b, g, dx_onto, factor) -> dx, da, db`` for the implementation and
    ``interpret`` in ``how``, with its batching rule.
    """

    @jax.custom_batching.custom_vmap
    def call(x: Any, a: Any, b: Any, g: Any, dx_onto: Any, factor: Any) -> Any:
        return dispatch.run(
            "packed_lora backward", BACKWARD, how[0], (x, a, b, g, dx_onto, factor), how[1]
        )

    @call.def_vmap
    def rule(
        P: int, batched: Any, x: Any, a: Any, b: Any, g: Any, dx_onto: Any, factor: Any
    ) -> Any:
        of_x, of_a, of_b, of_g, of_onto, of_factor = batched
        # Gradients are per policy, also those of shared factors.
        a, b, factor = of_policies(P, (a, b, factor), (of_a, of_b, of_factor), shared=False)
        x, g, dx_onto = jax.tree.map(
            lambda v, of: joined(v, of, P), (x, g, dx_onto), (of_x, of_g, of_onto)
        )
        out = jax.tree.map(
            lambda v: v.reshape(P, -1, *v.shape[1:]), call(x, a, b, g, dx_onto, factor)
        )
        return out, jax.tree.map(lambda _: True, out)

    return call


def of_policies(P: int, values: Any, batched: Any, shared: bool) -> Any:
    """Concatenates the factors of P policies, and renumbers the rows' factors."""
    (a, b, factor), (of_a, of_b, of_factor) = values, batched
    W, factor = a[0].shape[-3], each(factor, of_factor, P)
    if not shared:
        a, b = jax.tree.map(lambda w, of: joined(w, of, P), (a, b), (of_a, of_b))
        factor = jnp.where(factor < 0, -1, factor + W * jnp.arange(P, dtype=factor.dtype)[:, None])
    return a, b, factor.reshape(-1)
