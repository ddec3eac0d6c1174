"""Slowdown of decoding while a cold adapter loads.

``decode_pause_p99``: 99th percentile of a decode step during a cold load, over that without one.
Windows of steps alternate: quiet, loading, quiet. ``decode_loads`` counts the loads that began and
ended inside their windows; ``decode_noise_p99`` compares the two quiet windows.
"""

import contextlib
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
from mint_jax.residency.pool import PIECE_BYTES

PROMPT = 16  # positions in each row's cache


def _decoder(pause: Any, seed: int) -> Callable[[], Any]:
    """Returns a call that decodes one token of every row with a small model."""
    fields = {"num_heads": pause.d_model // 64, "num_kv_heads": pause.d_model // 64}
    fields |= {"d_ff": 4 * pause.d_model} | dict(pause)
    steps = Steps(random_base(shape(fields), jnp.float32), pause.rows, PROMPT + 1, seed)
    plan = jax.device_put(steps.plan([None] * pause.rows, {}, PROMPT))
    return lambda: steps.take({}, plan, 1)


def decode_pause(config: Any, files: Files) -> dict[str, Any]:
    """Decode steps with and without a cold load behind them, in windows that take turns."""
    pause = config.pause
    decode = _decoder(pause, config.seed)
    residency = residency_of(files.store, files.specs, 2)
    load(residency, files.digests[:1])  # compiles
    decode()
    seconds: list[float] = []  # of the loads

    def quiet() -> list[float]:
        return [timing.seconds_of(decode) for _ in range(pause.quiet)]

    def loading() -> list[float]:
        """Steps until one cold load has ended, in pieces between them."""
        digest = files.digests[(len(seconds) + 1) % len(files.digests)]
        forget(residency, [digest])
        began, steps = time.perf_counter(), []
        future = residency.acquire(digest)
        future.add_done_callback(lambda _: seconds.append(time.perf_counter() - began))
        while not future.done():
            if len(steps) == pause.longest:
                raise RuntimeError(
                    f"a cold load did not end within {pause.longest} decode steps: raise"
                    " config.pause.longest"
                )

            def step() -> None:
                residency.commit_ready(PIECE_BYTES)
                decode()

            steps.append(timing.seconds_of(step))
        future.result().release()
        return steps

    sides = {"quiet": quiet, "loading": loading, "again": quiet}
    with contextlib.closing(residency):
        windows = timing.collect("decode pause", sides, pause.windows, 0)
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
