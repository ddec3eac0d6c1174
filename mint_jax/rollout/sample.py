"""Selection of the next token on the device: biases and penalties, then temperature, top-k, top-p
and min-p, each applied to the output of the one before. The draw is a function of a row's logits,
its seed, the position and the token's id only. Ties at the edge of a filter are kept, and the most
likely token passes every filter. Settings within ``ranges.RANGES`` give finite log-probabilities.

Axes: B rows, V vocab, C tokens drawn so far, n biases of a row, K alternatives of a token.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from mint_jax.sharding import one_device
from pallas_kernels.draw import draw
from pallas_kernels.draw.xla import exponential

# Rows that a CPU filters at once. A filter makes five arrays the size of its logits: all 32 rows of
# SmolLM2 at once take 19 MB more.
FILTER_ROWS = 8


class Penalties(NamedTuple):
    """Per-row changes of logits by earlier tokens and by token id.

    Attributes:
        repetition: ``[B]``; the logit of every token in the prompt or drawn so far is divided by it
            if positive and multiplied if negative: CTRL (Keskar et al. 2019, arXiv:1909.05858,
            section 4.1), as in transformers. 1 has no effect.
        frequency: ``[B]``; subtracted once for each time that a token was drawn, as in OpenAI's
            API.
        presence: ``[B]``; subtracted once if a token was drawn at all.
        bias_ids, bias: ``[B, n]``; added to the logits of these tokens; ids of -1 are padding.
    """

    repetition: Any
    frequency: Any
    presence: Any
    bias_ids: Any
    bias: Any


class SamplingParams(NamedTuple):
    """Sampling settings as arrays ``[B]``.

    Attributes:
        temperature: 0 is greedy.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set with at least this probability; 1 keeps all.
        min_p: drop tokens below this fraction of the highest probability; 0 keeps all.
        seed: uint32.
        penalties: None if no row has any: counting drawn tokens is a pass over the vocabulary.
    """

    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any
    seed: Any
    penalties: Penalties | None = None


def penalised(
    logits_BV: jax.Array,
    penalties: Penalties,
    tokens_BC: jax.Array,
    prompt_BC: jax.Array,
    drawn_BC: jax.Array,
) -> jax.Array:
    """Returns the logits with biases and penalties applied, float32.

    Args:
        tokens_BC: int32, the tokens of each row so far, in any order.
        prompt_BC, drawn_BC: bool, positions of prompt tokens and of drawn tokens.
    """
    chex.assert_equal_shape([tokens_BC, prompt_BC, drawn_BC])
    chex.assert_equal_shape([penalties.bias_ids, penalties.bias])
    V, row = logits_BV.shape[1], jnp.arange(logits_BV.shape[0])[:, None]
    prompt_BV = jnp.zeros(logits_BV.shape, bool).at[row, tokens_BC].max(prompt_BC)
    none_BV = jnp.zeros(logits_BV.shape, jnp.float32)
    drawn_BV = none_BV.at[row, tokens_BC].add(drawn_BC.astype(jnp.float32))
    ids = jnp.where(penalties.bias_ids < 0, V, penalties.bias_ids)
    z_BV = logits_BV.at[row, ids].add(penalties.bias, mode="drop")
    again = penalties.repetition[:, None]
    lowered = jnp.where(z_BV > 0, z_BV / again, z_BV * again)
    z_BV = jnp.where(prompt_BV | (drawn_BV > 0), lowered, z_BV)
    z_BV = z_BV - penalties.frequency[:, None] * drawn_BV
    return z_BV - penalties.presence[:, None] * (drawn_BV > 0)


class Changes(NamedTuple):
    """A change of logits ``[B, V]`` before the draw, such as ``penalised``; ``rows``: ``[B]`` bool,
    rows that may change.
    """

    rows: jax.Array
    apply: Callable[[jax.Array], jax.Array]


def sample(
    logits_BV: jax.Array,
    params: SamplingParams,
    position: jax.Array,
    changes: Changes | None = None,
    rows: jax.Array | None = None,
    kernel: str = "xla",
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Draws one token a row. Returns tokens ``[B]`` int32; their log-probabilities ``[B]`` under
    the unmodified model (temperature 1, no filter); and those under the sampled distribution, which
    a trainer's importance ratio needs. The two are equal in greedy decoding, and at temperature 1
    without filters.

    Args:
        logits_BV: float32. A row with NaN draws token 0, and so does one with +inf unless greedy;
            neither has a finite log-probability.
        position: scalar or ``[B]`` int32, number of the token being drawn; seed and position
            determine the noise.
        changes: change of the logits that tokens are drawn from.
        rows: int32, number of rows in use, at the front; the output of the others is undefined.
            None: all.
        kernel: implementation of ``draw``.
    """
    chex.assert_rank(logits_BV, 2)
    chex.assert_shape(list(params[:5]), logits_BV.shape[:1])
    keys = _keys(params.seed, position)
    # XLA flushes temperatures below 1.2e-38 to 0, other kernels do not: they are greedy.
    hot = params.temperature >= jnp.finfo(jnp.float32).tiny
    params = params._replace(temperature=jnp.where(hot, params.temperature, 0.0))
    filtered = hot & ((params.top_k > 0) | (params.top_p < 1) | (params.min_p > 0))
    changed = filtered if changes is None else filtered | changes.rows
    take = functools.partial(draw, keys=keys, rows=rows, implementation=kernel)
    over = jnp.where(hot, params.temperature, 1.0)[:, None]

    def filter_(
        z_BV: jax.Array, over: jax.Array, filtered: jax.Array, params: SamplingParams
    ) -> jax.Array:
        kept = _filter(z_BV, over, params)
        return jnp.where(filtered[:, None] & (kept == -jnp.inf), -jnp.inf, z_BV)

    def filter_in_turn(z_BV: jax.Array, *of_rows: Any) -> jax.Array:
        def one(row: Any) -> jax.Array:
            return filter_(*jax.tree.map(lambda x: x[None], row))[0]

        return jax.lax.map(one, (z_BV, *of_rows), batch_size=FILTER_ROWS)

    def of_all(
        total: jax.Array, temperature: jax.Array, keep: Any = filter_
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        z_BV = logits_BV if changes is None else changes.apply(logits_BV)
        of_rows = over, filtered, params._replace(penalties=None)
        z_BV = jax.lax.cond(jnp.any(filtered), keep, lambda z, *_: z, z_BV, *of_rows)
        token, top, _, _ = take(z_BV, temperature)
        logprob = _at(logits_BV, token) - total
        plain = ~hot | ((params.temperature == 1) & ~changed)

        def of_drawn(z_BV: jax.Array) -> jax.Array:
            z_BV = (z_BV - top[:, None]) / over
            return jnp.where(plain, logprob, _at(z_BV, token) - jax.nn.logsumexp(z_BV, axis=-1))

        return token, logprob, jax.lax.cond(jnp.all(plain), lambda z: logprob, of_drawn, z_BV)

    def of_changed() -> tuple[jax.Array, jax.Array, jax.Array]:
        # Unchanged rows are drawn first, so that other rows' settings never select the arithmetic
        # of a row. Noise costs nine tenths of the time, so it is made once per row: for changed
        # rows the first draw is greedy and only yields the total.
        first = take(logits_BV, jnp.where(changed, 0.0, params.temperature))
        at = _at(logits_BV, first.token)
        logprob = at - first.total
        own = (at - first.top) / over[:, 0] - first.warm
        plain = first.token, logprob, jnp.where(hot & (params.temperature != 1), own, logprob)

        def with_changes() -> tuple[jax.Array, jax.Array, jax.Array]:
            keep = filter_in_turn if one_device() else filter_
            changed_ones = of_all(first.total, jnp.where(changed, params.temperature, 0.0), keep)
            return tuple(jnp.where(changed, x, y) for x, y in zip(changed_ones, plain))  # type: ignore[return-value]

        return jax.lax.cond(jnp.any(changed), with_changes, lambda: plain)

    # On CPUs a branch skips passes over the vocabulary that no row needs. Greedy decoding of 8 rows
    # of 49,152 logits with one in use fell from 0.64 ms to 0.17, and drawing 32 from 20-32 ms to 4.
    # On TPUs libtpu 0.0.42.1 crashes on a branch within a branch (memory assignment, Qwen3-30B-A3B
    # on 4 x 4 chips).
    return jax.lax.platform_dependent(
        cpu=of_changed,
        default=lambda: of_all(jax.nn.logsumexp(logits_BV, axis=-1), params.temperature),
    )


def alternatives(
    logits_BV: jax.Array, count: int, rows: jax.Array | None = None, kernel: str = "xla"
) -> tuple[jax.Array, jax.Array]:
    """Returns each row's most likely tokens, ``[B, count]`` int32, and their log-probabilities
    under the unmodified model, bit for bit those of ``sample``.
    """
    B = logits_BV.shape[0]
    top_BK, ids_BK = jax.lax.top_k(logits_BV, count)
    greedy = jnp.zeros((B,), jnp.float32), jnp.zeros((B, 2), jnp.uint32)
    return ids_BK, top_BK - draw(logits_BV, *greedy, rows, implementation=kernel).total[:, None]


@functools.partial(jax.jit, static_argnames=("vocab",))
def noise(seed_B: jax.Array, position_B: jax.Array, vocab: int) -> jax.Array:
    """Returns the Gumbel noise that ``sample`` adds to a row's logits over the temperature, ``[B,
    V]`` float32.
    """
    return -jnp.log(exponential(_keys(seed_B, position_B), vocab))


def _keys(seed_B: jax.Array, position: jax.Array) -> jax.Array:
    """Returns the PRNG key data of each row's draw, ``[B, 2]`` uint32."""

    def of(seed: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.key_data(
            jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), position)
        )

    return jax.vmap(of)(seed_B, jnp.broadcast_to(position, seed_B.shape))


def _at(z_BV: jax.Array, token_B: jax.Array) -> jax.Array:
    return jnp.take_along_axis(z_BV, token_B[:, None], axis=1)[:, 0]


def _filter(z_BV: jax.Array, over_B1: jax.Array, params: SamplingParams) -> jax.Array:
    V = z_BV.shape[1]
    k = jnp.where(params.top_k > 0, jnp.minimum(params.top_k, V), V)
    z = _keep_above(z_BV, jnp.ones_like(z_BV), k.astype(jnp.float32))
    p = jax.nn.softmax((z - jnp.max(z, axis=-1, keepdims=True)) / over_B1, axis=-1)
    z = jnp.where((params.top_p < 1)[:, None], _keep_above(z, p, params.top_p), z)
    return jnp.where(p >= params.min_p[:, None] * jnp.max(p, axis=-1, keepdims=True), z, -jnp.inf)


def _keep_above(z_BV: jax.Array, mass_BV: jax.Array, goal_B: jax.Array) -> jax.Array:
    """Keeps the fewest largest logits, with ties, whose mass reaches ``goal``; others are -inf."""
    # Logits are ordered before the temperature is applied: a large one makes unequal logits equal
    # in float32. A binary search over the 32 bits of a monotone integer image of the logits finds
    # the exact threshold, in a sixteenth of a sort's time (32 rows of 49,152 logits on two cores:
    # 22 ms instead of 356).
    key = _ordered(z_BV)

    def narrow(i, low):  # the largest threshold t with mass{key >= t} >= goal
        trial = low | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        mass = jnp.sum(jnp.where(key >= trial[:, None], mass_BV, 0.0), axis=-1)
        return jnp.where(mass >= goal_B, trial, low)

    threshold = jax.lax.fori_loop(0, 32, narrow, jnp.zeros(z_BV.shape[0], jnp.uint32))
    # A goal that rounds to 0 would be reached by no token.
    threshold = jnp.minimum(threshold, jnp.max(key, axis=-1))
    return jnp.where(key >= threshold[:, None], z_BV, -jnp.inf)


def _ordered(z: jax.Array) -> jax.Array:
    """Maps float32 to uint32 monotonically; 0 and -0 map to the same value."""
    z = jnp.where(z == 0, 0.0, z)
    bits = jax.lax.bitcast_convert_type(z, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(0x80000000))
