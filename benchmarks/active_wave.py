"""Time that many adapters add to a decoding step, from one adapter to a thousand.

A step is timed in turn with a step of the bare base with as many rows; ``overhead`` is the extra
time over the base's. ``overhead_1``: all rows name one adapter of the larger rank. ``overhead_64``,
``overhead_1024``: each row has an adapter of the smaller rank. ``bytes_share``: bytes of the
adapters over the base's. ``errors``: of ``checked`` rows, those that differ in any bit from the
same adapter decoded alone. ``unchanged``: rows whose adapter has no effect.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks import timing
from benchmarks.bases import open_base
from benchmarks.decode_steps import Steps, adapter_bytes, random_stack
from mint_jax.errors import UserError
from mint_jax.lora.tree import AdapterConfig, Slot, Stacks
from mint_jax.models.base import Base
from mint_jax.rollout.device import STEPS, Drawn


class _Batch(NamedTuple):
    """Rows that name ``count`` distinct adapters of one rank."""

    rank: int
    count: int

    @property
    def name(self) -> str:
        return f"{self.count} of rank {self.rank}"

    def slots(self, rows: int) -> list[Slot | None]:
        return [Slot(AdapterConfig(self.rank).bucket, r % self.count) for r in range(rows)]


def run(config: Any, workdir: Path) -> dict[str, Any]:
    """Runs the bench; returns its report."""
    base = open_base(config)
    shapes = sorted(config.shapes)
    waves = [wave for wave in config.waves.values() if wave.counts]
    most = {wave.rank: max(wave.counts) for wave in waves}
    if shapes[-1] < max(most.values()):
        raise UserError(
            f"{max(most.values())} adapters need as many rows: the largest of config.shapes is"
            f" {shapes[-1]}"
        )
    batches: dict[int, list[_Batch]] = {rows: [] for rows in shapes}
    for batch in (_Batch(wave.rank, count) for wave in waves for count in wave.counts):
        batches[next(rows for rows in shapes if rows >= batch.count)].append(batch)
    stacks: dict[int, Stacks] = {}
    for rank, slots in most.items():
        adapter = AdapterConfig(rank, 2.0 * rank)
        stacks[rank] = {adapter.bucket: random_stack(base, adapter, slots, config.seed)}
    each = {rank: adapter_bytes(base, AdapterConfig(rank)) for rank in sorted(most)}
    points, seconds = [], {}
    for rows, some in batches.items():
        if not some:
            continue
        times, checked = _measure(config, base, rows, some, stacks)
        seconds[str(rows)] = timing.medians_of(times)
        points += [
            {
                "name": batch.name,
                "rank": batch.rank,
                "distinct": batch.count,
                "rows": rows,
                "overhead": timing.ratio(times, batch.name, "bare", less=1),
                "step_s": timing.median(times[batch.name], 1 / _steps(config, rows)),
                "bytes_share": float(f"{batch.count * each[batch.rank] / base.nbytes:.4g}"),
                **checked[batch],
            }
            for batch in some
        ]
    points.sort(key=lambda point: (point["rank"], point["distinct"]))
    headlines, ranks = {}, [*each]
    for point in points:
        at = point["rank"], point["distinct"]
        if at in ((ranks[-1], 1), (ranks[0], 64), (ranks[0], 1024)):
            headlines |= {f"{name}_{at[1]}": point[name] for name in ("overhead", "bytes_share")}
    counts = ("errors", "unchanged", "checked")
    return {
        "base": base.name,
        "weights": base.weights,
        "distinct": max(most.values()),
        **headlines,
        **{name: sum(point[name] for point in points) for name in counts},
        "base_bytes": base.nbytes,
        "bytes_an_adapter": {f"rank_{rank}": nbytes for rank, nbytes in each.items()},
        "batches": points,
        "steps_of_a_call": {rows: _steps(config, int(rows)) for rows in seconds},
        "call_seconds": seconds,
    }


def _steps(config: Any, rows: int) -> int:
    """Steps of one timed call: fewer where there are more rows."""
    return min(STEPS, max(1, config.row_steps // rows))


def _measure(
    config: Any, base: Base, rows: int, batches: Sequence[_Batch], stacks: dict[int, Stacks]
) -> tuple[dict[str, list[float]], dict[_Batch, dict[str, int]]]:
    """Seconds of all batches of one number of rows, in turn with the bare base, and what is wrong
    with them.
    """
    count = _steps(config, rows)
    steps = Steps(base, rows, config.context + count, config.seed)
    bare = [None] * rows
    plain = _ids_and_logprobs(steps.take({}, steps.plan(bare, {}), count))
    checked = {
        batch: _check(config, steps, batch, stacks[batch.rank], count, plain) for batch in batches
    }

    def side(slots: Sequence[Slot | None], stack: Stacks) -> Callable[[], Any]:
        plan = jax.device_put(steps.plan(slots, stack, config.context))
        return lambda: steps.take(stack, plan, count)

    sides = {"bare": side(bare, {})} | {
        batch.name: side(batch.slots(rows), stacks[batch.rank]) for batch in batches
    }
    return timing.in_turn(f"{rows} rows", sides, config.n), checked


def _ids_and_logprobs(drawn: Drawn) -> np.ndarray:
    """Tokens and log-probabilities of every row, as bits: ``[R, 2, K]`` int32."""
    return np.stack([np.asarray(drawn.tokens), np.asarray(drawn.logprobs).view(np.int32)], axis=1)


def _check(
    config: Any, steps: Steps, batch: _Batch, stacks: Stacks, count: int, plain: np.ndarray
) -> dict[str, int]:
    """Rows that differ from the same adapter alone, and rows that are as the bare base's, of those
    that are checked.
    """
    slots = batch.slots(steps.rows)
    together = _ids_and_logprobs(steps.take(stacks, steps.plan(slots, stacks), count))
    chosen = np.unique(np.linspace(0, min(batch.count, steps.rows) - 1, config.checked).astype(int))
    errors = 0
    for r in chosen.tolist():
        alone = _ids_and_logprobs(steps.take(stacks, steps.plan(slots, stacks, alone=r), count))
        errors += not np.array_equal(alone[r], together[r])
    same = (together == plain).all(axis=(1, 2))
    return {"errors": errors, "unchanged": int(same.sum()), "checked": len(chosen)}
