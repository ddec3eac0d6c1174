"""The bounded queue of cold loads: one load per revision for all its requests, several in parallel,
each in a worker thread.

Order: loads that only need to finish, revisions in the host cache, revisions in storage,
prefetches; first come, first served within each. A full queue drops a waiting prefetch, or else
refuses and says when to retry.
"""

import dataclasses
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

RESUMED, WARM, COLD, PREFETCH = range(4)  # priorities, most urgent first
_SMOOTH = 0.2  # weight of the newest load in the moving average
# Of a load from storage, a load from host memory: 9.0 of 36.7 ms in
# reports/cpu-2-cores/packed_load.json.
HOST_SHARE = 0.25
_ASSUMED_S = 0.05  # duration of a load until one is measured


class QueueFull(RuntimeError):
    """A load was refused for now; half of the loads ahead should be done in ``retry_after_s``."""

    reason = "queue_full"

    def __init__(self, message: str, retry_after_s: float):
        super().__init__(message)
        self.retry_after_s = retry_after_s


@dataclasses.dataclass(eq=False)
class ColdLoad:
    """An unfinished load of one revision.

    Attributes:
        tenant: tenant of the first request.
        waiting: futures of the requests.
        queued: it waits for a worker.
        cold, seconds: its bytes came from storage, and the time that staging took.
        slot, staged, modules: data of the owner.
    """

    digest: str
    tenant: str
    priority: int
    number: int
    submitted_at: float
    waiting: list[Future] = dataclasses.field(default_factory=list)
    queued: bool = True
    cold: bool = False
    seconds: float = 0.0
    slot: Any = None
    staged: Any = None
    modules: int = 0


class ColdLoads:
    """At most ``depth`` unfinished loads and their worker threads. ``work`` loads one revision and
    must not raise; ``finish`` must follow, there or later.
    """

    def __init__(
        self,
        work: Callable[[ColdLoad], None],
        workers: int = 4,
        depth: int = 256,
        clock: Callable[[], float] = time.monotonic,
        niceness: int = 10,
    ):
        self.workers, self.depth, self._work, self._clock = workers, depth, work, clock
        self._niceness, self.mean_s = niceness, 0.0
        self._changed = threading.Condition()
        self._loads: dict[str, ColdLoad] = {}
        self._numbers, self._closed = itertools.count(), False
        names = (f"cold-load-{i}" for i in range(workers))
        self._threads = [threading.Thread(target=self._run, name=n, daemon=True) for n in names]
        for thread in self._threads:
            thread.start()

    def __len__(self) -> int:
        return len(self._loads)

    @property
    def expected_s(self) -> float:
        """Seconds of a load."""
        return self.mean_s or _ASSUMED_S

    def digests(self) -> list[str]:
        return list(self._loads)

    def submit(
        self, digest: str, tenant: str, priority: int = COLD
    ) -> tuple[ColdLoad, ColdLoad | None]:
        """Joins or enqueues a revision's load; returns it, and a prefetch that was dropped for it.
        Raises ``QueueFull``.
        """
        with self._changed:
            if self._closed:
                raise RuntimeError("the queue of cold loads is closed")
            if (load := self._loads.get(digest)) is not None:
                load.priority = min(priority, load.priority)
                return load, None
            dropped = None
            if (count := len(self._loads)) >= self.depth:
                idle = [x for x in self._loads.values() if x.priority == PREFETCH and x.queued]
                if priority == PREFETCH or not idle:
                    wait = max(0.001, count * self.expected_s / self.workers / 2)
                    what = f"{count} loads are unfinished, the maximum; retry in {wait:.3g} s"
                    raise QueueFull(what, wait)
                dropped = self._loads.pop(idle[-1].digest)  # the newest
            load = ColdLoad(digest, tenant, priority, next(self._numbers), self._clock())
            self._loads[digest] = load
            self._changed.notify()
            return load, dropped

    def resume(self, load: ColdLoad) -> None:
        with self._changed:
            load.priority, load.queued = RESUMED, True
            self._changed.notify()

    def finish(self, load: ColdLoad) -> None:
        """Removes a load, and counts its duration if it came from storage."""
        with self._changed:
            if self._loads.get(load.digest) is load:
                del self._loads[load.digest]
            if load.cold and load.seconds:
                old = self.mean_s or load.seconds
                self.mean_s = (1 - _SMOOTH) * old + _SMOOTH * load.seconds

    def withdraw(self, load: ColdLoad) -> None:
        """Removes a load that no worker has started."""
        with self._changed:
            if load.queued and load.slot is None:
                self.finish(load)

    def close(self) -> list[ColdLoad]:
        """Stops the workers after their current loads; returns the unfinished loads."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        return list(self._loads.values())

    def _run(self) -> None:
        if sys.platform.startswith("linux") and self._niceness:
            # Decoding has priority. On Linux this sets the niceness of the calling thread only.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._niceness)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._queued())
                if self._closed:
                    return
                load = min(self._queued(), key=lambda load: (load.priority, load.number))
                load.queued = False
            self._work(load)

    def _queued(self) -> list[ColdLoad]:
        return [load for load in self._loads.values() if load.queued]
