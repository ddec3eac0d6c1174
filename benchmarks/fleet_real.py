"""A fleet of real engines on this machine: the front's cost, streams while an engine is killed, and
clients that go on under kills.

- ``choose_us``: the chooser's first choice.
- ``front_ms``: what the front adds to a request of one token, direct and through it in turn.
- ``gap_s``: the longest pause of a stream whose engine is killed in its middle (SIGKILL), and which
  another engine goes on with: ``killed``, one that has compiled all programs; ``killed_again``, one
  that was itself killed before and serves again, its programs not compiled yet.
- ``kills``: samples and training steps while an engine is killed every ``every_s`` seconds:
  errors that a client saw, texts and losses that differ from the undisturbed ones.
"""

import functools
import itertools
import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks import timing
from benchmarks.service_client import Served
from mint_jax.fleet.chooser import Load, choose

TOKENS = [5, 6, 7, 8, 9, 10]


def run(config: Any, workdir: Path) -> dict[str, Any]:
    """Runs the bench; returns its report."""
    os.environ["TINKER_TELEMETRY"] = "0"
    options = {"engines": config.engines}
    served = Served("mint_jax.launch", config.fleet, workdir / "fleet", options)
    try:
        fleet = _Fleet(served.ready(), config)
        return {
            "base": fleet.base,
            "engines": config.engines,
            "choose_us": {str(n): choose_us(n, config.calls) for n in config.members},
            "front_ms": fleet.front_ms(),
            "gap_s": fleet.gap_s(),
            "kills": fleet.under_kills(),
        }
    finally:
        served.stop()
        shutil.rmtree(workdir / "fleet")


class _Fleet:
    def __init__(self, url: str, config: Any):
        self.url, self.config = url, config
        self.base = next(one["id"] for one in httpx.get(f"{url}/v1/models").json()["data"])
        self.body = {"model": self.base, "prompt": "Count: one two three", "seed": 5}
        self.body |= {"temperature": 1.0, "ignore_eos": True, "max_tokens": config.tokens}

    def engines(self, state: str = "up") -> dict[str, Any]:
        """Returns the state of each engine, once all are up, or ready: every program compiled."""
        while True:
            found = httpx.get(f"{self.url}/debug/state", timeout=600).json()["engines"]
            if all(one[state] for one in found.values()):
                return found
            time.sleep(0.1)

    def front_ms(self) -> dict[str, Any]:
        """Returns the median milliseconds of a request, direct and through the front, by round."""
        body = self.body | {"max_tokens": 1}
        urls = {"direct": next(iter(self.engines().values()))["url"], "front": self.url}
        rounds: dict[str, list[float]] = {name: [] for name in [*urls, "added"]}
        with httpx.Client(timeout=60, trust_env=False) as client:

            def ask(url: str) -> None:
                client.post(f"{url}/v1/completions", json=body).raise_for_status()

            sides = {name: functools.partial(ask, url) for name, url in urls.items()}
            for _ in range(self.config.n):
                times = timing.in_turn("requests", sides, self.config.requests, warm=0)
                for name, seconds in times.items():
                    rounds[name].append(1e3 * float(np.median(seconds)))
                rounds["added"].append(rounds["front"][-1] - rounds["direct"][-1])
        return timing.medians_of(rounds)

    def _stream(self, when: int = -1) -> tuple[str, float]:
        """Returns a stream's text and its longest pause; kills its engine at chunk ``when``."""
        parts, last, longest = [], 0.0, 0.0
        body = self.body | {"stream": True}
        with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=600) as answer:
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                now = time.perf_counter()
                longest, last = max(longest, now - last if last else 0.0), now
                chunk = json.loads(line.removeprefix("data: "))
                parts.append(chunk["choices"][0]["text"])
                if len(parts) == when:
                    name = chunk["id"].removeprefix("cmpl-").partition(".")[0]
                    os.kill(self.pids[name], signal.SIGKILL)
        return "".join(parts), longest

    def gap_s(self) -> dict[str, Any]:
        """Returns the longest pauses of streams, undisturbed and with their engine killed."""
        states = {"killed": "ready", "killed_again": "up"}
        pauses: dict[str, list[float]] = {kind: [] for kind in ("undisturbed", *states)}
        for _ in timing.counted("streams", range(self.config.n)):
            self.engines("ready")
            text, pause = self._stream()
            pauses["undisturbed"].append(pause)
            for kind, state in states.items():
                self.pids = {name: one["pid"] for name, one in self.engines(state).items()}
                again, pause = self._stream(when=4)
                pauses[kind].append(pause)
                if again != text:
                    raise RuntimeError(f"the stream went on with {again!r}; expected {text!r}")
        return timing.medians_of(pauses)

    def _train(self) -> list[float]:
        """Returns the losses of a new policy."""
        import tinker
        from tinker import types

        inputs = {"target_tokens": np.array(TOKENS[1:]), "weights": np.ones(5, np.float32)}
        datum = types.Datum(types.ModelInput.from_ints(TOKENS[:-1]), inputs)
        client = tinker.ServiceClient(base_url=self.url, api_key="tml-bench")
        trainer = client.create_lora_training_client(self.base, 8, seed=3).result()
        losses = []
        for _ in range(self.config.steps):
            step = trainer.forward_backward([datum], "cross_entropy")
            trainer.optim_step(types.AdamParams(learning_rate=0.01)).result()
            losses.append(step.result().metrics["loss:sum"])
        return losses

    def under_kills(self) -> dict[str, Any]:
        """Returns counts of what clients saw while engines were killed in turn."""
        text, losses = self._stream()[0], self._train()
        kinds = "samples", "policies", "errors", "differing", "kills"
        counts: dict[str, Any] = dict.fromkeys(kinds, 0)
        done, lock = threading.Event(), threading.Lock()

        def go_on(what: str, work: Any, expected: Any) -> None:
            while not done.is_set():
                try:
                    kind = what if work() == expected else "differing"
                except Exception as error:
                    kind = "errors"
                    print(f"a client saw {error!r}", flush=True)
                with lock:
                    counts[kind] += 1

        work = [("samples", lambda: self._stream()[0], text)] * self.config.clients
        work += [("policies", self._train, losses)] * self.config.trainers
        clients = [threading.Thread(target=go_on, args=one) for one in work]
        for one in clients:
            one.start()
        names = itertools.cycle(sorted(self.engines()))
        for _ in timing.counted("kills", range(self.config.kills)):
            time.sleep(self.config.every_s)
            os.kill(self.engines()[next(names)]["pid"], signal.SIGKILL)
            counts["kills"] += 1
        self.engines()
        done.set()
        for one in clients:
            one.join()
        return counts


def choose_us(engines: int, calls: int) -> dict[str, Any]:
    """Measures the first choice in microseconds: for new digests, again for the same, with stale
    reports, and for the bare base.
    """
    rng, view = np.random.default_rng(0), {}
    digests = [f"{engines:032x}{i:032x}" for i in range(100_000)]
    for i in range(engines):
        kept = [digests[i] for i in rng.integers(0, len(digests), 2048)]
        count, wait_s = int(rng.integers(30)), float(rng.random()) / 10
        view[f"engine-{i:03d}"] = Load(0.0, count, wait_s, slots={*kept[:32]}, host={*kept})

    draw, names = itertools.count(), tuple(view)

    def timed(digests: list[Any], now: float) -> list[float]:
        firsts = (choose(digest, names, view, now, 1, next(draw)) for digest in digests)
        return [timing.seconds_of(lambda found=found: next(found)) for found in firsts]

    some = digests[:calls]
    found = {"new": timed(some, 1.0), "known": timed(some, 1.0), "stale": timed(some, 9.0)}
    return timing.medians_of(found | {"base": timed([None] * calls, 1.0)}, 1e6)
