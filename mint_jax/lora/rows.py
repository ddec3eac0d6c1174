"""LoRA deltas of rows that each name a slot. The adapters of a batch and their number are data of
one compiled program.

``apply.py`` handles blocks of rows, whose number is part of the program. That suits training, whose
batches repeat; in serving every mixture of adapters would be another program. Here the stacks stay
in place, ``[L, S, R, D]``, and a row's slot indexes into them. A projection has one of three forms,
selected on the device:

    no row names an adapter      nothing
    all rows name the same slot  one matmul for blocks of up to 32 rows; the adapter is read once
    several slots                a matmul for each row, with gathered factors

Time of SmolLM2-135M's linear layers at 32 rows of rank 8, relative to the bare base: one slot 0.99
by the second form and 1.44 by the third; 22 distinct slots 1.46 by the third. The forms give the
same bits: CPU matmuls of 2 to 32 rows sum alike, so the third form duplicates each row, and rank 1,
whose matmuls would be matrix-vector products, is padded with a row of zeros.

On TPUs, NVIDIA GPUs and CPUs a kernel (``pallas_kernels.slot_lora``) adds to the base's result and
reads every distinct adapter once, in place. For 32 rows of eight adapters the third form reads each
adapter four times, writes the copies and reads them again. The three forms remain for other dtypes,
meshes that split inputs, and CPUs without a C++ compiler.

Axes: B rows, T tokens, L layers, S slots, P blocks, R rank, D in, F out, E experts, C distinct
adapters of a batch.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from mint_jax import sharding
from pallas_kernels import dispatch, slot_lora
from pallas_kernels.dispatch import Implementation
from pallas_kernels.slot_lora.pallas_gpu import Turn

Ends = tuple[str | None, str | None]  # logical axes of a projection's in and out dimension

KERNELS = (
    ("pallas_tpu", "tpu", slot_lora.pallas_tpu),
    ("pallas_gpu", "cuda", slot_lora.pallas_gpu),
    ("cpu", "cpu", slot_lora.cpu),
)
# Rows of a block if all rows name one slot. Larger blocks use another kind of matmul, with other
# bits.
BLOCK = 32


@struct.dataclass
class RowBucket:
    """The adapters of one rank bucket that the rows name.

    Attributes:
        factors: a tree of ``[L, S, (E,) R, D]`` and ``[L, S, (E,) R, F]``, or a subtree below a
            name.
        scale: ``[S]`` float32.
        slots: ``[B]`` int32; -1 for rows without an adapter of this bucket.
        form: scalar int32: 0 no slot, 1 one slot, 2 several.
        distinct: ``[C]`` int32, the distinct slots of the rows, padded with 0.
        order: ``[B]`` int32, index of a row's slot in ``distinct``.
        turn: the GPU kernel's order of all tokens, see ``slot_lora.pallas_gpu``; None computes it
            in each call.
    """

    factors: Any
    scale: jax.Array
    slots: jax.Array
    form: jax.Array
    distinct: jax.Array
    order: jax.Array
    turn: Turn | None = None


@struct.dataclass
class RowAdapters:
    """The adapters of a batch of rows, for all projections or those below one name.

    Attributes:
        buckets: one for each resident rank bucket.
        layer: index of the layer; None outside the layers.
        kernel: implementation of ``slot_lora``, see ``config.Kernels``.
    """

    buckets: tuple[RowBucket, ...]
    layer: jax.Array | None = None
    kernel: str = struct.field(pytree_node=False, default="xla")

    def at(self, name: str) -> "RowAdapters":
        """Returns the adapters below one name of the tree; buckets without it become empty."""
        return dataclasses.replace(
            self,
            buckets=tuple(
                dataclasses.replace(b, factors=b.factors.get(name, {})) for b in self.buckets
            ),
        )

    def in_layer(self, layer: jax.Array) -> "RowAdapters":
        """Returns the adapters of one layer."""
        return dataclasses.replace(self, layer=layer)

    def in_turn(self, T: int) -> "RowAdapters":
        """Precomputes the GPU kernel's order of rows of T tokens, once for all layers and steps."""
        if self.kernel not in ("auto", "pallas_gpu") or not sharding.one_device():
            return self

        def of(bucket: RowBucket) -> RowBucket:
            make = functools.partial(slot_lora.pallas_gpu.turn, W=bucket.scale.shape[0])
            slot_M = jnp.repeat(bucket.slots, T)
            if self.kernel == "auto":

                def none(slot_M: jax.Array) -> Turn:
                    return jax.tree.map(
                        lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(make, slot_M)
                    )

                return dataclasses.replace(
                    bucket, turn=jax.lax.platform_dependent(slot_M, cuda=make, default=none)
                )
            return dataclasses.replace(bucket, turn=make(slot_M))

        return dataclasses.replace(self, buckets=tuple(map(of, self.buckets)))

    @property
    def targeted(self) -> bool:
        """True if any adapter has factors here."""
        return any(bucket.factors for bucket in self.buckets)

    @property
    def blocks(self) -> tuple[int, ...]:
        """Number of adapters of each bucket that ``block_of_rows`` numbers."""
        return tuple(bucket.distinct.shape[0] for bucket in self.buckets)

    @property
    def total_blocks(self) -> int:
        """Number of adapters of all buckets, plus one for rows without an adapter."""
        return sum(self.blocks) + 1

    def block_of_rows(self, rows: int) -> jax.Array:
        """Returns the number of each row's adapter, ``[B]`` int32, counted through all buckets; the
        last number is no adapter.
        """
        out, first = jnp.full((rows,), self.total_blocks - 1, jnp.int32), 0
        for bucket, count in zip(self.buckets, self.blocks):
            out = jnp.where(bucket.slots >= 0, first + bucket.order, out)
            first += count
        return out

    def over(
        self,
        fn: Callable[[Any, jax.Array], jax.Array],
        x: jax.Array,
        d_out: int,
        dtype: Any,
        fan: int = 1,
    ) -> jax.Array | None:
        """Applies ``fn(factors, x[P, rows, T, ...]) -> [P, rows, T, d_out]`` to the rows of every
        adapter; zeros for the others.

        Args:
            x: ``[B, T, ...]``.
            fan: rows of ``fn``'s matmuls for each row of ``x``: the heads, where the absorbed
                projections of MLA apply the factors head by head.

        Returns:
            ``[B, T, d_out]``, or None if no bucket targets this projection.
        """
        parts = [
            self._of_bucket(bucket, fn, x, d_out, dtype, fan)
            for bucket in self.buckets
            if bucket.factors
        ]
        return sum(parts[1:], parts[0]) if parts else None

    def _of_bucket(
        self, bucket: RowBucket, fn: Any, x: jax.Array, d_out: int, dtype: Any, fan: int
    ) -> jax.Array:
        B, T = x.shape[:2]

        def none() -> jax.Array:
            return jnp.zeros((B, T, d_out), dtype)

        def one() -> jax.Array:
            # With heads, both forms need blocks of 2 fan rows to use the same kind of matmul.
            P = -(-B // (BLOCK if fan == 1 else 2))
            # At least two rows where possible: a single row is a matrix-vector product, with other
            # bits.
            rows = -(-B // P)
            x_PW = jnp.pad(x, [(0, P * rows - B)] + [(0, 0)] * (x.ndim - 1)).reshape(
                P, rows, *x.shape[1:]
            )
            factors = self._take(bucket, jnp.broadcast_to(jnp.max(bucket.slots), (P,)), x.dtype)
            return fn(factors, x_PW).reshape(P * rows, T, d_out)[:B]

        def several() -> jax.Array:
            twins = 2 if T == 1 else 1
            x_BW = jnp.broadcast_to(x[:, None], (B, twins, *x.shape[1:]))
            out = fn(self._of_rows(bucket, x.dtype), x_BW)
            return out.reshape(B, twins, T, d_out)[:, 0]

        # A prompt's tokens are 32 rows of one slot anyway, so the last form is cheap there.
        delta = jax.lax.switch(bucket.form, [none, one, several]) if T == 1 else several()
        return jnp.where((bucket.slots >= 0)[:, None, None], delta, jnp.zeros((), dtype))

    def _of_rows(self, bucket: RowBucket, dtype: Any) -> Any:
        """Returns the factors of each row's slot, ``[B, R, .]``."""
        mesh: Any = jax.sharding.get_abstract_mesh()
        if sharding.one_device():
            return self._take(bucket, jnp.maximum(bucket.slots, 0), dtype)
        # On a mesh each distinct slot is sent once and then gathered for the rows locally. Gathered
        # for the rows first, factors are sent once for every row: 24 GB of collectives in a step of
        # Qwen3-4B with 1,024 rows of 8 adapters on four chips.
        rows = sharding.partition(("batch",), mesh)[0]

        def dealt(x: jax.Array) -> jax.Array:
            free = jax.sharding.PartitionSpec.UNCONSTRAINED
            x = jax.lax.with_sharding_constraint(x, jax.sharding.PartitionSpec(None, None, free))
            even = rows if bucket.slots.shape[0] % sharding.ways("batch", mesh) == 0 else None
            return jax.lax.with_sharding_constraint(
                x[bucket.order], jax.sharding.PartitionSpec(even, None, free)
            )

        return jax.tree.map(dealt, self._take(bucket, bucket.distinct, dtype))

    def _take(self, bucket: RowBucket, slots: jax.Array, dtype: Any) -> Any:
        """Returns the factors of slots, ``[P, R, D]`` and ``[P, R, F]``, the latter scaled; rank 1
        is padded to 2.
        """
        layer = 0 if self.layer is None else self.layer
        a, b = bucket.factors["a"][layer, slots], bucket.factors["b"][layer, slots]
        b = b * bucket.scale[slots][:, None, None]
        a, b = (jnp.pad(x, ((0, 0), (0, 1), (0, 0))) if x.shape[1] == 1 else x for x in (a, b))
        return {"a": a.astype(dtype), "b": b.astype(dtype)}

    def embedded(self, tokens_BT: jax.Array, d_out: int, dtype: Any) -> jax.Array | None:
        """Returns the deltas of the embedding, ``[B, T, D]``; each row reads only its tokens'
        columns of ``A [R, V]``.
        """
        parts = []
        for bucket in self.buckets:
            if bucket.factors:
                slots = jnp.maximum(bucket.slots, 0)
                h_BTR = bucket.factors["a"][0, slots[:, None], :, tokens_BT].astype(dtype)
                b_BRF = (bucket.factors["b"][0, slots] * bucket.scale[slots][:, None, None]).astype(
                    dtype
                )
                delta = jnp.einsum(
                    "BTR,BRF->BTF", h_BTR, b_BRF, preferred_element_type=jnp.float32
                ).astype(dtype)
                parts.append(
                    jnp.where((bucket.slots >= 0)[:, None, None], delta, jnp.zeros((), dtype))
                )
        return sum(parts[1:], parts[0]) if parts else None


def onto(
    fn: Callable[[Any, jax.Array], jax.Array],
    x: jax.Array,
    ys: Sequence[jax.Array],
    loras: Sequence[RowAdapters],
    ends: Sequence[Ends],
) -> list[jax.Array]:
    """Adds the adapters' deltas to the results of projections of the same rows, ``[B, T, F]`` each
    of ``x [B, T, D]``.

    Args:
        fn: as in ``RowAdapters.over``, used where no kernel applies.
        loras: one batch's adapters of each projection.
        ends: logical axes of each projection's D and F.
    """
    out, first = list(ys), loras[0]

    def plain(
        x: jax.Array, ys: tuple[jax.Array, ...], buckets: tuple[RowBucket, ...], layer: jax.Array
    ) -> tuple[jax.Array, ...]:
        own = dataclasses.replace(first, layer=layer)
        return tuple(
            y + own._of_bucket(bucket, fn, x, y.shape[-1], y.dtype, 1)
            for y, bucket in zip(ys, buckets)
        )

    layer = jnp.int32(0) if first.layer is None else first.layer
    for of_projections in zip(*(lora.buckets for lora in loras)):
        at = [i for i, bucket in enumerate(of_projections) if bucket.factors]
        if not at:
            continue
        known = {"ends": tuple(ends[i] for i in at)}
        table = (
            *(
                Implementation(
                    name,
                    on,
                    functools.partial(_by_kernel, op=op, **known),
                    functools.partial(_require, op=op, **known),
                )
                for name, on, op in KERNELS
            ),
            Implementation("xla", None, plain, dispatch.anything),
        )
        args = x, tuple(out[i] for i in at), tuple(of_projections[i] for i in at), layer
        for i, y in zip(at, dispatch.run("slot_lora", table, first.kernel, args)):
            out[i] = y
    return out


# The kernel.


class _Split(NamedTuple):
    """Split of a projection by the current mesh: logical axes, None where it is not split.

    Attributes:
        rows, inward, outward: axes of rows, inputs and outputs.
        swap_in, swap_out: mesh axes that split rows and also inputs, or outputs (``fsdp``). An
            all-to-all trades a device's whole rows for parts of the rows of all devices along these
            axes, as the factors are split, and back afterwards.
    """

    rows: str | None
    inward: str | None
    outward: str | None
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


def _require(
    x: jax.Array,
    ys: tuple[jax.Array, ...],
    buckets: tuple[RowBucket, ...],
    layer: jax.Array,
    ends: tuple[Ends, ...],
    op: Any,
) -> None:
    """Raises NotImplementedError if the kernels of ``op`` cannot serve one of the projections."""
    for y, bucket, end in zip(ys, buckets, ends):
        _require_one(x, y, bucket, end, op)


def _require_one(x: jax.Array, y: jax.Array, bucket: RowBucket, ends: Ends, op: Any) -> None:
    """Raises if the kernels of ``op`` cannot serve each device's part.

    Raises:
        NotImplementedError: with the reason.
    """
    mesh: Any = jax.sharding.get_abstract_mesh()
    split = _split(x, y, ends)
    inward, outward = (sharding.mesh_axes(axis, mesh) for axis in (split.inward, split.outward))
    if both := set(inward) & set(outward):
        raise NotImplementedError(f"mesh axis {min(both)} splits inputs and outputs")
    for swapped, axes in ((split.swap_in, inward), (split.swap_out, outward)):
        if swapped and swapped != axes:
            raise NotImplementedError(
                f"mesh axes {axes} split inputs or outputs, and {swapped} of them rows too"
            )
    a, b = bucket.factors["a"], bucket.factors["b"]
    M = x[..., 0].size // (sharding.ways(split.rows, mesh) if split.rows else 1)
    D, F = (
        size // (sharding.ways(axis, mesh) if axis else 1)
        for size, axis in ((x.shape[-1], split.inward), (y.shape[-1], split.outward))
    )
    W, R = a.shape[0] * a.shape[1], a.shape[2]

    def wide(n: int, like: jax.Array, swapped: tuple[str, ...]) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(
            (M * math.prod(mesh.shape[axis] for axis in swapped), n), like.dtype
        )

    x_MD, y_MF = wide(D, x, split.swap_in), wide(F, y, split.swap_out)
    a_WRD, b_WRF = (
        jax.ShapeDtypeStruct((W, R, D), a.dtype),
        jax.ShapeDtypeStruct((W, R, F), b.dtype),
    )
    if split.inward is None and not split.swap_out:
        op.require_add(x_MD, a_WRD, b_WRF, y_MF)
    else:
        op.require_shrink(x_MD, a_WRD)
        op.require_expand(b_WRF, y_MF)


def _by_kernel(
    x: jax.Array,
    ys: tuple[jax.Array, ...],
    buckets: tuple[RowBucket, ...],
    layer: jax.Array,
    ends: tuple[Ends, ...],
    op: Any,
    interpret: Any = False,
) -> tuple[jax.Array, ...]:
    if op is not slot_lora.pallas_gpu or not sharding.one_device():
        return tuple(
            _one_by_kernel(x, y, bucket, layer, end, op, interpret)
            for y, bucket, end in zip(ys, buckets, ends)
        )
    # On one GPU projections of the same rows are two launches.
    T, own = x.shape[1], buckets[0]
    slot_M = jnp.repeat(own.slots, T)
    made = op.add_each(
        x.reshape(-1, x.shape[-1]),
        [b.factors["a"].reshape(-1, *b.factors["a"].shape[2:]) for b in buckets],
        [b.factors["b"].reshape(-1, *b.factors["b"].shape[2:]) for b in buckets],
        [y.reshape(-1, y.shape[-1]) for y in ys],
        slot_M,
        jnp.repeat(own.scale[jnp.maximum(own.slots, 0)], T),
        layer * own.scale.shape[0],
        own.turn if own.turn is not None and own.turn.rows.shape == slot_M.shape else None,
        interpret=interpret,
    )
    return tuple(one.reshape(y.shape) for one, y in zip(made, ys))


def _one_by_kernel(
    x: jax.Array,
    y: jax.Array,
    bucket: RowBucket,
    layer: jax.Array,
    ends: Ends,
    op: Any,
    interpret: Any,
) -> jax.Array:
    rows, inward, outward, swap_in, swap_out = _split(x, y, ends)

    def shrunk(x_MD: jax.Array, a: jax.Array, slot_M: jax.Array, first: jax.Array) -> jax.Array:
        """Returns ``x A^T``, ``[M, R]``. With split inputs only this inner product, R numbers a
        row, is communicated.
        """
        if not swap_in:
            h_MR = op.shrink(x_MD, a, slot_M, first, interpret=interpret)
            over = sharding.mesh_axes(inward, jax.sharding.get_abstract_mesh())
            return jax.lax.psum(h_MR, over) if over else h_MR
        slots = jax.lax.all_gather(slot_M, swap_in, tiled=True)
        parts = jax.lax.all_to_all(x_MD, swap_in, 1, 0, tiled=True)
        return jax.lax.psum_scatter(
            op.shrink(parts, a, slots, first, interpret=interpret), swap_in, tiled=True
        )

    def expanded(
        h_MR: jax.Array, b: jax.Array, y_MF: jax.Array, slot_M: jax.Array, first: jax.Array
    ) -> jax.Array:
        if not swap_out:
            return op.expand(h_MR, b, y_MF, slot_M, first, interpret=interpret)
        h_MR, slot_M = (jax.lax.all_gather(one, swap_out, tiled=True) for one in (h_MR, slot_M))
        parts = jax.lax.all_to_all(y_MF, swap_out, 1, 0, tiled=True)
        return jax.lax.all_to_all(
            op.expand(h_MR, b, parts, slot_M, first, interpret=interpret),
            swap_out,
            0,
            1,
            tiled=True,
        )

    def local(x_BTD, y_BTF, a_LSRD, b_LSRF, scale_S, slots_B, layer):
        T, S = x_BTD.shape[1], scale_S.shape[0]
        x_MD, y_MF = x_BTD.reshape(-1, x_BTD.shape[-1]), y_BTF.reshape(-1, y_BTF.shape[-1])
        a, b = (w.reshape(-1, *w.shape[2:]) for w in (a_LSRD, b_LSRF))
        slot_M, scale_M, first = (
            jnp.repeat(slots_B, T),
            jnp.repeat(scale_S[jnp.maximum(slots_B, 0)], T),
            layer * S,
        )
        if inward is None and not swap_out:
            made = op.add(x_MD, a, b, y_MF, slot_M, scale_M, first, interpret=interpret)
            return made.reshape(y_BTF.shape)
        h_MR = shrunk(x_MD, a, slot_M, first) * scale_M[:, None]
        return expanded(h_MR, b, y_MF, slot_M, first).reshape(y_BTF.shape)

    args = x, y, bucket.factors["a"], bucket.factors["b"], bucket.scale, bucket.slots, layer
    of_x, of_y = (
        (rows, None, None if swap_in else inward),
        (
            rows,
            None,
            None if swap_out else outward,
        ),
    )
    specs = (
        of_x,
        of_y,
        (None, None, None, inward),
        (None, None, None, outward),
        (None,),
        (rows,),
        (),
    )
    return sharding.over_devices(local, args, specs, of_y)
