"""Packed matmul: rows sorted by expert, each times its expert's frozen matrix and its own adapter,
in one pass.

``y_k[m] = x[m] w_k[e] + (x[m] a_k[f]^T) b_k[f]`` with ``e`` the row's expert and ``f`` its factor,
for all projections k of the same rows. Equals ``grouped_matmul`` followed by ``packed_lora``, with
rows read once and results written once. Gradients use the kernels of these two, because a fused
kernel would recompute inner products that the factors' gradients need, see docs/kernels.md.

Axes: M rows, E experts, D in, F out, R rank, W factors, K projections of the same rows.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from pallas_kernels import dispatch, grouped_matmul, packed_lora
from pallas_kernels.batching import Merged, batched_product, each, joined
from pallas_kernels.dispatch import Implementation
from pallas_kernels.packed_matmul import pallas_tpu, xla

Stacks = Sequence[jax.Array]

MATMUL = (
    Implementation("pallas_tpu", "tpu", pallas_tpu.matmul, pallas_tpu.require),
    Implementation("xla", None, xla.matmul, dispatch.anything),
)


def packed_matmul(
    x: jax.Array,
    w: Stacks,
    sizes: jax.Array,
    a: Stacks,
    b: Stacks,
    factor: jax.Array,
    implementation: str = "auto",
    interpret: Any = None,
) -> tuple[jax.Array, ...]:
    """Returns ``x w_k + (x a_k^T) b_k`` by each row's expert and factor, ``[M, F_k]`` of each
    projection; zeros after the last expert.

    Differentiable in x, a and b, since the base is frozen; under ``vmap`` it is one product of all
    rows.

    Args:
        x: ``[M, D]``, rows of expert 0 first.
        w: ``[E, D, F_k]``.
        sizes: ``[E]`` int32 rows of each expert; their sum is at most M.
        a, b: ``[W, R, D]`` and ``[W, R, F_k]``; ``b`` includes the scale.
        factor: ``[M]`` int32; equal ones are adjacent, -1 is none.
        implementation: ``auto``, ``xla`` or ``pallas_tpu``, see ``dispatch``.
        interpret: run a named kernel in Pallas' interpreter; None: on a CPU.

    Raises:
        ValueError: shapes that do not match, an implementation that cannot serve them, or a
            gradient of ``w``.
    """
    for w_k, a_k, b_k in zip(w, a, b, strict=True):
        (E, D, F), (W, R, _) = w_k.shape, a_k.shape
        if (x.shape[1], a_k.shape[2], b_k.shape) != (D, D, (W, R, F)) or sizes.shape != (E,):
            shapes = x.shape, w_k.shape, sizes.shape, a_k.shape, b_k.shape
            raise ValueError(
                f"x, w, sizes, a and b have shapes {shapes}; expected [M, D], [E, D, F], [E], [W,"
                " R, D] and [W, R, F]"
            )
    if factor.shape != x.shape[:1]:
        raise ValueError(
            f"factor has shape {factor.shape}; expected one for each of {x.shape[0]} rows"
        )
    return _packed((implementation, interpret), x, tuple(w), sizes, tuple(a), tuple(b), factor)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _packed(how: tuple[str, Any], x: Any, w: Any, sizes: Any, a: Any, b: Any, factor: Any) -> Any:
    return _matmul(how)(x, w, sizes, a, b, factor)


def _forward(how: Any, x: Any, w: Any, sizes: Any, a: Any, b: Any, factor: Any) -> Any:
    if any(one.perturbed for one in w):
        raise ValueError("a gradient of the experts' matrices was requested; they are frozen")
    args = jax.tree.map(
        lambda arg: arg.value,
        (x, w, sizes, a, b, factor),
        is_leaf=lambda arg: hasattr(arg, "perturbed"),
    )
    return _matmul(how)(*args), args


def _backward(how: Any, residuals: Any, g: Any) -> Any:
    x, w, sizes, a, b, factor = residuals
    g = tuple(jnp.zeros(one.shape, x.dtype) if isinstance(one, SymbolicZero) else one for one in g)
    back = batched_product(functools.partial(grouped_matmul.grouped_matmul, transposed=True))
    dx = functools.reduce(jnp.add, [back(one, matrix, sizes, None) for one, matrix in zip(g, w)])
    dx, da, db = packed_lora.gradients(how)(x, a, b, g, dx, xla.inside(factor, sizes))
    return dx, None, None, da, db, None


_packed.defvjp(_forward, _backward, symbolic_zeros=True)


def _matmul(how: tuple[str, Any]) -> Any:
    @jax.custom_batching.custom_vmap
    def call(x: Any, w: Any, sizes: Any, a: Any, b: Any, factor: Any) -> Any:
        return dispatch.run("packed_matmul", MATMUL, how[0], (x, w, sizes, a, b, factor), how[1])

    @call.def_vmap
    def rule(P: int, batched: Any, x: Any, w: Any, sizes: Any, a: Any, b: Any, factor: Any) -> Any:
        of_x, of_w, of_sizes, of_a, of_b, of_factor = batched
        sizes_PE, shared = each(sizes, of_sizes, P), not any(of_w)
        rows = Merged(sizes_PE, x.shape[-2], by_group=shared)
        if shared:
            sizes = jnp.sum(sizes_PE, axis=0, dtype=sizes.dtype)
        else:
            w, sizes = tuple(joined(one, of, P) for one, of in zip(w, of_w)), sizes_PE.reshape(-1)
        a, b, factor = packed_lora.of_policies(
            P, (a, b, factor), (of_a, of_b, of_factor), shared=not any((*of_a, *of_b))
        )
        factor = rows.take(factor[:, None], True)[:, 0]
        out = tuple(rows.back(y) for y in call(rows.take(x, of_x), w, sizes, a, b, factor))
        return out, (True,) * len(out)

    return call
