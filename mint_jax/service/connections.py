"""uvicorn's HTTP protocol with two more time limits, so that idle clients cannot hold connections.

The head of a request has to arrive within seconds of the connection's start or of the head's first
byte, and a client has to read its answer. ``gate.py`` limits the time of bodies, uvicorn's
``timeout_keep_alive`` that of idle connections.
"""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


def timed(head_s: float = 10.0, stall_s: float = 60.0) -> type[H11Protocol]:
    """Returns a class for ``uvicorn.Config(http=...)``.

    Args:
        head_s: seconds in which the head of a request has to arrive.
        stall_s: seconds for which a client may read nothing while the connection's buffer is full.
    """

    class Timed(H11Protocol):
        _head: asyncio.TimerHandle | None = None
        _stall: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._head = self.loop.call_later(head_s, transport.abort)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.conn.their_state is not h11.IDLE:
                self._head = _stopped(self._head)
            elif self._head is None:  # a part of the next head
                self._head = self.loop.call_later(head_s, self.transport.abort)

        def pause_writing(self) -> None:
            super().pause_writing()
            if self._stall is None:
                self._watch_reader()

        def _watch_reader(self) -> None:
            """Ends the connection if the client reads nothing for ``stall_s``."""
            waiting = self.transport.get_write_buffer_size()

            def late() -> None:
                if self.transport.get_write_buffer_size() < waiting:
                    self._watch_reader()
                else:
                    self.transport.abort()

            self._stall = self.loop.call_later(stall_s, late)

        def resume_writing(self) -> None:
            super().resume_writing()
            self._stall = _stopped(self._stall)

        def connection_lost(self, exc: Exception | None) -> None:
            self._head, self._stall = _stopped(self._head), _stopped(self._stall)
            super().connection_lost(exc)

    return Timed


def _stopped(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
