"""Rollouts of GRPO with ``max_staleness``. Those that wait for their update are JSON of every
checkpoint: they were drawn from older weights, so that a resumed run could not draw them again.
"""

import base64
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mint_jax.harness.recorder import Snapshot
from mint_jax.harness.training import TrainingRun
from mint_jax.recipes.dialogues import Continued, Dialogue
from mint_jax.recipes.rollouts import PolicySampler, Rollout
from mint_jax.rollout.request import Completion
from mint_jax.train.phases import Unit

LISTS = {
    "tokens": np.int32,
    "logprobs": np.float32,
    "drawn_logprobs": np.float32,
    "turns": np.int32,  # of a conversation, or of parts
}
ROUTES = "routes", "prompt_routes"
FIELDS = "finish", "text", "revision", "texts", "reward", "is_open"


class InFlight:
    """Rollouts in flight of a run's units; resumes those of its checkpoint by submitting their
    rewards. Without ``max_staleness`` it does nothing.
    """

    def __init__(self, run: TrainingRun, job: Any, units: Sequence[Unit]):
        self.run, self.units, self.is_used = run, units, job.config.max_staleness > 0
        for unit in units:
            saved = {name: run.resumed_work.get(name, {}) for name in unit.names}
            for step in map(int, saved[unit.names[0]]):
                unit.step = step
                made = {n: from_json(saved[n][str(step)], job, n, step) for n in unit.names}
                unit.score(job.reward, made)
        if self.is_used:
            run.in_flight = self.state

    def state(self) -> dict[str, Any]:
        """Returns the rollouts whose updates are not done, by policy and step."""
        return {
            name: {
                str(step): to_json(rollouts[name])
                for step, rollouts in unit.in_flight().items()
                if step >= self.run.step[name]
            }
            for unit in self.units
            for name in unit.names
        }

    def measure(self, scored: Mapping[str, Any], step: int, rows: dict[str, dict]) -> None:
        """Adds metrics of the updates between drawing and training, mean and maximum over prompts
        and their turns; rollouts of fixed revisions have none.
        """
        for name, (rollout, _) in scored.items() if self.is_used else ():
            drawers = [drawer for by in rollout.drawn_by for drawer in by]
            late = [step - d.step for d in drawers if isinstance(d, Snapshot)]
            if late:
                rows[name] |= {"staleness": float(np.mean(late)), "stalest": max(late)}


def to_json(rollout: Rollout) -> dict[str, Any]:
    def row(c: Completion) -> dict[str, Any]:
        own = vars(c)  # of a conversation more than of a completion
        arrays = {
            name: np.asarray(own[name], dtype) for name, dtype in LISTS.items() if name in own
        }
        arrays |= {n: x for n in ROUTES if (x := own[n]) is not None}
        packed = {name: _pack(x) for name, x in arrays.items()}
        return packed | {name: own[name] for name in FIELDS if name in own}

    return {
        "completions": [[row(c) for c in group] for group in rollout.completions],
        "drawn_by": [
            [d if isinstance(d, str) else [d.digest, d.step] for d in by] for by in rollout.drawn_by
        ],
        "rewards": rollout.rewards,
    }


def from_json(saved: Mapping[str, Any], sampler: PolicySampler, name: str, step: int) -> Rollout:
    def completion(row: Mapping[str, Any]) -> Completion:
        fields: dict[str, Any] = {n: row[n] for n in FIELDS if n in row}
        fields |= {n: _unpack(row[n]).tolist() for n in LISTS if n in row}
        fields |= {n: _unpack(row[n]) for n in ROUTES if n in row}
        if "turns" not in row:
            return Completion(**fields)
        if "texts" not in row:
            return Continued(**fields)
        fields["texts"] = tuple(row["texts"])
        return Dialogue(**fields)

    made = [[completion(row) for row in group] for group in saved["completions"]]
    drawn_by = [
        [d if isinstance(d, str) else Snapshot.known(*d) for d in by] for by in saved["drawn_by"]
    ]
    rollout = sampler.restored(name, step, made, drawn_by)
    return dataclasses.replace(rollout, rewards=saved["rewards"])


def _pack(x: np.ndarray) -> list[Any]:
    return [x.dtype.str, x.shape, base64.b64encode(x.tobytes()).decode()]


def _unpack(packed: list[Any]) -> np.ndarray:
    dtype, shape, text = packed
    return np.frombuffer(base64.b64decode(text), dtype).reshape(shape)
