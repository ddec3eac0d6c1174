"""Log-probabilities of given tokens: JSONL in, JSONL out, base and adapters mixed.

A line is ``{"tokens": [...]}`` or ``{"text": "..."}``, with an optional ``id`` and ``adapter`` (a
PEFT directory, or a revision of ``config.catalog``). A result is ``{"id", "tokens", "logprobs"}``
with ``logprobs[i] = log p(tokens[i] | tokens[:i])`` and ``logprobs[0] = null``, in the order of the
input. More adapters than ``config.slots`` take turns. The same command continues an interrupted
run; see ``harness.batch``.
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mint_jax.harness import batch
from mint_jax.models.base import Base
from mint_jax.recipes.options import ScoreSettings
from mint_jax.rollout.score import Scorer


def run(config: ScoreSettings, folder: Path) -> dict[str, Any]:
    """Scores ``config.input`` into ``config.output``; returns the result."""
    how = functools.partial(LineScorer, max_tokens=config.max_tokens)
    common, rows, scored, seconds = batch.run(config, folder, how, {})
    return {
        "job": "score",
        "sequences": len(rows),
        "tokens": sum(len(row["tokens"]) for row in rows),
        "tokens_per_s": round(sum(len(values) + 1 for values in scored) / seconds, 1),
        **common,
    }


class LineScorer:
    """Scores token ids by teacher forcing."""

    keys = ("id", "adapter", "tokens", "text")
    unit = "sequences"

    def __init__(self, base: Base, max_tokens: int):
        self.base, self.scorer = base, Scorer(base, max_tokens)

    def prepare(self, row: batch.Row, where: str) -> list[int]:
        tokens = batch.tokens_of(self.base, row, where)
        self.scorer.check(tokens, where)
        return tokens

    def compute(
        self, inputs: Sequence[list[int]], placed: batch.Placed, done: batch.Finished
    ) -> list[np.ndarray]:
        return self.scorer.logprobs(inputs, placed.slots, placed.stacks, done)

    def to_row(self, made: list[int], result: np.ndarray, digest: str | None) -> batch.Row:
        return {"tokens": made, "logprobs": [None, *map(float, result)]}
