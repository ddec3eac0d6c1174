"""Conversations and preferences as token ids with a loss mask.

A row is rendered to one text, with the checkpoint's chat template if it has messages, and encoded
as one text, as the model reads it. Replies are spans of that text. A token with a character of a
reply is a target, so a token that straddles prompt and reply belongs to the reply. A text that no
template ends gets the checkpoint's end token; without it the model would not learn to stop.
"""

import dataclasses
import json
import re
from collections.abc import Callable
from typing import Any

from mint_jax.data.chat_template import Span
from mint_jax.data.tokenizer import Message, Tokenizer
from mint_jax.errors import UserError

Forms = tuple[tuple[str, ...], ...]  # alternatives, each a set of columns
SUPERVISED: Forms = (("messages",), ("prompt", "completion"), ("text",))
PREFERENCES: Forms = (("prompt", "chosen", "rejected"), ("chosen", "rejected"))
OF_CHATS = ("tools", "chat_template_kwargs")  # further columns of rows with messages
# names that chat_template_kwargs may not set
OWN = ("messages", "add_generation_prompt", "generation_prompt", "tools")


@dataclasses.dataclass(frozen=True)
class Marked:
    """Token ids with ``learn[i]``, true if token i is a target, and ``prompt``, the text before the
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
    """Encodes a whole conversation. Targets are the assistant's turns up to and including their end
    token, or the parts that the template marks with ``{% generation %}``.

    Args:
        variables: variables of the template.

    Raises:
        UserError: there is no assistant turn, or the template rewrites earlier turns.
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
    """Returns the token ids of a row's ``messages`` with the reply's opening; ``tools`` and
    ``chat_template_kwargs`` as in training rows.
    """
    variables = _variables(tokenizer, row, ("messages",), where)
    return _placed(
        where, tokenizer.encode_chat, messages_of(row["messages"], "messages", where), **variables
    )


def _placed(where: str, render: Callable[..., Any], *args: Any, **variables: Any) -> Any:
    """Calls ``render`` and adds the row to its errors."""
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
    """Encodes a text as a whole. With ``to_end`` a reply's targets end at its end token."""
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
    """Encodes a prompt and a reply: chat turns if the prompt has messages, otherwise continued
    text.
    """
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
    """Appends the checkpoint's end token as a target, unless the text ends with one or
    ``append_eos`` is false.

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
    """Encodes one training row: ``{"messages"}``, ``{"prompt", "completion"}`` or ``{"text"}``.
    Rows with messages may have ``tools`` and ``chat_template_kwargs`` for the template.

    Args:
        where: place of the row, for errors.
        append_eos: appends the end token to ``text``, and to the ``completion`` of a plain
            ``prompt``.

    Raises:
        UserError: the row has none of the three forms, a column has the wrong type, or there is no
            target.
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
    """Encodes a chosen and a rejected reply: ``{"prompt", "chosen", "rejected"}``, or two whole
    conversations without ``prompt``.

    Args:
        where, append_eos: as in ``supervised_row``.

    Raises:
        UserError: a column is missing or has the wrong type, or the replies have different prompts.
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
    """Returns the columns of the first form that the row has completely.

    Raises:
        UserError: the row has no complete form.
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
    """Returns a row's template variables: tools and ``chat_template_kwargs``."""
    given = {name: row[name] for name in OF_CHATS if row.get(name) not in (None, [], {})}
    if given and ("text" in form or isinstance(row.get("prompt"), str)):
        raise UserError(
            f"{where} has {' and '.join(given)} and plain text, which no chat template renders:"
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
    """Returns a list or an object, given directly or as JSON text."""
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
    """Returns a checked list of messages, each with a role."""
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
    """Returns a message in the form of chat templates and of the service."""
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
    """Returns a reply given as text, as a message, or as messages that begin and end with the
    assistant.
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
