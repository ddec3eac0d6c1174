"""Direct preference optimisation of many policies at once (arXiv 2305.18290); the reference is by
default where each began.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mint_jax.data import chat
from mint_jax.envs.env import Example
from mint_jax.jobs import supervised
from mint_jax.jobs.common import Config, PolicyData
from mint_jax.jobs.sft import from_env as answers_of
from mint_jax.jobs.sft import group_of, sequence_logprobs
from mint_jax.models.base import Base
from mint_jax.train.batch import Group
from mint_jax.train.trainer import Trainer

KIND = "dpo"


def to_group(base: Base, row: dict[str, Any], where: str, append_eos: bool) -> Group:
    """A pair that shares its prompt."""
    return group_of(
        *chat.preference_row(base.need_tokenizer(), row, where, append_eos), pair_weight=1.0
    )


def from_env(examples: Sequence[Example]) -> list[dict[str, Any]]:
    """The answer of an example is chosen, that of the next example with another answer rejected."""
    rows = answers_of(examples)
    out = []
    for i, row in enumerate(rows):
        others = (rows[(i + k) % len(rows)]["completion"] for k in range(1, len(rows)))
        rejected = next((o for o in others if o != row["completion"]), None)
        if rejected is not None:
            out.append({"prompt": row["prompt"], "chosen": row["completion"], "rejected": rejected})
    return out


def measure(trainer: Trainer, data: dict[str, PolicyData]) -> dict[str, dict[str, float]]:
    """Held-out reward margin ``beta ((c - c_ref) - (j - j_ref))`` and the share of pairs with a
    positive one.
    """
    out = {}
    for name, one in data.items():
        beta = trainer.policies[name].loss.dpo_beta
        reference = _margins(sequence_logprobs(trainer, name, one.held_out, reference=True))
        policy = _margins(sequence_logprobs(trainer, name, one.held_out))
        margin = beta * (policy - reference)
        out[name] = {"margin": float(margin.mean()), "preferred": float((margin > 0).mean())}
    return out


def _margins(scores: list[list[np.ndarray]]) -> np.ndarray:
    return np.array([chosen.sum() - rejected.sum() for chosen, rejected in scores], np.float64)


DPO = supervised.Kind(to_group, from_env, chat.PREFERENCES, measure, "margin", higher=True)


def run(config: Config, workdir: Path) -> dict[str, Any]:
    """Trains every policy of the config; returns the result it prints."""
    return supervised.run(config, workdir, DPO)
