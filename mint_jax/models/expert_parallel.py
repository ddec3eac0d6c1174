"""Routed experts over a mesh: tokens travel to the experts, no expert and no adapter of one ever travels.

Each device owns whole experts, and the adapters' share of them. Few tokens (decoding) are gathered by everybody and the
results summed; many (training, prefill) are exchanged all-to-all, each token once per visit. A round has room for somewhat
more tokens than equally loaded experts need; tokens beyond it go in further rounds, so none is ever dropped.

The backward pass is written out: it exchanges gradients the same way and recomputes the experts' inner activations.

Axes: B rows, T tokens, D model width, X experts of a token, N tokens of a device, M token-expert pairs, W devices of an
exchange, C room between two of them.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from mint_jax import sharding
from mint_jax.lora.apply import Bound
from mint_jax.models.experts import expert_mlp

GATHER_TOKENS = 4096  # up to this many tokens of an exchange are gathered
SLACK = 1.5  # room of a round over what equally loaded experts need


class Visits(NamedTuple):
    """Tokens and where they go; every array may be batched in front.

    Attributes:
        x: ``[N, D]``.
        ids: ``[N, X]`` int32 experts; -1 is none.
        weights: ``[N, X]`` float32.
        block: ``[N]`` int32 block of adapters, see ``lora.apply.Bound``.
    """

    x: jax.Array
    ids: jax.Array
    weights: jax.Array
    block: jax.Array


def routed(x_BTD: jax.Array, ids_BTX: jax.Array, weights_BTX: jax.Array, p: Any, lora: Bound | None) -> jax.Array:
    """The weighted sum of each token's experts, ``[B, T, D]``.

    Args:
        p: ``{"gate": {"w": [E, D, F]}, "up": ..., "down": ...}``, E sharded as ``sharding.RULES`` says.
        lora: adapters of the experts, ``[P, E, R, D]`` and ``[P, E, R, F]``, E sharded likewise.
    """
    B, T, D = x_BTD.shape
    mesh = jax.sharding.get_abstract_mesh()
    ways = sharding.ways("batch", mesh)
    pad = -B % ways
    blocks = 1 if lora is None else lora.total_blocks
    if B % blocks:
        raise ValueError(f"{B} rows do not fall into {blocks} equal blocks")
    block_B = jnp.arange(B, dtype=jnp.int32) // (B // blocks)

    def flat(x: jax.Array, fill: int = 0) -> jax.Array:
        x = jnp.pad(x, [(0, pad)] + [(0, 0)] * (x.ndim - 1), constant_values=fill) if pad else x
        return x.reshape((B + pad) * T, *x.shape[2:])

    block = flat(jnp.broadcast_to(block_B[:, None], (B, T)))
    visits = Visits(flat(x_BTD), flat(ids_BTX, -1), flat(weights_BTX), block)
    if mesh.empty or mesh.size == 1:
        y = _here(visits, p, lora)
    else:
        y = _sharded(visits.x, visits.weights, lora, visits.ids, block, p)
    return y.reshape(B + pad, T, D)[:B]


def _here(v: Visits, p: Any, lora: Bound | None) -> jax.Array:
    """All experts on this device."""
    N, X = v.ids.shape
    token = jnp.arange(N * X, dtype=jnp.int32) // X
    y_MD = expert_mlp(v.x, token, v.ids.reshape(-1), v.block[token], p, lora)
    return jnp.einsum("NXD,NX->ND", y_MD.reshape(N, X, -1), v.weights, preferred_element_type=jnp.float32).astype(v.x.dtype)


@jax.custom_vjp
def _sharded(x, weights, lora, ids, block, p):
    return _forward(x, weights, lora, ids, block, p)[0]


def _specs(mesh: Any, lora: Bound | None, p: Any) -> tuple[PartitionSpec, Any, Any]:
    """How tokens, adapters and experts are sharded."""
    axes = sharding.partition(("experts",), mesh)
    rows = sharding.partition(("batch",), mesh)
    return rows, jax.tree.map(lambda _: PartitionSpec(None, *axes), lora), jax.tree.map(lambda _: axes, p)


def _over_mesh(fn, mesh, in_specs, out_specs):
    return jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _forward(x, weights, lora, ids, block, p):
    mesh = jax.sharding.get_abstract_mesh()
    rows, lora_spec, p_spec = _specs(mesh, lora, p)

    def local(x, weights, lora, ids, block, p):
        exchange = _exchange(mesh, x.shape[0], ids.shape[1], p["gate"]["w"].shape[0])
        return exchange.run(Visits(x, ids, weights, block), p, lora)

    y = _over_mesh(local, mesh, (rows, rows, lora_spec, rows, rows, p_spec), rows)(x, weights, lora, ids, block, p)
    return y, (x, weights, lora, ids, block, p)


def _backward(residuals, g):
    x, weights, lora, ids, block, p = residuals
    mesh = jax.sharding.get_abstract_mesh()
    rows, lora_spec, p_spec = _specs(mesh, lora, p)
    replicas = tuple(a for a in sharding.mesh_axes("batch", mesh) if a not in sharding.mesh_axes("experts", mesh))

    def local(x, weights, lora, ids, block, p, g):
        exchange = _exchange(mesh, x.shape[0], ids.shape[1], p["gate"]["w"].shape[0])
        dx, dw, dlora = exchange.back(Visits(x, ids, weights, block), p, lora, g)
        if replicas:
            dlora = jax.lax.psum(dlora, replicas)
        return dx.astype(x.dtype), dw, dlora

    specs = (rows, rows, lora_spec, rows, rows, p_spec, rows)
    dx, dw, dlora = _over_mesh(local, mesh, specs, (rows, rows, lora_spec))(x, weights, lora, ids, block, p, g)
    return dx, dw, dlora, None, None, None


_sharded.defvjp(_forward, _backward)


def _exchange(mesh: Any, tokens: int, per_token: int, experts: int) -> "Gather | AllToAll":
    """The cheaper way for ``tokens`` tokens of each device."""
    axes = sharding.mesh_axes("experts", mesh)
    split = tuple(a for a in axes if a in sharding.mesh_axes("batch", mesh))  # axes over which tokens differ
    same = tuple(a for a in axes if a not in split)  # axes over which devices hold the same tokens
    gathered = tokens * math.prod(mesh.shape[a] for a in split)
    ways = math.prod(mesh.shape[a] for a in axes)
    if gathered <= GATHER_TOKENS:
        return Gather(axes, split, same, _room(gathered * per_token, ways), experts)
    copies = math.prod(mesh.shape[a] for a in same)
    room = _room(-(-tokens // copies) * per_token, ways)
    return AllToAll(axes, same, copies, ways, room, experts, tuple(mesh.axis_names))


def _room(pairs: int, ways: int) -> int:
    """Pairs of a round between one device and one of ``ways`` others."""
    return min(pairs, -(-math.ceil(SLACK * pairs / ways) // 8) * 8)


def _weighted(x_ND, token_M, expert_M, block_M, weight_M, p, lora):
    """Rows times their weights, float32 ``[M, D]``."""
    return expert_mlp(x_ND, token_M, expert_M, block_M, p, lora).astype(jnp.float32) * weight_M[:, None]


class Gather(NamedTuple):
    """Every device sees all tokens and computes what its own experts owe them, ``room`` pairs a round.

    Attributes:
        axes: mesh axes over which experts are split.
        split: those of them over which tokens are split too.
        same: the others.
        room: pairs of a round.
        experts: experts held here.
    """

    axes: tuple[str, ...]
    split: tuple[str, ...]
    same: tuple[str, ...]
    room: int
    experts: int

    def _all(self, tree: Any) -> Any:
        return jax.lax.all_gather(tree, self.split, axis=0, tiled=True) if self.split else tree

    def _own(self, x: jax.Array) -> jax.Array:
        """Sums over the devices; each keeps its own tokens."""
        x = jax.lax.psum_scatter(x, self.split, scatter_dimension=0, tiled=True) if self.split else x
        return jax.lax.psum(x, self.same) if self.same else x

    def _plan(self, v: Visits) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Pairs, those whose expert is here first; the local expert of every pair or -1; the rounds they need."""
        local = v.ids.reshape(-1) - jax.lax.axis_index(self.axes) * self.experts
        local = jnp.where((local >= 0) & (local < self.experts) & (v.ids.reshape(-1) >= 0), local, -1)
        order = jnp.pad(jnp.argsort(local < 0, stable=True), (0, self.room))
        return order, local, -(-jnp.sum(local >= 0) // self.room)

    def _round(self, plan: Any, r: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The pairs of round r and their local experts, -1 behind the last."""
        order, local, _ = plan
        pair = jax.lax.dynamic_slice_in_dim(order, r * self.room, self.room)
        real = r * self.room + jnp.arange(self.room) < jnp.sum(local >= 0)
        return pair, jnp.where(real, local[pair], -1)

    def run(self, v: Visits, p: Any, lora: Bound | None) -> jax.Array:
        v = self._all(v)
        plan = self._plan(v)

        def body(r, y):
            pair, expert = self._round(plan, r)
            token = pair // v.ids.shape[1]
            return y.at[token].add(_weighted(v.x, token, expert, v.block[token], v.weights.reshape(-1)[pair], p, lora))

        y = jax.lax.fori_loop(0, plan[2], body, jnp.zeros(v.x.shape, jnp.float32))
        return self._own(y.astype(v.x.dtype))

    def back(self, v: Visits, p: Any, lora: Bound | None, g: jax.Array) -> tuple[jax.Array, jax.Array, Any]:
        v, g = self._all((v, g))
        plan = self._plan(v)
        row = jnp.arange(self.room, dtype=jnp.int32)

        def body(r, sums):
            dx_sum, dw_sum, dlora_sum = sums
            pair, expert = self._round(plan, r)
            token = pair // v.ids.shape[1]
            x, block, weight = v.x[token], v.block[token], v.weights.reshape(-1)[pair]
            _, vjp = jax.vjp(lambda x, w, lora: _weighted(x, row, expert, block, w, p, lora), x, weight, lora)
            dx, dw, dlora = vjp(g[token].astype(jnp.float32))
            dw = jnp.where(expert >= 0, dw, 0.0)
            dlora_sum = jax.tree.map(lambda s, d: s + d.astype(s.dtype), dlora_sum, dlora)
            return dx_sum.at[token].add(dx.astype(jnp.float32)), dw_sum.at[pair].add(dw), dlora_sum

        dx, dw, dlora = jax.lax.fori_loop(0, plan[2], body, _zero_sums(v, lora))
        return self._own(dx.astype(v.x.dtype)), self._own(dw.reshape(v.ids.shape)), _like(dlora, lora)


def _zero_sums(v: Visits, lora: Bound | None) -> tuple[jax.Array, jax.Array, Any]:
    """Float32 room for the gradients of activations, of every pair's weight and of adapters."""
    dlora = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), lora)
    return jnp.zeros(v.x.shape, jnp.float32), jnp.zeros((v.ids.size,), jnp.float32), dlora


def _like(tree: Any, other: Any) -> Any:
    return jax.tree.map(lambda x, y: x.astype(y.dtype), tree, other)


class AllToAll(NamedTuple):
    """Each token goes to the devices of its experts, ``room`` pairs between two devices a round.

    Attributes:
        axes: mesh axes over which experts are split.
        same: those over which devices hold the same tokens: each takes its share of them.
        copies: devices that hold the same tokens.
        ways: W devices of the exchange.
        room: C.
        experts: experts held here.
        all_axes: every mesh axis, so that all devices make the same number of rounds.
    """

    axes: tuple[str, ...]
    same: tuple[str, ...]
    copies: int
    ways: int
    room: int
    experts: int
    all_axes: tuple[str, ...]

    def _share(self, x: jax.Array, fill: int = 0) -> jax.Array:
        """This device's share of the tokens that ``same`` devices hold alike."""
        if not self.same:
            return x
        size = -(-x.shape[0] // self.copies)
        x = jnp.pad(x, [(0, size * self.copies - x.shape[0])] + [(0, 0)] * (x.ndim - 1), constant_values=fill)
        return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(self.same) * size, size)

    def _share_visits(self, v: Visits) -> Visits:
        return Visits(self._share(v.x), self._share(v.ids, -1), self._share(v.weights), self._share(v.block))

    def _whole(self, x: jax.Array, tokens: int) -> jax.Array:
        return jax.lax.all_gather(x, self.same, axis=0, tiled=True)[:tokens] if self.same else x

    def _plan(self, v: Visits) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Pairs sorted by device, each device's first one and number of them, and the rounds they need."""
        device = jnp.where(v.ids.reshape(-1) >= 0, v.ids.reshape(-1) // self.experts, self.ways)
        order = jnp.argsort(device, stable=True)
        count_W = jnp.zeros((self.ways + 1,), jnp.int32).at[device].add(1)[:-1]
        rounds = jax.lax.pmax(jnp.max(-(-count_W // self.room)), self.all_axes)
        return order, jnp.cumsum(count_W) - count_W, count_W, rounds

    def _round(self, plan: Any, r: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The pairs that leave in round r, ``[W * C]``, and which of them are real."""
        order, first_W, count_W, _ = plan
        nth = r * self.room + jnp.arange(self.room, dtype=jnp.int32)[None]
        at = jnp.clip(first_W[:, None] + nth, 0, order.shape[0] - 1)
        return order[at].reshape(-1), (nth < count_W[:, None]).reshape(-1)

    def _swap(self, tree: Any) -> Any:
        """``[W * C, ...]``: what is for device w goes there, what comes from w stands at its place."""
        return jax.tree.map(lambda x: jax.lax.all_to_all(x, self.axes, split_axis=0, concat_axis=0, tiled=True), tree)

    def _send(self, v: Visits, pair: jax.Array, real: jax.Array) -> Any:
        """Rows for the experts of other devices: activations, local expert or -1, block, weight."""
        token = pair // v.ids.shape[1]
        expert = jnp.where(real, v.ids.reshape(-1)[pair] % self.experts, -1)
        return self._swap((v.x[token], expert, v.block[token], jnp.where(real, v.weights.reshape(-1)[pair], 0.0)))

    def run(self, v: Visits, p: Any, lora: Bound | None) -> jax.Array:
        tokens, dtype = v.x.shape[0], v.x.dtype
        v = self._share_visits(v)
        plan = self._plan(v)
        row = jnp.arange(self.ways * self.room, dtype=jnp.int32)

        def body(r, y):
            pair, real = self._round(plan, r)
            x, expert, block, weight = self._send(v, pair, real)
            back = self._swap(_weighted(x, row, expert, block, weight, p, lora).astype(dtype))
            return y.at[pair // v.ids.shape[1]].add(jnp.where(real[:, None], back, 0).astype(jnp.float32))

        y = jax.lax.fori_loop(0, plan[3], body, jnp.zeros(v.x.shape, jnp.float32))
        return self._whole(y.astype(dtype), tokens)

    def back(self, v: Visits, p: Any, lora: Bound | None, g: jax.Array) -> tuple[jax.Array, jax.Array, Any]:
        tokens = v.x.shape[0]
        v, g = self._share_visits(v), self._share(g)
        plan = self._plan(v)
        row = jnp.arange(self.ways * self.room, dtype=jnp.int32)

        def body(r, sums):
            dx_sum, dw_sum, dlora_sum = sums
            pair, real = self._round(plan, r)
            token = pair // v.ids.shape[1]
            x, expert, block, weight = self._send(v, pair, real)
            g_row = self._swap(jnp.where(real[:, None], g[token], 0))
            _, vjp = jax.vjp(lambda x, w, lora: _weighted(x, row, expert, block, w, p, lora), x, weight, lora)
            dx, dw, dlora = vjp(g_row.astype(jnp.float32))
            dx, dw = self._swap((dx, dw))
            dx_sum = dx_sum.at[token].add(jnp.where(real[:, None], dx, 0).astype(jnp.float32))
            dw_sum = dw_sum.at[pair].add(jnp.where(real, dw, 0.0))
            return dx_sum, dw_sum, jax.tree.map(lambda s, d: s + d.astype(s.dtype), dlora_sum, dlora)

        dx, dw, dlora = jax.lax.fori_loop(0, plan[3], body, _zero_sums(v, lora))
        return self._whole(dx.astype(v.x.dtype), tokens), self._whole(dw.reshape(v.ids.shape), tokens), _like(dlora, lora)
