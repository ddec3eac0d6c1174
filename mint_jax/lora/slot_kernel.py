"""Kernels that add the deltas of rows that name slots to the results of the base.

A kernel of ``pallas_kernels.slot_lora`` reads every distinct adapter once, in place. For 32 rows of
eight adapters, gathering for each row reads each four times, writes the copies and reads them
again. Other dtypes and meshes, and CPUs without a C++ compiler, use the forms of ``view.py``.

Axes: B rows, T tokens, M rows times tokens, L layers, S slots, W layers times slots, R rank, D in,
F out.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mint_jax import sharding
from pallas_kernels import dispatch, slot_lora
from pallas_kernels.dispatch import Implementation
from pallas_kernels.layer_matmul import layer_matmul
from pallas_kernels.layer_matmul import pallas_gpu as gpu_matmul
from pallas_kernels.slot_lora.pallas_gpu import Turn

Ends = tuple[str | None, str | None]  # logical axes of a projection's in and out dimension

KERNELS = (
    ("pallas_tpu", "tpu", slot_lora.pallas_tpu),
    ("pallas_gpu", "cuda", slot_lora.pallas_gpu),
    ("cpu", "cpu", slot_lora.cpu),
)


def add(
    args: tuple[jax.Array, tuple[jax.Array, ...], tuple[Any, ...], jax.Array],
    ends: tuple[Ends, ...],
    kernel: str,
    plain: Callable[..., tuple[jax.Array, ...]],
) -> tuple[jax.Array, ...]:
    """Adds one rank bucket's deltas to the results of projections of the same rows.

    Args:
        args: ``x [B, T, D]``, results ``[B, T, F]``, the ``view.RankBucket`` of each, and the
            layer.
        ends: logical axes of each projection's D and F.
        plain: form without a kernel, a function of ``args``.
    """
    table = []
    for name, on, op in KERNELS:
        bound = functools.partial(_by_kernel, op=op, ends=ends)
        require = functools.partial(_require, op=op, ends=ends)
        table.append(Implementation(name, on, bound, require))
    table.append(Implementation("xla", None, plain, dispatch.anything))
    return dispatch.run("slot_lora", table, kernel, args)


class Products(NamedTuple):
    """Products of rows with matrices of one layer, still to be made by ``layer_matmul``."""

    stacks: tuple[jax.Array, ...]
    layer: jax.Array
    kernel: str
    used: jax.Array | None

    def of(self, x: jax.Array) -> tuple[jax.Array, ...]:
        """Returns ``x w`` of every matrix, ``[B, T, F]`` float32."""
        return layer_matmul(x, self.stacks, self.layer, self.used, implementation=self.kernel)


def add_to_products(
    x: jax.Array, products: Products, buckets: tuple[Any, ...], layer: jax.Array, kernel: str
) -> list[jax.Array] | None:
    """Returns products with one rank bucket's deltas, in three launches of a GPU: the last sums
    parts of products as it adds. None where other kernels serve.
    """
    names, op = {kernel, products.kernel}, slot_lora.pallas_gpu
    on_cpu = dispatch.platform_of_mesh() != "cuda"
    if names != {"pallas_gpu"} and (on_cpu or names != {"auto"}):
        return None
    if not sharding.one_device() or not all(map(_whole, buckets)):
        return None
    widths = [bucket.factors["b"].shape[-1] for bucket in buckets]
    ys = [jax.ShapeDtypeStruct((*x.shape[:-1], F), x.dtype) for F in widths]
    try:
        gpu_matmul.require(x, products.stacks, products.layer, products.used)
        _require(x, ys, buckets, layer, ((None, None),) * len(ys), op)
    except NotImplementedError:  # noted where the parts are called one by one
        return None
    args = products.stacks, products.layer, products.used
    parts = gpu_matmul.matmul(x, *args, interpret=on_cpu, in_parts=True)
    made = _add_each(x, parts, buckets, layer, op, on_cpu)
    return [y.reshape(like.shape) for y, like in zip(made, ys)]


def turn(slots_B: jax.Array, tokens: int, scale_S: jax.Array, kernel: str) -> Turn | None:
    """Precomputes the GPU kernel's order and scales of rows, once for all layers and steps, if it
    is used.
    """
    if kernel not in ("auto", "pallas_gpu") or not sharding.one_device():
        return None

    def make(slots_B: jax.Array, scale_S: jax.Array) -> Turn:
        slot_M = jnp.repeat(slots_B, tokens)
        order = slot_lora.pallas_gpu.turn(slot_M, scale_S.shape[0])
        return order.replace(scale=scale_S[jnp.maximum(slot_M, 0)])  # type: ignore[attr-defined]

    if kernel == "pallas_gpu":
        return make(slots_B, scale_S)

    def none(*args: jax.Array) -> Turn:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(make, *args))

    return jax.lax.platform_dependent(slots_B, scale_S, cuda=make, default=none)


class _Split(NamedTuple):
    """Split of a projection by the current mesh: logical axes, None where it is not split."""

    rows: str | None  # this and inward, outward: axes of rows, inputs and outputs
    inward: str | None
    outward: str | None
    # swap_in, swap_out: mesh axes that split rows and also inputs, or outputs (`fsdp`). An all-to-
    # all trades a device's whole rows for parts of the rows of all devices along these axes, as the
    # factors are split, and back afterwards
    swap_in: tuple[str, ...]
    swap_out: tuple[str, ...]


def _split(x: jax.Array, y: jax.Array, ends: Ends) -> _Split:
    mesh: Any = jax.sharding.get_abstract_mesh()
    rows, inward, outward = sharding.fitting((x.shape[0], x.shape[-1], y.shape[-1]), "batch", *ends)
    of_rows = sharding.mesh_axes(rows, mesh)
    swap_in, swap_out = (
        tuple(axis for axis in sharding.mesh_axes(wide, mesh) if axis in of_rows)
        for wide in (inward, outward)
    )
    return _Split(rows, inward, outward, swap_in, swap_out)


def _require(x, ys, buckets, layer, ends, op) -> None:
    """Raises ``NotImplementedError`` if kernels cannot serve each device's part of a projection."""
    mesh: Any = jax.sharding.get_abstract_mesh()
    for y, bucket, end in zip(ys, buckets, ends):
        a, b, split = bucket.factors.get("a"), bucket.factors.get("b"), _split(x, y, end)
        inward, outward = (sharding.mesh_axes(axis, mesh) for axis in (split.inward, split.outward))
        if both := set(inward) & set(outward):
            raise NotImplementedError(f"mesh axis {min(both)} splits inputs and outputs")
        for swapped, axes in ((split.swap_in, inward), (split.swap_out, outward)):
            if swapped and swapped != axes:
                raise NotImplementedError(
                    f"mesh axes {axes} split inputs or outputs, and {swapped} of them rows too"
                )

        def part(size: int, axis: str | None) -> int:
            return size // (sharding.ways(axis, mesh) if axis else 1)

        M, (layers, S, R, _) = part(x[..., 0].size, split.rows), (b if a is None else a).shape
        D, F = part(x.shape[-1], split.inward), part(y.shape[-1], split.outward)
        more_in, more_out = (
            math.prod(mesh.shape[axis] for axis in swapped)
            for swapped in (split.swap_in, split.swap_out)
        )
        x_MD = jax.ShapeDtypeStruct((M * more_in, D), x.dtype)
        y_MF = jax.ShapeDtypeStruct((M * more_out, F), y.dtype)
        a_WRD, b_WRF = (
            w if w is None else jax.ShapeDtypeStruct((layers * S, R, end), w.dtype)
            for w, end in ((a, D), (b, F))
        )
        if _whole(bucket) and split.inward is None and not split.swap_out:
            op.require_add(x_MD, a_WRD, b_WRF, y_MF)
            continue
        if a_WRD is not None:
            op.require_shrink(x_MD, a_WRD)
        if b_WRF is not None:
            op.require_expand(b_WRF, y_MF)


def _by_kernel(x, ys, buckets, layer, ends, op, interpret=False) -> tuple[jax.Array, ...]:
    one_launch = op is slot_lora.pallas_gpu and sharding.one_device()
    if not one_launch or not all(map(_whole, buckets)):
        return tuple(
            _one_by_kernel(x, y, bucket, layer, end, op, interpret)
            for y, bucket, end in zip(ys, buckets, ends)
        )
    # On one GPU projections of the same rows are two launches.
    made = _add_each(x, [_flat(y, 1) for y in ys], buckets, layer, op, interpret)
    return tuple(one.reshape(y.shape) for one, y in zip(made, ys))


def _add_each(x, onto, buckets, layer, op, interpret) -> list[jax.Array]:
    T, own = x.shape[1], buckets[0]
    return op.add_each(
        _flat(x, 1),
        [_flat(b.factors["a"], 2) for b in buckets],
        [_flat(b.factors["b"], 2) for b in buckets],
        onto,
        jnp.repeat(own.slots, T),
        jnp.repeat(own.scale[jnp.maximum(own.slots, 0)], T),
        layer * own.scale.shape[0],
        _turn_of(own, x),
        interpret=interpret,
    )


def _flat(x: jax.Array, kept: int) -> jax.Array:
    return x.reshape(-1, *x.shape[-kept:])


def _turn_of(bucket: Any, x: jax.Array) -> Turn | None:
    turn = bucket.turn
    return turn if turn is not None and turn.rows.size == x[..., 0].size else None


def _whole(bucket: Any) -> bool:
    return bucket.factors.keys() == {"a", "b"}


def _one_by_kernel(x, y, bucket, layer, ends, op, interpret) -> jax.Array:
    rows, inward, outward, swap_in, swap_out = _split(x, y, ends)
    more: dict[str, Any] = {"interpret": interpret}
    if op is slot_lora.pallas_gpu and sharding.one_device():
        more["order"] = _turn_of(bucket, x)

    # With split inputs only x A^T, [M, R], is communicated.
    def shrunk(x_MD, a, slot_M, first):
        if not swap_in:
            over = sharding.mesh_axes(inward, jax.sharding.get_abstract_mesh())
            h_MR = op.shrink(x_MD, a, slot_M, first, **more)
            return jax.lax.psum(h_MR, over) if over else h_MR
        slots = jax.lax.all_gather(slot_M, swap_in, tiled=True)
        parts = jax.lax.all_to_all(x_MD, swap_in, 1, 0, tiled=True)
        h_MR = op.shrink(parts, a, slots, first, **more)
        return jax.lax.psum_scatter(h_MR, swap_in, tiled=True)

    def expanded(h_MR, b, y_MF, slot_M, first):
        if not swap_out:
            return op.expand(h_MR, b, y_MF, slot_M, first, **more)
        h_MR, slot_M = (jax.lax.all_gather(one, swap_out, tiled=True) for one in (h_MR, slot_M))
        parts = jax.lax.all_to_all(y_MF, swap_out, 1, 0, tiled=True)
        parts = op.expand(h_MR, b, parts, slot_M, first, **more)
        return jax.lax.all_to_all(parts, swap_out, 0, 1, tiled=True)

    def local(x_BTD, y_BTF, factors, scale_S, slots_B, layer):
        T, S = x_BTD.shape[1], scale_S.shape[0]
        x_MD, y_MF = x_BTD.reshape(-1, x_BTD.shape[-1]), y_BTF.reshape(-1, y_BTF.shape[-1])
        a, b = (w if w is None else w.reshape(-1, *w.shape[2:]) for w in factors)
        slot_M, scale_M = (jnp.repeat(v, T) for v in (slots_B, scale_S[jnp.maximum(slots_B, 0)]))
        first = layer * S
        if _whole(bucket) and inward is None and not swap_out:
            made = op.add(x_MD, a, b, y_MF, slot_M, scale_M, first, interpret=interpret)
            return made.reshape(y_BTF.shape)
        h_MR = (x_MD if a is None else shrunk(x_MD, a, slot_M, first)) * scale_M[:, None]
        if b is None:
            own = jnp.pad(h_MR, ((0, 0), (0, y_MF.shape[1] - h_MR.shape[1])))
            return (y_MF + own.astype(y_MF.dtype)).reshape(y_BTF.shape)
        return expanded(h_MR[:, : b.shape[1]], b, y_MF, slot_M, first).reshape(y_BTF.shape)

    factors = bucket.factors.get("a"), bucket.factors.get("b")
    args = x, y, factors, bucket.scale, bucket.slots, layer
    of_x = rows, None, None if swap_in else inward
    of_y = rows, None, None if swap_out else outward
    of_a, of_b = ((None, None, None, axis) for axis in (inward, outward))
    specs = of_x, of_y, (of_a, of_b), (None,), (rows,), ()
    return sharding.over_devices(local, args, specs, of_y)
