"""Log-probabilities of given tokens: JSONL in, JSONL out, base and adapters mixed.

A line is ``{"tokens": [...]}`` or ``{"text": "..."}``, with an optional ``id`` and ``adapter`` (a
PEFT directory, or a revision of ``config.catalog``). A result is ``{"id", "tokens", "logprobs"}``
with ``logprobs[i] = log p(tokens[i] | tokens[:i])`` and ``logprobs[0] = null``, in the order of the
input. See ``harness.batch``.
"""

import functools
from pathlib import Path
from typing import Any

import numpy as np

from mint_jax.harness import batch
from mint_jax.harness.options import ScoreSettings
from mint_jax.models.base import Base
from mint_jax.rollout.score import Scorer


def run(config: ScoreSettings, folder: Path) -> dict[str, Any]:
    """Scores ``config.input`` into ``config.output``; returns the result."""
    how = functools.partial(scorer, max_tokens=config.max_tokens)
    common, rows, scored, seconds = batch.run(config, folder, how, {})
    return {
        "job": "score",
        "sequences": len(rows),
        "tokens": sum(len(row["tokens"]) for row in rows),
        "tokens_per_s": round(sum(len(values) + 1 for values in scored) / seconds, 1),
        **common,
    }


def scorer(base: Base, max_tokens: int) -> batch.Program:
    """Returns a program that scores token ids by teacher forcing."""
    teacher = Scorer(base, max_tokens)

    def prepare(row: batch.Row, where: str) -> list[int]:
        tokens = batch.tokens_of(base, row, where)
        teacher.check(tokens, where)
        return tokens

    def compute(inputs, slots, digests, stacks, done) -> list[np.ndarray]:
        return teacher.logprobs(inputs, slots, stacks, done)

    def to_row(tokens: list[int], result: np.ndarray, digest: str | None) -> batch.Row:
        return {"tokens": tokens, "logprobs": [None, *map(float, result)]}

    keys = ("id", "adapter", "tokens", "text")
    return batch.Program("sequences", keys, prepare, compute, to_row)
