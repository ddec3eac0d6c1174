"""Completions of given prompts: JSONL in, JSONL out, base and adapters mixed in one batch.

A line is ``{"prompt": "text"}``, ``{"messages": [...]}`` or ``{"tokens": [...]}``, with an optional ``id``, ``adapter`` (a PEFT
directory, or a revision of ``config.catalog``) and any setting of ``config.sampling`` in place of its default. A result is ``{"id",
"prompt_tokens", "revision", "completions": [{"tokens", "logprobs", "text", "finish"}]}``, in the order of the input; ``revision`` is
the digest of the adapter that drew the tokens, null for the bare base.
"""

import time
from pathlib import Path
from typing import Any

from mint_jax import multihost
from mint_jax.data.sources import read_rows, write_rows
from mint_jax.errors import UserError
from mint_jax.jobs import adapters, catalogs, common
from mint_jax.jobs.common import Config
from mint_jax.jobs.score import tokens_of
from mint_jax.lora.tree import Slot
from mint_jax.metrics import Progress
from mint_jax.models.base import Base
from mint_jax.rollout.engine import DenseEngine, Request

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


def request_of(base: Base, row: dict[str, Any], defaults: dict[str, Any], adapter: Slot | None, where: str) -> Request:
    """The request of one line; a completion also ends at the checkpoint's own end tokens."""
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
    return Request(prompt=tuple(prompt), adapter=adapter, **settings)


def run(config: Config, workdir: Path) -> dict[str, Any]:
    """Samples ``config.input`` into ``config.output``; returns the result it prints."""
    common.save_config(config, workdir)
    source, output = common.paths(config)
    rows = read_rows(source)
    base = common.open_base(config)
    with catalogs.reading(config) as catalog:
        loaded = adapters.read_all((row.get("adapter") for row in rows), base, catalog)
    stacks, slots = adapters.make_resident(loaded, base)
    requests = []
    for n, row in enumerate(rows):
        adapter = slots[row["adapter"]] if row.get("adapter") else None
        requests.append(request_of(base, row, dict(config.sampling), adapter, f"{source} line {n + 1}"))
    progress = Progress("sample", len(rows))
    began = time.monotonic()
    engine = DenseEngine(base, base.tokenizer.decode if base.tokenizer is not None else None, config.get("max_rows", 64))
    results = engine.generate(requests, stacks, lambda done, _: progress.update(done, "prompts"))
    spent = time.monotonic() - began
    lines = (
        {
            "id": row.get("id", n),
            "prompt_tokens": list(request.prompt),
            "revision": loaded[row["adapter"]].digest if row.get("adapter") else None,
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
        "adapters": len(slots),
        "tokens_per_s": round(count / spent, 1),
        "output": str(output),
    }
