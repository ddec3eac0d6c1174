"""A request's answers as they come."""

import queue
from collections.abc import Iterator
from concurrent.futures import Future
from typing import NamedTuple

from mint_jax.rollout.request import Completion, Request


class Piece(NamedTuple):
    """Tokens of one sample, as they come."""

    sample: int
    tokens: list[int]
    logprobs: list[float]


class Stream:
    """One request's answers: an iterator of ``Piece`` until all samples have ended, and then ``result``.

    Attributes:
        request: as it was asked.
    """

    def __init__(self, request: Request, deadline: float | None = None):
        self.request, self.deadline, self.cancelled = request, deadline, False
        self._pieces: queue.SimpleQueue[Piece | None] = queue.SimpleQueue()
        self._done: Future[list[Completion]] = Future()

    def __iter__(self) -> Iterator[Piece]:
        while (piece := self._pieces.get()) is not None:
            yield piece
        self._done.result()

    def result(self, timeout: float | None = None) -> list[Completion]:
        """The completions, ``n`` of them; waits.

        Raises:
            TimeoutError: not there in time; the request goes on.
            UserError: its revision could not be loaded, or the engine was stopped.
        """
        return self._done.result(timeout)

    @property
    def done(self) -> bool:
        return self._done.done()

    def cancel(self) -> None:
        """Ends it at the loop's next turn; what was drawn is its result."""
        self.cancelled = True

    def put(self, piece: Piece) -> None:
        self._pieces.put(piece)

    def end(self, result: "list[Completion] | BaseException") -> None:
        if isinstance(result, BaseException):
            self._done.set_exception(result)
        else:
            self._done.set_result(result)
        self._pieces.put(None)
