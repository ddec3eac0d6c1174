"""uvicorn's HTTP protocol with two more time limits, so that idle clients cannot hold connections.

``gate.py`` limits the time of bodies, uvicorn's ``timeout_keep_alive`` that of idle connections.
"""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


class TimedProtocol(H11Protocol):
    """A class for ``uvicorn.Config(http=...)``.

    The head of a request has to arrive within ``head_s`` of the connection's start or of the head's
    first byte. A client may read nothing for ``stall_s`` while the connection's buffer is full.
    """

    head_s, stall_s = 10.0, 60.0
    _head: asyncio.TimerHandle | None = None
    _stall: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._head = self.loop.call_later(self.head_s, transport.abort)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._head = _stopped(self._head)
        elif self._head is None:  # a part of the next head
            self._head = self.loop.call_later(self.head_s, self.transport.abort)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stall is None:
            self._watch_reader(-1)

    def _watch_reader(self, waiting: int) -> None:
        """Ends the connection if ``waiting`` bytes were not read since the last look."""
        size = self.transport.get_write_buffer_size()
        if waiting < 0 or size < waiting:
            self._stall = self.loop.call_later(self.stall_s, self._watch_reader, size)
        else:
            self.transport.abort()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stall = _stopped(self._stall)

    def connection_lost(self, exc: Exception | None) -> None:
        self._head, self._stall = _stopped(self._head), _stopped(self._stall)
        super().connection_lost(exc)


def _stopped(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
