"""The view of a batch on the resident adapters: stacks, the slot of each block of rows, the layer.

``attach_blocks`` is for training and scoring: equal blocks of rows, by rank bucket. ``attach_rows``
is for sampling: each row names a slot of any bucket as data, so one program serves every mixture.

Axes: B rows, T tokens, L layers, S slots, P blocks, M rows of a block times tokens, R rank, D in, F
out, E experts, C distinct adapters of a batch. arXiv 2106.09685, section 4.1.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from mint_jax import ordered, sharding
from mint_jax.data.buckets import round_up
from mint_jax.lora import slot_kernel
from mint_jax.lora.dropout import Dropout
from mint_jax.lora.slot_kernel import Ends, Products
from mint_jax.lora.tree import BIAS, TABLES, UNDROPPED, AdapterStack, Slot, Stacks
from pallas_kernels.products import product
from pallas_kernels.slot_lora.pallas_gpu import Turn

# Rows of a block if all rows name one slot. Larger blocks use another kind of matmul, with other
# bits.
BLOCK = 32

# Applies factors ``{"a": [P, R, D], "b": [P, R, F]}`` to rows ``[P, rows, T, ...]``.
Apply = Callable[[Any, jax.Array], jax.Array]


@struct.dataclass
class RankBucket:
    """The adapters of one rank bucket in a batch."""

    # a tree of `[L, S, (E,) R, D]` and `[L, S, (E,) R, F]`, or of biases `[L, S, 1, F]`, or a
    # subtree below a name. Without `slots` those of each block, `[P, (E,) R, .]`, B including the
    # scale
    factors: Any
    scale: Any = None  # `[S]` float32, `alpha / rank`
    # `[P]` int32 slot of each block; an out-of-range one, which is padding, reads the last. For
    # named rows `[B]`, -1 for rows without an adapter of this bucket
    slots: Any = None
    # a tree of zeros `[L, P, ...]` in the dtype of the matmuls, whose gradient is that of each
    # block's factors, with B multiplied by the scale in float32 before rounding. Without taps the
    # stacks themselves are differentiable. Gradients of all layers exist at once; in float32 they
    # would be twice the bytes of a bfloat16 base's
    taps: Any = None
    form: Any = None  # of named rows: scalar int32, 0 no slot, 1 one slot, 2 several
    distinct: Any = None  # of named rows: `[C]` int32, their distinct slots, padded with 0
    order: Any = None  # of named rows: `[B]` int32, index of a row's slot in `distinct`
    # the GPU kernel's order of all tokens, see `slot_lora.pallas_gpu`; None computes it in each
    # call
    turn: Turn | None = None
    dropout: Dropout | None = None  # of blocks in training, if some policy drops inputs

    def at(self, name: str) -> "RankBucket":
        factors, taps = (tree and tree.get(name, {}) for tree in (self.factors, self.taps))
        dropout = None if name in UNDROPPED else self.dropout
        dropout = dropout and dropout.below(name)
        return dataclasses.replace(self, factors=factors, taps=taps, dropout=dropout)

    def of_blocks(self, layer: jax.Array, taps: Any, dtype: Any) -> "RankBucket":
        scale = self.scale.at[self.slots].get(mode="clip")

        def take(path: Any, stack: jax.Array, *tap: jax.Array) -> jax.Array:
            own = scale if path[-1].key == "b" else None
            if tap:
                return _tapped(*tap, jax.lax.stop_gradient(stack), layer, self.slots, own)
            return _gathered(stack, layer, self.slots, own).astype(dtype)

        trees = (self.factors,) if taps is None else (self.factors, taps)
        own = jax.tree_util.tree_map_with_path(take, *trees)
        return RankBucket(own, dropout=self.dropout and self.dropout.fold(layer))


def _gathered(stack, layer, slots, scale):
    factor = stack.at[layer, slots].get(mode="clip")
    return factor if scale is None else factor * _wide(scale, factor)


def _wide(scale_P: jax.Array, like: jax.Array) -> jax.Array:
    return scale_P.reshape(-1, *(1,) * (like.ndim - 1))


@jax.custom_vjp
def _tapped(tap, stack, layer, slots, scale):
    """Returns ``scale * stack[layer, slots]`` in the dtype of ``tap``, which gets the gradient."""
    return _gathered(stack, layer, slots, scale).astype(tap.dtype)


_tapped.defvjp(lambda *args: (_tapped(*args), None), lambda _, g: (g, None, None, None, None))


@struct.dataclass
class AdapterView:
    """Adapters bound to a batch, for all projections or those below one name."""

    buckets: tuple[RankBucket, ...]
    layer: jax.Array | None = None  # index of the layer, for named rows inside the layers
    # number of blocks of each bucket; for named rows of distinct adapters
    blocks: tuple[int, ...] = struct.field(pytree_node=False, default=())
    # number of blocks without an adapter; for named rows 1, whatever their number
    base_blocks: int = struct.field(pytree_node=False, default=0)
    by_rows: bool = struct.field(pytree_node=False, default=False)  # each row names its slot
    # implementation of `slot_lora` for named rows, see `config.Kernels`
    kernel: str = struct.field(pytree_node=False, default="xla")
    dtype: Any = struct.field(pytree_node=False, default=None)  # compute dtype of blocks' factors

    @property
    def total_blocks(self) -> int:
        return sum(self.blocks) + self.base_blocks

    @property
    def targeted(self) -> bool:
        """True if any adapter has factors here."""
        return any(bucket.factors for bucket in self.buckets)

    @property
    def taps(self) -> tuple[Any, ...]:
        """Taps of each bucket, ``[L, P, ...]``, for the scan over layers to slice."""
        return tuple(bucket.taps for bucket in self.buckets)

    def at(self, name: str) -> "AdapterView":
        """Returns the adapters below one name of the tree; buckets without it become empty."""
        below = dataclasses.replace(self, buckets=tuple(b.at(name) for b in self.buckets))
        if name not in TABLES:
            return below
        return below.in_layer(jnp.int32(0), jax.tree.map(lambda tap: tap[0], below.taps))

    def in_layer(self, layer: jax.Array, taps: tuple[Any, ...] | None = None) -> "AdapterView":
        """Returns the adapters of one layer; ``taps`` are the layer's, ``[P, ...]``."""
        if self.by_rows:
            return dataclasses.replace(self, layer=layer)
        # In each layer: all layers' factors at once would copy every policy (78 MB of the 283 MB of
        # temporaries in a training step of eight policies of rank 8 on SmolLM2).
        taps = taps or (None,) * len(self.buckets)
        own = (b.of_blocks(layer, tap, self.dtype) for b, tap in zip(self.buckets, taps))
        return dataclasses.replace(self, buckets=tuple(own))

    def block_of_rows(self, rows: int) -> jax.Array:
        """Returns the block or adapter's number of each row, ``[B]``; the last are no adapter."""
        if not self.by_rows:
            return jnp.arange(rows, dtype=jnp.int32) // self._rows_of_block(rows)
        out, first = jnp.full((rows,), self.total_blocks - 1, jnp.int32), 0
        for bucket, count in zip(self.buckets, self.blocks):
            out = jnp.where(bucket.slots >= 0, first + bucket.order, out)
            first += count
        return out

    def _rows_of_block(self, rows: int) -> int:
        if rows % self.total_blocks:
            raise ValueError(f"{rows} rows do not divide into {self.total_blocks} equal blocks")
        return rows // self.total_blocks

    def half(self, factor: str) -> "AdapterView":
        """Returns one projection's adapters with one factor alone, see ``add_deltas``."""
        own = ({factor: b.factors[factor]} if b.factors else {} for b in self.buckets)
        buckets = (dataclasses.replace(b, factors=f) for b, f in zip(self.buckets, own))
        kernel = "xla" if self.kernel == "cpu" else self.kernel  # it has no halves
        return dataclasses.replace(self, buckets=tuple(buckets), kernel=kernel)

    def packed(self, bucket: RankBucket, blocks: int) -> tuple[Any, jax.Array, jax.Array | None]:
        """Returns experts' factors, each block's index before ``[E, R, .]``, and other scales."""
        if not self.by_rows:
            return bucket.factors, jnp.arange(blocks, dtype=jnp.int32), None
        # Whole stacks: a slice of this layer's would copy every resident adapter in every step.
        first = (0 if self.layer is None else self.layer) * bucket.scale.shape[0]
        return bucket.factors, first + bucket.distinct, bucket.scale[bucket.distinct]

    def over(
        self, fn: Apply, x: jax.Array, d_out: int, dtype: Any, fan: int = 1
    ) -> jax.Array | None:
        """Applies ``fn(factors, x[P, rows, T, ...]) -> [P, rows, T, d_out]`` to every adapter's
        rows of one projection; ``[B, T, d_out]``, zeros for other rows, or None if no bucket
        targets it.

        Args:
            x: ``[B, T, ...]``; blocks in order.
            fan: rows of ``fn``'s matmuls for each row of ``x``: the heads, for absorbed factors of
                MLA.
        """
        if not self.targeted:
            return None
        if self.by_rows:
            used = [bucket for bucket in self.buckets if bucket.factors]
            parts = [self.of_rows(bucket, fn, x, d_out, dtype, fan) for bucket in used]
            return sum(parts[1:], parts[0])
        rows, T = self._rows_of_block(x.shape[0]), x.shape[1]
        parts, start = [], 0
        for bucket, blocks in zip(
            (*self.buckets, RankBucket({})), (*self.blocks, self.base_blocks)
        ):
            n = blocks * rows
            if n and bucket.factors:
                own = x[start : start + n].reshape(blocks, rows, *x.shape[1:])
                own = own if bucket.dropout is None else bucket.dropout.apply(own)
                parts.append(fn(bucket.factors, own).reshape(n, T, d_out))
            elif n:
                parts.append(jnp.zeros((n, T, d_out), dtype))
            start += n
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts)

    def of_rows(
        self, bucket: RankBucket, fn: Apply, x: jax.Array, d_out: int, dtype: Any, fan: int
    ) -> jax.Array:
        B, T = x.shape[:2]

        # Nothing if no row names an adapter; one matmul for blocks of up to 32 rows if all name the
        # same, which is read once; else a matmul for each row. SmolLM2-135M's linear layers at 32
        # rows of rank 8 take, relative to the bare base, 0.99 by the second form and 1.44 by the
        # third with one slot, and 1.46 with 22. The forms give the same bits: CPU matmuls of 2 to
        # 32 rows sum alike, so the third duplicates each row, and rank 1, whose matmuls would be
        # matrix-vector products, is padded with a row of zeros.
        def none() -> jax.Array:
            return jnp.zeros((B, T, d_out), dtype)

        def one() -> jax.Array:
            # With heads, both forms need blocks of 2 fan rows to use the same kind of matmul.
            P = -(-B // (BLOCK if fan == 1 else 2))
            # At least two rows where possible: a single row is a matrix-vector product, with other
            # bits.
            rows = -(-B // P)
            padded = jnp.pad(x, [(0, P * rows - B)] + [(0, 0)] * (x.ndim - 1))
            slots_P = jnp.broadcast_to(jnp.max(bucket.slots), (P,))
            out = fn(self._take(bucket, slots_P, x.dtype), padded.reshape(P, rows, *x.shape[1:]))
            return out.reshape(P * rows, T, d_out)[:B]

        def several() -> jax.Array:
            twins = 2 if T == 1 else 1
            x_BW = jnp.broadcast_to(x[:, None], (B, twins, *x.shape[1:]))
            return fn(self._dealt(bucket, x.dtype), x_BW).reshape(B, twins, T, d_out)[:, 0]

        # A prompt's tokens are 32 rows of one slot anyway, so the last form is cheap there.
        delta = jax.lax.switch(bucket.form, [none, one, several]) if T == 1 else several()
        return jnp.where((bucket.slots >= 0)[:, None, None], delta, jnp.zeros((), dtype))

    def _dealt(self, bucket: RankBucket, dtype: Any) -> Any:
        """Returns the factors of each row's slot, ``[B, R, .]``."""
        mesh: Any = jax.sharding.get_abstract_mesh()
        if sharding.one_device():
            return self._take(bucket, jnp.maximum(bucket.slots, 0), dtype)
        # On a mesh each distinct slot is sent once and then gathered for the rows locally. Gathered
        # for the rows first, factors are sent once for every row: 24 GB of collectives in a step of
        # Qwen3-4B with 1,024 rows of 8 adapters on four chips.
        rows, free = sharding.partition(("batch",), mesh)[0], jax.P.UNCONSTRAINED
        even = rows if bucket.slots.shape[0] % sharding.ways("batch", mesh) == 0 else None

        def deal(x: jax.Array) -> jax.Array:
            x = jax.lax.with_sharding_constraint(x, jax.P(None, None, free))
            return jax.lax.with_sharding_constraint(x[bucket.order], jax.P(even, None, free))

        return jax.tree.map(deal, self._take(bucket, bucket.distinct, dtype))

    def _take(self, bucket: RankBucket, slots: jax.Array, dtype: Any) -> Any:
        """Gathers the factors of slots, the last one scaled; rank 1 is padded to 2."""
        layer = 0 if self.layer is None else self.layer
        taken = {f: stack[layer, slots] for f, stack in bucket.factors.items()}
        taken[max(taken)] *= bucket.scale[slots][:, None, None]
        pad = {f: ((0, 0), (0, x.shape[1] == 1), (0, 0)) for f, x in taken.items()}
        return {f: jnp.pad(x, pad[f]).astype(dtype) for f, x in taken.items()}


def attach_blocks(
    stacks: Stacks,
    slots: Mapping[int, Any],
    taps: Mapping[int, Any] | None = None,
    base_blocks: int = 0,
    dtype: Any = jnp.float32,
    dropout: Dropout | None = None,
) -> AdapterView:
    """Binds consecutive blocks of rows to resident slots, bucket by bucket in the order of ranks.

    Args:
        slots: by bucket ``[P]`` int32, the slot of each block.
        taps: see ``taps_of``: zeros with respect to which gradients are taken.
        base_blocks: number of blocks at the end without an adapter.
        dropout: of all blocks.
    """
    buckets, first = [], 0
    for rank in sorted(slots):
        own = RankBucket(stacks[rank].factors, stacks[rank].scale, jnp.asarray(slots[rank]))
        if taps is not None:
            scale = own.scale.at[own.slots].get(mode="clip")

            def of_product(path: Any, tap: jax.Array, scale: jax.Array = scale) -> jax.Array:
                # The gradient of a tap becomes that of the matmul's factor, of B with the scale.
                wide = tap * _wide(scale, tap[0])[None] if path[-1].key == "b" else tap
                return wide.astype(dtype)

            own = dataclasses.replace(
                own, taps=jax.tree_util.tree_map_with_path(of_product, taps[rank])
            )
        if dropout is not None:
            own = dataclasses.replace(own, dropout=dropout.of_blocks(first, len(own.slots)))
        first += len(own.slots)
        buckets.append(own)
    blocks = tuple(bucket.slots.shape[0] for bucket in buckets)
    return AdapterView(tuple(buckets), None, blocks, base_blocks, dtype=jnp.dtype(dtype))


@dataclasses.dataclass(frozen=True)
class BlockPlan:
    """An order of rows in which each block of ``size`` consecutive rows has one adapter."""

    # indices of the given rows: blocks by bucket and slot, then rows without an adapter; None is
    # padding
    order: list[int | None]
    size: int
    slots: dict[int, np.ndarray]  # slot of each block, by bucket
    base_blocks: int  # number of blocks at the end without an adapter


def plan_blocks(adapters: Sequence[Slot | None], row_multiple: int = 1) -> BlockPlan:
    """Plans a batch of rows that each name an adapter; their number is a multiple of
    ``row_multiple``.

    The number of blocks of each bucket is rounded up, so that batches share few compiled shapes.
    """
    members: dict[Slot | None, list[int]] = {}
    for row, slot in enumerate(adapters):
        members.setdefault(slot, []).append(row)
    # Larger blocks are larger matmuls, so the size is the greatest common divisor of the adapters'
    # row counts: the group size for rollouts of equal groups, one row for unrelated requests.
    size = int(np.gcd.reduce([len(rows) for rows in members.values()]))
    order: list[int | None] = []
    slots: dict[int, np.ndarray] = {}
    resident = sorted(slot for slot in members if slot is not None)
    for bucket in sorted({slot.bucket for slot in resident}):
        own = [slot for slot in resident if slot.bucket == bucket]
        blocks = [slot.index for slot in own for _ in range(len(members[slot]) // size)]
        padding = round_up(len(blocks)) - len(blocks)
        order += [row for slot in own for row in members[slot]] + [None] * (padding * size)
        slots[bucket] = np.array(blocks + blocks[-1:] * padding, np.int32)
    bare = members.get(None, [])
    base_blocks = round_up(len(bare) // size) if bare else 0
    order += bare + [None] * (base_blocks * size - len(bare))
    while len(order) % row_multiple:
        order += [None] * size
        base_blocks += 1
    return BlockPlan(order, size, slots, base_blocks)


def bind_blocks(plan: BlockPlan, stacks: Stacks, dtype: Any) -> AdapterView | None:
    """Binds resident adapters to a plan's blocks; None if no row has an adapter."""
    if not plan.slots:
        return None
    return attach_blocks(stacks, plan.slots, base_blocks=plan.base_blocks, dtype=dtype)


def taps_of(stacks: Stacks, slots: Mapping[int, jax.Array]) -> dict[int, Any]:
    """Returns float32 zeros ``[L, P, ...]`` for each bucket, see ``RankBucket.taps``."""

    def zeros(P: int) -> Any:
        return lambda x: jnp.zeros((x.shape[0], P, *x.shape[2:]), x.dtype)

    return {b: jax.tree.map(zeros(slots[b].shape[0]), stacks[b].factors) for b in slots}


def attach_rows(
    stacks: Stacks, slots: Mapping[int, jax.Array], kernel: str = "xla", tokens: int = 1
) -> AdapterView | None:
    """Binds rows of ``tokens`` tokens that each name a slot; None without any stack.

    ``slots``: by bucket ``[B]`` int32, -1 for rows without an adapter there.
    """
    if not stacks:
        return None
    buckets = tuple(_named(stacks[rank], slots[rank], kernel, tokens) for rank in sorted(stacks))
    blocks = tuple(bucket.distinct.shape[0] for bucket in buckets)
    return AdapterView(buckets, None, blocks, 1, True, kernel)


def _named(stack: AdapterStack, slots_B: jax.Array, kernel: str, tokens: int) -> RankBucket:
    B, C = slots_B.shape[0], min(slots_B.shape[0], stack.slots)
    slots_B = sharding.constrain(slots_B, None)
    first = jnp.argmax(slots_B[:, None] == slots_B[None], axis=1)  # first row with the same slot
    leads = (first == jnp.arange(B)) & (slots_B >= 0)
    number = jnp.cumsum(leads) - 1
    distinct = jnp.zeros((C,), jnp.int32).at[jnp.where(leads, number, C)].set(slots_B, mode="drop")
    form = jnp.minimum(jnp.sum(leads), 2).astype(jnp.int32)
    # Replicated, since they are few. Sharded as the rows they were gathered and summed in parts,
    # and the TPU compiler crashed on a mesh of experts and heads (v5p:16x4, one prompt block on
    # each part).
    distinct, order = (
        sharding.constrain(x, None) for x in (distinct, number[first].astype(jnp.int32))
    )
    turn = slot_kernel.turn(slots_B, tokens, stack.scale, kernel) if stack.rank else None
    return RankBucket(stack.factors, stack.scale, slots_B, None, form, distinct, order, turn)


def _of_blocks(factors: Any, x: jax.Array, d_out: int) -> jax.Array:
    def delta(x_MD, factors):
        if BIAS in factors:  # as a matmul, whose gradient is summed in float32
            ones = jnp.ones((x_MD.shape[0], 1), x_MD.dtype)
            return product("MR,RF->MF", ones, factors[BIAS])
        # Through the rank, R (D + F) numbers per row. B A would be D F numbers per adapter.
        if "a" in factors:
            x_MD = product("MD,RD->MR", x_MD, factors["a"])
        if "b" not in factors:
            return _fit(x_MD, d_out)
        return product("MR,RF->MF", _fit(x_MD, factors["b"].shape[0]), factors["b"])

    return jax.vmap(delta)(x.reshape(x.shape[0], -1, x.shape[-1]), factors)


def _fit(h_MR: jax.Array, R: int) -> jax.Array:
    """Returns the first R columns, zeros if there are fewer."""
    return jnp.pad(h_MR[:, :R], ((0, 0), (0, max(0, R - h_MR.shape[1]))))


def batch_delta(x_BTD: jax.Array, lora: AdapterView, d_out: int) -> jax.Array | None:
    """Returns the deltas of a projection, ``[B, T, F]``; None if no adapter targets it."""
    return lora.over(functools.partial(_of_blocks, d_out=d_out), x_BTD, d_out, x_BTD.dtype)


def add_deltas(
    x: jax.Array,
    ys: Sequence[jax.Array] | Products,
    loras: Sequence[AdapterView],
    ends: Sequence[Ends],
) -> list[jax.Array]:
    """Returns results ``[B, T, F]`` of projections of ``x [B, T, D]`` plus their deltas.

    Of an adapter with A alone the delta is ``x A^T``, with as many columns as the result has; of
    one with B alone x has the ranks of all buckets, and its own come first.
    """
    first = loras[0]
    out = None if isinstance(ys, Products) and first.by_rows else _made(x, ys)
    if out is not None and not first.by_rows:
        deltas = [batch_delta(x, lora, y.shape[-1]) for y, lora in zip(out, loras)]
        return [y if delta is None else y + delta for y, delta in zip(out, deltas)]

    def plain(
        x: jax.Array, ys: tuple[jax.Array, ...], buckets: tuple[RankBucket, ...], layer: jax.Array
    ) -> tuple[jax.Array, ...]:
        own = dataclasses.replace(first, layer=layer)
        return tuple(
            y + own.of_rows(bucket, functools.partial(_of_blocks, d_out=F), x, F, y.dtype, 1)
            for y, F, bucket in zip(ys, (y.shape[-1] for y in ys), buckets)
        )

    layer = jnp.int32(0) if first.layer is None else first.layer
    for buckets in zip(*(lora.buckets for lora in loras)):
        at = [i for i, bucket in enumerate(buckets) if bucket.factors]
        if not at:
            continue
        if out is None:
            assert isinstance(ys, Products)
            out = slot_kernel.add_to_products(x, ys, buckets, layer, first.kernel)
            if out is not None:
                continue
            out = _made(x, ys)
        if BIAS in buckets[at[0]].factors:
            for i in at:
                out[i] = out[i] + _bias_of_rows(buckets[i], layer, out[i].dtype)
        else:
            args = x, tuple(out[i] for i in at), tuple(buckets[i] for i in at), layer
            made = slot_kernel.add(args, tuple(ends[i] for i in at), first.kernel, plain)
            for i, y in zip(at, made):
                out[i] = y
    return _made(x, ys) if out is None else out


def _made(x: jax.Array, ys: Sequence[jax.Array] | Products) -> list[jax.Array]:
    return [y.astype(x.dtype) for y in ys.of(x)] if isinstance(ys, Products) else list(ys)


def _bias_of_rows(bucket: RankBucket, layer: jax.Array, dtype: Any) -> jax.Array:
    """Returns the bias of each row's slot, ``[B, 1, F]``, zeros for rows without one."""
    own = bucket.factors[BIAS][layer, jnp.maximum(bucket.slots, 0)].astype(dtype)
    return jnp.where((bucket.slots >= 0)[:, None, None], own, jnp.zeros((), dtype))


def embedding_delta(
    tokens_BT: jax.Array, lora: AdapterView, d_out: int, dtype: Any
) -> jax.Array | None:
    """Returns the deltas of the embedding, ``[B, T, D]``: ``x A^T`` is a lookup in ``A [R, V]``."""
    chex.assert_rank(tokens_BT, 2)
    if not lora.by_rows:

        def delta(factors: Any, tokens: jax.Array) -> jax.Array:
            h_PMR = jax.vmap(ordered.columns)(factors["a"], tokens.reshape(tokens.shape[0], -1))
            return _product(h_PMR, factors["b"], dtype)

        return lora.over(delta, tokens_BT, d_out, dtype)
    parts = []
    for bucket in lora.buckets:
        if bucket.factors:
            # Each row reads only its tokens' columns of A.
            slots = jnp.maximum(bucket.slots, 0)
            h_BTR = bucket.factors["a"][0, slots[:, None], :, tokens_BT].astype(dtype)
            b_BRF = bucket.factors["b"][0, slots] * bucket.scale[slots][:, None, None]
            out = _product(h_BTR, b_BRF.astype(dtype), dtype)
            parts.append(jnp.where((bucket.slots >= 0)[:, None, None], out, jnp.zeros((), dtype)))
    return sum(parts[1:], parts[0]) if parts else None


def _product(h_PMR: jax.Array, b_PRF: jax.Array, dtype: Any) -> jax.Array:
    out = jnp.einsum("PMR,PRF->PMF", h_PMR, b_PRF, preferred_element_type=jnp.float32)
    return out.astype(dtype)
