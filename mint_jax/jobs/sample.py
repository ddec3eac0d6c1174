"""Completions of given prompts: JSONL in, JSONL out, base and adapters mixed in one batch.

A line is ``{"prompt": "text"}``, ``{"messages": [...]}`` or ``{"tokens": [...]}``, with an optional ``id``, ``adapter`` (a PEFT
directory, or a revision of ``config.catalog``) and any setting of ``config.sampling`` in place of its default. A result is ``{"id",
"prompt_tokens", "revision", "completions": [{"tokens", "logprobs", "text", "finish"}]}``, in the order of the input; ``revision`` is
the digest of the adapter that drew the tokens, null for the bare base. More adapters than ``config.slots`` take turns.
"""

import dataclasses
import time
from pathlib import Path
from typing import Any

from mint_jax import multihost
from mint_jax.data.sources import read_rows, write_rows
from mint_jax.errors import UserError
from mint_jax.jobs import catalogs, common
from mint_jax.jobs.common import Config
from mint_jax.jobs.rotation import Rotation, Turn
from mint_jax.jobs.score import tokens_of
from mint_jax.metrics import Progress
from mint_jax.models.base import Base
from mint_jax.rollout.engine import Completion, DenseEngine, Request

SETTINGS = {  # per-line settings and their types
    "max_tokens": (int,),
    "temperature": (int, float),
    "top_k": (int,),
    "top_p": (int, float),
    "min_p": (int, float),
    "seed": (int,),
    "n": (int,),
    "stop": (str, list, tuple),
    "stop_ids": (list, tuple),
}


def request_of(base: Base, row: dict[str, Any], defaults: dict[str, Any], where: str) -> Request:
    """The request of one line, for the bare base; a completion also ends at the checkpoint's own end tokens."""
    if "prompt" in row:
        prompt = common.encode(base, row["prompt"])
    elif "messages" in row:
        prompt = common.encode(base, row["messages"])
    else:
        prompt = tokens_of(base, row, where)
    settings = {name: value for given in (defaults, row) for name, value in given.items() if name in SETTINGS}
    for name, value in settings.items():
        wanted = SETTINGS[name]
        if not isinstance(value, wanted) or isinstance(value, bool):
            raise UserError(f"{where}: {name} is {value!r}; expected {' or '.join(t.__name__ for t in wanted)}")
    ends = base.tokenizer.eos_ids if base.tokenizer is not None else ()
    settings["stop_ids"] = (*settings.get("stop_ids", ()), *ends)
    settings["stop"] = tuple([settings["stop"]] if isinstance(settings.get("stop"), str) else settings.get("stop", ()))
    return Request(prompt=tuple(prompt), **settings)


def run(config: Config, workdir: Path) -> dict[str, Any]:
    """Samples ``config.input`` into ``config.output``; returns the result it prints."""
    common.save_config(config, workdir)
    source, output = common.paths(config)
    rows = read_rows(source)
    base = common.open_base(config)
    requests = [request_of(base, row, dict(config.sampling), f"{source} line {n + 1}") for n, row in enumerate(rows)]
    engine = DenseEngine(base, base.tokenizer.decode if base.tokenizer is not None else None, config.get("max_rows", 64))
    for request in requests:
        engine.check(request, {})
    names = [row.get("adapter") or None for row in rows]
    progress = Progress("sample", len(rows))

    def sampled(turn: Turn) -> list[list[Completion]]:
        placed = [
            dataclasses.replace(requests[i], adapter=turn.slot(names[i]), revision=rotation.digests.get(names[i] or "")) for i in turn.rows
        ]
        return engine.generate(placed, turn.stacks, lambda done, _: progress.update(turn.before + done, "prompts"))

    with catalogs.reading(config) as catalog, Rotation(base, names, catalog, config.get("slots", 64)) as rotation:
        began = time.monotonic()
        results = rotation.run(sampled)
        spent = time.monotonic() - began
    lines = (
        {
            "id": row.get("id", n),
            "prompt_tokens": list(request.prompt),
            "revision": completions[0].revision,
            "completions": [{"tokens": c.tokens, "logprobs": c.logprobs, "text": c.text, "finish": c.finish} for c in completions],
        }
        for n, (row, request, completions) in enumerate(zip(rows, requests, results))
    )
    multihost.agree("output", lambda: write_rows(output, lines))
    count = sum(len(c.tokens) for completions in results for c in completions)
    return {
        "job": "sample",
        "prompts": len(rows),
        "tokens": count,
        "adapters": len(rotation.digests),
        "tokens_per_s": round(count / spent, 1),
        "output": str(output),
    }
