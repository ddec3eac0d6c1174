"""Cost of a further policy in a training step with a fixed number of rows.

``together``: all policies share the rows. ``one``: one policy has all rows; ``overhead`` is the
extra time of ``together`` over it. ``one_by_one``: a step per policy with its part of the rows.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import timing
from benchmarks.bases import open_base
from mint_jax import params as params_lib
from mint_jax.errors import UserError
from mint_jax.lora.tree import AdapterConfig
from mint_jax.models.base import Base
from mint_jax.train.batch import Group, TrainSequence
from mint_jax.train.config import LossConfig, PolicyConfig
from mint_jax.train.trainer import Trainer


def run(config: Any, workdir: Path) -> dict[str, Any]:
    """Runs the bench; returns its report."""
    if config.policies > config.rows:
        raise UserError(
            f"{config.policies} policies need as many rows: config.rows is {config.rows}"
        )
    base = open_base(config)
    many, single = trainer(config, base, config.policies), trainer(config, base, 1)
    rows = random_groups(config, base, config.rows)
    parts = {name: rows[p :: config.policies] for p, name in enumerate(many.policies)}
    [lone] = single.policies

    def one_by_one() -> None:
        for name, part in parts.items():
            many.update({name: part})
        jax.block_until_ready(many.state)

    sides = {"together": step(many, parts), "one": step(single, {lone: rows})}
    if config.policies <= config.one_by_one:
        sides["one_by_one"] = one_by_one
    times = timing.in_turn(f"{config.policies} policies", sides, config.n)
    return {
        "base": base.name,
        **{name: config[name] for name in ("policies", "rank", "rows", "tokens")},
        "overhead": timing.ratio(times, "together", "one", less=1),
        "ratio_one_by_one": (
            timing.ratio(times, "one_by_one", "together") if "one_by_one" in times else None
        ),
        "seconds": timing.medians_of(times),
        "state_bytes": params_lib.nbytes(many.state),
        "base_bytes": base.nbytes,
    }


def trainer(config: Any, base: Base, policies: int) -> Trainer:
    """A trainer of policies with adapters of rank ``config.rank`` on all projections."""
    adapter = AdapterConfig(config.rank, 2.0 * config.rank, ("all-linear",))
    loss = LossConfig("cross_entropy")
    return Trainer(
        base, [PolicyConfig(f"p{i}", adapter, loss=loss, seed=i) for i in range(policies)]
    )


def group(tokens: Sequence[int]) -> Group:
    """One row: a token, and those that follow it, all of them targets."""
    first, *targets = tokens
    return Group([first], [TrainSequence(targets, [1 / len(targets)] * len(targets))])


def random_groups(config: Any, base: Base, count: int) -> list[Group]:
    """Rows of random tokens, ``config.tokens`` behind the first of each."""
    rng = np.random.default_rng(config.seed)
    shape = count, config.tokens + 1
    return [group(row) for row in rng.integers(3, base.cfg.vocab_size, shape).tolist()]


def step(trainer: Trainer, groups: dict[str, list[Group]]) -> Callable[[], None]:
    """One update as a call that can be timed."""

    def call() -> None:
        trainer.update(groups)
        jax.block_until_ready(trainer.state)

    return call
