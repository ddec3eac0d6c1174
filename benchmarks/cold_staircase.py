"""Simultaneous requests for cold adapters: distinct ones, and one adapter for all.

A loader that locks the whole load serves them one by one. ``distinct`` and ``identical`` have, by
number of requests, seconds to the first, median and last slot; ``over_one`` is the last over a
single request's time. Files are in the page cache.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import timing
from benchmarks.alone import scratch
from benchmarks.bases import shape as shape_of
from benchmarks.packed_files import adapter_of
from benchmarks.packed_store import BASE, TARGETS, Store, forget, residency_of
from mint_jax.catalog.packed import Schema, pack
from mint_jax.lora import tree as lora_tree
from mint_jax.lora.tree import AdapterConfig
from mint_jax.metrics import Progress
from mint_jax.models import transformer
from mint_jax.residency.residency import Residency


def run(config: Any, workdir: Path) -> dict[str, Any]:
    """Runs the bench; returns its report. The files it makes are removed."""
    with scratch(workdir / "cold_staircase") as folder:
        return _run(config, folder)


def _run(config: Any, folder: Path) -> dict[str, Any]:
    specs = transformer.abstract(shape_of(config.shape))
    adapter = AdapterConfig(config.rank, 2.0 * config.rank, TARGETS)
    wanted = lora_tree.adapter_specs(specs, adapter)
    store, schema = Store(folder / "catalog"), Schema(BASE, adapter, config.dtype)
    values = np.random.default_rng(config.seed)
    most = max(config.counts)
    digests = store.add(pack(adapter_of(wanted, values, config.dtype), schema) for _ in range(most))
    residency = residency_of(store, specs, most)
    sides = {
        f"{count} {kind}": _side(kind, count, digests)
        for kind in ("distinct", "identical")
        for count in {1, *config.counts}
    }
    seconds: dict[str, list[list[float]]] = {name: [] for name in sides}
    reads: dict[str, int] = {}
    progress = Progress("cold at once", config.n + 1)
    for k in range(config.n + 1):  # the first round compiles and warms
        for name, asked in sides.items():
            forget(residency, digests)
            store.reads.clear()
            took = at_once(residency, asked)
            reads[name] = len(store.reads)
            if k:
                seconds[name].append(took)
        progress.update(k + 1)
    residency.close()
    last = {name: [max(took) for took in rounds] for name, rounds in seconds.items()}
    points = []
    for name, rounds in seconds.items():
        count, kind = name.split()
        points.append(
            {
                "name": name,
                "kind": kind,
                "count": int(count),
                "first_s": timing.median(min(took) for took in rounds),
                "middle_s": timing.median(float(np.median(took)) for took in rounds),
                "last_s": timing.median(last[name]),
                "over_one": timing.ratio(last, name, f"1 {kind}"),
                "reads": reads[name],
            }
        )
    return {
        "shape": config.shape.to_dict(),
        "rank": config.rank,
        "adapter_bytes": store.nbytes(digests[:1]),
        "load_s": next(point["last_s"] for point in points if point["name"] == "1 distinct"),
        "points": points,
    }


def _side(kind: str, count: int, digests: Sequence[str]) -> list[str]:
    return list(digests[:count]) if kind == "distinct" else [digests[0]] * count


def at_once(residency: Residency, digests: Sequence[str]) -> list[float]:
    """Seconds until each request has its slot, all of them asked at once; no lease stays."""
    began, done = time.perf_counter(), {}
    futures = [residency.acquire(digest, f"tenant {k}") for k, digest in enumerate(digests)]
    while len(done) < len(futures):
        pending = [future for future in futures if not future.done()]
        if pending and not residency.commit_ready():
            residency.wait_ready(pending)
        jax.block_until_ready(residency.stacks)
        now = time.perf_counter() - began
        done |= {k: now for k, future in enumerate(futures) if k not in done and future.done()}
    for future in futures:
        future.result().release()
    return [done[k] for k in range(len(futures))]
