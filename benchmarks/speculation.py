"""Decoding with drafts that idle rows verify against decoding token by token, with mixed adapters.

Tasks: ``copy`` repeats a text of the prompt, from which drafts come; ``again`` draws prompts with
the seeds of before an update, and the completions of before it are drafts, as in evaluations of a
policy in training. The update moves each adapter by ``config.moved`` of its size.

``speedup``: seconds token by token over seconds with drafts, both with the same program.
``accepted``: share of the drafts that were drawn. ``differing``: tokens that differ.
"""

import dataclasses
from pathlib import Path
from typing import Any

from benchmarks import timing
from benchmarks.bases import open_base
from benchmarks.decode_steps import random_stack
from mint_jax.harness import start
from mint_jax.lora.tree import AdapterConfig, Slot
from mint_jax.rollout.engine import Engine
from mint_jax.rollout.request import Completion, Request


def run(config: Any, workdir: Path) -> dict[str, Any]:
    """Runs the bench; returns its report."""
    base = open_base(config)
    adapter = AdapterConfig(config.rank, config.scale * config.rank)
    stack = random_stack(base, adapter, config.adapters, config.seed)
    earlier = {stack.rank: dataclasses.replace(stack, scale=stack.scale / (1 + config.moved))}
    how = {"max_rows": config.max_rows, "rows": (config.max_rows,)}
    sides = {
        name: Engine(base, base.need_tokenizer().decode, **how, speculative_tokens=drafts)
        for name, drafts in (("plain", 0), ("drafts", config.drafts))
    }
    report: dict[str, Any] = {
        "base": base.name,
        **{name: config[name] for name in ("tokens", "drafts", "adapters", "rank", "max_rows")},
    }
    messages = {"copy": config.copy + config.text, "again": config.again}
    for task, message in messages.items():
        prompt = tuple(start.encode(base, ({"role": "user", "content": message},), {}))
        for temperature in config.temperatures:
            for rows in config.rows:
                requests = [
                    Request(
                        prompt,
                        Slot(stack.rank, i % config.adapters),
                        max_tokens=config.tokens,
                        temperature=temperature,
                        seed=i,
                        version=i % config.adapters,
                    )
                    for i in range(rows)
                ]
                if task == "again":
                    found = sides["plain"].generate(requests, earlier)
                    drafts = (tuple(c.tokens) for [c] in found)
                    requests = [
                        dataclasses.replace(r, drafts=(one,)) for r, one in zip(requests, drafts)
                    ]
                stacks = {stack.rank: stack}
                name = f"{task}, temperature {temperature:g}, {rows} rows"
                report[f"{task}_{temperature:g}_{rows}".replace(".", "_")] = _case(
                    config, name, sides, lambda side, r=requests, s=stacks: side.generate(r, s)
                )
    return report


def _case(config: Any, name: str, sides: dict[str, Engine], generate: Any) -> dict[str, Any]:
    drawn: dict[str, list[list[Completion]]] = {}
    drafts = sides["drafts"].counts
    before = drafts.copy()

    def run(side: str) -> None:
        drawn[side] = generate(sides[side])

    calls = {side: lambda side=side: run(side) for side in sides}
    seconds = timing.in_turn(name, calls, config.n)
    pairs = [
        (a.tokens, b.tokens) for x, y in zip(*drawn.values()) for a, b in zip(x, y, strict=True)
    ]
    count = {key: drafts[key] - before[key] for key in ("accepted_tokens", "drafted_tokens")}
    return {
        "speedup": timing.ratio(seconds, "plain", "drafts"),
        "accepted": round(count["accepted_tokens"] / max(1, count["drafted_tokens"]), 3),
        "differing": sum(a != b for x, y in pairs for a, b in zip(x, y)),
        "drawn_tokens": sum(len(x) for x, _ in pairs),
    }
