"""Speculative decoding: the same tokens and log-probabilities as without drafts, bit for bit,
whatever the drafts are, and what a draft is taken from.
"""

import dataclasses

import numpy as np
import pytest

from mint_jax.errors import UserError
from mint_jax.models import base as base_lib
from mint_jax.rollout import device
from mint_jax.rollout.drafts import Draft, Drafts
from mint_jax.rollout.engine import Engine
from mint_jax.rollout.request import Completion, Request
from mint_jax.rollout.samples import CachedPrompt, SampleState
from tests import oracles
from tests.laws.shardings_equal_test import save_checkpoint
from tests.rollout.families_test import CONFIGS, FAST, PAGES
from tests.rollout.invariants import check_schedule
from tests.rollout.score_test import stacked_adapters

NEW = 40


def same(some: list[list[Completion]], others: list[list[Completion]]) -> None:
    """Equal in every field, bit for bit."""
    for group, other in zip(some, others, strict=True):
        for a, b in zip(group, other, strict=True):
            for field in dataclasses.fields(Completion):
                if field.name == "reused":
                    continue
                x, y = getattr(a, field.name), getattr(b, field.name)
                assert type(x) is type(y)
                np.testing.assert_array_equal(np.asarray(x), np.asarray(y), err_msg=field.name)


def spoiled(rng, completions: list[Completion]) -> tuple[tuple[int, ...], ...]:
    """Tokens of which some are wrong, the middle one always: drafts are accepted in part."""
    out = []
    for c in completions:
        wrong, tokens = rng.random(len(c.tokens)) < 0.15, np.array(c.tokens)
        wrong[len(wrong) // 2] = True
        out.append(tuple(np.where(wrong, (tokens + 1) % 96, tokens).tolist()))
    return tuple(out)


@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=() if f in FAST else pytest.mark.long) for f in oracles.TINY],
)
def test_drafts_change_no_bit_of_any_family(rng, tiny_base, family):
    """Mixed adapters, teams, filters, penalties, stops, alternatives, routes, lost pages."""
    base = tiny_base(family)
    _, stacks, slots = stacked_adapters(rng, base.cfg, CONFIGS, 0.3)

    def request(name: str | None, length: int, n: int, **how) -> Request:
        prompt = tuple(rng.integers(3, 96, length).tolist())
        how = {"seed": int(rng.integers(2**31)), "max_tokens": NEW} | how
        return Request(prompt, slots.get(name), n, revision=name, **how)

    asked = [
        request("one", 70, 1, temperature=0, top_logprobs=2),
        request("eight", 5, 3, temperature=0.7, top_p=0.9, frequency_penalty=0.3),
        request(None, 33, 2, stop_ids=(7, 8, 9)),
        request("other", 1, 1, max_tokens=NEW - 7, repetition_penalty=1.2),
        request("eight", 40, 1, regex="[a-z]{6}") if base.tokenizer else request("eight", 40, 1),
    ]
    nbytes = PAGES * device.page_bytes(base.cfg, base.dtype, base.cfg.routed)

    def engine(**how) -> Engine:
        how |= {"rows": (16,), "cache_bytes": nbytes, "keep_routes": base.cfg.routed}
        return Engine(base, **how)

    wanted = engine().generate(asked, stacks)
    # an engine that guesses nothing verifies what a request says, right or wrong
    right = [tuple(tuple(c.tokens[:25]) for c in found) for found in wanted[:2]]
    prefixes = [*right, *(spoiled(rng, found) for found in wanted[2:])]
    # The first token of a dispatch is always verified. A wrong one further on may be the token
    # that the dispatch draws itself: then no draft is rejected.
    prefixes[3] = (((prefixes[3][0][0] + 1) % 96, *prefixes[3][0][1:]),)
    known = [dataclasses.replace(r, prefixes=some) for r, some in zip(asked, prefixes)]
    verifying = engine()
    same(verifying.generate(known, stacks), wanted)
    counts = verifying.counts
    if "states" in device.kinds(base.cfg):
        assert not counts["drafted_tokens"], "a state cannot forget a wrong draft"
        return
    assert 0 < counts["accepted_prefix"] < counts["drafted_prefix"] == counts["drafted_tokens"]
    given = [dataclasses.replace(r, drafts=spoiled(rng, found)) for r, found in zip(asked, wanted)]
    drafting = engine(speculative_tokens=3)
    same(drafting.generate(given, stacks), wanted)
    check_schedule(drafting.active.schedule)
    counts = drafting.counts
    assert 0 < counts["accepted_tokens"] < counts["drafted_tokens"], "some right, some wrong"
    assert counts["drawn_tokens"] == sum(len(c.tokens) for group in wanted for c in group)
    assert not drafting.active.drafts._histories, "what has ended is forgotten"


@pytest.mark.parametrize("most", [0, 3])
def test_what_has_prefix_is_drawn_many_tokens_at_once(rng, tiny_base, most):
    """Beside samples that draw one token at a time, and in any engine."""
    prompts = [tuple(rng.integers(3, 96, n).tolist()) for n in (5, 9, 20, 30, 11)]
    requests = [Request(prompt, max_tokens=NEW) for prompt in prompts]
    wanted = Engine(tiny_base(), rows=(32,)).generate(requests)
    [first] = wanted[0]
    requests[0] = dataclasses.replace(requests[0], prefixes=(tuple(first.tokens[: NEW - 4]),))
    engine = Engine(tiny_base(), rows=(32,), speculative_tokens=most)
    dispatches = []
    with engine.serving():
        streams = [engine.submit(request) for request in requests]
        streams[0].listen(lambda piece: dispatches.append(engine.counts["decodes"]))
        same([stream.result() for stream in streams], wanted)
    assert dispatches[-1] <= 6, "15 tokens at once, then the few that are left"
    assert engine.counts["accepted_prefix"] == engine.counts["drafted_prefix"] > NEW // 2


def test_right_drafts_save_dispatches(rng, tiny_base):
    base = tiny_base()
    requests = [
        Request(tuple(rng.integers(3, 96, n).tolist()), n=2, max_tokens=NEW, seed=n) for n in (5, 9)
    ]
    plain = Engine(base, rows=(32,), steps=1)
    drafting = Engine(base, rows=(32,), speculative_tokens=7)
    wanted = plain.generate(requests)
    drafts = [tuple(tuple(c.tokens) for c in found) for found in wanted]
    given = [dataclasses.replace(r, drafts=some) for r, some in zip(requests, drafts)]
    same(drafting.generate(given), wanted)
    assert drafting.counts["accepted_given"] > 0
    assert drafting.counts["decodes"] < plain.counts["decodes"] / 3
    # full: each row decodes for itself
    full = Engine(base, rows=(4,), speculative_tokens=7)
    full.generate(given)
    assert not full.counts["drafted_tokens"]


@pytest.mark.long
@pytest.mark.parametrize("family", ["dense", "latent"])
def test_drafts_change_no_bit_over_a_mesh(rng, tmp_path, mesh8, family):
    """Rows and pages are divided among the devices; a draft stays with its sample's."""
    save_checkpoint(family, tmp_path)
    base = base_lib.load(str(tmp_path), mesh8)
    requests = [
        Request(tuple(rng.integers(3, 96, n).tolist()), n=n % 3 + 1, max_tokens=NEW, seed=n)
        for n in (4, 35, 9, 40)
    ]
    plain, drafting = (Engine(base, rows=(64,), speculative_tokens=k) for k in (0, 3))
    wanted = plain.generate(requests)
    given = [
        dataclasses.replace(r, drafts=spoiled(rng, found)) for r, found in zip(requests, wanted)
    ]
    same(drafting.generate(given), wanted)
    assert 0 < drafting.counts["accepted_tokens"] < drafting.counts["drafted_tokens"]
    assert drafting.parts > 1


def test_a_draft_is_what_followed_the_same_tokens():
    prompt, drafts = (1, 2, 3, 4, 5, 6, 7), Drafts(4)
    mine, sibling, other, stranger = (
        SampleState(CachedPrompt(Request(prompt, tenant=key[0]), key), 0, 0)
        for key in (("a", "v"), ("a", "v"), ("a", "w"), ("b", "v"))
    )
    for one in (mine, sibling, other, stranger):
        drafts.began(one.prompt)
    mine.reach = 4
    assert drafts.propose(mine, 4) == []
    stranger.tokens = [30, 31]
    drafts.drew(stranger, 2)
    assert drafts.propose(mine, 4) == [], "another tenant's"
    other.tokens = [20, 21]
    drafts.drew(other, 2)
    assert drafts.propose(mine, 4) == [Draft(20, "family"), Draft(21, "family")]
    sibling.tokens = [10, 11]
    drafts.drew(sibling, 2)
    assert drafts.propose(mine, 4) == [Draft(10, "siblings"), Draft(11, "siblings")]
    assert drafts.propose(mine, 1) == [Draft(10, "siblings")]
    mine.tokens = [9, 2, 3]
    assert drafts.propose(mine, 2) == [Draft(4, "prompt"), Draft(5, "prompt")]
    mine.reach = 1
    assert drafts.propose(mine, 2) == [Draft(4, "prompt")]


@pytest.mark.parametrize(
    ("how", "family", "wrong"),
    [
        ({"speculative_tokens": -1}, "llama", "speculative_tokens is -1; expected 0"),
        ({"speculative_tokens": 16}, "llama", "expected 0 .none. to 15"),
        ({"speculative_tokens": 1}, "qwen3_next", "a state, which cannot forget a wrong draft"),
    ],
)
def test_settings_that_are_refused(tiny_base, how, family, wrong):
    with pytest.raises(UserError, match=wrong):
        Engine(tiny_base(family), **how)


@pytest.mark.parametrize("field", ["drafts", "prefixes"])
@pytest.mark.parametrize("tokens", [((97,),), ((-1,),), ((True,),), ("ab",), 5, ((0.5,),)])
def test_drafts_that_are_no_tokens(tiny_base, field, tokens):
    with pytest.raises(UserError, match=f"{field} is"):
        Engine(tiny_base()).generate([Request((1, 2), **{field: tokens})])
