"""Training requests that survive a restart: each is accepted once, runs in its model's order, and
its result is kept until the client has it.

A request is (model, seq_id, call, body). The same request again has the same id and does not run
again; the same number with another body raises ``Conflict``. Each model's requests run in the order
of their numbers, from 1 and without gaps.
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

from mint_jax.digest import blake3_of
from mint_jax.errors import UserError
from mint_jax.service.handover import Waker
from mint_jax.service.server_db import Connection, DatabaseDamaged, ServerDatabase

KEEP_S = 300.0
SHORT = 64 << 10  # bytes of a payload up to which it stays in memory: reading one costs 50 us
SETTLED = 2  # value of ``requests.kept``


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
class TrainingRequest:
    """A request that is not settled. ``place`` and ``ended`` are those of its body and its result,
    0 until these are in the database; ``data`` is a short body, and after the end a short result.
    """

    id: str
    model: str
    seq_id: int
    call: str
    digest: str
    place: int = 0
    ended: int = 0
    category: Category | None = None
    is_again: bool = False
    is_released: bool = False
    data: bytes | None = None
    accepted: Future[None] = dataclasses.field(default_factory=Future)


@dataclasses.dataclass(eq=False, slots=True)
class _Model:
    """One model: its requests by number, None once settled, from ``first`` that is not; the next
    number to become ready; those that are ready or run; the place of the newest durable snapshot.
    """

    first: int = 1
    next: int = 1
    place: int = 0
    requests: dict[int, TrainingRequest | None] = dataclasses.field(default_factory=dict)
    running: collections.deque[TrainingRequest] = dataclasses.field(
        default_factory=collections.deque
    )

    def advance(self) -> list[TrainingRequest]:
        """Returns the requests that become ready; skips those that the state has."""
        ready = []
        while self.next in self.requests:
            if (request := self.requests[self.next]) is not None:
                if not request.place:  # on its way to the database
                    break
                if request.is_again or not request.ended:
                    ready.append(request)
            self.next += 1
        self.running.extend(ready)
        return ready


class Futures:
    """All unsettled requests of a database; all methods may be called from any thread.

    **Restart.** The caller keeps the models' states. A *place* counts everything that was accepted
    or has ended. The caller calls ``place(model)`` between two ``finish`` of the model: the state
    then holds exactly those requests that ended up to that place. Once a snapshot of this state is
    durable, the caller calls ``snapshot(model, place)``. After a restart it passes the places of
    the snapshots that it has loaded. ``take`` then first returns those requests of a model that
    ended after its place (``is_again``: the state needs them, their results stay as they are;
    failed requests had no effect and are left out), and then its unfinished ones. Calls must depend
    on nothing but state and body.

    A request is *settled* once its result is released, ``keep_s`` after its last delivery, and it
    failed or a snapshot has it. Settled requests are deleted and only their numbers stay known.

    Args:
        places: place of the loaded snapshot, of each model that has one.
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
        self._models: collections.defaultdict[str, _Model] = collections.defaultdict(_Model)
        self._ids: dict[str, TrainingRequest] = {}
        self._delivered: dict[str, float] = {}  # times of the last delivery, the earliest first
        self._ready: collections.deque[TrainingRequest] = collections.deque()
        self._load(places or {})

    # clients

    def submit(self, model: str, seq_id: int, call: str, body: bytes) -> str:
        """Returns the id of a request, which is in the database by then.

        Raises ``Conflict``; ``Gone``: the request ran long ago; ``Overloaded``: the queue is full;
        ``DatabaseFailed``: the disk refuses, so the request may be sent again.
        """
        request = self._accept(model, seq_id, call, body)
        request.accepted.result()
        return request.id

    async def submit_task(self, model: str, seq_id: int, call: str, body: bytes) -> str:
        """``submit`` for an asyncio task."""
        request = self._accept(model, seq_id, call, body)
        await asyncio.wrap_future(request.accepted)
        return request.id

    def wait(self, id: str, timeout_s: float = 0.0) -> Outcome | None:
        """Returns a request's outcome; None if it has not ended in time. Raises ``Gone``."""
        return self._waker.wait(id, lambda: self._outcome(id), timeout_s)

    async def wait_task(self, id: str, timeout_s: float = 0.0) -> Outcome | None:
        """``wait`` for an asyncio task."""
        return await self._waker.wait_task(id, lambda: self._outcome(id), timeout_s)

    def about(self, id: str) -> tuple[str, str]:
        """Returns the model and the call of a request. Raises ``Gone``."""
        if (request := self._ids.get(id)) is None:
            raise unknown(id)
        return request.model, request.call

    def delivered(self, id: str) -> None:
        """Keeps an outcome for another ``keep_s``. A crash may lose the mark."""
        with self._lock:
            request = self._ids.get(id)
            if request is None or not request.ended or request.is_released:
                return
            if self._delivered.pop(id, None) is None:
                query, values = "UPDATE requests SET kept = 1 WHERE place = ?", (request.place,)
                self._database.write(lambda c: c.execute(query, values), keep=True, lazy=True)
            self._delivered[id] = self._clock()

    def expire(self) -> None:
        """Releases the outcomes whose time is over."""
        with self._lock:
            while self._delivered:
                id, at = next(iter(self._delivered.items()))
                if at + self.keep_s > self._clock():
                    break
                del self._delivered[id]
                request = self._ids[id]
                request.is_released, request.data = True, None
                self._settle(request.model, [request])

    def end_waits(self) -> None:
        """Ends all waits for outcomes, also later ones, as if their time were over."""
        self._waker.close()

    # the executor

    def take(self) -> TrainingRequest | None:
        """Returns the next request to run, if there is one; those before it may be running."""
        with self._lock:
            return self._ready.popleft() if self._ready else None

    @property
    def num_ready(self) -> int:
        """Number of requests that ``take`` has."""
        return len(self._ready)

    def body(self, id: str) -> bytes | None:
        """Returns the body of an unfinished request; None if its model was forgotten."""
        with self._lock:
            if (request := self._ids.get(id)) is None:
                return None
            # a request that runs again may have its result there
            data = None if request.ended else request.data
        return self._payload(request.place) if data is None else data

    def finish(self, id: str, outcome: Outcome) -> None:
        """Ends a taken request, in the order of its model; ``wait`` returns the outcome once it is
        in the database.

        While the disk refuses, the outcome waits. The outcome of a request that ran again, or of a
        forgotten model, is dropped. Raises ``DatabaseFailed``: the database is closed.
        """
        if isinstance(outcome, Done):
            data, category = outcome.result, None
        else:
            data, category = outcome.error.encode(), outcome.category
        with self._lock:
            if (request := self._ids.get(id)) is None:
                return
            first = self._models[request.model].running.popleft()
            assert first is request, "requests end in the order in which they were taken"
            if request.is_again:
                request.is_again = False
                self._settle(request.model, [request])
                return

            def apply(connection: Connection) -> int:
                place = _insert_payload(connection, data, id, category)
                query = "UPDATE requests SET ended = ?, category = ? WHERE place = ?"
                connection.execute(query, (place, category, request.place))
                return place

            def ended(written: "Future[int]") -> None:
                if written.exception() is None:
                    with self._lock:
                        request.ended, request.category = written.result(), category
                        request.data = data if len(data) <= SHORT else None
                    self._waker.wake((id,))

            written = self._database.write(apply, len(data), keep=True)
        written.add_done_callback(ended)

    def __contains__(self, id: str) -> bool:
        """Returns whether a request is neither settled nor of a forgotten model."""
        return id in self._ids

    def place(self, model: str) -> int:
        """Returns the place of the model's state after its last finished request, once everything
        up to it is on the disk. Raises ``DatabaseFailed``.
        """
        with self._lock:
            running = self._models[model].running if model in self._models else ()
            if running and running[0].is_again:
                return running[0].ended - 1
        return self._database.write(_last_place).result()

    def snapshot(self, model: str, place: int) -> None:
        """Records that a snapshot at a place is durable: requests up to there do not run again."""
        with self._lock:
            if model in self._models:
                queue = self._models[model]
                queue.place = max(queue.place, place)
                self._settle(model, list(queue.requests.values()))

    def forget(self, model: str, then: Callable[[], None] = lambda: None) -> None:
        """Deletes a model, its waiting requests and its outcomes; its name is as if never used.
        ``then`` is called, in any thread, when the deletion is durable. Until then the model's
        snapshot is needed to open the database.
        """
        with self._lock:
            if model not in self._models:
                then()
                return
            written = self._database.write(functools.partial(_delete_model, model), keep=True)
            ids = [request.id for request in self._models.pop(model).requests.values() if request]
            for id in ids:
                del self._ids[id]
                self._delivered.pop(id, None)
            self._ready = collections.deque(one for one in self._ready if one.model != model)
        self._waker.wake(ids)
        written.add_done_callback(lambda written: written.exception() or then())

    # internals

    def _accept(self, model: str, seq_id: int, call: str, body: bytes) -> TrainingRequest:
        """Returns a request, which may still be on its way to the database."""
        request = TrainingRequest(uuid.uuid4().hex, model, seq_id, call, blake3_of(body))
        request.data = body if len(body) <= SHORT else None

        def apply(connection: Connection) -> int:
            place = _insert_payload(connection, body, request.id, model, seq_id, call)
            query = "INSERT INTO requests (place, id, model, seq_id, call, digest)"
            values = (place, request.id, model, seq_id, call, request.digest)
            connection.execute(f"{query} VALUES (?, ?, ?, ?, ?, ?)", values)
            return place

        def accepted(written: "Future[int]") -> None:
            error = written.exception()
            with self._lock:
                if request.id in self._ids:  # else its model was forgotten
                    if error is not None:
                        del queue.requests[seq_id], self._ids[request.id]
                    else:
                        request.place = written.result()
                        self._ready.extend(queue.advance())
            if error is not None:
                request.accepted.set_exception(error)
            else:
                request.accepted.set_result(None)
                self._on_ready()

        with self._lock:
            queue = self._models.get(model, _Model())
            if (found := queue.requests.get(seq_id)) is not None:
                if (found.digest, found.call) != (request.digest, call):
                    raise Conflict(
                        f"request {seq_id} of {model!r} was {found.call!r} with another body: give"
                        " a new request a new seq_id"
                    )
                return found
            if seq_id < queue.first or seq_id in queue.requests:
                raise Gone(
                    f"request {seq_id} of {model!r} has run, and its result was delivered: give a"
                    " new request a new seq_id"
                )
            written = self._database.write(apply, len(body))
            request.accepted.set_running_or_notify_cancel()  # a caller that leaves cancels nothing
            self._models[model] = queue
            queue.requests[seq_id] = self._ids[request.id] = request
        written.add_done_callback(accepted)
        return request

    def _outcome(self, id: str) -> Outcome | None:
        with self._lock:
            if (request := self._ids.get(id)) is None or request.is_released:
                raise unknown(id)
            if not request.ended:
                return None
            data = request.data
        if data is None and (data := self._payload(request.ended)) is None:  # settled meanwhile
            raise unknown(id)
        return Done(data) if request.category is None else Failed(data.decode(), request.category)

    def _payload(self, place: int) -> bytes | None:
        rows = self._database.read("SELECT data FROM payloads WHERE place = ?", place)
        return rows[0]["data"] if rows else None

    def _settle(self, model: str, requests: Iterable[TrainingRequest | None]) -> None:
        """Deletes those requests of which only the numbers are needed; needs the lock."""
        queue = self._models[model]
        settled = [
            one
            for one in requests
            if one is not None and one.is_released and not one.is_again
            if one.category is not None or one.ended <= queue.place
        ]
        if not settled:
            return
        for one in settled:
            del self._ids[one.id]
            queue.requests[one.seq_id] = None
        while queue.first in queue.requests and queue.requests[queue.first] is None:
            del queue.requests[queue.first]
            queue.first += 1
        places = [(one.place, one.ended) for one in settled]
        progress = model, queue.first, queue.place

        def apply(connection: Connection) -> None:
            connection.executemany("DELETE FROM payloads WHERE place IN (?, ?)", places)
            query = "UPDATE requests SET kept = ? WHERE place = ?"
            connection.executemany(query, [(SETTLED, place) for place, _ in places])
            connection.execute("DELETE FROM requests WHERE model = ? AND seq_id < ?", progress[:2])
            connection.execute("INSERT OR REPLACE INTO progress VALUES (?, ?, ?)", progress)

        self._database.write(apply, keep=True, lazy=True)

    def _load(self, places: Mapping[str, int]) -> None:
        self._database.write(self._check_payloads).result()
        end = self._database.write(_last_place).result()
        for model, place in places.items():
            if place > end:
                raise UserError(
                    f"snapshot of {model!r} is of place {place}, but the requests end at {end}: it"
                    " is of another database"
                )
        for model, first, place in self._database.read("SELECT * FROM progress"):
            if places.get(model, 0) < place:
                raise UserError(
                    f"snapshot of {model!r} is of place {places.get(model, 0)}, but requests up to"
                    f" {place} are deleted: restore the newest snapshot"
                )
            self._models[model] = _Model(first, next=first)
        for row in self._database.read("SELECT * FROM requests ORDER BY place"):
            queue = self._models[row["model"]]
            queue.place = places.get(row["model"], 0)
            self._load_request(row, queue)
        for queue in self._models.values():
            self._ready.extend(queue.advance())

    def _load_request(self, row: sqlite3.Row, queue: _Model) -> None:
        if row["kept"] == SETTLED:
            queue.requests[row["seq_id"]] = None
            return
        names = ("id", "model", "seq_id", "call", "digest", "place")
        request = TrainingRequest(*(row[name] for name in names))
        request.accepted.set_result(None)
        request.ended = row["ended"] or 0
        request.category = None if row["category"] is None else Category(row["category"])
        request.is_again = request.category is None and request.ended > queue.place
        queue.requests[request.seq_id] = self._ids[request.id] = request
        if row["kept"]:
            self._delivered[request.id] = self._clock()

    def _check_payloads(self, connection: Connection) -> None:
        query = """SELECT requests.*, seal, data FROM requests LEFT JOIN payloads
            ON payloads.place = requests.{0} WHERE kept < ? AND requests.{0} NOT NULL"""
        owners = {"place": ("id", "model", "seq_id", "call"), "ended": ("id", "category")}
        for column, owner in owners.items():
            for row in connection.execute(query.format(column), (SETTLED,)):
                values = (row[name] for name in owner)
                if row["data"] is None or _seal(row["data"], *values) != row["seal"]:
                    reason = f"the payload at {row[column]} is not what was written"
                    raise DatabaseDamaged(self._database.path, reason)


def _insert_payload(connection: Connection, data: bytes, *owner: object) -> int:
    query = "INSERT INTO payloads (seal, data) VALUES (?, ?)"
    place = connection.execute(query, (_seal(data, *owner), data)).lastrowid
    assert place is not None
    return place


def _seal(data: bytes, *owner: object) -> str:
    """Returns the digest of a payload and of the columns of its request that it depends on."""
    return blake3_of("\0".join([*map(str, owner), blake3_of(data)]).encode())


def _last_place(connection: Connection) -> int:
    query = "SELECT seq FROM sqlite_sequence WHERE name = 'payloads'"
    return next(iter(connection.execute(query)), (0,))[0]


def _delete_model(model: str, connection: Connection) -> None:
    for place in ("place", "ended"):
        query = f"SELECT {place} FROM requests WHERE model = ?"
        connection.execute(f"DELETE FROM payloads WHERE place IN ({query})", (model,))
    connection.execute("DELETE FROM requests WHERE model = ?", (model,))
    connection.execute("DELETE FROM progress WHERE model = ?", (model,))
