"""Requests that are not settled, and what is known of their models: plain data, changed by
``futures`` under its lock.
"""

import collections
import dataclasses
import enum
from collections.abc import Iterable
from typing import NamedTuple

from mint_jax.service.journal import Ticket

# bytes of a result that is kept in memory; longer ones are read back from the journal
IN_MEMORY = 64 << 10


class Category(enum.StrEnum):
    """Whose fault a failure is."""

    USER = "user"
    SERVER = "server"
    UNKNOWN = "unknown"


@dataclasses.dataclass(frozen=True)
class Done:
    """A request's result."""

    result: bytes


@dataclasses.dataclass(frozen=True)
class Failed:
    """Why a request has no result; it had no effect either."""

    error: str
    category: Category = Category.SERVER


Outcome = Done | Failed


class Request(NamedTuple):
    """What the executor runs.

    Attributes:
        again: its result is known; the model's state needs it.
    """

    id: str
    model: str
    seq_id: int
    call: str
    body: bytes
    again: bool


class State(enum.Enum):
    ACCEPTED = enum.auto()
    READY = enum.auto()
    ENDING = enum.auto()  # its result is on the way to the journal
    ENDED = enum.auto()


@dataclasses.dataclass(eq=False, slots=True)
class Entry:
    """A request that is not settled.

    Attributes:
        start: its place in the journal.
        ticket: None when it was there before the journal was opened.
        body: until it has run.
        outcome: None while there is none, and for a long result, which lies at ``ended_at``.
        ended_at, ended: the place of its result's record.
        taken: the executor has it.
        delivered_at: seconds of the futures' clock.
    """

    id: str
    model: str
    seq_id: int
    call: str
    digest: str
    start: int
    ticket: Ticket | None
    body: bytes | None
    state: State = State.ACCEPTED
    again: bool = False
    taken: bool = False
    outcome: Outcome | None = None
    failed: bool = False
    ended_at: int = 0
    ended: int = 0
    delivered_at: float | None = None
    released: bool = False

    def end(self, outcome: Outcome, start: int, end: int) -> None:
        """Notes an outcome, whose record lies at ``[start, end)``."""
        self.state, self.ended_at, self.ended = State.ENDED, start, end
        self.failed = isinstance(outcome, Failed)
        self.outcome = (
            outcome if isinstance(outcome, Failed) or len(outcome.result) <= IN_MEMORY else None
        )


@dataclasses.dataclass(eq=False, slots=True)
class Model:
    """What is known of a model.

    Attributes:
        next: number of the request that becomes ready next.
        place: of the newest durable snapshot.
        floor: all numbers below are settled.
        settled: further ones that are.
        running: requests that are ready or taken, in order.
    """

    next: int = 1
    place: int = 0
    floor: int = 1
    settled: set[int] = dataclasses.field(default_factory=set)
    entries: dict[int, Entry] = dataclasses.field(default_factory=dict)
    running: collections.deque[Entry] = dataclasses.field(default_factory=collections.deque)

    def is_settled(self, seq_id: int) -> bool:
        """Whether nothing but the number is known of a request."""
        return seq_id < self.floor or seq_id in self.settled

    def settle(self, seq_ids: Iterable[int]) -> None:
        """Notes that nothing but these numbers need be known."""
        self.settled.update(seq_ids)
        while self.floor in self.settled:
            self.settled.remove(self.floor)
            self.floor += 1

    def advance(self) -> list[Entry]:
        """Makes ready what may run, in order, and returns it; what had its effect already is passed
        over.
        """
        ready = []
        self.next = max(self.next, self.floor)
        while (entry := self.entries.get(self.next)) is not None or self.is_settled(self.next):
            if entry is not None and (entry.again or entry.state is State.ACCEPTED):
                if entry.ticket is not None:
                    break
                if not entry.again:
                    entry.state = State.READY
                ready.append(entry)
            self.next += 1
        self.running.extend(ready)
        return ready
