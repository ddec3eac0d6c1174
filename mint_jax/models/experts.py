"""Routed experts with packed adapters: rows are sorted by (expert, adapter), and base and deltas
are grouped matmuls.

The base multiplies each expert's rows of all adapters together. An adapter of rank r adds rank-r
work for its own rows only, whatever the number of resident adapters.

Axes: N tokens, M rows (a token and one of its experts), E local experts, D model width, F expert
width, P blocks of a rank bucket, R rank. Factors are packed, ``[P, E, R, D]`` and ``[P, E, R, F]``.

The factor on the hidden side may be one for all experts (``SHARED_OUTER``), ``[P, R, D]``. It is
applied to tokens, not to their X rows each: before the experts for gate and up, and after the
weighted sum of a token's rows for down.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from mint_jax.lora.config import SHARED_OUTER
from mint_jax.lora.view import AdapterView, RankBucket, add_deltas
from mint_jax.models import packed_lora
from mint_jax.models.config import Kernels
from mint_jax.models.layers import Activation, swiglu
from mint_jax.models.packed_lora import Adapters, Groups
from mint_jax.params import ParamSpec

NAMES = ("gate", "up", "down")


def specs(
    L: int, E: int, D: int, F: int, dtype: Any, bias: bool = False, gated: bool = True
) -> dict[str, Any]:
    """Returns the specs of the matrices of ``L`` layers of ``E`` experts."""

    def packed(d_in: int, d_out: int, axes: tuple[str, str]) -> dict[str, ParamSpec]:
        leaf = {"w": ParamSpec((L, E, d_in, d_out), ("layers", "experts", *axes), dtype)}
        if bias:
            leaf["b"] = ParamSpec((L, E, d_out), ("layers", "experts", axes[1]), dtype, "zeros")
        return leaf

    inward, outward = ("expert_embed", "expert_ffw"), ("expert_ffw", "expert_embed")
    gate = {"gate": packed(D, F, inward)} if gated else {}
    return gate | {"up": packed(D, F, inward), "down": packed(F, D, outward)}


def _of_layer(leaf: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns a projection's matrices as ``packed_lora.project`` takes them."""
    leaf = {name: x for name, x in leaf.items() if name != "b"}
    if "layer" not in leaf:
        return leaf
    w = leaf["w"]
    flat = {"w": w.reshape(-1, *w.shape[2:]), "index": leaf["layer"] * w.shape[1]}
    return flat | ({"scale": leaf["scale"]} if "scale" in leaf else {})


class Order(NamedTuple):
    """Rows sorted by (expert, block)."""

    order: jax.Array  # this and inverse: `[M]` permutations; rows without a local expert come last
    inverse: jax.Array
    counts: jax.Array  # `[E, blocks]` rows of each expert and block
    # expert, block: `[M]` of each sorted row; `blocks` for rows without a local expert
    expert: jax.Array
    block: jax.Array


def sort_rows(expert_M: jax.Array, block_M: jax.Array, E: int, blocks: int) -> Order:
    """Sorts rows; an expert outside ``0 .. E - 1`` is on another device."""
    here = (expert_M >= 0) & (expert_M < E)
    # By expert, then by block: the base multiplies all rows of an expert in one piece, and each
    # adapter's rows are one piece within it. Stable, so that a policy's rows keep their relative
    # order, and its sums their rounding, whatever other policies route to the same expert (law 3).
    key = jnp.where(here, expert_M * blocks + block_M, E * blocks).astype(jnp.int32)
    order = jnp.argsort(key, stable=True)
    rank = jnp.zeros_like(order).at[order].set(jnp.arange(order.shape[0], dtype=order.dtype))
    counts = jnp.zeros((E * blocks + 1,), jnp.int32).at[key].add(1)[:-1].reshape(E, blocks)
    sorted_key = key[order]
    is_local = sorted_key < E * blocks
    return Order(
        order, rank, counts, sorted_key // blocks, jnp.where(is_local, sorted_key % blocks, blocks)
    )


# of gate and up `[N, R]`, the product with the factor A that experts share, or None
Inner = tuple[jax.Array | None, jax.Array | None]
Tokens = tuple[jax.Array, Inner]  # `[N, D]`, and its products
# `[M, D]`, and of down `[M, R]`, to be multiplied by the factor B that experts share, or None
Results = tuple[jax.Array, jax.Array | None]


def expert_mlp(
    tokens: Tokens,
    each: int,
    expert_M: jax.Array,
    block_M: jax.Array,
    p: Any,
    lora: AdapterView | None,
    kernels: Kernels = Kernels(),
    activation: Activation = swiglu,
) -> Results:
    """Computes ``down(silu(gate x) * up x)`` of each row's expert with its block's adapter, or
    ``down(activation(up x))`` without a gate; zeros for rows without an expert.

    Args:
        tokens: each has ``each`` consecutive rows. R is the largest of all rank buckets.
        expert_M: expert of each row, 0 to E - 1; other values are no expert.
        block_M: block of each row, see ``block_of_rows``.
        p: ``{"gate": {"w": [E, D, F]}, "up": ..., "down": {"w": [E, F, D]}}``, with an optional
            ``"b": [E, F]``; with ``"layer"`` in each, ``w`` is of all layers, ``[L, E, D, F]``.
    """
    chex.assert_rank([tokens[0], expert_M], [2, 1])
    chex.assert_equal_shape([expert_M, block_M])
    blocks = 1 if lora is None else lora.total_blocks
    order = sort_rows(expert_M, block_M, p["up"]["w"].shape[-3], blocks)
    x, inner = jax.tree.map(lambda t: _rows_of(t, order.order, order.inverse, each), tokens)
    names = tuple(name for name in NAMES[:2] if name in p)
    inner_of: dict[str, Any] = dict(zip(NAMES, inner))
    inward = []
    for name, y in zip(names, _project(x, p, lora, names, order, kernels)):
        if (h := inner_of[name]) is not None:
            y = _expand(h, y, lora, name, order, kernels)
        inward.append(checkpoint_name(y, f"expert_{name}"))
    made = activation(*inward)
    (y,) = _project(made, p, lora, ("down",), order, kernels)
    results = y, _shrink(made, lora, order, kernels)
    return jax.tree.map(lambda y: _put_back(y, order.order, order.inverse), results)


def inner(x_BTD: jax.Array, lora: AdapterView | None) -> Inner:
    """Returns ``x A^T`` with the factors that experts share, of gate and up, see ``Tokens``."""
    pairs = [_shared(lora, name, "a") for name in ("gate", "up")]
    at = [pair for pair in pairs if pair]
    zeros = [jnp.zeros((*x_BTD.shape[:2], _rank(pair, "a")), x_BTD.dtype) for pair in at]
    made = iter(add_deltas(x_BTD, zeros, at, [(None, None)] * len(at)) if at else ())
    gate, up = (pair and next(made) for pair in pairs)
    return gate, up


def outer(y_BTD: jax.Array, z_BTR: jax.Array | None, lora: AdapterView | None) -> jax.Array:
    """Returns ``y + z B`` with the factor that experts share, of down, see ``Results``."""
    pair = _shared(lora, "down", "b")
    if pair is None or z_BTR is None:
        return y_BTD
    return add_deltas(z_BTR, [y_BTD], [pair], [(None, None)])[0]


def without_shared(lora: AdapterView | None) -> AdapterView | None:
    """Returns the adapters without factors that experts share."""

    def own(bucket: RankBucket) -> RankBucket:
        shared = bucket.factors.get(SHARED_OUTER, {})
        pairs = {
            n: {f: pair[f] for f in ("a" if n == "down" else "b")} for n, pair in shared.items()
        }
        return dataclasses.replace(
            bucket, factors=bucket.factors | ({SHARED_OUTER: pairs} if pairs else {})
        )

    return lora and dataclasses.replace(lora, buckets=tuple(map(own, lora.buckets)))


def _shared(lora: AdapterView | None, name: str, factor: str) -> AdapterView | None:
    pair = lora and lora.at(SHARED_OUTER).at(name).half(factor)
    return pair if pair and pair.targeted else None


def _rank(pair: AdapterView, factor: str) -> int:
    """Returns the largest rank of the buckets."""
    return max(one.factors[factor].shape[-2] for one in pair.buckets if one.factors)


def inner_rank(lora: AdapterView | None) -> int | None:
    """Returns the columns of the second of ``Results``; None if down shares no factor."""
    pair = _shared(lora, "down", "a")
    return pair and _rank(pair, "a")


def _expand(h_MR, y_MF, lora, name, order, kernels):
    for tree, groups, _ in _buckets(lora, order):
        if pair := tree.get(SHARED_OUTER, {}).get(name):
            b = pair["b"].reshape(-1, *pair["b"].shape[-2:])
            y_MF = packed_lora.expand(kernels, groups, h_MR[:, : b.shape[1]], b, y_MF)
    return y_MF


def _shrink(x_MF, lora, order, kernels):
    parts, R = [], inner_rank(lora) or 0
    for tree, groups, _ in _buckets(lora, order):
        if pair := tree.get(SHARED_OUTER, {}).get("down"):
            a = pair["a"].reshape(-1, *pair["a"].shape[-2:])
            h: Any = packed_lora.shrink(kernels, groups, x_MF, a)
            parts.append(jnp.pad(h, ((0, 0), (0, R - h.shape[1]))))
    return sum(parts[1:], parts[0]) if parts else None


# Gradients of permutations are gathers: a scatter is slower, and on a GPU it adds a token's rows in
# nondeterministic order.


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _rows_of(x_ND: jax.Array, order_M: jax.Array, inverse_M: jax.Array, each: int) -> jax.Array:
    return x_ND[order_M // each]


def _rows_backward(each, inverse_M, g_MD):
    rows = g_MD[inverse_M].reshape(-1, each, g_MD.shape[1])
    return jnp.sum(rows, axis=1, dtype=jnp.float32).astype(g_MD.dtype), None, None


_rows_of.defvjp(lambda x, order, inverse, each: (x[order // each], inverse), _rows_backward)


@jax.custom_vjp
def _put_back(y_MD: jax.Array, order_M: jax.Array, inverse_M: jax.Array) -> jax.Array:
    return y_MD[inverse_M]


_put_back.defvjp(
    lambda y, order, inverse: (y[inverse], order), lambda order, g: (g[order], None, None)
)


def _buckets(lora, order):
    """Yields the factors of each bucket, its groups of rows, and scales that B does not include."""
    first = 0
    lora = AdapterView(()) if lora is None else lora
    for bucket, blocks in zip(lora.buckets, lora.blocks):
        tree, place, scale_P = lora.packed(bucket, blocks)
        scale_M = None
        if scale_P is not None:
            index = jnp.clip(order.block - first, 0, blocks - 1)
            scale_M = jnp.where(order.block < first + blocks, scale_P[index], 1.0)
        yield tree, groups_of(order, first, place), scale_M
        first += blocks


def _project(x_MD, p, lora, names, order, kernels):
    adapters = []
    for tree, groups, scale_M in _buckets(lora, order):
        pairs = tuple(
            tuple(tree[name][f].reshape(-1, *tree[name][f].shape[-2:]) for f in "ab")
            if tree.get(name)
            else None
            for name in names
        )
        if any(pairs):
            adapters.append(Adapters(groups, pairs, scale_M))
    with jax.named_scope("_".join(names)):
        bases, sizes = [_of_layer(p[name]) for name in names], jnp.sum(order.counts, axis=1)
        out = packed_lora.project(x_MD, bases, sizes, adapters, kernels)
        return [_with_bias(y, p[name].get("b"), order) for name, y in zip(names, out)]


def _with_bias(y_MF: jax.Array, b_EF: jax.Array | None, order: Order) -> jax.Array:
    if b_EF is None:
        return y_MF
    last = b_EF.shape[0] - 1  # rows without an expert stay zero
    own = b_EF[jnp.minimum(order.expert, last)].astype(y_MF.dtype)
    return y_MF + jnp.where((order.expert <= last)[:, None], own, jnp.zeros((), y_MF.dtype))


def groups_of(order: Order, first: int, place_P: jax.Array) -> Groups:
    """Returns the rows of a rank bucket with blocks from ``first`` on, at these adapters."""
    (E, blocks), P = order.counts.shape, place_P.shape[0]
    begin = (jnp.cumsum(order.counts.reshape(-1)) - order.counts.reshape(-1)).reshape(E, blocks)
    index = place_P[None] * E + jnp.arange(E, dtype=jnp.int32)[:, None]
    is_own = (order.block >= first) & (order.block < first + P)
    factor = jnp.where(
        is_own, place_P[jnp.clip(order.block - first, 0, P - 1)] * E + order.expert, -1
    )
    rows = slice(first, first + P)
    return Groups(
        begin[:, rows].reshape(-1),
        order.counts[:, rows].reshape(-1),
        index.reshape(-1),
        factor,
        contiguous=blocks == P,
    )
