"""Concurrent GRPO over one base: sequential, overlapped and batched schedules with equal work.

Every timed call starts from one training state and runs the same steps with the same seeds.
``reward_s`` adds the latency of a remote verifier in a second series (``ratio_P_waiting``), which
overlapping hides. ``busy`` is the share of time in which the devices work. The batched schedule's
peak memory is higher by the work in flight. ``ratio_stale`` is that of one policy whose rollouts
may be one update behind.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import timing
from benchmarks.alone import alone
from benchmarks.bases import make_grpo, open_base
from mint_jax import host
from mint_jax.models.base import cache_dir
from mint_jax.train import phases as phases_lib

_NAMED = {"overlapped": "_overlapped", "batched": ""}
_STALE = "stale"  # batched, with max_staleness 1


def _config_of(config: Any, count: int, rollouts: int) -> dict[str, Any]:
    """The bench's config as the plain one of a GRPO job with ``count`` policies."""
    policy = config.policy.to_dict()
    policy["sampling"]["group_size"] = rollouts
    return config.to_dict() | {"policies": {f"p{i}": policy for i in range(count)}}


class _Side:
    """One schedule as a call that can be repeated: same state, same steps, every time."""

    def __init__(self, job: Any, name: str, steps: int, reward_s: float):
        self.job, self.name, self.steps, self.reward_s = job, name, steps, reward_s
        self.ahead = int(name == _STALE)
        self.units = phases_lib.units_of(list(job.members), "batched" if self.ahead else name)
        self.start = jax.tree.map(jnp.copy, job.trainer.state)
        self.tokens = 0
        self.busy: list[float] = []  # of each call

    def reward(self, name: str, rollout: Any) -> Any:
        time.sleep(self.reward_s)
        return self.job.reward(name, rollout)

    def __call__(self) -> None:
        self.reset()
        self.run()

    def reset(self) -> None:
        """Back to the state that every call starts from."""
        # first, or three states at once would be the peak of every schedule
        self.job.trainer.state = {}
        self.job.trainer.state = jax.block_until_ready(jax.tree.map(jnp.copy, self.start))

    def run(self) -> None:
        """The steps of a call."""
        job = self.job
        began, on_device = time.perf_counter(), 0.0
        before = job.tokens
        first = dict.fromkeys(job.members, 0)
        overlap = self.name != "sequential"
        how: Any = {"workers": len(first), "ahead": self.ahead}
        with phases_lib.Phases(self.units, first, self.steps, overlap, **how) as phases:
            for phase, unit in phases:
                since = time.perf_counter()
                if phase == phases_lib.ROLLOUT:
                    samples = job.rollout(unit.names, unit.step)
                    on_device += time.perf_counter() - since
                    unit.score(self.reward, samples)
                else:
                    job.update(unit.scored())
                    on_device += time.perf_counter() - since
        jax.block_until_ready(job.trainer.state)
        self.busy.append(on_device / (time.perf_counter() - began))
        self.tokens = job.tokens - before

    def result(self) -> dict[str, Any]:
        return {name: self.job.trainer.adapter(name) for name in self.job.members}


def _distance(a: Any, b: Any) -> float:
    """Largest difference of any entry of any factor."""
    worst = max(float(np.abs(x - y).max()) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)))
    return float(f"{worst:.2g}")


def _series(
    config: Any, job: Any, schedules: tuple[str, ...], reward_s: float, what: str
) -> dict[str, Any]:
    sides = {name: _Side(job, name, config.steps, reward_s) for name in schedules}
    results: dict[str, Any] = {}

    def timed(name: str) -> Callable[[], None]:
        def call() -> None:
            sides[name]()
            results[name] = sides[name].result()

        return call

    times = timing.in_turn(what, {name: timed(name) for name in schedules}, config.n)
    slowest = "sequential"
    return {
        "seconds": timing.medians_of(times),
        "ratio": {
            name: timing.ratio(times, slowest, name) for name in schedules if name != slowest
        },
        "speedup": {name: timing.ratio(times, slowest, name) for name in schedules},
        "busy": {name: timing.median(side.busy[-config.n :]) for name, side in sides.items()},
        "tokens": {name: side.tokens for name, side in sides.items()},
        "max_difference": {
            name: _distance(results[slowest], results[name])
            for name in schedules
            if name != slowest
        },
    }


def run(config: Any, workdir: Path) -> dict[str, Any]:
    """Runs the bench; returns its report."""
    base = open_base(config)
    report: dict[str, Any] = {"base": base.name, "weights": base.weights, "steps": config.steps}
    rollouts = int(config.policy.sampling.group_size)
    # (policies, rollouts) -> series whose rewards take no time
    alone: dict[tuple[int, int], dict[str, Any]] = {}
    for count in sorted({*config.counts, *config.waiting}):
        job = make_grpo(_config_of(config, count, rollouts), base)
        report[f"policies_{count}"] = {}
        if count in config.counts:
            idle = alone[count, rollouts] = _series(
                config, job, tuple(config.schedules), 0.0, f"{count} policies"
            )
            report |= {
                f"ratio_{count}{_NAMED[name]}": ratio for name, ratio in idle["ratio"].items()
            }
            report[f"policies_{count}"]["rewards_at_once"] = idle
        if count in config.waiting:
            what = f"{count} policies, rewards take {config.reward_s} s"
            waiting = _series(config, job, phases_lib.SCHEDULES, config.reward_s, what)
            report |= {
                f"ratio_{count}_waiting{_NAMED[name]}": ratio
                for name, ratio in waiting["ratio"].items()
            }
            report[f"policies_{count}"]["rewards_waiting"] = waiting
    report["reward_s"] = config.reward_s
    for seconds in config.stale_rewards:
        job = make_grpo(_config_of(config, 1, rollouts), base)
        what = f"1 policy, rewards take {seconds} s"
        one = _series(config, job, ("sequential", _STALE), seconds, what)
        key = f"stale_{round(1000 * seconds)}_ms"
        report |= {key: one, f"ratio_{key}": one["ratio"][_STALE]}
    for count in config.memory:
        report[f"memory_{count}"] = _memory(_config_of(config, count, rollouts), config.memory_n)

    curve = []
    for size in config.crossover:
        policies = config.crossover_policies
        if (policies, size) not in alone:
            job = make_grpo(_config_of(config, policies, size), base)
            what = f"{policies} policies, {size} rollouts each"
            alone[policies, size] = _series(config, job, ("sequential", "batched"), 0.0, what)
        one = alone[policies, size]
        each = round(one["tokens"]["batched"] / config.steps / policies, 1)
        row = {"rollouts": size, "sampled_tokens_per_policy": each}
        curve.append(row | {"ratio": one["ratio"]["batched"]})
    report["crossover_policies"], report["crossover"] = config.crossover_policies, curve
    return report


def _memory(config: dict[str, Any], n: int) -> dict[str, Any]:
    """Peak memory of the schedules, each in processes of its own: a process keeps what an earlier
    schedule made it take.
    """
    peaks: dict[str, list[float]] = {"sequential": [], "batched": []}
    for turn in range(n + 1):
        for name, values in peaks.items():
            peak = alone(_peak, config, name)
            # the first may have compiled, which leaves holes in a heap that a later run does not
            # have
            if turn:
                values.append(peak)
    return {
        "peak_bytes": timing.medians_of(peaks),
        "peak_memory_ratio": timing.ratio(peaks, "batched", "sequential"),
    }


def _peak(config: dict[str, Any], name: str) -> int:
    """Peak bytes of one schedule: of the device where it counts them, of the process where the host
    is the device.
    """
    host.keep_freed_memory()
    host.run_in_the_calling_thread()
    host.use_compilation_cache(cache_dir() / "compiled")
    side = _Side(make_grpo(config, open_base(config)), name, config["steps"], 0.0)
    for _ in range(2):  # the first call may compile
        side.reset()
        host.give_back_freed_memory()  # the copies', which are the bench's
        host.reset_peak_rss()
        side.run()
    stats = jax.local_devices()[0].memory_stats()
    return int(stats["peak_bytes_in_use"]) if stats else host.peak_rss_bytes()
