"""Results that need not survive a restart, such as samples: clients repeat their requests then.

An answer is kept until it is acknowledged, ``KEEP_S`` seconds after it was delivered, or
``FORGOTTEN_S`` after it ended; less long if all answers together exceed ``kept_bytes``. ``end`` may
be called from any thread, everything else in the event loop.
"""

import dataclasses
import math
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from typing import Any

from mint_jax.service.futures import KEEP_S, Conflict, Gone
from mint_jax.service.handover import Waker

FORGOTTEN_S = 1800.0
KEPT_BYTES = 256 << 20  # of answers that have ended
PLACES = 1 << 32  # of one process
PREFIX = "a-"  # of ids; no future's id begins like this


@dataclasses.dataclass(eq=False)
class Answer:
    """One request's answer; ``value`` or ``failure`` is set once it has ended.

    Attributes:
        group: of the requests that are polled together.
        number: of the request in its group; None if it is never repeated.
        body: digest of the request's body, so that a number is not used for two requests.
        what: a stream to cancel; None once the request has ended.
        count: number of samples.
        until: the time when it is dropped; infinite until the request has ended.
        place: in the order in which the answers of its group end.
    """

    id: str
    group: str
    number: int | None
    body: str
    what: Any = None
    count: int = 1
    nbytes: int = 0
    value: Any = None
    failure: BaseException | None = None
    until: float = math.inf
    place: int = 0


def group_of(tenant: str, owner: str, clone: int = 0) -> str:
    """Returns the group of a client's copy, whose requests are polled together."""
    return f"{tenant}/{owner}/{clone}"


def unknown(id: str) -> Gone:
    """Returns the error for an id that is unknown or another tenant's, in the same words."""
    reason = "the server has restarted, or its answer was delivered; ask again"
    return Gone(f"request {id[:80]!r} is not kept here: {reason}")


class Answers:
    """The answers of one process.

    Args:
        clock: monotonic seconds.
        start: number of this start of the server, above those of earlier ones. A client's cursor
            outlives a restart, so places continue after those of earlier processes.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        start: int = 0,
        kept_bytes: int = KEPT_BYTES,
        new_id: Callable[[], str] = lambda: uuid.uuid4().hex,
    ):
        self._clock, self.kept_bytes, self._nbytes, self._new_id = clock, kept_bytes, 0, new_id
        self._lock, self._waker = threading.Lock(), Waker()
        self._answers: dict[str, Answer] = {}
        self._numbers: dict[tuple[str, int | None], Answer] = {}
        self._ends: dict[str, dict[int, Answer]] = {}  # of each group, by place
        self._places = start * PLACES

    def __len__(self) -> int:
        return len(self._answers)

    def begin(self, group: str, number: int | None, body: str) -> tuple[Answer, bool]:
        """Returns the answer to a request, and whether it is new: a known number of a group is the
        same request, repeated. Raises ``Conflict`` if another request had this number.
        """
        with self._lock:
            if (found := self._numbers.get((group, number))) is not None:
                if found.body != body:
                    text = f"request {number} of {group!r} was another one"
                    raise Conflict(f"{text}: give a new request a new number")
                return found, False
            answer = Answer(PREFIX + self._new_id(), group, number, body)
            self._answers[answer.id] = answer
            if number is not None:
                self._numbers[group, number] = answer
        return answer, True

    def withdraw(self, answer: Answer) -> None:
        """Forgets a request that was not accepted after all: it may be sent again."""
        with self._lock:
            self._drop(answer)

    def end(
        self, answer: Answer, value: Any = None, failure: Exception | None = None, nbytes: int = 0
    ) -> None:
        """Ends a request; ``nbytes`` is the memory of ``value``. If all answers together have too
        many bytes, those that would be dropped first are dropped now.
        """
        with self._lock:
            answer.value, answer.failure, answer.what = value, failure, None
            if answer.id in self._answers:
                answer.nbytes = nbytes
                self._nbytes += nbytes
                if self._nbytes > self.kept_bytes:
                    self._make_room()
            answer.until = self._clock() + FORGOTTEN_S
            self._places += 1
            answer.place = self._places
            self._ends.setdefault(answer.group, {})[answer.place] = answer
        self._waker.wake((answer.id, answer.group))

    def _make_room(self) -> None:
        ended = [one for one in self._answers.values() if one.until < math.inf]
        for one in sorted(ended, key=lambda one: one.until):
            if self._nbytes <= self.kept_bytes * 3 // 4:  # so that the next answers fit too
                break
            self._drop(one)

    def find(self, id: str) -> Answer:
        """Returns an answer, ended or not. Raises ``Gone``: unknown, or dropped."""
        if (found := self._answers.get(id)) is None:
            raise unknown(id)
        return found

    async def wait(self, id: str, timeout_s: float) -> Answer | None:
        """Returns an answer once it has ended; None on timeout. Raises ``Gone`` as ``find``."""
        found = self.find(id)
        return await self._waker.wait(id, lambda: found if found.place else None, timeout_s)

    async def wait_group(
        self, group: str, cursor: int, timeout_s: float
    ) -> tuple[list[Answer], int]:
        """Returns a group's answers that ended after a cursor, and the next cursor."""

        def ended() -> list[Answer] | None:
            with self._lock:
                places = self._ends.get(group, {}).items()
                return [answer for place, answer in places if place > cursor] or None

        found = await self._waker.wait(group, ended, timeout_s) or []
        return found, max([cursor, *(answer.place for answer in found)])

    def delivered(self, answer: Answer) -> None:
        """Marks an answer as delivered: it is kept for another ``KEEP_S`` seconds."""
        answer.until = min(answer.until, self._clock() + KEEP_S)

    def acknowledge(self, group: str, ids: Iterable[str]) -> None:
        """Drops a group's answers that the client has received; other ids are ignored."""
        with self._lock:
            for found in filter(None, map(self._answers.get, ids)):
                if found.group == group and found.place:
                    self._drop(found)

    def expire(self) -> int:
        """Drops expired answers; returns their number."""
        now = self._clock()
        with self._lock:
            expired = [one for one in self._answers.values() if one.until < now]
            for one in expired:
                self._drop(one)
        return len(expired)

    def _drop(self, answer: Answer) -> None:
        if self._answers.pop(answer.id, None) is not None:
            self._nbytes -= answer.nbytes
        if (ends := self._ends.get(answer.group)) is not None:
            ends.pop(answer.place, None)
            if not ends:
                del self._ends[answer.group]
        self._numbers.pop((answer.group, answer.number), None)

    def wake_all(self) -> None:
        """Ends all waits."""
        self._waker.close()
