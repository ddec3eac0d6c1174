"""Chats: messages and tools to a prompt through the checkpoint's chat template, and calls of tools
out of an answer.

Calls are read in the form in which the template writes them (``tool_calls.py``). A template that
has no place for tools gets them as text: a list of them in the system message, earlier calls in the
assistant's content, and results in messages of the user. A call that the caller demands is drawn
under a JSON schema instead.
"""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from mint_jax.data.tokenizer import Message, Tokenizer
from mint_jax.service import fields, tool_calls
from mint_jax.service.fields import BadRequest, wrong
from mint_jax.service.tool_calls import END, MARKER, Call, Form

# what a template is given by other fields
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
RESULT = "<tool_response>\n{content}\n</tool_response>"


@dataclasses.dataclass(frozen=True)
class Tools:
    """How an answer's calls are read.

    Attributes:
        shown: for the template.
        schemas: JSON schemas of the parameters, by name.
        form: of calls in the answer; None where a call is demanded.
        forced: the tool that must be called; empty: any one of them; None: the model may call or
            not.
        schema: JSON schema of a demanded call.
        parallel: an answer may have more than one call.
    """

    shown: list[dict[str, Any]]
    schemas: Mapping[str, dict[str, Any]]
    form: Form | None = None
    forced: str | None = None
    schema: dict[str, Any] | None = None
    parallel: bool = True

    @property
    def marker(self) -> str:
        """Text from which on an answer is no content: see ``Growing``."""
        return MARKER if self.forced is None else ""

    def calls_in(self, answer: str) -> tuple[str, list[Call]]:
        """Returns an answer's content and its calls; all of it is content where a call cannot be
        read.
        """
        if self.form is not None:
            content, calls = tool_calls.read(answer, self.form, self.schemas)
            return content, calls if self.parallel else calls[:1]
        value = tool_calls.value_of(answer)
        if value is None:
            return answer, []
        call = Call(self.forced, answer) if self.forced else tool_calls.call_of(value)
        return ("", [call]) if call is not None else (answer, [])


def takes_tools(tokenizer: Tokenizer) -> bool:
    """Returns whether the chat template has a place for tools."""
    return re.search(r"\btools\b", tokenizer.sources[1] or "") is not None


def tools_of(body: dict[str, Any], tokenizer: Tokenizer) -> Tools | None:
    """Reads what a body says of tools; None where there are none to be called.

    Raises:
        BadRequest: not tools, or a template whose calls cannot be read here.
    """
    given, choice = body.get("tools"), body.get("tool_choice")
    parallel = fields.flag(body, "parallel_tool_calls", True)
    if given is None or given == []:
        if choice not in (None, "none", "auto"):
            raise wrong("tool_choice", choice, "tools to choose from: give them as tools")
        return None
    if not isinstance(given, list):
        raise wrong("tools", given, "a list of functions")
    functions = dict(map(_function, given))
    if choice == "none":
        return None
    if choice is None or choice == "auto":
        form = (
            tool_calls.form_of(tokenizer.sources[1] or "")
            if takes_tools(tokenizer)
            else tool_calls.json_object
        )
        if form is None:
            raise BadRequest(
                "tools",
                "this model's chat template writes calls of tools in a form that is not read here"
                f" (read are {MARKER} with JSON, Qwen3-Coder's and GLM's): leave tools out, or"
                " demand a call by tool_choice, which is drawn under a schema",
            )
        return Tools(given, functions, form, parallel=parallel)
    if choice == "required":
        return Tools(
            given,
            functions,
            None,
            "",
            {"anyOf": [_call_schema(name, schema) for name, schema in functions.items()]},
        )
    named = choice.get("function") if isinstance(choice, dict) else None
    name = named.get("name") if isinstance(named, dict) else None
    if not isinstance(name, str) or name not in functions:
        raise wrong(
            "tool_choice", choice, "none, auto, required, or a function that is among tools"
        )
    return Tools(given, functions, None, name, functions[name])


def _function(tool: Any) -> tuple[str, dict[str, Any]]:
    """Returns name and parameters' schema of one tool."""
    function = (
        tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    )
    if (
        not isinstance(function, dict)
        or not isinstance(function.get("name"), str)
        or not function["name"]
    ):
        raise wrong(
            "tools",
            tool,
            'functions, {"type": "function", "function": {"name": ..., "parameters": {...}}}',
        )
    parameters = function.get("parameters") or {"type": "object"}
    if not isinstance(parameters, dict):
        raise wrong("tools", parameters, f"a JSON schema as the parameters of {function['name']!r}")
    return function["name"], parameters


def _call_schema(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    properties = {"name": {"const": name}, "arguments": parameters}
    return {
        "type": "object",
        "properties": properties,
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def prompt_of(
    body: dict[str, Any], tokenizer: Tokenizer, tools: Tools | None, strict: bool = True
) -> list[int]:
    """Returns the token ids of a body's messages with the reply's opening.

    Args:
        strict: refuse roles that OpenAI's API does not have.

    Raises:
        BadRequest: not messages.
        UserError: the template refuses them.
    """
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise wrong("messages", given, 'a list of messages, [{"role": "user", "content": "..."}]')
    variables = fields.mapping(body, "chat_template_kwargs") or {}
    if taken := OWN & variables.keys():
        raise BadRequest(
            "chat_template_kwargs",
            f"chat_template_kwargs has {sorted(taken)[0]}, which has a field of its own: leave"
            " it out",
        )
    template = tokenizer.sources[1] or ""
    messages = [
        _message(one, f"messages[{i}]", strict, "developer" in template)
        for i, one in enumerate(given)
    ]
    if not takes_tools(tokenizer):
        messages = as_text(messages, None if tools is None else tools.shown)
    elif tools is not None:
        variables = variables | {"tools": tools.shown}
    opening = fields.flag(body, "add_generation_prompt", True)
    rendered = tokenizer.render(messages, opening, **variables)
    return tokenizer.encode(fields.text("messages", rendered), special=False)


def as_text(messages: Sequence[Message], tools: Sequence[Any] | None) -> list[Message]:
    """Returns messages with tools, calls and results written as text, for a template that knows
    none of them.
    """
    out: list[Message] = []
    for message in messages:
        message = dict(message)
        calls = message.pop("tool_calls", None)
        if calls:
            made = [
                {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
                for call in calls
            ]
            written = [f"{MARKER}\n{json.dumps(call, ensure_ascii=False)}\n{END}" for call in made]
            message["content"] = "\n".join(filter(None, [message["content"], *written]))
        if message["role"] in ("tool", "function"):
            content = RESULT.format(content=message["content"])
            if out and out[-1].get("results"):
                out[-1]["content"] += "\n" + content
                continue
            message = {"role": "user", "content": content, "results": True}
        out.append(message)
    if tools:
        text = SHOWN.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
        if out[0]["role"] == "system":
            out[0]["content"] = f"{out[0]['content']}\n\n{text}"
        else:
            out.insert(0, {"role": "system", "content": text})
    return [{key: value for key, value in message.items() if key != "results"} for message in out]


def _message(given: Any, where: str, strict: bool, has_developer: bool) -> Message:
    """Reads one message; ``developer`` is ``system`` to templates that do not know it. A null is a
    field that is not there.
    """
    if not isinstance(given, dict) or not isinstance(role := given.get("role"), str):
        raise wrong("messages", given, 'messages with a role, {"role": "user", "content": "..."}')
    if strict and role not in ROLES:
        raise wrong(f"{where}.role", role, f"one of {', '.join(ROLES)}")
    if role == "developer" and not has_developer:
        role = "system"
    calls, refusal = given.get("tool_calls"), given.get("refusal")
    content = given.get("content")
    if content is None and isinstance(refusal, str):
        content = refusal
    message = {
        key: value
        for key, value in given.items()
        if value is not None and key not in ("refusal", "tool_calls")
    }
    message |= {"role": role, "content": _content(content, bool(calls), f"{where}.content")}
    if calls:
        if not isinstance(calls, list):
            raise wrong(f"{where}.tool_calls", calls, "a list as a message's tool_calls")
        message["tool_calls"] = [
            _made(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)
        ]
    return message


def _content(content: Any, calls: bool, where: str) -> str:
    """Returns a message's text; parts that are text are joined."""
    if isinstance(content, list):
        parts = [part if isinstance(part, dict) else {} for part in content]
        texts = [
            part.get(part["type"]) if part.get("type") in ("text", "refusal") else None
            for part in parts
        ]
        if not all(isinstance(text, str) for text in texts):
            raise wrong(
                where,
                content,
                "content of text alone: parts of other types cannot be read by this model",
            )
        return "\n".join(filter(None, texts))
    if content is None and calls:
        return ""
    if not isinstance(content, str):
        raise wrong(
            where, content, "text, or a list of parts that are text, as a message's content"
        )
    return content


def _made(call: Any, where: str) -> dict[str, Any]:
    """Reads an earlier call as templates want it: its arguments, which are JSON text in OpenAI's
    API, as an object.
    """
    function = call.get("function") if isinstance(call, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    value = tool_calls.value_of(arguments or "{}") if isinstance(arguments, str) else arguments
    if (
        not isinstance(function, dict)
        or not isinstance(function.get("name"), str)
        or not isinstance(value, dict)
    ):
        raise wrong(
            where, call, 'calls of tools, {"function": {"name": ..., "arguments": "{...}"}}'
        )
    return {**call, "function": {**function, "arguments": value}}
