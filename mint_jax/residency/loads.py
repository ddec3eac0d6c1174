"""The queue of cold loads: bounded, one load a revision however many ask, several at a time, each
in a worker's thread.

What a load does is a function given to the queue. The order is: what only waits to be finished,
what the host cache has, what must come from storage, prefetches; first come first served within
each. A full queue drops a waiting prefetch, and otherwise refuses with the time after which to ask
again.
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

from mint_jax.residency.quotas import Quotas

RESUMED, WARM, COLD, PREFETCH = range(4)  # priorities, the first goes first
_SMOOTH = 0.2  # weight of the newest load in the running means


class QueueFull(RuntimeError):
    """A load is refused for now.

    Attributes:
        retry_after_s: seconds until half of what is ahead should be done.
        reason: ``queue_full`` or ``tenant_quota``.
    """

    def __init__(self, message: str, retry_after_s: float, reason: str):
        super().__init__(message)
        self.retry_after_s, self.reason = retry_after_s, reason


@dataclasses.dataclass(eq=False)
class Load:
    """One revision on its way.

    Attributes:
        tenant: who asked first.
        priority: COLD, ...; a request that joins a prefetch raises it.
        nbytes: as far as known.
        waiting: the requests, each with its tenant's future.
        submitted_at, started_at: seconds of the queue's clock; a load starts once, also if it
            pauses for a slot.
        queued: it waits for a worker.
        cold, seconds: whether its bytes came from storage, and what staging them took.
        slot, staged, modules: what its owner keeps with it.
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
    """Unfinished loads, and the threads that work on them.

    Args:
        work: brings one revision; it must not raise, and ``finish`` must follow, there or later.
        workers: threads.
        depth: unfinished loads at most.
        size_of: packed bytes of a revision if known, for the ETA.
        bytes_per_s: of one worker, assumed until loads were measured.
        niceness: by how much the kernel prefers other threads (Linux): decoding goes first.
    """

    def __init__(
        self,
        work: Callable[[Load], None],
        workers: int = 4,
        depth: int = 256,
        quotas: Quotas | None = None,
        clock: Callable[[], float] = time.monotonic,
        size_of: Callable[[str], int | None] | None = None,
        bytes_per_s: float = 500e6,
        niceness: int = 10,
    ):
        self.workers, self.depth, self._work, self._clock = workers, depth, work, clock
        self._quotas, self._size_of, self._niceness = (
            quotas or Quotas(),
            size_of or (lambda digest: None),
            niceness,
        )
        self.bytes_per_s, self._mean_bytes = bytes_per_s, 0.0
        self._lock = threading.Condition()
        self._loads: dict[str, Load] = {}
        self._heap: list[tuple[int, int, Load]] = []
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
        """Of all that are not finished."""
        return list(self._loads)

    def find(self, digest: str) -> Load | None:
        """The unfinished load of a revision."""
        return self._loads.get(digest)

    def submit(self, digest: str, tenant: str, priority: int = COLD) -> tuple[Load, Load | None]:
        """Asks for a revision: joins the load under way, or queues one.

        Returns:
            The load, and the waiting prefetch that was dropped for it.

        Raises:
            QueueFull: it is full, or the tenant's quota of loads is used up.
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
                        f"{len(self._loads)} loads are unfinished, as many as may be", "queue_full"
                    )
                dropped = max(idle, key=lambda load: load.number)
                self._remove(dropped)
            load = Load(
                digest, tenant, priority, next(self._numbers), self._clock(), self._size_of(digest)
            )
            self._loads[digest] = load
            self._push(load)
            return load, dropped

    def _full(self, message: str, reason: str) -> QueueFull:
        wait = max(
            0.001, sum(self._remaining(load) for load in self._loads.values()) / self.workers / 2
        )
        return QueueFull(f"{message}; ask again in {wait:.3g} s", wait, reason)

    def resume(self, load: Load) -> None:
        """Queues a load that has paused; it goes first."""
        with self._lock:
            load.priority, load.queued = RESUMED, True
            self._push(load)

    def finish(self, load: Load) -> None:
        """Forgets a load, and learns from one that came from storage."""
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

    def withdraw(self, load: Load) -> bool:
        """Forgets a load that no worker has begun; whether there was time."""
        with self._lock:
            idle = load.queued and load.slot is None and self._loads.get(load.digest) is load
            if idle:
                self._remove(load)
            return idle

    def eta(self, load: Load) -> float:
        """Seconds until a load should be ready, if no slot has to be waited for: bytes ahead and
        its own at the measured rate.
        """
        with self._lock:
            mine = (load.priority, load.number)
            ahead = sum(
                self._remaining(other)
                for other in self._loads.values()
                if (other.priority, other.number) < mine
            )
            waiting = ahead / self.workers if load.queued else 0.0
            return waiting + self._remaining(load)

    def eta_of_new(self, digest: str) -> float:
        """Seconds that a load would take if it were asked for now."""
        with self._lock:
            load = Load(digest, "", COLD, next(self._numbers), self._clock(), self._size_of(digest))
            return self.eta(load)

    def close(self) -> list[Load]:
        """Stops the workers after what they are at; returns the loads that are then unfinished."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()
        for thread in self._threads:
            thread.join()
        return list(self._loads.values())

    def _remaining(self, load: Load) -> float:
        """Seconds of a worker's time that a load still takes."""
        whole = (load.nbytes or self._mean_bytes) / self.bytes_per_s
        return (
            whole
            if load.started_at is None
            else max(0.0, whole - (self._clock() - load.started_at))
        )

    def _push(self, load: Load) -> None:
        heapq.heappush(self._heap, (load.priority, load.number, load))
        self._lock.notify()

    def _remove(self, load: Load) -> None:
        load.queued = False
        if self._loads.get(load.digest) is load:
            del self._loads[load.digest]

    def _next(self) -> Load | None:
        """Waits for the next load; None when the queue is closed."""
        with self._lock:
            while not self._closed:
                while self._heap:
                    priority, _, load = heapq.heappop(self._heap)
                    # else removed, or pushed again with another priority
                    if load.queued and priority == load.priority:
                        load.queued = False
                        if load.started_at is None:
                            load.started_at = self._clock()
                        return load
                self._lock.wait()
            return None

    def _run(self) -> None:
        if sys.platform.startswith("linux") and self._niceness:
            # of this thread only
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._niceness)
        while (load := self._next()) is not None:
            self._work(load)
