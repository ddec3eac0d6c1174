"""Training on given answers: what SFT and DPO share. Each policy has its own data, rank, loss and
optimizer.

``policies.<name>.data`` is ``{"path": file}`` with rows as ``data.chat`` reads them, or ``{"env":
name, ...}``: the prompts and answers of an environment.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mint_jax import host, multihost
from mint_jax.data import chat
from mint_jax.data.sources import numbered_rows
from mint_jax.envs import env as env_lib
from mint_jax.envs.env import Example
from mint_jax.errors import UserError
from mint_jax.jobs import common, report, settings
from mint_jax.jobs.common import Config, PolicyData
from mint_jax.jobs.training import TrainingRun
from mint_jax.models.base import Base
from mint_jax.train.batch import Group
from mint_jax.train.trainer import Trainer

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Kind:
    """What differs between SFT and DPO.

    Attributes:
        to_group: one data row, its place for errors, and ``Data.append_eos`` -> a group with
            weights 1.
        from_env: an environment's examples -> data rows.
        forms: the columns of rows.
        measure: held-out metrics of every policy, with its adapter or as it began.
        headline: the metric that tables and progress lines show.
        higher: whether more of it is better.
    """

    to_group: Callable[[Base, Row, str, bool], Group]
    from_env: Callable[[Sequence[Example]], list[Row]]
    forms: chat.Forms
    measure: Callable[[Trainer, dict[str, PolicyData]], dict[str, dict[str, float]]]
    headline: str
    higher: bool


Located = tuple[str, Row]  # a row and what to call it in an error


def rows_of(section: Config, kind: Kind) -> tuple[list[Located], list[Located]]:
    """Training rows and held-out rows of a policy's data.

    Raises:
        UserError: an unknown environment, an unreadable file, or a row without the columns that are
            needed.
    """
    options = dict(section)
    path, name, held = options.pop("path"), options.pop("env"), options.pop("held_out", None)
    for shared in ("append_eos", "max_tokens", "too_long"):
        del options[shared]
    if not path:
        environment = env_lib.make(name, **options)
        parts = kind.from_env(environment.train), kind.from_env(environment.held_out)
        train, held_out = (
            [(f"{name} row {n}", row) for n, row in enumerate(rows, 1)] for rows in parts
        )
        return train, held_out
    if options and not name:
        raise UserError(
            f"data.{next(iter(options))} is no setting of a file: drop it, or name an environment"
            " in data.env"
        )
    rows = numbered_rows(path)
    held = max(1, len(rows) // 10) if held is None else held
    if held >= len(rows):
        raise UserError(f"data.held_out is {held} but {path} has {len(rows)} rows: lower it")
    others = (
        column
        for where, row in rows
        for column in row
        if column not in (*chat.form_of(row, kind.forms, where), *chat.OF_CHATS)
    )
    if unused := dict.fromkeys(others):
        common.say(f"{path}: columns {', '.join(unused)} are not used")
    return rows[held:], rows[:held]


def data_of(
    config: Config, base: Base, kind: Kind, rows: dict[str, tuple[list[Located], list[Located]]]
) -> dict[str, PolicyData]:
    """Every policy's data (of ``rows_of``), encoded and checked before anything runs."""
    found = {}
    for name, section in config.policies.items():
        train, held_out = (_encoded(name, section.data, base, kind, part) for part in rows[name])
        found[name] = PolicyData(
            name, common.seed_of(config, name), train, held_out, section.batch_size
        )
    multihost.require_same(
        "the data", lambda: {name: dataclasses.asdict(one) for name, one in found.items()}
    )
    return found


def _encoded(
    name: str, data: Config, base: Base, kind: Kind, rows: Sequence[Located]
) -> list[Group]:
    """Rows as groups; those that are too long are shortened or left out where ``data.too_long``
    says so, and counted.
    """
    if data.max_tokens > base.cfg.context:
        raise UserError(
            f"policy {name!r}: data.max_tokens is {data.max_tokens}, but the base's context is"
            f" {base.cfg.context}: lower it"
        )
    limit = data.max_tokens or base.cfg.context
    groups, cut, dropped = [], 0, 0
    for where, row in rows:
        group: Group | None = kind.to_group(base, row, where, data.append_eos)
        longest = len(group.prefix) + max(len(s.tokens) for s in group.sequences)
        if longest > limit:
            if data.too_long == "refuse":
                what = f"data.max_tokens, {limit}" if data.max_tokens else f"the context of {limit}"
                raise UserError(
                    f"policy {name!r}: {where} has {longest} tokens, which exceeds {what}: shorten"
                    " it, or set data.too_long to cut or drop"
                )
            group = _cut(group, limit) if data.too_long == "cut" else None
            cut, dropped = cut + (group is not None), dropped + (group is None)
        if group is not None:
            groups.append(group)
    if cut or dropped:
        common.say(
            f"policy {name!r}: of {len(rows)} rows {cut} were cut to {limit} tokens and {dropped}"
            " left out"
        )
    if rows and not groups:
        raise UserError(
            f"policy {name!r}: all {len(rows)} rows have more than {limit} tokens: raise"
            " data.max_tokens"
        )
    return groups


def _cut(group: Group, limit: int) -> Group | None:
    """A group whose sequences end where the limit is; None where a sequence would have no target
    left.
    """
    left = limit - len(group.prefix)
    sequences = [
        dataclasses.replace(s, tokens=s.tokens[:left], weights=s.weights[:left])
        for s in group.sequences
    ]
    if left < 1 or not all(any(s.weights) for s in sequences):
        return None
    return dataclasses.replace(group, sequences=sequences)


def weighted(groups: Sequence[Group]) -> list[Group]:
    """The groups of one update with weights that make the loss a mean over target tokens, or over
    pairs.
    """
    tokens = sum(w != 0 for g in groups for s in g.sequences for w in s.weights)
    out = []
    for group in groups:
        sequences = [
            dataclasses.replace(s, weights=[w / tokens for w in s.weights]) for s in group.sequences
        ]
        out.append(Group(group.prefix, sequences, group.pair_weight / len(groups)))
    return out


def run(config: Config, workdir: Path, kind: Kind) -> dict[str, Any]:
    """The training loop of SFT and DPO."""
    began = time.monotonic()
    settings.complete(config)  # a caller other than launch may leave settings out
    rows = {name: rows_of(section.data, kind) for name, section in config.policies.items()}
    common.claim_workdir(config, workdir)
    base = common.open_base(config)
    data = data_of(config, base, kind, rows)
    policies = [common.policy_config(n, config.policies[n], one.seed) for n, one in data.items()]
    trainer = Trainer(base, policies, config.max_tokens_per_pass, config.remat)
    with TrainingRun(config, workdir, trainer, dict.fromkeys(data, (trainer.shapes,))) as run:
        return _run(config, workdir, trainer, data, run, kind, began)


def _run(
    config: Config,
    workdir: Path,
    trainer: Trainer,
    data: dict[str, PolicyData],
    run: TrainingRun,
    kind: Kind,
    began: float,
) -> dict[str, Any]:
    if run.finished:
        return run.result()
    measure, headline = kind.measure, kind.headline
    if not run.resumed:
        run.notes = {"before": measure(trainer, data), "history": {n: [] for n in data}}
    history = run.notes["history"]
    first = set(run.step.values())
    if len(first) > 1:
        raise UserError(
            f"policies resume at different steps {sorted(first)}: the checkpoint is not of this job"
        )

    with run.stepping():
        for step in range(first.pop(), config.steps):
            order = multihost.agree(
                "data order",
                lambda step=step: {name: one.chosen(step) for name, one in data.items()},
            )
            groups = {
                name: weighted([one.train[i] for i in order[name]]) for name, one in data.items()
            }
            with run.updating():
                rows = trainer.update(groups)
                for name, row in rows.items():
                    history[name].append(row[headline])
                scores = {}
                if run.measures(step):
                    for name, values in measure(trainer, data).items():
                        rows[name] |= {f"held_out_{key}": value for key, value in values.items()}
                        scores[name] = values[headline] if kind.higher else -values[headline]
                run.record(
                    step,
                    rows,
                    f"step {step + 1}: {headline} "
                    + " ".join(f"{n}={r[headline]:.3f}" for n, r in rows.items()),
                    scores,
                )

    revisions = run.close()
    after, before = measure(trainer, data), run.notes["before"]
    rows = []
    for name in data:
        measured = {}
        for when, values in (("before", before), ("after", after)):
            measured |= {f"{key}_{when}": round(value, 4) for key, value in values[name].items()}
        rank = trainer.policies[name].adapter.rank
        digest, number = revisions[name]
        rows.append(
            {
                "name": name,
                "rank": rank,
                **measured,
                "adapter_bytes": run.adapter_bytes(name),
                "revision": digest,
                "number": number,
            }
        )
    if multihost.is_main():
        report.curves(history, headline, workdir / f"{headline}.png")
    if any(math.isnan(v) for r in rows for v in r.values() if isinstance(v, float)):
        common.say("a metric is NaN: at least one policy diverged; lower its learning rate")
    return {
        "job": config.job,
        "policies": rows,
        "wall_s": round(time.monotonic() - began, 1),
        "catalog": run.catalog.place,
        "rss_bytes": host.peak_rss_bytes(),
    }
