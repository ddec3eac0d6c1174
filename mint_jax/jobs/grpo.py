"""Concurrent GRPO: many policies, each with its own task, rank, loss and optimizer, over one
resident base.

A step of a policy is: sample its prompts with its current adapter, score the completions on the
host, update from the group-normalised advantages (GRPO, arXiv 2402.03300). ``schedule`` says how
steps of different policies share the devices.
"""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mint_jax import host, metrics, multihost
from mint_jax.catalog.rollouts import Rollouts
from mint_jax.data.buckets import ShapeBook
from mint_jax.envs import env as env_lib
from mint_jax.envs import scoring
from mint_jax.envs.env import Environment, Example
from mint_jax.errors import UserError
from mint_jax.jobs import adapters, common, episodes, report, settings
from mint_jax.jobs.catalogs import JobCatalog
from mint_jax.jobs.common import Config
from mint_jax.jobs.options import GrpoSampling
from mint_jax.jobs.recorder import Snapshot
from mint_jax.jobs.training import TrainingRun
from mint_jax.lora.tree import Slot, Stacks
from mint_jax.models import base as base_lib
from mint_jax.models import router
from mint_jax.models.base import DTYPES, Base
from mint_jax.residency.pool import ResidentAdapters
from mint_jax.rollout.engine import Engine
from mint_jax.rollout.request import Completion, Request
from mint_jax.train import advantages
from mint_jax.train import phases as phases_lib
from mint_jax.train.batch import Group
from mint_jax.train.trainer import Trainer


@dataclasses.dataclass
class Member(common.PolicyData):
    """One policy of the run: prompts as token ids, its task, and how it samples it."""

    env: Environment
    sampling: GrpoSampling


def members_of(config: Config, base: Base) -> list[Member]:
    """The policies' tasks, with every prompt encoded and checked against the context before
    anything runs.
    """
    members = []
    for name, section in config.policies.items():
        options = dict(section.env)
        environment = env_lib.make(options.pop("name"), **options)
        sampling = common.build(
            GrpoSampling, section.get("sampling", {}), f"policies.{name}.sampling"
        )
        prompts = [common.encode(base, e.messages) for e in environment.train]
        held_out = [
            common.encode(base, e.messages) for e in environment.held_out[: config.eval.examples]
        ]
        longest = max(map(len, prompts + held_out))
        if longest + sampling.max_tokens > base.cfg.context:
            raise UserError(
                f"policy {name!r}: a prompt of {longest} tokens and max_tokens"
                f" {sampling.max_tokens} exceed the context of {base.cfg.context}: lower max_tokens"
                " or drop long prompts"
            )
        members.append(
            Member(
                name,
                common.seed_of(config, name),
                prompts,
                held_out,
                sampling.prompts,
                environment,
                sampling,
            )
        )
    if not members:
        raise UserError("policies is empty: give the config at least one policy")
    multihost.require_same("the prompts", lambda: [[m.train, m.held_out] for m in members])
    return members


@dataclasses.dataclass
class Rollout:
    """Samples of one policy's step: examples, prompts and completions in the same order.

    ``revision``: digest of the fixed revision that drew them; None where the policy itself did,
    whose ``version`` it was.
    """

    examples: list[Example]
    prompts: list[list[int]]
    completions: list[list[Completion]]
    revision: str | None = None
    version: int | None = None


class ConcurrentGrpo:
    """The three phases of a step for any subset of the policies.

    Where several processes run, all of them sample and update; the first alone draws the prompts
    and computes rewards.
    """

    def __init__(self, config: Config, base: Base):
        self.config, self.base = config, base
        self.members = {m.name: m for m in members_of(config, base)}
        policies = [
            common.policy_config(n, config.policies[n], m.seed) for n, m in self.members.items()
        ]
        self.trainer = Trainer(
            trained_through(base, config), policies, config.max_tokens_per_pass, config.remat
        )
        tokenizer = base.need_tokenizer()
        replay = base.cfg.routed and any(m.sampling.replay for m in self.members.values())
        cache_bytes = common.cache_bytes(config)
        self.engine = Engine(
            base,
            tokenizer.decode,
            config.max_rows,
            keep_routes=replay,
            cache_bytes=cache_bytes,
            keep_cache=False,
        )
        self.stop_ids = tokenizer.eos_ids
        self.tokens = 0  # sampled in this process
        self.watch = scoring.Watch(config.reward_timeout)
        # policy -> what its rollouts are drawn from, where that is another adapter
        self.fixed: dict[str, str] = {}
        # where those are, and their digests by policy
        self._held, self._revisions = ResidentAdapters({}, {}), dict[str, str]()
        self._books: dict[tuple[str, ...], ShapeBook] = {}

    def book(self, names: Sequence[str]) -> ShapeBook:
        """The padded sizes of updates of policies that work together.

        Padding decides the order of sums. Each unit has a book of its own: what it computes follows
        from its own steps, whatever other policies are in training and whichever rewards come
        first.
        """
        return self._books.setdefault(tuple(sorted(names)), ShapeBook())

    @contextlib.contextmanager
    def sampling_from(self, fixed: dict[str, str], catalog: JobCatalog) -> Iterator[None]:
        """In this block rollouts of these policies are drawn from revisions that stay as they are,
        beside the training slots.

        Args:
            fixed: digest or PEFT directory, by policy.
        """
        with (
            adapters.pool_of(self.base, list(fixed.values()), catalog, max(1, len(fixed))) as pool,
            pool.hold(fixed.values()) as held,
        ):
            self.fixed, self._held = fixed, held
            self._revisions = {name: pool.digests[text] for name, text in fixed.items()}
            try:
                yield
            finally:
                self.fixed, self._held, self._revisions = {}, ResidentAdapters({}, {}), {}

    def rollout(self, names: Sequence[str], step: int) -> dict[str, Rollout]:
        """Samples all these policies' prompts: in one engine call, and one more for those that
        sample from fixed revisions.
        """
        order = multihost.agree(
            "data order", lambda: {name: self._draw(name, step) for name in names}
        )
        fixed = {name: self._held.slots[text] for name, text in self.fixed.items()}
        out = self._sample(
            [n for n in names if n not in fixed], order, self.trainer.slots, self.trainer.stacks
        )
        out |= self._sample([n for n in names if n in fixed], order, fixed, self._held.stacks)
        return {name: out[name] for name in names}

    def _sample(
        self,
        names: Sequence[str],
        order: dict[str, list[tuple[int, int]]],
        slots: dict[str, Slot],
        stacks: Stacks,
    ) -> dict[str, Rollout]:
        out = {name: Rollout([], [], [], **self._drawn_by(name)) for name in names}
        requests, owners = [], []
        for name in names:
            m = self.members[name]
            for index, seed in order[name]:
                adapter, prompt = slots[name], tuple(m.train[index])
                fields = {
                    "adapter": adapter,
                    "n": m.sampling.group_size,
                    "seed": seed,
                    "stop_ids": self.stop_ids,
                } | self._drawn_by(name)
                requests.append(Request(**m.sampling.drawing, prompt=prompt, **fields))
                out[name].examples.append(m.env.train[index])
                out[name].prompts.append(m.train[index])
                owners.append(name)
        for name, completions in zip(owners, self.engine.generate(requests, stacks)):
            out[name].completions.append(completions)
            self.tokens += sum(len(c.tokens) for c in completions)
        return out

    def _drawn_by(self, name: str) -> dict[str, Any]:
        """What names the weights that draw a policy's rollouts now: a fixed revision's digest, or
        the policy's version.
        """
        return (
            {"revision": self._revisions[name]}
            if name in self._revisions
            else {"version": self.trainer.versions[name]}
        )

    def _draw(self, name: str, step: int) -> list[tuple[int, int]]:
        """Which prompts a policy samples in a step, and the seed of each."""
        m = self.members[name]
        chosen = m.chosen(step)
        seeds = np.random.SeedSequence([m.seed, step]).generate_state(len(chosen))
        return list(zip(chosen, seeds.tolist()))

    def reward(self, name: str, rollout: Rollout) -> tuple[Rollout, np.ndarray]:
        """Rewards ``[Q, G]`` of a rollout, in a worker thread; none but on process 0, whose rewards
        ``update`` uses everywhere.
        """
        if not multihost.is_main():
            return rollout, np.zeros((0, 0))
        env = self.members[name].env
        rows = [
            [checked_reward(name, env, c, e) for c in group]
            for e, group in zip(rollout.examples, rollout.completions)
        ]
        return rollout, np.array(rows, np.float64)

    def update(self, scored: dict[str, tuple[Rollout, np.ndarray]]) -> dict[str, dict[str, float]]:
        """One or more optimizer updates of these policies from their scored rollouts; metrics per
        policy.
        """
        agreed = multihost.agree(
            "rewards", lambda: {name: rewards.tolist() for name, (_, rewards) in scored.items()}
        )
        scored = {
            name: (rollout, np.array(agreed[name], np.float64))
            for name, (rollout, _) in scored.items()
        }
        groups = {
            name: rollout_groups(self.members[name].sampling, *scored[name]) for name in scored
        }
        out: dict[str, dict[str, float]] = {}
        shapes = self.book(list(scored))
        for k in range(max(self.members[n].sampling.updates for n in scored)):
            out |= self.trainer.update(
                {n: g for n, g in groups.items() if k < self.members[n].sampling.updates}, shapes
            )
        for name, (rollout, rewards) in scored.items():
            out[name] |= rollout_metrics(self.members[name].sampling, rollout, rewards)
        return out

    def evaluate(self, names: Sequence[str] | None = None) -> dict[str, tuple[float, list[str]]]:
        """Held-out reward of these policies as they are, of all by default, and one completion a
        prompt.

        The reward is the mean over ``eval.samples`` samples a prompt, drawn as in training with
        seeds of their own.
        """
        requests, owners = [], []
        n = self.config.eval.samples
        members = {name: self.members[name] for name in names or self.members}
        for name, m in members.items():
            where = {
                "adapter": self.trainer.slots[name],
                "version": self.trainer.versions[name],
                "stop_ids": self.stop_ids,
            }
            for i, prompt in enumerate(m.held_out):
                requests.append(
                    Request(**m.sampling.drawing, prompt=tuple(prompt), n=n, seed=i * n, **where)
                )
                owners.append((name, i))
        progress = metrics.Progress("evaluating", len(requests))
        results = self.engine.generate(
            requests, self.trainer.stacks, lambda done, _: progress.update(done, "prompts")
        )

        def judge() -> dict[str, tuple[float, list[str]]]:
            rewards: dict[str, list[float]] = {name: [] for name in members}
            texts: dict[str, list[str]] = {name: [] for name in members}
            for (name, i), completions in zip(owners, results):
                env = self.members[name].env
                rewards[name] += [
                    checked_reward(name, env, c, env.held_out[i]) for c in completions
                ]
                texts[name].append(completions[0].text or "")
            return {name: (float(np.mean(rewards[name])), texts[name]) for name in members}

        return multihost.agree("held-out rewards", lambda: self.watch.over(judge))


def trained_through(base: Base, config: Config) -> Base:
    """The base as the trainer sees it: the sampler's own, unless the config asks for a mismatch of
    the two to be studied.

    ``router_noise`` gives the trainer routers with other weights. ``trainer_dtype`` and
    ``trainer_quantise`` give it a base of its own in that form, which costs the memory of a second
    base.

    Raises:
        UserError: noise for a base without experts.
    """
    dtype, quantise = config.trainer_dtype or config.dtype, config.get("trainer_quantise")
    quantise = config.quantise if quantise is None else quantise
    if DTYPES.get(dtype) != base.dtype or quantise != config.quantise:
        own = base_lib.load(
            config.base, base.mesh, dtype, quantise=quantise, kernels=base.cfg.kernels
        )
        common.say(
            f"the trainer has a base of its own in {quantise or dtype}: {own.nbytes / 1e6:.0f} MB"
            " more"
        )
        base = own
    std = config.router_noise
    if not std:
        return base
    if not base.cfg.routed:
        raise UserError(f"router_noise is {std}, but {base.name} has no experts: set it to 0")
    return dataclasses.replace(
        base, params=router.perturb(base.params, std, jax.random.key(config.seed))
    )


def checked_reward(name: str, env: Environment, completion: Completion, example: Example) -> float:
    """The reward of one completion.

    Raises:
        UserError: see ``scoring.score``.
    """
    return scoring.score(name, env, completion.text or "", example)


def rollout_groups(sampling: GrpoSampling, rollout: Rollout, rewards_QG: np.ndarray) -> list[Group]:
    """Scored rollouts -> groups to train on; see ``episodes.to_groups``."""
    made = []
    for prompt, completions in zip(rollout.prompts, rollout.completions):
        made.append([episodes.of_completion(prompt, c, sampling.temperature) for c in completions])
    if not sampling.replay:
        made = [
            [dataclasses.replace(one, routes=None, prompt_routes=None) for one in group]
            for group in made
        ]
    how = sampling.baseline, sampling.divide_by_std, sampling.normalisation, sampling.max_tokens
    return episodes.to_groups(made, rewards_QG, *how)


def rollout_metrics(
    sampling: GrpoSampling, rollout: Rollout, rewards_QG: np.ndarray
) -> dict[str, float]:
    """Of scored rollouts: ``reward`` and its spread within a prompt, tokens of a completion, the
    share cut off at ``max_tokens`` and that of prompts whose completions have no advantage (nothing
    is learned there), and the entropy of a token in nats, estimated by the mean of ``-log p`` of
    those drawn.
    """
    drawn = [c for group in rollout.completions for c in group]
    advantage = advantages.group_advantages(rewards_QG, sampling.baseline, sampling.divide_by_std)
    return {
        "reward": float(rewards_QG.mean()),
        "reward_std": float(rewards_QG.std(axis=1).mean()),
        "completion_tokens": float(np.mean([len(c.tokens) for c in drawn])),
        "truncated": float(np.mean([c.finish == "length" for c in drawn])),
        "zero_advantage": float((advantage == 0).all(axis=1).mean()),
        "entropy": -float(np.mean([p for c in drawn for p in c.drawn_logprobs])),
    }


def _drawn_by(run: TrainingRun, name: str, rollout: Rollout) -> Snapshot | str:
    """The adapter that drew a rollout, or its digest.

    Raises:
        RuntimeError: the policy is no longer what it was then.
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


def _mismatch(steps: Sequence[tuple[float, float | None]]) -> dict[str, float]:
    """Of trainer and sampler, mean over the steps: ``gap`` of a token's log-probability, and where
    experts are replayed the share that the trainer's own routers would not have taken.
    """
    gaps, strays = zip(*steps)
    out = {"gap": round(float(np.mean(gaps)), 6)}
    return out | ({"out_of_route": round(float(np.mean(strays)), 4)} if None not in strays else {})


def as_record(rollout: Rollout, rewards_QG: np.ndarray, digest: str) -> Rollouts:
    """Scored rollouts as the catalog keeps them."""
    tokens = [[c.tokens for c in group] for group in rollout.completions]
    logprobs = [[c.logprobs for c in group] for group in rollout.completions]
    drawn_by = [[[digest] * len(row) for row in group] for group in tokens]
    return Rollouts("", 0, rollout.prompts, tokens, logprobs, drawn_by, rewards_QG)


def run(config: Config, workdir: Path) -> dict[str, Any]:
    """Trains, exports, evaluates; see the module. Returns the result it prints."""
    began = time.monotonic()
    settings.complete(config)  # a caller other than launch may leave settings out
    phases_lib.check_workers(config.reward_workers)
    scoring.check_timeout(config.reward_timeout)
    common.claim_workdir(config, workdir)
    units = phases_lib.units_of(list(config.policies), config.schedule, config.cohorts)
    base = common.open_base(config)
    job = ConcurrentGrpo(config, base)
    books = {name: (job.book(names),) for names in units for name in names}
    with TrainingRun(
        config, workdir, job.trainer, books, {n: m.sampling.drawing for n, m in job.members.items()}
    ) as run:
        if run.finished:
            return run.result()
        with job.sampling_from(run.fixed, run.catalog):
            return _run(config, workdir, job, run, units, began)


def _run(
    config: Config,
    workdir: Path,
    job: ConcurrentGrpo,
    run: TrainingRun,
    units: list[list[str]],
    began: float,
) -> dict[str, Any]:
    names = list(job.members)
    if not run.resumed:
        common.say("evaluating the policies as they begin on held-out prompts")
        run.notes = {
            "before": job.evaluate(),
            "history": {n: [] for n in names},
            "mismatch": {n: [] for n in names},
            "spent": {"train_s": 0.0, "sampled_tokens": 0},
        }
        common.say(
            "held-out reward before training: "
            + ", ".join(f"{n} {run.notes['before'][n][0]:.3f}" for n in names)
        )
    # by the steps before an interruption
    history, spent = run.notes["history"], dict(run.notes["spent"])
    clock = time.monotonic()

    overlap, workers = config.schedule != "sequential", config.reward_workers
    with (
        run.stepping(),
        phases_lib.Phases(
            units, run.step, config.steps, overlap, workers, job.watch.look
        ) as phases,
    ):
        for phase, unit in phases:
            if phase == phases_lib.ROLLOUT:
                unit.score(job.reward, job.rollout(unit.names, unit.step))
                continue
            scored = unit.scored()
            drawn_by = (
                {name: _drawn_by(run, name, rollout) for name, (rollout, _) in scored.items()}
                if run.keeps_rollouts
                else {}
            )
            with run.updating():
                rows = job.update(scored)
                for name, revision in drawn_by.items():
                    run.keep(name, unit.step, revision, functools.partial(as_record, *scored[name]))
                for name, row in rows.items():
                    history[name].append(row["reward"])
                    run.notes["mismatch"][name].append([row["gap"], row.get("out_of_route")])
                run.notes["spent"] = {
                    "train_s": spent["train_s"] + time.monotonic() - clock,
                    "sampled_tokens": spent["sampled_tokens"] + job.tokens,
                }
                scores = (
                    {name: reward for name, (reward, _) in job.evaluate(unit.names).items()}
                    if run.measures(unit.step)
                    else {}
                )
                for name, score in scores.items():
                    rows[name]["held_out_reward"] = score
                rewards = " ".join(f"{n}={history[n][-1]:.2f}" for n in names if history[n])
                speed = job.tokens / (time.monotonic() - clock)
                run.record(
                    unit.step,
                    rows,
                    f"step {unit.step + 1}: reward {rewards}, {speed:.0f} sampled tokens/s",
                    scores,
                )
    revisions = run.close()
    after = job.evaluate()
    before = run.notes["before"]

    rows = []
    for name in names:
        size = run.adapter_bytes(name)
        rows.append(
            {
                "name": name,
                "rank": job.trainer.policies[name].adapter.rank,
                "reward_before": round(before[name][0], 4),
                "reward_after": round(after[name][0], 4),
                **_mismatch(run.notes["mismatch"][name]),
                "adapter_bytes": size,
                "base_percent": round(100 * size / job.base.full_bytes, 3),
                "revision": revisions[name][0],
                "number": revisions[name][1],
            }
        )
    if multihost.is_main():
        for name in names:
            report.completions(
                name, job.members[name].env.held_out, before[name][1], after[name][1], 2
            )
        report.reward_curves(
            history,
            {r["name"]: (r["reward_before"], r["reward_after"]) for r in rows},
            workdir / "rewards.png",
        )
    common.say(f"reward curves: {workdir / 'rewards.png'}; revisions: {run.catalog.place}")
    return {
        "job": "grpo",
        "policies": rows,
        "schedule": config.schedule,
        "wall_s": round(time.monotonic() - began, 1),
        "train_s": round(run.notes["spent"]["train_s"], 1),
        "device_busy": round(phases.timing.busy, 3),
        "sampled_tokens": run.notes["spent"]["sampled_tokens"],
        "catalog": run.catalog.place,
        "rss_bytes": host.peak_rss_bytes(),
    }
