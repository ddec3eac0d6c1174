"""Waits of threads and asyncio tasks for one-time events, without polling.

A thread sleeps on a lock of its own, a task on a future of its loop. ``wake`` hands each loop one
call for all tasks that ended since the last one ran: crossing into a loop writes to its pipe, which
five thousand times in a row would stall the loop.
"""

import asyncio
import collections
import contextlib
import threading
from collections.abc import Iterable, Iterator


class _Sleeper:
    """A thread that waits for ``key``, or a task if ``future`` is set."""

    def __init__(self, key: str, future: "asyncio.Future[None] | None" = None):
        self.key, self.future = key, future
        self.lock = threading.Lock()
        self.lock.acquire()


class Waker:
    """All waiters, by key."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sleepers: dict[str, set[_Sleeper]] = {}
        self._due: dict[asyncio.AbstractEventLoop, collections.deque[asyncio.Future[None]]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._sleepers.values()))

    @contextlib.contextmanager
    def register(self, key: str, task: bool = False) -> Iterator[_Sleeper]:
        """A place in the list of those that ``wake(key)`` wakes; leaving the block gives it up.

        Whoever checks before registering whether there is anything to wait for does both under the
        lock under which it ends.

        Args:
            task: to be awaited in the running loop; else a thread's.
        """
        sleeper = _Sleeper(key, asyncio.get_running_loop().create_future() if task else None)
        with self._lock:
            self._sleepers.setdefault(key, set()).add(sleeper)
        try:
            yield sleeper
        finally:
            with self._lock:
                rest = self._sleepers.get(key)
                if rest is not None:
                    rest.discard(sleeper)
                    if not rest:
                        del self._sleepers[key]

    @staticmethod
    def sleep(sleeper: _Sleeper, timeout_s: float) -> None:
        """Returns when woken or when the time is over."""
        sleeper.lock.acquire(timeout=max(0.0, min(timeout_s, threading.TIMEOUT_MAX)))

    @staticmethod
    async def sleep_task(sleeper: _Sleeper, timeout_s: float) -> None:
        """``sleep`` of a task."""
        assert sleeper.future is not None
        await asyncio.wait((sleeper.future,), timeout=timeout_s)

    def wake(self, keys: Iterable[str]) -> None:
        """Wakes everybody who waits for one of the keys."""
        loops = []
        with self._lock:
            for key in keys:
                for sleeper in self._sleepers.pop(key, ()):
                    if sleeper.future is None:
                        sleeper.lock.release()
                        continue
                    loop = sleeper.future.get_loop()
                    if loop not in self._due:
                        self._due[loop] = collections.deque()
                        loops.append(loop)
                    self._due[loop].append(sleeper.future)
            for loop in loops:
                try:
                    loop.call_soon_threadsafe(self._end, loop)
                except RuntimeError:  # the loop was closed with waits open
                    del self._due[loop]

    def wake_all(self) -> None:
        """Wakes everybody."""
        with self._lock:
            keys = list(self._sleepers)
        self.wake(keys)

    def _end(self, loop: asyncio.AbstractEventLoop) -> None:
        """In the loop: the futures of all tasks that are due."""
        with self._lock:
            due = self._due.pop(loop, ())
        for future in due:
            if not future.done():
                future.set_result(None)
