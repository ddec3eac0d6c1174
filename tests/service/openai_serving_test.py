"""OpenAI's API through its own client: answers are the engine's, streamed or not, by the revision
that the request names.
"""

import json
import re
import time

import httpx
import numpy as np
import openai
import pytest

from mint_jax import __version__
from mint_jax.catalog.packed import Schema
from mint_jax.envs.judge import Judge
from mint_jax.errors import UserError
from mint_jax.residency.loads import QueueFull
from mint_jax.rollout.score import Scorer
from mint_jax.service.openai_answers import Answer
from tests.service.openai_world import CONFIG, export, joined, wrong_fields
from tests.service.openai_world import client as client
from tests.service.openai_world import world as world

TEXT = "The quick brown fox"
# parts and wholes of an emoji, of 日 and 本, and letters
PARTS = [10813, 242, 218, 23274, 115, 40993, 26411, 78, 80]
MULTIBYTE = {str(token): 60 for token in PARTS}
LETTERS = {str(token): 100 for token in (81, 82, 83)}  # a, b, c
MESSAGES = [{"role": "user", "content": "What is 2 + 2?"}]
GREEDY = {"model": "chat", "prompt": TEXT, "temperature": 0}


@pytest.mark.parametrize("model", ["tiny-random", "chat@serving"])
def test_completions_are_the_engines(world, client, model):
    digest = None if model == "tiny-random" else world.digests["chat@1"]
    settings = {"temperature": 0.8, "top_p": 0.9, "seed": 5, "n": 2, "max_tokens": 8}
    settings["presence_penalty"], extra = 0.5, {"top_k": 40, "min_p": 0.01}
    raw = client.completions.with_raw_response.create(
        model=model, prompt=TEXT, logprobs=3, extra_body=extra, **settings
    )
    answer = raw.parse()
    wanted = world.sampled(TEXT, digest, top_logprobs=3, **settings, **extra)
    for choice, done in zip(answer.choices, wanted, strict=True):
        assert (choice.text, choice.finish_reason) == (done.text, done.finish)
        scores = choice.logprobs
        assert scores.token_logprobs == done.logprobs, "of the model, bit for bit"
        for shown, top, p in zip(scores.top_logprobs, done.top_logprobs, done.logprobs):
            assert p in shown.values()
            assert max(shown.values()) == max(p, *(q for _, q in top))
    assert (answer.mint_revision, raw.headers["x-mint-revision"]) == (digest, digest or "base")
    assert answer.system_fingerprint == f"mint-jax-{__version__}-{world.base.fingerprint[:12]}"
    assert answer.usage.completion_tokens == sum(len(done.tokens) for done in wanted)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_chats_are_the_engines(world, client):
    prompt = world.base.tokenizer.encode_chat(MESSAGES)
    asked = {"model": "chat@1", "seed": 3, "n": 2, "max_completion_tokens": 12}
    answer = client.chat.completions.create(
        messages=MESSAGES, logprobs=True, top_logprobs=2, **asked
    )
    wanted = world.sampled(
        prompt, world.digests["chat@1"], seed=3, n=2, max_tokens=12, top_logprobs=2
    )
    for choice, done in zip(answer.choices, wanted, strict=True):
        assert (choice.message.content, choice.finish_reason) == (done.text, done.finish)
        entries = choice.logprobs.content
        assert [entry.logprob for entry in entries] == done.logprobs
        tops = [[top.logprob for top in entry.top_logprobs] for entry in entries]
        assert tops == [[p for _, p in top] for top in done.top_logprobs]
    assert answer.mint_revision == world.digests["chat@1"]
    assert answer.usage.prompt_tokens == len(prompt)
    parts = [{"role": "user", "content": [{"type": "text", "text": "What is 2 + 2?"}]}]
    again = client.chat.completions.create(messages=parts, **asked)
    assert [choice.message.content for choice in again.choices] == [done.text for done in wanted]
    long = [{"role": "user", "content": "word " * 400}]
    extra = {"ignore_eos": True}
    filled = client.chat.completions.create(model="tiny-random", messages=long, extra_body=extra)
    assert filled.usage.total_tokens == world.base.cfg.context, "without a limit of its own"
    assert filled.choices[0].finish_reason == "length"


STREAMED = {
    "parts of characters": {"n": 3, "logit_bias": MULTIBYTE, "max_tokens": 24},
    "stop strings": {"n": 4, "logit_bias": LETTERS, "logprobs": 1, "temperature": 2}
    | {"max_tokens": 40, "stop": ["abc", "ccab", "bba"]},
    "a chat": {"messages": MESSAGES, "n": 3, "max_tokens": 30, "logprobs": True, "top_logprobs": 2},
}


@pytest.mark.parametrize("case", STREAMED)
def test_a_stream_equals_the_whole_answer(world, client, case):
    create, asked = client.completions.create, {"prompt": [TEXT, "日本 is"]} | STREAMED[case]
    if case == "a chat":
        create, asked = client.chat.completions.create, {**STREAMED[case]}
    asked |= {"model": "chat", "seed": int(world.rng.integers(2**32))}
    whole = create(**asked)
    chunks = list(create(stream=True, stream_options={"include_usage": True}, **asked))
    for choice, one in zip(whole.choices, joined(chunks), strict=True):
        text = choice.message.content if case == "a chat" else choice.text
        assert (one.text, one.finish) == (text, choice.finish_reason)
        assert one.revision == world.digests["chat@2"]
        if case == "a chat":
            entries = choice.logprobs.content
            assert one.logprobs == [entry.logprob for entry in entries]
            assert one.top == [entry.top_logprobs for entry in entries]
            assert bool(one.early) == bool(entries), "log-probabilities come with their tokens"
        elif scores := choice.logprobs:
            assert one.logprobs == scores.token_logprobs
            assert (one.offsets, one.top) == (scores.text_offset, scores.top_logprobs)
            assert "".join(scores.tokens).startswith(text)
            assert not any(stop in text for stop in asked["stop"])
    assert (chunks[-1].choices, chunks[-1].mint_revision) == ([], world.digests["chat@2"])
    last = chunks[-1].usage
    assert last.total_tokens == whole.usage.total_tokens
    assert last.prompt_tokens == last.total_tokens - whole.usage.completion_tokens
    if case == "stop strings":
        assert any(choice.finish_reason == "stop" for choice in whole.choices)
    if case == "parts of characters":
        early = [c.text for chunk in chunks for c in chunk.choices if c.finish_reason is None]
        assert any(not text.isascii() for text in early)


def test_echoed_log_probabilities_are_the_scorers(world, client):
    """Evaluation harnesses send lists of tokens with echo."""
    lists = [world.rng.integers(3, 49000, n).tolist() for n in (7, 40, 2)]
    answer = client.completions.create(
        model="chat@1", prompt=lists, echo=True, logprobs=1, max_tokens=1, temperature=0
    )
    lease = world.residency.acquire(world.digests["chat@1"]).result(60)
    wanted = Scorer(world.base).logprobs(lists, [lease.slot] * 3, world.residency.stacks)
    lease.release()
    for choice, tokens, scores in zip(answer.choices, lists, wanted, strict=True):
        found, top = choice.logprobs.token_logprobs, choice.logprobs.top_logprobs
        assert (found[0], top[0], len(found)) == (None, None, len(tokens) + 1)
        # prefill by pages and whole forwards sum in another order
        np.testing.assert_allclose(found[1:-1], scores, atol=2e-4)
        assert all(p in likeliest.values() for p, likeliest in zip(found[1:], top[1:]))
        assert found[-1] == max(top[-1].values()), "greedy"
        assert choice.text.startswith(world.base.tokenizer.decode(tokens, skip_special=False))


def test_log_probabilities_end_where_the_text_ends(world, client):
    """End tokens and stop strings have entries only with echo or ids."""
    forced = {**GREEDY, "max_tokens": 8, "logprobs": 1}
    by_text = {"logit_bias": LETTERS, "stop": ["a", "b", "c"]}
    for end in ({"logit_bias": {"2": 100}}, by_text):
        found = client.completions.create(**forced, **end).choices[0]
        assert (found.finish_reason, found.text, found.logprobs.tokens) == ("stop", "", [])
        ids = {"return_token_ids": True, "return_tokens_as_token_ids": True}
        found = client.completions.create(**forced, **end, extra_body=ids).choices[0]
        [token] = found.token_ids
        assert found.logprobs.tokens == [f"token_id:{token}"]
        assert found.prompt_token_ids == world.base.tokenizer.encode(TEXT)
        echoed = client.completions.create(**forced, **end, echo=True).choices[0].logprobs
        assert len(echoed.tokens) == len(found.prompt_token_ids) + 1


def test_usage_counts_cached_tokens(world, client):
    prompt = world.rng.integers(3, 49000, 200).tolist()
    first, second = (
        client.completions.create(model="chat", prompt=prompt, max_tokens=1).usage for _ in range(2)
    )
    assert first.prompt_tokens_details.cached_tokens == 0
    assert 100 < second.prompt_tokens_details.cached_tokens < 200


def test_answers_follow_schemas_regexes_and_choices(client):
    schema = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}}
    schema |= {"required": ["city"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": schema}}
    asked = {"model": "chat", "messages": MESSAGES, "max_tokens": 60}
    for stream in (False, True):
        answer = client.chat.completions.create(stream=stream, response_format=form, **asked)
        text = joined(answer)[0].text if stream else answer.choices[0].message.content
        assert json.loads(text) in ({"city": "Oslo"}, {"city": "Rome"})
    asked |= {"response_format": {"type": "json_object"}, "max_tokens": 4}
    anything = client.chat.completions.create(**asked)
    assert anything.choices[0].message.content.startswith("{")
    for outputs in ({"choice": ["yes", "no"]}, {"regex": "yes|no"}, {"json": {"enum": ["yes"]}}):
        extra = {"structured_outputs": outputs}
        answer = client.completions.create(model="chat", prompt=TEXT, extra_body=extra)
        assert answer.choices[0].text.strip('"') in ("yes", "no")


def test_a_served_base_judges_answers(world):
    body = {"structured_outputs": {"regex": "Score: [3-5]"}}
    judge = Judge(f"{world.url}/v1", "chat", key_variable="", body=body)
    assert judge.score("2 + 2?", "4", "four") in (3.0, 4.0, 5.0)


def test_a_promotion_moves_later_requests_only(world, client):
    digest = export(world.catalog, world.rng, world.base, "chat", 3)
    world.digests["chat@3"] = digest
    asked = {"model": "chat@serving", "prompt": TEXT}
    extra = {"ignore_eos": True}
    with client.completions.create(max_tokens=60, stream=True, extra_body=extra, **asked) as first:
        chunks = [next(first)]
        world.catalog.promote("chat", 3, "serving")
        later = client.completions.create(max_tokens=2, **asked)
        chunks += first
    assert later.mint_revision == digest
    assert joined(chunks)[0].revision == world.digests["chat@1"]
    world.catalog.rollback("chat", "serving")
    again = client.completions.create(max_tokens=2, **asked)
    assert again.mint_revision == world.digests["chat@1"]


def test_unknown_retired_and_other_tenants_names_are_the_same_404(world, client):
    world.catalog.create_policy("a/old", Schema(world.base.fingerprint, CONFIG))
    retired = export(world.catalog, world.rng, world.base, "a/old", 1)
    world.catalog.retire("a/old")
    mine = client.with_options(default_headers={"x-tenant": "a"})
    for name in ("mine", "tinker://s:train:0/sampler_weights/mine"):
        answer = mine.completions.create(model=name, prompt=TEXT, max_tokens=2)
        assert answer.mint_revision == world.digests["a/mine@1"]
    names = ["b/secret", "b/secret@1", world.digests["b/secret@1"], "secret", "nothing", "a/old"]
    names += [retired, "chat", "a/mine@9", "tinker://x/y/z", "  ", "@", "x" * 3000, "\x00"]
    names.append("tinker://x/sampler_weights/secret")
    messages = set()
    for name in names:
        with pytest.raises(openai.NotFoundError) as error:
            mine.completions.create(model=name, prompt=TEXT, max_tokens=2)
        assert (error.value.code, error.value.param) == ("model_not_found", "model")
        text = error.value.message.replace(repr(name[:200]), "NAME")
        messages.add(text.replace(json.dumps(name), "NAME"))
    assert len(messages) == 1


def test_disconnecting_frees_the_rows(world, client):
    body = {"model": "chat", "prompt": TEXT, "max_tokens": 480, "n": 8, "ignore_eos": True}
    with httpx.stream("POST", world.url + "/v1/completions", json={**body, "stream": True}) as raw:
        next(raw.iter_lines())
    with pytest.raises(httpx.TimeoutException):
        httpx.post(world.url + "/v1/completions", json=body, timeout=0.2)
    before, ends = world.engine.counts["drawn_tokens"], time.monotonic() + 60
    while world.engine.active.jobs and time.monotonic() < ends:
        time.sleep(0.01)
    assert not world.engine.active.jobs
    assert world.engine.counts["drawn_tokens"] - before < 8 * 480, "the last one was cancelled"
    assert client.completions.create(**GREEDY, max_tokens=2).usage.completion_tokens > 0


def test_a_full_queue_of_loads_answers_429(world, client, monkeypatch):
    def refuse(*_):
        raise QueueFull("3 loads are unfinished, the maximum", 2.5)

    monkeypatch.setattr(world.residency, "acquire", refuse)
    with pytest.raises(openai.RateLimitError) as error:
        client.completions.create(model="chat", prompt=[TEXT, TEXT])
    headers = error.value.response.headers
    assert (headers["retry-after"], headers["retry-after-ms"]) == ("3", "2500")
    assert not world.engine.active.jobs


def test_a_corrupt_revision_fails_before_a_stream_starts(world, client, monkeypatch):
    digest = export(world.catalog, world.rng, world.base, "chat", 4)
    monkeypatch.setattr(world.catalog, "load", lambda _: np.zeros(8, np.uint8))
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="is corrupt"):
            client.completions.create(model=digest, prompt=TEXT, stream=stream)


def test_a_stream_names_its_revision_first_and_ends_with_a_failure(world, client, monkeypatch):
    asked = {"model": "chat@1", "prompt": TEXT, "max_tokens": 20, "stream": True}
    asked["extra_body"] = {"ignore_eos": True}
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


def each(field, *values):
    return [(field, {field: value}) for value in values]


def outputs(**constraint):
    return each("structured_outputs", constraint)


def json_schema(schema):
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


BAD = [  # start of param, change of the body
    *each("prompt", 5, [[]], ["a", 5], [-1], [10**9]),
    *each("max_tokens", "5", 0, True, 512),
    *each("temperature", 2.1, float("nan"), 10**400),
    *each("top_p", 1.1),
    *each("n", 0, 129),
    ("n", {"n": 100, "prompt": ["a"] * 50}),
    *each("stop", [5], "", ["\ud800"], list("abcde")),
    *each("stop_token_ids", list(range(50))),
    *each("logprobs", True, 6),
    *each("stream_options", {"include_usage": True}),
    ("stream_options.include_usage", {"stream": True, "stream_options": {"include_usage": 3}}),
    *each("logit_bias", {"a": 1}, {"5": 101}, {"999999": 1}),
    *each("response_format", {"type": "xml"}, {"type": "json_schema"}),
    ("response_format.json_schema", json_schema(5)),
    *(row for value in ({"$ref": "#/none"}, {"enum": []}, 5) for row in outputs(json=value)),
    ("", {"structured_outputs": {"json": json.loads('{"items":' * 150 + "{}" + "}" * 150)}}),
    *outputs(regex="("),
    *outputs(regex="a", choice=["a"]),
    *each("best_of", 3),
    *each("guided_regex", "a"),
    *each("model", 5, ""),
]


def says(content):
    return {"messages": [{"role": "user", "content": content}]}


def calls(called):
    return {"messages": [{"role": "assistant", "tool_calls": called}]}


NO_TYPE = {"type": "function", "function": {"name": "f", "parameters": {"type": "nothing"}}}
BAD_CHATS = [
    *each("messages", None, [], [5], [{"role": 5, "content": "x"}], [{"role": "user"}]),
    *(("messages", says(v)) for v in ([5], [{"type": "image_url"}])),
    ("messages", calls([{"function": {"name": "f", "arguments": "{"}}])),
    ("messages[1].role", {"messages": [*MESSAGES, {"role": "tooling", "content": "x"}]}),
    *each("top_logprobs", 2),
    *each("echo", True),
    *each("tools", [{}]),
    ("tools", {"tools": [NO_TYPE], "tool_choice": "required"}),
    *each("tool_choice", "required"),
    *each("chat_template_kwargs", {"messages": []}),
]


def test_a_wrong_field_is_a_400_that_names_it(world, client):
    assert not wrong_fields(world, "completions", {"prompt": TEXT}, BAD)
    assert not wrong_fields(world, "chat/completions", {"messages": MESSAGES}, BAD_CHATS)
    for content in (b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000, b"1" * 5000):
        found = httpx.post(world.url + "/v1/completions", content=content, timeout=60)
        assert found.status_code == 400
        assert re.search("body|JSON", found.json()["error"]["message"])
    long = "word " * 600
    for call, prompt in (
        (client.completions.create, {"prompt": long}),
        (client.chat.completions.create, says(long)),
    ):
        with pytest.raises(openai.BadRequestError) as error:
            call(model="chat", **prompt)
        assert error.value.code == "context_length_exceeded"


def test_an_empty_prompt_starts_a_document_and_nulls_are_absent(world, client):
    start = world.base.need_tokenizer().special_ids["<|endoftext|>"]
    [done] = world.sampled([start], world.digests["chat@1"], temperature=0, max_tokens=4)
    nulls = dict.fromkeys(("n", "stop", "logprobs", "echo", "seed", "suffix"))
    for given in ({"prompt": ""}, {"prompt": None}, {}, {"prompt": [""], "no_such_field": [1]}):
        body = {"model": "chat@1", "temperature": 0, "max_tokens": 4, **nulls, **given}
        found = httpx.post(world.url + "/v1/completions", json=body, timeout=60).json()
        assert (found["choices"][0]["text"], found["usage"]["prompt_tokens"]) == (done.text, 1)
    asked = {"model": "chat@1", "prompt": "", "echo": True, "temperature": 0, "max_tokens": 4}
    assert client.completions.create(**asked).choices[0].text == done.text


def test_one_setting_lifts_openais_limits(world, monkeypatch):
    many = {"model": "chat", "temperature": 3, "stop": list("abcde"), "max_tokens": 1}
    messages = [{"role": "critic", "content": "x"}]

    def statuses():
        bodies = ({"prompt": TEXT, "logprobs": 20, **many}, {"messages": messages, **many})
        urls = (f"{world.url}/v1/completions", f"{world.url}/v1/chat/completions")
        return [httpx.post(url, json=b, timeout=60).status_code for url, b in zip(urls, bodies)]

    assert statuses() == [400, 400]
    monkeypatch.setattr(world.api, "strict", False)
    assert statuses() == [200, 200]


def test_models_are_listed_and_adapters_loaded_by_name(world, client):
    data = client.models.list().data
    assert [model.id for model in data] == ["tiny-random", "Base/Name", "chat"]
    newest = world.weights.resolve("chat", "default").digest
    assert (data[-1].parent, data[-1].mint_revision) == ("tiny-random", newest)
    assert (data[0].parent, data[0].root) == (None, "tiny-random")
    assert client.models.retrieve("chat@1").mint_revision == world.digests["chat@1"]
    with httpx.Client(base_url=world.url + "/v1/", timeout=60) as raw:

        def load(**body):
            return raw.post("load_lora_adapter", json=body)

        loaded = load(lora_name="mine", lora_path="chat@1")
        assert loaded.status_code == 200
        assert loaded.headers["content-type"].startswith("text/plain")
        answer = client.completions.create(model="mine", prompt=TEXT, max_tokens=1)
        assert answer.mint_revision == world.digests["chat@1"]
        moved = {"lora_name": "mine", "lora_path": "chat@2"}
        assert load(**moved).status_code == 400, "the name is taken"
        assert load(**moved, load_inplace=True).status_code == 200
        assert client.models.retrieve("mine").mint_revision == world.digests["chat@2"]
        assert load(lora_name="other", lora_path="nothing").status_code == 404
        assert load(lora_name="other").status_code == load(lora_path="chat").status_code == 400
        first = raw.get("models", params={"limit": 2}).json()
        rest = raw.get("models", params={"limit": 2, "after": first["last_id"]}).json()
        ids = [card["id"] for card in first["data"] + rest["data"]]
        assert ids == ["tiny-random", "Base/Name", "mine", "chat"]
        assert (first["has_more"], rest["has_more"]) == (True, False)
        for limit in ("0", "x", "1001"):
            assert raw.get("models", params={"limit": limit}).status_code == 400
        for status in (200, 404):
            gone = raw.post("unload_lora_adapter", json={"lora_name": "mine"})
            assert gone.status_code == status
