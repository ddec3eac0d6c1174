"""Conversations in rollouts: the turns of a policy and of its environment as one completion.

The prompt of a turn is the ids that were sampled before it, never text that is encoded again, and
the tokens of the observation as the chat template continues a reply. The template's view of earlier
turns does not matter: the policy reads what it drew.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mint_jax.data import chat
from mint_jax.data.tokenizer import Tokenizer
from mint_jax.envs.env import Example, Message
from mint_jax.errors import UserError
from mint_jax.rollout.request import Completion, seed_of

REPLY = "7f3a91c05e8d4b26"  # stands for a turn of the policy; no template has it


@dataclasses.dataclass(frozen=True, repr=False)
class Continued(Completion):
    """A completion that several calls of the sampler draw.

    Attributes:
        turns: number of the turn that drew each of ``tokens``, from 1; 0 for the environment's,
            whose log-probabilities are 0.
        is_open: further turns may follow.
    """

    turns: list[int] = dataclasses.field(default_factory=list)
    is_open: bool = True


@dataclasses.dataclass(frozen=True, repr=False)
class Dialogue(Continued):
    """A conversation so far. ``finish`` is ``length`` if ``max_tokens`` cut off a turn, or a limit
    ended the conversation.

    Attributes:
        texts: the text of each of the policy's turns.
        reward: sum over the turns that the environment has answered; NaN if it failed.
        reply: tokens of the observation that the next turn reads; None before it is there.
    """

    texts: tuple[str, ...] = ()
    reward: float = 0.0
    reply: list[int] | None = None


def begun_by(turn: Completion) -> Dialogue:
    """Returns the conversation of one turn."""
    made: Any = vars(turn) | {"turns": [1] * len(turn.tokens), "texts": (turn.text or "",)}
    return Dialogue(**made)


def continued(
    dialogue: Dialogue, prompt: Sequence[int], between: Sequence[int], turn: Completion
) -> Dialogue:
    """Returns a conversation with a further turn, which read the tokens ``between``.

    Args:
        prompt: token ids of the first turn's prompt.
    """
    return dataclasses.replace(
        dialogue,
        **joined(dialogue, prompt, between, turn),
        finish="length" if "length" in (dialogue.finish, turn.finish) else turn.finish,
        text=turn.text,
        texts=(*dialogue.texts, turn.text or ""),
        reply=None,
    )


def joined(
    before: Continued, prompt: Sequence[int], between: Sequence[int], turn: Completion
) -> dict[str, Any]:
    """Returns the fields by token of a completion with a further turn; see ``continued``."""
    nothing, routes, number = [0.0] * len(between), None, max(before.turns) + 1
    old, read, new = before.routes, turn.prompt_routes, turn.routes
    if old is not None and read is not None and new is not None:
        first = len(prompt) + len(before.tokens) - 1
        routes = np.concatenate([old, read[first : first + len(between)], new])
    return {
        "tokens": [*before.tokens, *between, *turn.tokens],
        "logprobs": [*before.logprobs, *nothing, *turn.logprobs],
        "drawn_logprobs": [*before.drawn_logprobs, *nothing, *turn.drawn_logprobs],
        "turns": before.turns + [0] * len(between) + [number] * len(turn.tokens),
        "routes": routes,
    }


def answered(
    dialogue: Dialogue, answer: Sequence[Any] | None, max_turns: int, room: int
) -> Dialogue:
    """Returns a conversation after its environment's answer: a reward, NaN if the environment
    failed, and the tokens that the next turn reads, None at the end. No answer changes nothing.

    Args:
        room: number of tokens that prompt, turns and reply may have.
    """
    if answer is None:
        return dialogue
    reward, reply = answer
    made = dataclasses.replace(dialogue, reward=dialogue.reward + reward, reply=reply)
    if reply is None or math.isnan(reward):
        return dataclasses.replace(made, reply=None, is_open=False)
    if len(made.texts) == max_turns or len(made.tokens) + len(reply) > room:
        return dataclasses.replace(made, reply=None, is_open=False, finish="length")
    return made


def turn_seed(seed: int, sample: int, turns: int) -> int:
    """Returns the seed of a conversation's next turn, from the prompt's seed, the number of the
    sample and the number of turns so far.
    """
    return seed_of(seed_of(seed, sample), turns)


def turns_of(completion: Completion) -> list[int]:
    """Returns the number of the turn that drew each token; 0 for the environment's."""
    is_joined = isinstance(completion, Continued)
    return completion.turns if is_joined else [1] * len(completion.tokens)


def drawn_mask(completion: Completion) -> list[bool]:
    """Returns whether the policy drew each token."""
    return [turn > 0 for turn in turns_of(completion)]


def reply_tokens(
    tokenizer: Tokenizer,
    example: Example,
    observation: Sequence[Message] | str,
    last: int | None,
    variables: Mapping[str, Any],
) -> list[int]:
    """Returns the tokens between a turn that ended with the token ``last`` and the next one: the
    end of the reply unless ``last`` is that end, the observation, and the opening of a reply.
    Raises ``UserError``: the template refuses the messages or cannot continue a reply.
    """
    if not observation:
        return []
    if isinstance(observation, str):
        return tokenizer.encode(observation, special=False)
    ids = tokenizer.encode(_around(tokenizer, example, observation, variables)[1], special=False)
    return ids[1:] if last in tokenizer.eos_ids and ids[:1] == [last] else ids


def _around(
    tokenizer: Tokenizer,
    example: Example,
    observation: Sequence[Message],
    variables: Mapping[str, Any],
) -> list[str]:
    """Returns the texts that the template writes before and after a reply."""
    asked = chat.messages_of(example.messages, "prompt of an example")
    turns = [{"role": "assistant", "content": REPLY}, *chat.messages_of(observation, "observation")]
    parts = tokenizer.render([*asked, *turns], **variables).split(REPLY)
    if len(parts) != 2:
        raise UserError(
            f"the chat template writes a reply {len(parts) - 1} times; expected once, so that a"
            " conversation can go on behind sampled tokens: choose another base, or prompts of text"
        )
    return parts


def check_continues(tokenizer: Tokenizer, example: Example, variables: Mapping[str, Any]) -> None:
    """Raises ``UserError`` if text behind a reply is not encoded alone as in a whole conversation,
    so that sampled tokens cannot be continued.
    """
    if isinstance(example.messages, str):
        before, after = f"{example.messages} yes", "\nno"
    else:
        observation = [{"role": "user", "content": "no"}]
        before, after = _around(tokenizer, example, observation, variables)
        before += "yes"
    alone = tokenizer.encode(after, special=False)
    if tokenizer.encode(before + after, special=False)[-len(alone) :] != alone:
        raise UserError(
            f"the tokenizer encodes {after[:60]!r} behind a reply not as it does alone, so that a"
            " conversation cannot go on behind sampled tokens: choose another base"
        )
