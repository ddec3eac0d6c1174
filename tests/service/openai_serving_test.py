"""OpenAI's API as its own client sees it: what the engine answers, streamed or not, by the revision
that was named.
"""

import asyncio
import itertools
import json
import math
import re
import time

import httpx
import numpy as np
import openai
import pytest

from mint_jax import __version__
from mint_jax.catalog.packed import Schema
from mint_jax.errors import UserError
from mint_jax.residency.loads import QueueFull
from mint_jax.rollout.score import Scorer
from mint_jax.service.openai_answers import Answer
from mint_jax.service.openai_types import WIDE
from tests.service.chat_test import TEMPLATE
from tests.service.openai_world import CONFIG, export, joined, opened, served

TEXT = "The quick brown fox"
# halves and wholes of an emoji, of 日 and 本, and letters
PARTS = [10813, 242, 218, 23274, 115, 40993, 26411, 78, 80]
MULTIBYTE = {str(token): 60 for token in PARTS}
LETTERS = {str(token): 100 for token in (81, 82, 83)}  # a, b, c
MESSAGES = [{"role": "user", "content": "What is 2 + 2?"}]


@pytest.fixture(scope="module")
def world(mesh, tmp_path_factory):
    with opened(mesh, tmp_path_factory.mktemp("world")) as w, served(w):
        yield w


@pytest.fixture(scope="module")
def client(world):
    with openai.OpenAI(base_url=world.url + "/v1", api_key="none", max_retries=0) as one:
        yield one


def same(choice, done):
    assert (choice.text, choice.finish_reason) == (done.text, done.finish)


@pytest.mark.parametrize("model", ["tiny-random", "chat@serving", "chat"])
def test_completions_are_the_engines(world, client, model):
    digest = {"chat@serving": world.digests["chat@1"], "chat": world.digests["chat@2"]}.get(model)
    settings = {
        "temperature": 0.8,
        "top_p": 0.9,
        "seed": 5,
        "n": 2,
        "max_tokens": 8,
        "presence_penalty": 0.5,
        "logprobs": 3,
    }
    raw = client.completions.with_raw_response.create(
        model=model, prompt=TEXT, extra_body={"top_k": 40, "min_p": 0.01}, **settings
    )
    answer = raw.parse()
    settings |= {"top_logprobs": settings.pop("logprobs"), "top_k": 40, "min_p": 0.01}
    wanted = world.sampled(TEXT, digest, **settings)
    for choice, done in zip(answer.choices, wanted, strict=True):
        same(choice, done)
        assert choice.logprobs.token_logprobs == done.logprobs, "the model's own, bit for bit"
        for likeliest, top, p in zip(
            choice.logprobs.top_logprobs, done.top_logprobs, done.logprobs, strict=True
        ):
            assert p in likeliest.values()
            assert max(likeliest.values()) == max(p, *(q for _, q in top))
    assert (answer.mint_revision, raw.headers["x-mint-revision"]) == (digest, digest or "base")
    assert answer.usage.completion_tokens == sum(len(done.tokens) for done in wanted)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_prompts_may_be_texts_ids_or_lists_of_them(world, client):
    ids = world.base.tokenizer.encode(TEXT)
    forms = [TEXT, [TEXT, "and"], ids, [ids, ids[:2]]]
    for form in forms:
        answer = client.completions.create(
            model="chat", prompt=form, temperature=0, max_tokens=6, n=2
        )
        prompts = [form] if form in (TEXT, ids) else form
        wanted = [
            one
            for prompt in prompts
            for one in world.sampled(
                prompt, world.digests["chat@2"], temperature=0, max_tokens=6, n=2
            )
        ]
        assert [choice.index for choice in answer.choices] == list(range(len(wanted)))
        for choice, done in zip(answer.choices, wanted, strict=True):
            same(choice, done)
        assert answer.usage.prompt_tokens == sum(
            len(world.base.tokenizer.encode(p)) if isinstance(p, str) else len(p) for p in prompts
        )


def test_chats_are_the_engines(world, client):
    prompt = world.base.tokenizer.encode_chat(MESSAGES)
    answer = client.chat.completions.create(
        model="chat@1",
        messages=MESSAGES,
        seed=3,
        n=2,
        max_completion_tokens=12,
        logprobs=True,
        top_logprobs=2,
    )
    wanted = world.sampled(
        prompt, world.digests["chat@1"], seed=3, n=2, max_tokens=12, top_logprobs=2
    )
    for choice, done in zip(answer.choices, wanted, strict=True):
        assert (choice.message.content, choice.finish_reason) == (done.text, done.finish)
        assert [entry.logprob for entry in choice.logprobs.content] == done.logprobs
        assert [
            [top.logprob for top in entry.top_logprobs] for entry in choice.logprobs.content
        ] == [[p for _, p in top] for top in done.top_logprobs]
    assert answer.mint_revision == world.digests["chat@1"]
    assert answer.usage.prompt_tokens == len(prompt)
    parts = [{"role": "user", "content": [{"type": "text", "text": "What is 2 + 2?"}]}]
    again = client.chat.completions.create(
        model="chat@1", messages=parts, seed=3, n=2, max_tokens=12
    )
    assert [choice.message.content for choice in again.choices] == [done.text for done in wanted]


def test_a_chat_without_a_limit_may_fill_the_context(world, client):
    long = [{"role": "user", "content": "word " * 400}]
    prompt = world.base.tokenizer.encode_chat(long)
    answer = client.chat.completions.create(
        model="tiny-random", messages=long, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.usage.total_tokens == world.base.cfg.context
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == world.base.cfg.context - len(prompt)


STREAMED = {
    "likeliest, stops within pieces": {
        "logit_bias": LETTERS,
        "temperature": 2,
        "max_tokens": 40,
        "stop": ["abc"],
    },
    "half characters": {"n": 3, "logit_bias": MULTIBYTE, "max_tokens": 24},
    "stops within pieces": {
        "n": 4,
        "logit_bias": LETTERS,
        "temperature": 2,
        "max_tokens": 40,
        "stop": ["abc", "ccab", "bba"],
    },
}


@pytest.mark.parametrize("how", list(STREAMED))
def test_a_stream_is_the_same_as_an_answer(world, client, how):
    asked = {
        "model": "chat",
        "prompt": [TEXT, "日本 is"],
        "seed": int(world.rng.integers(2**32)),
        **STREAMED[how],
    }
    whole = client.completions.create(**asked)
    chunks = list(
        client.completions.create(stream=True, stream_options={"include_usage": True}, **asked)
    )
    found = joined(chunks)
    for choice, one in zip(whole.choices, found, strict=True):
        assert (one.text, one.finish) == (choice.text, choice.finish_reason)
        assert one.revision == world.digests["chat@2"]
        if choice.logprobs is not None:
            if "echo" not in asked:
                # A token that goes on with a character in pieces stands behind the character.
                assert all(
                    begin < max(1, len(choice.text)) + token.startswith("bytes:")
                    for begin, token in zip(
                        choice.logprobs.text_offset, choice.logprobs.tokens, strict=True
                    )
                ), "they end where the text does"
                assert "".join(choice.logprobs.tokens).startswith(choice.text) or "bytes:" in str(
                    choice.logprobs.tokens
                )
            assert one.logprobs == choice.logprobs.token_logprobs
            assert one.offsets == choice.logprobs.text_offset
            assert one.top == (choice.logprobs.top_logprobs or [])
    assert (chunks[-1].choices, chunks[-1].mint_revision) == ([], world.digests["chat@2"])
    totals = [
        (one.prompt_tokens, one.completion_tokens, one.total_tokens)
        for one in (whole.usage, chunks[-1].usage)
    ]
    assert totals[0] == totals[1]
    if how == "likeliest":  # a stop string may end a text with its first tokens
        assert all(one.early for one in found), "each piece has its own"
    if how == "half characters":
        told = [
            choice.text
            for chunk in chunks
            for choice in chunk.choices
            if choice.finish_reason is None
        ]
        assert any(not text.isascii() for text in told)
        assert any(choice.finish_reason != "stop" for choice in whole.choices)
    if how == "stops within pieces":
        assert any(choice.finish_reason == "stop" for choice in whole.choices)
        assert not any(stop in choice.text for choice in whole.choices for stop in asked["stop"])


@pytest.mark.parametrize(
    "settings", [{"n": 3, "logprobs": True, "top_logprobs": 2}, {"logit_bias": MULTIBYTE}]
)
def test_a_streamed_chat_is_the_same_as_an_answer(world, client, settings):
    asked = {"model": "chat@1", "messages": MESSAGES, "seed": 11, "max_tokens": 30, **settings}
    whole = client.chat.completions.create(**asked)
    found = joined(client.chat.completions.create(stream=True, **asked))
    for choice, one in zip(whole.choices, found, strict=True):
        assert (one.text, one.finish, one.revision) == (
            choice.message.content,
            choice.finish_reason,
            world.digests["chat@1"],
        )
        entries = choice.logprobs.content if choice.logprobs else []
        assert one.logprobs == [entry.logprob for entry in entries]
        assert one.top == [entry.top_logprobs for entry in entries]
        assert bool(one.early) == bool(entries), "each piece has its own"


@pytest.mark.parametrize("model", ["tiny-random", "chat@1"])
def test_echo_tells_log_probabilities_as_the_scorer_does(world, client, model):
    """As evaluation harnesses ask: a list of token lists, echo, one token behind."""
    lists = [world.rng.integers(3, 49000, n).tolist() for n in (7, 40, 2)]
    answer = client.completions.create(
        model=model, prompt=lists, echo=True, logprobs=1, max_tokens=1, temperature=0
    )
    leases = (
        [] if model == "tiny-random" else [world.residency.acquire(world.digests[model]).result(60)]
    )
    adapters = [lease.slot for lease in leases] * len(lists) or None
    wanted = Scorer(world.base).logprobs(lists, adapters, world.residency.stacks)
    for lease in leases:
        lease.release()
    for choice, tokens, scores in zip(answer.choices, lists, wanted, strict=True):
        told = choice.logprobs.token_logprobs
        assert told[0] is None
        assert choice.logprobs.top_logprobs[0] is None
        assert len(told) == len(tokens) + 1
        # prefill by pages and whole forwards sum otherwise
        np.testing.assert_allclose(told[1:-1], scores, atol=2e-4)
        for p, likeliest in zip(told[1:], choice.logprobs.top_logprobs[1:], strict=True):
            assert p in likeliest.values()
        assert told[-1] == max(choice.logprobs.top_logprobs[-1].values()), "greedy"
        assert choice.text.startswith(world.base.tokenizer.decode(tokens, skip_special=False))


def test_offsets_are_where_tokens_begin(world, client):
    choice = client.completions.create(
        model="chat", prompt="An été, 日本 <|im_end|> x", echo=True, logprobs=0, max_tokens=4
    ).choices[0]
    pairs = list(zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True))
    for i, (token, begin) in enumerate(pairs):
        # behind half a character, which a seed may draw, the text has a replacement
        if not any(one.startswith("bytes:") for one, _ in pairs[max(0, i - 1) : i + 1]):
            assert choice.text.startswith(token, begin) or token == "<|endoftext|>"


def test_log_probabilities_end_where_the_text_ends(world, client):
    """An end token and a stop string have no entries; those who score tokens, with echo or ids, get
    all of them.
    """
    forced = {"model": "chat", "prompt": TEXT, "temperature": 0, "max_tokens": 8, "logprobs": 1}
    by_id = {**forced, "logit_bias": {"2": 100}}
    by_text = {**forced, "logit_bias": LETTERS, "stop": ["a", "b", "c"]}
    for asked in (by_id, by_text):
        found = client.completions.create(**asked).choices[0]
        assert (found.finish_reason, found.text, len(found.logprobs.tokens)) == ("stop", "", 0)
        found = client.completions.create(**asked, extra_body={"return_token_ids": True}).choices[0]
        assert len(found.logprobs.tokens) == len(found.token_ids) == 1
        echoed = client.completions.create(**asked, echo=True).choices[0].logprobs
        assert len(echoed.tokens) == len(world.base.tokenizer.encode(TEXT)) + 1
    asked = {
        "model": "chat",
        "messages": MESSAGES,
        "max_tokens": 8,
        "logprobs": True,
        "temperature": 0,
        "logit_bias": {"2": 100},
    }
    [choice] = client.chat.completions.create(**asked).choices
    assert (choice.finish_reason, choice.message.content, choice.logprobs.content) == (
        "stop",
        "",
        [],
    )


def test_vllms_fields(world, client):
    prompt = world.base.tokenizer.encode(TEXT)
    extra = {
        "prompt_logprobs": 2,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "ignore_eos": True,
        "stop_token_ids": [7],
    }
    answer = client.completions.create(
        model="chat", prompt=prompt, logprobs=1, seed=1, max_tokens=5, extra_body=extra
    )
    [done] = world.sampled(
        prompt,
        world.digests["chat@2"],
        seed=1,
        max_tokens=5,
        stop_ids=(7,),
        prompt_logprobs=True,
        top_prompt_logprobs=2,
        top_logprobs=1,
    )
    [choice] = answer.choices
    assert (choice.token_ids, choice.prompt_token_ids) == (done.tokens, prompt)
    assert choice.logprobs.tokens == [f"token_id:{token}" for token in done.tokens]
    assert choice.prompt_logprobs[0] is None
    for place, token, p, top in zip(
        choice.prompt_logprobs[1:],
        prompt[1:],
        done.prompt_logprobs,
        done.top_prompt_logprobs,
        strict=True,
    ):
        assert place[str(token)]["logprob"] == p
        assert {int(i) for i in place} == {token, *(i for i, _ in top)}


def test_a_prompt_that_was_asked_before_is_told_as_cached(world, client):
    prompt = world.rng.integers(3, 49000, 200).tolist()
    first, second = (
        client.completions.create(model="chat", prompt=prompt, max_tokens=1).usage for _ in range(2)
    )
    assert first.prompt_tokens_details.cached_tokens == 0
    assert 100 < second.prompt_tokens_details.cached_tokens < 200


def test_schemas_regexes_and_choices_are_kept_to(client):
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}, "warm": {"type": "boolean"}},
        "required": ["city", "warm"],
        "additionalProperties": False,
    }
    named = {
        "type": "json_schema",
        "json_schema": {"name": "weather", "schema": schema, "strict": True},
    }
    for stream in (False, True):
        asked = {"model": "chat", "messages": MESSAGES, "response_format": named, "max_tokens": 60}
        answer = client.chat.completions.create(stream=stream, **asked)
        text = joined(answer)[0].text if stream else answer.choices[0].message.content
        read = json.loads(text)
        assert read.keys() == {"city", "warm"}
        assert read["city"] in ("Oslo", "Rome")
    anything = client.chat.completions.create(
        model="chat",
        messages=MESSAGES,
        response_format={"type": "json_object"},
        max_tokens=4,
        logit_bias={},
    )
    assert anything.choices[0].message.content.startswith("{")
    for extra in (
        {"guided_choice": ["yes", "no"]},
        {"structured_outputs": {"choice": ["yes", "no"]}},
        {"guided_regex": "yes|no"},
    ):
        assert client.completions.create(model="chat", prompt=TEXT, extra_body=extra).choices[
            0
        ].text in ("yes", "no")


def test_a_demanded_call_is_a_call_of_that_tool(world, client, monkeypatch):
    tokenizer = world.base.tokenizer
    monkeypatch.setattr(tokenizer, "_templates", {"default": TEMPLATE})
    monkeypatch.setattr(tokenizer, "_compiled", {})
    parameters = {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        for stream in (False, True):
            asked = {
                "model": "chat",
                "messages": MESSAGES,
                "tools": tools,
                "tool_choice": choice,
                "max_tokens": 60,
                "n": 2,
            }
            answer = client.chat.completions.create(stream=stream, **asked)
            found = joined(answer) if stream else answer.choices
            for one in found:
                [call] = one.calls if stream else one.message.tool_calls
                assert (call.function.name, json.loads(call.function.arguments)) == (
                    "weather",
                    {"city": "Oslo"},
                )
                assert (one.finish if stream else one.finish_reason) == "tool_calls"


def test_a_promotion_moves_later_requests_only(world, client):
    digest = export(world.catalog, world.rng, world.base, "chat", 3)
    world.digests["chat@3"] = digest
    with client.completions.create(
        model="chat@serving",
        prompt=TEXT,
        max_tokens=60,
        stream=True,
        extra_body={"ignore_eos": True},
    ) as first:
        chunks = [next(first)]
        world.catalog.promote("chat", 3, "serving")
        later = client.completions.create(model="chat@serving", prompt=TEXT, max_tokens=2)
        chunks += first
    assert later.mint_revision == digest
    assert joined(chunks)[0].revision == world.digests["chat@1"]
    world.catalog.rollback("chat", "serving")
    assert (
        client.completions.create(model="chat@serving", prompt=TEXT, max_tokens=2).mint_revision
        == world.digests["chat@1"]
    )


def test_names_of_others_unknown_and_retired_are_the_same_404(world, client):
    world.catalog.create_policy("a/old", Schema(world.base.fingerprint, CONFIG))
    retired = export(world.catalog, world.rng, world.base, "a/old", 1)
    world.catalog.retire("a/old")
    names = [
        "b/secret",
        "b/secret@1",
        world.digests["b/secret@1"],
        "secret",
        "nothing",
        "a/old",
        retired,
        "chat",
        "a/mine@9",
        "tinker://x/y/z",
    ]
    names += ["", "  ", "@", "x" * 3000, "\x00", "tinker://x/sampler_weights/secret"]
    mine = client.with_options(default_headers={"x-tenant": "a"})
    assert (
        mine.completions.create(model="mine", prompt=TEXT, max_tokens=2).mint_revision
        == world.digests["a/mine@1"]
    )
    path = "tinker://s:train:0/sampler_weights/mine"
    assert (
        mine.completions.create(model=path, prompt=TEXT, max_tokens=2).mint_revision
        == world.digests["a/mine@1"]
    )
    messages = set()
    for name in names[:-6] + names[-5:]:
        with pytest.raises(openai.NotFoundError) as error:
            mine.completions.create(model=name, prompt=TEXT, max_tokens=2)
        assert (error.value.code, error.value.param) == ("model_not_found", "model")
        messages.add(
            error.value.message.replace(repr(name[:200]), "NAME").replace(json.dumps(name), "NAME")
        )
    assert len(messages) == 1


def test_who_leaves_frees_the_rows(world, client):
    """A stream that is left, and a body that is not waited for."""
    extra = {"ignore_eos": True}
    stream = client.completions.create(
        model="chat", prompt=TEXT, max_tokens=480, n=8, stream=True, extra_body=extra
    )
    list(itertools.islice(stream, 2))
    stream.close()
    body = {"model": "chat", "prompt": TEXT, "max_tokens": 480, "n": 8, **extra}
    with pytest.raises(httpx.TimeoutException):
        httpx.post(world.url + "/v1/completions", json=body, timeout=0.2)
    before = world.engine.counts["drawn_tokens"]
    for _ in range(6000):
        if not world.engine.active.jobs:
            break
        time.sleep(0.01)
    assert not world.engine.active.jobs
    assert world.engine.counts["drawn_tokens"] - before < 8 * 480, (
        "the last one did not run to its end"
    )
    assert (
        client.completions.create(model="chat", prompt=TEXT, max_tokens=2).usage.completion_tokens
        > 0
    )


def test_many_at_once_by_the_asynchronous_client(world):
    models = {
        "tiny-random": None,
        "chat@1": world.digests["chat@1"],
        "chat@2": world.digests["chat@2"],
    }

    async def ask():
        async with openai.AsyncOpenAI(
            base_url=world.url + "/oai/api/v1", api_key="none", max_retries=0
        ) as client:

            async def one(i, model):
                asked = {"model": model, "prompt": TEXT, "seed": i, "max_tokens": 12}
                if i % 2:
                    return joined(
                        [
                            chunk
                            async for chunk in await client.completions.create(stream=True, **asked)
                        ]
                    )[0].text
                return (await client.completions.create(**asked)).choices[0].text

            return await asyncio.gather(*(one(i, model) for i in range(2) for model in models))

    found = asyncio.run(ask())
    wanted = [
        world.sampled(TEXT, digest, seed=i, max_tokens=12)[0].text
        for i in range(2)
        for digest in models.values()
    ]
    assert found == wanted


def test_a_full_queue_of_loads_says_when_to_ask_again(world, client, monkeypatch):
    def refuse(*_):
        raise QueueFull("3 loads are unfinished, the maximum", 2.5)

    monkeypatch.setattr(world.residency, "acquire", refuse)
    with pytest.raises(openai.RateLimitError) as error:
        client.completions.create(model="chat", prompt=[TEXT, TEXT])
    headers = error.value.response.headers
    assert (headers["retry-after"], headers["retry-after-ms"]) == ("3", "2500")
    assert not world.engine.active.jobs


def test_a_revision_that_cannot_be_loaded_is_told_before_a_stream_begins(
    world, client, monkeypatch
):
    digest = export(world.catalog, world.rng, world.base, "chat", 4)
    monkeypatch.setattr(world.weights, "_below", lambda _: np.zeros(8, np.uint8))
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="is corrupt"):
            client.completions.create(model=digest, prompt=TEXT, stream=stream)


def test_a_stream_names_its_revision_first_and_tells_a_failure_in_it(world, client, monkeypatch):
    asked = {
        "model": "chat@1",
        "prompt": TEXT,
        "max_tokens": 20,
        "stream": True,
        "extra_body": {"ignore_eos": True},
    }
    with client.completions.with_streaming_response.create(**asked) as raw:
        assert raw.headers["x-mint-revision"] == world.digests["chat@1"]
        assert raw.headers["content-type"].startswith("text/event-stream")
        assert list(raw.iter_lines())[-2:] == ["data: [DONE]", ""]

    def fail(*_):
        raise UserError("the engine was stopped")

    monkeypatch.setattr(Answer, "last_chunks", fail)
    with pytest.raises(openai.APIError, match="the engine was stopped"):
        list(client.completions.create(**asked))
    assert not world.engine.active.jobs


def test_a_failure_of_the_server_is_a_500_that_tells_nothing(world, client, monkeypatch):
    monkeypatch.setattr(world.weights, "resolve", lambda *_: 1 / 0)
    with pytest.raises(openai.InternalServerError) as error:
        client.completions.create(model="chat", prompt=TEXT)
    assert "division" not in str(error.value)


def each(field, *values):
    return [(field, {field: value}) for value in values]


def with_format(form):
    return {"response_format": form}


BAD = [  # field, body
    *each("prompt", 5, [], [[]], ["a", 5], [[5], "a"], [-1], [True], [10**9]),
    *each("max_tokens", "5", 0, 1.5, True, 512),
    *each("temperature", "1", -0.1, 2.1, float("nan"), 10**400),
    *(row for name in ("top_p", "min_p") for row in each(name, -0.1, 1.1, "x")),
    *each("top_k", -2, 0.5, 2**40),
    *each("n", 0, 129, 1.0),
    ("n", {"n": 100, "prompt": ["a"] * 50}),
    *each("seed", "1", 2**70),
    *each("stop", 5, [5], "", ["\ud800"], list("abcde")),
    *each("stop_token_ids", 5, [-1], list(range(50))),
    *each("logprobs", True, 6, -1),
    *(row for name in ("echo", "stream") for row in each(name, "yes")),
    *each("stream_options", 5, {"include_usage": True}),
    ("stream_options.include_usage", {"stream": True, "stream_options": {"include_usage": 3}}),
    *each("presence_penalty", 3),
    *each("frequency_penalty", -3),
    *each("repetition_penalty", 0),
    *each("logit_bias", [], {"a": 1}, {"5": "x"}, {"5": 101}, {"999999": 1}, {"5": None}),
    *each("response_format", 5, {}, {"type": "xml"}, {"type": "json_schema"}),
    (
        "response_format",
        with_format({"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}),
    ),
    ("response_format.json_schema", with_format({"type": "json_schema", "json_schema": 5})),
    *each("guided_json", {"$ref": "#/none"}, {"type": "string", "pattern": "("}, {"enum": []}, 5),
    ("", {"guided_json": json.loads('{"items":' * 150 + "{}" + "}" * 150)}),
    *each("guided_regex", "(", 5, ""),
    *each("guided_choice", [], "x", [""]),
    ("guided_choice", {"guided_regex": "a", "guided_choice": ["a"]}),
    *each("structured_outputs", []),
    *each("prompt_logprobs", -1, 30),
    *each("best_of", 3),
    *each("suffix", "end"),
    *each("use_beam_search", True),
    *each("model", 5, "", None, "\ud800"),
]


def says(content):
    return {"messages": [{"role": "user", "content": content}]}


def calls(called):
    return {"messages": [{"role": "assistant", "tool_calls": called}]}


F = {"name": "f", "parameters": {"$ref": "#"}}
BAD_CHATS = [
    *each("messages", None, [], {}, "hi", [5], [{}], [{"role": 5, "content": "x"}]),
    *each("messages", [{"role": "user"}]),
    *(("messages", says(v)) for v in (5, [5], [{"type": "image_url"}], "\ud800", "long " * 600)),
    ("messages[0].content", says([{"type": "input_audio"}])),
    ("messages", calls([{"function": {"name": "f", "arguments": "{"}}])),
    ("messages", calls(5)),
    ("messages[1].role", {"messages": [*MESSAGES, {"role": "tooling", "content": "x"}]}),
    *each("top_logprobs", 2),
    ("top_logprobs", {"logprobs": True, "top_logprobs": 21}),
    *each("logprobs", 1),
    *each("max_completion_tokens", 0),
    *each("echo", True),
    *each("tools", 5, [{}]),
    ("tools", {"tools": [{"type": "function", "function": F}], "tool_choice": "required"}),
    *each("tool_choice", "required"),
    *each("chat_template_kwargs", {"messages": []}, 5),
    *each("functions", [{"name": "f"}]),
]


def test_what_is_wrong_is_a_400_that_names_the_field(world, client):
    with httpx.Client(base_url=world.url, timeout=60) as raw:
        unnamed = []
        for bad, path, good in (
            (BAD, "/completions", {"prompt": TEXT}),
            (BAD_CHATS, "/chat/completions", {"messages": MESSAGES}),
        ):
            for field, change in bad:
                body = json.dumps({"model": "chat", **good, **change})
                found = raw.post("/v1" + path, content=body)
                assert found.status_code == 400, (change, found.text)
                error = found.json()["error"]
                if (
                    not (error["param"] or "").startswith(field)
                    and "not JSON" not in error["message"]  # half of a surrogate pair
                ):
                    unnamed.append((change, error))
                assert error["type"] == "invalid_request_error"
        assert not unnamed
        for content in (b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000, b"1" * 5000):
            found = raw.post("/v1/completions", content=content)
            assert found.status_code == 400
            assert re.search("body|JSON", found.json()["error"]["message"])
    assert not world.engine.active.jobs
    [choice] = client.completions.create(model="chat@1", prompt=TEXT, temperature=0).choices
    same(choice, world.sampled(TEXT, world.digests["chat@1"], temperature=0)[0])


def test_an_empty_prompt_is_the_beginning_of_a_document(world, client):
    start = world.base.need_tokenizer().special_ids["<|endoftext|>"]
    [done] = world.sampled([start], world.digests["chat@1"], temperature=0, max_tokens=4)
    for given in ({"prompt": ""}, {"prompt": None}, {}, {"prompt": [""]}):
        found = httpx.post(
            world.url + "/v1/completions",
            json={"model": "chat@1", "temperature": 0, "max_tokens": 4, **given},
            timeout=60,
        ).json()
        assert (found["choices"][0]["text"], found["usage"]["prompt_tokens"]) == (done.text, 1)
    echoed = client.completions.create(
        model="chat@1", prompt="", echo=True, temperature=0, max_tokens=4
    ).choices[0]
    assert echoed.text == done.text


def test_answers_say_what_serves_and_that_nothing_was_refused(world, client):
    asked = {"model": "chat", "messages": MESSAGES, "max_tokens": 2, "logprobs": True}
    answer = client.chat.completions.create(**asked)
    assert answer.system_fingerprint == f"mint-jax-{__version__}-{world.base.fingerprint[:12]}"
    chunks = list(client.chat.completions.create(stream=True, **asked))
    assert {chunk.system_fingerprint for chunk in chunks} == {answer.system_fingerprint}
    assert (
        client.completions.create(model="chat", prompt=TEXT, max_tokens=1).system_fingerprint
        == answer.system_fingerprint
    )
    raw = httpx.post(world.url + "/v1/chat/completions", json=asked, timeout=60).json()["choices"][
        0
    ]
    assert raw["message"]["refusal"] is None
    assert raw["logprobs"]["refusal"] is None


def test_one_setting_lifts_openais_limits(world, monkeypatch):
    messages = [{"role": "critic", "content": "x"}]
    many = {"temperature": 3, "stop": list("abcde"), "max_tokens": 1}
    wide = [
        ("completions", {"prompt": TEXT, "logprobs": 20, **many}),
        ("chat/completions", {"messages": messages, **many}),
    ]

    def statuses():
        return [
            httpx.post(
                f"{world.url}/v1/{path}", json={"model": "chat", **body}, timeout=60
            ).status_code
            for path, body in wide
        ]

    assert statuses() == [400, 400]
    monkeypatch.setattr(world.api, "bounds", WIDE)
    assert statuses() == [200, 200]


def test_prompts_beyond_the_context_are_told_so(client):
    for call, field in (
        (client.completions.create, "prompt"),
        (client.chat.completions.create, "messages"),
    ):
        text = "word " * 600
        with pytest.raises(openai.BadRequestError) as error:
            call(
                model="chat",
                **{field: text if field == "prompt" else [{"role": "user", "content": text}]},
            )
        assert (error.value.code, error.value.param) == ("context_length_exceeded", field)


def test_fields_that_nobody_knows_and_nulls_are_ignored(world, client):
    nulls = dict.fromkeys(("temperature", "n", "stop", "logprobs", "echo", "seed", "suffix"))
    body = {"model": "chat@1", "prompt": TEXT, "max_tokens": 3, **nulls, "no_such_field": [1]}
    found = httpx.post(world.url + "/v1/completions", json=body, timeout=60)
    assert found.status_code == 200
    assert math.isclose(found.json()["usage"]["completion_tokens"], 3)


def test_models_are_listed_and_adapters_loaded_by_name(world, client):
    page = client.models.list()
    ids = [model.id for model in page.data]
    assert ids == ["tiny-random", "Base/Name", "chat"]
    assert (page.data[-1].parent, page.data[-1].mint_revision) == (
        "tiny-random",
        world.weights.resolve("chat", "default").digest,
    )
    assert (page.data[0].parent, page.data[0].root) == (None, "tiny-random")
    assert client.models.retrieve("chat@1").mint_revision == world.digests["chat@1"]
    with httpx.Client(base_url=world.url, timeout=60) as raw:

        def post(path, **body):
            return raw.post(path, json=body)

        loaded = post("/v1/load_lora_adapter", lora_name="mine", lora_path="chat@1")
        assert (loaded.status_code, loaded.headers["content-type"].split(";")[0]) == (
            200,
            "text/plain",
        )
        assert (
            client.completions.create(model="mine", prompt=TEXT, max_tokens=1).mint_revision
            == world.digests["chat@1"]
        )
        assert (
            post("/v1/load_lora_adapter", lora_name="mine", lora_path="chat@2").status_code == 400
        ), "taken"
        assert (
            post(
                "/v1/load_lora_adapter", lora_name="mine", lora_path="chat@2", load_inplace=True
            ).status_code
            == 200
        )
        assert client.models.retrieve("mine").mint_revision == world.digests["chat@2"]
        assert (
            post("/v1/load_lora_adapter", lora_name="other", lora_path="nothing").status_code == 404
        )
        assert post("/v1/load_lora_adapter", lora_name="other").status_code == 400
        assert post("/v1/load_lora_adapter", lora_path="chat").status_code == 400
        first = raw.get("/v1/models", params={"limit": 2}).json()
        rest = raw.get("/v1/models", params={"limit": 2, "after": first["last_id"]}).json()
        assert (
            [card["id"] for card in first["data"] + rest["data"]],
            first["has_more"],
            rest["has_more"],
        ) == (["tiny-random", "Base/Name", "mine", "chat"], True, False)
        for limit in ("0", "x", "1001", "-1"):
            assert raw.get("/v1/models", params={"limit": limit}).status_code == 400
        assert post("/v1/unload_lora_adapter", lora_name="mine").status_code == 200
        assert post("/v1/unload_lora_adapter", lora_name="mine").status_code == 404
        assert post("/v1/unload_lora_adapter").status_code == 400
