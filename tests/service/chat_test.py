"""Chats with tools: the template's variables, and calls in each form. Bodies of any shape are
accepted or refused by name; none fails the server.
"""

import json
import shutil

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mint_jax.data.tokenizer import Tokenizer
from mint_jax.errors import UserError
from mint_jax.models import base as base_lib
from mint_jax.rollout.request import Completion
from mint_jax.service import chat
from mint_jax.service.chat import Call, form_of, json_object, key_value, read_calls, xml
from mint_jax.service.openai_types import ChatBody, CompletionBody, spec_of
from mint_jax.service.responses import ResponseBody, Store, chat_of, items_of
from mint_jax.service.text_stream import TokenTexts
from mint_jax.service.validation import BadRequest, check, parse
from tests.service.openai_world import whole_and_streamed

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
    one = body_of(**body)
    return chat.tools_of(one.tools, one.tool_choice, one.parallel_tool_calls, tokenizer)


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
    assert read_calls(written, json_object, {})[1] == [
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
        spec_of(body, tokenizer, 512)
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
    spec = spec_of(body_of(tools=[CLOCK]), tokenizer, 512)
    whole, parts = whole_and_streamed(spec, TokenTexts(tokenizer), done)
    deltas = [part["delta"] for part in parts]
    content = "".join(delta.get("content") or "" for delta in deltas)
    assert content == (whole["message"]["content"] or "")
    calls = [call["function"] for call in whole["message"].get("tool_calls", [])]
    streamed = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert [call["index"] for call in streamed] == list(range(len(calls)))
    assert [call["function"] for call in streamed] == calls
    finish = "tool_calls" if "clock" in text else "stop"
    assert parts[-1]["finish_reason"] == whole["finish_reason"] == finish


TYPES = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "on": {"type": "boolean"},
    "list": {"type": "array"},
    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "pick": {"enum": [1, 2]},
}
SCHEMAS = {"note": {"type": "object", "properties": TYPES}, "clock": {"type": "object"}}
HARD = ["plain", "a </tool_call> b", "<tool_call>{}</tool_call>", '{"x": 1}', "5", "null"]
HARD += ["  two\n\nlines\n", "é🙂", "</", '"quoted"', ""]
HARD_XML = [*HARD, "a </parameter> b", "<function=x>", "</function>", "<parameter=count>"]
HARD_PAIRS = [*HARD, "a </arg_value> b", "<arg_value>x"]


def as_json(name, arguments):
    text = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{text}\n</tool_call>"


def as_xml(name, arguments):
    pairs = ""
    for key, value in arguments.items():
        text = json.dumps(value) if isinstance(value, dict | list) else str(value)
        pairs += f"<parameter={key}>\n{text}\n</parameter>\n"
    return f"<tool_call>\n<function={name}>\n{pairs}</function>\n</tool_call>"


def as_pairs(name, arguments):
    pairs = ""
    for key, value in arguments.items():
        text = value if isinstance(value, str) else json.dumps(value)
        pairs += f"<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>\n"
    return f"<tool_call>{name}\n{pairs}</tool_call>"


@pytest.mark.parametrize(
    ("form", "write", "hard"),
    [(json_object, as_json, HARD_XML), (xml, as_xml, HARD_XML), (key_value, as_pairs, HARD_PAIRS)],
)
def test_written_calls_are_parsed(rng, form, write, hard):
    """Random calls, written as the models' own templates write them."""
    pools = {"text": hard, "count": [0, -5, 10**20], "on": [True, False], "pick": [1, 2]}
    pools |= {"list": [[], [1, "</tool_call>"]], "maybe": [None, "x"]}
    assert form_of(write("note", {"text": ""})) is form, "the template selects it"
    for _ in range(300):
        calls, content = [], str(rng.choice(["", "Let me look. ", "Not <tool_call> yet: "]))
        text = content
        for _ in range(int(rng.integers(1, 4))):
            names = rng.permutation(list(pools))[: int(rng.integers(0, len(pools) + 1))].tolist()
            arguments = {name: pools[name][int(rng.integers(len(pools[name])))] for name in names}
            calls.append(("note", arguments))
            text += write("note", arguments) + str(rng.choice(["", "\n"]))
        found, parsed = read_calls(text, form, SCHEMAS)
        assert [(call.name, json.loads(call.arguments)) for call in parsed] == calls, text
        assert found == content


A = '<tool_call>{"name": "a"}</tool_call>'
NO_CALLS = [
    "Just text.",
    "I could write <tool_call> here, but need not.",
    '<tool_call>{"name": 5}</tool_call>',
    '<tool_call>{"name": "a", "arguments": {"x": 1e999}}</tool_call>',
    '<tool_call>{"name": "a", "arguments": "no JSON"}</tool_call>',
    '<tool_call>{"name": "a"}} </tool_call>',
    A + '<tool_call>{"name": "b", ',
    "<tool_call>" + '{"name": ' + "[" * 5000,
]


@pytest.mark.parametrize(
    ("answer", "content", "calls"),
    [
        (A + '\nand\n<tool_call>{"name": "b"}', "and", [("a", {}), ("b", {})]),
        (A + " Done.", "Done.", [("a", {})]),
        (A[:-5], "", [("a", {})]),
        (f"<think><tool_call> or</think>{A}", "<think><tool_call> or</think>", [("a", {})]),
        ('<tool_call>{"name": "a", "arguments": "{\\"x\\": 1}"}', "", [("a", {"x": 1})]),
        ('<tool_call>{"name": "a", "parameters": {"x": "\n"}}', "", [("a", {"x": "\n"})]),
        *((answer, answer, []) for answer in NO_CALLS),
    ],
)
def test_calls_in_json(answer, content, calls):
    found, parsed = read_calls(answer, json_object, SCHEMAS)
    assert found == content
    assert [(call.name, json.loads(call.arguments)) for call in parsed] == calls


def test_truncated_calls_of_the_other_forms_are_content():
    for form, write, last in ((xml, as_xml, "</function>"), (key_value, as_pairs, "</tool_call>")):
        text = "A " + write("note", {"text": "x", "count": 5})
        for end in range(len("A <tool_call>") + 30, text.rindex(last)):
            assert read_calls(text[:end], form, SCHEMAS) == (text[:end], []), end
        assert read_calls(text, form, SCHEMAS)[1] == [Call("note", '{"text": "x", "count": 5}')]
    named = read_calls("<tool_call>clock</tool_call>", key_value, SCHEMAS)
    assert named == ("", [Call("clock", "{}")])
    assert read_calls("A <tool_call> is a tag.", key_value, SCHEMAS)[1] == []


FIELDS = sorted({*CompletionBody.model_fields, *ChatBody.model_fields, *ResponseBody.model_fields})
KEYS = ["role", "content", "type", "text", "function", "name", "parameters", "json_schema"]
KEYS += ["schema", "json", "tool_calls", "arguments", "output", "format"]
WORDS = ["user", "assistant", "text", "function", "json_schema", "required", "auto", "none", "{}"]
WORDS += ["weather", "[", "5", "function_call", "function_call_output", "message", "input_text"]
SCALARS = st.none() | st.booleans() | st.integers(-3, 600) | st.integers() | st.floats()
VALUES = st.recursive(
    SCALARS | st.sampled_from([*WORDS, "\ud800", "\x00"]) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


def read_as_served(kind, body, tokenizer):
    """Reads a body as the service does."""
    one = parse(kind, json.dumps({"model": "m", **body}).encode())
    if isinstance(one, ResponseBody):
        one = chat_of(one, items_of(one, "default", Store()))
    return spec_of(one, tokenizer, 512)


@settings(
    max_examples=400,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    st.sampled_from([CompletionBody, ChatBody, ResponseBody]),
    st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4),
)
def test_any_body_is_accepted_or_refused(tokenizer, kind, change):
    good = {"prompt": "x", "messages": MESSAGES, "input": "x"}
    try:
        spec = read_as_served(kind, {**good, **change}, tokenizer)
    except UserError:
        return
    assert spec.prompts
    assert spec.request.max_tokens >= 1


def test_fields_become_sampling_settings(tokenizer):
    form = {"type": "json_schema", "json_schema": {"schema": {"type": "integer"}}}
    body = {"messages": MESSAGES, "max_tokens": 9, "max_completion_tokens": 8, "top_k": -1}
    body |= {"stop": "END", "stop_token_ids": [7, 2], "seed": -1, "response_format": form}
    body |= {"logit_bias": {"5": -100, "6": 2.5}}
    request = read_as_served(ChatBody, body, tokenizer).request
    assert (request.stop, request.stop_ids, request.top_k) == (("END",), (2, 7), 0)
    assert (request.seed, request.max_tokens) == (2**32 - 1, 8)
    assert request.logit_bias == ((5, -100.0), (6, 2.5))
    assert request.json_schema == '{"type": "integer"}'
    unended = read_as_served(ChatBody, {**body, "ignore_eos": True}, tokenizer)
    assert unended.request.stop_ids == (7, 2)
