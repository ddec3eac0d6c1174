"""Calls of tools are read in each form, whatever text their arguments hold."""

import json

import pytest

from mint_jax.service.chat import Tools
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
HARD = [
    "plain",
    "a </tool_call> b",
    "<tool_call>{}</tool_call>",
    '{"x": 1}',
    "5",
    "null",
    "  two\n\nlines\n",
    "é🙂",
    "</",
    '"quoted"',
    "",
]
HARD_XML = [*HARD, "a </parameter> b", "<function=x>", "</function>", "<parameter=count>"]
HARD_PAIRS = [*HARD, "a </arg_value> b", "<arg_value>x"]


def as_json(name, arguments):
    return (
        "<tool_call>\n"
        + json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
        + "\n</tool_call>"
    )


def as_xml(name, arguments):
    def shown(value):
        return json.dumps(value) if isinstance(value, dict | list) else str(value)

    pairs = "".join(
        f"<parameter={key}>\n{shown(value)}\n</parameter>\n" for key, value in arguments.items()
    )
    return f"<tool_call>\n<function={name}>\n{pairs}</function>\n</tool_call>"


def as_pairs(name, arguments):
    def shown(value):
        return value if isinstance(value, str) else json.dumps(value)

    pairs = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{shown(value)}</arg_value>\n"
        for key, value in arguments.items()
    )
    return f"<tool_call>{name}\n{pairs}</tool_call>"


FORMS = {
    "json": (json_object, as_json, HARD_XML),
    "xml": (xml, as_xml, HARD_XML),
    "pairs": (key_value, as_pairs, HARD_PAIRS),
}


@pytest.mark.parametrize("kind", list(FORMS))
def test_what_a_template_writes_is_read_back(rng, kind):
    """Random calls, written as the models' own templates write them."""
    form, write, hard = FORMS[kind]
    pools = {
        "text": hard,
        "count": [0, -5, 10**20],
        "on": [True, False],
        "list": [[], [1, "</tool_call>"]],
        "maybe": [None, "x"],
        "pick": [1, 2],
    }
    for _ in range(300):
        calls, text = [], rng.choice(["", "Let me look. ", "Not <tool_call> yet: "])
        content = text
        for _ in range(int(rng.integers(1, 4))):
            names = rng.permutation(list(pools))[: int(rng.integers(0, len(pools) + 1))].tolist()
            arguments = {name: pools[name][int(rng.integers(len(pools[name])))] for name in names}
            calls.append(("note", arguments))
            text += write("note", arguments) + str(rng.choice(["", "\n"]))
        found, read_calls = read(text, form, SCHEMAS)
        assert [(call.name, json.loads(call.arguments)) for call in read_calls] == calls, text
        assert found == content


@pytest.mark.parametrize(
    ("answer", "content", "calls"),
    [
        ("Just text.", "Just text.", []),
        (
            'Wait. <tool_call>{"name": "weather", "arguments": {"city": "Ö"}}</tool_call>',
            "Wait. ",
            [("weather", {"city": "Ö"})],
        ),
        (
            '<tool_call>{"name": "a"}</tool_call>\nand\n<tool_call>{"name": "b"}',
            "and",
            [("a", {}), ("b", {})],
        ),
        ('<tool_call>{"name": "a"}</tool_call> Done.', "Done.", [("a", {})]),
        ('<tool_call>{"name": "a"}</tool_', "", [("a", {})]),
        (
            '<tool_call>{"name": "a", "arguments": "{\\"x\\": \\"y\\"}"}</tool_call>',
            "",
            [("a", {"x": "y"})],
        ),
        (
            '<tool_call>{"name": "a", "parameters": {"x": "two\nlines"}}</tool_call>',
            "",
            [("a", {"x": "two\nlines"})],
        ),
        (
            "I could write <tool_call> here, but need not.",
            "I could write <tool_call> here, but need not.",
            [],
        ),
        (
            '<think><tool_call> or not</think><tool_call>{"name": "a"}</tool_call>',
            "<think><tool_call> or not</think>",
            [("a", {})],
        ),
        *[
            (answer, answer, [])
            for answer in (
                'A <tool_call>{"name": "clock", "argum',
                '<tool_call>{"name": 5}</tool_call>',
                '<tool_call>{"name": "a", "arguments": {"x": 1e999}}</tool_call>',
                '<tool_call>{"name": "a", "arguments": {"x": NaN}}</tool_call>',
                '<tool_call>{"name": "a", "arguments": "no JSON"}</tool_call>',
                '<tool_call>{"name": "a"}} </tool_call>',
                '<tool_call>{"name": "a"}</tool_call><tool_call>{"name": "b", ',
                "<tool_call>[]</tool_call>",
                "<tool_call>" + '{"name": ' + "[" * 5000,
            )
        ],
    ],
)
def test_json_calls_are_read_out_of_an_answer(answer, content, calls):
    found = Tools([], SCHEMAS, json_object).calls_in(answer)
    assert (found[0], [(call.name, json.loads(call.arguments)) for call in found[1]]) == (
        content,
        calls,
    )


def test_what_is_cut_off_in_the_other_forms_is_content():
    for form, write in ((xml, as_xml), (key_value, as_pairs)):
        text = "A " + write("note", {"text": "x", "count": 5})
        for end in range(
            len("A <tool_call>") + 30, text.rindex("</function>" if form is xml else "</tool_call>")
        ):
            assert read(text[:end], form, SCHEMAS) == (text[:end], []), end
        assert read(text, form, SCHEMAS)[1] == [Call("note", '{"text": "x", "count": 5}')]
    assert read("<tool_call>clock</tool_call>", key_value, SCHEMAS) == ("", [Call("clock", "{}")])
    assert read("A <tool_call> is a tag.", key_value, SCHEMAS) == ("A <tool_call> is a tag.", [])
    assert read(
        "<tool_call><function=note><parameter=on>True</parameter></function>", xml, SCHEMAS
    )[1] == [Call("note", '{"on": true}')]


def test_the_template_says_which_form():
    assert form_of("<tool_call>{{ call | tojson }}") is json_object
    assert form_of("<tool_call>\n<function={{ name }}>\n<parameter={{ key }}>") is xml
    assert form_of("<tool_call>{{ name }}<arg_key>") is key_value
    assert form_of("[TOOL_CALLS]") is None


def test_one_call_alone_where_no_others_are_wanted():
    text = as_json("a", {}) + as_json("b", {})
    assert Tools([], {}, json_object, parallel=False).calls_in(text)[1] == [Call("a", "{}")]
