"""Slowdown of decoding while a cold adapter loads.

``decode_pause_p99``: 99th percentile of a decode step during a cold load, over that without one.
Windows of steps alternate: quiet, loading, quiet. ``decode_loads`` counts the loads that began and
ended inside their windows; ``decode_noise_p99`` compares the two quiet windows.
"""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import timing
from benchmarks.bases import random_base, shape
from benchmarks.decode_steps import Steps
from benchmarks.packed_files import Files
from benchmarks.packed_store import forget, load, residency_of
from mint_jax.metrics import Progress
from mint_jax.residency.pool import PIECE_BYTES
from mint_jax.residency.residency import Residency

PROMPT = 16  # positions in each row's cache


class _Decoder:
    """A small model that decodes one token of every row at each call."""

    def __init__(self, pause: Any, seed: int):
        fields = {"num_heads": pause.d_model // 64, "num_kv_heads": pause.d_model // 64}
        fields |= {"d_ff": 4 * pause.d_model} | dict(pause)
        self._steps = Steps(random_base(shape(fields), jnp.float32), pause.rows, PROMPT + 1, seed)
        self._plan = jax.device_put(self._steps.plan([None] * pause.rows, {}, PROMPT))

    def steps(self, most: int, between: Callable[[], bool]) -> list[float]:
        """Returns seconds of each step, ``between`` included, which returns True after the last."""
        out: list[float] = []
        last = False
        while len(out) < most and not last:
            began = time.perf_counter()
            last = between()
            self._steps.take({}, self._plan, 1)
            out.append(time.perf_counter() - began)
        return out


class _ColdLoad:
    """One cold load, in pieces between steps; ``ended`` is seconds since the request."""

    def __init__(self, residency: Residency, digest: str):
        self.residency, self.digest = residency, digest
        self.future, self.began, self.ended = None, 0.0, None

    def __call__(self) -> bool:
        if self.future is None:
            self.began = time.perf_counter()
            self.future = self.residency.acquire(self.digest)
        self.residency.commit_ready(PIECE_BYTES)
        if self.future.done():
            self.future.result().release()
            self.ended = time.perf_counter() - self.began
        return self.ended is not None


def decode_pause(config: Any, files: Files) -> dict[str, Any]:
    """Decode steps with and without a cold load behind them, in windows that take turns."""
    pause = config.pause
    decoder = _Decoder(pause, config.seed)
    residency = residency_of(files.store, files.specs, 2)
    load(residency, files.digests[:1])  # compiles
    decoder.steps(3, lambda: False)
    windows: dict[str, list[list[float]]] = {"quiet": [], "loading": [], "again": []}
    seconds = []
    progress = Progress("decode pause", pause.windows)
    for k in range(pause.windows):
        windows["quiet"].append(decoder.steps(pause.quiet, lambda: False))
        digest = files.digests[(k + 1) % len(files.digests)]
        forget(residency, [digest])
        cold = _ColdLoad(residency, digest)
        windows["loading"].append(decoder.steps(pause.longest, cold))
        if cold.ended is None:
            residency.close()
            raise RuntimeError(
                f"a cold load did not end within {pause.longest} decode steps: raise"
                " config.pause.longest"
            )
        seconds.append(cold.ended)
        windows["again"].append(decoder.steps(pause.quiet, lambda: False))
        progress.update(
            k + 1, f"a cold load in {len(windows['loading'][-1])} steps, {cold.ended:.2f} s"
        )
    residency.close()
    return {
        "decode_pause_p99": _ratio(windows, "loading", 99),
        "decode_pause_p50": _ratio(windows, "loading", 50),
        "decode_noise_p99": _ratio(windows, "again", 99),
        "decode_noise_p50": _ratio(windows, "again", 50),
        "decode_load_ms": timing.median(seconds, 1e3),
        "decode_steps": sum(map(len, windows["loading"])),
        "decode_loads": len(seconds),
    }


def _ratio(windows: dict[str, list[list[float]]], name: str, q: float) -> timing.Figure:
    """A percentile of all steps of one kind over that of the quiet ones; the interval is the
    bootstrap over rounds.
    """
    loading, quiet = windows[name], windows["quiet"]

    def of(rounds: np.ndarray) -> float:
        slow, fast = (np.concatenate([of[k] for k in rounds]) for of in (loading, quiet))
        return float(np.percentile(slow, q) / np.percentile(fast, q))

    n = len(quiet)
    draws = np.random.default_rng(0).integers(0, n, (timing.BOOTSTRAPS // 4, n))
    low, high = np.percentile([of(rounds) for rounds in draws], (2.5, 97.5))
    return {
        "percentile": round(of(np.arange(n)), 4),
        "interval": [round(float(low), 4), round(float(high), 4)],
        "n": n,
    }
