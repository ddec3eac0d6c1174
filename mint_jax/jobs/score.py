"""Log-probabilities of given tokens: JSONL in, JSONL out, base and adapters mixed.

A line is ``{"tokens": [...]}`` or ``{"text": "..."}``, with an optional ``id`` and ``adapter`` (a PEFT directory, or a
revision of ``config.catalog``). A result is ``{"id", "tokens", "logprobs"}`` with ``logprobs[i] = log p(tokens[i] | tokens[:i])`` and
``logprobs[0] = null``, in the order of the input. More adapters than ``config.slots`` take turns.
"""

import time
from pathlib import Path
from typing import Any

import numpy as np

from mint_jax import multihost
from mint_jax.data.sources import read_rows, write_rows
from mint_jax.errors import UserError
from mint_jax.jobs import catalogs, common
from mint_jax.jobs.common import Config
from mint_jax.jobs.rotation import Rotation, Turn
from mint_jax.metrics import Progress
from mint_jax.models.base import Base
from mint_jax.rollout.score import Scorer


def tokens_of(base: Base, row: dict[str, Any], where: str) -> list[int]:
    """The token ids of a line that gives ``tokens`` or ``text``."""
    if "tokens" in row:
        tokens = row["tokens"]
        if not isinstance(tokens, list) or not all(isinstance(t, int) and not isinstance(t, bool) for t in tokens):
            raise UserError(f"{where}: tokens is {str(tokens)[:80]}; expected a list of token ids")
        return tokens
    if "text" in row:
        return base.need_tokenizer().encode(row["text"])
    raise UserError(f"{where} has {', '.join(row) or 'nothing'}; expected tokens or text")


def run(config: Config, workdir: Path) -> dict[str, Any]:
    """Scores ``config.input`` into ``config.output``; returns the result it prints."""
    common.save_config(config, workdir)
    source, output = common.paths(config)
    rows = read_rows(source)
    base = common.open_base(config)
    sequences = [tokens_of(base, row, f"{source} line {n + 1}") for n, row in enumerate(rows)]
    names = [row.get("adapter") or None for row in rows]
    scorer = Scorer(base, config.get("max_tokens", 4096))
    for n, tokens in enumerate(sequences):
        scorer.check(n, tokens)
    progress = Progress("score", len(rows))

    def scored(turn: Turn) -> list[np.ndarray]:
        slots = [turn.slot(names[i]) for i in turn.rows]
        asked = [sequences[i] for i in turn.rows]
        return scorer.logprobs(asked, slots, turn.stacks, lambda done, _: progress.update(turn.before + done, "sequences"))

    with catalogs.reading(config) as catalog, Rotation(base, names, catalog, config.get("slots", 64)) as rotation:
        began = time.monotonic()
        scores = rotation.run(scored)
        spent = time.monotonic() - began
    lines = (
        {"id": row.get("id", n), "tokens": tokens, "logprobs": [None, *map(float, values)]}
        for n, (row, tokens, values) in enumerate(zip(rows, sequences, scores))
    )
    multihost.agree("output", lambda: write_rows(output, lines))
    count = sum(map(len, sequences))
    rate = round(count / spent, 1)
    return {
        "job": "score",
        "sequences": len(rows),
        "tokens": count,
        "adapters": len(rotation.digests),
        "tokens_per_s": rate,
        "output": str(output),
    }
