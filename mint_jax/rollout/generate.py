"""Sampling for all policies in one compiled program: prefill of each prompt once, then lockstep decoding of its rollouts.

The cache has two parts: what the prompts' tokens left (keys and values, or latents), shared by the rollouts of a prompt
(read once a group, never copied), and the new tokens' own. Decoding runs inside one ``while_loop`` until every row is done
or ``steps`` are over, so the host is asked only when stop strings need it.

Axes: Q prompts (all blocks), G rollouts of a prompt, B = Q G rows, T prompt tokens, C new tokens, V vocab.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from flax import struct

from mint_jax import sharding
from mint_jax.lora.apply import BoundAdapters
from mint_jax.models.config import ModelConfig
from mint_jax.models.precision import as_stored
from mint_jax.models.transformer import Inputs, hidden_states, logits
from mint_jax.rollout.sample import SamplingParams, alternatives, penalised, sample


class Limits(NamedTuple):
    """Per-row stopping rules.

    Attributes:
        max_tokens: ``[B]`` int32.
        stop_ids: ``[B, n]`` int32, padded with -1; a row that draws one is done, and the token is kept.
    """

    max_tokens: jax.Array
    stop_ids: jax.Array


@struct.dataclass
class Decoding:
    """What changes from token to token.

    Attributes:
        step: tokens drawn so far by rows still running, scalar int32.
        tokens, logprobs, drawn_logprobs: ``[B, C]``; see ``rollout.sample``.
        lengths: ``[B]`` tokens drawn by each row.
        done: ``[B]`` bool.
        stopped: ``[B]`` bool: done by a stop id rather than by its length.
        cache: ``{"dense": {"k": [L, B, K, C, H], "v": ...}}`` of the new tokens, or what else the attention caches.
        routes: experts of the new tokens, ``[L, B, C, X]`` in ``route_dtype``; None unless asked for.
        prompt_tokens: ``[Q, V]`` bool, which tokens a prompt has; None without penalties.
        top: ids and log-probabilities of the likeliest tokens at each place, ``[B, C, K]``; None unless asked for.
    """

    step: jax.Array
    tokens: jax.Array
    logprobs: jax.Array
    drawn_logprobs: jax.Array
    lengths: jax.Array
    done: jax.Array
    stopped: jax.Array
    cache: Any
    routes: jax.Array | None = None
    prompt_tokens: jax.Array | None = None
    top: tuple[jax.Array, jax.Array] | None = None


def route_dtype(cfg: ModelConfig) -> Any:
    """The smallest type that holds an expert id."""
    return jnp.uint8 if cfg.experts is not None and cfg.experts.count <= 256 else jnp.uint16


def _split_routes(kept: Any, cfg: ModelConfig) -> tuple[Any, jax.Array | None]:
    """What ``hidden_states`` kept -> cache entries, and the MoE layers' experts."""
    cache = {kind: {name: x for name, x in entry.items() if name not in ("routes", "missed")} for kind, entry in kept.items()}
    routes = kept.get("moe", {}).get("routes")
    return placed(cache), None if routes is None else routes.astype(route_dtype(cfg))


def placed(cache: Any) -> Any:
    """A cache split over the mesh as ``sharding.cache_axes`` says: prefill leaves it so, decoding finds and keeps it so."""
    return jax.tree.map(lambda x: sharding.constrain(x, None, *sharding.cache_axes(x.shape[1:])), cache)


@functools.partial(jax.jit, static_argnames=("cfg", "rollouts", "new_tokens", "keep_routes", "keep_top"))
@as_stored
def prefill(
    params: Any,
    lora: BoundAdapters | None,
    prompts_QT: jax.Array,
    lengths_Q: jax.Array,
    sampling: SamplingParams,
    limits: Limits,
    *,
    cfg: ModelConfig,
    rollouts: int,
    new_tokens: int,
    keep_routes: bool = False,
    keep_top: int = 0,
) -> tuple[Any, Decoding, jax.Array | None]:
    """Runs every prompt once and draws the first token of each of its rollouts.

    Args:
        prompts_QT: right-padded.
        lengths_Q: at least 1.
        rollouts: G; rows of a prompt are consecutive.
        new_tokens: C, the capacity for new tokens.
        keep_routes: record the experts that every token visits.
        keep_top: K, how many of the likeliest tokens to record at each place.

    Returns:
        The prompts' cache, the state of decoding after one token, and the prompts' experts ``[L, Q, T, X]`` if asked for.
    """
    Q, T = prompts_QT.shape
    chex.assert_shape([lengths_Q, limits.max_tokens], [(Q,), (Q * rollouts,)])
    positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (Q, T))
    h, kept = hidden_states(params, lora, Inputs(prompts_QT, positions), cfg, keep_kv=True, keep_routes=keep_routes)
    prompt_cache, prompt_routes = _split_routes(kept, cfg)
    last = jnp.take_along_axis(h, (lengths_Q - 1)[:, None, None], axis=1)
    first = jnp.repeat(logits(params, lora, last)[:, 0], rollouts, axis=0)
    rows = Q * rollouts

    def blank(entry: jax.Array) -> jax.Array:  # [L, Q, ..., T, X] -> zeros [L, B, ..., C, X]
        return jnp.zeros((entry.shape[0], rows, *entry.shape[2:-2], new_tokens, entry.shape[-1]), entry.dtype)

    K = min(keep_top, cfg.vocab_size)
    state = Decoding(
        step=jnp.int32(0),
        tokens=jnp.zeros((rows, new_tokens), jnp.int32),
        logprobs=jnp.zeros((rows, new_tokens), jnp.float32),
        drawn_logprobs=jnp.zeros((rows, new_tokens), jnp.float32),
        lengths=jnp.zeros((rows,), jnp.int32),
        done=limits.max_tokens <= 0,
        stopped=jnp.zeros((rows,), bool),
        cache=placed(jax.tree.map(blank, prompt_cache)),
        routes=None if prompt_routes is None else blank(prompt_routes),
        top=(jnp.zeros((rows, new_tokens, K), jnp.int32), jnp.zeros((rows, new_tokens, K), jnp.float32)) if K else None,
        prompt_tokens=None if sampling.penalties is None else _tokens_of(prompts_QT, lengths_Q, cfg.vocab_size),
    )
    return prompt_cache, _draw(state, first, sampling, limits), prompt_routes


def _tokens_of(prompts_QT: jax.Array, lengths_Q: jax.Array, vocab: int) -> jax.Array:
    Q, T = prompts_QT.shape
    ids = jnp.where(jnp.arange(T)[None] < lengths_Q[:, None], prompts_QT, vocab)
    return jnp.zeros((Q, vocab), bool).at[jnp.arange(Q)[:, None], ids].set(True, mode="drop")


def _draw(state: Decoding, logits_BV: jax.Array, sampling: SamplingParams, limits: Limits) -> Decoding:
    """Draws the next token of every row that is not done."""
    changed_BV = None
    if sampling.penalties is not None:
        assert state.prompt_tokens is not None
        prompt_BV = jnp.repeat(state.prompt_tokens, logits_BV.shape[0] // state.prompt_tokens.shape[0], axis=0)
        changed_BV = penalised(logits_BV, sampling.penalties, prompt_BV, state.tokens, state.lengths)
    token, logprob, drawn = sample(logits_BV, sampling, state.step, changed_BV)
    top = state.top
    if top is not None:
        top = jax.tree.map(lambda all_, one: all_.at[:, state.step].set(one), top, alternatives(logits_BV, top[0].shape[-1]))
    # Rows that are done go on being computed, since shapes are fixed, and nothing of theirs is kept.
    live = ~state.done
    hit = jnp.any(token[:, None] == limits.stop_ids, axis=-1) & live
    lengths = state.lengths + live
    return dataclasses.replace(
        state,
        step=state.step + 1,
        tokens=state.tokens.at[:, state.step].set(jnp.where(live, token, 0)),
        logprobs=state.logprobs.at[:, state.step].set(jnp.where(live, logprob, 0.0)),
        drawn_logprobs=state.drawn_logprobs.at[:, state.step].set(jnp.where(live, drawn, 0.0)),
        lengths=lengths,
        done=state.done | hit | (lengths >= limits.max_tokens),
        stopped=state.stopped | hit,
        top=top,
    )


@functools.partial(jax.jit, static_argnames=("cfg",), donate_argnames=("state",))
@as_stored
def decode(
    params: Any,
    lora: BoundAdapters | None,
    prompt_cache: Any,
    lengths_Q: jax.Array,
    state: Decoding,
    sampling: SamplingParams,
    limits: Limits,
    steps: jax.Array,
    *,
    cfg: ModelConfig,
) -> Decoding:
    """Draws up to ``steps`` more tokens a row, stopping early when all rows are done."""
    # ``state`` is donated: each step writes one position of the cache where it lies. Its loop runs on the device, so the host learns
    # how far it is only every ``steps`` tokens, and waits once for all of them.
    B, C = state.tokens.shape
    until = jnp.minimum(state.step + steps, C)
    prompt_of_row = jnp.repeat(lengths_Q, B // lengths_Q.shape[0])

    def body(state: Decoding) -> Decoding:
        # The token drawn last is the one that no cache has yet: this step reads it, keeps what it leaves, and draws the next.
        token = jax.lax.dynamic_slice(state.tokens, (0, state.step - 1), (B, 1))
        position = (prompt_of_row + state.step - 1)[:, None]
        cache = {kind: {name: (part, state.cache[kind][name]) for name, part in parts.items()} for kind, parts in prompt_cache.items()}
        lengths = (lengths_Q, state.step - 1)
        record = state.routes is not None
        h, kept = hidden_states(params, lora, Inputs(token, position, cache=cache, lengths=lengths), cfg, keep_kv=True, keep_routes=record)
        new = _split_routes(kept, cfg)
        cache, routes = _write((state.cache, state.routes), new, state.step - 1)
        state = dataclasses.replace(state, cache=placed(cache), routes=routes)
        return _draw(state, logits(params, lora, h)[:, 0], sampling, limits)

    return jax.lax.while_loop(lambda s: (s.step < until) & ~jnp.all(s.done), body, state)


def _write(cache: Any, entries: Any, at: jax.Array) -> Any:
    """Puts ``[L, B, ..., 1, X]`` entries at position ``at`` of ``[L, B, ..., C, X]`` caches."""

    def put(old: jax.Array, entry: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(old, entry.astype(old.dtype), at, axis=old.ndim - 2)

    return jax.tree.map(put, cache, entries)
