"""What cold loads cost those who decode meanwhile.

``decode_pause_p99``: the 99th percentile of a decode step of a small model, commit included, while cold loads go on, over
that without. Short windows of steps take turns: quiet, loading, and quiet once more; ``decode_noise_p99``, the second quiet
ones over the first, is what the machine makes of no difference at all.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from mint_jax import mesh as mesh_lib
from mint_jax import params as params_lib
from mint_jax.bench.packed_files import Files
from mint_jax.bench.packed_store import load, residency_of
from mint_jax.metrics import Progress
from mint_jax.models import transformer
from mint_jax.models.config import ModelConfig
from mint_jax.rollout import generate as program
from mint_jax.rollout.sample import SamplingParams


class _Decoder:
    """A small model that decodes one token of every row at each call."""

    def __init__(self, pause: Any, seed: int):
        head_dim = 64
        heads = pause.d_model // head_dim
        self.cfg = ModelConfig(
            "qwen3",
            pause.vocab_size,
            pause.d_model,
            pause.layers,
            heads,
            heads,
            head_dim,
            4 * pause.d_model,
            tie_embeddings=True,
            qk_norm=True,
        )
        self.params = params_lib.init(transformer.abstract(self.cfg), jax.random.key(seed))
        rows, self.new = pause.rows, pause.window + 2
        self.prompts = np.random.default_rng(seed).integers(3, pause.vocab_size, (rows, 16)).astype(np.int32)
        self.lengths = np.full((rows,), 16, np.int32)
        zeros = np.zeros((rows,), np.float32)
        self.sampling = SamplingParams(zeros, np.zeros((rows,), np.int32), zeros + 1, zeros, np.zeros((rows,), np.uint32))  # type: ignore[arg-type]
        self.limits = program.Limits(np.full((rows,), self.new, np.int32), np.full((rows, 1), -1, np.int32))  # type: ignore[arg-type]
        self.mesh = mesh_lib.single_device_mesh()

    def steps(self, count: int, between: Callable[[], Any]) -> list[float]:
        """Seconds of each of ``count`` steps, ``between`` included."""
        out = []
        with jax.set_mesh(self.mesh):
            room = {"cfg": self.cfg, "rollouts": 1, "new_tokens": self.new}
            cache, state, _ = program.prefill(self.params, None, self.prompts, self.lengths, self.sampling, self.limits, **room)
            jax.block_until_ready(state)
            for _ in range(count):
                began = time.perf_counter()
                between()
                args = self.params, None, cache, self.lengths, state, self.sampling, self.limits, np.int32(1)
                state = jax.block_until_ready(program.decode(*args, cfg=self.cfg))
                out.append(time.perf_counter() - began)
        return out


def decode_pause(config: Any, files: Files) -> dict[str, Any]:
    """Decode steps with and without cold loads behind them, in short windows that take turns."""
    pause, bucket = config.pause, files.config.bucket
    decoder = _Decoder(pause, config.seed)
    residency = residency_of(files.store, files.specs, {bucket: 2}, config, pause.piece_bytes, workers=1, niceness=19)
    load(residency, files.digests[:1])  # compiles
    decoder.steps(3, lambda: None)
    loading, stop, loaded = threading.Event(), threading.Event(), 0
    failed: list[BaseException] = []

    def requests() -> None:
        """Asks for one cold revision after the other while ``loading`` is set."""
        nonlocal loaded
        try:
            while not stop.is_set():
                if not loading.wait(0.05):
                    continue
                digest = files.digests[(loaded + 1) % len(files.digests)]
                residency.drop(digest)
                residency.acquire(digest).result().release()
                loaded += 1
        except BaseException as error:
            if not stop.is_set():  # else the bench is over, and residency closed
                failed.append(error)

    client = threading.Thread(target=requests, daemon=True)
    client.start()
    times: dict[str, list[float]] = {"quiet": [], "loading": [], "again": []}
    progress = Progress("decode pause", pause.windows)
    for k in range(pause.windows):
        for name in times:
            if name == "loading":
                loading.set()
            times[name] += decoder.steps(pause.window, lambda: residency.commit_ready(budget_bytes=pause.piece_bytes))
            loading.clear()
            while residency.state()["loads"]["unfinished"]:  # not part of the quiet window that follows
                residency.commit_ready()
        progress.update(k + 1, f"{loaded} cold loads")
        if failed:
            raise failed[0]
    stop.set()
    residency.close()
    client.join(10)
    if not loaded:
        raise RuntimeError("no cold load ended in its windows, so nothing was measured: lengthen config.pause.window")

    def ratio(name: str, q: float) -> float:
        return round(float(np.percentile(times[name], q) / np.percentile(times["quiet"], q)), 3)

    return {
        "decode_pause_p99": ratio("loading", 99),
        "decode_pause_p50": ratio("loading", 50),
        "decode_noise_p99": ratio("again", 99),
        "decode_noise_p50": ratio("again", 50),
        "decode_step_ms": {
            name: {f"p{q}": round(1e3 * float(np.percentile(values, q)), 2) for q in (50, 99)} for name, values in times.items()
        },
        "decode_steps": len(times["loading"]),
        "decode_loads": loaded,
    }
