"""The paged KV cache ``[L, U, ..., PAGE, X]``, and attention to it.

A row's *table* lists its pages in two parts: the *prefix*, the prompt except its last token, shared
by all samples of the prompt; and the row's *own* tokens. Each begins with a new *run* of RUN
positions, the unit of reads, so no context length is a shape. Samples of a prompt form *teams*,
which read its runs once with all rows' queries in one matmul.

Axes: L layers, U pages, B rows, T new tokens, D table entries, X width, M queries of a row, H kv
heads, S positions of a run, Z teams, W rows of a team.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from mint_jax import sharding
from mint_jax.models.attention import causal
from pallas_kernels import dispatch
from pallas_kernels.paged import PAGE as PAGE  # also the tokens of a block of prefill
from pallas_kernels.paged import RUN as RUN
from pallas_kernels.paged import RUN_PAGES as RUN_PAGES
from pallas_kernels.paged import Rows, clean, last_run, run_pages, seen_in_run
from pallas_kernels.paged import read as read_run
from pallas_kernels.paged_attention import paged_attention, xla
from pallas_kernels.partial import MASKED, Partial, join, nothing

TEAM = 8  # rows of a team


class Teams(NamedTuple):
    """Rows that read one prompt together; used teams come first."""

    rows: jax.Array  # `[Z, W]` int32; -1 is none
    table: jax.Array  # `[Z, D]` pages of the prompt
    prefix: jax.Array  # `[Z]` number of its positions
    # `[B]` team times W plus place in it of each row; -1 for a row that reads its prompt itself
    place: jax.Array


class StateSlots(NamedTuple):
    """Slots of the cache that rows read their state from, and write it to.

    A state belongs to the tokens of a prefix. Blocks of prefill that continue the block before take
    its state without a slot.
    """

    load: jax.Array  # [B] int32; EMPTY, or FOLLOW for the state after the row before
    save: jax.Array  # [B] out of range: nowhere
    keep: jax.Array  # [B] a second slot to write, of a snapshot; out of range: nowhere
    count: jax.Array  # [B] tokens of the row in use


EMPTY, FOLLOW = -1, -2


class View(NamedTuple):
    """Pages of each row, and where its new tokens are written."""

    table: jax.Array  # `[B, D]` int32 pages, D a multiple of RUN_PAGES
    prefix: jax.Array  # this and own: `[B]` int32 cached positions of the two parts
    own: jax.Array
    first: jax.Array  # `[B]` int32, first run that the row reads itself
    page: jax.Array  # `[B]` int32, page of the new tokens; out of range discards them
    # `[B]` int32, position in that page (T = 1); None: T = PAGE tokens fill the page
    at: jax.Array | None = None
    after: jax.Array | None = None  # `[B]` own with the new token (T = 1)
    teams: Teams | None = None  # None if no row is in one
    # int32, number of the B x T new tokens in use, at the front; None: all
    used: jax.Array | None = None
    states: StateSlots | None = None  # of layers with a state
    # table and page of layers with a window, of any pages where no window reaches; None: as above
    near: tuple[jax.Array, jax.Array] | None = None

    def of_windows(self) -> "View":
        """Returns the view of layers with a window."""
        return self if self.near is None else self._replace(table=self.near[0], page=self.near[1])

    @property
    def capacity(self) -> int:
        """Maximum number of positions of a row."""
        return self.table.shape[1] * PAGE


class Cache(NamedTuple):
    """One layer's access to the pool of its kind of layers."""

    pool: dict[str, jax.Array]  # `{name: [L, U, ..., PAGE, X]}`
    layer: jax.Array  # int32
    view: View
    heads: int | None  # number that divides the kv heads of all layers; None for latents


# Attention of a tree of queries [B, ..., M, X] to the rows' pages, with optional chosen keys: see
# ``pallas_kernels.paged.attend``.
Attend = Callable[[Any, Rows, jax.Array | None], Partial]


def write(pool: jax.Array, layer: jax.Array, new: jax.Array, view: View) -> jax.Array:
    """Writes ``new [B, ..., T, X]`` of one layer into a pool ``[L, U, ..., PAGE, X]``, X padded."""
    # A carried pool is never concatenated, sliced by layer or copied; reads are gathers.
    lanes = pool.shape[-1] - new.shape[-1]
    new = jnp.pad(new.astype(pool.dtype), ((0, 0),) * (new.ndim - 1) + ((0, lanes),))
    if view.at is None:  # whole pages
        return pool.at[layer, view.page].set(new, mode="drop")
    if pool.ndim == 4:
        return pool.at[layer, view.page, view.at].set(new[..., 0, :], mode="drop")
    # Heads are indexed too: for a write of several heads at one position, the TPU layout would make
    # heads minor and transpose the pool.
    heads = jnp.arange(pool.shape[2], dtype=jnp.int32)[None]
    return pool.at[layer, view.page[:, None], heads, view.at[:, None]].set(
        new[..., 0, :], mode="drop"
    )


def attend(
    view: View, layer: jax.Array, queries: Any, read: Attend, chosen: jax.Array | None = None
) -> Partial:
    """Attends from each row's queries, a tree of ``[B, ..., M, X]``, to its table.

    Args:
        read: attention to the rows' pages.
        chosen: ``[B, T, D / RUN_PAGES, S]`` bool, positions that may be attended to; None for all.
    """
    with jax.named_scope("runs"):
        total = read(queries, Rows(layer, view.table, view.prefix, view.own, view.first), chosen)
    if view.teams is None:
        return total
    teams = view.teams
    with jax.named_scope("teams"):
        if dispatch.platform_of_mesh() == "cuda":  # whose programs have layers without teams
            return join(_of_teams(teams, layer, queries, read, chosen), total)
        # Without teams, as in every batch of single samples, the queries are not even gathered.
        there = jnp.any(teams.place >= 0)
        return jax.lax.cond(
            there,
            lambda total: join(_of_teams(teams, layer, queries, read, chosen), total),
            lambda total: total,
            total,
        )


def teams_at_once(teams: int, rows: int) -> int:
    """Returns the teams of one matmul: the number of teams if all rows are in full teams."""
    return min(teams, max(4, rows // TEAM))


def _of_teams(
    teams: Teams, layer: jax.Array, queries: Any, read: Attend, chosen: jax.Array | None
) -> Partial:
    """Returns the rows' attention to their teams' prompts; nothing for a row without a team."""
    (Z, W), B = teams.rows.shape, teams.place.shape[0]
    # A GPU's host would wait for the number of teams in each layer; its kernels skip empty ones.
    at_once = Z if dispatch.platform_of_mesh() == "cuda" else teams_at_once(Z, B)
    row = jnp.maximum(teams.rows, 0)
    gathered = jax.tree.map(lambda x: _gathered(x, row), queries)
    bits = None if chosen is None else chosen[row].reshape(Z, -1, *chosen.shape[2:])

    def group(g: jax.Array, all_: Partial) -> Partial:
        def part(x: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(x, g * at_once, at_once)

        none = jnp.zeros((at_once,), jnp.int32)
        with jax.named_scope("runs"):
            rows = Rows(layer, part(teams.table), part(teams.prefix), none, none)
            one = read(jax.tree.map(part, gathered), rows, None if bits is None else part(bits))
        return jax.tree.map(
            lambda x, new: jax.lax.dynamic_update_slice_in_dim(x, new, g * at_once, 0), all_, one
        )

    nobody = jnp.zeros((Z,), jnp.int32)
    whole = Rows(layer, teams.table, teams.prefix, nobody, nobody)
    if at_once == Z:
        with jax.named_scope("runs"):
            total = read(gathered, whole, bits)
    else:
        used = jnp.max(jnp.where(jnp.any(teams.rows >= 0, axis=1), jnp.arange(Z), -1)) + 1
        none = nothing(jax.eval_shape(read, gathered, whole, bits))
        total = jax.lax.fori_loop(0, -(-used // at_once), group, none)
    place = jnp.maximum(teams.place, 0)

    def of_rows(x: jax.Array, none: float) -> jax.Array:
        # [Z, .., W M, X] -> [Z, .., W, M, X] -> [Z W, .., M, X]
        x = x.reshape(*x.shape[:-2], W, x.shape[-2] // W, x.shape[-1])
        x = jnp.moveaxis(x, -3, 1).reshape(Z * W, *x.shape[1:-3], *x.shape[-2:])[place]
        return jnp.where(teams.place.reshape(-1, *(1,) * (x.ndim - 1)) >= 0, x, none)

    return Partial(of_rows(total.top, MASKED), of_rows(total.total, 0.0), of_rows(total.value, 0.0))


def _gathered(x: jax.Array, row_ZW: jax.Array) -> jax.Array:
    """Gathers queries ``[B, ..., M, X]`` of rows, a team's in one: ``[Z, ..., W M, X]``."""
    x = jnp.moveaxis(x[row_ZW], 1, -3)
    return x.reshape(*x.shape[:-3], -1, x.shape[-1])


class Edge(NamedTuple):
    """Runs that a window ends in, which some of a row's new tokens see in part."""

    run: jax.Array  # `[B, n]` int32
    visible: jax.Array  # `[B, n, T, S]` bool


def within(view: View, window: int, position: jax.Array, T: int) -> tuple[View, Edge]:
    """Splits the cached positions that T tokens from ``position`` on see through a window: the runs
    that all of them see in full, which any kernel reads, and the others. A window reads few runs of
    a prompt, so each row reads its own.
    """
    runs_of_prefix = -(-view.prefix // RUN)
    oldest_BT = position[:, None] + jnp.arange(T)[None] - window + 1
    oldest = jnp.maximum(oldest_BT[:, 0], 0)
    begin = jnp.where(
        oldest < view.prefix, oldest // RUN, runs_of_prefix + (oldest - view.prefix) // RUN
    )
    # T consecutive positions, at most a page, are in two runs at most.
    run = begin[:, None] + jnp.arange(min(T, 2))[None]
    of_own = run - runs_of_prefix[:, None]
    begins = jnp.where(of_own < 0, run * RUN, view.prefix[:, None] + of_own * RUN)
    cached = begins[..., None] + jnp.arange(RUN)[None, None]
    there = jax.vmap(lambda one: seen_in_run(view.prefix, view.own, one), 1, 1)(run)
    visible = there[:, :, None] & (cached[:, :, None] >= oldest_BT[:, None, :, None])
    rest = jnp.minimum(run[:, -1] + 1, last_run(view.prefix, view.own))
    return view._replace(first=rest, teams=None), Edge(run, visible)


def grouped_query_attention(
    q_BTNH: jax.Array,
    new: dict[str, jax.Array],
    pool: dict[str, jax.Array],
    layer: jax.Array,
    view: View,
    scale: float,
    kernel: str = "auto",
    window: int | None = None,
    sinks_N: jax.Array | None = None,
    heads: int | None = None,
    writes: bool = True,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Attends from T new tokens to the cache and to each other; returns ``[B, T, N, H]`` and the
    pool.

    Args:
        new: ``k`` and ``v`` of the new tokens, ``[B, K, T, H]``.
        pool: ``k`` and ``v`` of all tokens, ``[L, U, K, PAGE, H]``.
        window: number of positions that a token attends to, itself included; None for all.
        sinks_N: score of each head that only adds to the sum of its weights.
        heads: number that divides the kv heads of all layers; None: that of this one.
        writes: False if an earlier layer wrote the keys and values; then no pool is returned.
    """
    chex.assert_rank([q_BTNH, new["k"]], 4)

    def local(q_BTNH, new, pool, layer, view, sinks):
        (B, T, N, H), K = q_BTNH.shape, new["k"].shape[1]
        q_BKMH = q_BTNH.reshape(B, T, K, N // K, H).transpose(0, 2, 1, 3, 4).reshape(B, K, -1, H)

        def read(q_BKMH, rows, chosen):
            return paged_attention(
                q_BKMH, pool["k"], pool["v"], rows, scale=scale, implementation=kernel
            )

        def cached(view):
            with jax.named_scope("all" if window is None else "window"):
                return attend(view, jnp.int32(layer), q_BKMH, read)

        def at_edge(whole, edge):
            for i in range(edge.run.shape[1]):
                pages, visible = run_pages(view.table, edge.run[:, i]), edge.visible[:, i]
                k, v = (read_run(pool[name], layer, pages, H) for name in ("k", "v"))
                v = clean(v, jnp.any(visible, axis=1)[:, None])
                visible = jnp.repeat(visible, N // K, axis=1)[:, None]
                whole = join(xla.scored(q_BKMH, k, v, visible, scale), whole)
            return whole

        if window is not None:
            view = view.of_windows()
        if writes:
            pool = {name: write(pool[name], layer, new[name], view) for name in pool}
        position, edge = view.prefix + view.own, None
        if T == 1:  # already in its page; unused rows have no page and read nothing
            view = view._replace(own=view.after)
            if window is not None:
                view, edge = within(view, window, position, T)
            whole = cached(view)
        else:
            mask = causal(T)
            if window is not None:
                view, edge = within(view, window, position, T)
                mask &= jnp.arange(T)[:, None] - jnp.arange(T)[None] < window
            mask = jnp.repeat(mask, N // K, axis=0)[None, None]
            own = xla.scored(q_BKMH, new["k"], new["v"], mask, scale)
            whole = join(cached(view), own)
        whole = whole if edge is None else at_edge(whole, edge)
        if sinks is not None:
            sink = jnp.tile(sinks.astype(jnp.float32).reshape(1, K, N // K), (1, 1, T))[..., None]
            sink = jnp.broadcast_to(sink, whole.top.shape)
            whole = join(whole, Partial(sink, jnp.ones_like(sink), jnp.zeros_like(whole.value)))
        o_BKMH = (whole.value / jnp.where(whole.total == 0, 1.0, whole.total)).astype(q_BTNH.dtype)
        o_BTNH = o_BKMH.reshape(B, K, T, N // K, H).transpose(0, 2, 1, 3, 4).reshape(B, T, N, H)
        return o_BTNH, pool if writes else {}

    rows, split = sharding.cache_axes(new["k"].shape[1] if heads is None else heads)
    q_heads = split and "q_heads"
    of_out, of_pool = (rows, None, q_heads, None), (None, rows, split, None, None)
    specs = of_out, (rows, split, None, None), of_pool, (), (rows, None), (q_heads,)
    args = q_BTNH, new, pool, layer, view, sinks_N
    returned = dict.fromkeys(pool if writes else (), of_pool)
    out, pool = sharding.over_devices(local, args, specs, (of_out, returned))
    return sharding.constrain(out, "batch", None, q_heads, None), pool


def record(pool: jax.Array, new_BTX: jax.Array, cache: Cache) -> jax.Array:
    """Writes vectors of new tokens to their pages."""
    rows, _ = sharding.cache_axes(cache.heads)
    spec = None, rows, None, None

    def local(pool: jax.Array, new: jax.Array, layer: jax.Array, view: View) -> jax.Array:
        return write(pool, layer, new, view)

    specs = spec, (rows, None, None), (), (rows, None)
    return sharding.over_devices(local, (pool, new_BTX, cache.layer, cache.view), specs, spec)
