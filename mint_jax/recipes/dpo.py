"""Direct preference optimisation of many policies at once (arXiv 2305.18290); IPO and SimPO are
other losses of the same pairs. The reference of a policy is by default the adapter that it began
with.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mint_jax.data import chat
from mint_jax.envs.env import Example
from mint_jax.harness.options import DpoSettings
from mint_jax.harness.start import PolicyData
from mint_jax.models.base import Base
from mint_jax.recipes import sft
from mint_jax.train.batch import Group
from mint_jax.train.trainer import Trainer


def run(config: DpoSettings, folder: Path) -> dict[str, Any]:
    """Trains every policy of the config; returns the result."""
    return sft.run(config, folder, DPO)


def to_group(base: Base, row: dict[str, Any], where: str, append_eos: bool) -> Group:
    """Returns a pair that shares its prompt."""
    pair = chat.preference_row(base.need_tokenizer(), row, where, append_eos)
    return sft.group_of(*pair, pair_weight=1.0)


def from_env(examples: Sequence[Example]) -> list[dict[str, Any]]:
    """Returns pairs: an example's answer is chosen, the next different one is rejected."""
    rows = sft.from_env(examples)
    out = []
    for i, row in enumerate(rows):
        following = (rows[(i + k) % len(rows)]["completion"] for k in range(1, len(rows)))
        rejected = next((text for text in following if text != row["completion"]), None)
        if rejected is not None:
            out.append({"prompt": row["prompt"], "chosen": row["completion"], "rejected": rejected})
    return out


def measure(trainer: Trainer, data: dict[str, PolicyData]) -> sft.Metrics:
    """Returns the held-out reward margin, ``beta ((c - c_ref) - (j - j_ref))`` for DPO, and the
    share of pairs with a positive one.
    """
    out = {}
    for name, one in data.items():
        loss = trainer.policies[name].loss
        beta = loss.simpo_beta if loss.kind == "simpo" else loss.dpo_beta
        combine = np.sum if loss.kind == "dpo" else np.mean
        compared = (False,) if loss.kind == "simpo" else (False, True)
        policy, *reference = (
            _margins(sft.sequence_logprobs(trainer, name, one.held_out, is_reference), combine)
            for is_reference in compared
        )
        margin = beta * (policy - sum(reference))
        out[name] = {"margin": float(margin.mean()), "preferred": float((margin > 0).mean())}
    return out


def _margins(scores: list[list[np.ndarray]], combine: Callable[..., Any]) -> np.ndarray:
    return np.array([combine(c) - combine(j) for c, j in scores], np.float64)


DPO = sft.Task(to_group, from_env, chat.PREFERENCES, measure, "margin", 1)
