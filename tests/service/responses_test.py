"""The Responses API as OpenAI's own client sees it: the chat's answers, as items and as events."""

import json
from typing import Literal

import httpx
import openai
import pytest
from openai.types.responses import Response as Theirs
from openai.types.responses import ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from mint_jax.errors import UserError
from mint_jax.service.responses import Response, Store, Unknown
from tests.service.openai_world import opened, served

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "It.",
    "parameters": PARAMETERS,
    "strict": True,
}
ASKED = {"model": "chat@1", "temperature": 0, "max_output_tokens": 12}
QUESTION = "What is 2 + 2?"


@pytest.fixture(scope="module")
def world(mesh, tmp_path_factory):
    with opened(mesh, tmp_path_factory.mktemp("world")) as w, served(w):
        yield w


@pytest.fixture(scope="module")
def client(world):
    with openai.OpenAI(base_url=world.url + "/v1", api_key="none", max_retries=0) as one:
        yield one


def chat_of(client, messages, **settings):
    made = client.chat.completions.create(
        model="chat@1", messages=messages, temperature=0, max_tokens=12, **settings
    )
    return made.choices[0].message.content


def checked(response):
    """A response as it was sent, if the client's own types take it: the client itself takes
    anything.
    """
    Theirs.model_validate(response.model_dump(exclude_unset=True))
    return response


def test_responses_are_the_chats_answers(world, client):
    user = {"role": "user", "content": QUESTION}
    plain = checked(client.responses.create(input=QUESTION, **ASKED))
    assert plain.output_text == chat_of(client, [user])
    assert (plain.status, plain.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert plain.mint_revision == world.digests["chat@1"]
    assert plain.usage.total_tokens == plain.usage.input_tokens + plain.usage.output_tokens
    assert plain.usage.output_tokens == 12
    told = client.responses.create(
        input=[user], instructions="Be brief.", metadata={"a": "b"}, **ASKED
    )
    assert told.output_text == chat_of(client, [{"role": "system", "content": "Be brief."}, user])
    assert (told.instructions, told.metadata) == ("Be brief.", {"a": "b"})
    parts = [
        {
            "type": "message",
            "role": "developer",
            "content": [{"type": "input_text", "text": "Now."}],
        },
        user,
    ]
    joined = client.responses.create(input=parts, instructions="Be brief.", **ASKED)
    assert joined.output_text == chat_of(
        client, [{"role": "system", "content": "Be brief.\n\nNow."}, user]
    )
    logged = client.responses.create(
        input=QUESTION, include=["message.output_text.logprobs"], top_logprobs=2, **ASKED
    )
    entries = logged.output[0].content[0].logprobs
    special = world.base.need_tokenizer().special_ids  # a seed may draw one; the text has none
    shown = [bytes(entry.bytes) for entry in entries if entry.token not in special]
    assert b"".join(shown).decode(errors="replace") == logged.output_text
    assert all(len(entry.top_logprobs) == 2 for entry in entries)


def test_a_response_that_ends_is_completed(client):
    done = client.responses.create(input=QUESTION, extra_body={"logit_bias": {"2": 100}}, **ASKED)
    assert (done.status, done.output_text, done.output[0].status, done.incomplete_details) == (
        "completed",
        "",
        "completed",
        None,
    )


def test_a_stream_has_every_event_and_ends_as_the_response(client):
    whole = client.responses.create(input=QUESTION, **ASKED)
    events = list(client.responses.create(input=QUESTION, stream=True, **ASKED))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * len(deltas),
        *("output_text.done", "content_part.done", "output_item.done", "incomplete"),
    ]
    assert len(deltas) > 1
    assert "".join(deltas) == events[-4].text == events[-3].part.text == whole.output_text
    same = {"id", "created_at", "output"}
    first, last = whole.model_dump(exclude=same), events[-1].response.model_dump(exclude=same)
    for usage in (first["usage"], last["usage"]):
        usage.pop("input_tokens_details")  # the second was cached
    assert first == last
    assert events[-1].response.output[0].content == whole.output[0].content
    with client.responses.stream(input=QUESTION, **ASKED) as stream:
        assert [event.type for event in stream][-1] == "response.incomplete"
    raw = httpx.post(
        f"{client.base_url}responses", json={"input": QUESTION, "stream": True, **ASKED}, timeout=60
    )
    assert raw.headers["x-mint-revision"] == whole.mint_revision
    for block in raw.text.strip().split("\n\n"):
        event, data = block.split("\n")
        TypeAdapter(ResponseStreamEvent).validate_python(json.loads(data.removeprefix("data: ")))
        assert event == "event: " + json.loads(data.removeprefix("data: "))["type"]


def test_a_stream_that_fails_on_the_way_ends_with_the_reason(world, client, monkeypatch):
    def fail(*_):
        raise UserError("the engine was stopped")

    monkeypatch.setattr(Response, "last_chunks", fail)
    *_, last = client.responses.create(input=QUESTION, stream=True, **ASKED)
    assert (last.type, last.response.status, last.response.error.message) == (
        "response.failed",
        "failed",
        "the engine was stopped",
    )
    assert not world.engine.active.jobs


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_calls_are_items_and_their_outputs_go_back(client, choice):
    asked = {**ASKED, "max_output_tokens": 60, "tools": [WEATHER], "tool_choice": choice}
    made = checked(client.responses.create(input="Weather in Oslo?", **asked))
    [call] = made.output
    assert (call.type, call.name, json.loads(call.arguments), made.status) == (
        "function_call",
        "weather",
        {"city": "Oslo"},
        "completed",
    )
    events = list(client.responses.create(input="Weather in Oslo?", stream=True, **asked))
    assert [event.type.removeprefix("response.") for event in events] == [
        *(
            "created",
            "in_progress",
            "output_item.added",
            "function_call_arguments.delta",
            "function_call_arguments.done",
        ),
        *("output_item.done", "completed"),
    ]
    for event in events:
        TypeAdapter(ResponseStreamEvent).validate_python(event.model_dump(exclude_unset=True))
    assert events[3].delta == events[4].arguments == call.arguments
    with client.responses.stream(input="Weather in Oslo?", **asked) as stream:
        assert stream.get_final_response().output[0].arguments == call.arguments
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "cold"}
    follow = {**ASKED, "tools": [WEATHER]}
    again = client.responses.create(
        input=[{"role": "user", "content": "Weather in Oslo?"}, call.model_dump(), output], **follow
    )
    linked = client.responses.create(input=[output], previous_response_id=made.id, **follow)
    calls = [
        {
            "id": call.call_id,
            "type": "function",
            "function": {"name": "weather", "arguments": call.arguments},
        }
    ]
    messages = [
        {"role": "user", "content": "Weather in Oslo?"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": call.call_id, "content": "cold"},
    ]
    tools = [
        {
            "type": "function",
            "function": {key: value for key, value in WEATHER.items() if key != "type"},
        }
    ]
    assert again.output_text == linked.output_text == chat_of(client, messages, tools=tools)


def test_structured_output_is_parsed(client):
    class City(BaseModel):
        name: Literal["Oslo", "Rome"]
        warm: bool

    found = client.responses.parse(
        input="A city.", text_format=City, **{**ASKED, "max_output_tokens": 60}
    )
    assert isinstance(found.output_parsed, City)
    assert found.status == "completed"


def test_responses_are_kept_until_they_are_deleted(client):
    first = client.responses.create(input="My name is Ada.", **ASKED)
    assert client.responses.retrieve(first.id).output_text == first.output_text
    streamed = list(client.responses.create(input="x", stream=True, **ASKED))[-1].response
    assert client.responses.retrieve(streamed.id).output_text == streamed.output_text
    second = client.responses.create(
        input="Who am I?", previous_response_id=first.id, instructions="Be kind.", **ASKED
    )
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "My name is Ada."},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "Who am I?"},
    ]
    assert second.output_text == chat_of(client, messages)
    third = client.responses.create(input="And now?", previous_response_id=second.id, **ASKED)
    more = [
        *messages[1:],
        {"role": "assistant", "content": second.output_text},
        {"role": "user", "content": "And now?"},
    ]
    assert third.output_text == chat_of(client, more), "instructions are not carried over"
    other = client.with_options(default_headers={"x-tenant": "a"})
    for gone in (
        lambda: other.responses.retrieve(first.id),
        lambda: client.responses.retrieve("resp_none"),
    ):
        with pytest.raises(openai.NotFoundError):
            gone()
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.delete(first.id)
    with pytest.raises(openai.BadRequestError) as error:
        client.responses.create(input="x", previous_response_id=first.id, **ASKED)
    assert error.value.param == "previous_response_id"
    unkept = client.responses.create(input="x", store=False, **ASKED)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unkept.id)


def test_the_store_is_bounded():
    store = Store(most_bytes=1000)
    for i in range(100):
        store.put("a", {"id": str(i), "text": "x" * 60}, [])
    assert store.get("a", "99")[0]["text"] == "x" * 60
    assert store._bytes <= 1000
    for tenant, id in (("a", "0"), ("b", "99")):
        with pytest.raises(Unknown):
            store.get(tenant, id)


BAD = [
    *[("input", {"input": v}) for v in (None, 5, [], {})],
    *[
        ("input[0]", {"input": [v]})
        for v in (
            5,
            {"type": "item_reference", "id": "x"},
            {"type": "reasoning"},
            {"role": "critic", "content": "x"},
        )
    ],
    ("input[0].content", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
    (
        "input[0]",
        {"input": [{"type": "function_call", "name": "f", "arguments": "{", "call_id": "1"}]},
    ),
    *[("max_output_tokens", {"max_output_tokens": v}) for v in (0, "x")],
    ("temperature", {"temperature": 3}),
    ("top_p", {"top_p": 2}),
    ("tools[0].type", {"tools": [{"type": "web_search"}]}),
    ("tools", {"tools": 5}),
    ("tools", {"tools": [{"type": "function"}]}),
    ("tool_choice", {"tool_choice": "required"}),
    ("tool_choice", {"tool_choice": {"type": "function", "name": "none"}, "tools": [WEATHER]}),
    ("text.format", {"text": {"format": {"type": "xml"}}}),
    (
        "text.format",
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"$ref": "#"}}}},
    ),
    ("text", {"text": 5}),
    ("include", {"include": "x"}),
    ("instructions", {"instructions": 5}),
    ("metadata", {"metadata": 5}),
    ("store", {"store": "x"}),
    ("model", {"model": None}),
    ("previous_response_id", {"previous_response_id": 5}),
    *[
        (name, {name: v})
        for name, v in (
            ("background", True),
            ("conversation", "x"),
            ("truncation", "auto"),
            ("reasoning", {"effort": "low"}),
        )
    ],
    ("input", {"input": "word " * 600}),
]


def test_what_is_wrong_is_a_400_that_names_the_field(world):
    unnamed = []
    with httpx.Client(base_url=world.url, timeout=60) as raw:
        for field, change in BAD:
            found = raw.post("/v1/responses", json={"model": "chat", "input": "x", **change})
            error = found.json()["error"]
            if found.status_code != 400 or not (error["param"] or "").startswith(field):
                unnamed.append((change, found.status_code, error))
        assert raw.post("/v1/responses", json={"model": "nothing", "input": "x"}).status_code == 404
    assert not unnamed
    assert not world.engine.active.jobs
