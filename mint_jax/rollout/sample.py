"""Choosing the next token on the device: greedy, temperature, top-k, top-p, min-p, one seed a row.

A row's token depends on its logits, its seed and its position only: batching, other rows and padding change nothing.
Filters are applied in this order, each on what the one before kept: temperature, top-k, top-p, min-p. Ties at the edge
of a filter are kept.

Axes: B rows, V vocab.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

_BLOCK = 256  # inverse-CDF sampling looks for a block of this many tokens, then inside it


class SamplingParams(NamedTuple):
    """Per-row arrays ``[B]``.

    Attributes:
        temperature: 0 is greedy.
        top_k: keep the k likeliest; 0 keeps all.
        top_p: keep the smallest set with at least this mass; 1 keeps all.
        min_p: drop tokens less likely than this fraction of the likeliest; 0 keeps all.
        seed: uint32.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    seed: jax.Array


def sample(logits_BV: jax.Array, params: SamplingParams, position: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Draws one token a row.

    Args:
        logits_BV: float32.
        position: scalar or ``[B]`` int32, number of the token being drawn; with the seed it names the random draw.

    Returns:
        tokens ``[B]`` int32 and their log-probabilities ``[B]`` under the model itself (temperature 1, no filter),
        which is what a trainer's importance ratio needs.
    """
    greedy = jnp.argmax(logits_BV, axis=-1)
    hot = jnp.where(params.temperature > 0, params.temperature, 1.0)[:, None]
    scaled = logits_BV / hot
    filtering = jnp.any((params.top_k > 0) | (params.top_p < 1) | (params.min_p > 0))
    scaled = jax.lax.cond(filtering, lambda z: _filter(z, params), lambda z: z, scaled)
    weights = jnp.exp(scaled - jnp.max(scaled, axis=-1, keepdims=True))
    drawn = _inverse_cdf(weights, _uniform(params.seed, position))
    token = jnp.where(params.temperature > 0, drawn, greedy).astype(jnp.int32)
    logprob = jnp.take_along_axis(logits_BV, token[:, None], axis=1)[:, 0] - jax.nn.logsumexp(logits_BV, axis=-1)
    return token, logprob


def _uniform(seed_B: jax.Array, position: jax.Array) -> jax.Array:
    def one(seed, position):
        return jax.random.uniform(jax.random.fold_in(jax.random.key(seed), position))

    return jax.vmap(one)(seed_B, jnp.broadcast_to(position, seed_B.shape))


def _inverse_cdf(weights_BV: jax.Array, u_B: jax.Array) -> jax.Array:
    """The first token whose cumulative weight exceeds ``u * total``, in two levels; never one of weight 0."""
    B, V = weights_BV.shape
    blocks = -(-V // _BLOCK)
    w = jnp.pad(weights_BV, ((0, 0), (0, blocks * _BLOCK - V))).reshape(B, blocks, _BLOCK)
    block, left = _first_above(jnp.sum(w, axis=-1), u_B)
    inside = jnp.take_along_axis(w, block[:, None, None], axis=1)[:, 0]
    token, _ = _first_above(inside, left)
    return block * _BLOCK + token


def _first_above(w_BN: jax.Array, u_B: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Index whose cumulative weight first exceeds ``u * total``, and where in (0, 1) of that entry ``u`` falls."""
    upto = jnp.cumsum(w_BN, axis=-1)
    goal = u_B * upto[:, -1]
    last = w_BN.shape[1] - 1 - jnp.argmax((w_BN > 0)[:, ::-1], axis=-1)  # rounding must not step past the last candidate
    index = jnp.minimum(jnp.sum(upto <= goal[:, None], axis=-1), last)
    own = jnp.take_along_axis(w_BN, index[:, None], axis=1)[:, 0]
    before = jnp.take_along_axis(upto, index[:, None], axis=1)[:, 0] - own
    return index, jnp.clip((goal - before) / own, 0.0, 1.0)


def _filter(z_BV: jax.Array, params: SamplingParams) -> jax.Array:
    V = z_BV.shape[1]
    k = jnp.where(params.top_k > 0, jnp.minimum(params.top_k, V), V)
    z = _keep_above(z_BV, jnp.ones_like(z_BV), k.astype(jnp.float32))
    p = jax.nn.softmax(z, axis=-1)
    z = jnp.where((params.top_p < 1)[:, None], _keep_above(z, p, params.top_p), z)
    return jnp.where(p >= params.min_p[:, None] * jnp.max(p, axis=-1, keepdims=True), z, -jnp.inf)


def _keep_above(z_BV: jax.Array, mass_BV: jax.Array, goal_B: jax.Array) -> jax.Array:
    """Keeps the largest logits: the fewest (with ties) whose mass reaches ``goal``; the rest become -inf.

    A binary search over the 32 bits of a monotone integer image of the logits finds the exact threshold without a sort.
    """
    key = _ordered(z_BV)

    def narrow(i, low):  # the largest threshold t with mass{key >= t} >= goal
        trial = low | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        mass = jnp.sum(jnp.where(key >= trial[:, None], mass_BV, 0.0), axis=-1)
        return jnp.where(mass >= goal_B, trial, low)

    threshold = jax.lax.fori_loop(0, 32, narrow, jnp.zeros(z_BV.shape[0], jnp.uint32))
    return jnp.where(key >= threshold[:, None], z_BV, -jnp.inf)


def _ordered(z: jax.Array) -> jax.Array:
    """float32 -> uint32 such that order is kept; 0 and -0 are equal."""
    z = jnp.where(z == 0, 0.0, z)
    bits = jax.lax.bitcast_convert_type(z, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(0x80000000))
