"""Simultaneous requests for cold adapters: distinct ones, and one adapter for all.

A loader that locks the whole load serves them one by one. ``distinct`` and ``identical`` have, by
number of requests, seconds to the first, median and last slot; ``over_one`` is the last over a
single request's time. Files are in the page cache.
"""

import functools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import timing
from benchmarks.alone import scratch
from benchmarks.bases import shape as shape_of
from benchmarks.packed_store import TARGETS, Store, forget, random_objects, residency_of
from mint_jax.lora.tree import AdapterConfig
from mint_jax.models import transformer
from mint_jax.residency.residency import Residency


def run(config: Any, workdir: Path) -> dict[str, Any]:
    """Runs the bench; returns its report. The files it makes are removed."""
    with scratch(workdir / "cold_staircase") as folder:
        return _run(config, folder)


def _run(config: Any, folder: Path) -> dict[str, Any]:
    adapter, most = AdapterConfig(config.rank, 2.0 * config.rank, TARGETS), max(config.counts)
    store, specs = Store(folder / "catalog"), transformer.abstract(shape_of(config.shape))
    rng = np.random.default_rng(config.seed)
    digests = store.add(random_objects(specs, adapter, rng, most, config.dtype))
    residency = residency_of(store, specs, most)
    reads: dict[str, int] = {}

    def cold(name: str, asked: Sequence[str]) -> list[float]:
        forget(residency, digests)
        store.reads.clear()
        took = at_once(residency, asked)
        reads[name] = len(store.reads)
        return took

    points: dict[str, dict[str, Any]] = {
        f"{count} {kind}": {"kind": kind, "count": count}
        for kind in ("distinct", "identical")
        for count in {1, *config.counts}
    }
    sides = {}
    for name, one in points.items():
        asked = digests[: one["count"]] if one["kind"] == "distinct" else digests[:1] * one["count"]
        sides[name] = functools.partial(cold, name, asked)
    seconds = timing.collect("cold at once", sides, config.n)
    residency.close()
    last = {name: [max(took) for took in rounds] for name, rounds in seconds.items()}
    for name, rounds in seconds.items():
        points[name] |= {
            "name": name,
            "first_s": timing.median(min(took) for took in rounds),
            "middle_s": timing.median(float(np.median(took)) for took in rounds),
            "last_s": timing.median(last[name]),
            "over_one": timing.ratio(last, name, f"1 {points[name]['kind']}"),
            "reads": reads[name],
        }
    return {
        "shape": config.shape.to_dict(),
        "rank": config.rank,
        "adapter_bytes": store.nbytes(digests[:1]),
        "load_s": points["1 distinct"]["last_s"],
        "points": list(points.values()),
    }


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
