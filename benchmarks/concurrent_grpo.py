"""Concurrent GRPO over one base: sequential, overlapped and batched schedules with equal work.

Every timed call starts from one training state and runs the same steps with the same seeds.
``reward_s`` adds the latency of a remote verifier in a second series (``ratio_P_waiting``), which
overlapping hides. ``busy`` is the share of time in which the devices work. The batched schedule's
peak memory is higher by the work in flight. ``ratio_stale`` is that of one policy whose rollouts
may be one update behind.
"""

import functools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

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
        job, overlap = self.job, self.name != "sequential"
        began, on_device, before = time.perf_counter(), 0.0, job.tokens
        first = dict.fromkeys(job.members, 0)
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


class _Series:
    """Series of schedules over one base, the first of which is sequential."""

    def __init__(self, config: Any):
        self.config, self.base = config, open_base(config)
        self.rollouts = int(config.policy.sampling.group_size)

    def __call__(
        self, count: int, schedules: Sequence[str], reward_s: float = 0.0, rollouts: int = 0
    ) -> dict[str, Any]:
        """Times of ``count`` policies by each schedule in turn."""
        config, rollouts = self.config, rollouts or self.rollouts
        job = make_grpo(_config_of(config, count, rollouts), self.base)
        sides = {name: _Side(job, name, config.steps, reward_s) for name in schedules}
        what = f"{count} policies, {rollouts} rollouts each, rewards take {reward_s} s"
        times = timing.in_turn(what, sides, config.n)
        speedup = {name: timing.ratio(times, schedules[0], name) for name in schedules}
        return {
            "seconds": timing.medians_of(times),
            "ratio": {name: speedup[name] for name in schedules[1:]},
            "speedup": speedup,
            "busy": {name: timing.median(side.busy[-config.n :]) for name, side in sides.items()},
            "tokens": {name: side.tokens for name, side in sides.items()},
        }


def run(config: Any, workdir: Path) -> dict[str, Any]:
    """Runs the bench; returns its report."""
    series = _Series(config)
    report: dict[str, Any] = {"base": series.base.name, "weights": series.base.weights}
    report |= {name: config[name] for name in ("steps", "reward_s", "crossover_policies")}
    at_once: dict[tuple[int, int], dict[str, Any]] = {}  # (policies, rollouts) -> series
    for count in sorted({*config.counts, *config.waiting}):
        found = report[f"policies_{count}"] = {}
        if count in config.counts:
            idle = at_once[count, series.rollouts] = series(count, config.schedules)
            found["rewards_at_once"] = idle
            report |= {f"ratio_{count}{_NAMED[name]}": x for name, x in idle["ratio"].items()}
        if count in config.waiting:
            waiting = series(count, phases_lib.SCHEDULES, config.reward_s)
            found["rewards_waiting"] = waiting
            named = {f"waiting{_NAMED[name]}": x for name, x in waiting["ratio"].items()}
            report |= {f"ratio_{count}_{name}": x for name, x in named.items()}
    for seconds in config.stale_rewards:
        one, key = series(1, ("sequential", _STALE), seconds), f"stale_{round(1000 * seconds)}_ms"
        report |= {key: one, f"ratio_{key}": one["ratio"][_STALE]}
    for count in config.memory:
        plain = _config_of(config, count, series.rollouts)
        report[f"memory_{count}"] = _memory(plain, config.memory_n)
    policies, report["crossover"] = config.crossover_policies, []
    for size in config.crossover:
        one = at_once.get((policies, size))
        one = one or series(policies, ("sequential", "batched"), rollouts=size)
        each = round(one["tokens"]["batched"] / config.steps / policies, 1)
        row = {"rollouts": size, "sampled_tokens_per_policy": each}
        report["crossover"].append(row | {"ratio": one["ratio"]["batched"]})
    return report


def _memory(config: dict[str, Any], n: int) -> dict[str, Any]:
    """Peak memory of the schedules, each in processes of its own: a process keeps what an earlier
    schedule made it take.
    """
    # the first may have compiled, which leaves holes in a heap that a later run does not have
    sides = {
        name: functools.partial(alone, _peak, config, name) for name in ("sequential", "batched")
    }
    peaks = timing.collect("peak memory", sides, n)
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
