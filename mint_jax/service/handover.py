"""From the engine's thread into an event loop: one call into the loop for all that has come since
the last one ran.

Crossing into a loop writes to its pipe: a dispatch of a hundred rows would do so a hundred times.
"""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from mint_jax.rollout.stream import Piece, Stream


class Handover:
    """Calls from any thread that are made in one event loop, in their order."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.loop = loop
        self._lock = threading.Lock()
        self._due: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []

    def give(self, call: Callable[..., Any], *args: Any) -> None:
        """Has the loop make a call; one of a loop that is closed is dropped, for nobody is left to
        see it.
        """
        with self._lock:
            self._due.append((call, args))
            if len(self._due) > 1:
                return
            try:
                self.loop.call_soon_threadsafe(self._run)
            except RuntimeError:  # closed
                self._due.clear()

    def _run(self) -> None:
        with self._lock:
            due, self._due = self._due, []
        for call, args in due:
            call(*args)


class Inbox:
    """The pieces of some streams, read by one task of the handover's loop."""

    def __init__(self, handover: Handover):
        self._handover = handover
        self._came = asyncio.Event()
        self._pieces: list[tuple[int, Piece | None]] = []

    def follow(self, number: int, stream: Stream) -> None:
        """Reads a stream from now on; its pieces carry its number."""
        stream.listen(lambda piece: self._handover.give(self._put, number, piece))

    def _put(self, number: int, piece: Piece | None) -> None:
        self._pieces.append((number, piece))
        self._came.set()

    async def take(self) -> list[tuple[int, Piece | None]]:
        """All that has come since the last call, at least one: (number of its stream, piece), None
        where a stream has ended.
        """
        await self._came.wait()
        self._came.clear()
        pieces, self._pieces = self._pieces, []
        return pieces
