"""Routed experts over a mesh: tokens are sent to the experts; experts and their adapters never
move.

Each device owns whole experts and their adapters' factors. Few tokens (decoding) are all-gathered
and the results summed; many (training, prefill) are exchanged all-to-all, each token once per
visit. A round has capacity for somewhat more tokens than equally loaded experts need. Tokens beyond
it go in further rounds, so none is dropped. Where sums depend on a token's round, each block of
rows has its own capacity, because another policy's routing must not change the order of a policy's
sums.

The backward pass is written out, because the number of rounds is data and JAX cannot reverse such a
loop. It exchanges gradients the same way and recomputes the experts' inner activations.

Axes: B rows, T tokens, D model width, X experts of a token, N tokens of a device, M token-expert
pairs, W devices of an exchange, C capacity of a block between two of them, K keys: blocks, or
devices and blocks.
"""

import functools
import math
from itertools import product
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from mint_jax import sharding
from mint_jax.lora.view import AdapterView
from mint_jax.models.config import Kernels
from mint_jax.models.experts import expert_mlp

GATHER_TOKENS = 4096  # largest number of tokens of an exchange that are gathered
SLACK = 1.5  # capacity of a round relative to what equally loaded experts need


class Visits(NamedTuple):
    """Tokens and their routes; every array may have batch axes in front.

    Attributes:
        x: ``[N, D]``.
        ids: ``[N, X]`` int32 experts; -1 is none.
        weights: ``[N, X]`` float32.
        block: ``[N]`` int32 block of adapters, see ``block_of_rows``.
    """

    x: jax.Array
    ids: jax.Array
    weights: jax.Array
    block: jax.Array


def routed(
    x_BTD: jax.Array,
    ids_BTX: jax.Array,
    weights_BTX: jax.Array,
    p: Any,
    lora: AdapterView | None,
    kernels: Kernels = Kernels(),
) -> jax.Array:
    """Returns the weighted sum of each token's experts, ``[B, T, D]``.

    Args:
        p: ``{"gate": {"w": [E, D, F]}, "up": ..., "down": ...}``, E sharded by ``sharding.RULES``;
            or of all layers, with the layer's number, see ``expert_mlp``.
        lora: adapters of the experts, ``[P, E, R, D]`` and ``[P, E, R, F]``, E sharded likewise.
        kernels: see ``packed_lora.project``.
    """
    chex.assert_rank([x_BTD, ids_BTX], 3)
    B, T, D = x_BTD.shape
    chex.assert_shape([ids_BTX, weights_BTX], (B, T, ids_BTX.shape[2]))
    mesh = jax.sharding.get_abstract_mesh()
    ways = sharding.ways("batch", mesh)
    pad = -B % ways
    block_B = jnp.zeros((B,), jnp.int32) if lora is None else lora.block_of_rows(B)
    of_block = (
        None
        if lora is not None and lora.by_rows
        else B // (1 if lora is None else lora.total_blocks) * T
    )

    def flat(x: jax.Array, fill: int = 0) -> jax.Array:
        x = jnp.pad(x, [(0, pad)] + [(0, 0)] * (x.ndim - 1), constant_values=fill) if pad else x
        return x.reshape((B + pad) * T, *x.shape[2:])

    block = flat(jnp.broadcast_to(block_B[:, None], (B, T)))
    visits = Visits(flat(x_BTD), flat(ids_BTX, -1), flat(weights_BTX), block)
    if mesh.empty or mesh.size == 1:
        y = _here(visits, p, lora, kernels)
    else:
        y: jax.Array = _sharded(
            visits.x, visits.weights, lora, visits.ids, block, p, of_block, kernels
        )
    return y.reshape(B + pad, T, D)[:B]


def _here(v: Visits, p: Any, lora: AdapterView | None, kernels: Kernels) -> jax.Array:
    """Runs all experts on this device."""
    N, X = v.ids.shape
    token = jnp.arange(N * X, dtype=jnp.int32) // X
    y_MD = expert_mlp(v.x, X, v.ids.reshape(-1), v.block[token], p, lora, kernels)
    return jnp.einsum(
        "NXD,NX->ND", y_MD.reshape(N, X, -1), v.weights, preferred_element_type=jnp.float32
    ).astype(v.x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def _sharded(x, weights, lora, ids, block, p, of_block, kernels):
    return _forward(x, weights, lora, ids, block, p, of_block, kernels)[0]


def _specs(mesh: Any, lora: AdapterView | None, p: Any) -> tuple[PartitionSpec, Any, Any]:
    """Returns the sharding of tokens, adapters and experts."""
    axes = sharding.partition(("experts",), mesh)
    rows = sharding.partition(("batch",), mesh)
    # Factors are packed by expert, ``[P, E, R, D]`` or, for rows that name slots, ``[L, S, E, R,
    # D]``; other leaves are numbers.
    spec_of = {4: PartitionSpec(None, *axes), 5: PartitionSpec(None, None, *axes)}
    # Experts are ``[E, D, F]``, or ``[L, E, D, F]`` with the layer's number; scales are ``[E, F]``.
    spec_of_p = {0: PartitionSpec(), 4: spec_of[4]}
    return (
        rows,
        jax.tree.map(lambda x: spec_of.get(x.ndim, PartitionSpec()), lora),
        jax.tree.map(lambda x: spec_of_p.get(x.ndim, axes), p),
    )


def _over_mesh(fn, mesh, in_specs, out_specs):
    return jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _forward(x, weights, lora, ids, block, p, of_block, kernels):
    mesh = jax.sharding.get_abstract_mesh()
    rows, lora_spec, p_spec = _specs(mesh, lora, p)

    def local(x, weights, lora, ids, block, p):
        exchange = _exchange(
            mesh, x.shape[0], ids.shape[1], p["gate"]["w"].shape[-3], of_block, kernels
        )
        return exchange.run(Visits(x, ids, weights, block), p, lora)

    y = _over_mesh(local, mesh, (rows, rows, lora_spec, rows, rows, p_spec), rows)(
        x, weights, lora, ids, block, p
    )
    return y, (x, weights, lora, ids, block, p)


def _backward(of_block, kernels, residuals, g):
    x, weights, lora, ids, block, p = residuals
    mesh = jax.sharding.get_abstract_mesh()
    rows, lora_spec, p_spec = _specs(mesh, lora, p)
    replicas = tuple(
        a for a in sharding.mesh_axes("batch", mesh) if a not in sharding.mesh_axes("experts", mesh)
    )

    def local(x, weights, lora, ids, block, p, g):
        exchange = _exchange(
            mesh, x.shape[0], ids.shape[1], p["gate"]["w"].shape[-3], of_block, kernels
        )
        dx, dw, dlora = exchange.back(Visits(x, ids, weights, block), p, lora, g)
        # An expert's adapters are replicated over the axes that split rows but not experts. The
        # replicas' gradients are of different rows, and replicas stay equal only with the sum.
        if replicas:
            dlora = jax.lax.psum(dlora, replicas)
        return dx.astype(x.dtype), dw, dlora

    specs = (rows, rows, lora_spec, rows, rows, p_spec, rows)
    dx, dw, dlora = _over_mesh(local, mesh, specs, (rows, rows, lora_spec))(
        x, weights, lora, ids, block, p, g
    )
    return dx, dw, dlora, None, None, None


_sharded.defvjp(_forward, _backward)


def _exchange(
    mesh: Any,
    tokens: int,
    per_token: int,
    experts: int,
    of_block: int | None,
    kernels: Kernels = Kernels(),
) -> "Gather | AllToAll":
    """Returns the cheaper exchange for ``tokens`` tokens of each device, in blocks of ``of_block``
    consecutive ones; None: in any order, forward only.
    """
    axes = sharding.mesh_axes("experts", mesh)
    # Axes over which tokens differ.
    split = tuple(a for a in axes if a in sharding.mesh_axes("batch", mesh))
    same = tuple(a for a in axes if a not in split)  # axes over which devices have the same tokens
    # Gathering brings every token to every device and needs no capacity for uneven routing. Its
    # bytes grow with the tokens of all devices; those of an exchange with a device's own tokens
    # times visits and SLACK.
    gathered = tokens * math.prod(mesh.shape[a] for a in split)
    ways = math.prod(mesh.shape[a] for a in axes)
    if of_block is None or gathered <= GATHER_TOKENS:
        of_block = of_block or tokens
        capacity = (
            _capacity(gathered * per_token, ways),
            _capacity(min(of_block, gathered) * per_token, ways),
        )
        return Gather(axes, split, same, *capacity, experts, kernels)
    copies = math.prod(mesh.shape[a] for a in same)
    share = -(-tokens // copies)
    ways_of_rows, starts = sharding.ways("batch", mesh), range(0, tokens, share)
    shares = [
        (n * tokens + start, n * tokens + min(start + share, tokens) - 1)
        for n, start in product(range(ways_of_rows), starts)
    ]
    blocks = max(last // of_block - first // of_block + 1 for first, last in shares)
    capacity = _capacity(min(of_block, share) * per_token, ways)
    return AllToAll(
        axes, same, copies, ways, blocks, capacity, experts, kernels, tuple(mesh.axis_names)
    )


def _capacity(pairs: int, ways: int) -> int:
    """Returns the pairs of a round between one device and one of ``ways`` others."""
    return min(pairs, -(-math.ceil(SLACK * pairs / ways) // 8) * 8)


class Plan(NamedTuple):
    """Order in which pairs are sent.

    Attributes:
        order: ``[M]`` pairs sorted by key; pairs without a key come last.
        first, count: ``[K]`` first pair and number of pairs of each key.
    """

    order: jax.Array
    first: jax.Array
    count: jax.Array

    @classmethod
    def of(cls, key_M: jax.Array, keys: int) -> "Plan":
        """Sorts pairs by key, 0 to ``keys - 1``; ``keys`` means no key."""
        count = jnp.zeros((keys + 1,), jnp.int32).at[key_M].add(1)[:-1]
        return cls(jnp.argsort(key_M, stable=True), jnp.cumsum(count) - count, count)

    def rounds(self, capacity: int) -> jax.Array:
        """Returns the number of rounds with ``capacity`` pairs of each key."""
        return jnp.max(-(-self.count // capacity))

    def round(self, r: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
        """Returns the pairs of round r, ``[K * capacity]``, and which of them are real."""
        # Unfilled capacity is clipped to some existing pair, whose result ``real`` discards with a
        # select: that pair may be another policy's and NaN, and NaN times 0 is NaN.
        nth = r * capacity + jnp.arange(capacity, dtype=jnp.int32)[None]
        at = jnp.clip(self.first[:, None] + nth, 0, self.order.shape[0] - 1)
        return self.order[at].reshape(-1), (nth < self.count[:, None]).reshape(-1)


def _weighted(x_ND, token_M, expert_M, block_M, weight_M, p, lora, kernels):
    """Returns rows times their weights, float32 ``[M, D]``."""
    return (
        expert_mlp(x_ND, token_M, expert_M, block_M, p, lora, kernels).astype(jnp.float32)
        * weight_M[:, None]
    )


def _pulled_back(rows, p, lora, g_MD, kernels):
    """Returns the gradients of the rows' activations and weights, and of the adapters."""
    x, token, expert, block, weight = rows
    _, vjp = jax.vjp(
        lambda x, w, lora: _weighted(x, token, expert, block, w, p, lora, kernels), x, weight, lora
    )
    return vjp(g_MD.astype(jnp.float32))


def _summed(sums: Any, parts: Any) -> Any:
    return jax.tree.map(lambda s, d: s + d.astype(s.dtype), sums, parts)


class Gather(NamedTuple):
    """Every device gathers all tokens and computes those routed to its own experts.

    In the forward pass blocks share the capacity: a token's pairs are added in their order,
    whatever the round. In the backward pass each block has its own, because its adapter's gradient
    is a sum over rounds.

    Attributes:
        axes: mesh axes over which experts are split.
        split: those over which tokens are split too.
        same: the others.
        capacity: pairs of a forward round.
        capacity_back: pairs of a block in a backward round.
        experts: number of local experts.
        kernels: see ``packed_lora.project``.
    """

    axes: tuple[str, ...]
    split: tuple[str, ...]
    same: tuple[str, ...]
    capacity: int
    capacity_back: int
    experts: int
    kernels: Kernels

    def _all(self, tree: Any) -> Any:
        return jax.lax.all_gather(tree, self.split, axis=0, tiled=True) if self.split else tree

    def _own(self, x: jax.Array) -> jax.Array:
        """Sums over the devices; each keeps its own tokens."""
        x = (
            jax.lax.psum_scatter(x, self.split, scatter_dimension=0, tiled=True)
            if self.split
            else x
        )
        return jax.lax.psum(x, self.same) if self.same else x

    def _plan(self, v: Visits, block_M: jax.Array, blocks: int) -> tuple[Plan, jax.Array]:
        """Returns the pairs with a local expert, by block; and every pair's local expert or -1."""
        local = v.ids.reshape(-1) - jax.lax.axis_index(self.axes) * self.experts
        here = (local >= 0) & (local < self.experts) & (v.ids.reshape(-1) >= 0)
        return Plan.of(jnp.where(here, block_M, blocks), blocks), jnp.where(here, local, -1)

    def run(self, v: Visits, p: Any, lora: AdapterView | None) -> jax.Array:
        v = self._all(v)
        plan, local = self._plan(v, jnp.zeros((v.ids.size,), jnp.int32), 1)

        def body(r, y):
            pair, real = plan.round(r, self.capacity)
            token, expert = pair // v.ids.shape[1], jnp.where(real, local[pair], -1)
            # A token's local experts may be in different rounds, which add to the same row. The sum
            # is float32 in the order of the pairs, so it does not depend on other tokens.
            return y.at[token].add(
                _weighted(
                    v.x,
                    token,
                    expert,
                    v.block[token],
                    v.weights.reshape(-1)[pair],
                    p,
                    lora,
                    self.kernels,
                )
            )

        y = jax.lax.fori_loop(
            0, plan.rounds(self.capacity), body, jnp.zeros(v.x.shape, jnp.float32)
        )
        return self._own(y.astype(v.x.dtype))

    def back(
        self, v: Visits, p: Any, lora: AdapterView | None, g: jax.Array
    ) -> tuple[jax.Array, jax.Array, Any]:
        v, g = self._all((v, g))
        blocks = 1 if lora is None else lora.total_blocks
        plan, local = self._plan(v, jnp.repeat(v.block, v.ids.shape[1]), blocks)
        row = jnp.arange(blocks * self.capacity_back, dtype=jnp.int32)

        def body(r, sums):
            dx_sum, dw_sum, dlora_sum = sums
            pair, real = plan.round(r, self.capacity_back)
            token, expert = pair // v.ids.shape[1], jnp.where(real, local[pair], -1)
            x, block, weight = v.x[token], v.block[token], v.weights.reshape(-1)[pair]
            rows = x, row, expert, block, weight
            dx, dw, dlora = _pulled_back(rows, p, lora, g[token], self.kernels)
            dw = jnp.where(expert >= 0, dw, 0.0)
            dx_sum, dw_sum = dx_sum.at[token].add(dx.astype(jnp.float32)), dw_sum.at[pair].add(dw)
            return dx_sum, dw_sum, _summed(dlora_sum, dlora)

        dx, dw, dlora = jax.lax.fori_loop(
            0, plan.rounds(self.capacity_back), body, _zero_sums(v, lora)
        )
        return (
            self._own(dx.astype(v.x.dtype)),
            self._own(dw.reshape(v.ids.shape)),
            _like(dlora, lora),
        )


def _zero_sums(v: Visits, lora: AdapterView | None) -> tuple[jax.Array, jax.Array, Any]:
    """Returns float32 zeros to sum the gradients of activations, pair weights and adapters over
    rounds.
    """
    dlora = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), lora)
    return jnp.zeros(v.x.shape, jnp.float32), jnp.zeros((v.ids.size,), jnp.float32), dlora


def _like(tree: Any, other: Any) -> Any:
    return jax.tree.map(lambda x, y: x.astype(y.dtype), tree, other)


class AllToAll(NamedTuple):
    """Each token is sent to the devices of its experts, ``capacity`` pairs of a block between two
    devices a round.

    Attributes:
        axes: mesh axes over which experts are split.
        same: those over which devices have the same tokens; each device takes a share of them.
        copies: number of devices with the same tokens.
        ways: W devices of the exchange.
        blocks: maximum number of blocks with tokens on one device.
        capacity: C.
        experts: number of local experts.
        kernels: see ``packed_lora.project``.
        all_axes: every mesh axis, so that all devices run the same number of rounds.
    """

    axes: tuple[str, ...]
    same: tuple[str, ...]
    copies: int
    ways: int
    blocks: int
    capacity: int
    experts: int
    kernels: Kernels
    all_axes: tuple[str, ...]

    def _share(self, x: jax.Array, fill: int = 0) -> jax.Array:
        """Returns this device's share of the tokens that ``same`` devices all have."""
        if not self.same:
            return x
        size = -(-x.shape[0] // self.copies)
        x = jnp.pad(
            x,
            [(0, size * self.copies - x.shape[0])] + [(0, 0)] * (x.ndim - 1),
            constant_values=fill,
        )
        return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(self.same) * size, size)

    def _share_visits(self, v: Visits) -> Visits:
        return Visits(
            self._share(v.x), self._share(v.ids, -1), self._share(v.weights), self._share(v.block)
        )

    def _whole(self, x: jax.Array, tokens: int) -> jax.Array:
        return jax.lax.all_gather(x, self.same, axis=0, tiled=True)[:tokens] if self.same else x

    def _plan(self, v: Visits) -> tuple[Plan, jax.Array]:
        """Returns pairs by device and block, and the number of rounds."""
        keys, ids = self.ways * self.blocks, v.ids.reshape(-1)
        # Relative to the device's first block; its blocks are consecutive.
        block = jnp.repeat(v.block - v.block[0], v.ids.shape[1])
        plan = Plan.of(jnp.where(ids >= 0, ids // self.experts * self.blocks + block, keys), keys)
        # The maximum over all devices, also along axes outside this exchange: a device that left
        # the loop earlier would deadlock the collectives of the others.
        return plan, jax.lax.pmax(plan.rounds(self.capacity), self.all_axes)

    def _swap(self, tree: Any) -> Any:
        """Exchanges ``[W * blocks * C, ...]``: sends the w-th part to device w, and receives w's in
        its place.
        """
        return jax.tree.map(
            lambda x: jax.lax.all_to_all(x, self.axes, split_axis=0, concat_axis=0, tiled=True),
            tree,
        )

    def _send(self, v: Visits, pair: jax.Array, real: jax.Array) -> Any:
        """Sends rows to the experts' devices: activations, local expert or -1, block, weight."""
        token = pair // v.ids.shape[1]
        expert = jnp.where(real, v.ids.reshape(-1)[pair] % self.experts, -1)
        return self._swap(
            (v.x[token], expert, v.block[token], jnp.where(real, v.weights.reshape(-1)[pair], 0.0))
        )

    def run(self, v: Visits, p: Any, lora: AdapterView | None) -> jax.Array:
        tokens, dtype = v.x.shape[0], v.x.dtype
        v = self._share_visits(v)
        plan, rounds = self._plan(v)
        row = jnp.arange(self.ways * self.blocks * self.capacity, dtype=jnp.int32)

        def body(r, y):
            pair, real = plan.round(r, self.capacity)
            x, expert, block, weight = self._send(v, pair, real)
            back = self._swap(
                _weighted(x, row, expert, block, weight, p, lora, self.kernels).astype(dtype)
            )
            return y.at[pair // v.ids.shape[1]].add(
                jnp.where(real[:, None], back, 0).astype(jnp.float32)
            )

        y = jax.lax.fori_loop(0, rounds, body, jnp.zeros(v.x.shape, jnp.float32))
        return self._whole(y.astype(dtype), tokens)

    def back(
        self, v: Visits, p: Any, lora: AdapterView | None, g: jax.Array
    ) -> tuple[jax.Array, jax.Array, Any]:
        tokens = v.x.shape[0]
        v, g = self._share_visits(v), self._share(g)
        plan, rounds = self._plan(v)
        row = jnp.arange(self.ways * self.blocks * self.capacity, dtype=jnp.int32)

        def body(r, sums):
            dx_sum, dw_sum, dlora_sum = sums
            pair, real = plan.round(r, self.capacity)
            token = pair // v.ids.shape[1]
            x, expert, block, weight = self._send(v, pair, real)
            g_row = self._swap(jnp.where(real[:, None], g[token], 0))
            rows = x, row, expert, block, weight
            dx, dw, dlora = _pulled_back(rows, p, lora, g_row, self.kernels)
            dx, dw = self._swap((dx, dw))
            dx_sum = dx_sum.at[token].add(jnp.where(real[:, None], dx, 0).astype(jnp.float32))
            dw_sum = dw_sum.at[pair].add(jnp.where(real, dw, 0.0))
            return dx_sum, dw_sum, _summed(dlora_sum, dlora)

        dx, dw, dlora = jax.lax.fori_loop(0, rounds, body, _zero_sums(v, lora))
        return (
            self._whole(dx.astype(v.x.dtype), tokens),
            self._whole(dw.reshape(v.ids.shape), tokens),
            _like(dlora, lora),
        )
