"""Who works when: steps of many policies through rollout (device), reward (host) and update (device).

Policies are grouped in *units*; a unit's rollout and its update are one device call each. ``sequential``: one policy a
unit, the device waits for its rewards. ``overlapped``: one policy a unit, the device takes another unit meanwhile.
``batched``: all policies in ``cohorts`` units, overlapped. What a policy computes does not depend on its unit, so the
three give the same results and differ in time only.
"""

import concurrent.futures as futures
import dataclasses
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from mint_jax.errors import UserError, choice

SCHEDULES = ("sequential", "overlapped", "batched")


def units_of(names: Sequence[str], schedule: str, cohorts: int = 1) -> list[list[str]]:
    """The units of a schedule.

    Raises:
        UserError: an unknown schedule, or more cohorts than policies.
    """
    if schedule not in SCHEDULES:
        raise choice("schedule", schedule, SCHEDULES)
    if schedule != "batched":
        return [[name] for name in names]
    if not 1 <= cohorts <= max(1, len(names)):
        raise UserError(f"cohorts is {cohorts}; expected 1 to {len(names)}, the number of policies")
    return [list(names[i::cohorts]) for i in range(cohorts)]


@dataclasses.dataclass
class Timing:
    """Seconds the devices were busy, and the time in all."""

    rollout_s: float = 0.0
    update_s: float = 0.0
    wall_s: float = 0.0

    @property
    def busy(self) -> float:
        return (self.rollout_s + self.update_s) / self.wall_s if self.wall_s else 0.0


@dataclasses.dataclass
class _Unit:
    names: list[str]
    step: int
    pending: dict[str, futures.Future] | None = None  # rewards on their way


def run(
    units: Sequence[Sequence[str]],
    first_step: dict[str, int],
    steps: int,
    rollout: Callable[[Sequence[str], int], dict[str, Any]],
    reward: Callable[[str, Any], Any],
    update: Callable[[dict[str, Any], int], None],
    overlap: bool,
    workers: int = 4,
) -> Timing:
    """Runs every unit from its first step to ``steps``.

    Args:
        first_step: where each policy starts; policies of a unit must agree.
        rollout: ``(names, step) -> {name: samples}`` on the devices, in this thread.
        reward: ``(name, samples) -> scored`` on the host, in a worker thread.
        update: ``({name: scored}, step)`` on the devices, in this thread; called once the unit's rewards are there.
        overlap: take up another unit while rewards are computed.

    Raises:
        Whatever the three functions raise; later device calls are then not made.
    """
    timing = Timing()
    began = time.perf_counter()
    idle: deque[_Unit] = deque()
    for names in units:
        firsts = {first_step[n] for n in names}
        if len(firsts) > 1:
            raise UserError(f"policies {list(names)} resume at different steps {sorted(firsts)}: use the schedule they were started with")
        if (first := firsts.pop()) < steps:
            idle.append(_Unit(list(names), first))
    waiting: list[_Unit] = []

    with futures.ThreadPoolExecutor(workers, thread_name_prefix="reward") as pool:
        try:
            while idle or waiting:
                unit = next((u for u in waiting if all(f.done() for f in (u.pending or {}).values())), None)
                if unit is not None:
                    waiting.remove(unit)
                    scored = {name: f.result() for name, f in (unit.pending or {}).items()}
                    t = time.perf_counter()
                    update(scored, unit.step)
                    timing.update_s += time.perf_counter() - t
                    unit.step, unit.pending = unit.step + 1, None
                    if unit.step < steps:
                        idle.append(unit)
                elif idle and (overlap or not waiting):
                    unit = idle.popleft()
                    t = time.perf_counter()
                    samples = rollout(unit.names, unit.step)
                    timing.rollout_s += time.perf_counter() - t
                    unit.pending = {name: pool.submit(reward, name, samples[name]) for name in unit.names}
                    waiting.append(unit)
                else:
                    pending = [f for u in waiting for f in (u.pending or {}).values() if not f.done()]
                    futures.wait(pending, return_when=futures.FIRST_COMPLETED)
        except BaseException:
            pool.shutdown(cancel_futures=True, wait=False)
            raise
    timing.wall_s = time.perf_counter() - began
    return timing
