"""Chats with tools: what the template is given, and which calls an answer has."""

import json
import shutil

import pytest

from mint_jax.data.tokenizer import Tokenizer
from mint_jax.models import base as base_lib
from mint_jax.rollout.request import Completion
from mint_jax.rollout.stream import Piece
from mint_jax.service.chat import Call, Tools, prompt_of, tools_of
from mint_jax.service.fields import BadRequest
from mint_jax.service.growing import TokenTexts
from mint_jax.service.openai_answers import Answer
from mint_jax.service.openai_types import chat_of
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
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}},
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
MESSAGES = [{"role": "user", "content": "Weather in Oslo?"}]


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
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    messages = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "cold"}]
    body = {"messages": messages, "tools": [WEATHER]}
    text = tokenizer.decode(prompt_of(body, tokenizer, tools_of(body, tokenizer)), skip_special=False)
    assert text.startswith('TOOLS {"type": "function", "function": {"name": "weather"')
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>' in text
    for none in ({"tools": []}, {"tools": [WEATHER], "tool_choice": "none"}, {}):
        assert tools_of(none, tokenizer) is None


def test_a_template_that_takes_no_tools_or_writes_calls_otherwise_is_told(tokenizer_of):
    for template, reason in (("{{ messages }}", "no place for them"), ("{{ messages }}{{ tools }}", "writes calls of tools otherwise")):
        with pytest.raises(BadRequest, match=reason) as error:
            tools_of({"tools": [WEATHER]}, tokenizer_of(template))
        assert error.value.param == "tools"


@pytest.mark.parametrize(
    ("answer", "content", "calls"),
    [
        ("Just text.", "Just text.", []),
        ('<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>', "", [("clock", {})]),
        ('Wait. <tool_call>{"name": "weather", "arguments": {"city": "Ö"}}</tool_call>', "Wait. ", [("weather", {"city": "Ö"})]),
        (
            '<tool_call>{"name": "clock", "arguments": {}}</tool_call>\n<tool_call>{"name": "weather", "arguments": {"city": "x"}}',
            "",
            [("clock", {}), ("weather", {"city": "x"})],
        ),
        ('A <tool_call>{"name": "clock", "argum', 'A <tool_call>{"name": "clock", "argum', []),
        ('<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>', []),
        ("<tool_call>[]</tool_call>", "<tool_call>[]</tool_call>", []),
    ],
)
def test_calls_are_read_out_of_an_answer(answer, content, calls):
    found = Tools([WEATHER, CLOCK]).calls_in(answer)
    assert (found[0], [(call.name, json.loads(call.arguments)) for call in found[1]]) == (content, calls)


def test_a_call_that_is_demanded_has_a_schema(tokenizer):
    named = tools_of({"tools": [WEATHER, CLOCK], "tool_choice": {"type": "function", "function": {"name": "weather"}}}, tokenizer)
    assert named.schema == WEATHER["function"]["parameters"]
    assert named.calls_in('{"city": "Oslo"}') == ("", [Call("weather", '{"city": "Oslo"}')])
    assert named.calls_in('{"city": "Os') == ('{"city": "Os', [])
    any_one = tools_of({"tools": [WEATHER, CLOCK], "tool_choice": "required"}, tokenizer)
    assert any_one.calls_in('{"name": "clock", "arguments": {}}') == ("", [Call("clock", "{}")])
    assert len(any_one.schema["anyOf"]) == 2
    for wrong in ("other", 5, {"function": {"name": "none such"}}):
        with pytest.raises(BadRequest, match="tool_choice"):
            tools_of({"tools": [WEATHER], "tool_choice": wrong}, tokenizer)


@pytest.mark.parametrize("text", ['Wait. <tool_call>{"name": "clock", "arguments": {}}</tool_call>', "No call.", "Half <tool_call>{"])
def test_a_stream_with_calls_is_the_same_as_an_answer(tokenizer, text):
    body = {"model": "m", "messages": MESSAGES, "tools": [CLOCK], "stream": True}
    tokens = tokenizer.encode(text)
    done = Completion(tokens, [-1.0] * len(tokens), [-1.0] * len(tokens), "stop", text)
    answer = Answer(chat_of(body, tokenizer, 512), Model("m"), TokenTexts(tokenizer), tokenizer.decode)
    whole = answer.whole([[done]])["choices"][0]
    chunks = [chunk for token in tokens for chunk in answer.chunks([(0, Piece(0, [token], [-1.0]))])] + answer.last_chunks(0, [done])
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content") or "" for delta in deltas) == (whole["message"]["content"] or "")
    calls = [{"index": i, **call} for i, call in enumerate(whole["message"].get("tool_calls", []))]
    assert [call for delta in deltas for call in delta.get("tool_calls", [])] == calls
    assert chunks[-1]["choices"][0]["finish_reason"] == whole["finish_reason"] == ("tool_calls" if calls else "stop")
    assert bool(calls) == ("clock" in text)
