"""Log-probabilities of given tokens: JSONL in, JSONL out, base and adapters mixed.

A line is ``{"tokens": [...]}`` or ``{"text": "..."}``, with an optional ``id`` and ``adapter`` (a PEFT directory, or a
revision of ``config.catalog``). A result is ``{"id", "tokens", "logprobs"}`` with ``logprobs[i] = log p(tokens[i] | tokens[:i])`` and
``logprobs[0] = null``, in the order of the input.
"""

import time
from pathlib import Path
from typing import Any

from mint_jax import multihost
from mint_jax.data.sources import read_rows, write_rows
from mint_jax.errors import UserError
from mint_jax.jobs import adapters, catalogs, common
from mint_jax.jobs.common import Config
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
    with catalogs.reading(config) as catalog:
        loaded = adapters.read_all((row.get("adapter") for row in rows), base, catalog)
    stacks, slots = adapters.make_resident(loaded, base)
    chosen = [slots[row["adapter"]] if row.get("adapter") else None for row in rows]
    progress = Progress("score", len(rows))
    began = time.monotonic()
    scorer = Scorer(base, config.get("max_tokens", 4096))
    scores = scorer.logprobs(sequences, chosen, stacks, lambda done, _: progress.update(done, "sequences"))
    spent = time.monotonic() - began
    lines = (
        {"id": row.get("id", n), "tokens": tokens, "logprobs": [None, *map(float, values)]}
        for n, (row, tokens, values) in enumerate(zip(rows, sequences, scores))
    )
    multihost.agree("output", lambda: write_rows(output, lines))
    count = sum(map(len, sequences))
    rate = round(count / spent, 1)
    return {"job": "score", "sequences": len(rows), "tokens": count, "adapters": len(slots), "tokens_per_s": rate, "output": str(output)}
