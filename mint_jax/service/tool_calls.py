"""Calls of tools in an answer, read in the form in which the model's chat template writes them.

    json_object  <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>: Hermes, Qwen2.5, Qwen3
    xml          <tool_call><function=f><parameter=x>1</parameter></function></tool_call>:
                 Qwen3-Coder
    key_value    <tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>: GLM-4.5

A call ends where its own syntax ends: the next ``</tool_call>`` may be part of an argument.
"""

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

MARKER, END = "<tool_call>", "</tool_call>"

Schemas = Mapping[str, dict[str, Any]]  # JSON schemas of the parameters, by the tool's name


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a tool; ``arguments`` is JSON text."""

    name: str
    arguments: str


class Unreadable(ValueError):
    """A call cannot be parsed: it was truncated, or the model made a mistake."""


# Parses the call after a marker. Returns the call and the end of its syntax, or None if the marker
# is part of a sentence.
Form = Callable[[str, int, Schemas], "tuple[Call, int] | None"]


def form_of(template: str) -> Form | None:
    """Returns the form of calls that a chat template writes; None if it is unknown."""
    if "<function=" in template and "<parameter=" in template:
        return xml
    if "<arg_key>" in template:
        return key_value
    return json_object if MARKER in template else None


def read(
    answer: str, form: Form, schemas: Schemas, most: int | None = None
) -> tuple[str, list[Call]]:
    """Returns an answer's content and its first ``most`` calls. All of it is content if one of its
    calls cannot be read.
    """
    calls: list[Call] = []
    outside, at, end = [""], 0, 0
    while (begin := answer.find(MARKER, at)) >= 0:
        at = begin + len(MARKER)
        try:
            found = form(answer, at, schemas)
        except (Unreadable, RecursionError):
            return answer, []
        if found is not None:
            calls.append(found[0])
            outside.append(answer[end:begin])
            rest = answer[found[1] :].lstrip()
            if rest.startswith(END):
                at = end = len(answer) - len(rest) + len(END)
            else:  # a truncated answer may end within the tag
                at = end = len(answer) if END.startswith(rest) else found[1]
    if not calls:
        return answer, []
    outside.append(answer[end:])
    return outside[1] + "\n".join(filter(None, map(str.strip, outside[2:]))), calls[:most]


def _refuse(name: str) -> Any:
    raise ValueError(name)


# models write line ends as they are
_DECODER = json.JSONDecoder(strict=False, parse_constant=_refuse)


def value_of(text: str) -> Any:
    """Returns the object of a JSON text; None if it is not an object."""
    try:
        value = _DECODER.decode(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def call_of(value: Any) -> Call | None:
    """Returns the call of an object; arguments in JSON text are decoded once."""
    if not isinstance(value, dict):
        return None
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = value_of(arguments)
    if isinstance(name, str) and name and isinstance(arguments, dict):
        return _call(name, arguments)
    return None


def _call(name: str, arguments: dict[str, Any]) -> Call:
    try:
        return Call(name, json.dumps(arguments, ensure_ascii=False, allow_nan=False))
    except ValueError:  # a number beyond float64
        raise Unreadable from None


def json_object(answer: str, at: int, _: Schemas) -> tuple[Call, int] | None:
    """One JSON object."""
    begin = len(answer) - len(answer[at:].lstrip())
    if not answer.startswith("{", begin):
        return None
    try:
        value, end = _DECODER.raw_decode(answer, begin)
    except ValueError:
        raise Unreadable from None
    rest = answer[end:].lstrip()
    ends = rest.startswith((END, MARKER)) or END.startswith(rest)
    if not ends or (call := call_of(value)) is None:
        raise Unreadable
    return call, end


def _pairs(
    patterns: tuple[str, str, str], answer: str, at: int, schemas: Schemas
) -> tuple[Call, int] | None:
    """A name and pairs of keys and values, by the patterns of name, pair and end."""
    opening, pair, end = (re.compile(r"\s*" + pattern, re.DOTALL) for pattern in patterns)
    if (named := opening.match(answer, at)) is None:
        return None
    name, at, arguments = named[1].strip(), named.end(), {}
    properties = schemas.get(name, {}).get("properties")
    properties = properties if isinstance(properties, dict) else {}
    while (found := pair.match(answer, at)) is not None:
        key = found[1].strip()
        arguments[key] = _typed(found[2], properties.get(key))
        at = found.end()
    if (closed := end.match(answer, at)) is None:
        raise Unreadable
    return _call(name, arguments), closed.end()


_XML = (
    r"<function=([^>\n]+)>",
    # a line end on both sides of a value is not part of it
    r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=[^>\n]+>|</function>))",
    "</function>",
)
_KEY_VALUE = (
    r"([^\s<>{}\[\]\"]+)\s*(?=<arg_key>|</tool_call>)",
    r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>(?=\s*(?:<arg_key>|</tool_call>))",
    "(?=</tool_call>)",
)
xml, key_value = functools.partial(_pairs, _XML), functools.partial(_pairs, _KEY_VALUE)

_PYTHON = {"True": True, "False": False, "None": None}  # as templates write these values, too
_TYPES: dict[type, tuple[str, ...]] = {  # JSON schema's names
    dict: ("object",),
    list: ("array",),
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    type(None): ("null",),
}


def _typed(text: str, schema: Any) -> Any:
    """Returns the JSON value of a text if the schema takes its type, else the text."""
    try:
        value = _PYTHON[text.strip()] if text.strip() in _PYTHON else _DECODER.decode(text)
    except (ValueError, RecursionError):
        return text
    return value if not isinstance(value, str) and _takes(schema, value) else text


def _takes(schema: Any, value: Any) -> bool:
    """Returns whether a schema names the type of a value, or has a value of its type."""
    if not isinstance(schema, dict):
        return False
    if "type" in schema:
        names = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        return any(name in _TYPES[type(value)] for name in names)
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if isinstance(values, list) and any(type(one) is type(value) for one in values):
        return True
    lists = (schema.get(key) for key in ("anyOf", "oneOf"))
    return any(_takes(one, value) for parts in lists if isinstance(parts, list) for one in parts)
