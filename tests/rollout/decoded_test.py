"""Prompts that begin with what was drawn before: found in the cache where that was asked for, and
what is read behind them.

Decoding leaves a sample's tokens in pages of its own, which begin where its prompt ends; whoever
goes on from there has them as blocks of a prompt, which begin at multiples of a page.
"""

import dataclasses

import numpy as np
import pytest

from mint_jax.models.paged import PAGE
from mint_jax.rollout.engine import Engine
from mint_jax.rollout.request import Request
from tests import oracles
from tests.marks import first
from tests.rollout.families_test import CONFIGS
from tests.rollout.invariants import check_schedule
from tests.rollout.score_test import merged_models, stacked_adapters, torch_logprobs

NEW = 45  # tokens of a first turn: more than a page, whatever the prompt leaves of one
SECOND = {"n": 1, "max_tokens": 6, "temperature": 0}
# the tolerance that the engine states: decoding and prefill round differently, and each differs
# from float64 by as much
ATOL = 2e-5
FAMILIES = first(1, ["llama", "qwen3_moe", "deepseek_v32", "gemma3"])


def some(rng, n: int) -> tuple[int, ...]:
    return tuple(rng.integers(3, 96, n).tolist())


def whole_pages(tokens: int) -> int:
    return tokens // PAGE * PAGE


def second_turns(rng, asked, results) -> list[Request]:
    """Each sample's conversation goes on with new tokens."""
    return [
        dataclasses.replace(r, prompt=(*r.prompt, *c.tokens, *some(rng, 3 + i)), **SECOND)
        for r, completions in zip(asked, results, strict=True)
        for i, c in enumerate(completions)
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_second_turn_begins_with_the_first_ones_tokens(rng, tiny_base, hf_dirs, family):
    base = tiny_base(family)
    adapters, stacks, slots = stacked_adapters(rng, base.cfg, CONFIGS, 0.3)
    lengths = (None, 1, 1), ("eight", 32, 1), ("one", 33, 1), (None, 34, 2), ("eight", 50, 1)
    asked = [
        Request(some(rng, n), slots.get(name), k, NEW, seed=i, revision=name)
        for i, (name, n, k) in enumerate((*lengths, ("other", 65, 1)))
    ]
    routed = base.cfg.routed
    how = {"rows": (8,), "steps": 7, "keep_routes": routed}
    plain, reusing = Engine(base, **how), Engine(base, **how, reuse_decoded=True)
    reusing.warm(stacks)  # the cache is as large as it gets: one that grows is empty
    results = reusing.generate(asked, stacks)
    check_schedule(reusing.active.schedule)
    further = second_turns(rng, asked, results)
    found, wanted = reusing.generate(further, stacks), plain.generate(further, stacks)
    check_schedule(reusing.active.schedule)
    before_them = [
        (r, c) for r, completions in zip(asked, results, strict=True) for c in completions
    ]
    models = merged_models(hf_dirs(family), base.cfg, adapters)
    for (asked_first, before), request, [mine], [theirs] in zip(
        before_them, further, found, wanted, strict=True
    ):
        # the last token was drawn and not read
        cached = len(asked_first.prompt) + len(before.tokens) - 1
        assert mine.reused == whole_pages(cached), len(asked_first.prompt)
        # another engine has not seen what was drawn
        assert theirs.reused <= whole_pages(len(asked_first.prompt))
        model, tokens = models[asked_first.revision], [*request.prompt, *mine.tokens]
        n = min(max(oracles.decided(model, tokens) + 1 - len(request.prompt), 0), len(mine.tokens))
        pairs = enumerate(zip(mine.tokens[:n], theirs.tokens))
        same = next((i for i, (x, y) in pairs if x != y), n)
        both = mine.logprobs[:same], theirs.logprobs[:same]
        np.testing.assert_allclose(*both, atol=ATOL, rtol=0)
        torch = torch_logprobs(model, tokens)[len(request.prompt) - 1 :]
        np.testing.assert_allclose(mine.logprobs[:n], torch[:n], atol=1e-4)
        if routed and oracles.decided(model, request.prompt) >= len(request.prompt) - 1:
            np.testing.assert_array_equal(mine.prompt_routes, theirs.prompt_routes)


def test_other_tenants_versions_and_weights_without_a_name_find_nothing(rng, tiny_base):
    base = tiny_base()
    _, stacks, slots = stacked_adapters(rng, base.cfg, CONFIGS, 0.3)
    engine = Engine(base, rows=(4,), reuse_decoded=True)
    engine.warm(stacks)
    prompt = some(rng, 40)
    asked = Request(prompt, slots["one"], max_tokens=NEW, revision="r", tenant="a")
    [[c]] = engine.generate([asked], stacks)
    longer = (*prompt, *c.tokens, 5)

    def reused(**how) -> int:
        [[c]] = engine.generate([Request(longer, max_tokens=1, **how)], stacks)
        return c.reused

    assert reused(adapter=slots["one"], revision="r", tenant="b") == 0
    assert reused(adapter=slots["one"], revision="other", tenant="a") == 0
    assert reused(tenant="a") == 0
    assert reused(adapter=slots["one"], revision="r", tenant="a") == whole_pages(len(longer) - 2)
    [[c]] = engine.generate([Request(prompt, slots["one"], max_tokens=NEW)], stacks)
    longer = (*prompt, *c.tokens, 5)
    assert reused(adapter=slots["one"]) == 0, "the slot may hold another adapter by now"


def test_tokens_behind_a_stop_are_not_found(rng, tiny_base):
    """A stop string that is seen late: what was drawn behind it is no part of the completion, and
    of no conversation.
    """
    decode = lambda ids: "".join(f"<{i}>" for i in ids)  # noqa: E731
    engine = Engine(tiny_base(), decode, rows=(2,), reuse_decoded=True)
    engine.warm()
    prompt = some(rng, 33)
    # Drawn, not greedy: a tiny base repeats itself, and one prompt in three had no new token so
    # late.
    [[whole]] = engine.generate([Request(prompt, max_tokens=NEW, tenant="other")])
    at = next(i for i in range(34, NEW) if whole.tokens[i] not in whole.tokens[:i])
    [[c]] = engine.generate([Request(prompt, max_tokens=NEW, stop=(f"<{whole.tokens[at]}>",))])
    assert c.tokens == whole.tokens[: at + 1]
    [[c]] = engine.generate([Request((*prompt, *c.tokens, 5), max_tokens=1)])
    assert c.reused == whole_pages(len(prompt) + at)
