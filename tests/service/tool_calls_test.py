"""Calls of tools are parsed in each form, whatever text their arguments have."""

import json

import pytest

from mint_jax.service.tool_calls import Call, form_of, json_object, key_value, read, xml

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
        found, parsed = read(text, form, SCHEMAS)
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
    found, parsed = read(answer, json_object, SCHEMAS)
    assert found == content
    assert [(call.name, json.loads(call.arguments)) for call in parsed] == calls


def test_truncated_calls_of_the_other_forms_are_content():
    for form, write, last in ((xml, as_xml, "</function>"), (key_value, as_pairs, "</tool_call>")):
        text = "A " + write("note", {"text": "x", "count": 5})
        for end in range(len("A <tool_call>") + 30, text.rindex(last)):
            assert read(text[:end], form, SCHEMAS) == (text[:end], []), end
        assert read(text, form, SCHEMAS)[1] == [Call("note", '{"text": "x", "count": 5}')]
    assert read("<tool_call>clock</tool_call>", key_value, SCHEMAS) == ("", [Call("clock", "{}")])
    assert read("A <tool_call> is a tag.", key_value, SCHEMAS)[1] == []
