"""The cache in pages: attention over random tables against a softmax in float64, what is written
and where; on one device and eight.

``continued`` runs a decoder through pages that hold NaN wherever no token is, for the tests of the
decoders' families.

Axes: B rows, T new tokens, S positions, N query heads, K kv heads, H head dim, L layers, U pages of
a part, D table entries, Q prompts, Z teams, W rows of a team.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mint_jax import sharding
from mint_jax.lora.view import attach_rows
from mint_jax.mesh import make_mesh
from mint_jax.models import paged, transformer
from mint_jax.models.paged import PAGE, RUN, RUN_PAGES, TEAM, Teams, View
from tests.marks import first

NOWHERE = 2**30  # a page that no device has
LENGTHS = (0, 1, 31, 32, 33, 127, 128, 129, 255, 256, 257, 300)
LONGEST = max(LENGTHS)
SCALE = 0.4


class Layout(NamedTuple):
    """Where rows' tokens lie: pages in random order, numbered within a row's part of the mesh."""

    pages: int  # U of each part
    parts: int
    table: np.ndarray  # [B, D]; random numbers where a row has no page, some of them of no page
    prefix: np.ndarray  # [B]
    prompt: np.ndarray  # [B] which prompt each row has
    # (part, prompt) -> its pages; a prompt's pages are in every part that has a row of it
    of_prompt: dict[tuple[int, int], np.ndarray]

    def part(self, b):
        return b // (len(self.table) // self.parts)

    def at(self, own_B):
        """The page of each row's own token of this number."""
        entry = -(-self.prefix // RUN) * RUN_PAGES + own_B // PAGE
        return np.take_along_axis(self.table, entry[:, None], axis=1)[:, 0]

    def view(self, own_B, teams=None):
        """That of one new token for each row."""
        own = np.asarray(own_B, np.int32)
        in_team = np.zeros(len(own), bool) if teams is None else teams.place >= 0
        first = np.where(in_team, -(-self.prefix // RUN), 0).astype(np.int32)
        page = self.at(own)
        after = own + (page < self.pages)
        return View(self.table, self.prefix, own, first, page, own % PAGE, after, teams)

    def teams(self, rng, alone=()):
        """Rows of one prompt together, in places at random, but for those that stay alone."""
        B, D = self.table.shape
        Z, per_part = B, B // self.parts
        rows, place = np.full((Z, TEAM), -1, np.int32), np.full(B, -1, np.int32)
        table, prefix = rng.integers(0, self.pages, (Z, D)).astype(np.int32), np.zeros(Z, np.int32)
        for part in range(self.parts):
            z = 0
            for q in range(int(self.prompt.max()) + 1):
                mine = [
                    b
                    for b in range(part * per_part, (part + 1) * per_part)
                    if self.prompt[b] == q and b not in alone
                ]
                for some in (mine[i : i + TEAM] for i in range(0, len(mine), TEAM)):
                    pages = self.of_prompt[part, q]
                    at = part * per_part + z
                    table[at, : len(pages)], prefix[at] = pages, self.prefix[some[0]]
                    for b, w in zip(some, rng.permutation(TEAM)):
                        rows[at, w], place[b] = b - part * per_part, z * TEAM + w
                    z += 1
        return Teams(rows, table, prefix, place)

    def where(self, b, own):
        """``[prefix + own, 2]``: page, of all parts together, and position of each of a row's
        tokens.
        """
        runs = -(-self.prefix[b] // RUN)
        places = [*range(self.prefix[b]), *(runs * RUN + i for i in range(own))]
        return np.array(
            [(self.part(b) * self.pages + self.table[b, p // PAGE], p % PAGE) for p in places], int
        ).reshape(-1, 2)


def lay_out(rng, prompt_B, prefix_Q, room, parts=1, longest=None):
    """Pages for prompts of these lengths, at most ``longest``, and for ``room`` own tokens of every
    row.
    """
    prompt_B, prefix_Q = np.asarray(prompt_B), np.asarray(prefix_Q, np.int32)
    longest = int(prefix_Q.max()) if longest is None else longest
    B, own = len(prompt_B), -(-room // PAGE)
    D = -(-longest // RUN) * RUN_PAGES + -(-own // RUN_PAGES) * RUN_PAGES
    U = min(B // parts, len(prefix_Q)) * -(-longest // PAGE) + own * (B // parts) + 3
    free = [list(rng.permutation(U)) for _ in range(parts)]
    of_prompt = {}
    table = np.where(rng.random((B, D)) < 0.5, rng.integers(0, U, (B, D)), NOWHERE).astype(np.int32)
    for b, q in enumerate(prompt_B):
        part = b // (B // parts)
        if (part, q) not in of_prompt:
            taken = [free[part].pop() for _ in range(-(-prefix_Q[q] // PAGE))]
            of_prompt[part, int(q)] = np.int32(taken)
        pages, begin = of_prompt[part, q], -(-prefix_Q[q] // RUN) * RUN_PAGES
        table[b, : len(pages)] = pages
        table[b, begin : begin + own] = [free[part].pop() for _ in range(own)]
    return Layout(U, parts, table, prefix_Q[prompt_B], prompt_B, of_prompt)


def left_over(rng, spec):
    """What the pages' last owners left: NaN, infinities and large numbers."""
    if not jnp.issubdtype(spec.dtype, jnp.floating):
        return rng.integers(0, 200, spec.shape).astype(spec.dtype)
    kinds = np.float32([np.nan, np.inf, -np.inf, 1e30, -3.0])
    return rng.choice(kinds, spec.shape).astype(spec.dtype)


@functools.partial(jax.jit, static_argnames=("cfg",))
def _step(params, stacks, slots, tokens_BT, positions_BT, pool, view, *, cfg):
    lora = attach_rows(stacks, slots)
    h, pool = transformer.hidden_states(
        params, lora, transformer.DecoderInputs(tokens_BT, positions_BT, pool=pool, view=view), cfg
    )
    return transformer.logits(params, lora, h, cap=cfg.logit_cap), pool


class Continued(NamedTuple):
    first: list[np.ndarray]  # of each prompt [n, V], logits of its tokens
    rest: np.ndarray  # [B, T, V], those of the new ones
    pool: dict  # the cache behind it
    layout: Layout


def continued(
    rng, params, cfg, prompts, prompt_B, new_BT, stacks=None, slots_Q=None, alone=(), routes=False
):
    """Runs prompts in two calls or more, then each row's new tokens one by one, in teams.

    Args:
        prompt_B: which prompt each row continues.
        slots_Q: by rank bucket, the slot that each prompt and its rows name.
        alone: rows in no team.
        routes: with experts recorded.
    """
    stacks, slots_Q = stacks or {}, {b: np.asarray(s, np.int32) for b, s in (slots_Q or {}).items()}
    B, T = new_BT.shape
    layout = lay_out(rng, prompt_B, [len(p) for p in prompts], T)
    specs = transformer.cache_specs(cfg, layout.pages, routes=routes)
    pool = jax.tree.map(functools.partial(left_over, rng), specs)
    todo = [(q, i) for (_, q), pages in layout.of_prompt.items() for i in range(len(pages))]
    C, D = -(-len(todo) // 2), layout.table.shape[1]  # blocks of one call
    first = [np.zeros((len(p), cfg.vocab_size), np.float32) for p in prompts]
    while todo:
        tokens = rng.integers(0, cfg.vocab_size, (C, PAGE)).astype(np.int32)
        (start, none), page = np.zeros((2, C), np.int32), np.full(C, NOWHERE, np.int32)
        table = rng.integers(0, layout.pages, (C, D)).astype(np.int32)
        now, todo = todo[:C], todo[C:]
        for c, (q, i) in enumerate(now):
            some, pages = prompts[q][i * PAGE : (i + 1) * PAGE], layout.of_prompt[0, q]
            tokens[c, : len(some)], table[c, :i] = some, pages[:i]
            start[c], page[c] = i * PAGE, pages[i]
        named = [q for q, _ in now]
        slots = {b: np.full(C, -1, np.int32) for b in slots_Q}
        for b, s in slots_Q.items():
            slots[b][: len(now)] = s[named]
        positions = start[:, None] + np.arange(PAGE, dtype=np.int32)[None]
        view = View(table, start, none, none, page)
        z, pool = _step(params, stacks, slots, tokens, positions, pool, view, cfg=cfg)
        for c, (q, i) in enumerate(now):
            first[q][i * PAGE : (i + 1) * PAGE] = np.asarray(z)[c, : len(prompts[q]) - i * PAGE]
    teams = layout.teams(rng, alone)
    slots = {b: s[layout.prompt] for b, s in slots_Q.items()}
    rest = []
    for t in range(T):
        own = np.full(B, t, np.int32)
        at = (layout.prefix + own)[:, None]
        inputs = new_BT[:, t : t + 1], at, pool, layout.view(own, teams)
        z, pool = _step(params, stacks, slots, *inputs, cfg=cfg)
        rest.append(np.asarray(z))
    return Continued(first, np.concatenate(rest, axis=1), jax.device_get(pool), layout)


# Attention by itself.


@functools.partial(jax.jit, static_argnames=("window", "scale"))
def _attend(q, new, pool, layer, view, window=None, sinks=None, scale=SCALE):
    how = "auto", window, sinks
    return paged.grouped_query_attention(q, new, pool, layer, view, scale, *how)


def _normal(rng, *shape):
    return rng.normal(size=shape).astype(np.float32)


class Case(NamedTuple):
    """Rows with tokens in one layer of a pool full of left-overs."""

    layout: Layout
    own: np.ndarray  # [B] number of each row's own tokens
    pool: dict  # ``k`` and ``v``
    keys: list  # of each row ``{"k": [S, K, H], "v": ...}`` in order
    q: np.ndarray  # this and new: of one new token
    new: dict


L, LAYER, H = 3, 1, 8


def _case(rng, prompt_B, prefix_Q, own_B, N, K, parts=1):
    layout = lay_out(rng, prompt_B, prefix_Q, LONGEST + 1, parts, LONGEST)
    own = np.asarray(own_B, np.int32)
    B, U = len(own), layout.pages * parts
    pool = {
        name: left_over(rng, jax.ShapeDtypeStruct((L, U, K, PAGE, H), np.float32)) for name in "kv"
    }
    prompts = [{name: _normal(rng, n, K, H) for name in "kv"} for n in prefix_Q]
    keys = []
    for b, q in enumerate(layout.prompt):
        both = {name: (prompts[q][name], _normal(rng, own[b], K, H)) for name in "kv"}
        keys.append({name: np.concatenate(parts) for name, parts in both.items()})
        for (page, at), k, v in zip(layout.where(b, own[b]), keys[b]["k"], keys[b]["v"]):
            pool["k"][LAYER, page, :, at], pool["v"][LAYER, page, :, at] = k, v
    new = {name: _normal(rng, B, K, 1, H) for name in "kv"}
    return Case(layout, own, pool, keys, _normal(rng, B, 1, N, H) * 2, new)


def _softmax(q_TNH, k_SKH, v_SKH, window=None, sinks_N=None):
    """In float64; the last T keys are the queries' own, seen causally."""
    (T, N, _), (S, K, _) = q_TNH.shape, k_SKH.shape
    k, v = (np.repeat(x.astype(np.float64), N // K, axis=1) for x in (k_SKH, v_SKH))
    s = np.einsum("tnh,snh->nts", q_TNH.astype(np.float64), k) * SCALE
    ago = S - T + np.arange(T)[:, None] - np.arange(S)[None]
    w = np.exp(np.where((ago >= 0) & (ago < (window or S)), s, -np.inf))
    sink = 0 if sinks_N is None else np.exp(sinks_N.astype(np.float64))[:, None, None]
    return np.einsum("nts,snh->tnh", w / (w.sum(-1, keepdims=True) + sink), v)


def _want(case, *how):
    rows = zip(case.q, case.keys, case.new["k"], case.new["v"])
    return np.stack(
        [
            _softmax(
                q,
                *(np.concatenate([old[n], x.swapaxes(0, 1)]) for n, x in zip("kv", (k, v))),
                *how,
            )
            for q, old, k, v in rows
        ]
    )


TOLERANCE = 2e-5  # float32: sums over up to 600 keys, merged from runs


def _random_case(rng, rows, parts, N, K):
    """Prompts of any length, one of them empty; rows with own tokens of any number."""
    prompt_B = rng.integers(0, 4, rows)
    prompt_B[:2] = 0, 1
    prefix_Q = [0, *rng.choice(LENGTHS[1:], 3, replace=False)]
    own_B = rng.choice(LENGTHS, rows)
    own_B[0] = 0  # this row has nothing at all
    return _case(rng, prompt_B, prefix_Q, own_B, N, K, parts)


# One device; heads over tensor where they divide, else rows: pages are numbered within a part.
MESHES = {
    "one device": ({"data": 1}, 4, 2, 1),
    "heads over tensor": ({"data": 2, "fsdp": 2, "tensor": 2}, 4, 2, 4),
    "rows over tensor": ({"data": 2, "fsdp": 2, "tensor": 2}, 6, 3, 8),
}


@pytest.mark.parametrize("name", MESHES)
def test_attention_equals_a_softmax_whatever_lies_where(name, rng):
    """Rows that read their prompt themselves, that all stand in teams, and some of both; new tokens
    and routes are written, those of a page that is out of range nowhere.
    """
    sizes, N, K, parts = MESHES[name]
    mesh = make_mesh(sizes, jax.devices()[: math.prod(sizes.values())])
    case, X = _random_case(rng, 32, parts, N, K), 3
    want, layout = _want(case), case.layout
    page, written = layout.at(case.own), rng.random(32) < 0.8
    nowhere = np.where(written, page, rng.choice([layout.pages, NOWHERE, 2**31 - 1], 32))
    routes = left_over(rng, jax.ShapeDtypeStruct((L, layout.pages * parts, PAGE, X), np.uint8))
    ids = rng.integers(0, 256, (32, 1, X)).astype(np.int32)
    with jax.set_mesh(mesh):
        rows, heads = sharding.cache_axes(K)
        assert sharding.ways(rows, mesh) == parts
        split = jax.NamedSharding(mesh, sharding.partition((None, rows, heads, None, None), mesh))
        pool = jax.device_put(case.pool, dict.fromkeys("kv", split))
        for alone in (range(32), (), rng.choice(32, 10, replace=False)):
            view = layout.view(case.own, layout.teams(rng, alone))
            own = np.int32(case.own) + written
            view = view._replace(page=nowhere.astype(np.int32), after=own)
            out, after = jax.device_get(_attend(case.q, case.new, pool, LAYER, view))
            np.testing.assert_allclose(out[written], want[written], atol=TOLERANCE)
            assert np.isfinite(out).all(), "padding is not NaN"
        record = jax.jit(lambda *x: paged.record(*x[:2], paged.Cache({}, np.int32(LAYER), x[2], K)))
        recorded = record(routes, ids, view)
    page = page + layout.pages * np.array([layout.part(b) for b in range(32)])
    to, at = page[written], (case.own % PAGE)[written]
    for k in "kv":  # every row's new token, and nothing else
        wanted = case.pool[k].copy()
        wanted[LAYER, to, :, at] = case.new[k][written, :, 0]
        np.testing.assert_array_equal(after[k], wanted)
    routes[LAYER, to, at] = ids[written, 0]
    np.testing.assert_array_equal(recorded, routes)


WINDOWS = (1, 33, 128, 129, 400, None)


@pytest.mark.parametrize("name", first(1, list(MESHES)))
def test_windows_and_sinks_of_a_softmax_whatever_lies_where(name, rng):
    """Rows read through a window by themselves, also where their teams would read the prompt."""
    sizes, N, K, parts = MESHES[name]
    mesh = make_mesh(sizes, jax.devices()[: math.prod(sizes.values())])
    case = _random_case(rng, 32, parts, N, K)
    layout, sinks = case.layout, _normal(rng, N)
    view = layout.view(case.own, layout.teams(rng, rng.choice(32, 10, replace=False)))
    with jax.set_mesh(mesh):
        split = sharding.partition((None, *sharding.cache_axes(K), None, None), mesh)
        pool = jax.device_put(case.pool, dict.fromkeys("kv", jax.NamedSharding(mesh, split)))
        for window in WINDOWS:
            how = window, sinks
            out, _ = jax.device_get(_attend(case.q, case.new, pool, LAYER, view, *how))
            np.testing.assert_allclose(out, _want(case, *how), atol=TOLERANCE, err_msg=str(window))
