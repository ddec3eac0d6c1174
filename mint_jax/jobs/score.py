"""Log-probabilities of given tokens: JSONL in, JSONL out, base and adapters mixed.

A line is ``{"tokens": [...]}`` or ``{"text": "..."}``, with an optional ``id`` and ``adapter`` (a
PEFT directory, or a revision of ``config.catalog``). A result is ``{"id", "tokens", "logprobs"}``
with ``logprobs[i] = log p(tokens[i] | tokens[:i])`` and ``logprobs[0] = null``, in the order of the
input. More adapters than ``config.slots`` take turns. A run that was interrupted is resumed by the
same command; see ``output``.
"""

import difflib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mint_jax.catalog.packed import digest_of
from mint_jax.data.sources import numbered_rows
from mint_jax.errors import UserError
from mint_jax.jobs import adapters, catalogs, common, preflight, settings
from mint_jax.jobs.common import Config
from mint_jax.jobs.output import Output
from mint_jax.metrics import Progress
from mint_jax.models.base import Base
from mint_jax.residency.pool import AdapterBatch
from mint_jax.rollout.score import Scorer

KEYS = ("id", "adapter", "tokens", "text")


def check_row(row: dict[str, Any], keys: Sequence[str], where: str) -> None:
    """Refuses a line with keys that mean nothing, or an ``adapter`` that is no name."""
    for key in row:
        if key not in keys:
            near = difflib.get_close_matches(key, keys, 1)
            raise UserError(
                f"{where} has {key!r}, which means nothing{f'; {near[0]!r}?' if near else ''}: a"
                f" line has {', '.join(keys)}"
            )
    name = row.get("adapter")
    if name is not None and not isinstance(name, str):
        raise UserError(
            f"{where}: adapter is {name!r}; expected a PEFT directory or a revision's name, or null"
            " for the bare base"
        )


def tokens_of(base: Base, row: dict[str, Any], where: str) -> list[int]:
    """The token ids of a line that gives ``tokens`` or ``text``."""
    if "tokens" in row:
        tokens = row["tokens"]
        if not isinstance(tokens, list) or not all(
            isinstance(t, int) and not isinstance(t, bool) for t in tokens
        ):
            raise UserError(f"{where}: tokens is {str(tokens)[:80]}; expected a list of token ids")
        return tokens
    if "text" in row:
        if not isinstance(row["text"], str):
            raise UserError(f"{where}: text is {str(row['text'])[:80]}; expected a string")
        return base.need_tokenizer().encode(row["text"])
    raise UserError(f"{where} has {', '.join(row) or 'nothing'}; expected tokens or text")


def made_from(config: Config, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What decides a batch job's results: its input, base and, where it has any, sampling."""
    settings = {name: config[name] for name in ("base", "dtype", "quantise")}
    settings |= {
        f"sampling.{name}": value for name, value in dict(config.get("sampling", {})).items()
    }
    return {
        "input with digest": digest_of(json.dumps(rows, sort_keys=True).encode())[:12]
    } | settings


def run(config: Config, workdir: Path) -> dict[str, Any]:
    """Scores ``config.input`` into ``config.output``; returns the result it prints."""
    settings.complete(config)  # a caller other than launch may leave settings out
    common.save_config(config, workdir)
    source, path = preflight.files(config)
    places, rows = zip(*numbered_rows(source))
    with Output(path, len(rows), made_from(config, rows)) as output:
        todo = [n for n in range(len(rows)) if n not in output.rows]
        base = common.open_base(config)
        scorer = Scorer(base, config.max_tokens)
        sequences = []
        for row, where in zip(rows, places):
            check_row(row, KEYS, where)
            sequences.append(tokens_of(base, row, where))
            scorer.check(sequences[-1], where)
        names = [rows[n].get("adapter") for n in todo]
        progress = Progress("score", len(rows), done=len(output.rows))

        def scored(turn: AdapterBatch) -> list[np.ndarray]:
            mine = [todo[i] for i in turn.rows]

            def done(results: dict[int, np.ndarray]) -> None:
                output.add(
                    {
                        mine[i]: _result(rows[mine[i]], mine[i], sequences[mine[i]], values)
                        for i, values in results.items()
                    }
                )
                progress.update(len(output.rows), "sequences")

            return scorer.logprobs(
                [sequences[n] for n in mine],
                [turn.slot(names[i]) for i in turn.rows],
                turn.stacks,
                done,
            )

        with (
            catalogs.reading(config) as catalog,
            adapters.pool_of(base, names, catalog, config.slots) as pool,
        ):
            output.begin(
                {"base's fingerprint": base.fingerprint}
                | {f"adapter {n}": d for n, d in pool.digests.items()}
            )
            began = time.monotonic()
            pool.run(scored)
            spent = time.monotonic() - began
        output.finish()
    return {
        "job": "score",
        "sequences": len(rows),
        "tokens": sum(map(len, sequences)),
        "adapters": len({row.get("adapter") for row in rows} - {None, ""}),
        "tokens_per_s": round(sum(len(sequences[n]) for n in todo) / spent, 1),
        "resumed": len(rows) - len(todo),
        "output": str(path),
    }


def _result(row: dict[str, Any], n: int, tokens: list[int], values: np.ndarray) -> dict[str, Any]:
    return {"id": row.get("id", n), "tokens": tokens, "logprobs": [None, *map(float, values)]}
