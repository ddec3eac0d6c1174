"""Scored completions as groups to train on: advantages within a prompt, weights over an update,
masks over turns.

An episode is one sampled continuation of a prompt, of one turn or several: the policy's tokens are
targets, the environment's tokens in between have weight 0.

Axes: Q prompts, G episodes of a prompt.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from mint_jax.rollout.request import Completion
from mint_jax.train import advantages
from mint_jax.train.batch import Group, TrainSequence


@dataclasses.dataclass(frozen=True)
class Episode:
    """Tokens that a policy and its environment wrote after a prompt.

    Attributes:
        prompt: token ids.
        tokens: of all turns, with the environment's in between.
        drawn: whether the policy drew each of ``tokens``.
        logprobs: under the sampled distribution; 0 for the environment's tokens.
        temperature: of that distribution.
        routes, prompt_routes: recorded experts of ``tokens`` and of ``prompt``; see ``Completion``.
    """

    prompt: list[int]
    tokens: list[int]
    drawn: list[bool]
    logprobs: list[float]
    temperature: float
    routes: np.ndarray | None = None
    prompt_routes: np.ndarray | None = None


def of_completion(prompt: Sequence[int], completion: Completion, temperature: float) -> Episode:
    """Returns an episode of one turn."""
    c, drawn = completion, [True] * len(completion.tokens)
    routes = c.routes, c.prompt_routes
    return Episode(list(prompt), c.tokens, drawn, c.drawn_logprobs, temperature, *routes)


def to_groups(
    episodes: Sequence[Sequence[Episode]],
    rewards_QG: Any,
    baseline: str = "group_mean",
    divide_by_std: bool | None = None,
    normalisation: str = "token",
    max_tokens: int = 1,
) -> list[Group]:
    """Returns the groups of one update; ``train.advantages`` has baselines and normalisations. A
    prompt whose episodes have equal rewards has advantage 0.

    Args:
        max_tokens: divisor of normalisation ``constant``.
    """
    advantages_QG = advantages.group_advantages(rewards_QG, baseline, divide_by_std)
    lengths = [sum(one.drawn) for group in episodes for one in group]
    weights = iter(advantages.token_weights(lengths, normalisation, max_tokens))
    out = []
    for group, values in zip(episodes, advantages_QG, strict=True):
        sequences = []
        for one, value in zip(group, values, strict=True):
            weight = next(weights)
            by_token = [weight if drawn else 0.0 for drawn in one.drawn]
            advantage = [float(value)] * len(one.tokens)
            sequence = one.tokens, by_token, advantage, one.logprobs
            sequences.append(TrainSequence(*sequence, routes=one.routes))
        first = group[0]
        shared: Any = {"routes": first.prompt_routes, "temperature": first.temperature}
        out.append(Group(first.prompt, sequences, **shared))
    return out
