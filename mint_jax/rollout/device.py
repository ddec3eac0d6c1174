"""The engine's programs on the device: prefill, decoding, page swaps. Each is a pure function of
the parameters, the adapter stacks, the pool and a *plan* of small arrays from the host. Shapes
depend only on the number of rows and of blocks. A prompt except its last token is prefilled in
blocks of PAGE tokens; decoding reads that token first, so all samples of a prompt start alike.

Axes: R rows, C blocks of prefill, D table entries, U pages, K steps of a dispatch, V vocab, n stop
ids or biases, A alternatives.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from mint_jax import sharding
from mint_jax.lora.tree import Stacks
from mint_jax.lora.view import attach_rows
from mint_jax.models import paged as paged_lib
from mint_jax.models.attention import split, unsplit
from mint_jax.models.config import ModelConfig
from mint_jax.models.paged import PAGE, StateSlots, Teams, View
from mint_jax.models.precision import as_stored
from mint_jax.models.transformer import (
    DecoderInputs,
    cache_heads,
    cache_specs,
    hidden_states,
    logits,
)
from mint_jax.rollout.sample import (
    Changes,
    Penalties,
    SamplingParams,
    alternatives,
    penalised,
    sample,
)
from pallas_kernels import dispatch

# Maximum tokens that a row draws in one dispatch; the host sees them only after the dispatch.
STEPS = 16
# The logits of a prefill are computed in this many slices of its positions. All at once are 310 MB
# for 16 blocks and a vocabulary of 152k.
SCORE_PARTS = 4
# Maximum number of alternative tokens at each position; OpenAI's API has the same limit.
ALTERNATIVES = 20

# {"tokens": [1, U, PAGE, 1] int32, "dense": {"k": [L, U, K, PAGE, H], "v": ...}, ...}
Pool = dict[str, Any]


class PrefillPlan(NamedTuple):
    """The plan of a prefill.

    Attributes:
        tokens: ``[C, PAGE]`` int32; entries after the prompt's end are ignored.
        start: ``[C]`` position of each block's first token, a multiple of PAGE.
        page: ``[C]`` page to write; out of range for unused blocks.
        table: ``[C, D]`` pages of the prompt.
        near_table, near_page: ``table`` and ``page`` of layers with a window.
        slots: ``[C]`` adapter slot, keyed by rank bucket; -1 is no adapter of that bucket.
        used: int32 scalar, places up to the last token; CPU kernels skip the places after it.
    """

    tokens: Any
    start: Any
    page: Any
    table: Any
    slots: Any
    used: Any
    scoring: "PromptScoring | None" = None
    states: StateSlots | None = None
    near_table: Any = None
    near_page: Any = None


class PromptScoring(NamedTuple):
    """Tokens to score or draw at each position of a prefill.

    Attributes:
        targets: ``[C, PAGE, 1 + A]`` int32: the prompt's next token, then further ids or -1.
        draws: ``[C]`` int32, number of tokens to draw at each position, at most A.
        seed: ``[C]`` uint32.
    """

    targets: Any
    draws: Any
    seed: Any


class Scores(NamedTuple):
    """Log-probabilities of next tokens in a prefill, under the unmodified model: of the targets
    ``[C, PAGE, 1 + A]``, of the most likely tokens in descending order and of the drawn ones ``[C,
    PAGE, A]``.
    """

    logprobs: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array
    drawn_ids: jax.Array
    drawn_logprobs: jax.Array


class DecodePlan(NamedTuple):
    """The plan of a decode dispatch.

    Attributes:
        token: ``[R]`` int32, the token that each row reads first.
        table: ``[R, D]`` pages of the prefix; the row's own pages begin at the next whole run.
        prefix, own: ``[R]`` cached tokens of the prompt and of the row itself.
        first: ``[R]`` first run that the row itself attends to; after its prefix in a team.
        until, limit: ``[R]`` own tokens that the row may reach in this dispatch (0 for unused
            rows), and ever.
        stop_ids: ``[R, n]``, padded with -1.
        top: ``[R]`` bool, rows that want alternatives.
        allowed: ``[R, ceil(V / 32)]`` uint32, a bit for each next token of a row that is ``bound``
            by a grammar.
        source, state: ``[R]`` slots of the states that rows read first, and that they keep.
        near_table: ``table`` of layers with a window.
    """

    token: Any
    table: Any
    prefix: Any
    own: Any
    first: Any
    until: Any
    limit: Any
    stop_ids: Any
    top: Any
    allowed: Any
    bound: Any
    slots: Any
    sampling: SamplingParams
    teams: Teams
    source: Any = None
    state: Any = None
    near_table: Any = None


class PageMoves(NamedTuple):
    """Pages built from two others each: ``to[p] = low[begin + p]`` for ``p < cut``, and ``high[p -
    cut]`` after that. All ``[n]`` int32; entries whose ``to`` is out of range are ignored.
    """

    low: Any
    high: Any
    begin: Any
    cut: Any
    to: Any


class Drawn(NamedTuple):
    """Output of a decode dispatch.

    Attributes:
        tokens, logprobs, drawn_logprobs: ``[R, K]``; see ``rollout.sample``.
        count: ``[R]`` number of tokens that each row drew.
        stopped: ``[R]`` bool, the row's last token is a stop id.
        top_ids, top_logprobs: ``[R, K, A]``, for rows with ``top``.
    """

    tokens: jax.Array
    logprobs: jax.Array
    drawn_logprobs: jax.Array
    count: jax.Array
    stopped: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array


def lanes(mesh: Mesh) -> int:
    """Returns the multiple that key widths are padded to: 128 on TPU, 1 elsewhere."""
    # If the last dimension is not a multiple of 128, the TPU layout makes the pages minor and
    # transposes the whole pool at each call: for heads of 64 two copies of twice its bytes.
    return 128 if mesh.devices.flat[0].platform == "tpu" else 1


def pool_specs(
    cfg: ModelConfig,
    pages: int,
    dtype: Any,
    routes: bool,
    lanes: int = 1,
    states: int = 0,
    near: int | None = None,
) -> Any:
    """Returns a pool's shapes: ``transformer.cache_specs``, widths rounded up to ``lanes``."""

    def of(x: Any) -> Any:
        wide = lanes if jnp.issubdtype(x.dtype, jnp.floating) else 1
        return jax.ShapeDtypeStruct((*x.shape[:-1], -(-x.shape[-1] // wide) * wide), x.dtype)

    specs = cache_specs(cfg, pages, dtype, routes, states, near)
    padded = {name: x for name, x in specs.items() if kind_of(name, cfg) != "states"}
    specs |= jax.tree.map(of, padded)
    return {"tokens": jax.ShapeDtypeStruct((1, pages, PAGE, 1), jnp.int32)} | specs


def kind_of(name: str, cfg: ModelConfig) -> str:
    """Returns the kind of places in a part of a pool: ``pages``, ``near`` pages or ``states``."""
    if name not in cfg.stacks:
        return "pages"
    return "states" if cfg.has_state(name) else "near" if cfg.has_window(name) else "pages"


def kinds(cfg: ModelConfig) -> tuple[str, ...]:
    """Returns the kinds of places in a base's pool."""
    return tuple(dict.fromkeys(["pages", *(kind_of(stack, cfg) for stack in cfg.stacks)]))


def part_of(pool: Pool, cfg: ModelConfig, kind: str) -> Pool:
    """Returns the parts of a pool with places of a kind."""
    return {name: x for name, x in pool.items() if kind_of(name, cfg) == kind}


def page_bytes(
    cfg: ModelConfig, dtype: Any, routes: bool, lanes: int = 1, near: int | None = None
) -> int:
    """Returns the bytes of one page, with ``near`` near pages; None: one."""
    leaves = jax.tree.leaves(pool_specs(cfg, 1, jnp.dtype(dtype), routes, lanes, near=near))
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)


def pool_shardings(cfg: ModelConfig, specs: Any, mesh: Mesh) -> Any:
    """Returns a pool's shardings: pages split as rows are, heads of keys and states as those of the
    projections.
    """

    def of(axes: tuple[str | None, ...]) -> NamedSharding:
        return NamedSharding(mesh, sharding.partition(axes, mesh))

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        _, axes = _split(specs, cfg)
    return jax.tree.map(of, axes, is_leaf=lambda x: isinstance(x, tuple))


def empty_pool(cfg: ModelConfig, mesh: Mesh, *sizes: Any) -> Pool:
    """Returns an empty pool; ``sizes``: as of ``abstract_pool``."""
    with jax.set_mesh(mesh):
        return _maker(cfg, mesh, *sizes)()


def abstract_pool(
    cfg: ModelConfig,
    mesh: Mesh,
    pages: int,
    dtype: Any,
    routes: bool = False,
    states: int = 0,
    near: int | None = None,
) -> Pool:
    """Returns the shapes and shardings of a pool of ``pages`` pages, ``states`` slots of states and
    ``near`` near pages on each part of the mesh (``page_parts``).
    """
    parts = page_parts(cfg, mesh)
    sizes = pages * parts, jnp.dtype(dtype), routes, lanes(mesh), states * parts
    specs = pool_specs(cfg, *sizes, near=None if near is None else near * parts)
    where = pool_shardings(cfg, specs, mesh)
    return jax.tree.map(lambda s, at: s.update(sharding=at), specs, where)


@functools.lru_cache(16)  # an engine with keep_cache=False allocates a pool in every call
def _maker(cfg: ModelConfig, mesh: Mesh, *sizes: Any) -> Callable[[], Pool]:
    specs = abstract_pool(cfg, mesh, *sizes)
    where = jax.tree.map(lambda s: s.sharding, specs)
    zeros = functools.partial(jax.tree.map, lambda s: jnp.zeros(s.shape, s.dtype), specs)
    return jax.jit(zeros, out_shardings=where)


def page_parts(cfg: ModelConfig, mesh: Mesh) -> int:
    """Returns the number of parts of rows and pages; a row's pages are in its own part."""
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return sharding.ways(sharding.cache_axes(cache_heads(cfg))[0], mesh)


@functools.partial(jax.jit, static_argnames=("cfg",), donate_argnames=("pool",))
@as_stored
def prefill(
    params: Any, stacks: Stacks, pool: Pool, blocks: PrefillPlan, *, cfg: ModelConfig
) -> tuple[Pool, Scores | None]:
    C, T = blocks.tokens.shape
    chex.assert_shape([blocks.start, blocks.page], (C,))
    positions = blocks.start[:, None] + jnp.arange(T, dtype=jnp.int32)[None]
    none = jnp.zeros((C,), jnp.int32)
    view = View(
        *(blocks.table, blocks.start, none, none, blocks.page),
        used=blocks.used,
        states=blocks.states,
        near=None if blocks.near_page is None else (blocks.near_table, blocks.near_page),
    )
    lora = attach_rows(stacks, blocks.slots, cfg.kernels.slot_lora, T)
    inputs = DecoderInputs(blocks.tokens, positions, pool=pool, view=view)
    h, kept = hidden_states(params, lora, inputs, cfg)
    kept["tokens"] = _write_tokens(pool["tokens"], blocks.tokens, view, cfg)
    if (scoring := blocks.scoring) is None:
        return kept, None

    def some(part: tuple[jax.Array, jax.Array, jax.Array]) -> Scores:
        h_CTD, targets_CTK, positions_CT = part
        z_CTV = logits(params, lora, h_CTD, cap=cfg.logit_cap)
        logp_CTV = jax.nn.log_softmax(z_CTV, axis=-1)
        target_logp = jnp.take_along_axis(logp_CTV, jnp.maximum(targets_CTK, 0), axis=-1)
        top, ids = jax.lax.top_k(logp_CTV, min(ALTERNATIVES, cfg.vocab_size))
        return Scores(target_logp, ids, top, *_draws(logp_CTV, positions_CT, scoring))

    parts = jax.lax.map(
        some, tuple(split(x, SCORE_PARTS, 1) for x in (h, scoring.targets, positions))
    )
    return kept, Scores(*(unsplit(x, 1) for x in parts))


def _draws(
    logp_CTV: jax.Array, positions_CT: jax.Array, scoring: PromptScoring
) -> tuple[jax.Array, jax.Array]:
    """Draws tokens at each position at temperature 1: ids and logprobs, ``[C, T, A]`` each."""
    C, T, V = logp_CTV.shape
    one, nothing = jnp.ones((C * T,), jnp.float32), jnp.zeros((C * T,), jnp.float32)
    params = SamplingParams(
        one, jnp.zeros((C * T,), jnp.int32), one, nothing, jnp.repeat(scoring.seed, T)
    )
    z_NV, first_N = logp_CTV.reshape(C * T, V), positions_CT.reshape(-1) * ALTERNATIVES

    def draw(j: jax.Array, drawn: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        ids, logprobs, _ = sample(z_NV, params, first_N + j)
        return drawn[0].at[:, j].set(ids), drawn[1].at[:, j].set(logprobs)

    shape = C * T, ALTERNATIVES
    none = jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)
    count = jnp.minimum(jnp.max(scoring.draws), ALTERNATIVES)
    ids, logprobs = jax.lax.fori_loop(0, count, draw, none)
    return ids.reshape(C, T, -1), logprobs.reshape(C, T, -1)


def _in_use(live: jax.Array) -> jax.Array:
    """Returns the number of rows up to the last live one."""
    return jnp.max(jnp.where(live, jnp.arange(1, len(live) + 1, dtype=jnp.int32), 0))


def _write_tokens(pool: jax.Array, tokens_BT: jax.Array, view: View, cfg: ModelConfig) -> jax.Array:
    cache = paged_lib.Cache({}, jnp.int32(0), view, cache_heads(cfg))
    return paged_lib.record(pool, tokens_BT[..., None], cache)


class _State(NamedTuple):
    """State of the decode loop; rows that are ``live`` continue."""

    step: jax.Array
    pool: Pool
    token: jax.Array
    own: jax.Array
    live: jax.Array
    drawn: Drawn


@functools.partial(jax.jit, static_argnames=("cfg",), donate_argnames=("pool",))
@as_stored
def decode(
    params: Any, stacks: Stacks, pool: Pool, rows: DecodePlan, steps: jax.Array, *, cfg: ModelConfig
) -> tuple[Pool, Drawn]:
    """Draws up to ``min(steps, STEPS)`` tokens for every row; ends early when no row is live."""
    R, A = rows.token.shape[0], min(ALTERNATIVES, cfg.vocab_size)
    lora = attach_rows(stacks, rows.slots, cfg.kernels.slot_lora, 1)
    runs_of_prefix = -(-rows.prefix // paged_lib.RUN)
    nowhere = jax.tree.leaves(pool["tokens"])[0].shape[1]  # a page number that is out of range

    def view_of(own: jax.Array, live: jax.Array, step: jax.Array) -> View:
        entry = runs_of_prefix * paged_lib.RUN_PAGES + own // PAGE
        entry = jnp.minimum(entry, rows.table.shape[1] - 1)[:, None]

        def page_of(table: jax.Array) -> jax.Array:
            page = jnp.take_along_axis(table, entry, axis=1)[:, 0]
            return jnp.where(live, page, nowhere)

        page, place = page_of(rows.table), own % PAGE
        near = None
        if rows.near_table is not None:
            near = rows.near_table, page_of(rows.near_table)
        prefix = rows.table, rows.prefix, own, rows.first
        states = None
        if rows.state is not None:
            load = jnp.where(step == 0, rows.source, rows.state)
            save = jnp.where(live, rows.state, nowhere)
            states = StateSlots(load, save, jnp.full_like(save, nowhere), live.astype(jnp.int32))
        after = own + live.astype(jnp.int32)
        return View(*prefix, page, place, after, rows.teams, _in_use(live), states, near)

    def body(s: _State) -> _State:
        view = view_of(s.own, s.live, s.step)

        def layers(view: View, pool: Pool) -> tuple[jax.Array, Pool]:
            at = (rows.prefix + s.own)[:, None]
            inputs = DecoderInputs(s.token[:, None], at, pool=pool, view=view)
            return hidden_states(params, lora, inputs, cfg)

        if dispatch.platform_of_mesh() == "cuda":
            # A GPU waits for the host at every branch: one before the layers replaces one in each.
            in_teams = jnp.any(rows.teams.place >= 0)
            like = jax.eval_shape(layers, view, s.pool)[0]
            done = (
                jnp.zeros(like.shape, like.dtype),
                {n: x for n, x in s.pool.items() if n != "tokens"},
            )
            done = _once(in_teams, lambda done: layers(view, done[1]), done)
            alone = view._replace(teams=None)
            h, pool = _once(~in_teams, lambda done: layers(alone, done[1]), done)
            kept: Pool = dict(pool)
        else:
            h, kept = layers(view, s.pool)
        kept["tokens"] = _write_tokens(s.pool["tokens"], s.token[:, None], view, cfg)
        z_R1V = logits(params, lora, h, cfg.kernels.layer_matmul, view.used, cfg.logit_cap)
        z_RV = sharding.constrain(z_R1V[:, 0], "batch", "vocab")

        def change(z_RV: jax.Array) -> jax.Array:
            z_RV = _penalised(z_RV, rows.sampling, kept["tokens"], view, cfg)
            return jax.lax.cond(jnp.any(rows.bound), lambda z: _allowed(z, rows), lambda z: z, z_RV)

        changes = Changes(_has_penalties(rows.sampling) | rows.bound, change)
        token, logprob, drawn_logprob = sample(
            z_RV, rows.sampling, s.own, changes, view.used, cfg.kernels.draw
        )
        none = jnp.zeros((R, A), jnp.int32), jnp.zeros((R, A), jnp.float32)
        top = jax.lax.cond(
            jnp.any(rows.top & s.live),
            lambda: alternatives(z_RV, A, view.used, cfg.kernels.draw),
            lambda: none,
        )

        def put(all_: jax.Array, one: jax.Array) -> jax.Array:
            live = s.live.reshape(R, *(1,) * (one.ndim - 1))
            return all_.at[:, s.step].set(jnp.where(live, one, all_[:, s.step]))

        hit = jnp.any(token[:, None] == rows.stop_ids, axis=-1) & s.live
        own = s.own + s.live
        d = s.drawn
        drawn = Drawn(
            put(d.tokens, token),
            put(d.logprobs, logprob),
            put(d.drawn_logprobs, drawn_logprob),
            d.count + s.live,
            d.stopped | hit,
            put(d.top_ids, top[0]),
            put(d.top_logprobs, top[1]),
        )
        live = s.live & ~hit & (own < jnp.minimum(rows.limit, rows.until))
        return _State(s.step + 1, kept, jnp.where(s.live, token, s.token), own, live, drawn)

    f32, i32, each, top = jnp.float32, jnp.int32, (R, STEPS), (R, STEPS, A)
    kinds = (each, i32), (each, f32), (each, f32), ((R,), i32), ((R,), bool), (top, i32), (top, f32)
    drawn = Drawn(*(jnp.zeros(*kind) for kind in kinds))
    live = rows.own < jnp.minimum(rows.limit, rows.until)
    state = _State(jnp.int32(0), pool, rows.token, rows.own, live, drawn)
    until = jnp.minimum(steps, STEPS)
    state = jax.lax.while_loop(lambda s: (s.step < until) & jnp.any(s.live), body, state)
    return state.pool, state.drawn


def _once(pred: jax.Array, fn: Callable[[Any], Any], x: Any) -> Any:
    """Returns ``fn(x)`` if ``pred``, else ``x``, in the same buffers; ``lax.cond`` copies them."""
    out = jax.lax.while_loop(lambda s: s[0], lambda s: (jnp.bool_(False), fn(s[1])), (pred, x))
    return out[1]


def _allowed(z_RV: jax.Array, rows: DecodePlan) -> jax.Array:
    token = jnp.arange(z_RV.shape[1])
    may = (rows.allowed[:, token // 32] >> (token % 32).astype(jnp.uint32)[None]) & 1
    return jnp.where((may == 1) | ~rows.bound[:, None], z_RV, -jnp.inf)


def _penalised(
    z_RV: jax.Array, sampling: SamplingParams, tokens: jax.Array, view: View, cfg: ModelConfig
) -> jax.Array:
    """Applies penalties and biases to the logits; the tokens so far are read from the pages."""
    penalties = sampling.penalties
    assert penalties is not None
    rows, _ = sharding.cache_axes(cache_heads(cfg))

    def local(z_RV: jax.Array, penalties: Penalties, tokens: jax.Array, view: View) -> jax.Array:
        ids = tokens[0, view.table].reshape(len(z_RV), -1)  # [R, D PAGE]
        place = jnp.arange(view.capacity)[None]
        # The first own token is the last token of the prompt.
        own = place - (-(-view.prefix // paged_lib.RUN) * paged_lib.RUN)[:, None]
        prompt = (place < view.prefix[:, None]) | (own == 0)
        return penalised(z_RV, penalties, ids, prompt, (own > 0) & (own <= view.own[:, None]))

    def changed() -> jax.Array:
        # Runs where the row's pages are: on a pod the tokens of long contexts are more bytes than
        # the logits.
        specs = (rows, None), (rows, None), (None, rows, None, None), (rows, None)
        out = sharding.over_devices(local, (z_RV, penalties, tokens, view), specs, (rows, None))
        return sharding.constrain(out, "batch", "vocab")

    return jax.lax.cond(jnp.any(_has_penalties(sampling)), changed, lambda: z_RV)


def _has_penalties(sampling: SamplingParams) -> jax.Array:
    """Returns which rows have a penalty or a bias, ``[R]`` bool."""
    penalties = sampling.penalties
    assert penalties is not None
    counted = (penalties.repetition != 1) | (penalties.frequency != 0) | (penalties.presence != 0)
    return counted | jnp.any(penalties.bias_ids >= 0, axis=-1)


@functools.partial(jax.jit, static_argnames=("cfg",))
def read_pages(pool: Pool, pages: jax.Array, *, cfg: ModelConfig) -> Pool:
    """Returns the contents ``[L, n, ...]`` of ``pages [n]``, equally many of each mesh part."""
    rows, specs = _split(pool, cfg)

    def take(pool: Pool, pages: jax.Array) -> Pool:
        return jax.tree.map(lambda x: x[:, pages], pool)

    return sharding.over_devices(take, (pool, pages), (specs, (rows,)), specs)


@functools.partial(jax.jit, static_argnames=("cfg",), donate_argnames=("pool",))
def write_pages(pool: Pool, pages: jax.Array, contents: Pool, *, cfg: ModelConfig) -> Pool:
    """Writes contents into any pages; out-of-range pages are skipped."""
    rows, specs = _split(pool, cfg)

    def put(pool: Pool, pages: jax.Array, contents: Pool) -> Pool:
        return jax.tree.map(lambda x, new: x.at[:, pages].set(new, mode="drop"), pool, contents)

    return sharding.over_devices(put, (pool, pages, contents), (specs, (rows,), specs), specs)


@functools.partial(jax.jit, static_argnames=("cfg",), donate_argnames=("pool",))
def move_pages(pool: Pool, moves: PageMoves, *, cfg: ModelConfig) -> Pool:
    """Builds pages from others, equally many of each mesh part."""
    rows, specs = _split(pool, cfg)

    # [L, n, ..., PAGE, X]; each page is rolled by its own number of positions
    @functools.partial(jax.vmap, in_axes=(1, 0), out_axes=1)
    def rolled(page: jax.Array, by: jax.Array) -> jax.Array:
        return jnp.roll(page, by, axis=-2)

    def move(pool: Pool, moves: PageMoves) -> Pool:
        before = jnp.arange(PAGE)[None] < moves.cut[:, None]  # [n, PAGE]

        def of(x: jax.Array) -> jax.Array:
            chosen = before.reshape(1, len(before), *(1,) * (x.ndim - 4), PAGE, 1)
            low, high = rolled(x[:, moves.low], -moves.begin), rolled(x[:, moves.high], moves.cut)
            made = jnp.where(chosen, low, high)
            return x.at[:, moves.to].set(made, mode="drop")

        return jax.tree.map(of, pool)

    return sharding.over_devices(move, (pool, moves), (specs, (rows,)), specs)


def _split(pool: Pool, cfg: ModelConfig) -> tuple[str, Any]:
    """Returns the logical axis of pages, and the axes of every leaf."""
    rows, heads = sharding.cache_axes(cache_heads(cfg))
    return rows, jax.tree.map(lambda x: _axes(x, rows, heads), pool)


def _axes(leaf: jax.Array, rows: str, heads: str | None) -> tuple[str | None, ...]:
    # Of keys all heads divide, of states they may not.
    divides = sharding.fitting(leaf.shape[2:3], heads) if leaf.ndim == 5 else ()
    return (None, rows, *divides, None, None)[: leaf.ndim]
