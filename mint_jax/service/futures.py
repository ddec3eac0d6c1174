"""Training requests that survive a restart: each is accepted once, runs in its model's order, and
its result is kept until the client has it.

A request is (model, seq_id, call, body). The same request again has the same id and does not run
again; the same number with another body raises ``Conflict``. Each model's requests run in the order
of their numbers, from 1 and without gaps.
"""

import collections
import dataclasses
import enum
import functools
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
SHORT = 64 << 10  # bytes of a payload up to which it stays in memory: reading one costs 50 us
SETTLED = 2  # value of ``requests.kept``
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
    data: bytes | None = None
    accepted: Future[str] = dataclasses.field(default_factory=Future)


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
        self._ids: dict[str, TrainingRequest] = {}  # of results that are not released
        self._delivered: dict[str, float] = {}  # times of the last delivery, the earliest first
        database.write(functools.partial(self._load, places or {})).result()
        for model in self._models.values():
            self._advance(model)

    # clients

    def submit(self, model: str, seq_id: int, call: str, body: bytes) -> "Future[str]":
        """Returns the id of a request once it is in the database.

        Raises ``Conflict``; ``Gone``: the request ran long ago; ``Overloaded``: the queue is full;
        ``DatabaseFailed``, also by the future: the disk refuses, and the request may be sent again.
        """
        request = TrainingRequest(uuid.uuid4().hex, model, seq_id, call, blake3_of(body))
        request.data = _kept(body)

        def apply(connection: Connection) -> int:
            place = _insert_payload(connection, body, request.id, model, seq_id, call)
            query = "INSERT INTO requests (place, id, model, seq_id, call, digest)"
            values = (place, request.id, model, seq_id, call, request.digest)
            connection.execute(f"{query} VALUES (?, ?, ?, ?, ?, ?)", values)
            return place

        def written(place: "Future[int]") -> None:
            error = place.exception()
            with self._lock:
                if request.id in self._ids:  # else its model was forgotten
                    if error is not None:
                        del queue.requests[seq_id], self._ids[request.id]
                    else:
                        request.place = place.result()
                        self._advance(queue)
            if error is not None:
                request.accepted.set_exception(error)
            else:
                request.accepted.set_result(request.id)

        with self._lock:
            queue = self._models.get(model, _Model())
            if (found := queue.requests.get(seq_id)) is not None:
                if (found.digest, found.call) != (request.digest, call):
                    raise Conflict(
                        f"request {seq_id} of {model!r} was {found.call!r} with another body: give"
                        " a new request a new seq_id"
                    )
                return found.accepted
            if seq_id < queue.first or seq_id in queue.requests:
                raise Gone(
                    f"request {seq_id} of {model!r} has run, and its result was delivered: give a"
                    " new request a new seq_id"
                )
            change = self._database.write(apply, len(body))
            request.accepted.set_running_or_notify_cancel()  # a caller that leaves cancels nothing
            self._models[model] = queue
            queue.requests[seq_id] = self._ids[request.id] = request
        change.add_done_callback(written)
        return request.accepted

    async def wait(self, id: str, timeout_s: float) -> Outcome | None:
        """Returns a request's outcome; None if it has not ended in time. Raises ``Gone``."""
        return await self._waker.wait(id, lambda: self.outcome(id), timeout_s)

    def outcome(self, id: str) -> Outcome | None:
        """Returns a request's outcome; None if it has not ended. Raises ``Gone``."""
        request = self.request(id)
        with self._lock:
            if not request.ended:
                return None
            data = request.data
        if data is None and (data := self._payload(request.ended)) is None:  # settled meanwhile
            raise unknown(id)
        return Outcome(data, request.category)

    def request(self, id: str) -> TrainingRequest:
        """Returns a request whose result is not released. Raises ``Gone``."""
        if (request := self._ids.get(id)) is None:
            raise unknown(id)
        return request

    def delivered(self, id: str) -> None:
        """Keeps an outcome for another ``keep_s``. A crash may lose the mark."""
        with self._lock:
            request = self._ids.get(id)
            if request is None or not request.ended:
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
                self._settle([self._ids.pop(id)])

    def end_waits(self) -> None:
        """Ends all waits for outcomes, also later ones, as if their time were over."""
        self._waker.close()

    # the executor

    def body(self, request: TrainingRequest) -> bytes | None:
        """Returns the body of a request that is ready; None if its model was forgotten."""
        with self._lock:
            if request not in self:
                return None
            # a request that runs again may have its result there
            data = None if request.ended else request.data
        return self._payload(request.place) if data is None else data

    def finish(self, request: TrainingRequest, outcome: Outcome) -> None:
        """Ends a request, in the order of its model; ``wait`` returns the outcome once it is in the
        database.

        While the disk refuses, the outcome waits. The outcome of a request that ran again, or of a
        forgotten model, is dropped. Raises ``DatabaseFailed``: the database is closed.
        """
        data, category = outcome

        def apply(connection: Connection) -> int:
            place = _insert_payload(connection, data, request.id, category)
            query = "UPDATE requests SET ended = ?, category = ? WHERE place = ?"
            connection.execute(query, (place, category, request.place))
            return place

        def written(place: "Future[int]") -> None:
            if place.exception() is None:
                with self._lock:
                    request.ended, request.category = place.result(), category
                    request.data = _kept(data)
                self._waker.wake((request.id,))

        with self._lock:
            if request not in self:
                return
            first = self._models[request.model].running.popleft()
            assert first is request, "requests end in the order in which they were ready"
            if request.is_again:
                request.is_again = False
                self._settle([request])
                return
            change = self._database.write(apply, len(data), keep=True)
        change.add_done_callback(written)

    def __contains__(self, request: TrainingRequest) -> bool:
        """Returns whether a request is neither settled nor of a forgotten model."""
        queue = self._models.get(request.model)
        return queue is not None and queue.requests.get(request.seq_id) is request

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
            if (queue := self._models.get(model)) is not None:
                queue.place = max(queue.place, place)
                self._settle(request for request in queue.requests.values() if request)

    def forget(self, model: str, then: Callable[[], None] = lambda: None) -> None:
        """Deletes a model, its waiting requests and its outcomes; its name is as if never used.
        ``then`` is called, in any thread, when the deletion is durable. Until then the model's
        snapshot is needed to open the database.
        """
        with self._lock:
            if model not in self._models:
                then()
                return
            change = self._database.write(functools.partial(_delete_model, model), keep=True)
            ids = [request.id for request in self._models.pop(model).requests.values() if request]
            for id in ids:
                self._ids.pop(id, None)
                self._delivered.pop(id, None)
        self._waker.wake(ids)
        change.add_done_callback(lambda change: change.exception() or then())

    # internals, with the lock

    def _advance(self, queue: _Model) -> None:
        for request in queue.advance():
            self._on_ready(request)

    def _settle(self, requests: Iterable[TrainingRequest]) -> None:
        """Deletes those requests of one model of which only the numbers are needed."""
        requests = [one for one in requests if one.id not in self._ids and not one.is_again]
        if not requests:
            return
        model = requests[0].model
        queue = self._models[model]
        settled = [one for one in requests if one.category or one.ended <= queue.place]
        for one in settled:
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

        if settled:
            self._database.write(apply, keep=True, lazy=True)

    def _payload(self, place: int) -> bytes | None:
        rows = self._database.read("SELECT data FROM payloads WHERE place = ?", place)
        return rows[0]["data"] if rows else None

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
            self._models[model] = _Model(first, next=first)
        for row in connection.execute(_STORED):
            queue = self._models[row["model"]]
            queue.place = places.get(row["model"], 0)
            if row["kept"] == SETTLED:
                queue.requests[row["seq_id"]] = None
                continue
            names = ("id", "model", "seq_id", "call", "digest", "place")
            request = TrainingRequest(*(row[name] for name in names))
            owners: dict[str, tuple[Any, ...]] = {
                "body": (request.id, request.model, request.seq_id, request.call)
            }
            if row["ended"] is not None:
                owners["result"] = request.id, row["category"]
                request.ended = row["ended"]
            for name, owner in owners.items():
                if row[name] is None or _seal(row[name], *owner) != row[f"{name}_seal"]:
                    reason = f"the {name} of request {request.id} is not what was written"
                    raise DatabaseDamaged(self._database.path, reason)
            request.category = None if row["category"] is None else Category(row["category"])
            request.is_again = request.category is None and request.ended > queue.place
            request.accepted.set_result(request.id)
            queue.requests[request.seq_id] = self._ids[request.id] = request
            if row["kept"]:
                self._delivered[request.id] = self._clock()


def _kept(data: bytes) -> bytes | None:
    """Returns a payload that is short enough to stay in memory."""
    return data if len(data) <= SHORT else None


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
