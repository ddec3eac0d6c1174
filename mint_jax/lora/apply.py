"""LoRA deltas of a whole batch: rows come in equal blocks, and each block has one adapter.

A block is a policy's rows in training, a prompt's rollouts in sampling, a single row in serving:
one mechanism for all. Blocks are ordered by rank bucket, so that a rank-r adapter costs rank-r
work, and blocks without an adapter (the bare base) come last. The base projection never sees any of
this: it multiplies all rows at once.

Axes: P blocks, M rows of a block times tokens, D in, F out, R rank. Hu et al. 2021, arXiv
2106.09685, section 4.1.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import struct

from mint_jax import ordered
from mint_jax.lora.rows import Ends, RowAdapters
from pallas_kernels.products import product


@struct.dataclass
class BoundAdapters:
    """Adapters bound to the blocks of one batch.

    Attributes:
        buckets: per rank bucket a tree ``{"dense": {"attn": {"q": {"a": [L, P, R, D], "b": [L, P,
            R, F]}}}}``; ``b`` already holds the scale ``alpha / rank``. Inside the layer scan the
            leading L is gone.
        blocks: number of blocks of each bucket.
        base_blocks: number of trailing blocks that have no adapter.
    """

    buckets: tuple[Any, ...]
    blocks: tuple[int, ...] = struct.field(pytree_node=False)
    base_blocks: int = struct.field(pytree_node=False, default=0)

    @property
    def total_blocks(self) -> int:
        return sum(self.blocks) + self.base_blocks

    @property
    def targeted(self) -> bool:
        """Whether any adapter has factors here."""
        return any(self.buckets)

    def at(self, name: str) -> "BoundAdapters":
        """The adapters below one name of the tree; buckets without it become empty."""
        return dataclasses.replace(self, buckets=tuple(tree.get(name, {}) for tree in self.buckets))

    def block_of_rows(self, rows: int) -> jax.Array:
        """``[B]`` int32: the block of each row.

        Raises:
            ValueError: rows that do not fall into equal blocks.
        """
        if rows % self.total_blocks:
            raise ValueError(f"{rows} rows do not fall into {self.total_blocks} equal blocks")
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
            fan: of no matter here, see ``RowAdapters.over``.

        Returns:
            ``[B, T, d_out]``, or None when no bucket targets this projection.
        """
        if not self.targeted:
            return None
        B, T = x.shape[:2]
        rows = B // self.total_blocks
        if rows * self.total_blocks != B:
            raise ValueError(f"{B} rows do not fall into {self.total_blocks} equal blocks")
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
    """Adapters of blocks of rows that stay in their stacks until a layer asks for its own.

    Bound before the layers, ``[L, P, R, D]``, the factors of all policies of a batch are copied
    whole: of eight policies of rank 8 on SmolLM2 78 MB of the 283 that a training step had beside
    its arguments.

    Attributes:
        layers: per rank bucket a tree of ``[L, S, ...]``, or what is below a name of it.
        slots, scale: of each bucket ``[P]``: the slot of each block, one beyond the last reads the
            last; and ``alpha / rank``.
        taps: per bucket a tree of ``[L, P, ...]`` in the dtype of the products, whose gradient is
            that of each block's factors as the products take them, B multiplied by the scale (in
            float32, before it is rounded); what it holds is never read. All layers' gradients are
            there at once: in float32 they were twice the bytes where a base is in bfloat16.
        tables: those of the embedding and the unembedding, which are in no layer.
    """

    layers: tuple[Any, ...]
    slots: tuple[jax.Array, ...]
    scale: tuple[jax.Array, ...]
    taps: tuple[Any, ...]
    tables: BoundAdapters

    def at(self, name: str) -> Any:
        """Those of one kind of layers, or of a table, which are bound."""
        if name in TABLES:
            return self.tables.at(name)
        layers, taps = (
            tuple(tree.get(name, {}) for tree in trees) for trees in (self.layers, self.taps)
        )
        return dataclasses.replace(self, layers=layers, taps=taps)

    def in_layer(self, layer: jax.Array, taps: tuple[Any, ...]) -> BoundAdapters:
        """Those of one layer, bound; ``taps`` are the layer's, ``[P, ...]``."""

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
        for stacks, mine, slots, scale in zip(self.layers, taps, self.slots, self.scale):
            one = functools.partial(take, slots=slots, scale=scale)
            buckets.append(jax.tree_util.tree_map_with_path(one, stacks, mine))
        return BoundAdapters(
            tuple(buckets), tuple(len(slots) for slots in self.slots), self.tables.base_blocks
        )


@jax.custom_vjp
def _taken(
    tap: jax.Array, stack: jax.Array, layer: jax.Array, slots: jax.Array, scale: jax.Array | None
) -> jax.Array:
    """``scale stack[layer, slots]`` in the dtype of ``tap``, whose gradient it has."""
    factor = stack.at[layer, slots].get(mode="clip")
    if scale is not None:
        factor = factor * scale.reshape(-1, *(1,) * (factor.ndim - 1))
    return factor.astype(tap.dtype)


_taken.defvjp(lambda *args: (_taken(*args), None), lambda _, g: (g, None, None, None, None))


TABLES = ("embed", "unembed")  # projections that are in no layer
# what a projection takes: adapters of blocks of rows, or of rows that name slots
AnyAdapters = BoundAdapters | RowAdapters


def lora_delta(x_MD: jax.Array, a_RD: jax.Array, b_RF: jax.Array) -> jax.Array:
    """``(x A^T) B`` of one adapter, ``[M, F]`` in the dtype of ``x``; both products accumulate in
    float32.
    """
    chex.assert_rank([x_MD, a_RD, b_RF], 2)
    chex.assert_equal_shape([a_RD, b_RF], dims=0)
    # Always through the rank: r (D + F) numbers a row. B A as a matrix would be D F of them, and a
    # model of its own per adapter.
    return product("MR,RF->MF", product("MD,RD->MR", x_MD, a_RD), b_RF)


lora_delta_per_block = jax.vmap(lora_delta)  # [P, M, D], [P, R, D], [P, R, F] -> [P, M, F]


def _of_blocks(factors: Any, x: jax.Array) -> jax.Array:
    x_PMD = x.reshape(x.shape[0], -1, x.shape[-1])
    return lora_delta_per_block(x_PMD, factors["a"], factors["b"])


def batch_delta(x_BTD: jax.Array, lora: AnyAdapters, d_out: int) -> jax.Array | None:
    """The deltas of one projection for all rows, ``[B, T, F]``; None when no adapter targets it."""
    return lora.over(_of_blocks, x_BTD, d_out, x_BTD.dtype)


def add_delta(x_BTD: jax.Array, y_BTF: jax.Array, lora: AnyAdapters, ends: Ends) -> jax.Array:
    """The base's result with the deltas of one projection.

    Args:
        ends: logical axes of D and F.
    """
    if isinstance(lora, RowAdapters):
        return lora.onto(_of_blocks, x_BTD, y_BTF, ends)
    delta = batch_delta(x_BTD, lora, y_BTF.shape[-1])
    return y_BTF if delta is None else y_BTF + delta


def embedding_delta(
    tokens_BT: jax.Array, lora: AnyAdapters, d_out: int, dtype: Any
) -> jax.Array | None:
    """The deltas of the embedding, ``[B, T, D]``: its input is one-hot, so ``x A^T`` is a lookup in
    ``A [R, V]``.
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
