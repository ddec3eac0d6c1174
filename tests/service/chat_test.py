"""Chats with tools: the template's variables, and the calls that are parsed from answers."""

import json
import shutil

import pytest

from mint_jax.data.tokenizer import Tokenizer
from mint_jax.models import base as base_lib
from mint_jax.rollout.request import Completion
from mint_jax.rollout.stream import Piece
from mint_jax.service import chat
from mint_jax.service.chat import Call
from mint_jax.service.openai_answers import Answer
from mint_jax.service.openai_types import ChatBody, chat_of
from mint_jax.service.text_stream import TokenTexts
from mint_jax.service.tool_calls import json_object, read
from mint_jax.service.validation import BadRequest, check
from mint_jax.service.weights import Model

TEMPLATE = """{%- if tools %}TOOLS{% for tool in tools %} {{ tool | tojson }}{% endfor %}
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for call in m.tool_calls %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
CLOCK = {"type": "function", "function": {"name": "clock"}}
NAMED = {"type": "function", "function": {"name": "weather"}}
MESSAGES = [{"role": "user", "content": "Weather in Oslo?"}]


def body_of(**body):
    return check(ChatBody, {"model": "m", "messages": MESSAGES, **body})


def tools_of(tokenizer, **body):
    read = body_of(**body)
    return chat.tools_of(read.tools, read.tool_choice, read.parallel_tool_calls, tokenizer)


def prompt_of(tokenizer, **body):
    tools = tools_of(tokenizer, **body)
    tokens = chat.prompt_of(body_of(**body).messages, tokenizer, tools)
    return tokenizer.decode(tokens, skip_special=False)


@pytest.fixture(scope="module")
def tokenizer_of(tmp_path_factory):
    def make(template):
        folder = tmp_path_factory.mktemp("chat")
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(base_lib.resolve("tiny-random") / file, folder / file)
        (folder / "chat_template.jinja").write_text(template)
        return Tokenizer(folder)

    return make


@pytest.fixture(scope="module")
def tokenizer(tokenizer_of):
    return tokenizer_of(TEMPLATE)


def called(city):
    arguments = f'{{"city": "{city}"}}'
    return {"type": "function", "function": {"name": "weather", "arguments": arguments}}


def test_tools_and_earlier_calls_reach_the_template(tokenizer):
    earlier = {"role": "assistant", "content": None, "tool_calls": [called("Oslo")]}
    messages = [*MESSAGES, earlier, {"role": "tool", "content": "cold"}]
    text = prompt_of(tokenizer, messages=messages, tools=[WEATHER])
    assert text.startswith('TOOLS {"type": "function", "function": {"name": "weather"')
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>' in text
    first = tools_of(tokenizer, tools=[WEATHER], parallel_tool_calls=False)
    written = '<tool_call>{"name": "a"}</tool_call><tool_call>{"name": "b"}</tool_call>'
    assert first.read(written) == ("", [Call("a", "{}")])
    for body in ({"tools": []}, {"tools": [WEATHER], "tool_choice": "none"}, {}):
        assert tools_of(tokenizer, **body) is None


def test_an_unknown_call_syntax_is_refused_unless_a_call_is_forced(tokenizer_of):
    tokenizer = tokenizer_of("{{ messages }}{{ tools }}[TOOL_CALLS]")
    with pytest.raises(BadRequest, match="form that is not supported here") as error:
        tools_of(tokenizer, tools=[WEATHER])
    assert error.value.param == "tools"
    assert tools_of(tokenizer, tools=[WEATHER], tool_choice="required").schema is not None


@pytest.mark.parametrize("choice", ["auto", "required", NAMED])
def test_a_template_without_tools_gets_them_as_text(choice):
    """SmolLM2's own template has roles and contents only."""
    tokenizer = Tokenizer(base_lib.resolve("tiny-random"))
    messages = [
        {"role": "developer", "content": "Be brief."},
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [called("O"), called("B")]},
        *({"role": "tool", "tool_call_id": str(i), "content": f"cold {i}"} for i in range(2)),
        {"role": "assistant", "content": "Cold.", "tool_calls": None, "function_call": None},
        *MESSAGES,
    ]
    text = prompt_of(tokenizer, messages=messages, tools=[WEATHER, CLOCK], tool_choice=choice)
    system, user, assistant, results, *_ = text.split("<|im_start|>")[1:]
    assert system.startswith("system\nBe brief.\n\n# Tools")
    listed = system.split("<tools>\n")[1].split("\n</tools>")[0].splitlines()
    assert list(map(json.loads, listed)) == [WEATHER, CLOCK]
    assert user == "user\nWeather in Oslo?<|im_end|>\n"
    written = assistant.split("\n", 1)[1].split("<|im_end|>")[0]
    assert read(written, json_object, {})[1] == [
        Call("weather", '{"city": "O"}'),
        Call("weather", '{"city": "B"}'),
    ]
    assert results.startswith(
        "user\n<tool_response>\ncold 0\n</tool_response>\n<tool_response>\ncold 1\n"
        "</tool_response><|im_end|>"
    )
    none = prompt_of(tokenizer, messages=messages, tools=[WEATHER], tool_choice="none")
    assert ("# Tools" in none, "<tool_call>" in none) == (False, True), "earlier calls stay"


def test_a_forced_call_must_be_possible(tokenizer):
    for wrong in ("other", 5, {"function": {"name": "none such"}}):
        with pytest.raises(BadRequest, match="tool_choice"):
            tools_of(tokenizer, tools=[WEATHER], tool_choice=wrong)
    form = {"type": "json_object"}
    body = body_of(tools=[WEATHER], tool_choice="required", response_format=form)
    with pytest.raises(BadRequest, match="another form of answer"):
        chat_of(body, tokenizer, 512)
    named = tools_of(tokenizer, tools=[WEATHER], tool_choice=NAMED)
    assert named.read('{"city": "Os') == ('{"city": "Os', []), "a truncated call is content"


@pytest.mark.parametrize(
    "text",
    [
        "No call.",
        "Truncated <tool_call>{",
        'Look: <tool_call>{"name": "clock", "arguments": {"text": "a </tool_call> b <tool_call>'
        ' c"}}</tool_call> Done.',
    ],
)
def test_a_stream_with_calls_equals_the_whole_answer(tokenizer, text):
    tokens = tokenizer.encode(text)
    scores = [-1.0] * len(tokens)
    done = Completion(tokens, scores, scores, "stop", text)
    spec = chat_of(body_of(tools=[CLOCK], stream=True), tokenizer, 512)
    answer = Answer(spec, Model("m"), TokenTexts(tokenizer))
    whole = Answer(spec, Model("m"), TokenTexts(tokenizer)).whole([[done]])["choices"][0]
    pieces = [(0, Piece(0, [token], [-1.0])) for token in tokens]
    chunks = [chunk for piece in pieces for chunk in answer.chunks([piece])]
    chunks += answer.last_chunks(0, [done])
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    content = "".join(delta.get("content") or "" for delta in deltas)
    assert content == (whole["message"]["content"] or "")
    calls = [call["function"] for call in whole["message"].get("tool_calls", [])]
    streamed = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert [call["index"] for call in streamed] == list(range(len(calls)))
    assert [call["function"] for call in streamed] == calls
    finish = "tool_calls" if "clock" in text else "stop"
    assert chunks[-1]["choices"][0]["finish_reason"] == whole["finish_reason"] == finish
