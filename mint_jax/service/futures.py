"""Training requests that survive a restart: each is accepted once, runs in its model's order, and
its result is kept until the client has it.

A request is (model, seq_id, call, body). The same request again has the same id and does not run
again; the same number with another body raises ``Conflict``. Each model's requests run in the order
of their numbers, from 1 and without gaps.
"""

import collections
import dataclasses
import enum
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import NamedTuple

from mint_jax.digest import blake3_of
from mint_jax.errors import UserError
from mint_jax.service.handover import Waker
from mint_jax.service.server_db import Connection, DatabaseDamaged, ServerDatabase

KEEP_S = 300.0
SHORT = 64 << 10  # bytes of a body up to which it stays in memory: reading one costs 50 us
DELIVERED, RELEASED, SETTLED = 1, 2, 3  # values of ``requests.kept``
_STORED = """SELECT requests.*, body.data AS body, body.seal AS body_seal,
    result.data AS result, result.seal AS result_seal
    FROM requests LEFT JOIN payloads AS body ON body.place = requests.place
    LEFT JOIN payloads AS result ON result.place = ended ORDER BY requests.place"""


class Category(enum.StrEnum):
    """Cause of a failure: the client's mistake, or the server."""

    USER = "user"
    SERVER = "server"


class Outcome(NamedTuple):
    """A request's result; with a ``category`` its error, and it had no effect."""

    data: bytes
    category: Category | None = None


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
    """A request in the database that has to run; ``is_again``: it has ended before a restart.
    ``place`` is that of its body, ``ended`` that of its result; ``data`` is a short body.
    """

    id: str
    model: str
    seq_id: int
    call: str
    queue: "_Model"
    place: int
    ended: int | None = None
    data: bytes | None = None

    @property
    def is_again(self) -> bool:
        return self.ended is not None


@dataclasses.dataclass(eq=False, slots=True)
class _Model:
    """One model: the next number to become ready; requests from there by number, None if they need
    not run; those that are ready or run; the place of the newest durable snapshot.
    """

    next: int = 1
    place: int = 0
    accepted: dict[int, TrainingRequest | None] = dataclasses.field(default_factory=dict)
    running: collections.deque[TrainingRequest] = dataclasses.field(
        default_factory=collections.deque
    )

    def advance(self, on_ready: Callable[[TrainingRequest], None]) -> None:
        """Makes the requests ready whose turn it is."""
        while self.next in self.accepted:
            if (request := self.accepted.pop(self.next)) is not None:
                self.running.append(request)
                on_ready(request)
            self.next += 1


class Futures:
    """The requests of a database; all methods may be called from any thread.

    **Restart.** The caller keeps the models' states. A *place* counts everything that was accepted
    or has ended. The caller calls ``place(model)`` between two ``finish`` of the model: the state
    then holds exactly those requests that ended up to that place. Once a snapshot of this state is
    durable, the caller calls ``snapshot(model, place)``. After a restart it passes the places of
    the snapshots that it has loaded. ``on_ready`` then first gets those requests of a model that
    ended after its place (``is_again``: the state needs them, their results stay as they are;
    failed requests had no effect and are left out), and then its unfinished ones. Calls must depend
    on nothing but state and body.

    A request is *settled* once its result is released, ``keep_s`` after its last delivery, and it
    failed or a snapshot has it. Settled requests are deleted and only their numbers stay known.

    Args:
        places: place of the loaded snapshot, of each model that has one.
        on_ready: called, in any thread, with each request that may run, in the order of its model.
            It must call none of these methods.

    Raises:
        DatabaseDamaged: a body or a result is not what was written.
        UserError: a snapshot is older than the requests that were deleted since, or is of another
            database.
    """

    def __init__(
        self,
        database: ServerDatabase,
        places: Mapping[str, int] | None = None,
        on_ready: Callable[[TrainingRequest], None] = lambda request: None,
        *,
        keep_s: float = KEEP_S,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.keep_s, self._clock, self._database = keep_s, clock, database
        self._on_ready = on_ready
        self._lock = threading.Lock()
        self._waker = Waker()
        self._models: collections.defaultdict[str, _Model] = collections.defaultdict(_Model)
        self._delivered: dict[str, float] = {}  # times of the last delivery, the earliest first
        database.write(lambda connection: self._load(places or {}, connection)).result()
        for queue in self._models.values():
            queue.advance(self._on_ready)

    # clients

    def submit(self, model: str, seq_id: int, call: str, body: bytes) -> "Future[str]":
        """Returns the id of a request once it is in the database.

        Raises ``Overloaded``: the queue is full; ``DatabaseFailed``, also by the future: the disk
        refuses, and the request may be sent again. By the future: ``Conflict``; ``Gone``: the
        request ran long ago.
        """
        new, accepted = self._database.new_id(), Future[str]()
        accepted.set_running_or_notify_cancel()  # a caller that leaves cancels nothing

        def apply(connection: Connection) -> tuple[str, int]:
            query = """SELECT id, call, kept, seal FROM requests LEFT JOIN payloads USING (place)
                WHERE model = ? AND seq_id = ?"""
            found = connection.execute(query, (model, seq_id)).fetchone()
            if found is None and seq_id >= _first_unsettled(connection, model):
                place = _insert_payload(connection, body, new, model, seq_id, call)
                query = "INSERT INTO requests (place, id, model, seq_id, call)"
                values = (place, new, model, seq_id, call)
                connection.execute(f"{query} VALUES (?, ?, ?, ?, ?)", values)
                return new, place
            if found is None or found["kept"] == SETTLED:
                raise Gone(
                    f"request {seq_id} of {model!r} has run, and its result was delivered: give a"
                    " new request a new seq_id"
                )
            if found["seal"] != _seal(body, found["id"], model, seq_id, call):
                raise Conflict(
                    f"request {seq_id} of {model!r} was {found['call']!r} with another body: give a"
                    " new request a new seq_id"
                )
            return found["id"], 0

        def written(change: "Future[tuple[str, int]]") -> None:
            if (error := change.exception()) is not None:
                accepted.set_exception(error)
                return
            id, place = change.result()
            if place:
                with self._lock:
                    queue = self._models[model]
                    data = body if len(body) <= SHORT else None
                    about = (id, model, seq_id, call, queue, place)
                    queue.accepted[seq_id] = TrainingRequest(*about, data=data)
                    queue.advance(self._on_ready)
            accepted.set_result(id)

        self._database.write(apply, len(body)).add_done_callback(written)
        return accepted

    async def wait(self, id: str, timeout_s: float) -> Outcome | None:
        """Returns a request's outcome; None if it has not ended in time. Raises ``Gone``."""
        return await self._waker.wait(id, lambda: self.outcome(id), timeout_s)

    def outcome(self, id: str) -> Outcome | None:
        """Returns a request's outcome; None if it has not ended. Raises ``Gone``."""
        query = "ended, category, data FROM requests LEFT JOIN payloads ON payloads.place = ended"
        ended, category, data = self._stored(query, id)
        if ended is None:
            return None
        return Outcome(data, None if category is None else Category(category))

    def about(self, id: str) -> tuple[str, str]:
        """Returns the model and the call of a request. Raises ``Gone``."""
        model, call = self._stored("model, call FROM requests", id)
        return model, call

    def delivered(self, id: str) -> None:
        """Keeps an outcome that was given for another ``keep_s``. A crash may lose the mark."""
        with self._lock:
            is_new = self._delivered.pop(id, None) is None
            self._delivered[id] = self._clock()
        if is_new:
            query = "UPDATE requests SET kept = ? WHERE id = ? AND kept = 0"
            self._database.write(lambda c: c.execute(query, (DELIVERED, id)), keep=True, lazy=True)

    def expire(self) -> None:
        """Releases the outcomes whose time is over."""
        now = self._clock()
        with self._lock:
            ids = [id for id, at in self._delivered.items() if at + self.keep_s <= now]
            for id in ids:
                del self._delivered[id]

        def apply(connection: Connection) -> None:
            query = "UPDATE requests SET kept = ? WHERE id = ? AND kept = ? RETURNING model"
            models = set[str]()
            for id in ids:
                rows = connection.execute(query, (RELEASED, id, DELIVERED)).fetchall()
                models.update(row["model"] for row in rows)
            for model in models:
                self._settle(connection, model)

        if ids:
            self._database.write(apply, keep=True, lazy=True)

    def end_waits(self) -> None:
        """Ends all waits for outcomes, also later ones, as if their time were over."""
        self._waker.close()

    # the executor

    def body(self, request: TrainingRequest) -> bytes | None:
        """Returns the body of a request that is ready; None if its model was forgotten."""
        if request not in self:
            return None
        if request.data is not None:
            return request.data
        rows = self._database.read("SELECT data FROM payloads WHERE place = ?", request.place)
        return rows[0]["data"] if rows else None

    def finish(self, request: TrainingRequest, outcome: Outcome) -> None:
        """Ends a request, in the order of its model; ``wait`` returns the outcome once it is in the
        database.

        While the disk refuses, the outcome waits. The outcome of a request that ran again, or of a
        forgotten model, is dropped. Raises ``DatabaseFailed``: the database is closed.
        """
        data, category = outcome

        def apply(connection: Connection) -> None:
            query = "SELECT 1 FROM requests WHERE place = ?"
            if connection.execute(query, (request.place,)).fetchone():  # else it was forgotten
                place = _insert_payload(connection, data, request.id, category)
                query = "UPDATE requests SET ended = ?, category = ? WHERE place = ?"
                connection.execute(query, (place, category, request.place))

        with self._lock:
            first = request.queue.running.popleft()
            assert first is request, "requests end in the order in which they were ready"
        if not request.is_again:
            change = self._database.write(apply, len(data), keep=True)
            change.add_done_callback(lambda change: self._waker.wake((request.id,)))

    def __contains__(self, request: TrainingRequest) -> bool:
        """Returns whether a request is not of a forgotten model."""
        return self._models.get(request.model) is request.queue

    def place(self, model: str) -> int:
        """Returns the place of the model's state after its last finished request, once everything
        up to it is on the disk. Raises ``DatabaseFailed``.
        """
        with self._lock:
            running = self._models[model].running if model in self._models else ()
            if running and (ended := running[0].ended) is not None:
                return ended - 1
        return self._database.write(_last_place).result()

    def snapshot(self, model: str, place: int) -> None:
        """Records that a snapshot at a place is durable: requests up to there do not run again."""
        with self._lock:
            if (queue := self._models.get(model)) is None:
                return
            queue.place = max(queue.place, place)
        self._database.write(lambda c: self._settle(c, model), keep=True, lazy=True)

    def forget(self, model: str, then: Callable[[], None] = lambda: None) -> None:
        """Deletes a model, its waiting requests and its outcomes; its name is as if never used.
        ``then`` is called, in any thread, when the deletion is durable. Until then the model's
        snapshot is needed to open the database.
        """

        def apply(connection: Connection) -> list[str]:
            query = "DELETE FROM payloads WHERE place IN (SELECT {} FROM requests WHERE model = ?)"
            for place in ("place", "ended"):
                connection.execute(query.format(place), (model,))
            connection.execute("DELETE FROM progress WHERE model = ?", (model,))
            query = "DELETE FROM requests WHERE model = ? RETURNING id"
            return [row["id"] for row in connection.execute(query, (model,)).fetchall()]

        def written(change: "Future[list[str]]") -> None:
            if change.exception() is None:
                with self._lock:  # requests that are sent later follow in the writer's thread
                    self._models.pop(model, None)
                then()
                self._waker.wake(change.result())

        self._database.write(apply, keep=True).add_done_callback(written)

    # internals

    def _stored(self, query: str, id: str) -> sqlite3.Row:
        rows = self._database.read(f"SELECT {query} WHERE id = ? AND kept < ?", id, RELEASED)
        if not rows:
            raise unknown(id)
        return rows[0]

    def _settle(self, connection: Connection, model: str) -> None:
        """Deletes those requests of a model of which only the numbers are needed."""
        place = self._models[model].place if model in self._models else 0
        query = """UPDATE requests SET kept = ? WHERE model = ? AND kept = ?
            AND (category IS NOT NULL OR ended <= ?) RETURNING place, ended"""
        settled = connection.execute(query, (SETTLED, model, RELEASED, place)).fetchall()
        connection.executemany("DELETE FROM payloads WHERE place IN (?, ?)", map(tuple, settled))
        if settled:
            first = _first_unsettled(connection, model)
            query = "SELECT seq_id FROM requests WHERE model = ? AND kept = ? ORDER BY seq_id"
            for row in connection.execute(query, (model, SETTLED)):
                first += row["seq_id"] == first
            connection.execute(
                "DELETE FROM requests WHERE model = ? AND seq_id < ?", (model, first)
            )
            query = "INSERT OR REPLACE INTO progress VALUES (?, ?, ?)"
            connection.execute(query, (model, first, place))

    def _load(self, places: Mapping[str, int], connection: Connection) -> None:
        """Reads all requests, and checks that their payloads are what was written."""
        end = _last_place(connection)
        for model, place in places.items():
            if place > end:
                raise UserError(
                    f"snapshot of {model!r} is of place {place}, but the requests end at {end}: it"
                    " is of another database"
                )
        for model, first, place in connection.execute("SELECT * FROM progress"):
            if places.get(model, 0) < place:
                raise UserError(
                    f"snapshot of {model!r} is of place {places.get(model, 0)}, but requests up to"
                    f" {place} are deleted: restore the newest snapshot"
                )
            self._models[model] = _Model(first)
        for row in connection.execute(_STORED):
            place, id, model, seq_id, call, ended, category, kept, *payloads = row
            queue = self._models[model]
            queue.place, queue.accepted[seq_id] = places.get(model, 0), None
            if kept == SETTLED:
                continue
            body, body_seal, result, result_seal = payloads
            for name, data, seal, *owner in (
                ("body", body, body_seal, id, model, seq_id, call),
                ("result", result, result_seal, id, category),
            ):
                if name == "result" and ended is None:
                    break
                if data is None or _seal(data, *owner) != seal:
                    reason = f"the {name} of request {id} is not what was written"
                    raise DatabaseDamaged(self._database.path, reason)
            if ended is None or (category is None and ended > queue.place):
                request = TrainingRequest(id, model, seq_id, call, queue, place, ended)
                queue.accepted[seq_id] = request
            if kept == DELIVERED:
                self._delivered[id] = self._clock()


def _first_unsettled(connection: Connection, model: str) -> int:
    query = "SELECT first_unsettled FROM progress WHERE model = ?"
    return next(iter(connection.execute(query, (model,))), (1,))[0]


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
