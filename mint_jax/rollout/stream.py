"""Streaming output of one request."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

from mint_jax.rollout.request import Completion, Request


class Piece(NamedTuple):
    """New tokens of one sample; ``logprobs`` and ``top`` as ``logprobs`` and ``top_logprobs`` of
    ``Completion``.
    """

    sample: int
    tokens: list[int]
    logprobs: list[float]
    top: list[list[tuple[int, float]]] | None = None

    def part(self, begin: int, end: int) -> "Piece":
        """Returns the piece of some of these tokens."""
        of, top = slice(begin, end), self.top
        return Piece(
            self.sample, self.tokens[of], self.logprobs[of], None if top is None else top[of]
        )


class Stream:
    """One request's output: each ``Piece`` to the callback of ``listen``, then ``result``."""

    def __init__(self, request: Request):
        self.request, self.cancelled = request, False
        self._pieces: list[Piece | None] = []  # until there is a listener
        self._done: Future[list[Completion]] = Future()
        self._listener: Callable[[Piece | None], None] | None = None
        self._lock = threading.Lock()

    def result(self, timeout: float | None = None) -> list[Completion]:
        """Waits at most ``timeout`` seconds for the completions; a ``TimeoutError`` does not end
        the request. Raises ``UserError`` if its revision could not be loaded or the engine stopped.
        """
        return self._done.result(timeout)

    @property
    def done(self) -> bool:
        return self._done.done()

    def when_done(self, call: Callable[["Stream"], None]) -> None:
        """Calls ``call``, which must not block, once ``result`` no longer waits."""
        self._done.add_done_callback(lambda _: call(self))

    def listen(self, call: "Callable[[Piece | None], None]") -> None:
        """Calls ``call`` with each piece in order, then with None when ``result`` no longer waits.
        Earlier pieces are delivered here, later ones in the engine's thread. It must neither block
        nor raise.
        """
        with self._lock:
            for piece in self._pieces:
                call(piece)
            self._listener = call

    def cancel(self) -> None:
        """Ends the request at the loop's next turn; the tokens drawn so far are its result."""
        self.cancelled = True

    def put(self, piece: Piece | None) -> None:
        with self._lock:
            if (listener := self._listener) is None:
                self._pieces.append(piece)
        if listener is not None:
            listener(piece)

    def end(self, result: "list[Completion] | BaseException") -> None:
        if isinstance(result, BaseException):
            self._done.set_exception(result)
        else:
            self._done.set_result(result)
        self.put(None)
