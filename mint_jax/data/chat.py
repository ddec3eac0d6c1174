"""Rows of conversations and preferences -> token ids with a mark on those to be learned.

Every turn is rendered by the checkpoint's own template. The text up to an assistant's reply and the reply itself are
encoded apart, so that a mark never falls inside a token.
"""

import dataclasses
from typing import Any

from mint_jax.data.tokenizer import Message, Tokenizer
from mint_jax.errors import UserError


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
                f"{where}: the chat template rewrites earlier turns, so replies cannot be told apart: give prompt and completion instead"
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


def continuation(tokenizer: Tokenizer, prompt: list[Message] | str, reply: str) -> Marked:
    """A prompt and a reply to learn: a chat turn for messages, plain continued text for a string."""
    if isinstance(prompt, str):
        context, target = tokenizer.encode(prompt), tokenizer.encode(reply, special=False)
        if not target:
            raise UserError(f"the reply to {prompt[:80]!r} is empty: there is nothing to learn from it")
        return Marked(context + target, [False] * len(context) + [True] * len(target))
    return conversation(tokenizer, [*prompt, {"role": "assistant", "content": reply}])


def supervised_row(tokenizer: Tokenizer, row: dict[str, Any], where: str) -> Marked:
    """One training text: ``{"messages"}``, ``{"prompt", "completion"}`` or ``{"text"}``.

    Raises:
        UserError: none of the three, or nothing to learn.
    """
    if "messages" in row:
        return conversation(tokenizer, list(row["messages"]), where)
    if "prompt" in row and "completion" in row:
        return continuation(tokenizer, _prompt(row["prompt"]), _reply(row["completion"]))
    if "text" in row:
        tokens = tokenizer.encode(row["text"])
        if len(tokens) < 2:
            raise UserError(f"{where} has a text of {len(tokens)} tokens; at least 2 are needed")
        return Marked(tokens, [False] + [True] * (len(tokens) - 1))
    raise UserError(f"{where} has columns {', '.join(row)}; expected messages, or prompt and completion, or text")


def preference_row(tokenizer: Tokenizer, row: dict[str, Any], where: str) -> tuple[Marked, Marked]:
    """A chosen and a rejected reply: ``{"prompt", "chosen", "rejected"}``, or two whole conversations without ``prompt``.

    Raises:
        UserError: a column is missing, or the two do not share their prompt.
    """
    for column in ("chosen", "rejected"):
        if column not in row:
            raise UserError(f"{where} has columns {', '.join(row)}; expected prompt, chosen and rejected")
    if "prompt" in row:
        prompt = _prompt(row["prompt"])
        pair = continuation(tokenizer, prompt, _reply(row["chosen"])), continuation(tokenizer, prompt, _reply(row["rejected"]))
    else:
        pair = conversation(tokenizer, list(row["chosen"]), where), conversation(tokenizer, list(row["rejected"]), where)
    shared = pair[0].first
    if pair[0].tokens[:shared] != pair[1].tokens[:shared] or pair[1].first != shared:
        raise UserError(f"{where}: chosen and rejected do not continue the same prompt")
    return pair


def _prompt(value: Any) -> list[Message] | str:
    return value if isinstance(value, str) else list(value)


def _reply(value: Any) -> str:
    """A reply given as text, as a message, or as a list of one message."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    return value["content"] if isinstance(value, dict) else str(value)
