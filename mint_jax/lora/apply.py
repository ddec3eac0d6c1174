"""LoRA deltas of a batch whose rows come in equal blocks, each with one adapter.

A block is a policy's rows in training, a prompt's rollouts in sampling, or a single row in serving.
Blocks are ordered by rank bucket, so a rank-r adapter costs rank-r work; blocks without an adapter
(the bare base) come last. The base projection multiplies all rows at once.

Axes: P blocks, M rows of a block times tokens, D in, F out, R rank. Hu et al. 2021, arXiv
2106.09685, section 4.1.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import struct

from mint_jax import ordered
from mint_jax.lora import rows
from mint_jax.lora.rows import RowAdapters
from pallas_kernels.products import product


@struct.dataclass
class BoundAdapters:
    """Adapters bound to the blocks of one batch.

    Attributes:
        buckets: for each rank bucket a tree ``{"dense": {"attn": {"q": {"a": [L, P, R, D], "b": [L,
            P, R, F]}}}}``; ``b`` includes the scale ``alpha / rank``. Inside the layer scan there
            is no L.
        blocks: number of blocks of each bucket.
        base_blocks: number of blocks at the end without an adapter.
    """

    buckets: tuple[Any, ...]
    blocks: tuple[int, ...] = struct.field(pytree_node=False)
    base_blocks: int = struct.field(pytree_node=False, default=0)

    @property
    def total_blocks(self) -> int:
        return sum(self.blocks) + self.base_blocks

    @property
    def targeted(self) -> bool:
        """True if any adapter has factors here."""
        return any(self.buckets)

    def at(self, name: str) -> "BoundAdapters":
        """Returns the adapters below one name of the tree; buckets without it become empty."""
        return dataclasses.replace(self, buckets=tuple(tree.get(name, {}) for tree in self.buckets))

    def block_of_rows(self, rows: int) -> jax.Array:
        """Returns the block of each row, ``[B]`` int32.

        Raises:
            ValueError: the rows do not divide into equal blocks.
        """
        if rows % self.total_blocks:
            raise ValueError(f"{rows} rows do not divide into {self.total_blocks} equal blocks")
        return jnp.arange(rows, dtype=jnp.int32) // (rows // self.total_blocks)

    def over(
        self,
        fn: Callable[[Any, jax.Array], jax.Array],
        x: jax.Array,
        d_out: int,
        dtype: Any,
        fan: int = 1,
    ) -> jax.Array | None:
        """Applies ``fn(factors, x[P, rows, T, ...]) -> [P, rows, T, d_out]`` to each bucket's rows;
        zeros for the others.

        Every bucket is ``{"a": [P, R, D], "b": [P, R, F]}`` or ``{}``: the adapters of one
        projection.

        Args:
            x: ``[B, T, ...]``, rows in block order; B is a multiple of the number of blocks.
            fan: unused here, see ``RowAdapters.over``.

        Returns:
            ``[B, T, d_out]``, or None if no bucket targets this projection.
        """
        if not self.targeted:
            return None
        B, T = x.shape[:2]
        rows = B // self.total_blocks
        if rows * self.total_blocks != B:
            raise ValueError(f"{B} rows do not divide into {self.total_blocks} equal blocks")
        parts, start = [], 0
        for factors, blocks in zip((*self.buckets, {}), (*self.blocks, self.base_blocks)):
            if not blocks:
                continue
            stop = start + blocks * rows
            if factors:
                part = fn(factors, x[start:stop].reshape(blocks, rows, *x.shape[1:]))
                parts.append(part.reshape(blocks * rows, T, d_out))
            else:
                parts.append(jnp.zeros((blocks * rows, T, d_out), dtype))
            start = stop
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


@struct.dataclass
class SlotBlocks:
    """Adapters of blocks of rows that stay in their stacks until each layer reads its own.

    If they were bound before the layers, ``[L, P, R, D]``, the factors of all policies would be
    copied: 78 MB of the 283 MB of temporaries in a training step of eight policies of rank 8 on
    SmolLM2.

    Attributes:
        layers: for each rank bucket a tree of ``[L, S, ...]``, or a subtree below a name.
        slots, scale: ``[P]`` for each bucket: slot of each block (out of range reads the last), and
            ``alpha / rank``.
        taps: for each bucket a tree of zeros ``[L, P, ...]`` in the dtype of the matmuls. Its
            gradient is that of each block's factors, with B multiplied by the scale in float32
            before rounding. Gradients of all layers exist at once; in float32 they would be twice
            the bytes of a bfloat16 base's.
        tables: adapters of the embedding and the unembedding, which are outside the layers.
    """

    layers: tuple[Any, ...]
    slots: tuple[jax.Array, ...]
    scale: tuple[jax.Array, ...]
    taps: tuple[Any, ...]
    tables: BoundAdapters

    def at(self, name: str) -> Any:
        """Returns the adapters of one kind of layers, or the bound ones of a table."""
        if name in TABLES:
            return self.tables.at(name)
        layers, taps = (
            tuple(tree.get(name, {}) for tree in trees) for trees in (self.layers, self.taps)
        )
        return dataclasses.replace(self, layers=layers, taps=taps)

    def in_layer(self, layer: jax.Array, taps: tuple[Any, ...]) -> BoundAdapters:
        """Returns the bound adapters of one layer; ``taps`` are the layer's, ``[P, ...]``."""

        def take(
            path: Any, stack: jax.Array, tap: jax.Array, slots: jax.Array, scale: jax.Array
        ) -> jax.Array:
            return _taken(
                tap,
                jax.lax.stop_gradient(stack),
                layer,
                slots,
                scale if path[-1].key == "b" else None,
            )

        buckets = []
        for stacks, own_taps, slots, scale in zip(self.layers, taps, self.slots, self.scale):
            one = functools.partial(take, slots=slots, scale=scale)
            buckets.append(jax.tree_util.tree_map_with_path(one, stacks, own_taps))
        return BoundAdapters(
            tuple(buckets), tuple(len(slots) for slots in self.slots), self.tables.base_blocks
        )


@jax.custom_vjp
def _taken(
    tap: jax.Array, stack: jax.Array, layer: jax.Array, slots: jax.Array, scale: jax.Array | None
) -> jax.Array:
    """Returns ``scale * stack[layer, slots]`` in the dtype of ``tap``, which gets the gradient."""
    factor = stack.at[layer, slots].get(mode="clip")
    if scale is not None:
        factor = factor * scale.reshape(-1, *(1,) * (factor.ndim - 1))
    return factor.astype(tap.dtype)


_taken.defvjp(lambda *args: (_taken(*args), None), lambda _, g: (g, None, None, None, None))


TABLES = ("embed", "unembed")  # projections outside the layers
# Adapters of a projection: of blocks of rows, or of rows that each name a slot.
AnyAdapters = BoundAdapters | RowAdapters


def lora_delta(x_MD: jax.Array, a_RD: jax.Array, b_RF: jax.Array) -> jax.Array:
    """Returns ``(x A^T) B`` of one adapter, ``[M, F]`` in the dtype of ``x``; both matmuls
    accumulate in float32.
    """
    chex.assert_rank([x_MD, a_RD, b_RF], 2)
    chex.assert_equal_shape([a_RD, b_RF], dims=0)
    # Always through the rank, R (D + F) numbers per row. B A as a matrix would be D F numbers per
    # adapter.
    return product("MR,RF->MF", product("MD,RD->MR", x_MD, a_RD), b_RF)


lora_delta_per_block = jax.vmap(lora_delta)  # [P, M, D], [P, R, D], [P, R, F] -> [P, M, F]


def _of_blocks(factors: Any, x: jax.Array) -> jax.Array:
    x_PMD = x.reshape(x.shape[0], -1, x.shape[-1])
    return lora_delta_per_block(x_PMD, factors["a"], factors["b"])


def batch_delta(x_BTD: jax.Array, lora: AnyAdapters, d_out: int) -> jax.Array | None:
    """Returns the deltas of one projection for all rows, ``[B, T, F]``; None if no adapter targets
    it.
    """
    return lora.over(_of_blocks, x_BTD, d_out, x_BTD.dtype)


def add_deltas(
    x_BTD: jax.Array,
    ys: Sequence[jax.Array],
    loras: Sequence[AnyAdapters],
    ends: Sequence[rows.Ends],
) -> list[jax.Array]:
    """Returns the base's results of projections of the same rows plus each one's deltas.

    Args:
        ys: ``[B, T, F]`` each.
        loras: the adapters of each projection.
        ends: logical axes of each projection's D and F.
    """
    if isinstance(loras[0], RowAdapters):
        return rows.onto(_of_blocks, x_BTD, ys, loras, ends)  # type: ignore[arg-type]
    deltas = [batch_delta(x_BTD, lora, y.shape[-1]) for y, lora in zip(ys, loras)]
    return [y if delta is None else y + delta for y, delta in zip(ys, deltas)]


def embedding_delta(
    tokens_BT: jax.Array, lora: AnyAdapters, d_out: int, dtype: Any
) -> jax.Array | None:
    """Returns the deltas of the embedding, ``[B, T, D]``. Its input is one-hot, so ``x A^T`` is a
    lookup in ``A [R, V]``.
    """

    chex.assert_rank(tokens_BT, 2)
    if isinstance(lora, RowAdapters):
        return lora.embedded(tokens_BT, d_out, dtype)

    def delta(factors: Any, tokens: jax.Array) -> jax.Array:
        h_PMR = jax.vmap(ordered.columns)(factors["a"], tokens.reshape(tokens.shape[0], -1))
        return jnp.einsum(
            "PMR,PRF->PMF", h_PMR, factors["b"], preferred_element_type=jnp.float32
        ).astype(dtype)

    return lora.over(delta, tokens_BT, d_out, dtype)
