"""The bounded queue of cold loads: one load per revision for all its requests, several in parallel,
each in a worker thread.

The work of a load is a function passed to the queue. Order: loads that only need to finish,
revisions in the host cache, revisions in storage, prefetches; first come, first served within each.
A full queue drops a waiting prefetch, or else refuses and says when to retry.
"""

import dataclasses
import heapq
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from mint_jax.residency.quotas import ResidencyQuotas

RESUMED, WARM, COLD, PREFETCH = range(4)  # priorities, most urgent first
_SMOOTH = 0.2  # weight of the newest load in the moving averages


class QueueFull(RuntimeError):
    """A load was refused for now.

    Attributes:
        retry_after_s: seconds until half of the loads ahead should be done.
        reason: ``queue_full`` or ``tenant_quota``.
    """

    def __init__(self, message: str, retry_after_s: float, reason: str):
        super().__init__(message)
        self.retry_after_s, self.reason = retry_after_s, reason


@dataclasses.dataclass(eq=False)
class ColdLoad:
    """An unfinished load of one revision.

    Attributes:
        tenant: tenant of the first request.
        priority: COLD, ...; a request that joins a prefetch raises it.
        nbytes: size, if known.
        waiting: futures of the requests.
        submitted_at, started_at: seconds of the queue's clock; a load starts once, even if it
            pauses for a slot.
        queued: it waits for a worker.
        cold, seconds: its bytes came from storage, and the time that staging took.
        slot, staged, modules: data of the owner.
    """

    digest: str
    tenant: str
    priority: int
    number: int
    submitted_at: float
    nbytes: int | None = None
    waiting: list[Future] = dataclasses.field(default_factory=list)
    started_at: float | None = None
    queued: bool = True
    cold: bool = False
    seconds: float = 0.0
    slot: Any = None
    staged: Any = None
    modules: int = 0


class ColdLoads:
    """Unfinished loads and their worker threads.

    Args:
        work: loads one revision; it must not raise. ``finish`` must follow, there or later.
        workers: number of threads.
        depth: maximum number of unfinished loads.
        size_of: packed bytes of a revision if known, for the ETA.
        bytes_per_s: assumed rate of one worker until loads are measured.
        niceness: Linux niceness of the threads, so that decoding has priority.
    """

    def __init__(
        self,
        work: Callable[[ColdLoad], None],
        workers: int = 4,
        depth: int = 256,
        quotas: ResidencyQuotas | None = None,
        clock: Callable[[], float] = time.monotonic,
        size_of: Callable[[str], int | None] | None = None,
        bytes_per_s: float = 500e6,
        niceness: int = 10,
    ):
        self.workers, self.depth, self._work, self._clock = workers, depth, work, clock
        self._quotas, self._size_of, self._niceness = (
            quotas or ResidencyQuotas(),
            size_of or (lambda digest: None),
            niceness,
        )
        self.bytes_per_s, self._mean_bytes = bytes_per_s, 0.0
        self._lock = threading.Condition()
        self._loads: dict[str, ColdLoad] = {}
        self._heap: list[tuple[int, int, ColdLoad]] = []
        self._numbers = itertools.count()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"cold-load-{i}", daemon=True)
            for i in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def __len__(self) -> int:
        return len(self._loads)

    def digests(self) -> list[str]:
        """Returns the digests of all unfinished loads."""
        return list(self._loads)

    def find(self, digest: str) -> ColdLoad | None:
        """Returns the unfinished load of a revision; None if there is none."""
        return self._loads.get(digest)

    def submit(
        self, digest: str, tenant: str, priority: int = COLD
    ) -> tuple[ColdLoad, ColdLoad | None]:
        """Requests a revision: joins its unfinished load, or enqueues one.

        Returns:
            The load, and the waiting prefetch that was dropped for it.

        Raises:
            QueueFull: the queue is full, or the tenant's quota of loads is used up.
        """
        with self._lock:
            if self._closed:
                raise RuntimeError("the queue of cold loads is closed")
            if (load := self._loads.get(digest)) is not None:
                if priority < load.priority:
                    load.priority = priority
                    if load.queued:
                        self._push(load)
                return load, None
            limit = self._quotas.of(tenant).loads
            if (
                limit is not None
                and sum(load.tenant == tenant for load in self._loads.values()) >= limit
            ):
                raise self._full(
                    f"tenant {tenant!r} has {limit} unfinished loads, its quota", "tenant_quota"
                )
            dropped = None
            if len(self._loads) >= self.depth:
                idle = [
                    load
                    for load in self._loads.values()
                    if load.priority == PREFETCH and load.queued
                ]
                if priority == PREFETCH or not idle:
                    raise self._full(
                        f"{len(self._loads)} loads are unfinished, the maximum", "queue_full"
                    )
                dropped = max(idle, key=lambda load: load.number)
                self._remove(dropped)
            load = ColdLoad(
                digest, tenant, priority, next(self._numbers), self._clock(), self._size_of(digest)
            )
            self._loads[digest] = load
            self._push(load)
            return load, dropped

    def _full(self, message: str, reason: str) -> QueueFull:
        wait = max(
            0.001, sum(self._remaining(load) for load in self._loads.values()) / self.workers / 2
        )
        return QueueFull(f"{message}; retry in {wait:.3g} s", wait, reason)

    def resume(self, load: ColdLoad) -> None:
        """Enqueues a paused load with the highest priority."""
        with self._lock:
            load.priority, load.queued = RESUMED, True
            self._push(load)

    def finish(self, load: ColdLoad) -> None:
        """Removes a load, and updates the measured rate if it came from storage."""
        with self._lock:
            self._remove(load)
            if load.cold and load.nbytes and load.seconds:
                rate = load.nbytes / load.seconds
                first = not self._mean_bytes
                self.bytes_per_s = (
                    rate if first else (1 - _SMOOTH) * self.bytes_per_s + _SMOOTH * rate
                )
                self._mean_bytes = (
                    load.nbytes
                    if first
                    else (1 - _SMOOTH) * self._mean_bytes + _SMOOTH * load.nbytes
                )

    def withdraw(self, load: ColdLoad) -> bool:
        """Removes a load that no worker has started; returns False if one has."""
        with self._lock:
            idle = load.queued and load.slot is None and self._loads.get(load.digest) is load
            if idle:
                self._remove(load)
            return idle

    def eta(self, load: ColdLoad) -> float:
        """Returns the seconds until a load should be ready, if a slot is free: the bytes ahead and
        its own at the measured rate.
        """
        with self._lock:
            place = (load.priority, load.number)
            ahead = sum(
                self._remaining(other)
                for other in self._loads.values()
                if (other.priority, other.number) < place
            )
            waiting = ahead / self.workers if load.queued else 0.0
            return waiting + self._remaining(load)

    def eta_of_new(self, digest: str) -> float:
        """Returns the seconds that a load would take if it were requested now."""
        with self._lock:
            load = ColdLoad(
                digest, "", COLD, next(self._numbers), self._clock(), self._size_of(digest)
            )
            return self.eta(load)

    def close(self) -> list[ColdLoad]:
        """Stops the workers after their current loads; returns the unfinished loads."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()
        for thread in self._threads:
            thread.join()
        return list(self._loads.values())

    def _remaining(self, load: ColdLoad) -> float:
        """Returns the worker seconds that a load still takes."""
        whole = (load.nbytes or self._mean_bytes) / self.bytes_per_s
        return (
            whole
            if load.started_at is None
            else max(0.0, whole - (self._clock() - load.started_at))
        )

    def _push(self, load: ColdLoad) -> None:
        heapq.heappush(self._heap, (load.priority, load.number, load))
        self._lock.notify()

    def _remove(self, load: ColdLoad) -> None:
        load.queued = False
        if self._loads.get(load.digest) is load:
            del self._loads[load.digest]

    def _next(self) -> ColdLoad | None:
        """Waits for the next load; None if the queue is closed."""
        with self._lock:
            while not self._closed:
                while self._heap:
                    priority, _, load = heapq.heappop(self._heap)
                    # Skip loads that were removed, or pushed again with another priority.
                    if load.queued and priority == load.priority:
                        load.queued = False
                        if load.started_at is None:
                            load.started_at = self._clock()
                        return load
                self._lock.wait()
            return None

    def _run(self) -> None:
        if sys.platform.startswith("linux") and self._niceness:
            # On Linux this sets the niceness of the calling thread only.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._niceness)
        while (load := self._next()) is not None:
            self._work(load)
