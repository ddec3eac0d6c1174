"""Chats: messages to a prompt through the checkpoint's template, tools into it, and calls of tools out of an answer.

Calls are read where the template itself shows that the model writes them as Hermes and Qwen do:
``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``. A call that the caller demands is drawn under a schema instead.
"""

import dataclasses
import json
import re
from typing import Any

from mint_jax.data.tokenizer import Message, Tokenizer
from mint_jax.service import fields
from mint_jax.service.fields import BadRequest, wrong

MARKER, END = "<tool_call>", "</tool_call>"
OWN = {"messages", "generation_prompt", "add_generation_prompt", "tools", "documents"}  # what a template is given by other fields


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a tool; ``arguments`` is JSON text."""

    name: str
    arguments: str


@dataclasses.dataclass(frozen=True)
class Tools:
    """What an answer's calls are read by.

    Attributes:
        shown: for the template.
        forced: the tool that must be called; empty: any one of them; None: the model may call or not.
        schema: JSON schema of a demanded call.
    """

    shown: list[dict[str, Any]]
    forced: str | None = None
    schema: dict[str, Any] | None = None

    @property
    def marker(self) -> str:
        """Text from which on an answer is no content: see ``Growing``."""
        return MARKER if self.forced is None else ""

    def calls_in(self, answer: str) -> tuple[str, list[Call]]:
        """An answer's content and its calls; all of it is content where a call cannot be read."""
        if self.forced is not None:
            read = _read(answer)
            if read is None:
                return answer, []
            if self.forced:
                return "", [Call(self.forced, answer)]
            return "", [call] if (call := _call(read)) is not None else []
        content, marker, _ = answer.partition(MARKER)
        found = [_call(_read(one)) for one in re.findall(f"{MARKER}(.*?)(?:{END}|$)", answer, re.DOTALL)]
        calls = [call for call in found if call is not None]
        return (content, calls) if marker and len(calls) == len(found) else (answer, [])


def _read(answer: str) -> Any:
    """The object that a text is as JSON; None for none."""
    try:
        value = json.loads(answer)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _call(read: Any) -> Call | None:
    if read is None or not isinstance(read.get("name"), str):
        return None
    arguments = read.get("arguments", read.get("parameters", {}))
    return Call(read["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None


def tools_of(body: dict[str, Any], tokenizer: Tokenizer) -> Tools | None:
    """What a body says of tools; None where there are none to be called.

    Raises:
        BadRequest: tools that are none, or a template that takes none, or whose calls nobody here can read.
    """
    given, choice = body.get("tools"), body.get("tool_choice")
    if given is None or given == []:
        if choice not in (None, "none", "auto"):
            raise wrong("tool_choice", choice, "tools to choose from: give them as tools")
        return None
    if not isinstance(given, list):
        raise wrong("tools", given, "a list of functions")
    functions = dict(map(_function, given))
    if choice == "none":
        return None
    template = tokenizer.sources[1] or ""
    if not re.search(r"\btools\b", template):
        raise BadRequest("tools", "tools are given, but this model's chat template has no place for them: leave them out")
    if MARKER not in template:
        raise BadRequest("tools", f"this model's chat template writes calls of tools otherwise than as {MARKER}, which alone is read here")
    if choice is None or choice == "auto":
        return Tools(given)
    if choice == "required":
        return Tools(given, "", {"anyOf": [_call_schema(name, schema) for name, schema in functions.items()]})
    named = choice.get("function") if isinstance(choice, dict) else None
    name = named.get("name") if isinstance(named, dict) else None
    if not isinstance(name, str) or name not in functions:
        raise wrong("tool_choice", choice, "none, auto, required, or a function that is among tools")
    return Tools(given, name, functions[name])


def _function(tool: Any) -> tuple[str, dict[str, Any]]:
    """Name and parameters' schema of one tool."""
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise wrong("tools", tool, 'functions, {"type": "function", "function": {"name": ..., "parameters": {...}}}')
    parameters = function.get("parameters") or {"type": "object"}
    if not isinstance(parameters, dict):
        raise wrong("tools", parameters, f"a JSON schema as the parameters of {function['name']!r}")
    return function["name"], parameters


def _call_schema(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    properties = {"name": {"const": name}, "arguments": parameters}
    return {"type": "object", "properties": properties, "required": ["name", "arguments"], "additionalProperties": False}


def prompt_of(body: dict[str, Any], tokenizer: Tokenizer, tools: Tools | None) -> list[int]:
    """Token ids of a body's messages with the reply's opening.

    Raises:
        BadRequest: messages that are none.
        UserError: the template refuses them.
    """
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise wrong("messages", given, 'a list of messages, [{"role": "user", "content": "..."}]')
    variables = fields.mapping(body, "chat_template_kwargs") or {}
    if taken := OWN & variables.keys():
        raise BadRequest("chat_template_kwargs", f"chat_template_kwargs has {sorted(taken)[0]}, which has a field of its own: leave it out")
    if tools is not None:
        variables = variables | {"tools": tools.shown}
    opening = fields.flag(body, "add_generation_prompt", True)
    rendered = tokenizer.render([_message(one) for one in given], opening, **variables)
    return tokenizer.encode(fields.text("messages", rendered), special=False)


def _message(given: Any) -> Message:
    if not isinstance(given, dict) or not isinstance(given.get("role"), str):
        raise wrong("messages", given, 'messages with a role, {"role": "user", "content": "..."}')
    message = {**given, "content": _content(given.get("content"), bool(given.get("tool_calls")))}
    if given.get("tool_calls"):
        if not isinstance(given["tool_calls"], list):
            raise wrong("messages", given["tool_calls"], "a list as a message's tool_calls")
        message["tool_calls"] = [_made(call) for call in given["tool_calls"]]
    return message


def _content(content: Any, calls: bool) -> str:
    """A message's text; parts that are text are joined."""
    if isinstance(content, list):
        if not all(isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in content):
            raise wrong("messages", content, "content of text alone: parts of other types cannot be read by this model")
        return "\n".join(part["text"] for part in content)
    if content is None and calls:
        return ""
    if not isinstance(content, str):
        raise wrong("messages", content, "text, or a list of parts that are text, as a message's content")
    return content


def _made(call: Any) -> dict[str, Any]:
    """An earlier call as templates want it: its arguments an object."""
    function = call.get("function") if isinstance(call, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    read = _read(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not isinstance(read, dict):
        raise wrong("messages", call, 'calls of tools, {"function": {"name": ..., "arguments": "{...}"}}')
    return {**call, "function": {**function, "arguments": read}}
