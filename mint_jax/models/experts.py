"""Routed experts with packed adapters: rows sorted by (expert, adapter), base and deltas as grouped matmuls.

Every token is computed by every expert that it was routed to. The base multiplies each expert's rows of all adapters
together; an adapter of rank r adds rank-r work for its own rows only, however many adapters are resident.

Axes: N tokens, M rows (a token and one of its experts), E experts held here, D model width, F expert width, P blocks of a rank
bucket, R rank. Adapter factors are packed, ``[P, E, R, D]`` and ``[P, E, R, F]``, one array per projection and factor.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from mint_jax.lora.apply import Bound
from mint_jax.models.grouped import grouped_matmul
from mint_jax.models.mlp import swiglu
from mint_jax.models.packed_lora import add_packed_delta
from mint_jax.params import ParamSpec

NAMES = ("gate", "up", "down")


def specs(L: int, E: int, D: int, F: int, dtype: Any) -> dict[str, Any]:
    """The matrices of ``L`` layers of ``E`` experts."""

    def packed(d_in: int, d_out: int, axes: tuple[str, str]) -> dict[str, ParamSpec]:
        return {"w": ParamSpec((L, E, d_in, d_out), ("layers", "experts", *axes), dtype)}

    inward, outward = ("expert_embed", "expert_ffw"), ("expert_ffw", "expert_embed")
    return {"gate": packed(D, F, inward), "up": packed(D, F, inward), "down": packed(F, D, outward)}


class Order(NamedTuple):
    """Rows sorted by (expert, block).

    Attributes:
        order, inverse: ``[M]`` permutations; rows of no expert held here come last.
        counts: ``[E, blocks]`` rows of each expert and block.
        block: ``[M]`` block of each sorted row; the number of blocks for rows of no expert.
    """

    order: jax.Array
    inverse: jax.Array
    counts: jax.Array
    block: jax.Array


def sort_rows(expert_M: jax.Array, block_M: jax.Array, E: int, blocks: int) -> Order:
    """Sorts rows; an expert outside ``0 .. E - 1`` is held elsewhere."""
    here = (expert_M >= 0) & (expert_M < E)
    key = jnp.where(here, expert_M * blocks + block_M, E * blocks).astype(jnp.int32)
    order = jnp.argsort(key, stable=True)
    rank = jnp.zeros_like(order).at[order].set(jnp.arange(order.shape[0], dtype=order.dtype))
    counts = jnp.zeros((E * blocks + 1,), jnp.int32).at[key].add(1)[:-1].reshape(E, blocks)
    sorted_key = key[order]
    return Order(order, rank, counts, jnp.where(sorted_key < E * blocks, sorted_key % blocks, blocks))


def expert_mlp(x_ND: jax.Array, token_M: jax.Array, expert_M: jax.Array, block_M: jax.Array, p: Any, lora: Bound | None) -> jax.Array:
    """``down(silu(gate x) * up x)`` of each row's expert with its block's adapter, ``[M, D]``; zeros for no expert.

    Args:
        x_ND: tokens.
        token_M: which token each row is.
        expert_M: expert of each row, 0 to E - 1; anything else is none.
        block_M: block of each row, see ``lora.apply.Bound``.
        p: ``{"gate": {"w": [E, D, F]}, "up": ..., "down": {"w": [E, F, D]}}``.
        lora: this layer's adapters of the experts.
    """
    blocks = 1 if lora is None else lora.total_blocks
    order = sort_rows(expert_M, block_M, p["gate"]["w"].shape[0], blocks)
    x = x_ND[token_M[order.order]]
    gate = checkpoint_name(_project(x, p, lora, "gate", order), "expert_gate")
    up = checkpoint_name(_project(x, p, lora, "up", order), "expert_up")
    return _project(swiglu(gate, up), p, lora, "down", order)[order.inverse]


def _project(x_MD: jax.Array, p: Any, lora: Bound | None, name: str, order: Order) -> jax.Array:
    with jax.named_scope(name):
        rows_E = jnp.sum(order.counts, axis=1)
        y = grouped_matmul(x_MD, p[name]["w"], rows_E)
        if "scale" in p[name]:  # a quantised base
            expert_M = jnp.searchsorted(jnp.cumsum(rows_E), jnp.arange(y.shape[0]), side="right")
            y = (y * p[name]["scale"][jnp.clip(expert_M, 0, rows_E.shape[0] - 1)]).astype(y.dtype)
        if lora is None:
            return y
        mine = lora.at(name)
        first = 0
        for factors, blocks in zip(mine.buckets, mine.blocks):
            if factors:
                y = _add_delta(y, x_MD, factors["a"], factors["b"], order, first)
            first += blocks
        return y


def _add_delta(y_MF: jax.Array, x_MD: jax.Array, a_PERD: jax.Array, b_PERF: jax.Array, order: Order, first: int) -> jax.Array:
    """Adds the deltas of one rank bucket, whose blocks are ``first .. first + P - 1``."""
    P, E = a_PERD.shape[:2]
    sizes = order.counts[:, first : first + P].reshape(-1)
    factors = (jnp.arange(P, dtype=jnp.int32)[None] * E + jnp.arange(E, dtype=jnp.int32)[:, None]).reshape(-1)
    a, b = (w.reshape(P * E, *w.shape[2:]) for w in (a_PERD, b_PERF))
    if order.counts.shape[1] == P:  # the only bucket
        return add_packed_delta(y_MF, x_MD, a, b, sizes, factors)
    front = jnp.argsort((order.block < first) | (order.block >= first + P), stable=True)  # its rows, still sorted, then the others
    back = jnp.zeros_like(front).at[front].set(jnp.arange(front.shape[0], dtype=front.dtype))
    return add_packed_delta(y_MF[front], x_MD[front], a, b, sizes, factors)[back]
