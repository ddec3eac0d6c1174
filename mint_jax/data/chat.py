"""Conversations and preferences as token ids with a loss mask.

A row is rendered to one text, with the checkpoint's chat template if it has messages, and encoded
as one text, as the model reads it. Replies are spans of that text. A token with a character of a
reply is a target, so a token that straddles prompt and reply belongs to the reply. A text that no
template ends gets the checkpoint's end token; without it the model would not learn to stop.
"""

import contextlib
import dataclasses
import json
import re
from collections.abc import Iterator
from typing import Any

from mint_jax.data.chat_template import Span
from mint_jax.data.tokenizer import Message, Tokenizer
from mint_jax.errors import UserError

Row = dict[str, Any]
Forms = tuple[tuple[str, ...], ...]  # alternatives, each a set of columns
SUPERVISED: Forms = (("messages",), ("prompt", "completion"), ("text",))
PREFERENCES: Forms = (("prompt", "chosen", "rejected"), ("chosen", "rejected"))
OF_CHATS = ("tools", "chat_template_kwargs")  # further columns of rows with messages
# names that chat_template_kwargs may not set
OWN = {"messages", "add_generation_prompt", "generation_prompt", "tools"}


@dataclasses.dataclass(frozen=True)
class Marked:
    """Token ids, ``learn[i]`` if token i is a target, and the text before the first reply."""

    tokens: list[int]
    learn: list[bool]
    prompt: str = ""

    @property
    def first(self) -> int:
        """Index of the first target."""
        return self.learn.index(True)


def prompt_tokens(tokenizer: Tokenizer, row: Row, where: str) -> list[int]:
    """Returns the token ids of a row's ``messages`` with the reply's opening."""
    with _place_in_errors(where):
        variables = _variables(tokenizer, row, ("messages",))
        return tokenizer.encode_chat(messages_of(row["messages"], "messages"), **variables)


def supervised_row(tokenizer: Tokenizer, row: Row, where: str, append_eos: bool = True) -> Marked:
    """Encodes one training row: ``{"messages"}``, ``{"prompt", "completion"}`` or ``{"text"}``.
    Rows with messages may have ``tools`` and ``chat_template_kwargs`` for the template.

    Raises ``UserError``: it has none of the three forms, a column of the wrong type, or no target.

    Args:
        where: place of the row, for errors.
        append_eos: appends the end token to ``text`` and to the ``completion`` of a plain prompt.
    """
    form = form_of(row, SUPERVISED, where)
    with _place_in_errors(where):
        variables = _variables(tokenizer, row, form)
        if "messages" in form:
            return _conversation(tokenizer, messages_of(row["messages"], "messages"), variables)
        if "prompt" in form:
            return _continuation(tokenizer, row, "completion", append_eos, variables)
        text = row["text"]
        if not isinstance(text, str):
            raise UserError(f"text is {str(text)[:80]!r}; expected a string")
        tokens = tokenizer.encode(text)
        if len(tokens) < 2:
            raise UserError(f"this is a text of {len(tokens)} tokens; at least 2 are needed")
        return _ended(tokenizer, Marked(tokens, [False] + [True] * (len(tokens) - 1)), append_eos)


def preference_row(
    tokenizer: Tokenizer, row: Row, where: str, append_eos: bool = True
) -> tuple[Marked, Marked]:
    """Encodes a chosen and a rejected reply: ``{"prompt", "chosen", "rejected"}``, or two whole
    conversations without ``prompt``. Arguments and errors as in ``supervised_row``; both need the
    same prompt.
    """
    form = form_of(row, PREFERENCES, where)
    with _place_in_errors(where):
        variables = _variables(tokenizer, row, form)
        chosen, rejected = (
            _continuation(tokenizer, row, column, append_eos, variables)
            if "prompt" in form
            else _conversation(tokenizer, messages_of(row[column], column), variables)
            for column in PREFERENCES[1]
        )
        if chosen.prompt != rejected.prompt:
            raise UserError("chosen and rejected do not continue the same prompt")
    return chosen, rejected


def form_of(row: Row, forms: Forms, where: str) -> tuple[str, ...]:
    """Returns the columns of the first form that the row has whole, or raises ``UserError``."""
    for form in forms:
        if all(column in row for column in form):
            return form
    wanted = ", or ".join(", ".join(form).replace(", ", " and ") for form in forms)
    raise UserError(f"{where} has columns {', '.join(row)}; expected {wanted}")


@contextlib.contextmanager
def _place_in_errors(where: str) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def _conversation(
    tokenizer: Tokenizer, messages: list[Message], variables: dict[str, Any]
) -> Marked:
    """Encodes a conversation. Targets are the assistant's turns with their end token, or the parts
    that the template marks with ``{% generation %}``.
    """
    replies = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not replies:
        raise UserError("there is no assistant turn to learn from")
    messages = messages[: replies[-1] + 1]
    text, spans = tokenizer.render_replies(messages, **variables)
    if spans is not None:
        return _marked(tokenizer, text, spans)
    spans = []
    for i in replies:
        before = tokenizer.render(messages[:i], generation_prompt=True, **variables)
        after = tokenizer.render(messages[: i + 1], generation_prompt=False, **variables)
        if not text.startswith(after) or not after.startswith(before):
            raise UserError(
                "the chat template rewrites earlier turns, so replies cannot be located: give"
                " prompt and completion instead"
            )
        spans.append((len(before), len(after)))
    return _marked(tokenizer, text, spans, to_end=True)


def _continuation(
    tokenizer: Tokenizer, row: Row, column: str, append_eos: bool, variables: dict[str, Any]
) -> Marked:
    """Encodes prompt and reply: chat turns if the prompt has messages, otherwise text."""
    prompt, reply = row["prompt"], _reply(row[column], column)
    if not isinstance(prompt, str):
        turns = [{"role": "assistant", "content": reply}] if isinstance(reply, str) else reply
        return _conversation(tokenizer, [*messages_of(prompt, "prompt"), *turns], variables)
    text = reply if isinstance(reply, str) else reply[0].get("content")
    if not isinstance(text, str) or (not isinstance(reply, str) and len(reply) > 1):
        raise UserError(
            f"the reply to a prompt that is text is {str(reply)[:80]!r}; expected text, or one"
            " message with text"
        )
    spans = [(len(prompt), len(prompt) + len(text))]
    return _ended(tokenizer, _marked(tokenizer, prompt + text, spans, special=True), append_eos)


def _marked(
    tokenizer: Tokenizer, text: str, spans: list[Span], special: bool = False, to_end: bool = False
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
        raise UserError("the reply is empty: there is nothing to learn from it")
    return Marked(tokens, learn, text[: spans[0][0]])


def _ended(tokenizer: Tokenizer, marked: Marked, append_eos: bool) -> Marked:
    """Appends the end token as a target, unless the text ends with one."""
    if not append_eos:
        return marked
    if marked.tokens[-1] in tokenizer.eos_ids:
        return dataclasses.replace(marked, learn=[*marked.learn[:-1], True])
    if tokenizer.eos_id is None:
        raise UserError(
            "this checkpoint names no end token (eos_token): set data.append_eos=False to learn"
            " from texts without an end"
        )
    tokens, learn = [*marked.tokens, tokenizer.eos_id], [*marked.learn, True]
    return dataclasses.replace(marked, tokens=tokens, learn=learn)


def _variables(tokenizer: Tokenizer, row: Row, form: tuple[str, ...]) -> dict[str, Any]:
    """Returns a row's template variables: tools and ``chat_template_kwargs``."""
    given = {name: row[name] for name in OF_CHATS if row.get(name) not in (None, [], {})}
    if given and ("text" in form or isinstance(row.get("prompt"), str)):
        raise UserError(
            f"there are {' and '.join(given)} and plain text, which no chat template renders:"
            " give messages, or leave them out"
        )
    kwargs = given.get("chat_template_kwargs", {})
    variables = _read_json(kwargs, dict, "chat_template_kwargs")
    if taken := sorted(OWN & variables.keys()):
        raise UserError(
            f"chat_template_kwargs has {taken[0]!r}, which has a place of its own: leave it out"
        )
    if "tools" not in given:
        return variables
    tools = _read_json(given["tools"], list, "tools")
    tools = [_read_json(tool, dict, "tools") for tool in tools]
    if not re.search(r"\btools\b", tokenizer.sources[1] or ""):
        raise UserError(
            "there are tools, but this checkpoint's chat template has no place for them: leave"
            " them out"
        )
    return variables | {"tools": tools}


def _read_json(value: Any, kind: type, column: str) -> Any:
    """Returns a list or an object, given directly or as JSON text."""
    try:
        read = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        read = None
    if kind is list and isinstance(read, tuple):
        read = list(read)
    if not isinstance(read, kind):
        expected = "a list" if kind is list else "an object"
        raise UserError(f"{column} has {str(value)[:80]!r}; expected {expected}, or its JSON")
    return read


def messages_of(value: Any, column: str) -> list[Message]:
    """Returns a checked list of messages in the form of chat templates."""
    messages = value if isinstance(value, list | tuple) else ()
    if not messages or not all(
        isinstance(one, dict) and isinstance(one.get("role"), str) for one in messages
    ):
        raise UserError(
            f'{column} is {str(value)[:80]!r}; expected a list of messages: [{{"role": "user",'
            ' "content": "..."}, ...]'
        )
    return [_message(message) for message in messages]


def _message(message: Message) -> Message:
    message = {name: value for name, value in message.items() if value is not None}
    content, calls = message.get("content"), message.get("tool_calls")
    if isinstance(content, list) and content:
        texts: list[Any] = [isinstance(part, dict) and part.get("text") for part in content]
        if all(isinstance(text, str) for text in texts):
            message["content"] = "\n".join(texts)
    if not calls:
        return message
    if not isinstance(calls, list | tuple):
        raise UserError(f"tool_calls is {str(calls)[:80]!r}; expected a list of calls")
    content = message.get("content") or ""
    return message | {"content": content, "tool_calls": [_call(call) for call in calls]}


def _call(call: Any) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UserError(
            f'tool_calls has {str(call)[:80]!r}; expected {{"function": {{"name": ...,'
            ' "arguments": {...}}}'
        )
    arguments = function.get("arguments", {})
    function = function | {
        "arguments": _read_json(arguments, dict, f"a call of {function['name']}")
    }
    return call | {"function": function} if "function" in call else function


def _reply(value: Any, column: str) -> list[Message] | str:
    """Returns a reply: text, a message, or messages that begin and end with the assistant."""
    if isinstance(value, str):
        return value
    turns = [{"role": "assistant"} | value] if isinstance(value, dict) else value
    ends = [turns[0], turns[-1]] if isinstance(turns, list | tuple) and turns else [None]
    if not all(isinstance(turn, dict) and turn.get("role") == "assistant" for turn in ends):
        raise UserError(
            f"{column} is {str(value)[:80]!r}; expected a string, or messages of the assistant"
        )
    return messages_of(turns, column)
