"""Turns of conversations in rollouts: answers of the environments, in worker threads, and the next
turn of all open conversations in one engine call. Other policies use the devices in between.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from mint_jax import multihost
from mint_jax.envs import scoring
from mint_jax.envs.env import Example
from mint_jax.recipes import dialogues
from mint_jax.recipes.dialogues import Dialogue
from mint_jax.recipes.rollouts import PolicySampler, Rollout


def answer(sampler: PolicySampler, name: str, rollout: Rollout) -> tuple[Rollout, np.ndarray]:
    """Returns the rewards ``[Q, G]`` of conversations so far, and the rollout with its
    environment's answers to those that are open; in a worker thread of the first process.
    """
    member, tokenizer = sampler.members[name], sampler.base.need_tokenizer()

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
    replies = scoring.each(of, rows, member.env)
    rewards = [
        [d.reward + (reply[0] if reply else 0.0) for d, reply in zip(group, answers)]
        for (_, group), answers in zip(pairs, replies)
    ]
    return dataclasses.replace(rollout, replies=replies), np.array(rewards, np.float64)


def next_turns(
    sampler: PolicySampler, scored: Mapping[str, tuple[Rollout, np.ndarray]]
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


def _drawn(sampler: PolicySampler, rollouts: dict[str, Rollout]) -> dict[str, Rollout]:
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
        turns = {name: iter(found) for name, found in sampler.sample(rows, is_fixed).items()}
        for name, q, g, d in places:
            [turn] = next(turns[name])
            sampler.tokens += len(turn.tokens)
            read = rollouts[name].prompts[q], d.reply or ()
            groups[name][q][g] = dialogues.continued(d, *read, turn)
    return {name: dataclasses.replace(r, completions=groups[name]) for name, r in rollouts.items()}
