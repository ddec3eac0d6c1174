"""Mixers whose memory is a state in place of keys: what gated delta nets (``delta.py``) and Mamba-2
(``ssm.py``) share. A state decays by one factor for each head, or by one for each channel of keys.

A head's state is ``S [K, V]``, and ``o_t = q_t S_t``. Mamba-2 adds to the decayed state; a gated
delta net corrects what the state already says of the key:

    S_t = exp(g_t) S_{t-1} + k_t beta_t v_t^T
    S_t = exp(g_t) S_{t-1} + k_t beta_t (v_t - k_t exp(g_t) S_{t-1})^T

A chunk of tokens reads the states before it by matmuls (arXiv 2405.21060, section 6); with
corrections it solves one triangular system (arXiv 2406.06484, section 3). In packed rows a segment
begins with an empty state, or with that of its parent. States are float32.

Axes: B rows or blocks, T tokens, Q chunks, C tokens of a chunk, N heads, K key dim, V value dim, M
taps of the short convolution, W its channels.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mint_jax import sharding
from mint_jax.models import paged
from mint_jax.models.attention import Segments
from mint_jax.models.config import ModelConfig, State
from mint_jax.models.layers import AXES
from mint_jax.models.paged import EMPTY, FOLLOW, StateSlots
from mint_jax.params import ParamSpec
from pallas_kernels import dispatch
from pallas_kernels.state_step import state_step

CHUNK = 64
# Queries, keys and values of every head, of the convolved channels
Heads = Callable[[jax.Array], tuple[jax.Array, jax.Array, jax.Array]]


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

    reads: jax.Array  # [B, N, C or 2C, K] decayed queries, and keys where the states correct
    v: jax.Array  # [B, N, C, V] values
    solve: jax.Array | None  # [B, N, C, C] from corrected values to those that are added
    attn: jax.Array  # [B, N, C, C] weights of the chunk's own values
    k: tuple[jax.Array, ...]  # [B, N, C, K] twice, keys that enter the two states after the chunk
    keep: jax.Array  # [B, N, 2, 2, 1 or K] decay from the states before to the states after


def recurrence(
    q_BTNK: jax.Array,
    k_BTNK: jax.Array,
    v_BTNV: jax.Array,
    decay: jax.Array,
    beta_BTN: jax.Array,
    of: Lineage,
    corrects: bool,
) -> jax.Array:
    """Returns ``o [B, T, N, V]`` float32 of packed rows.

    Args:
        decay: ``g [B, T, N]``, or ``[B, T, N, K]`` of channels; at most 0.
        corrects: values are corrected by the state, whose keys have norm 1; beta is 0 to 1 then.
    """
    (B, T, N, V), pad = v_BTNV.shape, -v_BTNV.shape[1] % CHUNK

    def chunks(x: jax.Array) -> jax.Array:
        # Padding continues the last segment and changes no result.
        x = jnp.pad(x, ((0, 0), (0, pad)) + ((0, 0),) * (x.ndim - 2), mode="edge")
        return x.reshape(B, -1, CHUNK, *x.shape[2:])

    heads = (
        jnp.moveaxis(chunks(x.astype(jnp.float32)), 3, 2)
        for x in (q_BTNK, k_BTNK, v_BTNV, decay, beta_BTN)
    )
    own, parent = chunks(of.own), chunks(of.parent)
    parts, enters, ends = _prepare(*heads, own=own, parent=parent, corrects=corrects)
    inputs = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (parts, enters))
    out = _outputs(*inputs, *_uses(enters[..., 1].any(-1), ends))
    return out.transpose(1, 0, 3, 2, 4).reshape(B, T + pad, N, V)[:, :T]


def _uses(reads: jax.Array, writes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns whether a row reads the parent's state in a chunk, ``[Q]``, and whether one writes it
    there that is read later. Arguments, of each row: ``[B, Q]``.
    """
    Q = reads.shape[1]

    def upcoming(x: jax.Array) -> jax.Array:
        at = jnp.where(x, jnp.arange(Q)[None], Q)
        later = jnp.pad(at, ((0, 0), (0, 1)), constant_values=Q)[:, 1:]
        return jax.lax.cummin(later, axis=1, reverse=True)

    read = upcoming(reads)
    used = writes & (read < Q) & (read <= upcoming(writes))
    return reads.any(0), used.any(0)


# Few chunks use the parent's state; the others need half of the products. The gradient is written
# out because that of a conditional adds zeros to each of its operands.
@jax.custom_vjp
def _outputs(parts: _Chunk, enters: jax.Array, reads: jax.Array, writes: jax.Array) -> jax.Array:
    """Returns the outputs of all chunks, ``[Q, B, N, C, V]``. ``enters``: see ``_entering``;
    ``reads``, ``writes``: see ``_uses``.
    """
    return _forward(parts, enters, reads, writes)[0]


def _forward(*inputs: Any) -> tuple[jax.Array, Any]:
    parts: _Chunk = inputs[0]

    def step(states: Any, inputs: Any) -> tuple[Any, Any]:
        (first, second), (part, enters, reads, writes) = states, inputs
        read = jnp.where(enters[:, None, None, :, 0, None], _read(part, first), 0.0)

        def both(read: jax.Array, kept: jax.Array) -> tuple[jax.Array, jax.Array]:
            of_second = enters[:, None, None, :, 1, None]
            read = jnp.where(of_second, _read(part, second), read)
            return read, kept + part.keep[:, :, 0, 1, :, None] * second

        kept = part.keep[:, :, 0, 0, :, None] * first
        read, kept = _where_used(reads, both, lambda *x: x, read, kept)
        out, new = _chunk(part, read)

        def written() -> Any:
            kept = (part.keep[:, :, 1, j, :, None] * states[j] for j in range(2))
            return sum(kept, start=part.k[1].mT @ new)

        after = kept + part.k[0].mT @ new, _where_used(writes, written, lambda: second)
        return after, (out, (states, read[:, :, -1], new))

    B, N, _, V = parts.v.shape[1:]
    empty = (jnp.zeros((B, N, parts.k[0].shape[-1], V), jnp.float32),) * 2
    _, (out, kept) = jax.lax.scan(step, empty, inputs)
    return out, (inputs, kept)


def _backward(saved: Any, g: jax.Array) -> tuple[_Chunk, None, None, None]:
    def step(after: Any, inputs: Any) -> tuple[Any, _Chunk]:
        (part, enters, reads, writes), (states, read, new), g = inputs
        last: jax.Array = after[1]
        rate = [[part.keep[:, :, i, j, :, None] for j in range(2)] for i in range(2)]

        def decay(d: jax.Array, state: jax.Array) -> jax.Array:
            by_key = jnp.sum(d * state, axis=-1)
            return by_key.reshape(*by_key.shape[:2], part.keep.shape[-1], -1).sum(-1)

        def written(d_new: jax.Array, before: jax.Array) -> Any:
            keep = [decay(last, state) for state in states]
            first, second = before + rate[1][0] * last, rate[1][1] * last
            return d_new + part.k[1] @ last, first, second, new @ last.mT, *keep

        none = jnp.zeros_like(part.keep[:, :, 0, 0])
        unwritten = last, jnp.zeros_like(part.k[1]), none, none
        d_new, first = part.attn.mT @ g + part.k[0] @ after[0], rate[0][0] * after[0]
        d_new, first, second, key, *keep = _where_used(
            writes, written, lambda *x: (*x, *unwritten), d_new, first
        )
        solve, of_read = None, g[:, :, None]
        if part.solve is not None:
            solve = d_new @ (part.v - read).mT
            d_new = part.solve.mT @ d_new
            of_read = jnp.stack([g, -d_new], axis=2)

        def of_state(j: int) -> jax.Array:
            masked = jnp.where(enters[:, None, None, :, j, None], of_read, 0.0)
            return masked.reshape(*part.reads.shape[:3], -1)

        def both(d_reads: jax.Array, second: jax.Array) -> Any:
            d_reads = d_reads + of_state(1) @ states[1].mT
            second = second + part.reads.mT @ of_state(1) + rate[0][1] * after[0]
            return d_reads, second, decay(after[0], states[1])

        first = first + part.reads.mT @ of_state(0)
        d_reads, second, of_second = _where_used(
            reads, both, lambda *x: (*x, none), of_state(0) @ states[0].mT, second
        )
        keep = jnp.stack([decay(after[0], states[0]), of_second, *keep], axis=2)
        keys = new @ after[0].mT, key
        attn, keep = g @ new.mT, keep.reshape(part.keep.shape)
        return (first, second), _Chunk(d_reads, d_new, solve, attn, keys, keep)

    zeros = jax.tree.map(lambda x: jnp.zeros_like(x[0]), saved[1][0])
    return jax.lax.scan(step, zeros, (*saved, g), reverse=True)[1], None, None, None


_outputs.defvjp(_forward, _backward)


def _where_used(used: jax.Array, run: Callable[..., Any], otherwise: Any, *args: Any) -> Any:
    # On GPUs the host waits for the predicate, in each chunk.
    if dispatch.platform_of_mesh() == "cuda":
        return run(*args)
    return jax.lax.cond(used, run, otherwise, *args)


def _read(part: _Chunk, state: jax.Array) -> jax.Array:
    """Returns what queries, and keys, read of a state, ``[B, N, 1 or 2, C, V]``."""
    B, N, C, V = part.v.shape
    return (part.reads @ state).reshape(B, N, -1, C, V)


def _chunk(part: _Chunk, read: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the outputs of a chunk and the values that it adds to states, ``[..., C, V]``, from
    what its queries and keys read, ``[..., 1 or 2, C, V]``.
    """
    new = part.v if part.solve is None else part.solve @ (part.v - read[..., 1, :, :])
    return read[..., 0, :, :] + part.attn @ new, new


def _prepare(q, k, v, g, beta, own, parent, corrects: bool, continues: bool = False):
    """Returns the parts of all chunks, ``[B, Q, N, ...]``; the states with which the lineages of
    their tokens enter, ``[B, Q, C, 2]``, see ``_entering``; and True for chunks with the last
    parent's end, ``[B, Q]``. ``continues``: the first chunk goes on with the running state.
    """
    B, Q, N, C, K = q.shape

    def heads(x: jax.Array) -> jax.Array:  # of [B Q, I, N, K]
        return jnp.moveaxis(x.reshape(B, Q, -1, N, x.shape[-1]), 3, 2)

    # Log decay from the lineage's first token in this chunk, weights of pairs of tokens, and decay
    # up to the states after the chunk: that of the last token's lineage, and that of its parent. A
    # segment without a parent may become one, so that both are the same then.
    of_blocks = own.reshape(B * Q, C), parent.reshape(B * Q, C)
    if by_channel := g.ndim == k.ndim:
        decays, *k_q = (jnp.moveaxis(x, 2, 3).reshape(B * Q, C, -1, K) for x in (g, k, q))
        pairs = [x.reshape(B, Q, -1, C, C) for x in _weighted(*of_blocks, decays, *k_q)]
    else:
        decays = jnp.moveaxis(g, 2, 3).reshape(B * Q, C, N, 1)
    log = heads(_sums(_ancestors(*of_blocks), decays))
    if not by_channel:
        between = jnp.where(_ancestors(own, parent)[:, :, None], log - log.mT, -jnp.inf)
        weights = jnp.exp(between)
        pairs = [(x @ k.mT) * weights for x in (q, k)]
    on, until = _until(*of_blocks, decays)
    leaves = jnp.exp(heads(until).reshape(B, Q, N, 2, C, -1))
    leaves = jnp.where(on.reshape(B, Q, 1, 2, C, 1), leaves, 0.0)
    whole = heads(_sums(on.reshape(B * Q, 2, C), decays))

    # States with which a token's lineage enters the chunk: the running one or the last parent's.
    none = own[:, :1, 0] if continues else jnp.full((B, 1), -2, jnp.int32)
    last, last_parent = (
        jnp.concatenate([none, x[:, :-1, -1]], axis=1)[..., None] for x in (own, parent)
    )
    enters = _entering(own, parent, last, last_parent)
    on = on.reshape(B, Q, 2, C)
    through = jnp.stack([enters[:, :, -1], jnp.any(on[:, :, 1, :, None] & enters, axis=2)], axis=2)
    keep = jnp.where(through[:, :, None, ..., None], jnp.exp(whole)[..., None, :], 0.0)
    stays = jnp.asarray([[0.0, 0.0], [0.0, 1.0]])[None, None, None, ..., None]
    inside = jnp.any(on, axis=-1)
    keep = jnp.where(
        inside[:, :, None, :, None, None], keep, stays
    )  # stays: a parent before the chunk

    decay, solve = jnp.exp(log), None
    reads, v = [decay * q], v
    if corrects:
        reads.append(decay * k)
        system = jnp.tril(pairs[1], -1) * beta[..., None]
        solve = _inverse(system) * beta[..., None, :]
    else:
        v = v * beta[..., None]
    reads = jnp.concatenate(reads, axis=-2)
    keys = leaves[:, :, :, 0] * k, leaves[:, :, :, 1] * k
    return _Chunk(reads, v, solve, pairs[0], keys, keep), enters, inside[..., 1]


def _ancestors(own: jax.Array, parent: jax.Array, strict: bool = False) -> jax.Array:
    """Returns True where token j of a block is i or its ancestor, ``[..., C, C]`` for i and j;
    ``strict``: not i.
    """
    same = own[..., :, None] == own[..., None, :]
    return jnp.tril(same | (parent[..., :, None] == own[..., None, :]), -int(strict))


def _entering(own: jax.Array, parent: jax.Array, last: jax.Array, above: jax.Array) -> jax.Array:
    """Returns True where a token's lineage comes from the token before a block, or from the end of
    that one's parent, ``[..., C, 2]``; ``last`` and ``above``: its segment and the parent's.
    """
    running = (own == last) | (parent == last)
    sibling = (parent == above) & (parent != own) & ~running
    return jnp.stack([running, sibling], axis=-1)


# Sums of decays ``g [Z, C, N, K]`` along lineages of blocks Z. Each adds numbers of one sign; as a
# difference of two sums it would lose digits where decays are strong. Arrays have few axes: with 8
# of them XLA's library of matmuls on CPUs crashes.
def _sums(over: jax.Array, g: jax.Array) -> jax.Array:
    # One pass of bfloat16 would round decays to 8 bits.
    highest = jax.lax.Precision.HIGHEST
    return jnp.einsum("zit,ztnk->zink", over.astype(g.dtype), g, precision=highest)


def _until(own: jax.Array, parent: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns which tokens are the last one of the block or its ancestors, and then which the end
    of its parent or that one's, ``[Z, 2 C]``; and sums from each token on to there, without its
    own, ``[Z, 2 C, N, K]``.
    """
    Z, C = own.shape
    above = own == parent[:, -1:]
    on = jnp.concatenate([(own == own[:, -1:]) | above, above], axis=-1)
    later = _ancestors(own, parent, strict=True).mT[:, None] & on.reshape(Z, 2, 1, C)
    return on, _sums(later.reshape(Z, 2 * C, C), g)


def _weighted(own, parent, g, k, q) -> list[jax.Array]:
    """Returns ``sum_K q_i k_j exp(g_{j+1} + ... + g_i)`` of tokens i and their ancestors j,
    ``[Z, N, C, C]``, where each channel has its decay; and the same with keys for q.

    Factors of i and j would overflow: the decay from a chunk's begin to j divides. From a token in
    between, which they have in halves of 2, 4, 8, ... tokens, both are at most 1.
    """
    blocks = [jnp.sum(x * k, axis=-1).reshape(-1, k.shape[2], 1, 1) for x in (q, k)]
    assert k.shape[1].bit_count() == 1
    while blocks[0].shape[-1] < k.shape[1]:
        blocks = _joined(own, parent, g, k, q, blocks)
    return blocks


@jax.checkpoint  # factors of all levels are 20 times the keys
def _joined(own, parent, g, k, q, blocks):
    """Joins neighbours of blocks on the diagonal, ``[Z, N, C, C]``, by the weights between."""
    C = blocks[0].shape[-1]
    own, parent, g, k, q = (x.reshape(-1, 2, C, *x.shape[2:]) for x in (own, parent, g, k, q))
    on, until = _until(own[:, 0], parent[:, 0], g[:, 0])
    keys = jnp.exp(until) * jnp.concatenate([k[:, 0], k[:, 0]], axis=1)
    since = jnp.exp(_sums(_ancestors(own[:, 1], parent[:, 1]), g[:, 1]))
    enters = _entering(own[:, 1], parent[:, 1], own[:, 0, -1:], parent[:, 0, -1:])
    related = (enters[..., None] & on.reshape(-1, 1, 2, C)).reshape(-1, 1, C, 2 * C)
    out = []
    for x, block in zip((q, k), blocks):
        pairs = jnp.einsum("zink,zjnk->znij", since * x[:, 1], keys)
        pairs = jnp.where(related, pairs, 0.0)
        between = pairs[..., :C] + pairs[..., C:]  # one of two is not 0
        upper = jnp.concatenate([block[0::2], jnp.zeros_like(between)], axis=-1)
        lower = jnp.concatenate([between, block[1::2]], axis=-1)
        out.append(jnp.concatenate([upper, lower], axis=-2))
    return out


# On CPUs the gradient of XLA's triangular_solve does not end at 256 systems of 64.
@jax.custom_jvp
def _inverse(below: jax.Array) -> jax.Array:
    """Returns the inverse of ``I + below [B, Q, N, C, C]``, whose argument is 0 on and above the
    diagonal: from those of its halves, which is a substitution made of matmuls. C is a power of 2.
    """
    half = below.shape[-1] // 2
    if not half:
        return jnp.ones_like(below)
    # Halves are further chunks: a mesh divides the axes of rows and of heads.
    halves = [below[..., :half, :half], below[..., half:, half:]]
    first, second = jnp.split(_inverse(jnp.concatenate(halves, axis=1)), 2, axis=1)
    matmul = functools.partial(jnp.matmul, precision="highest")
    corner = -matmul(matmul(second, below[..., half:, :half]), first)
    rows = [first, jnp.zeros_like(first)], [corner, second]
    return jnp.concatenate([jnp.concatenate(row, axis=-1) for row in rows], axis=-2)


@_inverse.defjvp
def _(primals, tangents):
    inverse = _inverse(*primals)
    return inverse, -(inverse @ tangents[0] @ inverse)


def short_convolution(x_BTW: jax.Array, w_MW: jax.Array, before_BTM: jax.Array) -> jax.Array:
    """Returns a causal convolution of each channel along lineages, float32; the last tap is the
    token's own. ``before_BTM``: see ``previous``.
    """
    T, taps = x_BTW.shape[1], range(1, before_BTM.shape[-1] + 1)

    def convolved(x: jax.Array, w: jax.Array, tap: Callable[..., jax.Array]) -> jax.Array:
        out = x * w[-1]
        for m in taps:
            i = before_BTM[..., m - 1, None]
            out += jnp.where(i < 0, 0.0, tap(x, m, i)) * w[-1 - m]
        return out

    def gathered(x: jax.Array, m: int, i: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x, jnp.maximum(i, 0), axis=1)

    def shifted(x: jax.Array, m: int, i: jax.Array) -> jax.Array:
        return jnp.pad(x, ((0, 0), (m, 0), (0, 0)))[:, :T]

    # Without siblings ancestors are neighbours. A gather's gradient is a scatter, which takes two
    # to four times as long.
    x, w = x_BTW.astype(jnp.float32), w_MW.astype(jnp.float32)[:, None, None]
    neighbours = jnp.arange(T)[None, :, None] - jnp.array(taps)[None, None]
    near = jnp.all((before_BTM < 0) | (before_BTM == neighbours))
    forms = (functools.partial(convolved, tap=tap) for tap in (shifted, gathered))
    return jax.lax.cond(near, *forms, x, w)


def taps_spec(d: State, L: int, dtype: Any) -> ParamSpec:
    """Returns the weights of the short convolution of ``L`` stacked layers."""
    axes = ("layers", None, None, AXES["qkv"][1])
    return ParamSpec((L, d.taps, 1, d.channels), axes, dtype, fan_in=d.taps)


def cache_specs(d: State, L: int, slots: int, dtype: Any) -> dict[str, Any]:
    """Returns the shapes of the states of ``L`` layers: ``tail [L, S, (M - 1) W]``, which the short
    convolution reads, and ``state [L, S, N, K, V]``.
    """
    # With taps as an axis of their own a TPU copies all tails in each call.
    return {
        "tail": jax.ShapeDtypeStruct((L, slots, (d.taps - 1) * d.channels), dtype),
        "state": jax.ShapeDtypeStruct((L, slots, d.heads, d.key, d.value), jnp.float32),
    }


def mix(
    x_BTW: jax.Array,
    taps_MW: jax.Array,
    heads_of: Heads,
    decay: jax.Array,
    beta_BTN: jax.Array,
    of: Lineage | None,
    cache: paged.Cache | None,
    cfg: ModelConfig,
    corrects: bool,
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array] | None]:
    """Convolves the channels of packed rows, or of rows with a cache, and runs the recurrence.

    Returns:
        ``o [B, T, N, V]`` float32, the values ``[B, T, N, V]``, and the pool.
    """
    d = cfg.state
    assert d is not None
    if cache is None:
        assert of is not None
        q, k, v = heads_of(short_convolution(x_BTW, taps_MW, previous(of, d.taps)))
        return recurrence(q, k, v, decay, beta_BTN, of, corrects), v, None
    # Slots count within a part of the mesh. In a tensor group the devices split the heads; each
    # convolves all channels, which is little.
    # Where it splits rows, XLA would gather the projections instead of moving few channels.
    x_BTW = sharding.constrain(x_BTW, "batch", None, "q_heads")
    rows, split = sharding.cache_axes(cache.heads)
    of_head = (rows, None, *sharding.fitting((d.heads,), split))
    of_tail, of_state = (None, rows), (None, rows, of_head[2])
    row, where = (rows, None, None), (cache.layer, cache.view.states)
    args, specs = (
        (x_BTW, taps_MW, cache.pool["tail"], *where),
        (row, (None, None), of_tail, (), (rows,)),
    )
    x, tail = sharding.over_devices(_convolved, args, specs, (row, of_tail))
    q, k, v = heads_of(x)
    args, specs = (q, k, v, decay, beta_BTN, cache.pool["state"], *where), (of_head,) * 5
    specs = (*specs, of_state, (), (rows,))
    run = functools.partial(_run, corrects=corrects, kernel=cfg.kernels.state_step)
    o, state = sharding.over_devices(run, args, specs, (of_head, of_state))
    return o, v, cache.pool | {"tail": tail, "state": state}


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


def _run(q_BTNK, k_BTNK, v_BTNV, decay, beta_BTN, pool, layer, slots, corrects: bool, kernel: str):
    """Returns ``o [B, T, N, V]`` and the pool with the states after the rows."""
    T = q_BTNK.shape[1]
    # A token that is not in use leaves the state as it is.
    used = (jnp.arange(T)[None] < slots.count[:, None])[..., None]
    decay = jnp.where(used if decay.ndim == 3 else used[..., None], decay, 0.0)
    beta = jnp.where(used, beta_BTN, 0.0)
    if T > 1:
        return _blocks((q_BTNK, k_BTNK, v_BTNV, decay, beta), slots, pool, layer, corrects)
    decay = decay.reshape(*beta.shape, -1)
    of_row = (x[:, 0] for x in (q_BTNK, k_BTNK, v_BTNV, decay, beta))
    where = {"pool": pool, "layer": layer, "load": slots.load, "save": slots.save}
    o, pool = state_step(*of_row, **where, corrects=corrects, implementation=kernel)
    return o[:, None], pool


def _blocks(rows, slots: StateSlots, pool, layer, corrects: bool):
    """Returns ``o [B, T, N, V]`` of blocks in order, and the pool with their states. A block is one
    chunk, whatever call prefills it, so that its bits do not depend on the call.
    """
    B, T, N, V = rows[2].shape
    one = jnp.zeros((B, 1, T), jnp.int32)
    heads = (jnp.moveaxis(y.astype(jnp.float32), 2, 1)[:, None] for y in rows)
    parts, *_ = _prepare(*heads, own=one, parent=one, corrects=corrects, continues=True)

    def block(carry, inputs):
        state, pool = carry
        part, load, save, keep = inputs
        found = jnp.where(load == EMPTY, 0.0, pool[layer, jnp.maximum(load, 0)])
        state = jnp.where(load == FOLLOW, state, found)
        out, new = _chunk(part, (part.reads @ state).reshape(N, -1, T, V))
        state = part.keep[:, 0, 0, :, None] * state + part.k[0].mT @ new
        pool = pool.at[layer, save].set(state, mode="drop")
        return (state, pool.at[layer, keep].set(state, mode="drop")), out

    xs = jax.tree.map(lambda y: y[:, 0], parts), slots.load, slots.save, slots.keep
    (_, pool), out = jax.lax.scan(block, (jnp.zeros(pool.shape[2:], pool.dtype), pool), xs)
    return jnp.moveaxis(out, 1, 2), pool
