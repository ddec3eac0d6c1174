"""Partial rollouts: completions that are drawn in parts, with updates in between. The next part of
all of a policy's unfinished completions is drawn in one engine call with the next step's prompts.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mint_jax.recipes.dialogues import Continued, joined, turn_seed
from mint_jax.rollout.detokenize import Stops, context_of, text_behind
from mint_jax.rollout.request import Completion

Decode = Callable[[list[int]], str]


def begun_by(part: Completion, most: int) -> Completion:
    """Returns the completion that begins with a part, of at most ``most`` tokens in all."""
    if part.finish != "length" or len(part.tokens) == most:
        return part
    made: Any = vars(part) | {"turns": [1] * len(part.tokens)}
    return Continued(**made)


def open_ones(completions: Sequence[Sequence[Completion]]) -> list[tuple[int, int, Continued]]:
    """Returns unfinished completions with the numbers of their prompt and sample."""
    rows = [(q, g, c) for q, group in enumerate(completions) for g, c in enumerate(group)]
    return [(q, g, c) for q, g, c in rows if isinstance(c, Continued) and c.is_open]


def rows_of(name: str, member: Any, rollout: Any) -> list[tuple[Any, ...]]:
    """Returns what ``PolicySampler.sample`` draws next of a policy's unfinished completions."""
    return [
        (
            *(name, [*rollout.prompts[q], *c.tokens], 1),
            turn_seed(rollout.seeds[q], g, c.turns[-1]),
            min(member.part, member.sampling.max_tokens - len(c.tokens)),
        )
        for q, g, c in open_ones(rollout.completions)
    ]


def grown(member: Any, rollout: Any, drawn: Iterator[list[Completion]], decode: Decode) -> Any:
    """Returns a rollout whose unfinished completions go on with what was drawn for ``rows_of``."""
    groups = [[*group] for group in rollout.completions]
    how = member.sampling.max_tokens, member.sampling.stop, decode
    for q, g, c in open_ones(groups):
        [part] = next(drawn)
        groups[q][g] = continued(c, rollout.prompts[q], part, *how)
    return dataclasses.replace(rollout, completions=groups)


def continued(
    before: Continued,
    prompt: Sequence[int],
    part: Completion,
    most: int,
    stop: Sequence[str],
    decode: Decode,
) -> Continued:
    """Returns a completion with a further part; a stop string may begin in an earlier one."""
    fields, finish = joined(before, prompt, [], part), part.finish
    tokens = fields["tokens"]
    count, text = Stops(decode, stop, prompt).look(tokens)
    if count is None:
        text = text_behind(decode, context_of(decode, prompt), tokens)
    else:
        finish, fields = "stop", {n: x if x is None else x[:count] for n, x in fields.items()}
    is_open = finish == "length" and len(tokens) < most
    return dataclasses.replace(before, **fields, finish=finish, text=text, is_open=is_open)
