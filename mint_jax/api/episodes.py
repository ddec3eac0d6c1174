"""``mint.groups``: completions and rewards of Python callers as groups to train on."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from mint_jax.errors import UserError
from mint_jax.recipes import dialogues
from mint_jax.recipes.rollouts import Episode, of_completion, to_groups
from mint_jax.rollout.request import Completion, Request
from mint_jax.train.advantages import group_advantages
from mint_jax.train.batch import Group

# The trainer knows the temperature of a sample and no filter: tokens that were drawn with these
# have no probability ratio to it.
FILTERS = (
    *("top_k", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"),
    *("logit_bias", "json_schema", "regex", "choice"),
)
Turns = Completion | Sequence[Completion]


def of_turns(turns: Turns, where: str) -> Episode:
    """Returns an episode of completions, each of which continues the one before it."""
    turns = [turns] if isinstance(turns, Completion) else turns
    if not all(isinstance(turn, Completion) for turn in _list(turns, where)):
        raise UserError(
            f"{where} is {turns!r:.80}; expected a Completion, or a list of those of its turns"
        )
    requests = [_drawn(turn, where) for turn in turns]
    if len({request.temperature for request in requests}) > 1:
        raise UserError(
            f"{where} has turns of temperatures {sorted({r.temperature for r in requests})}: draw"
            " all turns at one temperature"
        )
    prompt, dialogue = requests[0].prompt, dialogues.begun_by(turns[0])
    for k, (turn, request) in enumerate(zip(turns[1:], requests[1:]), 2):
        so_far = [*prompt, *dialogue.tokens]
        if list(request.prompt[: len(so_far)]) != so_far:
            raise UserError(
                f"{where}: the prompt of turn {k} does not begin with the tokens of the turns"
                " before it: make it of token ids, [*turn.request.prompt, *turn.tokens,"
                " *base.encode(reply)]"
            )
        dialogue = dialogues.continued(dialogue, prompt, request.prompt[len(so_far) :], turn)
    return of_completion(prompt, dialogue, requests[0].temperature)


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
    for name in FILTERS:
        value = getattr(request, name)
        if value != Request.__dataclass_fields__[name].default:
            raise UserError(
                f"{where} was drawn with {name}={value!r}; completions that train are drawn from"
                f" the whole distribution: leave {name} out"
            )
    return request


def _list(value: Any, where: str) -> Any:
    """Returns a list that is not empty; refuses anything else."""
    if isinstance(value, str) or not isinstance(value, Sequence | np.ndarray) or not len(value):
        raise UserError(f"{where} is {value!r:.80}; expected a list, one item for each")
    return value


def groups(
    completions: Sequence[Sequence[Turns]],
    rewards: Sequence[Sequence[float]],
    *,
    baseline: str = "group_mean",
    divide_by_std: bool | None = None,
    normalisation: str = "token",
    max_tokens: int | None = None,
) -> list[Group]:
    """Returns groups to train on from completions and their rewards: one step of GRPO by hand.

        completions = policy.completions(prompts, n=8, temperature=1.0)
        rewards = [[score(c.text) for c in several] for several in completions]
        policy.train_step(mint.groups(completions, rewards))

    Args:
        completions: several for each prompt, as ``completions`` returns them. A list in place of
            a completion has the turns of one episode: each turn's prompt starts with the tokens of
            the turns before it, and the tokens in between are the environment's, which are read
            and not trained on.
        rewards: a number for each, higher is better.
        baseline: subtracted from a prompt's rewards: ``group_mean`` (GRPO), ``leave_one_out``
            (RLOO) or ``none``.
        divide_by_std: divides advantages by the standard deviation of the prompt's rewards; None
            follows the baseline's paper.
        normalisation: weights of an update's tokens: ``token``, ``sequence``, ``constant`` or
            ``sum``.
        max_tokens: divisor of ``constant``; None takes the largest ``max_tokens`` of a request.

    Raises:
        UserError: completions that cannot train, or a reward that is missing or not finite.
    """
    if not len(_list(completions, "completions")) == len(_list(rewards, "rewards")):
        raise UserError(
            f"there are completions of {len(completions)} prompts and rewards of {len(rewards)}:"
            " give a list for each prompt"
        )
    episodes = []
    for q, (several, earned) in enumerate(zip(completions, rewards)):
        where = f"completions[{q}]"
        _list(several, where)
        if len(_list(earned, f"rewards[{q}]")) != len(several):
            raise UserError(
                f"rewards[{q}] has {len(earned)} for {len(several)} completions: give one number"
                " for each"
            )
        episodes.append([of_turns(turns, f"{where}[{g}]") for g, turns in enumerate(several)])
        if len({(tuple(one.prompt), one.temperature) for one in episodes[q]}) > 1:
            raise UserError(
                f"{where} are of several prompts or temperatures: compare completions of one prompt"
            )
        if len(several) != len(completions[0]):
            raise UserError(
                f"{where} has {len(several)} completions, completions[0] has"
                f" {len(completions[0])}: draw equally many"
            )
    try:
        rewards_QG = np.array([[float(r) for r in earned] for earned in rewards], np.float64)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"rewards are no numbers ({error}): give a finite number for each completion"
        ) from None
    if max_tokens is None:
        drawn = (one for several in completions for one in several)
        turns = (t for one in drawn for t in ([one] if isinstance(one, Completion) else one))
        max_tokens = max(turn.request.max_tokens for turn in turns if turn.request)
    advantages_QG = group_advantages(rewards_QG, baseline, divide_by_std)
    return to_groups(episodes, advantages_QG, normalisation, max_tokens)
