"""Device slots: the stacks that engines sample from, and writes of adapters into their slots.

``stage`` runs in a loader thread: one transfer per contiguous array, and a compilation for the
first adapter of its shapes. ``write`` runs in the engine's thread between two steps: one program
updates the donated stack in place, whole or in pieces of layers.

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
from mint_jax.compiling import abstract
from mint_jax.lora import tree as lora_tree
from mint_jax.lora.basis import with_basis
from mint_jax.lora.tree import SLOT_AXIS, AdapterConfig, AdapterStack, Slot, Stacks
from mint_jax.params import ParamSpec


@dataclasses.dataclass
class Staged:
    """An adapter on the device, of which ``program`` has written some ``pieces`` into its slot."""

    slot: Slot
    arrays: Any
    scale: jax.Array
    index: jax.Array
    program: Any
    pieces: int
    nbytes: int
    written: int = 0


class DeviceSlots:
    """Stacks of slots, and writes into them.

    Args:
        counts: slots of each rank bucket.
        targets: union of the adapters' targets.
        mesh: the base's; None is the default device.
        piece_bytes: writes of more bytes (as stored) are split into pieces of about this size, if
            the bucket has several slots; None never splits.
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
        # bucket -> path -> sharding of one slot's part of a factor
        self._where: dict[int, dict[str, Any]] = {}
        self._widths: dict[str, int] = {}  # of each projection's outputs
        self.stacks: Stacks = {}  # never replaced, so that holders see every write
        for bucket, count in sorted(counts.items()):
            specs = lora_tree.stack_specs(base_specs, targets, bucket, count)
            specs = jax.tree.map(lambda s: dataclasses.replace(s, dtype=dtype), specs)
            self._widths |= lora_tree.widths_of(dict(params_lib.leaves_with_path(specs)))
            self._where[bucket] = {
                path: self._sharding(_without_slots(spec))
                for path, spec in params_lib.leaves_with_path(specs)
            }
            factors = jax.tree.map(self._zeros, specs)
            self.stacks[bucket] = AdapterStack(
                factors, self._zeros(ParamSpec((count,), (None,), jnp.float32)), bucket
            )
        # Shapes only: the engine's thread donates the arrays while a loader's thread compiles.
        self._like = abstract(self.stacks)
        self._compiling, self._programs = threading.Lock(), {}
        self._scalar = self._sharding(ParamSpec((), ()))

    def slot_bytes(self, bucket: int) -> int:
        stack = self.stacks[bucket]
        return params_lib.nbytes(stack.factors) // max(1, stack.slots)

    def targets(self, bucket: int) -> set[str]:
        """Returns the paths of the projections that a bucket's slots contain."""
        return {path.rsplit("/", 1)[0] for path in self._where[bucket]}

    def stage(self, slot: Slot, adapter: Any, config: AdapterConfig) -> Staged:
        """Transfers an admitted adapter to the device and waits for it; from any thread. Host
        arrays ``[L, (E,) r, D]`` must not change until the write is done.
        """
        paths = with_basis(dict(params_lib.leaves_with_path(adapter)), self._widths)
        numbers = (np.float32(config.scale), np.int32(slot.index))
        where = {path: self._where[slot.bucket][path] for path in paths}
        # One call; CPUs use aligned pages without a copy.
        placed = multihost.place((paths, numbers), (where, (self._scalar, self._scalar)))
        arrays, (scale, index) = placed
        nbytes = params_lib.nbytes(arrays)
        # A single slot is written whole: XLA on CPU copies a 16-bit stack of one slot for each
        # piece (4.8 MB in 25 pieces 12 ms, in one 0.3; with two slots, 25 pieces 3.8).
        cut = self.piece_bytes if self.stacks[slot.bucket].slots > 1 else None
        pieces = 1 if cut is None else max(1, -(-nbytes // cut))
        program = self._program(slot.bucket, arrays, (scale, index), pieces)
        jax.block_until_ready((arrays, scale, index))
        return Staged(slot, arrays, scale, index, program, pieces, nbytes)

    def write(self, staged: Staged) -> bool:
        """Writes the next piece, in the engine's thread between steps, and donates the stack's
        arrays; returns True if it was the last.
        """
        # Donation makes the write touch its piece only. Otherwise the whole stack is copied for
        # every piece: on two cores a write into 256 MB took 79 ms instead of 0.03.
        bucket = staged.slot.bucket
        self.stacks[bucket] = staged.program(
            self.stacks[bucket], staged.arrays, staged.scale, staged.index, np.int32(staged.written)
        )
        staged.written += 1
        return staged.written == staged.pieces

    def settle(self, bucket: int) -> None:
        jax.block_until_ready(self.stacks[bucket])

    def _program(
        self, bucket: int, arrays: Mapping[str, jax.Array], numbers: Any, pieces: int
    ) -> Any:
        """Returns the compiled write for adapters of these shapes, compiled on first use."""
        shapes = tuple((path, x.shape, str(x.dtype)) for path, x in arrays.items())
        like = self._like[bucket]
        with self._compiling:
            if (key := (bucket, pieces, shapes)) not in self._programs:
                write = jax.jit(
                    functools.partial(write_piece, pieces=pieces),
                    donate_argnums=0,
                    out_shardings=jax.tree.map(lambda x: x.sharding, like),
                )
                self._programs[key] = write.lower(like, arrays, *numbers, np.int32(0)).compile()
            return self._programs[key]

    def _sharding(self, spec: ParamSpec) -> Any:
        if self.mesh is None:
            return SingleDeviceSharding(jax.devices()[0])
        return sharding.sharding_of(spec, self.mesh)

    def _zeros(self, spec: ParamSpec) -> jax.Array:
        return jnp.zeros(spec.shape, spec.dtype, device=self._sharding(spec))


def _without_slots(spec: ParamSpec) -> ParamSpec:
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
    """Writes one of ``pieces`` ranges of layers of an adapter into a slot, in place if the stack is
    donated. The scale is written with every piece.

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
        # The slot may contain an adapter of a larger rank or of more projections.
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
    # XLA on CPU takes three times as long to move bfloat16 as to move integers (24 MiB: 17 ms
    # instead of 5.4).
    return jax.lax.bitcast_convert_type(x, jnp.uint16) if x.dtype.itemsize == 2 else x
