"""Table from logical axis names to mesh axes, and the shardings that follow from it.

All other code names logical axes. A mesh axis that is absent or has size 1 splits nothing.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mint_jax.errors import UserError
from mint_jax.params import ParamSpec

Axis = str | tuple[str, ...] | None

RULES: dict[str, Axis] = {
    "batch": ("data", "fsdp", "expert"),
    "cache_rows": ("data", "fsdp", "expert", "tensor"),  # of keys and values: see cache_axes
    "embed": "fsdp",
    **dict.fromkeys(("ffw", "q_heads", "kv_heads", "vocab"), "tensor"),
    "experts": ("fsdp", "expert", "tensor"),  # a device owns whole experts
    **dict.fromkeys(("tokens", "act_embed"), None),  # of activations
    **dict.fromkeys(("layers", "latent", "expert_embed", "expert_ffw", "norm"), None),
    # of adapters, whose in and out dimensions split as the base's do
    **dict.fromkeys(("slots", "rank"), None),
}


def mesh_axes(name: str | None, mesh: Any) -> tuple[str, ...]:
    """Returns the mesh axes of more than one device that split a logical axis."""
    if name is not None and name not in RULES:
        raise ValueError(f"logical axis {name!r} is not in sharding.RULES: add a line there")
    rule = RULES[name] if name is not None else None
    wanted = (rule,) if isinstance(rule, str) else (rule or ())
    return tuple(axis for axis in wanted if mesh.shape.get(axis, 1) > 1)


def ways(name: str | None, mesh: Any) -> int:
    """Returns the number of parts of a logical axis."""
    return math.prod(mesh.shape[axis] for axis in mesh_axes(name, mesh))


def parts_here(size: int, name: str) -> int:
    """Returns the number of parts into which the current mesh splits a dimension of ``size``."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else math.gcd(size, ways(name, mesh))


def cache_axes(heads: int | None) -> tuple[str, str | None]:
    """Returns the logical axes that split a cache on the current mesh: of its rows and pages, and
    of its heads (None for latents, which all heads share).

    Each device of a tensor group keeps some heads, or some rows where heads do not divide or are
    shared. Decoding then moves queries and partial sums, never the cache.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or ways("kv_heads", mesh) == 1:
        return "batch", None
    divides = heads is not None and heads % ways("kv_heads", mesh) == 0
    return ("batch", "kv_heads") if divides else ("cache_rows", None)


def partition(axes: Sequence[str | None], mesh: Mesh) -> PartitionSpec:
    """Returns the ``PartitionSpec`` of an array with these logical dimension names. Raises
    ``ValueError`` if two of them map to one mesh axis.
    """
    used: set[str] = set()
    out: list[Axis] = []
    for name in axes:
        present = mesh_axes(name, mesh)
        if clash := used.intersection(present):
            raise ValueError(
                f"axes {tuple(axes)} map mesh axis {sorted(clash)[0]!r} to two dimensions: change"
                " sharding.RULES"
            )
        used.update(present)
        out.append(present[0] if len(present) == 1 else (present or None))
    return PartitionSpec(*out)


def sharding_of(spec: ParamSpec, mesh: Mesh) -> NamedSharding:
    """Returns one parameter's sharding. Raises ``UserError`` if the mesh does not divide it."""
    pspec = partition(spec.axes, mesh)
    for size, name, entry in zip(spec.shape, spec.axes, pspec):
        if size % (parts := ways(name, mesh)):
            raise UserError(
                f"mesh axis {entry!r} splits {parts} ways, which does not divide dimension {name!r}"
                f" of size {size}: choose mesh sizes that divide it (--config.mesh.tensor, .fsdp,"
                " .expert)"
            )
    return NamedSharding(mesh, pspec)


def shardings(specs: Any, mesh: Mesh) -> Any:
    """Returns a tree of ``NamedSharding`` for a tree of ``ParamSpec``."""
    return jax.tree.map(lambda spec: sharding_of(spec, mesh), specs)


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Constrains the sharding of an activation inside ``jit``; does nothing without a mesh.

    A dimension that its mesh axes do not divide (four key heads over eight devices) stays whole.
    """
    mesh: Any = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, partition(fitting(x.shape, *axes), mesh))


def fitting(shape: Sequence[int], *axes: str | None) -> tuple[str | None, ...]:
    """Returns the axes that split their dimension evenly on the current mesh, else None."""
    mesh: Any = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return (None,) * len(axes)
    return tuple(
        name if ways(name, mesh) > 1 and size % ways(name, mesh) == 0 else None
        for size, name in zip(shape, axes, strict=True)
    )


def one_device() -> bool:
    """Returns true if the current mesh has one device, or there is no mesh."""
    mesh: Any = jax.sharding.get_abstract_mesh()
    return mesh.empty or mesh.size == 1


def over_devices(
    fn: Callable[..., Any], args: Sequence[Any], specs: Sequence[Any], out_specs: Any
) -> Any:
    """Applies ``fn(*args)`` to each device's own parts; directly without a mesh.

    Args:
        specs: for each argument a tuple of logical axes, for all its leaves and shortened to their
            rank, or a tree of such.
        out_specs: tree of such for the results.
    """
    mesh: Any = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return fn(*args)
    in_specs = tuple(_partitions(spec, arg, mesh) for spec, arg in zip(specs, args, strict=True))
    out = jax.tree.map(lambda spec: partition(spec, mesh), out_specs, is_leaf=_is_axes)
    return jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out, check_vma=False)(*args)


def _is_axes(spec: Any) -> bool:
    return type(spec) is tuple and all(axis is None or isinstance(axis, str) for axis in spec)


def _partitions(spec: Any, arg: Any, mesh: Any) -> Any:
    if _is_axes(spec):
        return jax.tree.map(lambda x: partition(spec[: x.ndim], mesh), arg)
    return jax.tree.map(lambda one, x: _partitions(one, x, mesh), spec, arg, is_leaf=_is_axes)
