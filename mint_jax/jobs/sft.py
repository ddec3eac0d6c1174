"""Supervised fine-tuning of many policies at once: cross-entropy on the assistant's tokens."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mint_jax.data import chat
from mint_jax.envs.env import Example
from mint_jax.jobs import supervised
from mint_jax.jobs.common import Config, PolicyData
from mint_jax.models.base import Base
from mint_jax.rollout.score import Scorer
from mint_jax.train.batch import Group, TrainSequence
from mint_jax.train.trainer import Trainer

KIND = "cross_entropy"


def to_group(base: Base, row: dict[str, Any], where: str, append_eos: bool) -> Group:
    """One text: everything before its first target is the prefix."""
    marked = chat.supervised_row(base.need_tokenizer(), row, where, append_eos)
    return group_of(marked)


def group_of(*marked: chat.Marked, pair_weight: float = 0.0) -> Group:
    """Texts of one prompt; its tokens may differ at the end, where one straddles the prompt and a
    reply.
    """
    most = min(m.first for m in marked)
    first = next((i for i in range(most) if len({m.tokens[i] for m in marked}) > 1), most)
    sequences = [
        TrainSequence(m.tokens[first:], [float(learn) for learn in m.learn[first:]]) for m in marked
    ]
    return Group(marked[0].tokens[:first], sequences, pair_weight)


def from_env(examples: Sequence[Example]) -> list[dict[str, Any]]:
    """Prompts and answers of an environment; text prompts are continued by the answer and a line
    end.
    """
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
    """Logprobs of the targets of each group's sequences, under the policy or its reference."""
    stacks, places = trainer.references() if reference else (trainer.stacks, trainer.slots)
    texts = [g.prefix + s.tokens for g in groups for s in g.sequences]
    scores = iter(Scorer(trainer.base).logprobs(texts, [places.get(name)] * len(texts), stacks))
    return [
        [next(scores)[len(g.prefix) - 1 :][np.flatnonzero(s.weights)] for s in g.sequences]
        for g in groups
    ]


def measure(trainer: Trainer, data: dict[str, PolicyData]) -> dict[str, dict[str, float]]:
    """Held-out loss: mean negative log-likelihood of a target token, in nats."""
    out = {}
    for name, one in data.items():
        scores = sequence_logprobs(trainer, name, one.held_out)
        out[name] = {"loss": float(-np.concatenate([s for group in scores for s in group]).mean())}
    return out


SFT = supervised.Kind(to_group, from_env, chat.SUPERVISED, measure, "loss", higher=False)


def run(config: Config, workdir: Path) -> dict[str, Any]:
    """Trains every policy of the config; returns the result it prints."""
    return supervised.run(config, workdir, SFT)
