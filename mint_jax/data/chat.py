"""Rows of conversations and preferences -> token ids with a mark on those to be learned.

Every turn is rendered by the checkpoint's own template. The text up to an assistant's reply and the reply itself are
encoded apart, so that a mark never falls inside a token. A text that no template ends gets the checkpoint's end token: what is
never shown an end does not learn to stop.
"""

import dataclasses
from typing import Any

from mint_jax.data.tokenizer import Message, Tokenizer
from mint_jax.errors import UserError

Forms = tuple[tuple[str, ...], ...]  # alternatives, each the columns of a row
SUPERVISED: Forms = (("messages",), ("prompt", "completion"), ("text",))
PREFERENCES: Forms = (("prompt", "chosen", "rejected"), ("chosen", "rejected"))


@dataclasses.dataclass(frozen=True)
class Marked:
    """Token ids; ``learn[i]`` says whether token i is a target."""

    tokens: list[int]
    learn: list[bool]

    @property
    def first(self) -> int:
        """Index of the first target."""
        return self.learn.index(True)


def conversation(tokenizer: Tokenizer, messages: list[Message], where: str = "a row") -> Marked:
    """A whole conversation; the assistant's turns are targets, up to and including their end token.

    Raises:
        UserError: no assistant turn, or a template that rewrites earlier turns.
    """
    tokens: list[int] = []
    learn: list[bool] = []
    done = ""
    for i, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        before = tokenizer.render(messages[:i], generation_prompt=True)
        after = tokenizer.render(messages[: i + 1], generation_prompt=False)
        if not before.startswith(done) or not after.startswith(before):
            raise UserError(
                f"{where}: the chat template rewrites earlier turns, so replies cannot be located: give prompt and completion instead"
            )
        context = tokenizer.encode(before[len(done) :], special=False)
        reply = tokenizer.encode(after[len(before) :], special=False)
        end = next((k + 1 for k, token in enumerate(reply) if token in tokenizer.eos_ids), len(reply))
        tokens += context + reply
        learn += [False] * len(context) + [k < end for k in range(len(reply))]
        done = after
    if not any(learn):
        raise UserError(f"{where} has no assistant turn to learn from")
    return Marked(tokens, learn)


def continuation(tokenizer: Tokenizer, prompt: list[Message] | str, reply: str, where: str, append_eos: bool) -> Marked:
    """A prompt and a reply to learn: a chat turn for messages, plain continued text for a string."""
    if isinstance(prompt, str):
        context, target = tokenizer.encode(prompt), tokenizer.encode(reply, special=False)
        if not target:
            raise UserError(f"{where}: the reply to {prompt[:80]!r} is empty: there is nothing to learn from it")
        target = ended(tokenizer, target, append_eos)
        return Marked(context + target, [False] * len(context) + [True] * len(target))
    return conversation(tokenizer, [*prompt, {"role": "assistant", "content": reply}], where)


def ended(tokenizer: Tokenizer, tokens: list[int], append_eos: bool) -> list[int]:
    """The tokens with the checkpoint's end token behind them, unless they end with one; as they are without ``append_eos``.

    Raises:
        UserError: the checkpoint names no end token.
    """
    if not append_eos or (tokens and tokens[-1] in tokenizer.eos_ids):
        return tokens
    if tokenizer.eos_id is None:
        raise UserError("this checkpoint names no end token (eos_token): set data.append_eos=False to learn from texts without an end")
    return [*tokens, tokenizer.eos_id]


def supervised_row(tokenizer: Tokenizer, row: dict[str, Any], where: str, append_eos: bool = True) -> Marked:
    """One training text: ``{"messages"}``, ``{"prompt", "completion"}`` or ``{"text"}``.

    Args:
        where: the row's place, for errors.
        append_eos: end ``text``, and a ``completion`` of a ``prompt`` that is text, with the checkpoint's end token.

    Raises:
        UserError: none of the three, a column of another type, or nothing to learn.
    """
    form = form_of(row, SUPERVISED, where)
    if "messages" in form:
        return conversation(tokenizer, _messages(row["messages"], "messages", where), where)
    if "prompt" in form:
        return continuation(tokenizer, _prompt(row, where), _reply(row, "completion", where), where, append_eos)
    text = row["text"]
    if not isinstance(text, str):
        raise UserError(f"{where}: text is {str(text)[:80]!r}; expected a string")
    tokens = tokenizer.encode(text)
    if len(tokens) < 2:
        raise UserError(f"{where} has a text of {len(tokens)} tokens; at least 2 are needed")
    tokens = ended(tokenizer, tokens, append_eos)
    return Marked(tokens, [False] + [True] * (len(tokens) - 1))


def preference_row(tokenizer: Tokenizer, row: dict[str, Any], where: str, append_eos: bool = True) -> tuple[Marked, Marked]:
    """A chosen and a rejected reply: ``{"prompt", "chosen", "rejected"}``, or two whole conversations without ``prompt``.

    Args:
        where, append_eos: see ``supervised_row``.

    Raises:
        UserError: a column is missing or of another type, or the two do not share their prompt.
    """
    if "prompt" in form_of(row, PREFERENCES, where):
        prompt = _prompt(row, where)
        chosen, rejected = (continuation(tokenizer, prompt, _reply(row, name, where), where, append_eos) for name in PREFERENCES[1])
    else:
        chosen, rejected = (conversation(tokenizer, _messages(row[name], name, where), where) for name in PREFERENCES[1])
    shared = chosen.first
    if chosen.tokens[:shared] != rejected.tokens[:shared] or rejected.first != shared:
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
    wanted = ", or ".join(" and ".join(filter(None, (", ".join(form[:-1]), form[-1]))) for form in forms)
    raise UserError(f"{where} has columns {', '.join(row)}; expected {wanted}")


def _messages(value: Any, column: str, where: str) -> list[Message]:
    """A list of messages, each with a role."""
    if not isinstance(value, list | tuple) or not value or not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in value):
        raise UserError(
            f'{where}: {column} is {str(value)[:80]!r}; expected a list of messages: [{{"role": "user", "content": "..."}}, ...]'
        )
    return list(value)


def _prompt(row: dict[str, Any], where: str) -> list[Message] | str:
    return row["prompt"] if isinstance(row["prompt"], str) else _messages(row["prompt"], "prompt", where)


def _reply(row: dict[str, Any], column: str, where: str) -> str:
    """A reply given as text, as a message, or as a list of one message."""
    value = row[column]
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, dict):
        value = value.get("content")
    if not isinstance(value, str):
        raise UserError(f"{where}: {column} is {str(row[column])[:80]!r}; expected a string, or a message with a content")
    return value
