"""The Responses API through OpenAI's own client: the chat's answers, as items and as events."""

import json
from typing import Literal

import httpx
import openai
import pytest
from openai.types.responses import Response as ClientResponse
from openai.types.responses import ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from mint_jax.errors import UserError
from mint_jax.service.responses import Response, Store
from mint_jax.service.validation import BadRequest
from tests.service.openai_world import client as client
from tests.service.openai_world import world as world
from tests.service.openai_world import wrong_fields

PARAMETERS = {"type": "object", "properties": {"city": {"enum": ["Oslo"]}}, "required": ["city"]}
FUNCTION = {"name": "weather", "parameters": PARAMETERS | {"additionalProperties": False}}
WEATHER = {"type": "function", **FUNCTION}
ASKED = {"model": "chat@1", "temperature": 0, "max_output_tokens": 12}
QUESTION = "What is 2 + 2?"
EVENT = TypeAdapter(ResponseStreamEvent)


def chat_of(client, messages, **settings):
    made = client.chat.completions.create(
        model="chat@1", messages=messages, temperature=0, max_tokens=12, **settings
    )
    return made.choices[0].message.content


def test_responses_are_the_chats_answers(world, client):
    user = {"role": "user", "content": QUESTION}
    plain = client.responses.create(input=QUESTION, **ASKED)
    ClientResponse.model_validate(plain.model_dump(exclude_unset=True))
    assert plain.output_text == chat_of(client, [user])
    assert (plain.status, plain.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert plain.mint_revision == world.digests["chat@1"]
    assert plain.usage.output_tokens == plain.usage.total_tokens - plain.usage.input_tokens == 12
    text = [{"type": "input_text", "text": "Now."}]
    now = {"type": "message", "role": "developer", "content": text}
    for given, system in (([user], "Be brief."), ([now, user], "Be brief.\n\nNow.")):
        more = {"instructions": "Be brief.", "metadata": {"a": "b"}}
        found = client.responses.create(input=given, **more, **ASKED)
        assert found.output_text == chat_of(client, [{"role": "system", "content": system}, user])
        assert (found.instructions, found.metadata) == ("Be brief.", {"a": "b"})
    include = ["message.output_text.logprobs"]
    scored = client.responses.create(input=QUESTION, include=include, top_logprobs=2, **ASKED)
    entries = scored.output[0].content[0].logprobs
    special = world.base.need_tokenizer().special_ids  # a seed may draw one; the text has none
    shown = [bytes(entry.bytes) for entry in entries if entry.token not in special]
    assert b"".join(shown).decode(errors="replace") == scored.output_text
    assert all(len(entry.top_logprobs) == 2 for entry in entries)
    done = client.responses.create(input=QUESTION, extra_body={"logit_bias": {"2": 100}}, **ASKED)
    assert (done.status, done.output[0].status) == ("completed", "completed")
    assert (done.output_text, done.incomplete_details) == ("", None)


def test_a_stream_has_every_event_and_ends_as_the_response(client):
    whole = client.responses.create(input=QUESTION, **ASKED)
    asked = {"input": QUESTION, "stream": True, **ASKED}
    raw = httpx.post(f"{client.base_url}responses", json=asked, timeout=60)
    assert raw.headers["x-mint-revision"] == whole.mint_revision
    events = []
    for block in raw.text.strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(EVENT.validate_python(json.loads(data.removeprefix("data: "))))
        assert name == f"event: {events[-1].type}"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert [event.type.removeprefix("response.") for event in events] == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * len(deltas),
        *("output_text.done", "content_part.done", "output_item.done", "incomplete"),
    ]
    assert len(deltas) > 1
    assert "".join(deltas) == events[-4].text == events[-3].part.text == whole.output_text
    last, own = events[-1].response, {"id", "created_at", "output", "usage"}  # it was cached
    assert last.model_dump(exclude=own) == whole.model_dump(exclude=own)
    assert last.usage.total_tokens == whole.usage.total_tokens
    assert last.output[0].content == whole.output[0].content
    with client.responses.stream(input=QUESTION, **ASKED) as stream:
        assert [event.type for event in stream][-1] == "response.incomplete"


def test_a_stream_that_fails_midway_ends_with_the_reason(world, client, monkeypatch):
    def fail(*_):
        raise UserError("the engine was stopped")

    monkeypatch.setattr(Response, "last_chunks", fail)
    *_, last = client.responses.create(input=QUESTION, stream=True, **ASKED)
    assert (last.type, last.response.status) == ("response.failed", "failed")
    assert last.response.error.message == "the engine was stopped"
    assert not world.engine.active.jobs


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_calls_are_items_and_their_outputs_go_back(client, choice):
    question = {"role": "user", "content": "Weather in Oslo?"}
    asked = {**ASKED, "max_output_tokens": 60, "tools": [WEATHER], "tool_choice": choice}
    made = client.responses.create(input=[question], **asked)
    ClientResponse.model_validate(made.model_dump(exclude_unset=True))
    [call] = made.output
    assert (call.type, call.name, made.status) == ("function_call", "weather", "completed")
    assert json.loads(call.arguments) == {"city": "Oslo"}
    events = list(client.responses.create(input=[question], stream=True, **asked))
    arguments = ("function_call_arguments.delta", "function_call_arguments.done")
    assert [event.type.removeprefix("response.") for event in events] == [
        *("created", "in_progress", "output_item.added", *arguments, "output_item.done"),
        "completed",
    ]
    for event in events:
        EVENT.validate_python(event.model_dump(exclude_unset=True))
    assert events[3].delta == events[4].arguments == call.arguments
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "cold"}
    follow = {**ASKED, "tools": [WEATHER]}
    again = client.responses.create(input=[question, call.model_dump(), output], **follow)
    linked = client.responses.create(input=[output], previous_response_id=made.id, **follow)
    function = {"name": "weather", "arguments": call.arguments}
    calls = [{"id": call.call_id, "type": "function", "function": function}]
    messages = [
        question,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": call.call_id, "content": "cold"},
    ]
    tools = [{"type": "function", "function": FUNCTION}]
    assert again.output_text == linked.output_text == chat_of(client, messages, tools=tools)


def test_structured_output_is_parsed(client):
    class City(BaseModel):
        name: Literal["Oslo", "Rome"]
        warm: bool

    asked = {**ASKED, "max_output_tokens": 60}
    found = client.responses.parse(input="A city.", text_format=City, **asked)
    assert isinstance(found.output_parsed, City)
    assert found.status == "completed"


def test_responses_are_stored_until_they_are_deleted(client):
    first = client.responses.create(input="My name is Ada.", **ASKED)
    assert client.responses.retrieve(first.id).output_text == first.output_text
    streamed = list(client.responses.create(input="x", stream=True, **ASKED))[-1].response
    assert client.responses.retrieve(streamed.id).output_text == streamed.output_text
    second = client.responses.create(
        input="Who am I?", previous_response_id=first.id, instructions="Be kind.", **ASKED
    )
    messages = [
        {"role": "user", "content": "My name is Ada."},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "Who am I?"},
    ]
    system = {"role": "system", "content": "Be kind."}
    assert second.output_text == chat_of(client, [system, *messages])
    third = client.responses.create(input="And now?", previous_response_id=second.id, **ASKED)
    messages.append({"role": "assistant", "content": second.output_text})
    messages.append({"role": "user", "content": "And now?"})
    assert third.output_text == chat_of(client, messages), "instructions are not carried over"
    other = client.with_options(default_headers={"x-tenant": "a"})
    unkept = client.responses.create(input="x", store=False, **ASKED)
    client.responses.delete(second.id)
    for call, id in (
        (other.responses.retrieve, first.id),
        (client.responses.retrieve, unkept.id),
        (client.responses.retrieve, second.id),
        (client.responses.delete, second.id),
    ):
        with pytest.raises(openai.NotFoundError):
            call(id)
    with pytest.raises(openai.BadRequestError) as error:
        client.responses.create(input="x", previous_response_id=second.id, **ASKED)
    assert error.value.param == "previous_response_id"


def test_the_store_is_bounded():
    store = Store(most_bytes=1000)
    for i in range(100):
        store.put("a", [], {"id": str(i), "text": "x" * 60, "output": []})
    assert store.get("a", "99")[0]["text"] == "x" * 60
    for tenant, id in (("a", "0"), ("b", "99")):
        with pytest.raises(BadRequest):
            store.get(tenant, id)


CALL = {"type": "function_call", "name": "f", "arguments": "{", "call_id": "1"}
IMAGE = {"role": "user", "content": [{"type": "input_image"}]}
LOOP = {"type": "json_schema", "name": "x", "schema": {"$ref": "#"}}
BAD = [  # start of param, change of the body
    *(("input", {"input": value}) for value in (None, 5, [], "word " * 600)),
    *(("input[0]", {"input": [item]}) for item in (5, {"type": "item_reference"}, CALL)),
    ("input[0]", {"input": [{"role": "critic", "content": "x"}]}),
    ("input[0].content", {"input": [IMAGE]}),
    ("max_output_tokens", {"max_output_tokens": 0}),
    ("temperature", {"temperature": 3}),
    ("tools[0].type", {"tools": [{"type": "web_search"}]}),
    ("tools", {"tools": [{"type": "function"}]}),
    ("tool_choice", {"tool_choice": "required"}),
    ("tool_choice", {"tool_choice": {"type": "function", "name": "none"}, "tools": [WEATHER]}),
    *(("text.format", {"text": {"format": form}}) for form in ({"type": "xml"}, LOOP)),
    ("include", {"include": "x"}),
    ("model", {"model": None}),
    ("background", {"background": True}),
    ("truncation", {"truncation": "auto"}),
    ("reasoning", {"reasoning": {"effort": "low"}}),
]


def test_a_wrong_field_is_a_400_that_names_it(world):
    assert not wrong_fields(world, "responses", {"input": "x"}, BAD)
