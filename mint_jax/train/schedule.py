"""Who works when: steps of many policies through rollout (device), reward (host) and update (device).

Policies are grouped in *units*; a unit's rollout and its update are one device call each. ``sequential``: one policy a
unit, the device waits for its rewards. ``overlapped``: one policy a unit, the device takes another unit meanwhile.
``batched``: all policies in ``cohorts`` units, overlapped. What a policy computes does not depend on its unit, so the
three give the same results and differ in time only.

Where several processes run, process 0 waits for its rewards and decides what is next; the others follow.
"""

import concurrent.futures as futures
import contextlib
import dataclasses
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mint_jax import multihost
from mint_jax.errors import UserError, choice

SCHEDULES = ("sequential", "overlapped", "batched")
LOOK_S = 1.0


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


def check_workers(workers: int) -> None:
    """Refuses a number of reward threads that is none.

    Raises:
        UserError: naming it.
    """
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise UserError(f"reward_workers is {workers!r}; expected how many policies' rewards are computed at once, at least 1")


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

    @property
    def ready(self) -> bool:
        return all(f.done() for f in (self.pending or {}).values())

    def scored(self) -> dict[str, Any]:
        """The rewards, once they are there; raises what a reward raised."""
        return {name: f.result() for name, f in (self.pending or {}).items()}


def run(
    units: Sequence[Sequence[str]],
    first_step: dict[str, int],
    steps: int,
    rollout: Callable[[Sequence[str], int], dict[str, Any]],
    reward: Callable[[str, Any], Any],
    update: Callable[[dict[str, Any], int], None],
    overlap: bool,
    workers: int = 4,
    look: Callable[[float, int], None] | None = None,
) -> Timing:
    """Runs every unit from its first step to ``steps``.

    Args:
        first_step: where each policy starts; policies of a unit must agree.
        rollout: ``(names, step) -> {name: samples}`` on the devices, in this thread.
        reward: ``(name, samples) -> scored`` on the host, in a worker thread, which the process does not wait for when it ends.
        update: ``({name: scored}, step)`` on the devices, in this thread; called once the unit's rewards are there.
        overlap: take up another unit while rewards are computed.
        workers: rewards that are computed at once.
        look: ``(seconds waited, rewards to come)``, called before each phase, and every second in which the devices wait.

    Raises:
        Whatever the functions raise; later device calls are then not made.
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

    with _daemons(workers) as submit:
        while idle or waiting:
            may_start = bool(idle) and (overlap or not waiting)
            scored_unit = multihost.agree("next phase", lambda may_start=may_start: _next(waiting, may_start, look))
            if scored_unit is not None:
                unit = waiting.pop(scored_unit)
                scored = unit.scored()
                t = time.perf_counter()
                update(scored, unit.step)
                timing.update_s += time.perf_counter() - t
                unit.step, unit.pending = unit.step + 1, None
                if unit.step < steps:
                    idle.append(unit)
            else:
                unit = idle.popleft()
                t = time.perf_counter()
                samples = rollout(unit.names, unit.step)
                timing.rollout_s += time.perf_counter() - t
                unit.pending = {name: submit(reward, name, samples[name]) for name in unit.names}
                waiting.append(unit)
    timing.wall_s = time.perf_counter() - began
    return timing


@contextlib.contextmanager
def _daemons(workers: int) -> Iterator[Callable[..., futures.Future]]:
    """Threads that compute what is submitted; the process does not wait for them, nor does the end of the block.

    ``ThreadPoolExecutor`` would: a function that hangs could then be interrupted by nothing but a signal.
    """
    tasks: queue.SimpleQueue[tuple[futures.Future, Callable, tuple] | None] = queue.SimpleQueue()
    closed = threading.Event()

    def work() -> None:
        while (task := tasks.get()) is not None and not closed.is_set():
            future, call, arguments = task
            try:
                future.set_result(call(*arguments))
            except BaseException as error:
                future.set_exception(error)

    def submit(call: Callable, *arguments: Any) -> futures.Future:
        future: futures.Future = futures.Future()
        tasks.put((future, call, arguments))
        return future

    for k in range(workers):
        threading.Thread(target=work, name=f"reward-{k}", daemon=True).start()
    try:
        yield submit
    finally:
        closed.set()
        for _ in range(workers):
            tasks.put(None)


def _next(waiting: Sequence[_Unit], may_start: bool, look: Callable[[float, int], None] | None) -> int | None:
    """Which waiting unit to update, or None to roll out an idle one if that ``may_start``; blocks until there is something to do.

    Raises:
        Whatever a reward of that unit, or ``look``, raised: here, where every process hears of it.
    """
    began = time.monotonic()
    if look is not None:
        look(0.0, len(waiting))  # one that hangs is found while the devices have other work
    while True:
        found = next((i for i, unit in enumerate(waiting) if unit.ready), None)
        if found is not None:
            waiting[found].scored()
            return found
        if may_start:
            return None
        pending = [f for unit in waiting for f in (unit.pending or {}).values() if not f.done()]
        if not futures.wait(pending, LOOK_S, futures.FIRST_COMPLETED).done and look is not None:
            look(time.monotonic() - began, len(pending))
