"""Times sides in turn in one process; medians and ratios with intervals.

A *figure* is ``{"median": m, "interval": [low, high], "n": n}``, or has ``percentile``, ``mean`` or
``total`` in place of ``median``. The interval of a quantile ends at order statistics (95 % by the
normal approximation of the binomial; at n = 5 the smallest and largest, 94 %). That of a ratio of
medians is the 95 % percentile bootstrap over rounds, each of which ran both sides.
"""

import functools
import math
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, TypeVar

import jax
import numpy as np

from mint_jax.metrics import Progress

T = TypeVar("T")
Figure = dict[str, Any]
VALUES = ("median", "mean", "percentile", "total")  # what the value of a figure may be
BOOTSTRAPS = 4000


def seconds_of(call: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of a call."""
    began = clock()
    call()
    return clock() - began


def counted(what: str, items: Iterable[T], total: int | None = None) -> Iterator[T]:
    """Yields the items, with progress; ``total`` where they have no length."""
    progress = Progress(what, len(items) if isinstance(items, Sized) else total or 0)
    for done, item in enumerate(items, 1):
        yield item
        progress.update(done)


def collect(
    what: str, sides: Mapping[str, Callable[[], T]], n: int, warm: int = 1
) -> dict[str, list[T]]:
    """Results of every side, ``n`` calls each, in turn, so that a slow spell of the machine meets
    all of them.

    Args:
        warm: calls of each side before (compilation, caches).
    """
    for _ in range(warm):
        for call in sides.values():
            call()
    out: dict[str, list[T]] = {name: [] for name in sides}
    progress = Progress(what, n)
    for done in range(1, n + 1):
        for name, call in sides.items():
            out[name].append(call())
        last = [f"{name} {x[-1]:.2f} s" for name, x in out.items() if isinstance(x[-1], float)]
        progress.update(done, " ".join(last))
    return out


def in_turn(
    what: str,
    sides: Mapping[str, Callable[[], Any]],
    n: int,
    warm: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of every side, as in ``collect``; a call returns when its work is done."""
    timed = {name: functools.partial(seconds_of, call, clock) for name, call in sides.items()}
    return collect(what, timed, n, warm)


def median(values: Iterable[float], scale: float = 1.0) -> Figure:
    """The median of a sample, times ``scale``."""
    return _quantile(values, 0.5, scale, "median")


def medians_of(times: Mapping[str, Sequence[float]], scale: float = 1.0) -> dict[str, Figure]:
    """``median`` of every side."""
    return {name: median(values, scale) for name, values in times.items()}


def percentile(values: Iterable[float], q: float, scale: float = 1.0) -> Figure:
    """The q-th percentile of a sample, times ``scale``."""
    return _quantile(values, q / 100, scale, "percentile")


def percentiles(seconds: Collection[float], scale: float = 1e3) -> dict[str, Figure]:
    """Returns the 50th and the 99th percentile in milliseconds; empty without values."""
    if not len(seconds):
        return {}
    return {f"p{q}_ms": percentile(seconds, q, scale) for q in (50, 99)}


def _quantile(values: Iterable[float], q: float, scale: float, name: str) -> Figure:
    ordered = np.sort(np.fromiter(values, np.float64)) * scale
    n = len(ordered)
    half = 1.96 * math.sqrt(n * q * (1 - q))
    ends = max(0, math.floor(n * q - half)), min(n - 1, math.ceil(n * q + half))
    interval = [_short(ordered[end]) for end in ends]
    return {name: _short(np.quantile(ordered, q)), "interval": interval, "n": n}


def mean(values: Iterable[float]) -> Figure:
    """The mean of a sample with its 95 % bootstrap interval."""
    x = np.fromiter(values, np.float64)
    ends = _ends(x[_draws(len(x))].mean(axis=1))
    return {"mean": _short(x.mean()), "interval": ends, "n": len(x)}


def total(values: Iterable[float]) -> Figure:
    """The sum of a sample's parts, with the interval that follows from how much they differ."""
    x = np.fromiter(values, np.float64)
    return {"total": _short(x.sum()), "interval": _ends(x[_draws(len(x))].sum(axis=1)), "n": len(x)}


def ratio(
    times: Mapping[str, Sequence[float]], slow: str, fast: str, less: float = 0.0, q: float = 50
) -> Figure:
    """Returns the q-th percentile of ``slow`` over that of ``fast``; ``less`` is subtracted
    (1 makes it an overhead).
    """
    a, b = (np.array(times[name]) for name in (slow, fast))
    draws, name = _draws(len(a)), "median" if q == 50 else "percentile"
    whole = np.percentile(a, q) / np.percentile(b, q)
    ratios = np.percentile(a[draws], q, axis=1) / np.percentile(b[draws], q, axis=1)
    return {name: _short(whole - less), "interval": _ends(ratios - less), "n": len(a)}


def merge(runs: Sequence[Any]) -> Any:
    """Several runs' reports as one: what all of them say stays, numbers become figures (median,
    smallest and largest), and other values lists.
    """
    first = runs[0]
    if isinstance(first, dict):
        return {key: merge([run[key] for run in runs]) for key in first}
    if isinstance(first, list) and all(
        isinstance(run, list) and len(run) == len(first) for run in runs
    ):
        return [merge(items) for items in zip(*runs, strict=True)]
    if all(run == first for run in runs) and not isinstance(first, float):
        return first
    if all(isinstance(run, int | float) for run in runs):
        middle = _short(statistics.median(runs))
        return {"median": middle, "interval": [min(runs), max(runs)], "n": len(runs)}
    return list(runs)


def value(figure: Any) -> float:
    """The number of a figure, or of a plain number."""
    if not isinstance(figure, dict):
        return figure
    return next(figure[name] for name in VALUES if name in figure)


def is_figure(tree: Any) -> bool:
    """Returns True if a part of a report is a figure."""
    keys = tree.keys() if isinstance(tree, dict) else set()
    return {"interval", "n"} <= keys and not keys.isdisjoint(VALUES)


def _draws(n: int) -> np.ndarray:
    """Indices of bootstrap samples, ``[BOOTSTRAPS, n]``, the same every time."""
    return np.random.default_rng(0).integers(0, n, (BOOTSTRAPS, n))


def _ends(values: np.ndarray) -> list[float]:
    return [_short(x) for x in np.percentile(values, (2.5, 97.5))]


def _short(x: Any) -> float:
    """Five significant digits."""
    return float(f"{float(x):.5g}")


def device() -> str:
    """The device as reports name it."""
    return f"{jax.device_count()} x {jax.devices()[0].device_kind}"
