"""Turns of training between those of the engine: of a server, and of its guests, see
``Server.adopt``.
"""

import queue
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from mint_jax.service.durable import Durable


class Turns:
    """The requests of several servers, one slice of one server a turn; ``rollout.active`` calls it.

    Args:
        own: of the server whose devices these are; it is charged for all samples.
        wake: notifies the devices' thread.
    """

    def __init__(self, own: Durable, wake: Callable[[], None]):
        self.all, self._own, self._wake, self._next = (own,), own, wake, 0
        self._between = queue.SimpleQueue[Callable[[], None]]()
        self.began, self.ended, self.order, self.took = own.began, own.ended, own.order, own.took

    def between(self, call: Callable[[], Any]) -> "Future[Any]":
        """Calls a function in the devices' thread, between two turns."""
        future = Future[Any]()

        def run() -> None:
            try:
                future.set_result(call())
            except Exception as error:
                future.set_exception(error)

        self._between.put(run)
        self._wake()
        return future

    def add(self, durable: Durable) -> None:
        self.all = (*self.all, durable)
        self._wake()

    def remove(self, durable: Durable) -> None:
        self.all = tuple(one for one in self.all if one is not durable)

    # the devices' thread, and once that has ended any other one

    @property
    def waiting(self) -> int:
        return self._between.qsize() + sum(one.waiting for one in self.all)

    def run_between(self) -> None:
        """Makes the calls that are left."""
        while not self._between.empty():
            self._between.get()()

    def turn(self, decoding: bool) -> bool:
        if not self._between.empty():  # one a turn: rows go on decoding
            self._between.get()()
        servers = self.all
        try:
            for _ in servers:
                self._next = (self._next + 1) % len(servers)
                if servers[self._next].turn(decoding):
                    return True
        except BaseException as failure:  # what is on the devices may be lost
            for one in servers:
                one.stop(failure)
            raise
        return False
