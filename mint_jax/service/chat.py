"""Chats: from messages and tools to a prompt by the checkpoint's chat template, and from an answer
to tool calls.

A template without a place for tools gets them as text: a list of them in the system message,
earlier calls in the assistant's content, and results in user messages. A call that ``tool_choice``
demands is sampled under a JSON schema instead of being parsed by ``tool_calls.py``.
"""

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from mint_jax.data.tokenizer import Message as TemplateMessage
from mint_jax.data.tokenizer import Tokenizer
from mint_jax.service import tool_calls
from mint_jax.service.tool_calls import END, MARKER, Call
from mint_jax.service.validation import BadRequest, Body, Text, wrong

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
RESULT = "<tool_response>\n{content}\n</tool_response>"


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
        if isinstance(value, str) and tool_calls.value_of(value or "{}") is None:
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
class Tools:
    """The tools of a chat, as the template gets them; ``read`` returns an answer's content and its
    calls, and ``schema`` is the JSON schema of a demanded call.
    """

    shown: list[dict[str, Any]]
    read: Callable[[str], tuple[str, list[Call]]]
    schema: dict[str, Any] | None = None

    @property
    def marker(self) -> str:
        """Text that ends an answer's content: see ``TextStream``."""
        return MARKER if self.schema is None else ""


def takes_tools(tokenizer: Tokenizer) -> bool:
    """Returns whether the chat template has a place for tools."""
    return re.search(r"\btools\b", tokenizer.sources[1] or "") is not None


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
        form = tool_calls.json_object
        if takes_tools(tokenizer):
            form = tool_calls.form_of(tokenizer.sources[1] or "")
        if form is None:
            raise BadRequest("tools", UNKNOWN_SYNTAX)
        most = 1 if parallel is False else None
        return Tools(tools, lambda answer: tool_calls.read(answer, form, functions, most))
    if choice == "required":
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": name}, "arguments": schema},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for name, schema in functions.items()
        ]
        return Tools(tools, _demanded, {"anyOf": calls})
    named = choice.get("function") if isinstance(choice, dict) else None
    name = named.get("name") if isinstance(named, dict) else None
    if not isinstance(name, str) or name not in functions:
        raise wrong("tool_choice", choice, "none, auto, required, or one of the tools")
    return Tools(tools, functools.partial(_demanded, name=name), functions[name])


def _demanded(answer: str, name: str = "") -> tuple[str, list[Call]]:
    """Returns the content and the call of an answer under a schema, of a named tool or of any."""
    if (value := tool_calls.value_of(answer)) is None:
        return answer, []
    call = Call(name, answer) if name else tool_calls.call_of(value)
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
    variables = dict(variables or {})
    if taken := OWN & variables.keys():
        name, field = sorted(taken)[0], "chat_template_kwargs"
        raise BadRequest(field, f"{field} has {name}, which has a field of its own: leave it out")
    has_developer = "developer" in (tokenizer.sources[1] or "")
    read = [_for_template(message, has_developer) for message in messages]
    if not takes_tools(tokenizer):
        read = _as_text(read, None if tools is None else tools.shown)
    elif tools is not None:
        variables["tools"] = tools.shown
    return tokenizer.encode(tokenizer.render(read, opening, **variables), special=False)


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
            texts = [RESULT.format(content=content)]
            if last in ("tool", "function"):
                texts.insert(0, out.pop()["content"])
            new = {"role": "user"}
        out.append(new | {"content": "\n".join(filter(None, texts))})
        last = role
    if tools:
        text = SHOWN.format(tools="\n".join(map(written, tools)))
        if out[0]["role"] == "system":
            out[0]["content"] = f"{out[0]['content']}\n\n{text}"
        else:
            out.insert(0, {"role": "system", "content": text})
    return out


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
            arguments = tool_calls.value_of(arguments or "{}")
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return message | ({"tool_calls": calls} if calls else {})
