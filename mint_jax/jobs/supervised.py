"""Training on given answers: what SFT and DPO share. Each policy has its own data, rank, loss and optimizer.

``policies.<name>.data`` is ``{"path": file}`` with rows as ``data.chat`` reads them, or ``{"env": name, ...}``: the prompts
and answers of an environment.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mint_jax import host, multihost
from mint_jax.data.order import epoch_indices
from mint_jax.data.sources import read_rows
from mint_jax.envs import env as env_lib
from mint_jax.envs.env import Example
from mint_jax.errors import UserError
from mint_jax.jobs import common, report
from mint_jax.jobs.common import Config
from mint_jax.jobs.training import TrainingRun
from mint_jax.models.base import Base
from mint_jax.train.batch import Group
from mint_jax.train.trainer import Trainer

Row = dict[str, Any]
ToGroup = Callable[[Base, Row, str], Group]  # one data row -> a group with weights 1


@dataclasses.dataclass
class Student:
    """One policy's data: groups whose target weights are 1, split into training and held-out."""

    train: list[Group]
    held_out: list[Group]
    seed: int
    batch_size: int


Measure = Callable[[Trainer, dict[str, Student], bool], dict[str, dict[str, float]]]


def rows_of(section: Config, from_env: Callable[[Sequence[Example]], list[Row]]) -> tuple[list[Row], list[Row], str]:
    """Training rows, held-out rows, and what to call them in an error."""
    options = dict(section)
    if "path" in options:
        path = options["path"]
        rows = read_rows(path)
        held = int(options.get("held_out", max(1, len(rows) // 10)))
        if held >= len(rows):
            raise UserError(f"data.held_out is {held} but {path} has {len(rows)} rows: lower it")
        return rows[held:], rows[:held], str(path)
    if "env" not in options:
        raise UserError(f"data is {options}; expected path (a .jsonl or .parquet file) or env (an environment's name)")
    name = options.pop("env")
    environment = env_lib.make(name, **options)
    return from_env(environment.train), from_env(environment.held_out), name


def students_of(config: Config, base: Base, to_group: ToGroup, from_env: Callable[[Sequence[Example]], list[Row]]) -> dict[str, Student]:
    """Every policy's data, encoded and checked before anything runs."""
    students = {}
    for name, section in config.policies.items():
        train, held_out, source = rows_of(section.data, from_env)
        groups = [[to_group(base, row, f"{source} row {n}") for n, row in enumerate(rows)] for rows in (train, held_out)]
        for group in (g for part in groups for g in part):
            longest = len(group.prefix) + max(len(s.tokens) for s in group.sequences)
            if longest > base.cfg.context:
                raise UserError(
                    f"policy {name!r}: an example of {longest} tokens exceeds the context of {base.cfg.context}: drop or shorten it"
                )
        seed = int(section.get("seed", common.policy_seed(config.seed, name)))
        students[name] = Student(groups[0], groups[1], seed, int(section.get("batch_size", 8)))
    if not students:
        raise UserError("policies is empty: give the config at least one policy")
    multihost.require_same("the data", lambda: {name: dataclasses.asdict(s) for name, s in students.items()})
    return students


def weighted(groups: Sequence[Group]) -> list[Group]:
    """The groups of one update with weights that make the loss a mean over target tokens, or over pairs."""
    tokens = sum(w != 0 for g in groups for s in g.sequences for w in s.weights)
    out = []
    for group in groups:
        sequences = [dataclasses.replace(s, weights=[w / tokens for w in s.weights]) for s in group.sequences]
        out.append(Group(group.prefix, sequences, group.pair_weight / len(groups)))
    return out


def run(
    config: Config,
    workdir: Path,
    to_group: ToGroup,
    from_env: Callable[[Sequence[Example]], list[Row]],
    measure: Measure,
    headline: str,
) -> dict[str, Any]:
    """The training loop of SFT and DPO.

    Args:
        to_group: one data row -> a group.
        from_env: an environment's examples -> data rows.
        measure: held-out metrics of every policy, with its adapter or with the bare base.
        headline: the metric that tables and progress lines show.
    """
    began = time.monotonic()
    common.claim_workdir(config, workdir)
    base = common.open_base(config)
    students = students_of(config, base, to_group, from_env)
    policies = [common.policy_config(n, config.policies[n], s.seed, ("data", "batch_size", "beta")) for n, s in students.items()]
    trainer = Trainer(base, policies, config.get("max_tokens_per_pass", 16384), config.get("remat", "names"))
    with TrainingRun(config, workdir, trainer, dict.fromkeys(students, (trainer.shapes,))) as run:
        return _run(config, workdir, trainer, students, run, measure, headline, began)


def _run(
    config: Config,
    workdir: Path,
    trainer: Trainer,
    students: dict[str, Student],
    run: TrainingRun,
    measure: Measure,
    headline: str,
    began: float,
) -> dict[str, Any]:
    if not run.resumed:
        run.notes = {"before": measure(trainer, students, False), "history": {n: [] for n in students}}
    history = run.notes["history"]
    first = set(run.step.values())
    if len(first) > 1:
        raise UserError(f"policies resume at different steps {sorted(first)}: the checkpoint is not of this job")

    for step in range(first.pop(), config.steps):
        order = multihost.agree("data order", lambda step=step: _order(students, step))
        groups = {name: weighted([s.train[i] for i in order[name]]) for name, s in students.items()}
        rows = trainer.update(groups)
        for name, row in rows.items():
            history[name].append(row[headline])
        run.record(step, rows, f"step {step + 1}: {headline} " + " ".join(f"{n}={r[headline]:.3f}" for n, r in rows.items()))

    revisions = run.close()
    after, before = measure(trainer, students, True), run.notes["before"]
    rows = []
    for name in students:
        measured = {}
        for when, values in (("before", before), ("after", after)):
            measured |= {f"{key}_{when}": round(value, 4) for key, value in values[name].items()}
        rank = trainer.policies[name].adapter.rank
        digest, number = revisions[name]
        rows.append(
            {"name": name, "rank": rank, **measured, "adapter_bytes": run.adapter_bytes(name), "revision": digest, "number": number}
        )
    if multihost.is_main():
        columns = [c for c in rows[0] if c not in ("revision", "number")]
        report.table(f"{config.job}, held out", columns, [[r[c] for c in columns] for r in rows])
        report.curves(history, headline, workdir / f"{headline}.png")
    if any(math.isnan(v) for r in rows for v in r.values() if isinstance(v, float)):
        common.say("a metric is NaN: at least one policy diverged; lower its learning rate")
    return {
        "job": config.job,
        "wall_s": round(time.monotonic() - began, 1),
        "policies": rows,
        "catalog": run.catalog.place,
        "rss_bytes": host.peak_rss_bytes(),
    }


def _order(students: dict[str, Student], step: int) -> dict[str, list[int]]:
    """Which training examples each policy sees in a step."""
    return {name: epoch_indices(len(s.train), s.batch_size, s.seed, step) for name, s in students.items()}
