"""Interleaving of rollout (device), reward (host) and update (device) of many policies.

Policies are grouped in *units*; a unit's rollout and its update are one device call each.
``sequential``: one policy a unit, the device waits for its rewards. ``overlapped``: the device runs
another unit meanwhile. ``batched``: all policies in ``cohorts`` units, overlapped. A policy's
results do not depend on its unit, nor on the time that rewards take: with ``ahead`` = s a unit's
rollout of step k always follows its update k - s - 1, and what it draws further between two updates
does not depend on rewards. With several processes, process 0 waits for its rewards and decides the
next phase.
"""

import concurrent.futures as futures
import dataclasses
import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from mint_jax import multihost
from mint_jax.errors import UserError, choice

SCHEDULES = ("sequential", "overlapped", "batched")
ROLLOUT, UPDATE = "rollout", "update"
LOOK_S = 1.0


def units_of(names: Sequence[str], schedule: str, cohorts: int = 1) -> list[list[str]]:
    """Returns the units of a schedule."""
    if schedule not in SCHEDULES:
        raise choice("schedule", schedule, SCHEDULES)
    if schedule != "batched":
        return [[name] for name in names]
    if not 1 <= cohorts <= max(1, len(names)):
        raise UserError(f"cohorts is {cohorts}; expected 1 to {len(names)}, the number of policies")
    return [list(names[i::cohorts]) for i in range(cohorts)]


@dataclasses.dataclass
class Unit:
    """Policies that are rolled out and updated together.

    Attributes:
        step: of the phase at hand.
        done: updates so far.
    """

    names: list[str]
    step: int
    done: int
    _submit: Callable[..., futures.Future]
    _goes_on: Callable[[Mapping[str, Any], int], bool]
    # by step, until its update: the samples, and their rewards by policy
    _flight: dict[int, tuple[Mapping[str, Any], dict[str, futures.Future]]] = dataclasses.field(
        default_factory=dict
    )

    def score(
        self,
        reward: Callable[[str, Any], Any],
        samples: Mapping[str, Any],
        earlier: Mapping[int, Mapping[str, Any]] = MappingProxyType({}),
    ) -> None:
        """Submits ``reward(name, samples[name])`` of each policy to worker threads, and those of
        ``earlier`` steps, some of whose samples have changed.
        """
        flight = dict(self._flight)
        for step, some in {**earlier, self.step: samples}.items():
            before, pending = flight.get(step, ({}, {}))
            new = {name: self._submit(reward, name, one) for name, one in some.items()}
            flight[step] = {**before, **some}, pending | new
        self._flight = flight  # at once: an interruption finds all or none

    def scored(self) -> dict[str, Any]:
        """Returns the rewards by policy; raises the exception of a failed one."""
        return {name: future.result() for name, future in self._flight[self.step][1].items()}

    def awaited(self) -> dict[int, list[futures.Future]]:
        """Returns the steps whose rewards the next phase waits for, and those that are pending: the
        steps that go on before the next update, else that of the update.
        """
        flight = self._flight.items()
        steps = [k for k, (samples, _) in flight if self._goes_on(samples, k - self.done)]
        return {
            k: [future for future in self._flight[k][1].values() if not future.done()]
            for k in steps or [self.done]
        }

    def in_flight(self) -> dict[int, Mapping[str, Any]]:
        """Returns the samples that wait for their update, by step and policy."""
        return {step: samples for step, (samples, _) in self._flight.items()}


class Phases:
    """Iterator over the device phases, one phase of one unit at a time. A context manager: its end
    drops pending rewards.

        with Phases(units, first_step, steps, overlap=True) as phases:
            for phase, unit in phases:
                if phase == ROLLOUT:
                    unit.score(reward, rollout(unit.names, unit.step))
                else:
                    update(unit.scored(), unit.step)

    An update starts only when all its rewards are computed; a failed reward raises before its
    unit's update. An update phase that calls ``unit.score`` instead comes again when these samples
    are scored; those of later steps that go on (``unit.step > unit.done``) must do so.

    Args:
        first_step: step at which each policy starts; policies of a unit must agree.
        steps: step at which all end.
        overlap: run another unit while rewards are computed.
        ahead: rollouts that a unit draws before the update of an earlier step; 0: none.
        goes_on: called with (samples of a step, updates before its own); returns whether more of
            them are drawn before the next update.
        look: called with (seconds waited, pending rewards) before each phase, and every second
            while the devices wait; it may raise.

    Attributes:
        units: those with steps to do; before the iteration, ``unit.score`` with the ``step`` set
            resumes what was in flight.
        wall_s, busy: duration of the whole run, and the share of it in which the devices were busy;
            once it has ended.
    """

    def __init__(
        self,
        units: Sequence[Sequence[str]],
        first_step: Mapping[str, int],
        steps: int,
        overlap: bool,
        workers: int = 4,
        look: Callable[[float, int], None] | None = None,
        ahead: int = 0,
        goes_on: Callable[[Mapping[str, Any], int], bool] = lambda samples, left: False,
    ):
        self.wall_s = self.busy = 0.0
        self._steps, self._overlap, self._look, self._ahead = steps, overlap, look, ahead
        self._free, self._closed = threading.Semaphore(workers), False
        self.units = list[Unit]()
        for names in units:
            first, *more = sorted({first_step[name] for name in names})
            if more:
                raise UserError(
                    f"policies {list(names)} resume at different steps {[first, *more]}: use the"
                    " schedule they were started with"
                )
            if first < steps:
                self.units.append(Unit(list(names), first, first, self._submit, goes_on))

    def __enter__(self) -> "Phases":
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True

    def __iter__(self) -> Iterator[tuple[str, Unit]]:
        began, idle, waiting = time.perf_counter(), deque[Unit](), list[Unit]()
        for unit in self.units:
            (idle if self._may_draw(unit) else waiting).append(unit)
        busy_s = 0.0
        while idle or waiting:
            may_start = bool(idle) and (self._overlap or not waiting)
            found = multihost.agree("next phase", functools.partial(self._next, waiting, may_start))
            since = time.perf_counter()
            if found is None:
                unit = idle.popleft()
                unit.step = unit.done + len(unit._flight)
                yield ROLLOUT, unit
            else:
                index, step = found
                unit = waiting.pop(index)
                unit.step, pending = step, unit._flight[step]
                yield UPDATE, unit
                if unit._flight[step] is pending:
                    del unit._flight[step]
                    unit.done += 1
            busy_s += time.perf_counter() - since
            if unit.done < self._steps:
                (idle if self._may_draw(unit) else waiting).append(unit)
        self.wall_s = time.perf_counter() - began
        self.busy = busy_s / self.wall_s

    def _may_draw(self, unit: Unit) -> bool:
        drawn = len(unit._flight)
        return drawn <= self._ahead and unit.done + drawn < self._steps

    def _submit(self, call: Callable, *arguments: Any) -> futures.Future:
        # Daemon threads: the process does not wait for them at exit, as it does for those of
        # ThreadPoolExecutor.
        future: futures.Future = futures.Future()

        def run() -> None:
            with self._free:
                if self._closed:
                    return
                try:
                    answer = functools.partial(future.set_result, call(*arguments))
                except BaseException as error:
                    answer = functools.partial(future.set_exception, error)
            answer()

        threading.Thread(target=run, name="reward", daemon=True).start()
        return future

    def _next(self, waiting: Sequence[Unit], may_start: bool) -> tuple[int, int] | None:
        """Returns the index of the waiting unit to update and the step, or None to roll out an idle
        one, once either is possible. Raises exceptions of rewards and of ``look`` in every process.
        """
        began, look = time.monotonic(), self._look
        if look is not None:
            look(0.0, len(waiting))  # detects a hanging reward while the devices have other work
        while True:
            awaited = [
                (i, k, left) for i, u in enumerate(waiting) for k, left in u.awaited().items()
            ]
            if ready := next(((i, k) for i, k, left in awaited if not left), None):
                waiting[ready[0]].step = ready[1]
                waiting[ready[0]].scored()
                return ready
            if may_start:
                return None
            pending = [future for *_, left in awaited for future in left]
            done = futures.wait(pending, LOOK_S, futures.FIRST_COMPLETED).done
            if not done and look is not None:
                look(time.monotonic() - began, len(pending))
