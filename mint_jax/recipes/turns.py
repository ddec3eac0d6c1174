"""Rewards of rollouts, and turns of conversations: answers of the environments, in worker threads,
and the next turn of all open conversations in one engine call. Other policies use the devices in
between.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from mint_jax import multihost
from mint_jax.envs import scoring
from mint_jax.envs.env import Example
from mint_jax.models.base import Base
from mint_jax.recipes import dialogues
from mint_jax.recipes.dialogues import Dialogue
from mint_jax.recipes.rollouts import Player, Rollout
from mint_jax.rollout.request import Completion


class TurnSampler(Protocol):
    """Policies that play, and how they are sampled; see ``rollouts.PolicySampler``."""

    base: Base
    tokens: int
    fixed: dict[str, Any]

    @property
    def members(self) -> Mapping[str, Player]: ...
    def sample(
        self, rows: Sequence[tuple[str, list[int], int, int]], is_fixed: bool
    ) -> dict[str, list[list[Completion]]]: ...


def reward(sampler: TurnSampler, name: str, rollout: Rollout) -> tuple[Rollout, np.ndarray]:
    """Returns rewards ``[Q, G]`` of a rollout, in a worker thread; only the first process computes
    them, and ``shared`` sends them to the others.
    """
    if not multihost.is_main():
        return rollout, np.zeros((0, 0))
    if sampler.members[name].converses:
        return answer(sampler, name, rollout)
    if rollout.is_open:
        return rollout, np.zeros((0, 0))
    env, known = sampler.members[name].env, len(rollout.rewards)
    pairs = zip(rollout.examples[known:], rollout.completions[known:])
    rows = scoring.each(
        lambda row: scoring.score(name, env, row[1].text or "", row[0]),
        [[(example, c) for c in group] for example, group in pairs],
        env,
    )
    return rollout, np.array(rollout.rewards + rows, np.float64)


def shared(scored: Mapping[str, tuple[Rollout, np.ndarray]]) -> dict[str, list[list[float]]]:
    """Returns the rewards, which the first process has, by policy. Raises ``UserError``: all of a
    policy's rewards were given up.
    """

    def rewards() -> dict[str, Any]:
        for name, (_, rewards_QG) in scored.items():
            scoring.check_any(name, rewards_QG)
        return {name: rewards_QG.tolist() for name, (_, rewards_QG) in scored.items()}

    return multihost.agree("rewards", rewards)


def played(
    sampler: TurnSampler, rollouts: Mapping[str, Rollout], watch: scoring.Watch
) -> dict[str, tuple[Rollout, list[list[float]]]]:
    """Plays conversations to their end; returns all rollouts with their rewards."""

    def scored_of(rollouts: Mapping[str, Rollout]) -> dict[str, tuple[Rollout, np.ndarray]]:
        found = {name: (rollout, np.zeros((0, 0))) for name, rollout in rollouts.items()}

        def judge() -> None:
            found.update({name: reward(sampler, name, r) for name, r in rollouts.items()})

        multihost.agree("held-out rewards", lambda: watch.over(judge))
        return found

    scored = scored_of(rollouts)
    while drawn := next_turns(sampler, scored):
        scored |= scored_of(drawn)
    return {name: (scored[name][0], rewards) for name, rewards in shared(scored).items()}


def answer(sampler: TurnSampler, name: str, rollout: Rollout) -> tuple[Rollout, np.ndarray]:
    """Returns the rewards ``[Q, G]`` of conversations so far, and the rollout with its
    environment's answers to those that are open; in a worker thread of the first process.
    """
    member, tokenizer = sampler.members[name], sampler.base.need_tokenizer()
    known = rollout.replies  # of conversations that waited for an update

    def of(row: tuple[Example, Dialogue]) -> list[Any] | None:
        example, d = row
        if not d.is_open:
            return None
        found = scoring.step(name, member.env, d.texts, example)
        how = d.tokens[-1] if d.tokens else None, member.variables
        reads = example, found.observation, *how
        return [found.reward, None if found.done else dialogues.reply_tokens(tokenizer, *reads)]

    pairs = list(zip(rollout.examples, rollout.conversations, strict=True))
    rows = [[(example, d) for d in group] for example, group in pairs]
    replies = known or scoring.each(of, rows, member.env)
    rewards = [
        [d.reward + (reply[0] if reply else 0.0) for d, reply in zip(group, answers)]
        for (_, group), answers in zip(pairs, replies)
    ]
    return dataclasses.replace(rollout, replies=replies), np.array(rewards, np.float64)


def next_turns(
    sampler: TurnSampler, scored: Mapping[str, tuple[Rollout, np.ndarray]]
) -> dict[str, Rollout]:
    """Samples the next turn of all conversations that their environments have answered.
    Returns the rollouts of these policies, or none if no conversation was open.
    """
    rollouts = {name: rollout for name, (rollout, _) in scored.items() if rollout.is_open}
    if not rollouts:
        return {}
    found = multihost.agree("answers", lambda: {n: r.replies for n, r in rollouts.items()})
    for name, rollout in rollouts.items():
        sampling, groups = sampler.members[name].sampling, []
        room = sampler.base.cfg.context - sampling.max_tokens
        rows = zip(rollout.prompts, rollout.conversations, found[name], strict=True)
        for prompt, group, replies in rows:
            limits = sampling.max_turns, room - len(prompt)
            groups.append([dialogues.answered(d, r, *limits) for d, r in zip(group, replies)])
        rollouts[name] = dataclasses.replace(rollout, completions=groups, replies=[])
    return _drawn(sampler, rollouts)


def _drawn(sampler: TurnSampler, rollouts: dict[str, Rollout]) -> dict[str, Rollout]:
    """Samples the next turn of open conversations, as ``rollout`` does the first."""
    groups = {name: [[*group] for group in r.completions] for name, r in rollouts.items()}
    for is_fixed in (False, True):
        places = [
            (name, q, g, d)
            for name, rollout in rollouts.items()
            if (name in sampler.fixed) == is_fixed
            for q, group in enumerate(rollout.conversations)
            for g, d in enumerate(group)
            if d.is_open
        ]
        rows = []
        for name, q, g, d in places:
            prompt = [*rollouts[name].prompts[q], *d.tokens, *(d.reply or ())]
            seed = dialogues.turn_seed(rollouts[name].seeds[q], g, len(d.texts))
            rows.append((name, prompt, 1, seed))
        drawn = sampler.sample(rows, is_fixed) if rows else {}
        turns = {name: iter(found) for name, found in drawn.items()}
        for name, q, g, d in places:
            [turn] = next(turns[name])
            sampler.tokens += len(turn.tokens)
            read = rollouts[name].prompts[q], d.reply or ()
            groups[name][q][g] = dialogues.continued(d, *read, turn)
    return {name: dataclasses.replace(r, completions=groups[name]) for name, r in rollouts.items()}
