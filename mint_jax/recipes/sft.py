"""Supervised fine-tuning of many policies at once: cross-entropy on the assistant's tokens.

DPO shares the loop and the data. ``policies.<name>.data`` names a file with rows as ``data.chat``
reads them, an environment, whose prompts and answers are the rows, or stored rollouts.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mint_jax import host, multihost
from mint_jax.data import chat
from mint_jax.data.sources import numbered_rows
from mint_jax.envs import env as env_lib
from mint_jax.envs.env import Example
from mint_jax.errors import UserError
from mint_jax.harness import report, start
from mint_jax.harness.options import DataSettings, DpoSettings, SftSettings
from mint_jax.harness.start import PolicyData, say
from mint_jax.harness.training import TrainingRun
from mint_jax.models.base import Base
from mint_jax.recipes import stored
from mint_jax.rollout.score import Scorer
from mint_jax.train.batch import Group, TrainSequence
from mint_jax.train.trainer import Trainer

Row = dict[str, Any]
# the row's place for errors, and the row; a stored rollout is a group already
LocatedRow = tuple[str, Row | Group]
Parts = tuple[Sequence[LocatedRow], Sequence[LocatedRow]]  # rows to train on, held-out rows
Metrics = dict[str, dict[str, float]]  # by policy


@dataclasses.dataclass(frozen=True)
class Task:
    """SFT or DPO."""

    # base, row, its place for errors, append_eos -> a group with weights 1
    to_group: Callable[[Base, Row, str, bool], Group]
    from_env: Callable[[Sequence[Example]], list[Row]]
    forms: chat.Forms  # columns of rows
    measure: Callable[[Trainer, dict[str, PolicyData]], Metrics]
    headline: str  # metric of tables and progress
    sign: int  # 1 where a higher one is better


def run(
    config: SftSettings | DpoSettings, folder: Path, task: Task | None = None
) -> dict[str, Any]:
    """Trains, exports and measures every policy of the config; returns the result."""
    began, task = time.monotonic(), task or SFT
    read = [(name, p.data) for name, p in config.policies.items() if not p.data.rollouts]
    rows = {name: rows_of(data, task) for name, data in read}
    with TrainingRun(config, folder) as run:
        base = start.open_base(config)
        for name, found in stored.read(config, base, folder).items():
            rows[name] = split(config.policies[name].data, found, "data.rollouts")
        data = data_of(config, base, task, rows)
        policies = [one.config for one in data.values()]
        trainer = Trainer(base, policies, config.max_tokens_per_pass, config.remat)
        run.begin(trainer, dict.fromkeys(data, trainer.shapes))
        if (finished := run.finished()) is not None:
            return finished
        if not run.resumed:
            run.notes = {"before": task.measure(trainer, data)}
        train(config, trainer, data, run, task)
        revisions = run.close()
        after = task.measure(trainer, data)
    found = []
    for name, (digest, number) in revisions.items():
        row = {"name": name, "rank": trainer.policies[name].adapter.rank}
        for when, values in (("before", run.notes["before"]), ("after", after)):
            row |= {f"{key}_{when}": round(value, 4) for key, value in values[name].items()}
        row |= {"adapter_bytes": run.adapter_bytes(name), "revision": digest, "number": number}
        found.append(row)
    if multihost.is_main():
        report.curves(run.rows(), task.headline, folder / f"{task.headline}.png")
    if any(math.isnan(v) for row in found for v in row.values() if isinstance(v, float)):
        say("a metric is NaN: at least one policy diverged; lower its learning rate")
    return {
        "job": config.job,
        "policies": found,
        "wall_s": round(time.monotonic() - began, 1),
        "catalog": run.catalog.place,
        "rss_bytes": host.peak_rss_bytes(),
    }


def train(
    config: SftSettings | DpoSettings,
    trainer: Trainer,
    data: dict[str, PolicyData],
    run: TrainingRun,
    task: Task,
) -> None:
    """Updates all policies in every step."""
    headline = task.headline
    with run.stepping():
        for step in range(min(run.step.values()), config.steps):
            order = multihost.agree(
                "data order", lambda step=step: {n: one.chosen(step) for n, one in data.items()}
            )
            groups = {n: weighted([one.train[i] for i in order[n]]) for n, one in data.items()}
            with run.updating():
                rows, scores = trainer.update(groups), {}
                if run.is_eval_step(step):
                    for name, values in task.measure(trainer, data).items():
                        rows[name] |= {f"held_out_{key}": value for key, value in values.items()}
                        scores[name] = task.sign * values[headline]
                shown = " ".join(f"{n}={row[headline]:.3f}" for n, row in rows.items())
                run.record(step, rows, f"step {step + 1}: {headline} {shown}", scores)


def rows_of(data: DataSettings, task: Task) -> Parts:
    """Returns training rows and held-out rows, which have all needed columns."""
    if not data.path:
        environment = env_lib.make(data.env, **data.extra)
        train, held_out = (
            [(f"{data.env} row {n}", row) for n, row in enumerate(task.from_env(part), 1)]
            for part in (environment.train, environment.held_out)
        )
        return train, held_out
    rows = numbered_rows(data.path)
    parts = split(data, rows, data.path)
    unused = dict.fromkeys(
        column
        for where, row in rows
        for column in row
        if column not in (*chat.form_of(row, task.forms, where), *chat.OF_CHATS)
    )
    if unused:
        say(f"{data.path}: columns {', '.join(unused)} are not used")
    return parts


def split(data: DataSettings, rows: list[Any], where: str) -> Parts:
    """Returns training rows, and the first rows as held-out ones."""
    first = max(1, len(rows) // 10) if data.held_out is None else data.held_out
    if first >= len(rows):
        raise UserError(f"data.held_out is {first} but {where} has {len(rows)} rows: lower it")
    return rows[first:], rows[:first]


def data_of(
    config: SftSettings | DpoSettings,
    base: Base,
    task: Task,
    rows: Mapping[str, Parts],
) -> dict[str, PolicyData]:
    """Returns every policy's data, encoded, from the rows of ``rows_of``."""
    found = {}
    for name, policy in config.policies.items():
        train, held_out = (_encoded(name, policy.data, base, task, part) for part in rows[name])
        own = start.policy_config(name, policy, config.seed)
        found[name] = PolicyData(own, train, held_out, policy.batch_size)
    groups = {name: one.train + one.held_out for name, one in found.items()}
    multihost.require_same(
        "the data", lambda: {n: list(map(dataclasses.asdict, each)) for n, each in groups.items()}
    )
    return found


def _encoded(
    name: str, data: DataSettings, base: Base, task: Task, rows: Sequence[LocatedRow]
) -> list[Group]:
    """Returns rows as groups; too long ones are treated as ``data.too_long`` says."""
    limit = min(data.max_tokens or base.cfg.context, base.cfg.context)
    groups, cut = [], 0
    for where, row in rows:
        is_group = isinstance(row, Group)
        group = row if is_group else task.to_group(base, row, where, data.append_eos)
        longest = len(group.prefix) + max(len(s.tokens) for s in group.sequences)
        if longest <= limit:
            groups.append(group)
            continue
        if data.too_long == "refuse":
            what = "the context" if limit == base.cfg.context else "data.max_tokens"
            raise UserError(
                f"policy {name!r}: {where} has {longest} tokens, which exceeds {what} of {limit}:"
                " shorten it, or set data.too_long to cut or drop"
            )
        if data.too_long == "cut" and (short := _cut(group, limit)) is not None:
            groups.append(short)
            cut += 1
    if cut or len(groups) < len(rows):
        say(
            f"policy {name!r}: of {len(rows)} rows {cut} were cut to {limit} tokens and"
            f" {len(rows) - len(groups)} left out"
        )
    if rows and not groups:
        raise UserError(
            f"policy {name!r}: all {len(rows)} rows have more than {limit} tokens: raise"
            " data.max_tokens"
        )
    return groups


def _cut(group: Group, limit: int) -> Group | None:
    """Returns a group cut to ``limit`` tokens; None where a sequence loses all its targets."""
    left = max(0, limit - len(group.prefix))
    sequences = [TrainSequence(s.tokens[:left], s.weights[:left]) for s in group.sequences]
    if not all(any(s.weights) for s in sequences):
        return None
    return dataclasses.replace(group, sequences=sequences)


def weighted(groups: Sequence[Group]) -> list[Group]:
    """Returns the groups of one update, whose loss is a mean over target tokens, or over pairs."""
    tokens = sum(w != 0 for g in groups for s in g.sequences for w in s.weights)
    out = []
    for group in groups:
        rows = [(s.tokens, [w / tokens for w in s.weights]) for s in group.sequences]
        sequences = [TrainSequence(*row) for row in rows]
        out.append(Group(group.prefix, sequences, group.pair_weight / len(groups)))
    return out


def to_group(base: Base, row: Row, where: str, append_eos: bool) -> Group:
    """Returns one text; the tokens before its first target are the prefix."""
    return group_of(chat.supervised_row(base.need_tokenizer(), row, where, append_eos))


def group_of(*marked: chat.Marked, pair_weight: float = 0.0) -> Group:
    """Returns texts of one prompt. The prefix ends where their tokens first differ, since a token
    may straddle prompt and reply.
    """
    most = min(m.first for m in marked)
    first = next((i for i in range(most) if len({m.tokens[i] for m in marked}) > 1), most)
    sequences = [
        TrainSequence(m.tokens[first:], [float(learn) for learn in m.learn[first:]]) for m in marked
    ]
    return Group(marked[0].tokens[:first], sequences, pair_weight)


def from_env(examples: Sequence[Example]) -> list[Row]:
    """Returns prompts and answers; after a text prompt come a space, the answer and a newline."""
    pairs = [(e.messages, e.answer) for e in examples]
    return [{"prompt": p, "completion": f" {a}\n" if isinstance(p, str) else a} for p, a in pairs]


def sequence_logprobs(
    trainer: Trainer, name: str, groups: Sequence[Group], reference: bool = False
) -> list[list[np.ndarray]]:
    """Returns log-probabilities of the targets of each group's sequences, under the policy or its
    reference.
    """
    stacks, places = trainer.references.resident() if reference else (trainer.stacks, trainer.slots)
    texts = [g.prefix + s.tokens for g in groups for s in g.sequences]
    scores = iter(Scorer(trainer.base).logprobs(texts, [places.get(name)] * len(texts), stacks))
    return [
        [next(scores)[len(g.prefix) - 1 :][np.flatnonzero(s.weights)] for s in g.sequences]
        for g in groups
    ]


def measure(trainer: Trainer, data: dict[str, PolicyData]) -> Metrics:
    """Returns the held-out loss: mean negative log-likelihood of a target token, in nats."""
    out = {}
    for name, one in data.items():
        scores = sequence_logprobs(trainer, name, one.held_out)
        out[name] = {"loss": float(-np.concatenate([s for group in scores for s in group]).mean())}
    return out


SFT = Task(to_group, from_env, chat.SUPERVISED, measure, "loss", -1)
