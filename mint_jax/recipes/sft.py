"""Supervised fine-tuning of many policies at once: cross-entropy on the assistant's tokens."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mint_jax.data import chat
from mint_jax.envs.env import Example
from mint_jax.harness.start import PolicyData
from mint_jax.models.base import Base
from mint_jax.recipes import supervised
from mint_jax.recipes.options import SftSettings
from mint_jax.rollout.score import Scorer
from mint_jax.train.batch import Group, TrainSequence
from mint_jax.train.trainer import Trainer


def run(config: SftSettings, folder: Path) -> dict[str, Any]:
    """Trains every policy of the config; returns the result."""
    return supervised.run(config, folder, SFT)


def to_group(base: Base, row: dict[str, Any], where: str, append_eos: bool) -> Group:
    """Returns one text; the tokens before its first target are the prefix."""
    return group_of(chat.supervised_row(base.need_tokenizer(), row, where, append_eos))


def group_of(*marked: chat.Marked, pair_weight: float = 0.0) -> Group:
    """Returns texts of one prompt. The prefix ends where their tokens first differ, since a token
    may straddle prompt and reply.
    """
    most = min(m.first for m in marked)
    first = next((i for i in range(most) if len({m.tokens[i] for m in marked}) > 1), most)
    sequences = [
        TrainSequence(m.tokens[first:], [float(learn) for learn in m.learn[first:]]) for m in marked
    ]
    return Group(marked[0].tokens[:first], sequences, pair_weight)


def from_env(examples: Sequence[Example]) -> list[dict[str, Any]]:
    """Returns prompts and answers; after a text prompt come a space, the answer and a newline."""
    return [
        {
            "prompt": e.messages,
            "completion": f" {e.answer}\n" if isinstance(e.messages, str) else e.answer,
        }
        for e in examples
    ]


def sequence_logprobs(
    trainer: Trainer, name: str, groups: Sequence[Group], reference: bool = False
) -> list[list[np.ndarray]]:
    """Returns log-probabilities of the targets of each group's sequences, under the policy or its
    reference.
    """
    stacks, places = trainer.references() if reference else (trainer.stacks, trainer.slots)
    texts = [g.prefix + s.tokens for g in groups for s in g.sequences]
    scores = iter(Scorer(trainer.base).logprobs(texts, [places.get(name)] * len(texts), stacks))
    return [
        [next(scores)[len(g.prefix) - 1 :][np.flatnonzero(s.weights)] for s in g.sequences]
        for g in groups
    ]


def measure(trainer: Trainer, data: dict[str, PolicyData]) -> supervised.Metrics:
    """Returns the held-out loss: mean negative log-likelihood of a target token, in nats."""
    out = {}
    for name, one in data.items():
        scores = sequence_logprobs(trainer, name, one.held_out)
        out[name] = {"loss": float(-np.concatenate([s for group in scores for s in group]).mean())}
    return out


SFT = supervised.Task(to_group, from_env, chat.SUPERVISED, measure, "loss", higher_is_better=False)
