"""A request's answers as they come."""

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import NamedTuple

from mint_jax.rollout.request import Completion, Request


class Piece(NamedTuple):
    """Tokens of one sample, as they come; ``logprobs`` and ``top`` as ``Completion``'s ``logprobs``
    and ``top_logprobs``.
    """

    sample: int
    tokens: list[int]
    logprobs: list[float]
    top: list[list[tuple[int, float]]] | None = None


class Stream:
    """One request's answers: an iterator of ``Piece`` until all samples have ended, and then
    ``result``.

    Pieces go to one reader: whoever iterates, or who ``listen``s.

    Attributes:
        request: as it was asked.
    """

    def __init__(self, request: Request, deadline: float | None = None):
        self.request, self.deadline, self.cancelled = request, deadline, False
        self._pieces: queue.SimpleQueue[Piece | None] = queue.SimpleQueue()
        self._done: Future[list[Completion]] = Future()
        self._listener: Callable[[Piece | None], None] | None = None
        self._lock = threading.Lock()  # of the change from the queue to a listener

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

    def when_done(self, call: Callable[["Stream"], None]) -> None:
        """Calls this once ``result`` no longer waits, in the loop's thread or, where that is so
        already, here; it must not wait.
        """
        self._done.add_done_callback(lambda _: call(self))

    def listen(self, call: "Callable[[Piece | None], None]") -> None:
        """Calls this with each piece, in order and once, and with None when ``result`` no longer
        waits.

        What came before is told here, what comes later in the engine's thread, behind it. The call
        must neither wait nor raise.
        """
        with self._lock:
            while not self._pieces.empty():
                call(self._pieces.get())
            self._listener = call

    def cancel(self) -> None:
        """Ends it at the loop's next turn; what was drawn is its result."""
        self.cancelled = True

    def put(self, piece: Piece) -> None:
        self._tell(piece)

    def end(self, result: "list[Completion] | BaseException") -> None:
        if isinstance(result, BaseException):
            self._done.set_exception(result)
        else:
            self._done.set_result(result)
        self._tell(None)

    def _tell(self, piece: Piece | None) -> None:
        with self._lock:
            if (listener := self._listener) is None:
                self._pieces.put(piece)
        if listener is not None:
            listener(piece)
