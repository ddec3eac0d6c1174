"""Futures of training requests that outlive the process: accepted once, run in order, their results
kept until they have arrived.

A request is (model, seq_id, call, body). ``submit`` returns its id when it is in the journal; the
same request again gets the same id and is not run again, the same number with another body is a
``Conflict``. ``take`` hands requests to the executor, each model's in the order of its numbers,
from 1 and without gaps; ``finish`` takes a result, which others see when it is in the journal too.
``wait`` and ``wait_task`` return it. It is kept until ``acknowledge``, or until ``keep_s`` after
the last ``delivered``; whoever asks later gets ``Gone``, and so does a repeated request of which
only its number is still known.

**Restart.** Somebody else keeps the models' states. A snapshot of a model's state goes with
``place(model)``, taken by the executor between two requests of it: the state holds what was done by
exactly those requests whose results lie before that place. Once the snapshot is durable,
``snapshot(model, place)`` says so. Whoever opens the journal again says which places the snapshots
that it has loaded go with; ``take`` then first gives the requests that ended behind their model's
place (``again``: the state needs them, their results are known and stay as they are; those that
failed had no effect and are left out), in the order in which they ended, and then those that were
accepted and have not ended. Calls must depend on nothing but state and body.

``trim`` deletes segments of which every request is *settled*: its result is acknowledged or
expired, and it failed or lies behind a snapshot. Of settled requests the numbers are known for
ever, their ids are not. A result that nobody fetches keeps its segment and all later ones;
``forget`` ends a model with all that it has.
"""

import asyncio
import collections
import functools
import json
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from mint_jax.digest import blake3_of
from mint_jax.errors import UserError
from mint_jax.service.journal import Found, Journal, JournalDamaged, Overloaded
from mint_jax.service.records import LONGEST_NAME, OVERHEAD, Kind, Record, decode, encode
from mint_jax.service.table import Category, Done, Entry, Failed, Model, Outcome, Request, State
from mint_jax.service.waker import Waker

KEEP_S = 300.0


class Conflict(UserError):
    """A number of a model was used for another request."""


class Gone(UserError):
    """No future of this id, or its result was acknowledged or has expired."""


def unknown(id: str) -> Gone:
    """The error for an id of which nothing is known, or nothing may be told: the two have the same
    words.
    """
    return Gone(
        f"future {id[:80]!r} is not kept here: it was never given out, or its result was delivered"
    )


class Futures:
    """All unsettled requests, over the journal in ``folder``; may be called from any thread.

    Args:
        places: of each model with a snapshot, the place that goes with the one that was loaded.
        forget: models that are ended first, because their snapshots are lost and the journal alone
            cannot bring them back.
        keep_s: seconds for which a result is kept after it has arrived.
        clock: monotonic seconds. After a restart the time to keep a delivered result begins anew.
        journal: options of ``Journal``.

    Raises:
        JournalBusy, JournalDamaged, JournalFailed: as ``Journal``.
        UserError: a snapshot is older than what was deleted behind another one, or of a place that
            the journal has not reached.
    """

    def __init__(
        self,
        folder: Path,
        places: Mapping[str, int] | None = None,
        *,
        forget: Iterable[str] = (),
        keep_s: float = KEEP_S,
        clock: Callable[[], float] = time.monotonic,
        **journal: Any,
    ):
        self.keep_s, self._clock = keep_s, clock
        self._lock = threading.Lock()
        self._some_ready = threading.Condition(self._lock)
        self._waker = Waker()
        self._closed = False
        self._models: dict[str, Model] = {}
        self._ids: dict[str, Entry] = {}
        self._unsettled: dict[int, Entry] = {}  # by place, in its order
        # the earliest first
        self._delivered: collections.OrderedDict[str, Entry] = collections.OrderedDict()
        self._ready: collections.deque[Entry] = collections.deque()
        self._journal = Journal(folder, **journal)
        try:
            self._load(dict(places or {}), forget)
        except BaseException:
            self._journal.close()
            raise

    def __enter__(self) -> "Futures":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(
        self, model: str, seq_id: int, call: str, body: bytes, *, wait_s: float | None = 0.0
    ) -> str:
        """The id of a request, which is in the journal when this returns.

        Args:
            wait_s: seconds to wait where the journal's queue is full; 0 refuses at once, None waits
                however long it takes.

        Raises:
            Conflict: another request had this number.
            Gone: this one ran long ago.
            Overloaded: the queue is full.
            JournalFailed: the disk refuses it: it was not accepted, and may be sent again.
        """
        give_up = None if wait_s is None else time.monotonic() + wait_s
        while True:
            try:
                entry = self._accept(model, seq_id, call, body)
                break
            except Overloaded:
                if give_up is not None and time.monotonic() >= give_up:
                    raise
                self._journal.wait_for_room(
                    OVERHEAD + len(body), None if give_up is None else give_up - time.monotonic()
                )
        if (ticket := entry.ticket) is not None:
            ticket.result()
        return entry.id

    async def submit_task(self, model: str, seq_id: int, call: str, body: bytes) -> str:
        """``submit`` of an asyncio task, refused at once where the journal's queue is full."""
        entry = self._accept(model, seq_id, call, body)
        if (ticket := entry.ticket) is not None:
            await asyncio.wrap_future(ticket)
        return entry.id

    def take(self, timeout_s: float = 0.0) -> Request | None:
        """The next request to run, in the order of its model's numbers; None when there is none in
        time, or no more at all.

        A model's next request may be taken before the last one has finished.
        """
        with self._lock:
            self._some_ready.wait_for(lambda: self._ready or self._closed, timeout_s)
            if not self._ready or self._closed:
                return None
            entry = self._ready.popleft()
            entry.taken, body = True, entry.body
            assert body is not None
            return Request(entry.id, entry.model, entry.seq_id, entry.call, body, entry.again)

    def finish(self, id: str, outcome: Outcome) -> None:
        """Says how a request ended that was taken, in the order of its model's; others see it when
        it is in the journal.

        Waits while the journal's queue is full. While the disk refuses records the outcome is kept,
        and seen once it is written. Of a request that is run ``again`` nothing is kept, and of a
        model that was forgotten meanwhile neither.

        Raises:
            ValueError: it was not taken, or one before it has not finished.
            JournalFailed: the journal is closed; the request runs once more when it is open again.
        """
        with self._lock:
            entry = self._ids.get(id)
            if entry is None:
                return
            running = self._models[entry.model].running
            if not entry.taken or running[0] is not entry:
                raise ValueError(
                    f"request {entry.seq_id} of {entry.model!r} is not the one to finish now:"
                    " finish them as they were taken"
                )
            entry.taken = False
            if entry.again:
                running.popleft()
                entry.again, entry.body = False, None
                self._settle(entry)
                return
            entry.state = State.ENDING
        if isinstance(outcome, Done):
            record = Record(Kind.DONE, id, body=outcome.result)
        else:
            record = Record(Kind.FAILED, id, call=outcome.category, body=outcome.error.encode())
        ticket = self._journal.append(encode(record), wait_s=None, keep=True)
        with self._lock:
            running.popleft()
        ticket.add_done_callback(functools.partial(self._ended, entry, outcome))

    def wait(self, id: str, timeout_s: float = 0.0) -> Outcome | None:
        """A request's outcome; None when it has not ended in time.

        Raises:
            Gone: the id is unknown, or its result is no longer kept.
        """
        with self._waker.register(id) as sleeper:
            if (outcome := self._look(id)) is None and timeout_s > 0 and not self._closed:
                self._waker.sleep(sleeper, timeout_s)
                outcome = self._look(id)
        return outcome

    async def wait_task(self, id: str, timeout_s: float = 0.0) -> Outcome | None:
        """``wait`` of an asyncio task."""
        with self._waker.register(id, task=True) as sleeper:
            if (outcome := self._look(id)) is None and timeout_s > 0 and not self._closed:
                await self._waker.sleep_task(sleeper, timeout_s)
                outcome = self._look(id)
        return outcome

    def about(self, id: str) -> tuple[str, str]:
        """The model and the call of a request.

        Raises:
            Gone: the id is unknown, or its result is no longer kept.
        """
        with self._lock:
            entry = self._ids.get(id)
        if entry is None:
            raise unknown(id)
        return entry.model, entry.call

    def is_needed(self, id: str) -> bool:
        """Whether a request has still to run, be it again."""
        with self._lock:
            entry = self._ids.get(id)
            return entry is not None and (entry.again or entry.state is not State.ENDED)

    def delivered(self, id: str) -> None:
        """Says that the outcome has arrived at the client: from now on it is kept for ``keep_s``
        only.

        The journal learns of it with its next write; what a crash makes it forget is kept until it
        is delivered again.
        """
        with self._lock:
            entry = self._ids.get(id)
            if entry is None or entry.released:
                return
            self._must_have_ended(entry)
            entry.delivered_at = self._clock()
            self._delivered[id] = entry
            self._delivered.move_to_end(id)
            self._journal.append(
                encode(Record(Kind.DELIVERED, id)), bounded=False, lazy=True, keep=True
            )

    def acknowledge(self, ids: Iterable[str]) -> None:
        """Says that the client has these outcomes and will not ask again. Unknown ids are fine:
        they were acknowledged before.

        Raises:
            UserError: one has not ended yet.
        """
        with self._lock:
            entries = [
                self._ids[id]
                for id in dict.fromkeys(ids)
                if id in self._ids and not self._ids[id].released
            ]
            for entry in entries:
                self._must_have_ended(entry)
            for entry in entries:
                self._journal.append(
                    encode(Record(Kind.ACKNOWLEDGED, entry.id)), bounded=False, lazy=True, keep=True
                )
                self._release(entry)

    def expire(self) -> int:
        """Releases the outcomes whose time is over, then ``trim``."""
        with self._lock:
            self._release_expired()
        return self.trim()

    def place(self, model: str) -> int:
        """The place that goes with the model's state as it is now; everything before it is on the
        disk when this returns.

        To be called by the executor between two requests of the model.
        """
        with self._lock:
            running = self._models[model].running if model in self._models else ()
            if running and running[0].again:
                return running[0].ended_at
        return self._journal.flush()

    def snapshot(self, model: str, place: int) -> None:
        """Says that a snapshot of the model's state at a place is durable: what ended before is not
        run again.

        Raises:
            UserError: the journal has not reached this place.
        """
        self._must_have_reached(model, place)
        with self._lock:
            mine = self._model(model)
            mine.place = max(mine.place, place)
            for entry in list(mine.entries.values()):
                self._settle(entry)

    def forget(self, model: str, then: Callable[[], None] = lambda: None) -> None:
        """Ends a model: its requests that wait are not run, its outcomes are gone, its name is as
        if never used.

        Args:
            then: called when a restart knows of it too, in any thread. Until then the model's
                snapshot is needed to open the journal.
        """
        with self._lock:
            if model not in self._models:
                then()
                return
            ticket = self._journal.append(
                encode(Record(Kind.FORGOTTEN, model=model)), bounded=False, keep=True
            )
            gone = self._drop(model)
            self._ready = collections.deque(entry for entry in self._ready if entry.model != model)
        self._waker.wake(gone)
        ticket.add_done_callback(lambda ticket: ticket.exception() or then())

    def trim(self) -> int:
        """Deletes the segments whose requests are all settled; returns how many. Waits for the disk
        where there is one.

        Raises:
            JournalFailed: the disk refuses.
        """
        with self._lock:
            needed = next(iter(self._unsettled), self._journal.end)
            if not self._journal.releases(needed):
                return 0
            known = {
                name: [m.floor, m.place, *sorted(m.settled)] for name, m in self._models.items()
            }
            record = Record(Kind.CHECKPOINT, body=json.dumps(known).encode())
            ticket = self._journal.append(encode(record), bounded=False)
        ticket.result()
        return self._journal.release(min(needed, ticket.start))

    @property
    def trouble(self) -> str:
        """Why the disk refuses further requests now; empty while it takes them."""
        return self._journal.trouble

    def end_waits(self) -> None:
        """Ends all waits, as if their time were over."""
        self._waker.wake_all()

    def close(self) -> None:
        """Writes what is queued, and ends all waits: those for outcomes that are not there return
        None.
        """
        with self._lock:
            self._closed = True
            self._some_ready.notify_all()
        self._journal.close()
        self._waker.wake_all()

    def _model(self, name: str) -> Model:
        return self._models.setdefault(name, Model())

    def _accept(self, model: str, seq_id: int, call: str, body: bytes) -> Entry:
        """The entry of a request, which may be on its way to the journal still."""
        for what, text in (("model", model), ("call", call)):
            if not 0 < len(text.encode()) <= LONGEST_NAME:
                raise UserError(f"{what} is {text[:80]!r}; expected 1 to {LONGEST_NAME} bytes")
        if not 1 <= seq_id < 2**63:
            raise UserError(f"seq_id of a request to {model!r} is {seq_id}; expected 1 or more")
        digest, id = blake3_of(body), uuid.uuid4().hex
        payload = encode(Record(Kind.REQUEST, id, model, seq_id, call, digest, body))
        checksum = zlib.crc32(payload)  # here, for it takes a millisecond a MB
        with self._lock:
            mine = self._models.get(model)
            found = mine.entries.get(seq_id) if mine is not None else None
            if found is not None:
                if (found.digest, found.call) != (digest, call):
                    raise Conflict(
                        f"request {seq_id} of {model!r} was {found.call!r} with another body: give"
                        " a new request a new seq_id"
                    )
                return found
            if mine is not None and mine.is_settled(seq_id):
                raise Gone(
                    f"request {seq_id} of {model!r} has run, and its result was delivered: give a"
                    " new request a new seq_id"
                )
            ticket = self._journal.append(payload, checksum=checksum)
            entry = Entry(id, model, seq_id, call, digest, ticket.start, ticket, body)
            self._model(model).entries[seq_id] = self._ids[id] = self._unsettled[entry.start] = (
                entry
            )
        ticket.add_done_callback(functools.partial(self._accepted, entry))
        return entry

    def _accepted(self, entry: Entry, ticket: Future[int]) -> None:
        """A request is in the journal: it and those that waited for it become ready. One that the
        disk refused leaves no trace.
        """
        if ticket.exception() is not None:
            self._withdraw(entry)
            return
        with self._lock:
            mine = self._models.get(entry.model)
            entry.ticket = None
            if mine is not None and (ready := mine.advance()):
                self._ready.extend(ready)
                self._some_ready.notify_all()

    def _withdraw(self, entry: Entry) -> None:
        """Takes a request out of all tables. Its place may be another's by now: the journal goes on
        behind what it acknowledged.
        """
        with self._lock:
            self._untrack(entry)
            mine = self._models.get(entry.model)
            if mine is not None and mine.entries.get(entry.seq_id) is entry:
                del mine.entries[entry.seq_id]

    def _untrack(self, entry: Entry) -> None:
        self._ids.pop(entry.id, None)
        if self._unsettled.get(entry.start) is entry:
            del self._unsettled[entry.start]

    def _ended(self, entry: Entry, outcome: Outcome, ticket: Any) -> None:
        """An outcome is in the journal."""
        if ticket.exception() is not None:
            return
        with self._lock:
            if entry.id not in self._ids:
                return  # its model was forgotten
            entry.end(outcome, ticket.start, ticket.end)
            entry.body = None
        self._waker.wake((entry.id,))

    def _look(self, id: str) -> Outcome | None:
        """A request's outcome if it has ended."""
        with self._lock:
            entry = self._ids.get(id)
            if entry is not None and self._expired(entry):
                self._expire(entry)
            if entry is None or entry.released:
                raise unknown(id)
            if entry.state is not State.ENDED or entry.outcome is not None:
                return entry.outcome
        try:
            return Done(decode(self._journal.read(entry.ended_at)).body)
        except UserError:
            if entry.released:  # meanwhile, and its segment may be deleted
                raise Gone(f"future {id!r} was acknowledged while it was asked for") from None
            raise

    @staticmethod
    def _must_have_ended(entry: Entry) -> None:
        if entry.state is not State.ENDED:
            raise UserError(
                f"future {entry.id!r} has not ended: nothing of it can have been delivered"
            )

    def _must_have_reached(self, model: str, place: int) -> None:
        end = self._journal.end
        if place > end:
            raise UserError(
                f"snapshot of {model!r} is of place {place}, but the journal ends at {end}: it is"
                " of another journal"
            )

    def _release(self, entry: Entry) -> None:
        entry.released, entry.outcome = True, None
        self._delivered.pop(entry.id, None)
        self._settle(entry)

    def _release_expired(self) -> None:
        while self._delivered:
            entry = next(iter(self._delivered.values()))
            if not self._expired(entry):
                break
            self._expire(entry)

    def _expire(self, entry: Entry) -> None:
        """Releases an outcome whose time is over; the record keeps a restart from beginning that
        time anew.
        """
        self._journal.append(
            encode(Record(Kind.ACKNOWLEDGED, entry.id)), bounded=False, lazy=True, keep=True
        )
        self._release(entry)

    def _expired(self, entry: Entry) -> bool:
        return entry.delivered_at is not None and entry.delivered_at + self.keep_s <= self._clock()

    def _settle(self, entry: Entry) -> None:
        """Forgets a request of which nothing but its number is needed."""
        mine = self._models[entry.model]
        if entry.released and not entry.again and (entry.failed or entry.ended <= mine.place):
            del mine.entries[entry.seq_id]
            self._untrack(entry)
            mine.settle((entry.seq_id,))

    def _drop(self, model: str) -> list[str]:
        """Takes a model out of all tables, where it is; returns the ids of its requests."""
        entries = self._models.pop(model, Model()).entries.values()
        for entry in entries:
            self._untrack(entry)
            self._delivered.pop(entry.id, None)
        return [entry.id for entry in entries]

    # opening

    def _load(self, places: dict[str, int], forget: Iterable[str]) -> None:
        """Reads the journal."""
        known: dict[str, list[int]] = {}
        for found in self._journal.records():
            try:
                record = decode(found.payload)
                if record.kind is Kind.CHECKPOINT:
                    known = json.loads(record.body)
                elif record.kind is Kind.FORGOTTEN:
                    self._drop(record.model)
                    known.pop(record.model, None)
                else:
                    self._load_record(record, found, places)
            except ValueError as error:
                raise JournalDamaged(
                    f"journal {self._journal.folder} has at place {found.start} what is no record:"
                    f" {error}"
                ) from None
        for name in forget:
            if name in self._models or name in known:
                self._journal.append(encode(Record(Kind.FORGOTTEN, model=name)))
                self._drop(name)
                known.pop(name, None)
        for name, place in places.items():
            self._must_have_reached(name, place)
        for name, (floor, place, *settled) in known.items():
            if places.get(name, 0) < place:
                raise UserError(
                    f"snapshot of {name!r} is of place {places.get(name, 0)}, but what lies before"
                    f" {place} is needed no more, and some of it is deleted: load the newest"
                    " snapshot, or forget the model if that is lost"
                )
            mine = self._model(name)
            gone = [seq_id for seq_id in mine.entries if seq_id < floor or seq_id in settled]
            for entry in map(mine.entries.pop, gone):
                self._untrack(entry)
            mine.floor = floor
            mine.settle(settled)
        ready: list[tuple[int, int, Entry]] = []
        for name, mine in self._models.items():
            mine.place = places.get(name, 0)
            for entry in list(mine.entries.values()):
                entry.again = (
                    entry.state is State.ENDED and not entry.failed and entry.ended > mine.place
                )
                if not entry.again and entry.state is State.ENDED:
                    entry.body = None
                    self._settle(entry)
            latest = 0  # place of what the request had to wait for
            for entry in mine.advance():
                latest = max(latest, entry.start)
                ready.append((0, entry.ended_at, entry) if entry.again else (1, latest, entry))
        ready.sort(key=lambda turn: turn[:2])  # stable: the numbers of a model stay in order
        self._ready.extend(entry for _, _, entry in ready)
        delivered = [
            entry
            for entry in self._ids.values()
            if entry.delivered_at is not None and not entry.released
        ]
        self._delivered.update((entry.id, entry) for entry in delivered)

    def _load_record(self, record: Record, found: Found, places: dict[str, int]) -> None:
        if record.kind is Kind.REQUEST:
            entry = Entry(
                record.id,
                record.model,
                record.seq_id,
                record.call,
                record.digest,
                found.start,
                None,
                record.body,
            )
            self._model(record.model).entries[record.seq_id] = self._ids[
                record.id
            ] = self._unsettled[found.start] = entry
            return
        entry = self._ids.get(record.id)
        if entry is None:
            return  # its request was settled, and is deleted
        if record.kind is Kind.DONE:
            entry.end(Done(record.body), found.start, found.end)
            if found.end <= places.get(entry.model, 0):
                entry.body = None
        elif record.kind is Kind.FAILED:
            entry.end(Failed(record.body.decode(), Category(record.call)), found.start, found.end)
        elif record.kind is Kind.DELIVERED:
            entry.delivered_at = self._clock()
        elif record.kind is Kind.ACKNOWLEDGED:
            entry.released, entry.outcome = True, None
