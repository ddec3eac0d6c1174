"""Gated delta nets (Yang et al. 2024, arXiv 2412.06464): layers whose memory is a state.

A head's state is ``S [K, V]``: ``S_t = exp(g_t) S_{t-1}``, then ``S_t += k_t beta_t (v_t - k_t
S_t)^T``, and ``o_t = q_t S_t``. A chunk of tokens solves one triangular system and reads the states
before it by matmuls (arXiv 2406.06484, section 3). In packed rows a segment begins with an empty
state, or with that of its parent. States are float32.

Axes: B rows or blocks, T tokens, Q chunks, C tokens of a chunk, N heads, K key dim, V value dim, M
taps of the short convolution, W its channels.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mint_jax import sharding
from mint_jax.lora.view import AdapterView
from mint_jax.models import paged
from mint_jax.models.attention import Segments
from mint_jax.models.config import Delta, ModelConfig
from mint_jax.models.layers import AXES, matrix, norm, project, project_each, rms_norm
from mint_jax.models.paged import EMPTY, FOLLOW, StateSlots
from mint_jax.params import ParamSpec

CHUNK = 64
KEY_EPS = 1e-6  # of the norm of queries and keys


class Lineage(NamedTuple):
    """Ancestry of the tokens of packed rows; a segment follows its parent, or a sibling."""

    own: jax.Array  # [B, T] int32 segment of each token, and of its parent, or the same
    parent: jax.Array
    start: jax.Array  # [B, T] first token of the token's segment
    end: jax.Array  # [B, T] last token of its parent; -1 without one


def lineage(segments: Segments) -> Lineage:
    """Returns the ancestry of packed rows."""
    own, parent = segments
    at = jnp.arange(own.shape[1], dtype=jnp.int32)[None]
    before = jnp.pad(own, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    first = own != before
    start = jax.lax.cummax(jnp.where(first, at, 0), axis=1)
    end = jax.lax.cummax(jnp.where(first & (before == parent), at - 1, -1), axis=1)
    return Lineage(own, parent, start, jnp.where(parent == own, -1, end))


def previous(of: Lineage, taps: int) -> jax.Array:
    """Returns the tokens that a short convolution reads, ``[B, T, M - 1]`` int32: the m-th ancestor
    of each token; -1 where it has none.
    """
    at = jnp.arange(of.own.shape[1], dtype=jnp.int32)[None]
    out = []
    for m in range(1, taps):
        across = of.end - (m - 1 - (at - of.start))  # counted from the parent's end
        segment = jnp.take_along_axis(of.own, jnp.maximum(across, 0), axis=1)
        valid = (of.end >= 0) & (across >= 0) & (segment == of.parent)
        out.append(jnp.where(at - m >= of.start, at - m, jnp.where(valid, across, -1)))
    return jnp.stack(out, axis=-1)


class _Chunk(NamedTuple):
    """Parts of a chunk that do not depend on the states before it; float32.

    Two states enter and leave a chunk: that of the running lineage, and that of the last parent,
    with which its further children begin.
    """

    q: jax.Array  # [B, N, C, 2K] queries that read the two states
    w: jax.Array  # [B, N, C, 2K] keys that correct the values by the two states
    u: jax.Array  # [B, N, C, V] values of a chunk that begins with empty states
    attn: jax.Array  # [B, N, C, C] weights of the chunk's own values
    k: jax.Array  # [B, N, 2, C, K] keys that enter the two states after the chunk
    keep: jax.Array  # [B, N, 2, 2] decay from the states before to the states after


def delta_rule(
    q_BTNK: jax.Array,
    k_BTNK: jax.Array,
    v_BTNV: jax.Array,
    decay_BTN: jax.Array,
    beta_BTN: jax.Array,
    of: Lineage,
) -> jax.Array:
    """Returns ``o [B, T, N, V]`` float32 of packed rows.

    Args:
        q_BTNK, k_BTNK: normalised; queries are scaled.
        decay_BTN: ``g``, at most 0; beta_BTN: 0 to 1.
    """
    B, T, N, V = v_BTNV.shape
    K, pad = q_BTNK.shape[-1], -T % CHUNK

    def chunks(x: jax.Array) -> jax.Array:
        # Padding continues the last segment and changes no result.
        x = jnp.pad(x, ((0, 0), (0, pad)) + ((0, 0),) * (x.ndim - 2), mode="edge")
        return x.reshape(B, -1, CHUNK, *x.shape[2:])

    heads = (
        jnp.moveaxis(chunks(x.astype(jnp.float32)), 3, 2)
        for x in (q_BTNK, k_BTNK, v_BTNV, decay_BTN, beta_BTN)
    )
    parts = _prepare(*heads, of=Lineage(*map(chunks, of)), continues=False)

    def step(states: jax.Array, part: _Chunk) -> tuple[jax.Array, jax.Array]:
        new = part.u - part.w @ states  # [B, N, 2K, V]
        out = part.q @ states + part.attn @ new
        kept = jnp.einsum("bnij,bnjkv->bnikv", part.keep, states.reshape(B, N, 2, K, V))
        after = kept + jnp.einsum("bnick,bncv->bnikv", part.k, new)
        return after.reshape(B, N, 2 * K, V), out

    empty = jnp.zeros((B, N, 2 * K, V), jnp.float32)
    _, out = jax.lax.scan(step, empty, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), parts))
    return out.transpose(1, 0, 3, 2, 4).reshape(B, T + pad, N, V)[:, :T]


def _prepare(q, k, v, g, beta, of: Lineage, continues: bool) -> _Chunk:
    """Returns the parts of all chunks, ``[B, Q, N, ...]``; ``continues``: the first chunk goes on
    with the running state.
    """
    B, Q, _, C, K = q.shape
    first = jnp.arange(Q, dtype=jnp.int32)[None, :, None] * C
    own, parent = of.own, of.parent
    start, end = of.start - first, of.end - first  # relative to the chunk; negative before it

    def at(x: jax.Array, i: jax.Array) -> jax.Array:
        """Returns ``x [B, Q, N, C]`` at ``i [B, Q, C]``, 0 where i is negative."""
        i = i[:, :, None]
        found = jnp.take_along_axis(x, jnp.broadcast_to(jnp.maximum(i, 0), x.shape), axis=3)
        return jnp.where(i < 0, 0.0, found)

    # Log decay from the lineage's first token in this chunk. Differences of sums over whole rows
    # would lose digits.
    total = jnp.cumsum(g, axis=-1)
    log = total - at(total, start - 1)
    log += at(log, end)
    i = jnp.arange(C)
    causal = (i[:, None] >= i[None])[None, None]
    ancestor = own[..., :, None] == own[..., None, :]
    ancestor = (ancestor | (parent[..., :, None] == own[..., None, :])) & causal
    between = log[..., :, None] - log[..., None, :]
    weights = jnp.exp(jnp.where(ancestor[:, :, None], between, -jnp.inf))

    # States with which a token's lineage enters the chunk: the running one or the last parent's.
    none = own[:, :1, 0] if continues else jnp.full((B, 1), -2, jnp.int32)
    last, last_parent = (
        jnp.concatenate([none, x[:, :-1, -1]], axis=1)[..., None] for x in (own, parent)
    )
    running = (own == last) | (parent == last)
    sibling = (parent == last_parent) & (parent != own) & ~running
    enters = jnp.stack([running, sibling], axis=-1)[:, :, None] * jnp.exp(log)[..., None]

    def reads(x: jax.Array) -> jax.Array:
        return (enters[..., None] * x[..., None, :]).reshape(*x.shape[:-1], 2 * K)

    strictly = (i[:, None] > i[None])[None, None, None]
    system = jnp.where(strictly, (k @ k.mT) * weights, 0.0) * beta[..., None]
    right = jnp.concatenate([v, reads(k)], axis=-1) * beta[..., None]
    solved = jax.lax.linalg.triangular_solve(
        system, right, left_side=True, lower=True, unit_diagonal=True
    )
    # Afterwards: the state of the last token's lineage, and that of its parent. A segment without a
    # parent may become one, so that both are the same then.
    child = (parent != own)[..., -1:]
    whole = jnp.full_like(child, C - 1, jnp.int32)
    ends = jnp.concatenate([whole, jnp.where(child, end[..., -1:], whole)], axis=-1)
    inside, to = ((x[:, :, None, :, None]) for x in (ends >= 0, jnp.maximum(ends, 0)))

    def ending(x: jax.Array) -> jax.Array:
        to_x = jnp.broadcast_to(to, (*x.shape[:3], 2, x.shape[-1]))
        return jnp.take_along_axis(x, to_x, axis=3)

    stays = jnp.asarray([[0.0, 0.0], [0.0, 1.0]])[None, None, None]  # a parent before the chunk
    return _Chunk(
        reads(q),
        solved[..., v.shape[-1] :],
        solved[..., : v.shape[-1]],
        (q @ k.mT) * weights,
        jnp.where(inside, ending(weights), 0.0)[..., None] * k[:, :, :, None],
        jnp.where(inside, ending(enters), stays),
    )


def short_convolution(x_BTW: jax.Array, w_MW: jax.Array, before_BTM: jax.Array) -> jax.Array:
    """Returns a causal convolution of each channel along lineages, float32; the last tap is the
    token's own. ``before_BTM``: see ``previous``.
    """
    x, w = x_BTW.astype(jnp.float32), w_MW.astype(jnp.float32)[:, None, None]
    out = x * w[-1]
    for m in range(before_BTM.shape[-1]):
        i = before_BTM[..., m, None]
        tap = jnp.take_along_axis(x, jnp.maximum(i, 0), axis=1)
        out += jnp.where(i < 0, 0.0, tap) * w[-2 - m]
    return out


def specs(cfg: ModelConfig, L: int, dtype: Any) -> dict[str, Any]:
    """Returns the parameters of ``L`` stacked layers."""
    d, D, width = _dims(cfg), cfg.d_model, channels(cfg)
    values = d.heads * d.value
    taps = ("layers", None, None, AXES["qkv"][1])
    inward = {"qkv": width, "z": values, "beta": d.heads, "decay": d.heads}
    if d.joint:
        inward = {"qkvz": width + values, "ba": 2 * d.heads}
    return {
        "norm": norm(L, D, dtype),
        **{name: matrix(name, L, D, F, dtype) for name, F in inward.items()},
        "convolution": ParamSpec((L, d.taps, 1, width), taps, dtype, fan_in=d.taps),
        "log_rate": norm(L, d.heads, dtype),
        "bias": norm(L, d.heads, dtype),
        "out_norm": norm(L, d.value, dtype),
        "out": matrix("out", L, values, D, dtype),
    }


def cache_specs(cfg: ModelConfig, L: int, slots: int, dtype: Any) -> dict[str, Any]:
    """Returns the shapes of the states of ``L`` layers: ``tail [L, S, (M - 1) W]``, which the short
    convolution reads, and ``state [L, S, N, K, V]``.
    """
    # With taps as an axis of their own a TPU copies all tails in each call.
    d = _dims(cfg)
    return {
        "tail": jax.ShapeDtypeStruct((L, slots, (d.taps - 1) * channels(cfg)), dtype),
        "state": jax.ShapeDtypeStruct((L, slots, d.heads, d.key, d.value), jnp.float32),
    }


def _dims(cfg: ModelConfig) -> Delta:
    assert cfg.delta is not None
    return cfg.delta


def channels(cfg: ModelConfig) -> int:
    """Returns W: queries, keys and values of all heads."""
    d = _dims(cfg)
    return 2 * d.key_heads * d.key + d.heads * d.value


def mixer(
    h_BTD: jax.Array,
    p: dict[str, Any],
    lora: AdapterView | None,
    of: Lineage | None,
    cache: paged.Cache | None,
    cfg: ModelConfig,
) -> tuple[jax.Array, dict[str, jax.Array] | None]:
    """Mixes the tokens of packed rows, or of rows with a cache; ``[B, T, D]``, and the pool."""
    d, (B, T, _) = _dims(cfg), h_BTD.shape
    if d.joint:
        qkvz, ba = project_each(h_BTD, p, lora, ("qkvz", "ba"))
        x, z, beta, decay = _apart(qkvz, ba, d)
    else:
        x, z, beta, decay = project_each(h_BTD, p, lora, ("qkv", "z", "beta", "decay"))
    rate, bias = (p[name].astype(jnp.float32)[None, None] for name in ("log_rate", "bias"))
    decay = -jnp.exp(rate) * jax.nn.softplus(decay.astype(jnp.float32) + bias)
    beta, taps = jax.nn.sigmoid(beta.astype(jnp.float32)), p["convolution"][:, 0]
    if cache is None:
        assert of is not None
        x, pool = short_convolution(x, taps, previous(of, d.taps)), None
        o = delta_rule(*_heads(x, d), decay, beta, of)
    else:
        # Slots count within a part of the mesh. In a tensor group the devices split the heads; each
        # convolves all channels, which is little.
        # Where it splits rows, XLA would gather the projections instead of moving few channels.
        x = sharding.constrain(x, "batch", None, "q_heads")
        rows, heads = sharding.cache_axes(cfg.num_kv_heads)
        of_head = (rows, None, *sharding.fitting((d.heads,), heads))
        of_tail, of_state = (None, rows), (None, rows, of_head[2])
        row, where = (rows, None, None), (cache.layer, cache.view.states)
        args, specs = (
            (x, taps, cache.pool["tail"], *where),
            (row, (None, None), of_tail, (), (rows,)),
        )
        x, tail = sharding.over_devices(_convolved, args, specs, (row, of_tail))
        args, specs = (*_heads(x, d), decay, beta, cache.pool["state"]), (of_head,) * 5
        specs = (*specs, of_state, (), (rows,))
        o, state = sharding.over_devices(_ruled, (*args, *where), specs, (of_head, of_state))
        pool = cache.pool | {"tail": tail, "state": state}
    o = rms_norm(o, p["out_norm"], cfg.norm_eps)
    o = o * jax.nn.silu(z.astype(jnp.float32)).reshape(o.shape)
    return project(o.reshape(B, T, -1).astype(h_BTD.dtype), p, lora, "out"), pool


def _apart(qkvz: jax.Array, ba: jax.Array, d: Delta) -> list[jax.Array]:
    """Returns channels, gates, betas and decays from projections that hold them by key head."""
    (B, T, _), each = qkvz.shape, d.heads // d.key_heads

    def split(y: jax.Array, *ends: int) -> list[jax.Array]:
        parts = jnp.split(y.reshape(B, T, d.key_heads, -1), ends, axis=-1)
        return [part.reshape(B, T, -1) for part in parts]

    keys = 2 * d.key
    *qkv, z = split(qkvz, d.key, keys, keys + each * d.value)
    return [jnp.concatenate(qkv, axis=-1), z, *split(ba, each)]


def _heads(x: jax.Array, d: Delta) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns queries, keys and values of every head from the convolution's output."""
    B, T, _ = x.shape
    keys = d.key_heads * d.key
    q, k, v = jnp.split(jax.nn.silu(x), [keys, 2 * keys], axis=-1)

    def unit(y: jax.Array) -> jax.Array:
        y = y.reshape(B, T, d.key_heads, d.key)
        y = y * jax.lax.rsqrt(jnp.sum(y * y, axis=-1, keepdims=True) + KEY_EPS)
        return jnp.repeat(y, d.heads // d.key_heads, axis=2)

    return unit(q) * d.key**-0.5, unit(k), v.reshape(B, T, d.heads, d.value)


def _convolved(x_BTW, w_MW, pool, layer, slots: StateSlots):
    """Returns the convolution of the rows, float32, and the pool with their last tokens."""
    (B, T, W), M, at = x_BTW.shape, len(w_MW), jnp.maximum(slots.load, 0)
    empty, follows = slots.load == EMPTY, slots.load == FOLLOW
    tail = pool[layer, at].reshape(B, M - 1, W)
    tail = jnp.where(empty[:, None, None], 0, tail).astype(x_BTW.dtype)
    if T > 1:  # a block that follows another has that one's last tokens before it
        before = jnp.roll(x_BTW[:, T - M + 1 :], 1, axis=0)
        tail = jnp.where(follows[:, None, None], before, tail)
    whole = jnp.concatenate([tail, x_BTW], axis=1)
    w = w_MW.astype(jnp.float32)[:, None, None]
    x = jnp.zeros(x_BTW.shape, jnp.float32)
    for m in range(M):
        x += whole[:, m : m + T].astype(jnp.float32) * w[m]
    ends = slots.count[:, None] + jnp.arange(M - 1)[None]
    tail = jnp.take_along_axis(whole, ends[..., None], axis=1).astype(pool.dtype).reshape(B, -1)
    pool = pool.at[layer, slots.save].set(tail, mode="drop")
    return x, pool.at[layer, slots.keep].set(tail, mode="drop")


def _ruled(q_BTNK, k_BTNK, v_BTNV, decay_BTN, beta_BTN, pool, layer, slots: StateSlots):
    """Returns ``o [B, T, N, V]`` and the pool with the states after the rows."""
    T = q_BTNK.shape[1]
    # A token that is not in use leaves the state as it is.
    used = (jnp.arange(T)[None] < slots.count[:, None])[..., None]
    decay, beta = jnp.where(used, decay_BTN, 0.0), jnp.where(used, beta_BTN, 0.0)
    if T > 1:
        return _blocks((q_BTNK, k_BTNK, v_BTNV, decay, beta), slots, pool, layer)
    start = pool[layer, jnp.maximum(slots.load, 0)]
    start = jnp.where((slots.load == EMPTY)[:, None, None, None], 0.0, start)
    of_row = q_BTNK[:, 0], k_BTNK[:, 0], v_BTNV[:, 0], decay[:, 0], beta[:, 0]
    o, after = _step(*of_row, start)
    return o[:, None], pool.at[layer, slots.save].set(after, mode="drop")


def _step(q_BNK, k_BNK, v_BNV, decay_BN, beta_BN, state_BNKV):
    """Returns ``o [B, N, V]`` and the state after one token."""
    state = state_BNKV * jnp.exp(decay_BN)[..., None, None]
    new = (v_BNV - jnp.einsum("bnk,bnkv->bnv", k_BNK, state)) * beta_BN[..., None]
    state += k_BNK[..., None] * new[..., None, :]
    return jnp.einsum("bnk,bnkv->bnv", q_BNK, state), state


def _blocks(rows, slots: StateSlots, pool, layer):
    """Returns ``o [B, T, N, V]`` of blocks in order, and the pool with their states. A block is one
    chunk, whatever call prefills it, so that its bits do not depend on the call.
    """
    B, T, _, K = rows[0].shape
    one = lineage(Segments(*(jnp.zeros((B, T), jnp.int32),) * 2))
    heads = (jnp.moveaxis(y.astype(jnp.float32), 2, 1)[:, None] for y in rows)
    parts = _prepare(*heads, of=Lineage(*(y[:, None] for y in one)), continues=True)

    def block(carry, inputs):
        state, pool = carry
        part, load, save, keep = inputs
        found = jnp.where(load == EMPTY, 0.0, pool[layer, jnp.maximum(load, 0)])
        state = jnp.where(load == FOLLOW, state, found)
        new = part.u - part.w[..., :K] @ state
        out = part.q[..., :K] @ state + part.attn @ new
        state = part.keep[:, 0, 0, None, None] * state + part.k[:, 0].mT @ new
        pool = pool.at[layer, save].set(state, mode="drop")
        return (state, pool.at[layer, keep].set(state, mode="drop")), out

    xs = jax.tree.map(lambda y: y[:, 0], parts), slots.load, slots.save, slots.keep
    (_, pool), out = jax.lax.scan(block, (jnp.zeros(pool.shape[2:], pool.dtype), pool), xs)
    return jnp.moveaxis(out, 1, 2), pool
