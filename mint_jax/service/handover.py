"""Calls from any thread into event loops, and waits of tasks for one-time events."""

import asyncio
import contextlib
import functools
import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


class Handover:
    """Calls from any thread that run in one event loop, in order.

    Calling into a loop writes to its pipe, and a dispatch of a hundred rows would do so a hundred
    times: the loop is called once for everything that arrived since the last call ran.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.loop = loop
        self._lock = threading.Lock()
        self._due: list[Callable[[], Any]] = []

    def give(self, call: Callable[..., Any], *args: Any) -> None:
        """Has the loop make a call; drops it if the loop is closed."""
        with self._lock:
            self._due.append(functools.partial(call, *args))
            if len(self._due) == 1:
                with contextlib.suppress(RuntimeError):  # closed
                    self.loop.call_soon_threadsafe(self._run)

    def _run(self) -> None:
        with self._lock:
            due, self._due = self._due, []
        for call in due:
            call()


class Waker:
    """Waits for events by key, without polling; ``wake`` may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._closed = False
        self._waiting: dict[str, set[Callable[[], Any]]] = {}

    async def wait(self, key: str, ready: Callable[[], T | None], timeout_s: float) -> T | None:
        """Returns the first result of ``ready`` that is not None, asked now and once more after
        ``wake`` of the key or the timeout.
        """
        event = asyncio.Event()
        call = functools.partial(asyncio.get_running_loop().call_soon_threadsafe, event.set)
        with self._lock:
            self._waiting.setdefault(key, set()).add(call)
        try:
            if (found := ready()) is None and timeout_s > 0 and not self._closed:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(event.wait(), timeout_s)
                found = ready()
            return found
        finally:
            with self._lock:
                calls = self._waiting.get(key, set())
                calls.discard(call)
                if not calls:
                    self._waiting.pop(key, None)

    def wake(self, keys: Iterable[str]) -> None:
        """Ends the waits for these keys."""
        with self._lock:
            calls = [call for key in keys for call in self._waiting.pop(key, ())]
        for call in calls:
            with contextlib.suppress(RuntimeError):  # its loop is closed
                call()

    def close(self) -> None:
        """Ends all waits; later ones end at once."""
        with self._lock:
            self._closed = True
            keys = list(self._waiting)
        self.wake(keys)
