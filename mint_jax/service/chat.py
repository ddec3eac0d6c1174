"""Chats: from messages and tools to a prompt by the checkpoint's chat template, and from an answer
to tool calls.

A template without a place for tools gets them as text: a list of them in the system message,
earlier calls in the assistant's content, and results in user messages. A call that ``tool_choice``
demands is sampled under a JSON schema; others are parsed in the form that the template writes.
"""

import dataclasses
import functools
import itertools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from mint_jax.data.tokenizer import Message as TemplateMessage
from mint_jax.data.tokenizer import Tokenizer
from mint_jax.service.validation import BadRequest, Body, Text, wrong

MARKER, END = "<tool_call>", "</tool_call>"
# template variables that have a field of their own
OWN = {"messages", "generation_prompt", "add_generation_prompt", "tools", "documents"}
ROLES = ("developer", "system", "user", "assistant", "tool", "function")  # OpenAI's

SHOWN = """# Tools

These functions can be called. Each line is the JSON schema of one:
<tools>
{tools}
</tools>

To call a function, write a JSON object with its name and its arguments, between tags:
<tool_call>
{{"name": "the function's name", "arguments": {{"an argument's name": "its value"}}}}
</tool_call>"""
UNKNOWN_SYNTAX = (
    "this model's chat template writes tool calls in a form that is not supported here"
    f" (supported are {MARKER} with JSON, Qwen3-Coder's and GLM's): leave tools out, or demand a"
    " call by tool_choice, which is sampled under a schema"
)


class Function(Body):
    name: Text
    parameters: dict[str, Any] | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class TextPart(Body):
    type: Literal["text"]
    text: str


class RefusalPart(Body):
    type: Literal["refusal"]
    refusal: str


Part = Annotated[TextPart | RefusalPart, Field(discriminator="type")]


class CalledFunction(Body):
    name: Text
    arguments: str | dict[str, Any] | None = None

    @pydantic.field_validator("arguments")
    @classmethod
    def _is_object(cls, value: Any) -> Any:
        if isinstance(value, str) and value_of(value or "{}") is None:
            raise ValueError("is not a JSON object: send the arguments of the call as one")
        return value


class EarlierCall(Body):
    function: CalledFunction


class Message(Body):
    """One message; further fields reach the chat template."""

    role: str
    content: str | list[Part] | None = None
    refusal: str | None = None
    tool_calls: list[EarlierCall] | None = None

    @pydantic.model_validator(mode="after")
    def _has_content(self) -> "Message":
        if self.content is None and not self.tool_calls and self.refusal is None:
            raise ValueError("has no content: give text, or a list of text parts")
        return self


@dataclasses.dataclass(frozen=True)
class Call:
    name: str
    arguments: str  # JSON


@dataclasses.dataclass(frozen=True)
class Tools:
    """The tools of a chat, as the template gets them; ``read`` returns an answer's content and its
    calls, and ``schema`` is the JSON schema of a demanded call. ``marker`` as in ``TextStream``.
    """

    shown: list[dict[str, Any]]
    read: Callable[[str], tuple[str, list[Call]]]
    schema: dict[str, Any] | None = None
    marker: str = ""


def takes_tools(tokenizer: Tokenizer) -> bool:
    """Returns whether the chat template has a place for tools."""
    return re.search(r"\btools\b", tokenizer.templates) is not None


def tools_of(
    tools: list[dict[str, Any]] | None, choice: Any, parallel: bool | None, tokenizer: Tokenizer
) -> Tools | None:
    """Returns the tools of a body (see ``ChatBody``); None if none can be called.

    Raises:
        BadRequest: the choice is not among the tools, or the template's calls cannot be parsed.
    """
    if not tools and choice not in (None, "none", "auto"):
        raise wrong("tool_choice", choice, "none or auto without tools: give tools")
    if not tools or choice == "none":
        return None
    given = [tool["function"] for tool in tools]
    functions = {one["name"]: one.get("parameters") or {"type": "object"} for one in given}
    if choice is None or choice == "auto":
        form = form_of(tokenizer.templates) if takes_tools(tokenizer) else json_object
        if form is None:
            raise BadRequest("tools", UNKNOWN_SYNTAX)
        most = 1 if parallel is False else None
        read = functools.partial(read_calls, form=form, schemas=functions, most=most)
        return Tools(tools, read, marker=MARKER)
    if choice == "required":
        call = {"type": "object", "required": ["name", "arguments"], "additionalProperties": False}
        pairs = ({"name": {"const": name}, "arguments": s} for name, s in functions.items())
        return Tools(tools, _demanded, {"anyOf": [call | {"properties": pair} for pair in pairs]})
    named = choice.get("function") if isinstance(choice, dict) else None
    name = named.get("name") if isinstance(named, dict) else None
    if not isinstance(name, str) or name not in functions:
        raise wrong("tool_choice", choice, "none, auto, required, or one of the tools")
    return Tools(tools, functools.partial(_demanded, name=name), functions[name])


def _demanded(answer: str, name: str = "") -> tuple[str, list[Call]]:
    """Returns the content and the call of an answer under a schema, of a named tool or of any."""
    value = value_of(answer)
    call = call_of({"name": name, "arguments": value} if name else value)
    return (answer, []) if call is None else ("", [call])


def prompt_of(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer,
    tools: Tools | None = None,
    variables: Mapping[str, Any] | None = None,
    opening: bool = True,
) -> list[int]:
    """Returns the token ids of validated messages, with ``opening`` up to the reply.

    Args:
        variables: further variables of the template.

    Raises:
        BadRequest: a variable has a field of its own.
        UserError: the template refuses the messages.
    """
    variables, field = dict(variables or {}), "chat_template_kwargs"
    if taken := sorted(OWN & variables.keys()):
        text = f"{field} has {taken[0]}, which has a field of its own: leave it out"
        raise BadRequest(field, text)
    has_developer = "developer" in tokenizer.templates
    read = [_for_template(message, has_developer) for message in messages]
    if not takes_tools(tokenizer):
        read = _as_text(read, None if tools is None else tools.shown)
    elif tools is not None:
        variables["tools"] = tools.shown
    return tokenizer.encode_chat(read, opening, **variables)


def _for_template(given: Mapping[str, Any], has_developer: bool) -> TemplateMessage:
    """Returns a message as templates expect it: content as one text, arguments of calls as objects.

    A null is the same as absent; ``developer`` becomes ``system`` for templates without that role.
    """
    message = {key: value for key, value in given.items() if value is not None}
    refusal, content = message.pop("refusal", ""), message.get("content")
    if isinstance(content, list):
        content = "\n".join(filter(None, (part[part["type"]] for part in content)))
    message["content"] = refusal if content is None else content
    if given["role"] == "developer" and not has_developer:
        message["role"] = "system"
    calls = []
    for call in message.pop("tool_calls", ()):
        arguments = call["function"].get("arguments")
        if not isinstance(arguments, dict):  # JSON text, as in OpenAI's API
            arguments = value_of(arguments or "{}")
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return message | ({"tool_calls": calls} if calls else {})


def _as_text(
    messages: Sequence[TemplateMessage], tools: Sequence[Any] | None
) -> list[TemplateMessage]:
    """Writes tools, calls and results as text, for a template without any of them."""
    written = functools.partial(json.dumps, ensure_ascii=False)
    out: list[TemplateMessage] = []
    last = None  # the last message's role
    for message in messages:
        role, content = message["role"], message["content"]
        new = {key: value for key, value in message.items() if key != "tool_calls"}
        texts = [content]
        for call in message.get("tool_calls", ()):
            call = {name: call["function"][name] for name in ("name", "arguments")}
            texts.append(f"{MARKER}\n{written(call)}\n{END}")
        if role in ("tool", "function"):
            texts = [f"<tool_response>\n{content}\n</tool_response>"]
            if last in ("tool", "function"):
                texts.insert(0, out.pop()["content"])
            new = {"role": "user"}
        out.append(new | {"content": "\n".join(filter(None, texts))})
        last = role
    if tools:
        text = SHOWN.format(tools="\n".join(map(written, tools)))
        if out[0]["role"] == "system":
            out[0]["content"] += f"\n\n{text}"
        else:
            out.insert(0, {"role": "system", "content": text})
    return out


# -- calls in an answer

Schemas = Mapping[str, dict[str, Any]]  # JSON schemas of the parameters, by the tool's name


class Unreadable(ValueError):
    """A call cannot be parsed: it was truncated, or the model made a mistake."""


# Parses the call after a marker. Returns the call and the end of its syntax, or None if the marker
# is part of a sentence.
Form = Callable[[str, int, Schemas], "tuple[Call, int] | None"]


def form_of(template: str) -> Form | None:
    """Returns the form of calls that a chat template writes; None if it is unknown."""
    return next((form for mark, form in FORMS.items() if mark in template), None)


def read_calls(
    answer: str, form: Form, schemas: Schemas, most: int | None = None
) -> tuple[str, list[Call]]:
    """Returns an answer's content and its first ``most`` calls. All of it is content if one of its
    calls cannot be read. A call ends where its syntax ends: arguments may contain an end tag.
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


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(text)
    return value


# models write line ends as they are
_DECODER = json.JSONDecoder(strict=False, parse_float=_finite, parse_constant=_finite)


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
    if not (isinstance(name, str) and name and isinstance(arguments, dict)):
        return None
    return Call(name, json.dumps(arguments, ensure_ascii=False))


def json_object(answer: str, at: int, _: Schemas) -> tuple[Call, int] | None:
    """One JSON object ``{"name": "f", "arguments": {}}``, as Hermes, Qwen2.5 and Qwen3 write it."""
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
        key, at = found[1].strip(), found.end()
        arguments[key] = _typed(found[2], properties.get(key))
    if (closed := end.match(answer, at)) is None:
        raise Unreadable
    return Call(name, json.dumps(arguments, ensure_ascii=False)), closed.end()


# Qwen3-Coder: <tool_call><function=f><parameter=x>1</parameter></function></tool_call>
_XML = (
    r"<function=([^>\n]+)>",
    # a line end on both sides of a value is not part of it
    r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=[^>\n]+>|</function>))",
    "</function>",
)
# GLM-4.5: <tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>
_KEY_VALUE = (
    r"([^\s<>{}\[\]\"]+)\s*(?=<arg_key>|</tool_call>)",
    r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>(?=\s*(?:<arg_key>|</tool_call>))",
    "(?=</tool_call>)",
)
xml, key_value = functools.partial(_pairs, _XML), functools.partial(_pairs, _KEY_VALUE)
# a mark of a template -> the form of its calls; the first that matches
FORMS: dict[str, Form] = {"<parameter=": xml, "<arg_key>": key_value, MARKER: json_object}

_PYTHON = {"True": "true", "False": "false", "None": "null"}  # as templates write them, too
_TYPES: dict[type, tuple[str, ...]] = {dict: ("object",), list: ("array",), bool: ("boolean",)}
_TYPES |= {int: ("integer", "number"), float: ("number",), type(None): ("null",)}


def _typed(text: str, schema: Any) -> Any:
    """Returns the JSON value of a text if the schema takes its type, else the text."""
    try:
        value = _DECODER.decode(_PYTHON.get(text.strip(), text))
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
    lists = (schema.get(key) for key in ("enum", "anyOf", "oneOf"))
    values, *parts = (one if isinstance(one, list) else [] for one in lists)
    same = any(type(one) is type(value) for one in [*values, schema.get("const", "")])
    return same or any(_takes(part, value) for part in itertools.chain(*parts))
