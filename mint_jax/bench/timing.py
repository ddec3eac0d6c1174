"""How benches measure: sides run in turn in one process, medians, and what a large matmul reaches here for scale."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from mint_jax.metrics import Progress


def in_turn(what: str, sides: Mapping[str, Callable[[], Any]], n: int, warm: int = 1) -> dict[str, list[float]]:
    """Seconds of every side, ``n`` times each, in turn, so that a slow spell of the machine meets all of them.

    Args:
        sides: each call must return only when its work is done.
        warm: calls of each side before the clock starts (compilation, caches).
    """
    for _ in range(warm):
        for call in sides.values():
            call()
    out: dict[str, list[float]] = {name: [] for name in sides}
    progress = Progress(what, n)
    for k in range(n):
        for name, call in sides.items():
            began = time.perf_counter()
            call()
            out[name].append(time.perf_counter() - began)
        progress.update(k + 1, " ".join(f"{name} {values[-1]:.2f} s" for name, values in out.items()))
    return out


def medians(times: Mapping[str, list[float]]) -> dict[str, float]:
    """Median seconds of every side."""
    return {name: statistics.median(values) for name, values in times.items()}


def ratio(times: Mapping[str, list[float]], slow: str, fast: str) -> float:
    """How many times longer ``slow`` took than ``fast``, by their medians."""
    return round(statistics.median(times[slow]) / statistics.median(times[fast]), 3)


class Matmul:
    """A large square matmul on the default device: as one side of ``in_turn`` it tells what the machine can do meanwhile."""

    def __init__(self, dtype: Any = jnp.float32, size: int = 2048):
        self.flops = 2 * size**3
        self._a = jnp.ones((size, size), dtype)
        self._multiply = jax.jit(lambda a, b: a @ b)

    def __call__(self) -> None:
        self._multiply(self._a, self._a).block_until_ready()


def device() -> str:
    """The device as reports name it."""
    return f"{jax.device_count()} x {jax.devices()[0].device_kind}"
