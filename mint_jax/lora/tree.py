"""Adapters as pytrees: adaptable projections, one policy's factors, stacks of policies by rank
bucket.

An *adapter* is ``{"dense": {"attn": {"q": {"a": [L, R, D], "b": [L, R, F]}}}}`` at its true rank; L
= 1 outside the layers, ``[L, E, R, D]`` for routed experts. A *stack* holds S slots of one bucket,
``[L, S, (E,) R, D]``: the next power of two. Padded rank rows and projections that a policy does
not target are zero, get a zero gradient and stay zero.

Shared-outer adapters of experts have paths of their own, ``experts/shared_outer/gate``, where the
factor on the hidden side has no E. A stack whose policies have both forms therefore has both, each
policy's other one zero. A common path would store a shared factor E times.

An adapter of kind ``basis`` has A alone; where it is written into a slot, B is added (``basis``).
An adapter of kind ``bias`` has one leaf for a projection, ``bias [L, 1, F]``: B of an input that is
always 1, without A. Its stacks are those of bucket 0, so that it stores and moves no factor.

Axes: L layers, S slots, E experts, R rank, D in, F out. Hu et al. 2021, arXiv 2106.09685.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from mint_jax import params as params_lib
from mint_jax import sharding
from mint_jax.errors import UserError, choice
from mint_jax.lora.basis import with_basis
from mint_jax.lora.config import (  # noqa: F401
    BASIS,
    BIAS,
    INITS,
    LINEAR_TARGETS,
    MAX_RANK,
    SHARED_OUTER,
    AdapterConfig,
    bucket_for,
    bucket_of,
)
from mint_jax.lora.finite import all_finite
from mint_jax.params import ParamSpec

# Every projection except embedding, unembedding and router.
ALL_LINEAR = "all-linear"
TABLES = ("embed", "unembed")  # projections outside the layers
UNDROPPED = (*TABLES, "experts")  # their adapters' inputs have no dropout
UNUSUAL = (*TABLES, "router")  # adapted only if a config names them
# No biases: tables, routed experts, and the keys and values that MLA absorbs into queries
UNBIASED = (*UNDROPPED, "kv_b")
SLOT_AXIS = 1


@dataclasses.dataclass(frozen=True, order=True)
class Slot:
    """Location of a resident adapter: rank bucket and index in its stack."""

    bucket: int
    index: int


def target_paths(base_specs: Any) -> dict[str, list[str]]:
    """Returns the projection paths of each short target name, from the specs of a base."""
    out: dict[str, list[str]] = {}
    for path, spec in params_lib.leaves_with_path(base_specs):
        if path.endswith("/w"):
            assert isinstance(spec, ParamSpec)
            owner = path.removesuffix("/w")
            out.setdefault(owner.rsplit("/", 1)[-1], []).append(owner)
    out.setdefault("unembed", ["unembed"])  # a tied unembedding is adapted separately
    return out


class Projection(NamedTuple):
    """One adaptable projection of a base."""

    stack: tuple[int, ...]  # `(L,)`, or `(L, E)` for routed experts
    d_in: int
    d_out: int
    axes: tuple[str | None, ...]  # logical axes of stack, in and out dimension
    shared: str = ""  # factor that the experts of a layer share, "a" or "b"

    def stack_of(self, factor: str) -> tuple[int, ...]:
        return self.stack[:1] if factor == self.shared else self.stack


def projections(base_specs: Any, targets: Iterable[str]) -> dict[str, Projection]:
    """Returns the projections that ``targets`` names, by path; raises ``UserError`` if unknown.

    Args:
        targets: short names, or ``AdapterConfig.names``, which say the form of experts' factors.
    """
    known = target_paths(base_specs)
    linear = [name for name in known if name not in UNUSUAL]
    marked = [target.partition("@") for target in targets]
    forms = {
        (name, form): None
        for target, _, form in marked
        for name in (linear if target == ALL_LINEAR else [target])
    }
    wanted = [name for name, _ in forms]
    if not wanted:
        raise UserError(f"targets is empty: name at least one of {', '.join(known)}")
    if unknown := [name for name in wanted if name not in known]:
        raise UserError(
            f"target {unknown[0]!r} is not a projection of this base; choose from {ALL_LINEAR},"
            f" {', '.join(known)}"
        )
    paths = [_path_of(path, form) for name, form in forms for path in known[name]]
    return {path: _projection_at(base_specs, path) for path in paths}


def _adapted(base_specs: Any, config: AdapterConfig) -> dict[str, Projection]:
    """Returns an adapter's projections; raises ``UserError`` for a form without experts."""
    out = projections(base_specs, config.names)
    if config.experts == SHARED_OUTER and not any(p.shared for p in out.values()):
        raise UserError(
            f"experts is {SHARED_OUTER!r}, but no target is a projection of routed experts: set it"
            " to 'each'"
        )
    if config.kind == BIAS and (without := [path for path in out if not _takes_bias(path)]):
        barred = {*UNUSUAL, *(path.rsplit("/", 1)[-1] for path in without)}
        raise UserError(
            f"targets name {without[0]}, which takes no bias: set targets to some of"
            f" {', '.join(name for name in target_paths(base_specs) if name not in barred)}"
        )
    return out


def _takes_bias(path: str) -> bool:
    return set(UNBIASED).isdisjoint(path.split("/"))


def check_dropout(base_specs: Any, config: AdapterConfig, rate: float) -> None:
    """Raises ``UserError`` if an adapter with dropout has targets whose inputs are not dropped."""
    if rate and config.kind == BIAS:
        raise UserError(f"dropout is {rate}, but a bias has no inputs: set dropout to 0")
    for path in projections(base_specs, config.names) if rate else ():
        if not set(UNDROPPED).isdisjoint(path.split("/")):
            raise UserError(
                f"dropout is {rate}, and targets name {path}; adapters of embed, unembed and routed"
                f" experts have no dropout: drop {path.rsplit('/', 1)[-1]!r} from targets, or set"
                " dropout to 0"
            )


def _path_of(path: str, form: str) -> str:
    parent, _, name = path.rpartition("/")
    return f"{parent}/{form}/{name}" if form and parent.endswith("/experts") else path


def spelled_out(config: AdapterConfig, base_specs: Any) -> AdapterConfig:
    """Returns the config with its targets one by one in the base's order, to compare sets."""
    _adapted(base_specs, config)
    chosen, known = projections(base_specs, config.targets), target_paths(base_specs)
    targets = tuple(name for name, paths in known.items() if not chosen.keys().isdisjoint(paths))
    return dataclasses.replace(config, targets=targets)


def _projection_at(base_specs: Any, path: str) -> Projection:
    if path in TABLES:
        vocab, width = base_specs["embed"]["w"].shape
        if path == "embed":
            return Projection((1,), vocab, width, ("layers", "vocab", "embed"))
        return Projection((1,), width, vocab, ("layers", "embed", "vocab"))
    node = base_specs
    for name in path.split("/"):
        node = node if name == SHARED_OUTER else node[name]
    *stack, d_in, d_out = node["w"].shape
    shared = ""
    if SHARED_OUTER in path:
        shared = "a" if node["w"].axes[-2] == "expert_embed" else "b"
    return Projection(tuple(stack), d_in, d_out, node["w"].axes, shared)


def adapter_specs(base_specs: Any, config: AdapterConfig) -> Any:
    """Returns one policy's own factors as ``ParamSpec`` leaves, at the true rank."""
    _adapted(base_specs, config)
    specs = stack_specs(base_specs, config.names, config.rank)
    if config.kind != BASIS:
        return specs
    own = params_lib.leaves_with_path(specs)
    return params_lib.nest({path: spec for path, spec in own if path.endswith("/a")})


def stack_specs(base_specs: Any, targets: Iterable[str], rank: int, *slots: int) -> Any:
    """Returns the specs of a stack of ``slots`` policies, sharded as the base's projections; of
    rank 0 those of biases, for the targets that take one.
    """
    flat = {}
    for path, p in projections(base_specs, targets).items():
        if not rank and not _takes_bias(path):
            continue
        flat[path] = {}
        for f, end in (("a", p.d_in), ("b", p.d_out)) if rank else ((BIAS, p.d_out),):
            L, *experts = p.stack_of(f)
            shape, axes = (L, *slots, *experts, rank or 1, end), _factor_axes(p, f, bool(slots))
            flat[path][f] = ParamSpec(shape, axes, jnp.float32, "zeros")
    return params_lib.nest(flat)


def _factor_axes(p: Projection, factor: str, stacked: bool) -> tuple[str | None, ...]:
    slots = ("slots",) if stacked else ()
    stack = p.axes[: len(p.stack_of(factor))]
    return (stack[0], *slots, *stack[1:], "rank", p.axes[-2] if factor == "a" else p.axes[-1])


def constrain(tree: Any, base_specs: Any) -> Any:
    """Constrains stacked factors, and leaves of their paths, to their projection's sharding."""

    def pin(keys: Any, leaf: jax.Array) -> jax.Array:
        path = "/".join(key.key for key in keys if isinstance(getattr(key, "key", None), str))
        owner, _, factor = path.rpartition("/")
        if factor not in ("a", "b", BIAS) or leaf.ndim < 4:
            return leaf
        return sharding.constrain(
            leaf, *_factor_axes(_projection_at(base_specs, owner), factor, True)
        )

    return jax.tree_util.tree_map_with_path(pin, tree)


def init_adapter(base_specs: Any, config: AdapterConfig, seed: int, init: str = "uniform") -> Any:
    """Returns a new adapter with PEFT's initialisation, NumPy arrays: A uniform in ±1/sqrt(D), B
    zero, biases too; for ``embed`` A zero, B normal. With ``orthonormal`` the rows of A, or its
    columns if it has more rows than columns, are orthonormal. Of kind ``basis`` A is zero.

    The same seed gives the same adapter through every door, on any mesh and with any other targets.
    """
    if init not in INITS:
        raise choice("init", init, INITS)

    # Drawn on the host (Philox) from the seed and each path: new ranks and targets compile nothing.
    def draw(path: str, spec: ParamSpec) -> np.ndarray:
        key = np.array([seed & 0xFFFFFFFFFFFFFFFF, params_lib.path_seed(path)], np.uint64)
        numbers = np.random.Generator(np.random.Philox(key=key))
        if path == "embed/b":
            return numbers.standard_normal(spec.shape, np.float32)
        if path.endswith("/a") and path != "embed/a" and config.kind != BASIS:
            if init == "orthonormal":
                return _orthonormal(numbers.standard_normal(spec.shape)).astype(np.float32)
            bound = np.float32(spec.shape[-1] ** -0.5)
            return (2 * numbers.random(spec.shape, np.float32) - 1) * bound
        return np.zeros(spec.shape, np.float32)

    return params_lib.map_with_path(draw, adapter_specs(base_specs, config))


def _orthonormal(x: np.ndarray) -> np.ndarray:
    """Returns random orthonormal rows, or columns, from normal numbers ``[..., R, D]``."""
    wide = x.shape[-2] <= x.shape[-1]
    q, r = np.linalg.qr(np.swapaxes(x, -1, -2) if wide else x)
    q = q * np.sign(np.diagonal(r, axis1=-2, axis2=-1))[..., None, :]  # makes them uniform
    return np.swapaxes(q, -1, -2) if wide else q


@struct.dataclass
class AdapterStack:
    """S slots of one rank bucket."""

    factors: Any  # a tree of `[L, S, R, D]` and `[L, S, R, F]`, or `[L, S, 1, F]`, float32
    scale: jax.Array  # `[S]` float32
    rank: int = struct.field(pytree_node=False)

    @property
    def slots(self) -> int:
        return self.scale.shape[0]


Stacks = dict[int, AdapterStack]  # bucket rank -> stack


def empty_stack(base_specs: Any, targets: Iterable[str], rank: int, slots: int) -> AdapterStack:
    """Returns a stack of empty slots for one bucket; ``targets`` is the union over its policies."""
    specs = stack_specs(base_specs, targets, rank, slots)
    return AdapterStack(
        params_lib.init(specs, jax.random.key(0)), jnp.zeros((slots,), jnp.float32), rank
    )


def write_slot(
    stack: AdapterStack, slot: jax.Array | int, adapter: Any, scale: jax.Array | float
) -> AdapterStack:
    """Writes one policy's adapter into a slot; projections that it does not target become zero."""
    present = dict(params_lib.leaves_with_path(stack.factors))
    new = with_basis(dict(params_lib.leaves_with_path(adapter)), widths_of(present))
    if missing := sorted(set(new) - set(present)):
        raise ValueError(
            f"the stack of rank {stack.rank} has no {missing[0]!r}: make it with the union of all"
            " targets"
        )

    def put(path: str, leaf: jax.Array) -> jax.Array:
        if path not in new:
            return leaf.at[:, slot].set(0.0)
        own = jnp.asarray(new[path], leaf.dtype)
        more = leaf.shape[-2] - own.shape[-2]
        return leaf.at[:, slot].set(jnp.pad(own, [(0, 0)] * (own.ndim - 2) + [(0, more), (0, 0)]))

    return dataclasses.replace(
        stack,
        factors=params_lib.map_with_path(put, stack.factors),
        scale=stack.scale.at[slot].set(scale),
    )


def widths_of(leaves: Mapping[str, Any]) -> dict[str, int]:
    """Returns F of each projection, from a stack's leaves, or their specs, by path."""
    return {path[:-2]: x.shape[-1] for path, x in leaves.items() if path.endswith("/b")}


def read_slot(
    stack: AdapterStack, slot: jax.Array | int, rank: int | None = None, targets: Any = None
) -> Any:
    """Returns one slot's adapter at its true rank, restricted to ``targets``, a spec tree."""
    adapter = jax.tree.map(lambda x: x[:, slot, ..., :rank, :], stack.factors)
    if targets is None:
        return adapter
    flat = dict(params_lib.leaves_with_path(adapter))
    return params_lib.map_with_path(lambda path, _: flat[path], targets)


def stack_adapters(
    base_specs: Any, adapters: Mapping[str, tuple[AdapterConfig, Any]]
) -> tuple[Stacks, dict[str, Slot]]:
    """Builds stacks with one slot for each adapter; returns them and the slot of each name."""
    buckets: dict[int, list[str]] = {}
    for name, (config, _) in adapters.items():
        buckets.setdefault(config.bucket, []).append(name)
    stacks, slots = {}, {}
    for bucket, names in sorted(buckets.items()):
        targets = dict.fromkeys(t for name in names for t in adapters[name][0].names)
        stack = empty_stack(base_specs, targets, bucket, len(names))
        for index, name in enumerate(names):
            config, adapter = adapters[name]
            stack = write_slot(stack, index, adapter, config.scale)
            slots[name] = Slot(bucket, index)
        stacks[bucket] = stack
    return stacks, {name: slots[name] for name in adapters}


def expanded(adapter: Any) -> Any:
    """Returns an adapter with the same outputs in which every expert has both factors."""
    flat = dict(params_lib.leaves_with_path(adapter))
    out = {}
    for path, leaf in flat.items():
        if f"/{SHARED_OUTER}/" in path:
            other = flat[path[:-1] + ("b" if path.endswith("a") else "a")]
            if np.ndim(leaf) < np.ndim(other):
                own = np.asarray(leaf)[:, None]
                leaf = np.broadcast_to(own, (*np.shape(other)[:2], *own.shape[2:]))
        out[path.replace(f"/{SHARED_OUTER}/", "/")] = leaf
    return params_lib.nest(out)


def shared_outer(adapter: Any, what: str) -> Any:
    """Inverse of ``expanded``. Raises ``UserError`` if experts differ in a factor to be shared."""
    out = {}
    for path, leaf in params_lib.leaves_with_path(adapter):
        owner, _, factor = path.rpartition("/")
        parent, _, name = owner.rpartition("/")
        if parent.endswith("/experts"):
            if (name == "down") == (factor == "b"):
                leaf = np.asarray(leaf)
                if (leaf != leaf[:, :1]).any():
                    raise UserError(
                        f"{what}: the experts of a layer differ in {path}, so they cannot share it:"
                        " import it with experts each"
                    )
                leaf = np.ascontiguousarray(leaf[:, 0])
            path = f"{parent}/{SHARED_OUTER}/{name}/{factor}"
        out[path] = leaf
    return params_lib.nest(out)


def check_resident(slot: Slot | None, stacks: Stacks) -> None:
    """Raises ``UserError`` if no stack has the slot."""
    if slot is not None and (
        slot.bucket not in stacks or not 0 <= slot.index < stacks[slot.bucket].slots
    ):
        raise UserError(f"{slot} is not resident: load the adapter first")


def adapter_nbytes(base_specs: Any, config: AdapterConfig) -> int:
    """Returns the bytes of one policy's float32 factors at its true rank."""
    return params_lib.nbytes(adapter_specs(base_specs, config))


def check_fits(
    adapter: Any, config: AdapterConfig, base_specs: Any, what: str, finite: bool = True
) -> int:
    """Checks that an adapter has the projections, rank and shapes that its config needs on this
    base, and is ``finite``. Returns the number of modules that bind, per projection, layer and
    expert.

    Raises:
        UserError: names the first mismatch, or says that nothing binds.
    """
    bound = _adapted(base_specs, config)
    specs = dict(params_lib.leaves_with_path(adapter_specs(base_specs, config)))
    found = {path: tuple(np.shape(leaf)) for path, leaf in params_lib.leaves_with_path(adapter)}
    if not found:
        raise UserError(f"{what}: no module binds; the adapter is empty")
    if strange := sorted(found.keys() - specs.keys()):
        raise UserError(
            f"{what}: {strange[0]} is not among the targets {', '.join(config.names)} of this base"
        )
    if lacking := sorted(specs.keys() - found.keys()):
        raise UserError(f"{what}: {lacking[0]} is missing, though its config targets it")
    for path, shape in found.items():
        if shape != specs[path].shape:
            raise UserError(
                f"{what}: {path} has shape {shape}; this base and {config.size} need"
                f" {specs[path].shape}"
            )
    if finite:
        check_finite(adapter, what)
    return sum(math.prod(p.stack) for p in bound.values())


def check_finite(adapter: Any, what: str) -> None:
    """Raises ``UserError`` naming the tensor if an adapter has NaN or infinite weights."""
    for path, leaf in params_lib.leaves_with_path(adapter):
        if not all_finite(np.asarray(leaf)):
            raise UserError(
                f"{what}: {path} has NaN or infinite values; its run diverged: use an earlier"
                " revision"
            )
