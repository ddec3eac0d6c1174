"""Rollouts that the catalog has stored, as examples of SFT: a student of any rank learns from the
samples of other policies over the same base, without drawing any; with ``min_reward`` from the good
ones only (rejection sampling).
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mint_jax import multihost
from mint_jax.catalog.lifecycle import Catalog
from mint_jax.catalog.packed import Schema
from mint_jax.catalog.rollouts import unpack_rollouts
from mint_jax.errors import UserError
from mint_jax.files import write_file
from mint_jax.harness.options import DataSettings, DpoSettings, SftSettings
from mint_jax.harness.start import say
from mint_jax.harness.workdir import ROLLOUTS
from mint_jax.models.base import Base
from mint_jax.train.batch import Group, TrainSequence

Sample = list[Any]  # its place for errors, prompt, tokens, their weights, reward


def read(
    config: SftSettings | DpoSettings, base: Base, folder: Path
) -> dict[str, list[tuple[str, Group]]]:
    """Returns the samples of every policy that names rollouts, each with its place for errors. The
    first start copies them into the workdir, for a catalog drops old ones while policies train.
    """
    named = {name: p.data for name, p in config.policies.items() if p.data.rollouts}
    file = folder / ROLLOUTS

    def copy() -> None:
        if file.is_file():
            return
        with Catalog.open(config.catalog, config.payloads or None) as catalog:
            samples = {name: _chosen(catalog, name, data, base) for name, data in named.items()}
        write_file(file, json.dumps(samples))

    if not named:
        return {}
    multihost.agree("stored rollouts", copy)
    return {
        name: [
            (where, Group(prompt, [TrainSequence(tokens, weights)]))
            for where, prompt, tokens, weights, _ in samples
        ]
        for name, samples in json.loads(file.read_text()).items()
    }


def _chosen(catalog: Catalog, name: str, data: DataSettings, base: Base) -> list[Sample]:
    samples = [sample for text in data.rollouts for sample in _samples(catalog, text, base)]
    least = data.min_reward
    chosen = [sample for sample in samples if least is None or sample[-1] >= least]
    if not chosen:
        raise UserError(
            f"policy {name!r}: none of {len(samples)} stored rollouts has a reward of at least"
            f" {least}, the highest is {max(sample[-1] for sample in samples)}: lower"
            " data.min_reward"
        )
    say(f"policy {name!r}: {len(chosen)} of {len(samples)} stored rollouts are its examples")
    return chosen


def _samples(catalog: Catalog, text: str, base: Base) -> Iterator[Sample]:
    """Yields the stored samples of ``NAME``, ``NAME@STEP`` or ``NAME@FIRST-LAST``, oldest first."""
    if not (parts := re.fullmatch(r"([^@]+)(?:@(\d+)(?:-(\d+))?)?", text)):
        raise UserError(
            f"data.rollouts has {text!r}; expected a policy, or its steps as NAME@8 or NAME@8-12"
        )
    policy, first, last = parts[1], int(parts[2] or 0), int(parts[3] or parts[2] or 1 << 60)
    if (own := Schema.from_json(catalog.policy(policy).schema).base) != base.fingerprint:
        raise UserError(
            f"data.rollouts: policy {policy!r} is of base {own[:12]}, this run's is"
            f" {base.fingerprint[:12]}: its token ids may mean other texts; choose the same base"
        )
    stored = reversed(catalog.rollouts(policy, 1 << 30))
    records = [record for record in stored if first <= record.step <= last]
    if not records:
        raise UserError(
            f"data.rollouts has {text!r}, of which the catalog has no rollouts: `python -m"
            " mint_jax.catalog rollouts list` shows what it has; GRPO keeps its last keep_rollouts"
            " steps"
        )
    for record in records:
        batch = unpack_rollouts(catalog.load_payload(record.digest))
        for q, prompt in enumerate(batch.prompts):
            for g, tokens in enumerate(batch.tokens[q]):
                if np.isnan(reward := batch.rewards[q, g]):  # the environment gave none
                    continue
                where = f"{policy} step {record.step}, prompt {q + 1}, sample {g + 1}"
                # tokens of an environment have no revision
                weights = [float(digest != "") for digest in batch.revisions[q][g]]
                yield [where, prompt, tokens, weights, float(reward)]
