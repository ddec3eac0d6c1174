"""Decoding with drafts that idle rows verify against decoding token by token, with mixed adapters.

Tasks: ``copy`` repeats a text of the prompt, from which drafts come; ``group`` draws four samples
of that prompt for each adapter, as a GRPO group, so that drafts also come from samples; ``again``
draws prompts with the seeds of before an update, and the completions of before it are drafts, as in
evaluations of a policy in training. The update moves each adapter by ``config.moved`` of its size.

``speedup``: seconds token by token over seconds with drafts, both with the same program.
``accepted``: share of the drafts that were drawn, in all and by source (see ``rollout.drafts``),
with each source's share of all drafts. ``differing``: tokens that differ. The picture shows the
speedup over the rows that decode, in a program of ``config.max_rows`` rows.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any

from benchmarks import timing
from benchmarks.bases import open_base
from benchmarks.decode_steps import random_stack
from benchmarks.sweeps import pictures
from benchmarks.sweeps.grid import Picture
from mint_jax.harness import start
from mint_jax.lora.tree import AdapterConfig, Slot, Stacks
from mint_jax.rollout.engine import Engine
from mint_jax.rollout.request import Completion, Request

GROUP = 4  # samples of a prompt
SOURCES = ("siblings", "family", "given", "prompt")


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
    report: dict[str, Any] = {"base": base.name}
    report |= {name: config[name] for name in ("tokens", "drafts", "adapters", "rank", "max_rows")}
    messages = {"copy": config.copy + config.text, "again": config.again}
    messages["group"] = messages["copy"]
    points = []
    for task, temperature, counts in config.cases:
        prompt = tuple(start.encode(base, ({"role": "user", "content": messages[task]},), {}))
        n = GROUP if task == "group" else 1
        how = {"max_tokens": config.tokens, "temperature": temperature, "n": n}
        for rows in counts:
            requests = []
            for i in range(max(1, rows // n)):
                own = i % config.adapters
                slot = Slot(stack.rank, own)
                requests.append(Request(prompt, slot, seed=i * n, version=own, **how))
            if task == "again":
                before = [  # other weights, other prompts in the cache
                    dataclasses.replace(r, version=config.adapters + i)
                    for i, r in enumerate(requests)
                ]
                found = sides["plain"].generate(before, earlier)
                drafts = (tuple(c.tokens) for [c] in found)
                requests = [
                    dataclasses.replace(r, drafts=(one,)) for r, one in zip(requests, drafts)
                ]
            label = f"{task}, temperature {temperature:g}"
            case = _case(config.n, f"{label}, {rows} rows", sides, requests, {stack.rank: stack})
            report[f"{task}_{temperature:g}_{rows}".replace(".", "_")] = case
            point = {"settings": {"task": label, "rows": rows}, "figures": case}
            points.append({"grid": "", "rows": [point]})
    picture = Picture(grid="", x="rows", y="speedup", by=("task",))
    pictures.draw({"speculation": picture}, {"points": points, "references": []}, workdir)
    return report


def _case(
    n: int, name: str, sides: dict[str, Engine], requests: list[Request], stacks: Stacks
) -> dict[str, Any]:
    drawn: dict[str, list[list[Completion]]] = {}
    drafts = sides["drafts"].counts
    before = drafts.copy()

    def run(side: str) -> None:
        drawn[side] = sides[side].generate(requests, stacks)

    calls = {side: functools.partial(run, side) for side in sides}
    seconds = timing.in_turn(name, calls, n)
    pairs = [
        (a.tokens, b.tokens) for x, y in zip(*drawn.values()) for a, b in zip(x, y, strict=True)
    ]
    differing = sum(a != b for x, y in pairs for a, b in zip(x, y))
    if differing:  # a speedup of other tokens would mean nothing
        raise RuntimeError(f"{name}: {differing} tokens differ with drafts; expected none")
    count = {key: drafts[key] - before[key] for key in drafts}
    drafted = {source: count.get(f"drafted_{source}", 0) for source in SOURCES}
    return {
        "speedup": timing.ratio(seconds, "plain", "drafts"),
        "accepted": _share(count["accepted_tokens"], count["drafted_tokens"]),
        "sources": {
            source: {
                "drafts": _share(number, count["drafted_tokens"]),
                "accepted": _share(count.get(f"accepted_{source}", 0), number),
            }
            for source, number in drafted.items()
            if number
        },
        "differing": differing,
        "drawn_tokens": sum(len(x) for x, _ in pairs),
    }


def _share(part: int, whole: int) -> float:
    return round(part / max(1, whole), 3)
