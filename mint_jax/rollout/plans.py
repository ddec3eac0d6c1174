"""Conversion of the scheduler's decisions into plans, the small arrays that ``device.py`` reads.

Rows and blocks of one mesh part are contiguous. Numbers of pages and rows count within a part.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np

from mint_jax.lora.tree import Slot
from mint_jax.models.paged import EMPTY, FOLLOW, PAGE, RUN, TEAM, StateSlots, Teams
from mint_jax.rollout.device import ALTERNATIVES, STEPS, DecodePlan, PrefillPlan, PromptScoring
from mint_jax.rollout.grammar import mask_of, words
from mint_jax.rollout.pages import pages_for
from mint_jax.rollout.request import MAX_BIASES, MAX_STOP_IDS, Request, seed_of
from mint_jax.rollout.sample import Penalties, SamplingParams
from mint_jax.rollout.samples import CachedPrompt, Row, SampleState

NOWHERE = 2**30  # a page number that is out of range everywhere


def state_slots(rows: int) -> int:
    """Returns the slots of states of one part: own states of its rows, those of prompts that run or
    are prefilled ahead, and snapshots.
    """
    return 4 * rows


def near_pages(window: int, rows: int, blocks: int) -> int:
    """Returns the near pages of one part: those that windows of its rows, of their prompts and of
    one prefill call reach at most, and as many again for cached prompts.
    """
    pages = pages_for(window - 1, PAGE) + 1, pages_for(window - 1 + STEPS, PAGE) + 1
    return 2 * (rows * sum(pages) + blocks)


def blocks_plan(
    todo: Sequence[Sequence[tuple[CachedPrompt, int]]],
    count: int,
    table: int,
    buckets: Iterable[int],
    scored: bool = False,
    kinds: Collection[str] = (),
) -> PrefillPlan:
    """Returns the plan of a prefill of ``count`` blocks over all parts.

    Args:
        todo: blocks of each part, as (prompt, block number).
        table: entries of a table.
        kinds: see ``device.kinds``.
    """
    tokens = np.zeros((count, PAGE), np.int32)
    targets = np.full((count, PAGE, 1 + ALTERNATIVES), -1, np.int32)
    draws, seed = np.zeros(count, np.int32), np.zeros(count, np.uint32)
    start, page = np.zeros(count, np.int32), np.full(count, NOWHERE, np.int32)
    tables = np.zeros((count, table), np.int32)
    near_page, near_tables = page.copy(), tables.copy()
    adapters: list[Slot | None] = [None] * count
    used = 0
    for part, blocks in enumerate(todo):
        for c, (prompt, i) in enumerate(blocks, part * (count // len(todo))):
            request, block, at = prompt.request, prompt.blocks[i], i * PAGE
            n = len(block.tokens)
            tokens[c, :n], targets[c, :n, 0] = block.tokens, request.prompt[at + 1 : at + 1 + n]
            for t, ids in enumerate((request.target_prompt_logprobs or ())[at : at + PAGE]):
                targets[c, t, 1 : 1 + len(ids)] = ids
            draws[c], seed[c] = request.prompt_alternatives, seed_of(request.seed, -1)
            start[c], page[c], adapters[c] = at, block.page, request.adapter
            tables[c, :i] = [b.page for b in prompt.blocks[:i]]
            near_page[c] = prompt.near.get(i, NOWHERE)
            near_tables[c, list(prompt.near)] = list(prompt.near.values())
            used = max(used, c * PAGE + n)
    scoring = PromptScoring(targets, draws, seed) if scored else None
    slots, places = _slots(adapters, buckets), np.array(used, np.int32)
    states = _states_of_blocks(todo, count) if "states" in kinds else None
    near = (near_tables, near_page) if "near" in kinds else ()
    return PrefillPlan(tokens, start, page, tables, slots, places, scoring, states, *near)


def _slot(slot: int | None) -> int:
    assert slot is not None
    return slot


def _states_of_blocks(todo: Sequence[Sequence[tuple[CachedPrompt, int]]], count: int) -> StateSlots:
    load, tokens = np.full(count, EMPTY, np.int32), np.zeros(count, np.int32)
    save, keep = np.full(count, NOWHERE, np.int32), np.full(count, NOWHERE, np.int32)
    for part, blocks in enumerate(todo):
        for c, (prompt, i) in enumerate(blocks, part * (count // len(todo))):
            at, block = c - part * (count // len(todo)), prompt.blocks[i]
            if at and blocks[at - 1] == (prompt, i - 1):
                load[c] = FOLLOW
            elif i:
                before, read = prompt.blocks[i - 1], prompt.read
                load[c] = _slot(prompt.state if read is not before else before.state)
            if at + 1 == len(blocks) or blocks[at + 1] != (prompt, i + 1):
                save[c] = _slot(prompt.state)
            keep[c] = NOWHERE if block.state is None else block.state
            tokens[c] = len(block.tokens)
    return StateSlots(load, save, keep, tokens)  # type: ignore[arg-type]


def rows_plan(
    running: Sequence[Row],
    rows: int,
    parts: int,
    table: int,
    vocab: int,
    buckets: Iterable[int],
    kinds: Collection[str] = (),
) -> tuple[DecodePlan, list[int]]:
    """Returns the plan of a decode dispatch of ``rows`` rows over all parts, and the place of each
    of those that run; for ``kinds`` see ``device.kinds``.
    """
    at: list[Row | None] = [None] * rows
    until, limit = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
    tables, near = np.zeros((2, rows, table), np.int32)
    used, places = [0] * parts, []
    for row in running:
        sample, part = row.sample, row.sample.prompt.part
        r = part * (rows // parts) + used[part]
        used[part] += 1
        places.append(r)
        at[r], until[r], limit[r] = row, row.goal, sample.limit
        pages = sample.table()
        tables[r, : len(pages)] = pages
        of_near = sample.near_table()
        near[r, list(of_near)] = list(of_near.values())

    samples = [None if row is None else row.sample for row in at]

    def column(dtype: type, of: Any, by: Sequence[Any] = samples) -> Any:
        return np.array([0 if one is None else of(one) for one in by], dtype)

    prefix = column(np.int32, lambda s: s.prompt.length)
    allowed = np.zeros((rows, words(vocab)), np.uint32)
    for r, sample in enumerate(samples):
        if sample is not None and sample.matcher is not None:
            allowed[r] = mask_of(sample.matcher, vocab)
    teams = _teams(at, rows // parts, tables)
    first = np.where(np.asarray(teams.place) >= 0, -(-prefix // RUN), 0).astype(np.int32)
    stop_ids = (() if s is None else s.prompt.request.stop_ids for s in samples)
    plan = DecodePlan(
        token=column(np.int32, lambda row: row.token, at),
        table=tables,
        prefix=prefix,
        own=column(np.int32, lambda row: row.own, at),
        first=first,
        until=until,
        limit=limit,
        stop_ids=_padded(stop_ids, MAX_STOP_IDS, -1, np.int32),
        top=column(bool, lambda s: s.prompt.request.top_logprobs > 0),
        allowed=allowed,
        bound=column(bool, lambda s: s.matcher is not None),
        slots=_slots([None if s is None else s.prompt.request.adapter for s in samples], buckets),
        sampling=_sampling(samples),
        teams=teams,
        source=column(np.int32, _source) if "states" in kinds else None,
        state=column(np.int32, lambda s: s.state) if "states" in kinds else None,
        near_table=near if "near" in kinds else None,
    )
    return plan, places


def _source(sample: SampleState) -> int:
    return _slot(sample.state) if sample.own else sample.prompt.source


def _slots(adapters: Sequence[Slot | None], buckets: Iterable[int]) -> dict[int, Any]:
    return {
        b: np.array([-1 if a is None or a.bucket != b else a.index for a in adapters], np.int32)
        for b in buckets
    }


def _padded(lists: Iterable[Sequence[Any]], width: int, fill: Any, dtype: type) -> np.ndarray:
    lists = list(lists)
    out = np.full((len(lists), width), fill, dtype)
    for row, values in enumerate(lists):
        out[row, : len(values)] = values
    return out


def _teams(at: Sequence[Row | None], per_part: int, tables: np.ndarray) -> Teams:
    """Returns each part's teams; a row's place is its sample number modulo TEAM. Rows that verify
    further drafts are teams of their own.
    """
    Z = len(at)
    rows, table = np.full((Z, TEAM), -1, np.int32), np.zeros_like(tables)
    prefix, place = np.zeros(Z, np.int32), np.full(Z, -1, np.int32)
    for begin in range(0, Z, per_part):
        number: dict[tuple[CachedPrompt, int, int], int] = {}
        for r in range(begin, begin + per_part):
            if (row := at[r]) is None or (team := row.sample.team) is None:
                continue
            sample = row.sample
            z = number.setdefault((sample.prompt, team, len(row.drafts)), len(number))
            w = sample.number % TEAM
            rows[begin + z, w], place[r] = r - begin, z * TEAM + w
            pages = [block.page for block in sample.prompt.blocks]
            table[begin + z, : len(pages)] = pages
            prefix[begin + z] = sample.prompt.length
    return Teams(rows, table, prefix, place)  # type: ignore[arg-type]


def _sampling(samples: Sequence[SampleState | None]) -> SamplingParams:
    requests = [Request((0,), temperature=0) if s is None else s.prompt.request for s in samples]

    def column(dtype: type, name: str) -> Any:
        return np.array([getattr(r, name) for r in requests], dtype)

    # Noise depends on the request's seed and the sample's number, not on its row.
    seeds = np.array(
        [0 if s is None else seed_of(s.prompt.request.seed, s.number) for s in samples], np.uint32
    )
    ids = ([token for token, _ in r.logit_bias] for r in requests)
    values = ([value for _, value in r.logit_bias] for r in requests)
    penalties = Penalties(
        repetition=column(np.float32, "repetition_penalty"),
        frequency=column(np.float32, "frequency_penalty"),
        presence=column(np.float32, "presence_penalty"),
        bias_ids=_padded(ids, MAX_BIASES, -1, np.int32),
        bias=_padded(values, MAX_BIASES, 0, np.float32),
    )
    return SamplingParams(
        temperature=column(np.float32, "temperature"),
        top_k=column(np.int32, "top_k"),
        top_p=column(np.float32, "top_p"),
        min_p=column(np.float32, "min_p"),
        seed=seeds,
        penalties=penalties,
    )
