"""Concurrent GRPO: many policies over one resident base, each with its own task, rank, loss and
optimizer.

A step of a policy samples prompts with its current adapter, computes rewards on the host, turns
them into advantages within each prompt (GRPO, arXiv 2402.03300), packs the completions, and updates
the adapter from their gradients. ``train.phases`` interleaves these phases over the policies.

Axes: Q prompts, G completions of a prompt.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mint_jax import host, multihost
from mint_jax.data.buckets import ShapeBook
from mint_jax.envs import scoring
from mint_jax.harness import report, start
from mint_jax.harness.options import GrpoSettings
from mint_jax.harness.start import say
from mint_jax.harness.training import TrainingRun
from mint_jax.models.base import Base
from mint_jax.recipes import in_flight, turns
from mint_jax.recipes.rollouts import (
    PolicySampler,
    Rollout,
    as_record,
    members_of,
    missing_prompts,
    rollout_groups,
    rollout_metrics,
    trained,
    trainer_base,
)
from mint_jax.train import phases as phases_lib
from mint_jax.train.trainer import Trainer


def run(config: GrpoSettings, folder: Path) -> dict[str, Any]:
    """Trains, exports and evaluates the policies; returns the result."""
    began = time.monotonic()
    units = phases_lib.units_of(list(config.policies), config.schedule, config.cohorts)
    with TrainingRun(config, folder) as run:
        job = ConcurrentGrpo(config, start.open_base(config))
        books = {name: job.book(names) for names in units for name in names}
        drawing = {
            name: m.sampling.drawing | ({"max_turns": m.sampling.max_turns} if m.converses else {})
            for name, m in job.members.items()
        }
        run.begin(job.trainer, books, drawing)
        if (finished := run.finished()) is not None:
            return finished
        with job.sampling_from(run.fixed, run.catalog, run.snapshot):
            if not run.resumed:
                say("evaluating the policies on held-out prompts before training")
                run.notes = {"before": (before := job.evaluate()), "train_s": 0.0}
                rewards = ", ".join(f"{name} {reward:.3f}" for name, reward in before.items())
                say(f"held-out reward before training: {rewards}")
            busy = train(config, job, run, units)
            revisions = run.close()
            after = job.evaluate()
    rows = run.rows()
    if multihost.is_main():
        held_out = {name: (run.notes["before"][name], after[name]) for name in after}
        report.curves(rows, "reward", folder / "rewards.png", held_out)
    say(f"reward curves: {folder / 'rewards.png'}; revisions: {run.catalog.place}")
    return {
        "job": "grpo",
        "policies": [
            result_row(job, run, name, rows[name], after[name]) | {"revision": digest, "number": n}
            for name, (digest, n) in revisions.items()
        ],
        "schedule": config.schedule,
        "wall_s": round(time.monotonic() - began, 1),
        "train_s": round(run.notes["train_s"], 1),
        "device_busy": round(busy, 3),
        "sampled_tokens": sum(row["sampled_tokens"] for each in rows.values() for row in each),
        "catalog": run.catalog.place,
        "rss_bytes": host.peak_rss_bytes(),
    }


def train(
    config: GrpoSettings, job: "ConcurrentGrpo", run: TrainingRun, units: list[list[str]]
) -> float:
    """The loop: each turn is one phase of one unit of policies. Returns the share of the time in
    which the devices were busy.
    """
    rewards: dict[str, float] = {}
    earlier, clock, ahead = run.notes["train_s"], time.monotonic(), config.max_staleness
    how = config.schedule != "sequential", config.reward_workers, job.watch.look, ahead, job.goes_on
    with run.stepping(), phases_lib.Phases(units, run.step, config.steps, *how) as phases:
        stale = in_flight.InFlight(run, job, phases.units)
        for phase, unit in phases:
            if phase == phases_lib.ROLLOUT:  # sample; rewards are computed in other threads
                unit.score(job.reward, *job.next_rollout(unit))
                continue
            scored = unit.scored()
            if further := job.further(scored, unit.step, unit.step - unit.done):
                unit.score(job.reward, further)
                continue
            with run.updating():
                for name, made in scored.items():
                    run.keep(name, unit.step, lambda made=made: as_record(*made))
                rows = job.update(scored)  # advantages, pack, gradients, update
                stale.measure(scored, unit.step, rows)
                scores = {}
                if run.is_eval_step(unit.step):
                    scores = job.evaluate(unit.names)
                    for name, score in scores.items():
                        rows[name]["held_out_reward"] = score
                rewards |= {name: row["reward"] for name, row in rows.items()}
                seconds = time.monotonic() - clock
                run.notes["train_s"] = earlier + seconds
                shown = " ".join(f"{name}={reward:.2f}" for name, reward in rewards.items())
                speed = f"{job.tokens / seconds:.0f} sampled tokens/s"
                detail = f"step {unit.step + 1}: reward {shown}, {speed}"
                run.record(unit.step, rows, detail, scores)  # metrics, export, checkpoint
    return phases.busy


class ConcurrentGrpo(PolicySampler):
    """The phases of a step, for any subset of the policies. All processes sample and update; the
    first draws the prompts and computes rewards.
    """

    def __init__(self, config: GrpoSettings, base: Base):
        members = members_of(config, base)
        policies = [member.config for member in members.values()]
        how = config.max_tokens_per_pass, config.remat
        trainer = Trainer(trainer_base(base, config), policies, *how)
        super().__init__(config, base, members, trainer)
        self.watch = scoring.Watch(config.reward_timeout)
        if self.score_in_processes():  # which have the timeout
            self.watch.timeout_s = 0.0
        self._books: dict[tuple[str, ...], ShapeBook] = {}

    def book(self, names: Sequence[str]) -> ShapeBook:
        """Returns the padded sizes of a unit's updates. Padding decides the order of sums: with a
        book of its own, a unit's results do not depend on other policies.
        """
        return self._books.setdefault(tuple(sorted(names)), ShapeBook())

    def reward(self, name: str, rollout: Rollout) -> tuple[Rollout, np.ndarray]:
        """Returns rewards ``[Q, G]`` of a rollout, as ``turns.reward``; ``update`` shares them."""
        return turns.reward(self, name, rollout)

    def next_rollout(
        self, unit: phases_lib.Unit
    ) -> tuple[dict[str, Rollout], dict[int, dict[str, Rollout]]]:
        """Samples the prompts of a step, and in the same call the next part of partial rollouts of
        earlier steps, if they go on; returns both, the latter by step.
        """
        unfinished = {
            (step, name): rollout
            for step, rollouts in unit.in_flight().items()
            for name, rollout in rollouts.items()
            if self.members[name].part and self._goes_on(name, rollout, step - unit.done)
        }
        new, grown = self.draw(unit.names, unit.step, unfinished=unfinished)
        steps = {step: {n: r for (k, n), r in grown.items() if k == step} for step, _ in grown}
        return new, steps

    def goes_on(self, rollouts: Mapping[str, Rollout], left: int) -> bool:
        """Returns whether completions have a further turn or part before the next update, ``left``
        updates before their own: with ``max_staleness`` these are spread over the updates.
        """
        return any(self._goes_on(name, rollout, left) for name, rollout in rollouts.items())

    def _goes_on(self, name: str, rollout: Rollout, left: int) -> bool:
        turns = (self.config.max_staleness + 1 - left) * self.members[name].turns_at_once
        return rollout.is_open and (not left or rollout.turns < turns)

    def further(
        self, scored: dict[str, tuple[Rollout, np.ndarray]], step: int, left: int
    ) -> dict[str, Rollout]:
        """Samples the next turn or part of completions that go on, else prompts in place of those
        from which a policy would learn nothing, if it resamples. Returns the rollouts of all these
        policies, or none if nothing is to be drawn. ``left``: see ``goes_on``.
        """
        going = {n: one for n, one in scored.items() if self._goes_on(n, one[0], left)}
        partial = {(step, n): r for n, (r, _) in going.items() if self.members[n].part}
        parts = self.draw([], step, unfinished=partial)[1] if partial else {}
        drawn = {n: r for (_, n), r in parts.items()}
        if drawn := drawn | turns.next_turns(self, {n: going[n] for n in going.keys() - drawn}):
            ended = {n: one for n, one in scored.items() if not one[0].is_open}
            known = turns.shared(ended) if ended else {}
            ended = {n: r.extended(None, known[n]) for n, (r, _) in ended.items()}
            went_on = {n: r.marked(self.drawer(n)) for n, r in drawn.items()}
            return {n: r for n, (r, _) in scored.items()} | ended | went_on
        if not any(self.members[name].sampling.resample for name in scored):
            return {}
        known, spans = turns.shared(scored), dict[str, range]()
        for name, (rollout, _) in scored.items():
            member, first = self.members[name], len(rollout.prompts)
            available = len(member.chosen(step)) + len(member.further(step))
            made = member.sampling, rollout, np.array(known[name], np.float64)
            if more := missing_prompts(*made, available):
                spans[name] = range(first, first + more)
        if not spans:
            return {}
        new = self.rollout(list(spans), step, spans)
        return {
            name: rollout.extended(new.get(name), known[name])
            for name, (rollout, _) in scored.items()
        }

    def update(self, scored: dict[str, tuple[Rollout, np.ndarray]]) -> dict[str, dict[str, float]]:
        """Updates these policies from their scored rollouts; returns metrics by policy."""
        if self.engine.keep_cache:
            self.engine.release()
        rewards = turns.shared(scored)
        samplings = {name: self.members[name].sampling for name in scored}
        groups, out = {}, {}
        for name, (rollout, _) in scored.items():
            rewards_QG = np.array(rewards[name], np.float64)
            chosen = trained(samplings[name], rollout, rewards_QG)
            groups[name] = rollout_groups(samplings[name], *chosen)
            out[name] = rollout_metrics(samplings[name], rollout, rewards_QG)
        for k in range(max(sampling.updates for sampling in samplings.values())):
            ready = {name: each for name, each in groups.items() if k < samplings[name].updates}
            for name, row in self.trainer.update(ready, self.book(list(scored))).items():
                out[name] |= row
        return out

    def evaluate(self, names: Sequence[str] | None = None) -> dict[str, float]:
        """Returns the mean held-out rewards of policies as they are."""
        scored = turns.played(self, self.held_out(list(names or self.members)), self.watch)
        return {name: float(np.nanmean(rewards)) for name, (_, rewards) in scored.items()}


def result_row(
    job: "ConcurrentGrpo", run: TrainingRun, name: str, rows: list[dict[str, Any]], after: float
) -> dict[str, Any]:
    """Returns a policy's rewards, mismatch of trainer and sampler, size and revision."""
    size = run.adapter_bytes(name)
    row = {
        "name": name,
        "rank": job.trainer.policies[name].adapter.rank,
        "reward_before": round(run.notes["before"][name], 4),
        "reward_after": round(after, 4),
    }
    # out_of_route: share of tokens that the trainer's routers would send elsewhere
    for metric, digits in (("gap", 6), ("out_of_route", 4)):
        if metric in rows[0]:
            row[metric] = round(float(np.mean([one[metric] for one in rows])), digits)
    return row | {"adapter_bytes": size, "base_percent": round(100 * size / job.base.full_bytes, 3)}
