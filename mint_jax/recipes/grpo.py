"""Concurrent GRPO: many policies over one resident base, each with its own task, rank, loss and
optimizer.

A step of a policy samples prompts with its current adapter, computes rewards on the host, turns
them into advantages within each prompt (GRPO, arXiv 2402.03300), packs the completions, and updates
the adapter from their gradients. ``train.phases`` interleaves these phases over the policies.

Axes: Q prompts, G completions of a prompt.
"""

import dataclasses
import functools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mint_jax import host, multihost
from mint_jax.data.buckets import ShapeBook
from mint_jax.envs import scoring
from mint_jax.errors import UserError
from mint_jax.harness import report, start, workdir
from mint_jax.harness.recorder import Snapshot
from mint_jax.harness.start import say
from mint_jax.harness.training import TrainingRun
from mint_jax.models import base as base_lib
from mint_jax.models import router
from mint_jax.models.base import DTYPES, Base
from mint_jax.recipes import episodes
from mint_jax.recipes.options import GrpoSampling, GrpoSettings
from mint_jax.recipes.rollouts import (
    PolicySampler,
    Rollout,
    as_record,
    members_of,
    rollout_metrics,
)
from mint_jax.train import phases as phases_lib
from mint_jax.train.batch import Group
from mint_jax.train.trainer import Trainer


def run(config: GrpoSettings, folder: Path) -> dict[str, Any]:
    """Trains, exports and evaluates the policies; returns the result."""
    began = time.monotonic()
    phases_lib.check_workers(config.reward_workers)
    scoring.check_timeout(config.reward_timeout)
    workdir.claim(config, folder)
    units = phases_lib.units_of(list(config.policies), config.schedule, config.cohorts)
    job = ConcurrentGrpo(config, start.open_base(config))
    books = {name: job.book(names) for names in units for name in names}
    drawing = {name: member.sampling.drawing for name, member in job.members.items()}
    with TrainingRun(config, folder, job.trainer, books, drawing) as run:
        if run.is_finished:
            return run.result()
        with job.sampling_from(run.fixed, run.catalog):
            if not run.resumed:
                say("evaluating the policies on held-out prompts before training")
                run.notes = {
                    "before": (before := job.evaluate()),
                    "history": {name: [] for name in job.members},
                    "mismatch": {name: [] for name in job.members},
                    "spent": {"train_s": 0.0, "sampled_tokens": 0},
                }
                rewards = ", ".join(f"{name} {reward:.3f}" for name, (reward, _) in before.items())
                say(f"held-out reward before training: {rewards}")
            busy = train(config, job, run, units)
            revisions = run.close()
            after = job.evaluate()
    rows = result_rows(job, run, revisions, after)
    if multihost.is_main():
        before, first_and_last = run.notes["before"], {}
        for row in rows:
            name = row["name"]
            texts = before[name][1], after[name][1]
            report.completions(name, job.members[name].env.held_out, *texts, 2)
            first_and_last[name] = row["reward_before"], row["reward_after"]
        report.reward_curves(run.notes["history"], first_and_last, folder / "rewards.png")
    say(f"reward curves: {folder / 'rewards.png'}; revisions: {run.catalog.place}")
    return {
        "job": "grpo",
        "policies": rows,
        "schedule": config.schedule,
        "wall_s": round(time.monotonic() - began, 1),
        "train_s": round(run.notes["spent"]["train_s"], 1),
        "device_busy": round(busy, 3),
        "sampled_tokens": run.notes["spent"]["sampled_tokens"],
        "catalog": run.catalog.place,
        "rss_bytes": host.peak_rss_bytes(),
    }


def train(
    config: GrpoSettings, job: "ConcurrentGrpo", run: TrainingRun, units: list[list[str]]
) -> float:
    """The loop: each turn is one phase of one unit of policies. Returns the share of the time in
    which the devices were busy.
    """
    history, spent = run.notes["history"], dict(run.notes["spent"])
    clock, overlap = time.monotonic(), config.schedule != "sequential"
    how = overlap, config.reward_workers, job.watch.look
    with run.stepping(), phases_lib.Phases(units, run.step, config.steps, *how) as phases:
        for phase, unit in phases:
            if phase == phases_lib.ROLLOUT:  # sample; rewards are computed in other threads
                unit.score(job.reward, job.rollout(unit.names, unit.step))
                continue
            scored = unit.scored()
            drawn_by = {}
            if run.keeps_rollouts:
                drawn_by = {
                    name: drawn(run, name, rollout) for name, (rollout, _) in scored.items()
                }
            with run.updating():
                rows = job.update(scored)  # advantages, pack, gradients, update
                for name, adapter in drawn_by.items():
                    run.keep(name, unit.step, adapter, functools.partial(as_record, *scored[name]))
                for name, row in rows.items():
                    history[name].append(row["reward"])
                    run.notes["mismatch"][name].append([row["gap"], row.get("out_of_route")])
                run.notes["spent"] = {
                    "train_s": spent["train_s"] + time.monotonic() - clock,
                    "sampled_tokens": spent["sampled_tokens"] + job.tokens,
                }
                scores = {}
                if run.is_eval_step(unit.step):
                    scores = {
                        name: reward for name, (reward, _) in job.evaluate(unit.names).items()
                    }
                for name, score in scores.items():
                    rows[name]["held_out_reward"] = score
                rewards = " ".join(f"{n}={each[-1]:.2f}" for n, each in history.items() if each)
                speed = f"{job.tokens / (time.monotonic() - clock):.0f} sampled tokens/s"
                detail = f"step {unit.step + 1}: reward {rewards}, {speed}"
                run.record(unit.step, rows, detail, scores)  # metrics, export, checkpoint
    return phases.timing.busy


class ConcurrentGrpo(PolicySampler):
    """The phases of a step, for any subset of the policies. Of several processes all sample and
    update; the first draws the prompts and computes rewards.
    """

    def __init__(self, config: GrpoSettings, base: Base):
        members = members_of(config, base)
        policies = [member.config for member in members.values()]
        own = trainer_base(base, config)
        trainer = Trainer(own, policies, config.max_tokens_per_pass, config.remat)
        super().__init__(config, base, members, trainer)
        self.watch = scoring.Watch(config.reward_timeout)
        self._books: dict[tuple[str, ...], ShapeBook] = {}

    def book(self, names: Sequence[str]) -> ShapeBook:
        """Returns the padded sizes of a unit's updates. Padding decides the order of sums: with a
        book of its own, a unit's results do not depend on other policies.
        """
        return self._books.setdefault(tuple(sorted(names)), ShapeBook())

    def reward(self, name: str, rollout: Rollout) -> tuple[Rollout, np.ndarray]:
        """Returns rewards ``[Q, G]`` of a rollout, in a worker thread; only the first process
        computes them, and ``update`` shares them.
        """
        if not multihost.is_main():
            return rollout, np.zeros((0, 0))
        env, pairs = self.members[name].env, zip(rollout.examples, rollout.completions)
        rows = [[scoring.score(name, env, c.text or "", e) for c in group] for e, group in pairs]
        return rollout, np.array(rows, np.float64)

    def update(self, scored: dict[str, tuple[Rollout, np.ndarray]]) -> dict[str, dict[str, float]]:
        """Updates these policies from their scored rollouts; returns metrics by policy."""
        rewards = multihost.agree(
            "rewards", lambda: {n: r.tolist() for n, (_, r) in scored.items()}
        )
        samplings = {name: self.members[name].sampling for name in scored}
        groups, out = {}, {}
        for name, (rollout, _) in scored.items():
            rewards_QG = np.array(rewards[name], np.float64)
            groups[name] = rollout_groups(samplings[name], rollout, rewards_QG)
            out[name] = rollout_metrics(samplings[name], rollout, rewards_QG)
        for k in range(max(sampling.updates for sampling in samplings.values())):
            ready = {name: each for name, each in groups.items() if k < samplings[name].updates}
            for name, row in self.trainer.update(ready, self.book(list(scored))).items():
                out[name] |= row
        return out

    def evaluate(self, names: Sequence[str] | None = None) -> dict[str, tuple[float, list[str]]]:
        """Returns the mean held-out reward of policies as they are, and a completion of each
        prompt.
        """
        drawn = self.held_out(list(names or self.members))

        def judge() -> dict[str, tuple[float, list[str]]]:
            out = {}
            for name, groups in drawn.items():
                env = self.members[name].env
                pairs = [(c, e) for group, e in zip(groups, env.held_out) for c in group]
                rewards = [scoring.score(name, env, c.text or "", e) for c, e in pairs]
                out[name] = float(np.mean(rewards)), [group[0].text or "" for group in groups]
            return out

        return multihost.agree("held-out rewards", lambda: self.watch.over(judge))


def rollout_groups(sampling: GrpoSampling, rollout: Rollout, rewards_QG: np.ndarray) -> list[Group]:
    """Returns scored rollouts as groups to train on; see ``episodes.to_groups``."""
    made = []
    for prompt, completions in zip(rollout.prompts, rollout.completions):
        made.append([episodes.of_completion(prompt, c, sampling.temperature) for c in completions])
        if not sampling.replay:
            without = {"routes": None, "prompt_routes": None}
            made[-1] = [dataclasses.replace(one, **without) for one in made[-1]]
    how = sampling.baseline, sampling.divide_by_std, sampling.normalisation, sampling.max_tokens
    return episodes.to_groups(made, rewards_QG, *how)


def drawn(run: TrainingRun, name: str, rollout: Rollout) -> Snapshot | str:
    """Returns the adapter that drew a rollout, or its digest.

    Raises:
        RuntimeError: the policy was updated since.
    """
    if rollout.revision is not None:
        return rollout.revision
    snapshot = run.snapshot(name)
    if snapshot.version != rollout.version:
        raise RuntimeError(
            f"policy {name} is version {snapshot.version}, its rollouts are of version"
            f" {rollout.version}: none would be named"
        )
    return snapshot


def trainer_base(base: Base, config: GrpoSettings) -> Base:
    """Returns the trainer's base: the sampler's, unless the config studies a mismatch of the two.

    ``router_noise`` changes the weights of the trainer's routers. ``trainer_dtype`` and
    ``trainer_quantise`` load a second base, with its memory.

    Raises:
        UserError: noise for a base without experts.
    """
    dtype, quantise = config.trainer_dtype or config.dtype, config.trainer_quantise
    quantise = config.quantise if quantise is None else quantise
    if DTYPES.get(dtype) != base.dtype or quantise != config.quantise:
        how: Any = {"quantise": quantise, "kernels": base.cfg.kernels}
        base = base_lib.load(config.base, base.mesh, dtype, **how)
        size = f"{base.nbytes / 1e6:.0f} MB more"
        say(f"the trainer has a base of its own in {quantise or dtype}: {size}")
    if not (std := config.router_noise):
        return base
    if not base.cfg.routed:
        raise UserError(f"router_noise is {std}, but {base.name} has no experts: set it to 0")
    noisy = router.perturb(base.params, std, jax.random.key(config.seed))
    return dataclasses.replace(base, params=noisy)


def result_rows(
    job: ConcurrentGrpo,
    run: TrainingRun,
    revisions: dict[str, tuple[str, int]],
    after: dict[str, tuple[float, list[str]]],
) -> list[dict[str, Any]]:
    """Returns a policy's rewards, mismatch of trainer and sampler, size and revision, for each."""
    rows = []
    for name, (digest, number) in revisions.items():
        size, gaps = run.adapter_bytes(name), zip(*run.notes["mismatch"][name])
        gap, strays = gaps
        row = {
            "name": name,
            "rank": job.trainer.policies[name].adapter.rank,
            "reward_before": round(run.notes["before"][name][0], 4),
            "reward_after": round(after[name][0], 4),
            "gap": round(float(np.mean(gap)), 6),
        }
        if None not in strays:  # share of tokens that the trainer's routers would send elsewhere
            row["out_of_route"] = round(float(np.mean(strays)), 4)
        row |= {"adapter_bytes": size, "base_percent": round(100 * size / job.base.full_bytes, 3)}
        rows.append(row | {"revision": digest, "number": number})
    return rows
