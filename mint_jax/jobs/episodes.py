"""Scored completions -> groups to train on: advantages within a prompt, weights over an update,
masks over turns.

An episode is one sampled continuation of a prompt. It may have several turns: the policy's tokens
are targets, what the environment wrote in between is read and has weight 0.

Axes: Q prompts, G episodes of a prompt; L layers, X experts per token (recorded routes).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from mint_jax.errors import UserError
from mint_jax.rollout.request import Completion, Request
from mint_jax.train import advantages
from mint_jax.train.batch import Group, TrainSequence

# The trainer knows the temperature and no more of how tokens were drawn: those of other
# distributions have no ratio to it.
WHOLE = (
    "top_k", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias",  # noqa: E501
    "json_schema", "regex", "choice",
)  # fmt: skip
Turns = Completion | Sequence[Completion]


@dataclasses.dataclass(frozen=True)
class Episode:
    """What a policy and its environment wrote after a prompt.

    Attributes:
        prompt: token ids.
        tokens: of all turns, the environment's in between included.
        drawn: which of ``tokens`` the policy drew.
        logprobs: under the distribution that drew them; 0 for the environment's.
        temperature: of that distribution.
        routes, prompt_routes: recorded experts as ``Completion`` has them, of ``tokens`` and of
            ``prompt``.
    """

    prompt: list[int]
    tokens: list[int]
    drawn: list[bool]
    logprobs: list[float]
    temperature: float
    routes: np.ndarray | None = None
    prompt_routes: np.ndarray | None = None


def of_completion(prompt: Sequence[int], completion: Completion, temperature: float) -> Episode:
    """An episode of one turn."""
    c, n = completion, len(completion.tokens)
    return Episode(
        list(prompt), c.tokens, [True] * n, c.drawn_logprobs, temperature, c.routes, c.prompt_routes
    )


def of_turns(turns: Turns, where: str) -> Episode:
    """An episode of completions, each of which continues the one before it.

    Raises:
        UserError: completions that name no request, were drawn greedily or from a filtered
            distribution, at different temperatures, or do not continue each other.
    """
    turns = [turns] if isinstance(turns, Completion) else turns
    if (
        not isinstance(turns, Sequence)
        or not turns
        or not all(isinstance(turn, Completion) for turn in turns)
    ):
        raise UserError(
            f"{where} is {turns!r:.80}; expected a Completion, or a list of those of its turns"
        )
    requests = [_drawn(turn, where) for turn in turns]
    if len({request.temperature for request in requests}) > 1:
        raise UserError(
            f"{where} has turns of temperatures {sorted({r.temperature for r in requests})}: draw"
            " all turns at one temperature"
        )
    episode = of_completion(requests[0].prompt, turns[0], requests[0].temperature)
    for k, (turn, request) in enumerate(zip(turns[1:], requests[1:]), 2):
        so_far = [*episode.prompt, *episode.tokens]
        if list(request.prompt[: len(so_far)]) != so_far:
            raise UserError(
                f"{where}: the prompt of turn {k} does not begin with the tokens of the turns"
                " before it: make it of token ids, [*turn.request.prompt, *turn.tokens,"
                " *base.encode(reply)]"
            )
        between = list(request.prompt[len(so_far) :])
        routes = None
        if (
            episode.routes is not None
            and turn.routes is not None
            and turn.prompt_routes is not None
        ):
            read = turn.prompt_routes[len(so_far) - 1 : len(request.prompt) - 1]
            routes = np.concatenate([episode.routes, read, turn.routes])
        episode = dataclasses.replace(
            episode,
            tokens=[*episode.tokens, *between, *turn.tokens],
            drawn=episode.drawn + [False] * len(between) + [True] * len(turn.tokens),
            logprobs=[*episode.logprobs, *(0.0 for _ in between), *turn.drawn_logprobs],
            routes=routes,
        )
    return episode


def _drawn(completion: Completion, where: str) -> Request:
    request = completion.request
    if request is None:
        raise UserError(
            f"{where} does not know its request: take completions from Model.completions or"
            " Policy.completions"
        )
    if request.temperature == 0:
        raise UserError(
            f"{where} is greedy: its tokens were not drawn and have no gradient; sample it at a"
            " temperature, 1.0 say"
        )
    for name in WHOLE:
        value = getattr(request, name)
        if value != Request.__dataclass_fields__[name].default:
            raise UserError(
                f"{where} was drawn with {name}={value!r}; completions that train are drawn from"
                f" the whole distribution: leave {name} out"
            )
    return request


def to_groups(
    episodes: Sequence[Sequence[Episode]],
    rewards_QG: Any,
    baseline: str = "group_mean",
    divide_by_std: bool | None = None,
    normalisation: str = "token",
    max_tokens: int = 1,
) -> list[Group]:
    """Groups of one update; see ``train.advantages`` for baselines and normalisations. A prompt
    whose episodes earned the same has advantage 0.

    Args:
        max_tokens: what normalisation ``constant`` divides by.
    """
    advantage = advantages.group_advantages(rewards_QG, baseline, divide_by_std)
    lengths = [sum(one.drawn) for group in episodes for one in group]
    weights = iter(advantages.token_weights(lengths, normalisation, max_tokens))
    out = []
    for group, mine in zip(episodes, advantage, strict=True):
        sequences = []
        for one, value in zip(group, mine, strict=True):
            weight = next(weights)
            of_tokens = [weight if drawn else 0.0 for drawn in one.drawn]
            sequences.append(
                TrainSequence(
                    one.tokens,
                    of_tokens,
                    [float(value)] * len(one.tokens),
                    one.logprobs,
                    routes=one.routes,
                )
            )
        out.append(
            Group(
                group[0].prompt,
                sequences,
                routes=group[0].prompt_routes,
                temperature=group[0].temperature,
            )
        )
    return out


def groups(
    completions: Sequence[Sequence[Turns]],
    rewards: Sequence[Sequence[float]],
    *,
    baseline: str = "group_mean",
    divide_by_std: bool | None = None,
    normalisation: str = "token",
    max_tokens: int | None = None,
) -> list[Group]:
    """Groups to train on, of completions and their rewards: one step of GRPO by hand.

        completions = policy.completions(prompts, n=8, temperature=1.0)
        rewards = [[score(c.text) for c in several] for several in completions]
        policy.train_step(mint.groups(completions, rewards))

    Args:
        completions: for each prompt several, as ``completions`` returns them. Instead of a
            completion there may be a list of them, the turns of one episode: the prompt of each
            begins with the tokens of those before it, and what stands in between is the
            environment's, which is read and not learned.
        rewards: a number for each, higher is better.
        baseline: what a prompt's rewards are compared with: ``group_mean`` (GRPO),
            ``leave_one_out`` (RLOO) or ``none``.
        divide_by_std: whether advantages are divided by the standard deviation of the prompt's
            rewards; by default as the baseline's paper has it.
        normalisation: ``token``, ``sequence``, ``constant`` or ``sum``: what an update's tokens are
            weighted by.
        max_tokens: what ``constant`` divides by; by default the largest ``max_tokens`` that was
            asked for.

    Raises:
        UserError: completions that cannot train, or rewards that are not one finite number for
            each.
    """
    for name, value in (("completions", completions), ("rewards", rewards)):
        if isinstance(value, str) or not isinstance(value, Sequence | np.ndarray) or not len(value):
            raise UserError(
                f"{name} is {value!r:.80}; expected a list with one list for each prompt"
            )
    if len(completions) != len(rewards):
        raise UserError(
            f"there are completions of {len(completions)} prompts and rewards of {len(rewards)}:"
            " give a list for each prompt"
        )
    episodes = []
    for q, (several, mine) in enumerate(zip(completions, rewards)):
        if not isinstance(several, Sequence) or isinstance(several, str) or not several:
            raise UserError(f"completions[{q}] is {several!r:.80}; expected a list of Completions")
        if (
            not isinstance(mine, Sequence | np.ndarray)
            or isinstance(mine, str)
            or len(mine) != len(several)
        ):
            count = len(mine) if isinstance(mine, Sequence | np.ndarray) else "no list"
            raise UserError(
                f"rewards[{q}] has {count} for {len(several)} completions: give one number for each"
            )
        episodes.append(
            [of_turns(turns, f"completions[{q}][{g}]") for g, turns in enumerate(several)]
        )
        if len({(tuple(one.prompt), one.temperature) for one in episodes[q]}) > 1:
            raise UserError(
                f"completions[{q}] are of several prompts or temperatures: compare completions of"
                " one prompt"
            )
        if len(several) != len(completions[0]):
            raise UserError(
                f"completions[{q}] has {len(several)} completions, completions[0] has"
                f" {len(completions[0])}: draw equally many"
            )
    try:
        rewards_QG = np.array([[float(r) for r in mine] for mine in rewards], np.float64)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"rewards are no numbers ({error}): give a finite number for each completion"
        ) from None
    if max_tokens is None:
        max_tokens = max(
            t.request.max_tokens  # type: ignore[arg-type]
            for some in completions
            for c in some
            for t in ([c] if isinstance(c, Completion) else c)
        )
    return to_groups(episodes, rewards_QG, baseline, divide_by_std, normalisation, max_tokens)
