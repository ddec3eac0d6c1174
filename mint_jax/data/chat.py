"""Rows of conversations and preferences -> token ids with a mark on those to be learned.

A row is rendered to one text, by the checkpoint's own chat template where it has messages, and
encoded as one text: as the model reads it. Replies are spans of that text, and a token that holds a
character of a reply is learned; so a token that straddles the end of the prompt belongs to the
reply. A text that no template ends gets the checkpoint's end token: what is never shown an end does
not learn to stop.
"""

import dataclasses
import json
import re
from collections.abc import Callable
from typing import Any

from mint_jax.data.chat_template import Span
from mint_jax.data.tokenizer import Message, Tokenizer
from mint_jax.errors import UserError

Forms = tuple[tuple[str, ...], ...]  # alternatives, each the columns of a row
SUPERVISED: Forms = (("messages",), ("prompt", "completion"), ("text",))
PREFERENCES: Forms = (("prompt", "chosen", "rejected"), ("chosen", "rejected"))
OF_CHATS = ("tools", "chat_template_kwargs")  # further columns of rows with messages
# not for chat_template_kwargs
OWN = ("messages", "add_generation_prompt", "generation_prompt", "tools")


@dataclasses.dataclass(frozen=True)
class Marked:
    """Token ids; ``learn[i]`` says whether token i is a target; ``prompt`` is the text before the
    first reply.
    """

    tokens: list[int]
    learn: list[bool]
    prompt: str = ""

    @property
    def first(self) -> int:
        """Index of the first target."""
        return self.learn.index(True)


def conversation(
    tokenizer: Tokenizer, messages: list[Message], where: str = "a row", **variables: Any
) -> Marked:
    """A whole conversation; the assistant's turns are targets, up to and including their end token.

    The targets are those that the template marks by ``{% generation %}``, if it does.

    Args:
        variables: for the template.

    Raises:
        UserError: no assistant turn, or a template that rewrites earlier turns.
    """
    replies = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
    if not replies:
        raise UserError(f"{where} has no assistant turn to learn from")
    messages = messages[: replies[-1] + 1]
    text, spans = _placed(where, tokenizer.render_replies, messages, **variables)
    if spans is not None:
        return _marked(tokenizer, text, spans, where)
    spans = []
    for i in replies:
        before = _placed(where, tokenizer.render, messages[:i], generation_prompt=True, **variables)
        after = _placed(
            where, tokenizer.render, messages[: i + 1], generation_prompt=False, **variables
        )
        if not text.startswith(after) or not after.startswith(before):
            raise UserError(
                f"{where}: the chat template rewrites earlier turns, so replies cannot be located:"
                " give prompt and completion instead"
            )
        spans.append((len(before), len(after)))
    return _marked(tokenizer, text, spans, where, to_end=True)


def prompt_tokens(tokenizer: Tokenizer, row: dict[str, Any], where: str) -> list[int]:
    """Token ids of a row's ``messages`` with the reply's opening; ``tools`` and
    ``chat_template_kwargs`` as in rows to learn from.
    """
    variables = _variables(tokenizer, row, ("messages",), where)
    return _placed(
        where, tokenizer.encode_chat, messages_of(row["messages"], "messages", where), **variables
    )


def _placed(where: str, render: Callable[..., Any], *args: Any, **variables: Any) -> Any:
    """What a function returns; its errors name the row."""
    try:
        return render(*args, **variables)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def _marked(
    tokenizer: Tokenizer,
    text: str,
    spans: list[Span],
    where: str,
    special: bool = False,
    to_end: bool = False,
) -> Marked:
    """A text encoded as a whole; ``to_end``: a reply ends with its end token, what its template
    writes behind is not learned.
    """
    tokens, ranges = tokenizer.encode_spans(text, spans, special)
    learn = [False] * len(tokens)
    for reply in ranges:
        for i in reply:
            learn[i] = True
            if to_end and tokens[i] in tokenizer.eos_ids:
                break
    if not any(learn):
        raise UserError(f"{where}: the reply is empty: there is nothing to learn from it")
    return Marked(tokens, learn, text[: spans[0][0]])


def continuation(
    tokenizer: Tokenizer,
    prompt: list[Message] | str,
    reply: list[Message] | str,
    where: str,
    append_eos: bool,
    **variables: Any,
) -> Marked:
    """A prompt and a reply to learn: chat turns for messages, plain continued text for a string."""
    if not isinstance(prompt, str):
        turns = [{"role": "assistant", "content": reply}] if isinstance(reply, str) else reply
        return conversation(tokenizer, [*prompt, *turns], where, **variables)
    text = reply if isinstance(reply, str) else reply[0].get("content")
    if not isinstance(text, str) or (not isinstance(reply, str) and len(reply) > 1):
        raise UserError(
            f"{where}: the reply to a prompt that is text is {str(reply)[:80]!r}; expected text, or"
            " one message with text"
        )
    if not text:
        raise UserError(
            f"{where}: the reply to {prompt[:80]!r} is empty: there is nothing to learn from it"
        )
    marked = _marked(
        tokenizer, prompt + text, [(len(prompt), len(prompt) + len(text))], where, special=True
    )
    return _ended(tokenizer, marked, append_eos)


def _ended(tokenizer: Tokenizer, marked: Marked, append_eos: bool) -> Marked:
    """The text with the checkpoint's end token behind it, unless it ends with one, as a target; as
    it is without ``append_eos``.

    Raises:
        UserError: the checkpoint names no end token.
    """
    if not append_eos:
        return marked
    tokens = marked.tokens
    if tokens and tokens[-1] in tokenizer.eos_ids:
        return dataclasses.replace(marked, learn=[*marked.learn[:-1], True])
    if tokenizer.eos_id is None:
        raise UserError(
            "this checkpoint names no end token (eos_token): set data.append_eos=False to learn"
            " from texts without an end"
        )
    return dataclasses.replace(
        marked, tokens=[*tokens, tokenizer.eos_id], learn=[*marked.learn, True]
    )


def supervised_row(
    tokenizer: Tokenizer, row: dict[str, Any], where: str, append_eos: bool = True
) -> Marked:
    """One training text: ``{"messages"}``, ``{"prompt", "completion"}`` or ``{"text"}``.

    Rows with messages may have ``tools`` and ``chat_template_kwargs``, which the template sees.

    Args:
        where: the row's place, for errors.
        append_eos: end ``text``, and a ``completion`` of a ``prompt`` that is text, with the
            checkpoint's end token.

    Raises:
        UserError: none of the three, a column of another type, or nothing to learn.
    """
    form = form_of(row, SUPERVISED, where)
    variables = _variables(tokenizer, row, form, where)
    if "messages" in form:
        return conversation(
            tokenizer, messages_of(row["messages"], "messages", where), where, **variables
        )
    if "prompt" in form:
        return continuation(
            tokenizer,
            _prompt(row, where),
            _reply(row, "completion", where),
            where,
            append_eos,
            **variables,
        )
    text = row["text"]
    if not isinstance(text, str):
        raise UserError(f"{where}: text is {str(text)[:80]!r}; expected a string")
    tokens = tokenizer.encode(text)
    if len(tokens) < 2:
        raise UserError(f"{where} has a text of {len(tokens)} tokens; at least 2 are needed")
    return _ended(tokenizer, Marked(tokens, [False] + [True] * (len(tokens) - 1)), append_eos)


def preference_row(
    tokenizer: Tokenizer, row: dict[str, Any], where: str, append_eos: bool = True
) -> tuple[Marked, Marked]:
    """A chosen and a rejected reply: ``{"prompt", "chosen", "rejected"}``, or two whole
    conversations without ``prompt``.

    Args:
        where, append_eos: see ``supervised_row``.

    Raises:
        UserError: a column is missing or of another type, or the two do not share their prompt.
    """
    form = form_of(row, PREFERENCES, where)
    variables = _variables(tokenizer, row, form, where)
    if "prompt" in form:
        prompt = _prompt(row, where)
        chosen, rejected = (
            continuation(
                tokenizer, prompt, _reply(row, name, where), where, append_eos, **variables
            )
            for name in PREFERENCES[1]
        )
    else:
        chosen, rejected = (
            conversation(tokenizer, messages_of(row[name], name, where), where, **variables)
            for name in PREFERENCES[1]
        )
    if chosen.prompt != rejected.prompt:
        raise UserError(f"{where}: chosen and rejected do not continue the same prompt")
    return chosen, rejected


def form_of(row: dict[str, Any], forms: Forms, where: str) -> tuple[str, ...]:
    """The columns that a row is read by: the first of the forms that it has all columns of.

    Raises:
        UserError: none of them.
    """
    for form in forms:
        if all(column in row for column in form):
            return form
    wanted = ", or ".join(
        " and ".join(filter(None, (", ".join(form[:-1]), form[-1]))) for form in forms
    )
    raise UserError(f"{where} has columns {', '.join(row)}; expected {wanted}")


def _variables(
    tokenizer: Tokenizer, row: dict[str, Any], form: tuple[str, ...], where: str
) -> dict[str, Any]:
    """What a row gives the template beside its messages."""
    given = {name: row[name] for name in OF_CHATS if row.get(name) not in (None, [], {})}
    if given and ("text" in form or isinstance(row.get("prompt"), str)):
        raise UserError(
            f"{where} has {' and '.join(given)} beside plain text, which no chat template renders:"
            " give messages, or leave them out"
        )
    variables = _read_json(
        given.get("chat_template_kwargs", {}), dict, "chat_template_kwargs", where
    )
    if taken := [name for name in OWN if name in variables]:
        raise UserError(
            f"{where}: chat_template_kwargs has {taken[0]!r}, which has a place of its own: leave"
            " it out"
        )
    if "tools" in given:
        tools = _read_json(given["tools"], list, "tools", where)
        variables = variables | {
            "tools": [_read_json(tool, dict, "tools", where) for tool in tools]
        }
        if not re.search(r"\btools\b", tokenizer.sources[1] or ""):
            raise UserError(
                f"{where} has tools, but this checkpoint's chat template has no place for them:"
                " leave them out"
            )
    return variables


def _read_json(value: Any, kind: type, column: str, where: str) -> Any:
    """A list or an object, given as such or as JSON text."""
    try:
        read = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        read = None
    if isinstance(read, tuple):
        read = list(read)
    if not isinstance(read, kind):
        what = {list: "a list", dict: "an object"}[kind]
        raise UserError(f"{where}: {column} has {str(value)[:80]!r}; expected {what}, or its JSON")
    return read


def messages_of(value: Any, column: str, where: str) -> list[Message]:
    """A list of messages, each with a role."""
    if (
        not isinstance(value, list | tuple)
        or not value
        or not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in value)
    ):
        raise UserError(
            f'{where}: {column} is {str(value)[:80]!r}; expected a list of messages: [{{"role":'
            ' "user", "content": "..."}, ...]'
        )
    return [_message(message, where) for message in value]


def _message(message: Message, where: str) -> Message:
    """A message as templates want it, and as the service reads it: arguments of calls as objects,
    parts that are text joined.

    A field that is null is absent, as in a table.
    """
    message = {name: value for name, value in message.items() if value is not None}
    content, calls = message.get("content"), message.get("tool_calls")
    if (
        isinstance(content, list)
        and content
        and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content)
    ):
        message = message | {"content": "\n".join(part["text"] for part in content)}
    if not calls:
        return message
    if not isinstance(calls, list | tuple):
        raise UserError(f"{where}: tool_calls is {str(calls)[:80]!r}; expected a list of calls")
    return message | {
        "content": message.get("content") or "",
        "tool_calls": [_call(call, where) for call in calls],
    }


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UserError(
            f'{where}: tool_calls has {str(call)[:80]!r}; expected {{"function": {{"name": ...,'
            ' "arguments": {...}}}'
        )
    function = function | {
        "arguments": _read_json(
            function.get("arguments", {}), dict, f"a call of {function['name']}", where
        )
    }
    return call | {"function": function} if "function" in call else function


def _prompt(row: dict[str, Any], where: str) -> list[Message] | str:
    return (
        row["prompt"]
        if isinstance(row["prompt"], str)
        else messages_of(row["prompt"], "prompt", where)
    )


def _reply(row: dict[str, Any], column: str, where: str) -> list[Message] | str:
    """A reply given as text, as a message, or as a list of messages that begins and ends with the
    assistant's.
    """
    value = row[column]
    if isinstance(value, str):
        return value
    turns = [{"role": "assistant"} | value] if isinstance(value, dict) else value
    roles = (
        [turn.get("role") if isinstance(turn, dict) else None for turn in turns]
        if isinstance(turns, list | tuple)
        else []
    )
    if not roles or roles[0] != "assistant" or roles[-1] != "assistant":
        raise UserError(
            f"{where}: {column} is {str(value)[:80]!r}; expected a string, or messages of the"
            " assistant"
        )
    return messages_of(turns, column, where)
