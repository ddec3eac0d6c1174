"""Futures of training requests that survive a restart: each request is accepted once, runs in
order, and its result is kept until the client has it.

A request is (model, seq_id, call, body). ``submit`` returns its id once it is in the database; the
same request again returns the same id and does not run again, and the same number with another body
raises ``Conflict``. ``take`` hands requests to the executor, each model's in the order of its
numbers, from 1 and without gaps. ``finish`` takes the result; ``wait`` returns it once it is in the
database too, until ``keep_s`` after the last ``delivered``. Later calls raise ``Gone``.

**Restart.** The caller keeps the models' states. A *place* counts everything that was accepted or
has ended. A snapshot of a model's state goes with ``place(model)``, which the caller calls between
two ``finish`` of the model: the state holds exactly those requests that ended up to that place.
Once the snapshot is durable, the caller calls ``snapshot(model, place)``. After a restart the
caller passes the places of the snapshots that it has loaded. ``take`` then first returns those
requests of a model that ended after its place (``is_again``: the state needs them, their results
stay as they are; failed requests had no effect and are left out), and then its unfinished ones.
Calls must depend on nothing but state and body.

A request is *settled* when its result is released, and it failed or a snapshot has it. Settled
requests are deleted and only their numbers stay known. ``forget`` deletes a model.
"""

import asyncio
import collections
import dataclasses
import enum
import functools
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple

from mint_jax.digest import blake3_of
from mint_jax.errors import UserError
from mint_jax.service.handover import Waker
from mint_jax.service.server_db import Connection, DatabaseDamaged, ServerDatabase

KEEP_S = 300.0
SHORT = 64 << 10  # bytes of a payload up to which it stays in memory
LONGEST_NAME = 1000  # bytes of a model's name, and of a call's


class Category(enum.StrEnum):
    """Cause of a failure: the client's mistake, or the server."""

    USER = "user"
    SERVER = "server"


@dataclasses.dataclass(frozen=True)
class Done:
    """A request's result."""

    result: bytes


@dataclasses.dataclass(frozen=True)
class Failed:
    """The error of a request that had no effect."""

    error: str
    category: Category = Category.SERVER


Outcome = Done | Failed


class TrainingRequest(NamedTuple):
    """A request for the executor; ``is_again``: its result is known, the model's state needs it."""

    id: str
    model: str
    seq_id: int
    call: str
    is_again: bool


class Conflict(UserError):
    """The number was used for another request."""


class Gone(UserError):
    """There is no future of this id, or its result was acknowledged or has expired."""


def unknown(id: str) -> Gone:
    """Returns the error for an id that is unknown or another tenant's; both have the same text."""
    return Gone(
        f"future {id[:80]!r} is not kept here: it was never given out, or its result was delivered"
    )


@dataclasses.dataclass(eq=False, slots=True)
class _Tracked:
    """A request that is not settled; ``place`` and ``ended`` are those of its body and its result,
    or 0. ``data``: a short body until it has ended, then a short result; reading costs 50 us.
    """

    id: str
    model: str
    seq_id: int
    call: str
    digest: str
    place: int = 0
    accepted: "Future[None] | None" = None
    ended: int = 0
    data: bytes | None = None
    category: Category | None = None
    is_again: bool = False
    delivered_at: float | None = None
    is_released: bool = False


@dataclasses.dataclass(eq=False, slots=True)
class _ModelQueue:
    """The requests of one model: the number that becomes ready next, the place of the newest
    durable snapshot, the settled numbers, and ready or running requests in order.
    """

    next: int = 1
    place: int = 0
    first_unsettled: int = 1
    settled: set[int] = dataclasses.field(default_factory=set)
    entries: dict[int, _Tracked] = dataclasses.field(default_factory=dict)
    running: "collections.deque[_Tracked]" = dataclasses.field(default_factory=collections.deque)

    def is_settled(self, seq_id: int) -> bool:
        return seq_id < self.first_unsettled or seq_id in self.settled

    def settle(self, seq_ids: Iterable[int]) -> None:
        self.settled.update(seq_ids)
        while self.first_unsettled in self.settled:
            self.settled.remove(self.first_unsettled)
            self.first_unsettled += 1

    def advance(self) -> list[_Tracked]:
        """Returns the requests that become ready; skips those that the state has."""
        ready = []
        self.next = max(self.next, self.first_unsettled)
        while (entry := self.entries.get(self.next)) is not None or self.is_settled(self.next):
            if entry is not None and (entry.is_again or not entry.ended):
                if entry.accepted is not None:
                    break
                ready.append(entry)
            self.next += 1
        self.running.extend(ready)
        return ready


class Futures:
    """All unsettled requests of a database; all methods may be called from any thread.

    Args:
        places: place of the loaded snapshot, of each model that has one.
        keep_s: seconds that a result is kept after its delivery.
        clock: monotonic seconds. A restart begins the time of delivered results again.
        on_ready: called, in any thread, when ``take`` has a new request.

    Raises:
        DatabaseDamaged: a body or a result is not what was written.
        UserError: a snapshot is older than the requests that were deleted since, or is of another
            database.
    """

    def __init__(
        self,
        database: ServerDatabase,
        places: Mapping[str, int] | None = None,
        *,
        keep_s: float = KEEP_S,
        clock: Callable[[], float] = time.monotonic,
        on_ready: Callable[[], None] = lambda: None,
    ):
        self.keep_s, self._clock, self._database = keep_s, clock, database
        self._on_ready = on_ready
        self._lock = threading.Lock()
        self._waker = Waker()
        self._models: dict[str, _ModelQueue] = {}
        self._ids: dict[str, _Tracked] = {}
        # by time of delivery
        self._delivered: collections.OrderedDict[str, _Tracked] = collections.OrderedDict()
        self._ready: collections.deque[_Tracked] = collections.deque()
        self._end = 0  # the highest place that is known
        try:
            self._load(places or {})
        except UserError:
            raise
        except ValueError as error:
            raise DatabaseDamaged(
                f"{database.path} is damaged ({error}): restore it from a backup"
            ) from None

    # clients

    def submit(self, model: str, seq_id: int, call: str, body: bytes) -> str:
        """Returns the id of a request, which is in the database by then.

        Raises:
            Conflict: another request had this number.
            Gone: the request ran long ago.
            Overloaded: the queue is full.
            DatabaseFailed: the disk refuses: the request was not accepted and may be sent again.
        """
        entry = self._accept(model, seq_id, call, body)
        if (accepted := entry.accepted) is not None:
            accepted.result()
        return entry.id

    async def submit_task(self, model: str, seq_id: int, call: str, body: bytes) -> str:
        """``submit`` for an asyncio task."""
        entry = self._accept(model, seq_id, call, body)
        if (accepted := entry.accepted) is not None:
            await asyncio.wrap_future(accepted)
        return entry.id

    def wait(self, id: str, timeout_s: float = 0.0) -> Outcome | None:
        """Returns a request's outcome; None if it has not ended in time. Raises ``Gone``."""
        return self._waker.wait(id, lambda: self._outcome(id), timeout_s)

    async def wait_task(self, id: str, timeout_s: float = 0.0) -> Outcome | None:
        """``wait`` for an asyncio task."""
        return await self._waker.wait_task(id, lambda: self._outcome(id), timeout_s)

    def about(self, id: str) -> tuple[str, str]:
        """Returns the model and the call of a request. Raises ``Gone``."""
        with self._lock:
            entry = self._ids.get(id)
        if entry is None:
            raise unknown(id)
        return entry.model, entry.call

    def delivered(self, id: str) -> None:
        """Marks an outcome as delivered: it is kept for another ``keep_s``. A crash may lose the
        mark.
        """
        with self._lock:
            entry = self._ids.get(id)
            if entry is None or entry.is_released:
                return
            _check_ended(entry)
            if entry.delivered_at is None:
                self._note("UPDATE requests SET kept = 1 WHERE place = ?", entry.place)
            entry.delivered_at = self._clock()
            self._delivered[id] = entry
            self._delivered.move_to_end(id)

    def expire(self) -> None:
        """Releases the outcomes whose time is over."""
        with self._lock:
            while self._delivered:
                entry = next(iter(self._delivered.values()))
                if not self._is_expired(entry):
                    break
                self._release(entry)

    # the executor

    def take(self) -> TrainingRequest | None:
        """Returns the next request to run, if there is one; those before it may be running."""
        with self._lock:
            if not self._ready:
                return None
            entry = self._ready.popleft()
        return TrainingRequest(entry.id, entry.model, entry.seq_id, entry.call, entry.is_again)

    @property
    def num_ready(self) -> int:
        """Number of requests that ``take`` has."""
        return len(self._ready)

    def body(self, id: str) -> bytes | None:
        """Returns the body of an unfinished request; None if its model was forgotten."""
        with self._lock:
            entry = self._ids.get(id)
        if entry is None:
            return None
        # a request that runs again may have its result there
        data = None if entry.ended else entry.data
        return self._payload(entry.place) if data is None else data

    def finish(self, id: str, outcome: Outcome) -> None:
        """Ends a taken request, in the order of its model; ``wait`` returns the outcome once it is
        in the database.

        While the disk refuses, the outcome waits. The outcome of a request that ran again, or of a
        forgotten model, is dropped. Raises ``ValueError``: one before it has not finished;
        ``DatabaseFailed``: the database is closed; the request runs again after a restart.
        """
        if isinstance(outcome, Done):
            data, category = outcome.result, None
        else:
            data, category = outcome.error.encode(), outcome.category
        with self._lock:
            entry = self._ids.get(id)
            if entry is None:
                return
            running = self._models[entry.model].running
            if not running or running[0] is not entry:
                raise ValueError(
                    f"request {entry.seq_id} of {entry.model!r} is not the one to finish now:"
                    " finish them as they were taken"
                )
            running.popleft()
            if entry.is_again:
                entry.is_again = False
                self._settle(entry.model, [entry])
                return

            def apply(connection: Connection) -> int:
                ended = _insert_payload(connection, data, entry.id, category)
                query = "UPDATE requests SET ended = ?, category = ? WHERE place = ?"
                connection.execute(query, (ended, category, entry.place))
                return ended

            written = self._database.write(apply, len(data), keep=True)
        written.add_done_callback(functools.partial(self._ended, entry, category, data))

    def is_needed(self, id: str) -> bool:
        """Returns whether a request has still to run, for the first time or again."""
        with self._lock:
            entry = self._ids.get(id)
            return entry is not None and (entry.is_again or not entry.ended)

    def __contains__(self, id: str) -> bool:
        """Returns whether a request is known: not settled, and of a model that is not forgotten."""
        with self._lock:
            return id in self._ids

    def place(self, model: str) -> int:
        """Returns the place that goes with the model's state after its last finished request, once
        everything up to it is on the disk. Raises ``DatabaseFailed``: the disk refuses.
        """
        with self._lock:
            running = self._models[model].running if model in self._models else ()
            if running and running[0].is_again:
                return running[0].ended - 1
        place = self._database.write(_last_place).result()
        self._end = max(self._end, place)
        return place

    def snapshot(self, model: str, place: int) -> None:
        """Records that a snapshot at a place is durable: requests up to there do not run again.
        Raises ``UserError``: the database has not reached this place.
        """
        self._check_reached(model, place)
        with self._lock:
            queue = self._models.setdefault(model, _ModelQueue())
            queue.place = max(queue.place, place)
            self._settle(model, list(queue.entries.values()))

    def forget(self, model: str, then: Callable[[], None] = lambda: None) -> None:
        """Deletes a model: its waiting requests do not run, its outcomes are gone, and its name is
        as if never used.

        Args:
            then: called, in any thread, when the deletion is durable. Until then the model's
                snapshot is needed to open the database.
        """
        with self._lock:
            if model not in self._models:
                then()
                return
            written = self._database.write(functools.partial(_delete_model, model), keep=True)
            ids = [entry.id for entry in self._models.pop(model).entries.values()]
            for id in ids:
                del self._ids[id]
                self._delivered.pop(id, None)
            self._ready = collections.deque(entry for entry in self._ready if entry.model != model)
        self._waker.wake(ids)
        written.add_done_callback(lambda written: written.exception() or then())

    # the server

    def end_waits(self) -> None:
        """Ends all waits for outcomes, also later ones, as if their time were over."""
        self._waker.close()

    # internals; ``_note``, ``_release`` and ``_settle`` need the lock

    def _accept(self, model: str, seq_id: int, call: str, body: bytes) -> _Tracked:
        """Returns the entry of a request, which may still be on its way to the database."""
        for what, text in (("model", model), ("call", call)):
            if not 0 < len(text.encode()) <= LONGEST_NAME:
                raise UserError(f"{what} is {text[:80]!r}; expected 1 to {LONGEST_NAME} bytes")
        if not 1 <= seq_id < 2**63:
            raise UserError(f"seq_id of a request to {model!r} is {seq_id}; expected 1 or more")
        entry = _Tracked(uuid.uuid4().hex, model, seq_id, call, blake3_of(body))
        entry.data = body if len(body) <= SHORT else None

        def apply(connection: Connection) -> int:
            place = _insert_payload(connection, body, entry.id, model, seq_id, call)
            query = "INSERT INTO requests (place, id, model, seq_id, call, digest)"
            values = (place, entry.id, model, seq_id, call, entry.digest)
            connection.execute(f"{query} VALUES (?, ?, ?, ?, ?, ?)", values)
            return place

        with self._lock:
            queue = self._models.get(model, _ModelQueue())
            if (found := queue.entries.get(seq_id)) is not None:
                if (found.digest, found.call) != (entry.digest, call):
                    raise Conflict(
                        f"request {seq_id} of {model!r} was {found.call!r} with another body: give"
                        " a new request a new seq_id"
                    )
                return found
            if queue.is_settled(seq_id):
                raise Gone(
                    f"request {seq_id} of {model!r} has run, and its result was delivered: give a"
                    " new request a new seq_id"
                )
            written = self._database.write(apply, len(body))
            accepted = entry.accepted = Future()
            accepted.set_running_or_notify_cancel()  # who stops waiting cancels nothing
            self._models[model] = queue
            queue.entries[seq_id] = self._ids[entry.id] = entry
        written.add_done_callback(functools.partial(self._accepted, entry, accepted))
        return entry

    def _accepted(self, entry: _Tracked, accepted: "Future[None]", written: "Future[int]") -> None:
        """Makes a request ready, and those that waited for it. A refused one leaves no trace."""
        with self._lock:
            queue = self._models.get(entry.model)
            is_known = queue is not None and queue.entries.get(entry.seq_id) is entry
            if queue is None or not is_known:
                pass  # its model was forgotten
            elif written.exception() is not None:
                del queue.entries[entry.seq_id], self._ids[entry.id]
            else:
                entry.accepted, entry.place = None, written.result()
                self._end = max(self._end, entry.place)
                self._ready.extend(queue.advance())
        if (error := written.exception()) is not None:
            accepted.set_exception(error)
        else:
            accepted.set_result(None)
            self._on_ready()

    def _ended(
        self, entry: _Tracked, category: Category | None, data: bytes, written: "Future[int]"
    ) -> None:
        if written.exception() is not None:
            return
        with self._lock:
            entry.ended, entry.category = written.result(), category
            entry.data = data if len(data) <= SHORT else None
            self._end = max(self._end, entry.ended)
        self._waker.wake((entry.id,))

    def _outcome(self, id: str) -> Outcome | None:
        with self._lock:
            entry = self._ids.get(id)
            if entry is not None and not entry.is_released and self._is_expired(entry):
                self._release(entry)
            if entry is None or entry.is_released:
                raise unknown(id)
            if not entry.ended:
                return None
            data = entry.data
        if data is None and (data := self._payload(entry.ended)) is None:  # released meanwhile
            raise unknown(id)
        return Done(data) if entry.category is None else Failed(data.decode(), entry.category)

    def _payload(self, place: int) -> bytes | None:
        rows = self._database.read("SELECT data FROM payloads WHERE place = ?", place)
        return rows[0]["data"] if rows else None

    def _is_expired(self, entry: _Tracked) -> bool:
        return entry.delivered_at is not None and entry.delivered_at + self.keep_s <= self._clock()

    def _check_reached(self, model: str, place: int) -> None:
        if place > self._end:
            raise UserError(
                f"snapshot of {model!r} is of place {place}, but the requests end at {self._end}:"
                " it is of another database"
            )

    def _note(self, query: str, *values: Any) -> None:
        self._database.write(lambda c: c.execute(query, values), keep=True, lazy=True)

    def _release(self, entry: _Tracked) -> None:
        entry.is_released, entry.data = True, None
        self._delivered.pop(entry.id, None)
        self._note("UPDATE requests SET kept = 2 WHERE place = ?", entry.place)
        self._settle(entry.model, [entry])

    def _settle(self, model: str, entries: Iterable[_Tracked]) -> None:
        """Deletes those requests of which only the numbers are needed."""
        queue = self._models[model]
        settled = [
            entry
            for entry in entries
            if entry.is_released
            and not entry.is_again
            and (entry.category is not None or entry.ended <= queue.place)
        ]
        if not settled:
            return
        for entry in settled:
            del queue.entries[entry.seq_id], self._ids[entry.id]
        queue.settle(entry.seq_id for entry in settled)
        places = [(entry.place, entry.ended) for entry in settled]
        progress = model, queue.first_unsettled, queue.place

        def apply(connection: Connection) -> None:
            connection.executemany("DELETE FROM payloads WHERE place IN (?, ?)", places)
            bodies = [pair[:1] for pair in places]
            connection.executemany("UPDATE requests SET kept = 3 WHERE place = ?", bodies)
            connection.execute("DELETE FROM requests WHERE model = ? AND seq_id < ?", progress[:2])
            connection.execute("INSERT OR REPLACE INTO progress VALUES (?, ?, ?)", progress)

        self._database.write(apply, keep=True, lazy=True)

    def _load(self, places: Mapping[str, int]) -> None:
        """Reads the database."""
        self._database.write(_check_payloads).result()
        self._end = self._database.write(_last_place).result()
        for model, place in places.items():
            self._check_reached(model, place)
        for model, first_unsettled, place in self._database.read("SELECT * FROM progress"):
            if places.get(model, 0) < place:
                raise UserError(
                    f"snapshot of {model!r} is of place {places.get(model, 0)}, but requests up to"
                    f" {place} are deleted: restore the newest snapshot"
                )
            self._models[model] = _ModelQueue(first_unsettled=first_unsettled)
        for row in self._database.read("SELECT * FROM requests ORDER BY place"):
            self._load_request(row)
        with self._lock:
            for model, queue in self._models.items():
                queue.place = places.get(model, 0)
                for entry in queue.entries.values():
                    entry.is_again = entry.category is None and entry.ended > queue.place
                self._settle(model, list(queue.entries.values()))
                self._ready.extend(queue.advance())

    def _load_request(self, row: sqlite3.Row) -> None:
        queue = self._models.setdefault(row["model"], _ModelQueue())
        if row["kept"] == 3:
            queue.settle([row["seq_id"]])
            return
        entry = _Tracked(
            row["id"], row["model"], row["seq_id"], row["call"], row["digest"], row["place"]
        )
        entry.ended, entry.is_released = row["ended"] or 0, row["kept"] == 2
        entry.category = None if row["category"] is None else Category(row["category"])
        queue.entries[entry.seq_id] = self._ids[entry.id] = entry
        if row["kept"] == 1:
            entry.delivered_at = self._clock()
            self._delivered[entry.id] = entry


def _check_ended(entry: _Tracked) -> None:
    if not entry.ended:
        raise UserError(f"future {entry.id!r} has not ended: its outcome cannot have arrived")


def _insert_payload(connection: Connection, data: bytes, *owner: object) -> int:
    query = "INSERT INTO payloads (seal, data) VALUES (?, ?)"
    place = connection.execute(query, (_seal(data, *owner), data)).lastrowid
    assert place is not None
    return place


def _seal(data: bytes, *owner: object) -> str:
    """Returns the digest of a payload and of the columns of its request that it depends on."""
    return blake3_of("\0".join([*map(str, owner), blake3_of(data)]).encode())


def _check_payloads(connection: Connection) -> None:
    """Raises ValueError if a body or a result is not what was written for its request."""
    query = """SELECT requests.*, seal, data FROM requests LEFT JOIN payloads
        ON payloads.place = requests.{} WHERE kept < 3 AND requests.{} NOT NULL"""
    for column, owner in (
        ("place", ("id", "model", "seq_id", "call")),
        ("ended", ("id", "category")),
    ):
        for row in connection.execute(query.format(column, column)):
            if (
                row["data"] is None
                or _seal(row["data"], *(row[name] for name in owner)) != row["seal"]
            ):
                raise ValueError(f"the payload at {row[column]} is not what was written")


def _last_place(connection: Connection) -> int:
    query = "SELECT seq FROM sqlite_sequence WHERE name = 'payloads'"
    return next(iter(connection.execute(query)), (0,))[0]


def _delete_model(model: str, connection: Connection) -> None:
    for place in ("place", "ended"):
        query = f"SELECT {place} FROM requests WHERE model = ?"
        connection.execute(f"DELETE FROM payloads WHERE place IN ({query})", (model,))
    connection.execute("DELETE FROM requests WHERE model = ?", (model,))
    connection.execute("DELETE FROM progress WHERE model = ?", (model,))
