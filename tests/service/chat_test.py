"""Chats with tools: what the template is given, and which calls an answer has."""

import json
import shutil

import pytest

from mint_jax.data.tokenizer import Tokenizer
from mint_jax.models import base as base_lib
from mint_jax.rollout.request import Completion
from mint_jax.rollout.stream import Piece
from mint_jax.service import chat
from mint_jax.service.chat import Call, Tools
from mint_jax.service.growing import TokenTexts
from mint_jax.service.openai_answers import Answer
from mint_jax.service.openai_types import ChatBody, chat_of
from mint_jax.service.tool_calls import json_object
from mint_jax.service.validation import BadRequest, check
from mint_jax.service.weights import Model

TEMPLATE = """{%- if tools %}TOOLS{% for tool in tools %} {{ tool | tojson }}{% endfor %}
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for call in m.tool_calls %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
ENDS = (
    'Look: <tool_call>{"name": "clock", "arguments": {"text": "a </tool_call> b <tool_call>'
    ' c"}}</tool_call> Done.'
)
MESSAGES = [{"role": "user", "content": "Weather in Oslo?"}]


def body_of(body):
    return check(ChatBody, {"model": "m", "messages": MESSAGES, **body})


def tools_of(body, tokenizer):
    body = body_of(body)
    return chat.tools_of(body.tools, body.tool_choice, body.parallel_tool_calls, tokenizer)


def prompt_of(body, tokenizer, tools):
    return chat.prompt_of(body_of(body).messages, tokenizer, tools)


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


def test_tools_and_earlier_calls_reach_the_template(tokenizer):
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Oslo"}'},
    }
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "cold"},
    ]
    body = {"messages": messages, "tools": [WEATHER]}
    text = tokenizer.decode(
        prompt_of(body, tokenizer, tools_of(body, tokenizer)), skip_special=False
    )
    assert text.startswith('TOOLS {"type": "function", "function": {"name": "weather"')
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>' in text
    for none in ({"tools": []}, {"tools": [WEATHER], "tool_choice": "none"}, {}):
        assert tools_of(none, tokenizer) is None


def test_a_template_that_writes_calls_otherwise_is_told_and_a_demanded_call_needs_no_form(
    tokenizer_of,
):
    tokenizer = tokenizer_of("{{ messages }}{{ tools }}[TOOL_CALLS]")
    with pytest.raises(BadRequest, match="form that is not supported here") as error:
        tools_of({"tools": [WEATHER]}, tokenizer)
    assert error.value.param == "tools"
    demanded = tools_of({"tools": [WEATHER], "tool_choice": "required"}, tokenizer)
    assert demanded is not None
    assert demanded.schema is not None


def test_a_template_without_tools_has_them_as_text():
    """SmolLM2's own template, which knows roles and contents alone."""
    tokenizer = Tokenizer(base_lib.resolve("tiny-random"))
    calls = [
        {"type": "function", "function": {"name": "weather", "arguments": f'{{"city": "{city}"}}'}}
        for city in "OB"
    ]
    messages = [
        {"role": "developer", "content": "Be brief."},
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": calls, "refusal": None},
        *({"role": "tool", "tool_call_id": str(i), "content": f"cold {i}"} for i in range(2)),
        {"role": "assistant", "content": "Cold.", "tool_calls": None, "function_call": None},
        *MESSAGES,
    ]

    def text_of(body):
        return tokenizer.decode(
            prompt_of(body, tokenizer, tools_of(body, tokenizer)), skip_special=False
        )

    for choice in ("auto", "required", {"type": "function", "function": {"name": "weather"}}):
        text = text_of({"messages": messages, "tools": [WEATHER, CLOCK], "tool_choice": choice})
        system, user, assistant, results, *_ = text.split("<|im_start|>")[1:]
        assert system.startswith("system\nBe brief.\n\n# Tools")
        listed = system.split("<tools>\n")[1].split("\n</tools>")[0].splitlines()
        assert list(map(json.loads, listed)) == [WEATHER, CLOCK]
        assert user == "user\nWeather in Oslo?<|im_end|>\n"
        made = Tools([], {}, json_object).calls_in(
            assistant.split("\n", 1)[1].split("<|im_end|>")[0]
        )[1]
        assert made == [Call("weather", '{"city": "O"}'), Call("weather", '{"city": "B"}')]
        assert results.startswith(
            "user\n<tool_response>\ncold 0\n</tool_response>\n<tool_response>\ncold"
            " 1\n</tool_response><|im_end|>"
        )
    assert "# Tools" not in text_of(
        {"messages": messages, "tools": [WEATHER], "tool_choice": "none"}
    )
    assert "<tool_call>" in text_of({"messages": messages}), "earlier calls stay"
    assert text_of({"messages": MESSAGES, "tools": [WEATHER]}).startswith(
        "<|im_start|>system\n# Tools"
    )


def test_a_call_that_is_demanded_has_a_schema(tokenizer):
    named = tools_of(
        {
            "tools": [WEATHER, CLOCK],
            "tool_choice": {"type": "function", "function": {"name": "weather"}},
        },
        tokenizer,
    )
    assert named.schema == WEATHER["function"]["parameters"]
    assert named.calls_in('{"city": "Oslo"}') == ("", [Call("weather", '{"city": "Oslo"}')])
    assert named.calls_in('{"city": "Os') == ('{"city": "Os', [])
    any_one = tools_of({"tools": [WEATHER, CLOCK], "tool_choice": "required"}, tokenizer)
    assert any_one.calls_in('{"name": "clock", "arguments": {}}') == ("", [Call("clock", "{}")])
    assert len(any_one.schema["anyOf"]) == 2
    for wrong in ("other", 5, {"function": {"name": "none such"}}):
        with pytest.raises(BadRequest, match="tool_choice"):
            tools_of({"tools": [WEATHER], "tool_choice": wrong}, tokenizer)


@pytest.mark.parametrize(
    "text",
    [
        'Wait. <tool_call>{"name": "clock", "arguments": {}}</tool_call>',
        "No call.",
        "Half <tool_call>{",
        ENDS,
    ],
)
def test_a_stream_with_calls_is_the_same_as_an_answer(tokenizer, text):
    body = {"model": "m", "messages": MESSAGES, "tools": [CLOCK], "stream": True}
    tokens = tokenizer.encode(text)
    done = Completion(tokens, [-1.0] * len(tokens), [-1.0] * len(tokens), "stop", text)
    answer = Answer(
        chat_of(body_of(body), tokenizer, 512), Model("m"), TokenTexts(tokenizer), tokenizer.decode
    )
    whole = answer.whole([[done]])["choices"][0]
    chunks = [
        chunk for token in tokens for chunk in answer.chunks([(0, Piece(0, [token], [-1.0]))])
    ] + answer.last_chunks(0, [done])
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content") or "" for delta in deltas) == (
        whole["message"]["content"] or ""
    )
    calls = [{"index": i, **call} for i, call in enumerate(whole["message"].get("tool_calls", []))]
    assert [call for delta in deltas for call in delta.get("tool_calls", [])] == calls
    assert (
        chunks[-1]["choices"][0]["finish_reason"]
        == whole["finish_reason"]
        == ("tool_calls" if calls else "stop")
    )
    assert bool(calls) == ("clock" in text)
