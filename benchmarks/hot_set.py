"""Hit rates of a tier of residency, next to LRU and to the optimum, each a mean over ``n`` traces.

Nothing is loaded: a hit rate depends on the order of requests alone. ``optimal`` evicts the entry
whose next use is last (Belady 1966); no policy can beat it. All entries have equal size.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import timing, traffic
from mint_jax.residency.tier import Tier

LOAD_S = 1e-3  # what every miss is said to take: equal, so that only use decides


def run(config: Any, workdir: Path) -> dict[str, Any]:
    """Runs the bench; returns its report."""
    points = []
    seeds = np.random.SeedSequence(config.seed).spawn(config.n)
    for kind in config.traffic:
        traces = []
        for seed in seeds:
            rng = np.random.default_rng(seed)
            drawn = traffic.draws(kind, config.names, config.requests, config.zipf, rng)
            traces.append(drawn.tolist())
        for capacity in timing.counted(f"hot set, {kind}", config.capacities):
            hits = {
                name: timing.mean(policy(trace, capacity, config) / len(trace) for trace in traces)
                for name, policy in POLICIES.items()
            }
            point = {"name": f"{kind} {capacity}", "traffic": kind, "capacity": capacity}
            points.append(point | {"hit_rate": hits})
    return {"names": config.names, "requests": config.requests, "points": points}


def slots(trace: Sequence[int], capacity: int, config: Any) -> int:
    """Hits of a tier of residency, such as the slots of a rank bucket."""
    now = [0.0]
    tier = Tier(capacity, half_life_s=config.half_life_s, clock=lambda: now[0])
    hits = 0
    for name in map(str, trace):
        now[0] += config.request_s
        if tier.lease(name) is not None:
            hits += 1
        elif tier.reserve(name, 1) is not None:
            tier.confirm(name, LOAD_S)
        tier.release(name)
    return hits


def lru(trace: Sequence[int], capacity: int, config: Any) -> int:
    """Hits where what was not used for longest goes."""
    kept: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for name in trace:
        if name in kept:
            hits += 1
            kept.move_to_end(name)
            continue
        if len(kept) == capacity:
            kept.popitem(last=False)
        kept[name] = None
    return hits


def optimal(trace: Sequence[int], capacity: int, config: Any) -> int:
    """Hits where what is next used last goes."""
    after, next_use = [0] * len(trace), {}
    for k in range(len(trace) - 1, -1, -1):
        after[k] = next_use.get(trace[k], len(trace))
        next_use[trace[k]] = k
    kept: dict[int, int] = {}  # name -> its next use
    heap: list[tuple[int, int]] = []  # (-next use, name); those that are not current are skipped
    hits = 0
    for name, following in zip(trace, after):
        if name in kept:
            hits += 1
        elif len(kept) == capacity:
            while kept.get(heap[0][1]) != -heap[0][0]:
                heapq.heappop(heap)
            del kept[heapq.heappop(heap)[1]]
        kept[name] = following
        heapq.heappush(heap, (-following, name))
    return hits


POLICIES: dict[str, Callable[[Sequence[int], int, Any], int]] = {
    "slots": slots,
    "lru": lru,
    "optimal": optimal,
}
