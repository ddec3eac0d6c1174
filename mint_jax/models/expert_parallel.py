"""Routed experts over a mesh: tokens are sent to the experts, which never move, nor their adapters.

Few tokens (decoding) are all-gathered and the results summed; many are exchanged all-to-all. A
round has capacity for somewhat more tokens than equally loaded experts need; further tokens go in
further rounds, so none is dropped.

Axes: B rows, T tokens, D model width, X experts of a token, N tokens of a device, M token-expert
pairs, W devices of an exchange, C capacity of a block between two, K keys: (devices and) blocks.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from mint_jax import sharding
from mint_jax.lora.view import AdapterView
from mint_jax.models import experts
from mint_jax.models.experts import Results, Tokens, expert_mlp

Mlp = Callable[..., Results]  # ``expert_mlp``, or a partial call of it
GATHER_TOKENS = 4096  # largest number of tokens of an exchange that are gathered
SLACK = 1.5  # capacity of a round relative to what equally loaded experts need


class Visits(NamedTuple):
    """Tokens and their routes; every array may have batch axes in front."""

    x: Tokens
    ids: jax.Array  # `[N, X]` int32 experts; -1 is none
    weights: jax.Array  # `[N, X]` float32
    block: jax.Array  # `[N]` int32 block of adapters, see `block_of_rows`


def routed(
    x_BTD: jax.Array,
    ids_BTX: jax.Array,
    weights_BTX: jax.Array,
    p: Any,
    lora: AdapterView | None,
    mlp: Mlp = expert_mlp,
) -> jax.Array:
    """Returns the weighted sum of each token's experts, ``[B, T, D]``.

    Args:
        p: ``{"gate": {"w": [E, D, F]}, "up": ..., "down": ...}``, E sharded by ``sharding.RULES``;
            or of all layers, with the layer's number, see ``expert_mlp``.
        lora: adapters of the experts, ``[P, E, R, D]`` and ``[P, E, R, F]``, E sharded likewise;
            factors that experts share are ``[P, R, D]`` and multiply tokens here, before and after.
    """
    chex.assert_rank([x_BTD, ids_BTX], 3)
    B, T, D = x_BTD.shape
    chex.assert_shape([ids_BTX, weights_BTX], (B, T, ids_BTX.shape[2]))
    mesh = jax.sharding.get_abstract_mesh()
    ways = sharding.ways("batch", mesh)
    pad = -B % ways
    block_B = jnp.zeros((B,), jnp.int32) if lora is None else lora.block_of_rows(B)
    of_block: int | None = B * T
    if lora is not None:
        of_block = None if lora.by_rows else B // lora.total_blocks * T

    def flat(x: jax.Array, fill: int = 0) -> jax.Array:
        x = jnp.pad(x, [(0, pad)] + [(0, 0)] * (x.ndim - 1), constant_values=fill) if pad else x
        return x.reshape((B + pad) * T, *x.shape[2:])

    x: Tokens = jax.tree.map(flat, (x_BTD, experts.inner(x_BTD, lora)))
    ids, weights, own = flat(ids_BTX, -1), flat(weights_BTX), experts.without_shared(lora)
    block, X = flat(jnp.broadcast_to(block_B[:, None], (B, T))), ids.shape[1]
    if mesh.empty or mesh.size == 1:
        rows = mlp(x, X, ids.reshape(-1), jnp.repeat(block, X), p, own)

        def summed(y_MD: jax.Array) -> jax.Array:
            y_NXD = y_MD.reshape(*ids.shape, y_MD.shape[1])
            y = jnp.einsum("NXD,NX->ND", y_NXD, weights, preferred_element_type=jnp.float32)
            return y.astype(y_MD.dtype)

        made: Any = jax.tree.map(summed, rows)
    else:
        made: Any = _sharded(x, weights, own, ids, block, p, of_block, mlp)
    made = jax.tree.map(lambda y: y.reshape(B + pad, T, y.shape[1])[:B], made)
    y, z = made
    return experts.outer(y, z, lora)


# The backward pass is written out: JAX cannot reverse a loop of as many rounds as data says.
@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def _sharded(x, weights, lora, ids, block, p, of_block, mlp):
    return _forward(x, weights, lora, ids, block, p, of_block, mlp)[0]


def _locally(fn: Any, of_block: int | None, args: Any, *more: Any) -> Any:
    """Runs ``fn(exchange, visits, p, lora, *more)`` on every device's part."""
    mesh: Any = jax.sharding.get_abstract_mesh()
    axes, rows = (sharding.partition((name,), mesh) for name in ("experts", "batch"))
    # Factors are packed by expert, ``[P, E, R, D]`` or, for rows that name slots, ``[L, S, E, R,
    # D]``; other leaves are numbers.
    spec_of = {4: PartitionSpec(None, *axes), 5: PartitionSpec(None, None, *axes)}
    # Experts are ``[E, D, F]``, or ``[L, E, D, F]`` with the layer's number; scales are ``[E, F]``.
    spec_of_p = {0: PartitionSpec(), 4: spec_of[4]}
    lora_spec = jax.tree.map(lambda x: spec_of.get(x.ndim, PartitionSpec()), args[2])
    p_spec = jax.tree.map(lambda x: spec_of_p.get(x.ndim, axes), args[-1])

    def local(x, weights, lora, ids, block, p, *more):
        exchange = _exchange(mesh, ids.shape, p["up"]["w"].shape[-3], of_block)
        return fn(exchange, Visits(x, ids, weights, block), p, lora, *more)

    specs = rows, rows, lora_spec, rows, rows, p_spec, *(rows,) * len(more)
    out = (rows, rows, lora_spec) if more else rows
    over: Any = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)
    return over(*args, *more)


def _forward(x, weights, lora, ids, block, p, of_block, mlp):
    def run(exchange, v, p, lora):
        return exchange.run(v, p, lora, mlp)

    args = x, weights, lora, ids, block, p
    return _locally(run, of_block, args), args


def _backward(of_block, mlp, residuals, g):
    mesh = jax.sharding.get_abstract_mesh()
    experts = sharding.mesh_axes("experts", mesh)
    replicas = tuple(a for a in sharding.mesh_axes("batch", mesh) if a not in experts)

    def back(exchange, v, p, lora, g):
        dx, dw, dlora = exchange.back(v, p, lora, g, mlp)
        # An expert's adapters are replicated over the axes that split rows but not experts. The
        # replicas' gradients are of different rows, and replicas stay equal only with the sum.
        return dx, dw, jax.lax.psum(dlora, replicas) if replicas else dlora

    return *_locally(back, of_block, residuals, g), None, None, None


_sharded.defvjp(_forward, _backward)


def _exchange(mesh: Any, visits: tuple[int, ...], experts: int, of_block: int | None) -> "Exchange":
    """Returns the cheaper exchange of a device's ``visits``: its tokens and the experts of each.

    Args:
        experts: number of its experts.
        of_block: consecutive tokens of one block; None: blocks in any order, forward only.
    """
    tokens, per_token = visits
    axes = sharding.mesh_axes("experts", mesh)
    # Axes over which tokens differ.
    split = tuple(a for a in axes if a in sharding.mesh_axes("batch", mesh))
    same = tuple(a for a in axes if a not in split)  # axes over which devices have the same tokens
    # Gathering brings every token to every device and needs no capacity for uneven routing. Its
    # bytes grow with the tokens of all devices; those of an exchange with a device's own tokens
    # times visits and SLACK.
    gathered = tokens * math.prod(mesh.shape[a] for a in split)
    ways = math.prod(mesh.shape[a] for a in axes)
    copies = math.prod(mesh.shape[a] for a in same)
    exchange = Exchange(axes, split, same, experts, copies, ways, tuple(mesh.axis_names))
    if of_block is None or gathered <= GATHER_TOKENS:
        back = _capacity(min(of_block or tokens, gathered) * per_token, ways)
        capacity = _capacity(gathered * per_token, ways)
        return dataclasses.replace(exchange, capacity=capacity, capacity_back=back)
    share = -(-tokens // copies)
    ways_of_rows, starts = sharding.ways("batch", mesh), range(0, tokens, share)
    shares = [
        (n * tokens + start, n * tokens + min(start + share, tokens) - 1)
        for n, start in product(range(ways_of_rows), starts)
    ]
    blocks = max(last // of_block - first // of_block + 1 for first, last in shares)
    capacity = _capacity(min(of_block, share) * per_token, ways)
    return dataclasses.replace(exchange, capacity=capacity, blocks=blocks)


def _capacity(pairs: int, ways: int) -> int:
    """Returns the pairs of a round between one device and one of ``ways`` others."""
    return min(pairs, -(-math.ceil(SLACK * pairs / ways) // 8) * 8)


class Plan(NamedTuple):
    """Order in which pairs are sent."""

    order: jax.Array  # `[M]` pairs sorted by key; pairs without a key come last
    first: jax.Array  # this and count: `[K]` first pair and number of pairs of each key
    count: jax.Array
    expert: jax.Array  # `[M]` the expert of each pair on its device; -1 for pairs without a key
    capacity: int  # pairs of a key in one round
    rounds: jax.Array  # number of rounds

    @classmethod
    def of(cls, key_M: jax.Array, keys: int, expert: jax.Array, capacity: int) -> "Plan":
        """Sorts pairs by key, 0 to ``keys - 1``; ``keys`` means no key."""
        count = jnp.zeros((keys + 1,), jnp.int32).at[key_M].add(1)[:-1]
        order, rounds = jnp.argsort(key_M, stable=True), jnp.max(-(-count // capacity))
        return cls(order, jnp.cumsum(count) - count, count, expert, capacity, rounds)

    def round(self, r: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the pairs of round r, ``[K * capacity]``, which are real, and their experts."""
        # Unfilled capacity is clipped to some existing pair, whose result ``real`` discards with a
        # select: that pair may be another policy's and NaN, and NaN times 0 is NaN.
        nth = r * self.capacity + jnp.arange(self.capacity, dtype=jnp.int32)[None]
        at = jnp.clip(self.first[:, None] + nth, 0, self.order.shape[0] - 1)
        pair, real = self.order[at].reshape(-1), (nth < self.count[:, None]).reshape(-1)
        return pair, real, jnp.where(real, self.expert[pair], -1)


def _weighted(x, expert_M, block_M, weight_M, p, lora, mlp):
    """Returns the experts' results of rows times their weights, float32."""
    made = mlp(x, 1, expert_M, block_M, p, lora)
    return jax.tree.map(lambda y: y.astype(jnp.float32) * weight_M[:, None], made)


def _zeros(x: Tokens, lora: AdapterView | None) -> Results:
    """Returns sums of ``_weighted`` to start with."""
    y, R = jnp.zeros(x[0].shape, jnp.float32), experts.inner_rank(lora)
    return y, None if R is None else jnp.zeros((len(y), R), jnp.float32)


def _add(sums: Any, at: jax.Array, real: jax.Array, parts: Any) -> Any:
    def add(total: jax.Array, x: jax.Array) -> jax.Array:
        x = jnp.where(real.reshape(-1, *(1,) * (x.ndim - 1)), x, 0)
        return total.at[at].add(x.astype(jnp.float32))

    return jax.tree.map(add, sums, parts)


@dataclasses.dataclass(frozen=True)
class Exchange:
    """The rounds of tokens and results between devices, forward and backward.

    Without ``blocks`` every device gathers all tokens and computes those of its own experts; else
    each token is sent to the devices of its experts, ``capacity`` pairs of a block a round.
    """

    axes: tuple[str, ...]  # mesh axes over which experts are split
    split: tuple[str, ...]  # those over which devices have different tokens
    same: tuple[str, ...]  # those over which devices have the same tokens
    experts: int  # number of local experts
    copies: int  # number of devices with the same tokens; each takes a share of them
    ways: int  # W devices of the exchange
    all_axes: tuple[str, ...]  # every mesh axis, so that all devices run the same number of rounds
    capacity: int = 0  # pairs of a round, see `Plan`
    capacity_back: int = 0  # pairs of a block in a backward round of gathered tokens
    blocks: int = 0  # maximum number of blocks with tokens on one device

    def enter(self, x: jax.Array, fill: int = 0) -> jax.Array:
        """Returns the rows that take part in the rounds; padding is ``fill``."""
        if not self.blocks:
            return jax.lax.all_gather(x, self.split, axis=0, tiled=True) if self.split else x
        if not self.same:
            return x
        size = -(-x.shape[0] // self.copies)
        pad = [(0, size * self.copies - x.shape[0])] + [(0, 0)] * (x.ndim - 1)
        x = jnp.pad(x, pad, constant_values=fill)
        return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(self.same) * size, size)

    def leave(self, x: jax.Array, tokens: int) -> jax.Array:
        """Returns the results of this device's ``tokens`` rows after all rounds."""
        if self.blocks:
            return jax.lax.all_gather(x, self.same, axis=0, tiled=True)[:tokens] if self.same else x
        if self.split:
            x = jax.lax.psum_scatter(x, self.split, scatter_dimension=0, tiled=True)
        return jax.lax.psum(x, self.same) if self.same else x

    def swap(self, tree: Any) -> Any:
        """Exchanges ``[W * blocks * C, ...]``: the w-th part with device w."""
        if not self.blocks:
            return tree
        return jax.tree.map(lambda x: jax.lax.all_to_all(x, self.axes, 0, 0, tiled=True), tree)

    def plan(self, v: Visits, blocks: int | None = None) -> Plan:
        """Returns the order of pairs, forward or, given the number of ``blocks``, backward."""
        ids, X = v.ids.reshape(-1), v.ids.shape[1]
        if self.blocks:
            keys = self.ways * self.blocks
            # Relative to the device's first block; its blocks are consecutive.
            block = jnp.repeat(v.block - v.block[0], X)
            key = jnp.where(ids >= 0, ids // self.experts * self.blocks + block, keys)
            plan = Plan.of(key, keys, ids % self.experts, self.capacity)
            # The maximum over all devices, also along axes outside this exchange: a device that
            # left the loop earlier would deadlock the collectives of the others.
            return plan._replace(rounds=jax.lax.pmax(plan.rounds, self.all_axes))
        local = ids - jax.lax.axis_index(self.axes) * self.experts
        here = (local >= 0) & (local < self.experts) & (ids >= 0)
        # Forward, blocks share the capacity: a token's pairs are added in their order, whatever the
        # round. Backward, an adapter's gradient is a sum over rounds, whose order another policy's
        # routing must not change, so each block has its own capacity.
        keys, block = (1, 0) if blocks is None else (blocks, jnp.repeat(v.block, X))
        capacity = self.capacity if blocks is None else self.capacity_back
        return Plan.of(jnp.where(here, block, keys), keys, local, capacity)

    def _enter_all(self, v: Visits) -> Visits:
        return Visits(
            *(jax.tree.map(lambda x: self.enter(x, -1 if x is v.ids else 0), part) for part in v)
        )

    def _send(self, v: Visits, plan: Plan, r: jax.Array) -> Any:
        """Returns pairs, tokens and reality of a round, and the rows that came here."""
        pair, real, expert = plan.round(r)
        token = pair // v.ids.shape[1]
        weight = jnp.where(real, v.weights.reshape(-1)[pair], 0.0)
        x = jax.tree.map(lambda x: x[token], v.x)
        return pair, token, real, self.swap((x, expert, v.block[token], weight))

    def run(self, v: Visits, p: Any, lora: AdapterView | None, mlp: Mlp) -> Results:
        tokens, dtype = v.x[0].shape[0], v.x[0].dtype
        v = self._enter_all(v)
        plan = self.plan(v)

        def body(r, y):
            _, token, real, (x, expert, block, weight) = self._send(v, plan, r)
            own = _weighted(x, expert, block, weight, p, lora, mlp)
            if self.blocks:
                own = self.swap(jax.tree.map(lambda y: y.astype(dtype), own))
            # A token's experts may be in different rounds, which add to the same row. The sum is
            # float32 in the order of the pairs, so it does not depend on other tokens.
            return _add(y, token, real, own)

        y = jax.lax.fori_loop(0, plan.rounds, body, _zeros(v.x, lora))
        return jax.tree.map(lambda y: self.leave(y.astype(dtype), tokens), y)

    def back(
        self, v: Visits, p: Any, lora: AdapterView | None, g: Results, mlp: Mlp
    ) -> tuple[Tokens, jax.Array, Any]:
        tokens, dtype = v.x[0].shape[0], v.x[0].dtype
        v, g = self._enter_all(v), jax.tree.map(self.enter, g)
        plan = self.plan(v, 1 if lora is None else lora.total_blocks)

        def body(r, sums):
            pair, token, real, (x, expert, block, weight) = self._send(v, plan, r)
            g_row = self.swap(jax.tree.map(lambda g: jnp.where(real[:, None], g[token], 0), g))
            _, vjp = jax.vjp(
                lambda x, w, lora: _weighted(x, expert, block, w, p, lora, mlp), x, weight, lora
            )
            dx, dw, dlora = vjp(jax.tree.map(lambda g: g.astype(jnp.float32), g_row))
            dx, dw = self.swap((dx, dw))
            return (
                _add(sums[0], token, real, dx),
                _add(sums[1], pair, real, dw),
                jax.tree.map(lambda s, d: s + d.astype(s.dtype), sums[2], dlora),
            )

        like = v.x, v.weights.reshape(-1), lora
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), like)
        dx, dw, dlora = jax.lax.fori_loop(0, plan.rounds, body, zeros)
        return (
            jax.tree.map(lambda d: self.leave(d.astype(dtype), tokens), dx),
            self.leave(dw.reshape(v.ids.shape), tokens),
            jax.tree.map(lambda x, y: x.astype(y.dtype), dlora, lora),
        )
