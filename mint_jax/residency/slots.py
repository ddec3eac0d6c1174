"""Device slots: the stacks that engines sample from, and how an adapter's arrays get into one of
their slots.

``stage`` runs in a loader's thread: one transfer for each contiguous array, and, the first time an
adapter of its shapes comes, the compilation of the program that writes it. ``write`` runs in the
engine's thread between two steps: it hands the staged arrays to that program, which updates the
donated stack in place: the bytes are read once and written once. (105 MB, the rank-1 adapter of
Qwen3-30B-A3B, on one core of a CPU: staging 1.1 ms, writing 16.7; memcpy of as many bytes 12. A
program for each array took 18, for two adapters at once 15.5 an adapter, threads 21.) A write may
be cut into pieces of layers, so that no gap between two steps has to hold a whole large adapter; no
request is given the slot before the last piece.

Axes: L layers, S slots, E experts, R rank of the bucket, D in or out.
"""

import dataclasses
import functools
import threading
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, SingleDeviceSharding

from mint_jax import multihost, sharding
from mint_jax import params as params_lib
from mint_jax.lora import tree as lora_tree
from mint_jax.lora.tree import SLOT_AXIS, AdapterConfig, AdapterStack, Slot, Stacks
from mint_jax.params import ParamSpec


@dataclasses.dataclass
class Staged:
    """An adapter on the device, on its way into a slot.

    Attributes:
        arrays: its factors at their true rank, in their stored dtype.
        program: the compiled write.
        pieces: how many calls of it are needed; ``written`` are done.
        nbytes: bytes of the arrays.
        number: of the load, see ``residency.others``.
    """

    slot: Slot
    arrays: Any
    scale: jax.Array
    index: jax.Array
    program: Any
    pieces: int
    nbytes: int
    written: int = 0
    number: int = 0


class DeviceSlots:
    """Stacks of empty slots, and writes into them.

    Args:
        base_specs: the base's ``ParamSpec`` tree.
        counts: slots of each rank bucket.
        targets: the union of what the adapters may target.
        dtype: of the stacks; adapters stored in another are converted on the device.
        mesh: the base's; None is the default device.
        piece_bytes: a write of more bytes (as stored) is cut into pieces of about this many, where
            a bucket has several slots; None never cuts.
    """

    def __init__(
        self,
        base_specs: Any,
        counts: Mapping[int, int],
        targets: Iterable[str] = (lora_tree.ALL_LINEAR,),
        dtype: Any = jnp.float32,
        mesh: Mesh | None = None,
        piece_bytes: int | None = None,
    ):
        self.mesh, self.piece_bytes = mesh, piece_bytes
        targets = tuple(targets)
        self._specs: dict[int, Any] = {}
        self.stacks: Stacks = {}  # one object for good: who holds it sees every write
        for bucket, count in sorted(counts.items()):
            specs = lora_tree.stack_specs(base_specs, targets, bucket, count)
            self._specs[bucket] = jax.tree.map(lambda s: dataclasses.replace(s, dtype=dtype), specs)
            factors = jax.tree.map(self._zeros, self._specs[bucket])
            self.stacks[bucket] = AdapterStack(
                factors, self._zeros(ParamSpec((count,), (None,), jnp.float32)), bucket
            )
        self._scalar = self._sharding(ParamSpec((), ()))
        self._where = {  # bucket -> path -> the devices that hold one slot's part of a factor
            bucket: {
                path: self._sharding(_without_slots(spec))
                for path, spec in params_lib.leaves_with_path(specs)
            }
            for bucket, specs in self._specs.items()
        }

    def slot_bytes(self, bucket: int) -> int:
        """Device bytes of one slot."""
        stack = self.stacks[bucket]
        return params_lib.nbytes(stack.factors) // max(1, stack.slots)

    def targets(self, bucket: int) -> set[str]:
        """Paths of the projections that the slots of a bucket hold."""
        return {
            path.rsplit("/", 1)[0] for path, _ in params_lib.leaves_with_path(self._specs[bucket])
        }

    def stage(self, slot: Slot, adapter: Any, config: AdapterConfig) -> Staged:
        """Brings an admitted adapter to the device; returns when it is there. Any thread may call
        it.

        Args:
            adapter: host arrays ``[L, (E,) r, D]``; read until the write is done, so they must not
                change.
        """
        paths = dict(params_lib.leaves_with_path(adapter))
        numbers = (np.float32(config.scale), np.int32(slot.index))
        where = (
            {path: self._where[slot.bucket][path] for path in paths},
            (self._scalar, self._scalar),
        )
        # one call; on a CPU aligned pages are taken as they are
        arrays, (scale, index) = multihost.place((paths, numbers), where)
        nbytes = params_lib.nbytes(arrays)
        # The only slot of a bucket is written whole: XLA on CPU copies a stack of one slot of
        # 16-bit numbers at each piece (4.8 MB in 25 pieces: 12 ms; in one 0.3; of two slots 25
        # pieces 3.8).
        cut = self.piece_bytes if self.stacks[slot.bucket].slots > 1 else None
        pieces = 1 if cut is None else max(1, -(-nbytes // cut))
        program = self._program(slot.bucket, arrays, pieces)
        jax.block_until_ready((arrays, scale, index))
        return Staged(slot, arrays, scale, index, program, pieces, nbytes)

    def write(self, staged: Staged) -> bool:
        """Writes the next piece; True when it was the last. For the engine's thread, between steps.

        The stack's arrays are donated: what held the old ones must read ``stacks`` again.
        """
        # Donated, the write touches its piece alone. A stack that is not is copied whole for every
        # piece: on two cores a write into 256 MB took 79 ms so, and 0.03 ms in place.
        bucket = staged.slot.bucket
        self.stacks[bucket] = staged.program(
            self.stacks[bucket], staged.arrays, staged.scale, staged.index, np.int32(staged.written)
        )
        staged.written += 1
        return staged.written == staged.pieces

    def settle(self, bucket: int) -> None:
        """Waits until what was written into a bucket's slots is there."""
        jax.block_until_ready(self.stacks[bucket])

    def _program(self, bucket: int, arrays: Mapping[str, jax.Array], pieces: int) -> Any:
        """The compiled write of adapters of these shapes, compiled once, in the calling thread."""
        numbers = [
            jax.ShapeDtypeStruct((), t, sharding=self._scalar)
            for t in (jnp.float32, jnp.int32, jnp.int32)
        ]
        given = {
            path: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
            for path, x in arrays.items()
        }
        shapes, structure = jax.tree.flatten((self._abstract(bucket), given, *numbers))
        # the cache below does not make a second thread wait that asks for the same: both would
        # compile it
        with _COMPILING:
            return _compiled(structure, tuple(shapes), pieces)

    def _abstract(self, bucket: int) -> AdapterStack:
        factors = jax.tree.map(
            lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=self._sharding(s)),
            self._specs[bucket],
        )
        shape = (self.stacks[bucket].slots,)
        scale = jax.ShapeDtypeStruct(
            shape, jnp.float32, sharding=self._sharding(ParamSpec(shape, (None,)))
        )
        return AdapterStack(factors, scale, bucket)  # type: ignore[arg-type]

    def _sharding(self, spec: ParamSpec) -> Any:
        return (
            SingleDeviceSharding(jax.devices()[0])
            if self.mesh is None
            else sharding.sharding_of(spec, self.mesh)
        )

    def _zeros(self, spec: ParamSpec) -> jax.Array:
        return jnp.zeros(spec.shape, spec.dtype, device=self._sharding(spec))


_COMPILING = threading.Lock()


@functools.lru_cache(maxsize=128)
def _compiled(structure: Any, shapes: tuple[jax.ShapeDtypeStruct, ...], pieces: int) -> Any:
    """``write_piece`` for these shapes and shardings: one program for all slots of a process that
    look alike.
    """
    stack, given, *numbers = jax.tree.unflatten(structure, shapes)
    out = jax.tree.map(lambda s: s.sharding, stack)
    return (
        jax.jit(functools.partial(write_piece, pieces=pieces), donate_argnums=0, out_shardings=out)
        .lower(stack, given, *numbers)
        .compile()
    )


def _without_slots(spec: ParamSpec) -> ParamSpec:
    """One slot's part of a factor of a stack."""
    shape, axes = list(spec.shape), list(spec.axes)
    del shape[SLOT_AXIS], axes[SLOT_AXIS]
    return ParamSpec(tuple(shape), tuple(axes), spec.dtype)


def write_piece(
    stack: AdapterStack,
    arrays: Mapping[str, jax.Array],
    scale: jax.Array,
    slot: jax.Array,
    piece: jax.Array,
    *,
    pieces: int,
) -> AdapterStack:
    """Writes one of ``pieces`` ranges of layers of an adapter into a slot, in place where the stack
    is donated.

    Numbers of 16 bits are moved as integers: XLA on CPU takes three times as long for bfloat16 (24
    MiB: 17 against 5.4 ms). Rank rows beyond the adapter's, and projections that it does not
    target, become zero. The scale comes with every piece.

    Args:
        arrays: path -> ``[L, (E,) r, D]``, r at most the stack's rank.
    """

    def put(path: str, factor: jax.Array) -> jax.Array:
        L, R = factor.shape[0], factor.shape[-2]
        count = -(-L // pieces)
        at = jnp.minimum(piece * count, L - count)
        one = (count, 1, *factor.shape[2:])
        leaf = arrays.get(path)
        rank = 0 if leaf is None else leaf.shape[-2]

        def update(bits: jax.Array, part: jax.Array, first_rank: int) -> jax.Array:
            zero = jnp.int32(0)
            part = _bits(part.astype(factor.dtype))
            return jax.lax.dynamic_update_slice(
                bits, part, (at, slot, *[zero] * (factor.ndim - 4), jnp.int32(first_rank), zero)
            )

        bits = _bits(factor)
        # The slot may have held an adapter of a larger rank or of more projections: what the new
        # one does not cover must be zero, or it would be added to its results.
        if rank < R:
            bits = update(bits, jnp.zeros((*one[:-2], R - rank, one[-1]), factor.dtype), rank)
        if leaf is not None:
            part = jax.lax.dynamic_slice_in_dim(leaf, at, count)
            bits = update(bits, jnp.expand_dims(part, SLOT_AXIS), 0)
        return jax.lax.bitcast_convert_type(bits, factor.dtype)

    return dataclasses.replace(
        stack,
        factors=params_lib.map_with_path(put, stack.factors),
        scale=stack.scale.at[slot].set(scale),
    )


def _bits(x: jax.Array) -> jax.Array:
    """Numbers of 16 bits as integers, others as they are."""
    return jax.lax.bitcast_convert_type(x, jnp.uint16) if x.dtype.itemsize == 2 else x
