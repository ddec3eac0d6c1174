"""Training that survives its process: accepted requests are in the journal before anyone hears of
them, and states are kept as snapshots.

    submit ─→ futures (journal) ─→ executor's thread ─→ training (the loop's) ─→ finisher's thread
    ─→ futures (journal) ─→ wait
                                                                                         └─→
                                                                                         snapshots

A snapshot is one policy's state, pending gradients and all, between two of its requests; with it
stands the place in the journal up to which it has everything. After a restart every policy has the
state of its snapshot, and what was done behind it is done again in the same order: then its state
is what it was, but for the order of float32 sums, since the requests of others that it shared a
step with may be others now. Nothing that was accepted is lost, and nothing runs twice as far as a
client can see.

While a disk refuses writes, new requests are refused and accepted ones go on: their results are
told once they are written, and snapshots are tried again with the next request of their policy.
Requests of one policy also save in their order, and a load follows the saves that were asked for
before it. What a load has read is kept under ``loads`` until a snapshot has it: a restart that
loads again finds it there, whatever became of the checkpoint.
"""

import collections
import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from mint_jax import files
from mint_jax.catalog.records.database import DatabaseFailed
from mint_jax.catalog.storage.interface import StorageFailed
from mint_jax.digest import blake3_of
from mint_jax.errors import UserError
from mint_jax.service import calls
from mint_jax.service.calls import Call, Load, Save
from mint_jax.service.futures import Category, Done, Failed, Futures, Outcome, TrainingRequest
from mint_jax.service.server_db import ServerDatabase
from mint_jax.service.training import Training
from mint_jax.train import host_state as held_lib
from mint_jax.train.host_state import HostState

log = logging.getLogger("mint_jax.service")
# how long the executor's thread sleeps where nothing wakes it: it looks whether it is to end
LOOK_S = 0.5


class Unavailable(UserError):
    """The server has failed or is being closed: ask when it is there again."""


class Store(Protocol):
    """Where checkpoints are: see ``checkpoints.Checkpoints``."""

    def load(self, call: Load, kept: Path) -> HostState: ...

    def save(self, model: str, request: str, call: Save, held: HostState) -> dict[str, Any]: ...


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A policy's state, and the place of the journal up to which it has everything."""

    model: str
    place: int
    held: HostState

    def write(self, folder: Path) -> None:
        """One file for each policy, replaced whole; on the disk when this returns."""
        data = self.held.to_bytes({"model": self.model, "place": self.place})
        files.write_file(path_of(folder, self.model), bytes.fromhex(blake3_of(data)) + data)

    @classmethod
    def read(cls, path: Path) -> "Snapshot":
        """What ``write`` wrote.

        Raises:
            UserError: the file is damaged.
        """
        data = path.read_bytes()
        digest, data = data[:32].hex(), data[32:]
        if blake3_of(data) != digest:
            raise UserError(
                f"{path} is damaged: its digest is not {digest}; restore it, or delete it to give"
                " the policy up"
            )
        notes = held_lib.notes_of(data)
        return cls(notes["model"], notes["place"], HostState.from_bytes(data, str(path)))


def path_of(folder: Path, model: str) -> Path:
    """Where a policy's snapshot lies: names are anything, and files' are not."""
    return folder / f"{blake3_of(model.encode())[:32]}.safetensors"


@dataclasses.dataclass(eq=False)
class _Policy:
    """What the threads know of one policy.

    Attributes:
        running: what was handed to training and has not been finished, in order, with its outcome
            once there is one.
        held_back: what waits for a snapshot to be taken, or for a save to be written that it may
            load.
        since, at: updates since the last snapshot, and when that was.
        loads: ids of the load requests since then.
    """

    running: collections.deque[list[Any]] = dataclasses.field(default_factory=collections.deque)
    held_back: collections.deque[TrainingRequest] = dataclasses.field(
        default_factory=collections.deque
    )
    wanted: bool = False
    since: int = 0
    at: float = 0.0
    loads: list[str] = dataclasses.field(default_factory=list)


class Durable:
    """Training requests over a folder: ``journal`` and ``states`` in it.

    Args:
        folder: of one server.
        training: the loop's; nobody else trains its policies.
        every: updates of a policy between two snapshots.
        every_s: seconds after which one is taken at its next request's end all the same.
        clock: monotonic seconds.
        store: of checkpoints; None refuses to load and to save.
        ended: called with a policy and the number of its request that has ended; with None when all
            have, because it was forgotten.
        tenant_of: whom a policy's time is charged to; each policy is a tenant of its own where
            nothing is said.
        heard: told, in the loop's thread, of each call that ended well, with its model and result;
            not of one that runs again.
        futures: options of ``Futures``.

    Attributes:
        futures: ids, results and what is kept of them.
        restored: policies that were there when it was opened, and how many requests each runs again
            or at last.

    Raises:
        JournalBusy, JournalDamaged, DatabaseFailed, UserError: see ``Futures``; a snapshot is
            damaged.
    """

    def __init__(
        self,
        folder: Path,
        training: Training,
        database: ServerDatabase,
        every: int = 16,
        every_s: float = 60.0,
        clock: Any = time.monotonic,
        store: Store | None = None,
        tenant_of: Callable[[str], str] = str,
        heard: Callable[[str, Call, Any], None] = lambda model, call, result: None,
        ended: Callable[[str, int | None], None] = lambda model, number: None,
        **futures: Any,
    ):
        if every < 1 or every_s <= 0:
            raise UserError(
                f"every is {every} and every_s {every_s}; expected an update at least, and seconds"
                " above 0"
            )
        self.training, self.every, self.every_s, self._clock = training, every, every_s, clock
        self.store, self.tenant_of, self._heard, self._ended = store, tenant_of, heard, ended
        self._saving = ThreadPoolExecutor(2, "saving")
        self._last_saves: dict[str, Future[Any]] = {}  # of each policy, under the lock
        self.states, self.loads = folder / "states", folder / "loads"
        self.loads.mkdir(parents=True, exist_ok=True)
        found = [Snapshot.read(path) for path in sorted(self.states.glob("*.safetensors"))]
        self.futures = Futures(database, {s.model: s.place for s in found}, **futures)
        self.restored = [snapshot.model for snapshot in found]
        for path in self.loads.iterdir():
            if not self.futures.is_needed(path.name.partition("-")[0]):
                path.unlink()
        for snapshot in found:
            training.do(
                snapshot.model,
                lambda live, s=snapshot: live.join(s.model, s.held),
                tenant_of(snapshot.model),
            )
        self._policies: collections.defaultdict[str, _Policy] = collections.defaultdict(
            lambda: _Policy(at=clock())
        )
        self._lock = threading.Lock()  # of the policies
        self._ends: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._closing = False
        self.failed: BaseException | None = None
        self._threads = [
            threading.Thread(target=run, name=name, daemon=True)
            for name, run in self._jobs().items()
        ]
        for thread in self._threads:
            thread.start()

    def _jobs(self) -> dict[str, Any]:
        return {"executor": self._execute, "finisher": self._finish_all}

    # -- the doors, from any thread

    def submit(self, model: str, seq_id: int, call: Call, wait_s: float | None = 0.0) -> str:
        """The id of a request, which is not lost from now on. See ``Futures.submit``.

        Raises:
            Conflict, Gone, Overloaded, DatabaseFailed: as there.
            Unavailable: the server has failed or is being closed.
        """
        return self.futures.submit(model, seq_id, *self._encoded(call), wait_s=wait_s)

    async def submit_task(self, model: str, seq_id: int, call: Call) -> str:
        """``submit`` of an asyncio task, refused at once where the journal's queue is full."""
        return await self.futures.submit_task(model, seq_id, *self._encoded(call))

    def _encoded(self, call: Call) -> tuple[str, bytes]:
        if self.failed is not None or self._closing:
            raise Unavailable(
                f"this server takes no more requests: {self.failed or 'it is being closed'}"
            )
        return calls.encode(call)

    def result(self, id: str, timeout_s: float = 0.0) -> Any:
        """What a call gave; None while it has not ended.

        Raises:
            UserError: the call failed by a mistake of its caller.
            RuntimeError: it failed otherwise.
            Gone: no such id, or the result is no longer kept.
        """
        outcome = self.futures.wait(id, timeout_s)
        if isinstance(outcome, Failed):
            raise (UserError if outcome.category == Category.USER else RuntimeError)(outcome.error)
        return None if outcome is None else calls.decode_result(outcome.result)

    def forget(self, model: str) -> None:
        """Ends a policy: its state, its snapshot, its requests and their results are gone."""
        self.futures.forget(model, lambda: path_of(self.states, model).unlink(missing_ok=True))
        self._ended(model, None)
        with self._lock:
            if (gone := self._policies.pop(model, None)) is not None:
                self._drop_loads(gone.loads)
            self._last_saves.pop(model, None)

        def leave(live: Any) -> None:
            if model in live:
                live.leave(model)

        self.training.do(model, leave, self.tenant_of(model))

    def close(self) -> None:
        """Ends the threads. What training has not ended runs again when this is opened next."""
        self._closing = True
        self._ends.put(None)
        for thread in self._threads:
            thread.join()
        self._saving.shutdown()
        self.futures.close()

    # -- the executor's thread: requests to training

    def _execute(self) -> None:
        try:
            while not self._closing and self.failed is None:
                if (request := self.futures.take(LOOK_S)) is not None:
                    with self._lock:
                        policy = self._policies[request.model]
                        policy.held_back.append(request)
                        self._start_ready(policy)
        except BaseException as failure:
            self._fail(failure)

    def _start_ready(self, policy: _Policy) -> None:
        """Hands training what may be started now: nothing while a snapshot is wanted, and no load
        before the saves that it follows.
        """
        while policy.held_back and not policy.wanted:
            if policy.held_back[0].call == "load" and any(
                request.call == "save" for request, _ in policy.running
            ):
                break
            self._start(policy, policy.held_back.popleft())

    def _start(self, policy: _Policy, request: TrainingRequest) -> None:
        """Hands a request to training; the finisher hears of its end."""
        running: list[Any] = [request, None]
        policy.running.append(running)
        try:
            call = calls.decode(request.call, request.body)
            future = self._asked(request, call)
            if not request.is_again:
                future.add_done_callback(
                    lambda future: (
                        future.exception() or self._heard(request.model, call, future.result())
                    )
                )
        except (UserError, OSError) as reason:
            future = Future()
            future.set_exception(reason)
        future.add_done_callback(lambda future: self._ends.put((request.model, running, future)))

    def _asked(self, request: TrainingRequest, call: Call) -> "Future[Any]":
        model, training, tenant = request.model, self.training, self.tenant_of(request.model)
        if isinstance(call, calls.ForwardBackward):
            return _then(
                training.forward_backward(model, call.data, call.loss, tenant, call.backward),
                call.told,
            )
        if isinstance(call, calls.Optim):
            return training.optim(model, call.numbers, tenant)
        if isinstance(call, calls.Refused):
            raise UserError(call.reason)
        if isinstance(call, Save):
            return self._saved(request, call, tenant)
        if isinstance(call, Load):
            if self.store is None:
                raise UserError("this server keeps no checkpoints: there is nothing to load")
            held, told = (
                _of_store(lambda: self.store.load(call, self.loads / request.id)),  # type: ignore[arg-type]
                {"path": call.path},
            )
        else:
            held, told = held_lib.fresh(training.live.specs, call.config, call.seed), {}

        def begin(live: Any) -> dict[str, Any]:
            if isinstance(call, Load) and model in live:
                live.replace(model, held)
            else:
                live.join(model, held)
            return told

        return training.do(model, begin, tenant)

    def _saved(self, request: TrainingRequest, call: Save, tenant: str) -> "Future[Any]":
        """Reads the policy in its turn, and writes the checkpoint beside the loop, after the
        policy's saves before it.

        Once is enough: ``again`` it is there already.
        """
        saved: Future[Any] = Future()
        if request.is_again:
            saved.set_result({})
            return saved
        if (store := self.store) is None:
            raise UserError("this server keeps no checkpoints: start it with a place for them")

        def write(asked: "Future[HostState]") -> None:
            try:
                held = asked.result()
                saved.set_result(
                    _of_store(lambda: store.save(request.model, request.id, call, held))
                )
            except BaseException as reason:
                saved.set_exception(reason)

        def read(live: Any) -> HostState:
            return (
                live.read_state(request.model).without_gradients()
                if call.kind == "weights"
                else live.adapter(request.model)
            )

        asked = self.training.do(request.model, read, tenant)
        before = self._last_saves.get(request.model)
        self._last_saves[request.model] = saved

        def ready(asked: "Future[HostState]") -> None:
            if not self._closing:
                self._saving.submit(write, asked)

        if before is None:
            asked.add_done_callback(ready)
        else:
            before.add_done_callback(lambda _: asked.add_done_callback(ready))
        return saved

    # -- the finisher's thread: results and snapshots to the disk

    def _finish_all(self) -> None:
        try:
            while (what := self._ends.get()) is not None:
                if isinstance(what[1], Snapshot):
                    self._keep(*what)
                else:
                    self._note(*what)
        except BaseException as failure:
            self._fail(failure)

    def _note(self, model: str, running: list[Any], future: "Future[Any]") -> None:
        """Finishes what has ended of a policy, in its order, and takes a snapshot where one is
        due.
        """
        running[1] = future
        with self._lock:
            policy = self._policies[model]
            ended = []
            while policy.running and policy.running[0][1] is not None:
                ended.append(policy.running.popleft())
            for request, done in ended:
                # What a checkpoint gave is kept at once: it may be gone when it is asked for again.
                policy.since += (
                    self.every if request.call == "load" else request.call in ("optim", "create")
                )
                policy.loads += [request.id] if request.call == "load" else []
                if not isinstance(done.exception(), (UserError, OSError, type(None))):
                    # nobody's mistake: what is not finished runs again when the journal is opened
                    # next
                    raise done.exception()
        for request, done in ended:
            self.futures.finish(request.id, outcome_of(done))
            self._ended(model, request.seq_id)
        with self._lock:
            due = policy.since >= self.every or (
                policy.since and self._clock() - policy.at >= self.every_s
            )
            policy.wanted = policy.wanted or bool(due)
            if policy.wanted and not policy.running:
                try:
                    self._take_snapshot(model, policy)
                    policy.since = 0
                except DatabaseFailed as reason:  # then the next request's end tries again
                    log.warning("no snapshot of %s is taken now: %s", model, reason)
                policy.wanted, policy.at = False, self._clock()
            self._start_ready(policy)

    def _keep(self, policy: _Policy, snapshot: Snapshot, loads: Sequence[str]) -> None:
        """Writes a snapshot, unless its policy was forgotten meanwhile: what stood there again
        would come back with a restart.

        Where the disk refuses, the snapshot before stays, and the end of the policy's next request
        tries again.
        """
        try:
            snapshot.write(self.states)
            with self._lock:
                forgotten = self._policies.get(snapshot.model) is not policy
            if forgotten:
                # a restart knows that it was forgotten, and needs no snapshot
                self.futures.place(snapshot.model)
                path_of(self.states, snapshot.model).unlink(missing_ok=True)
                return
            self.futures.snapshot(snapshot.model, snapshot.place)
            self._drop_loads(loads)
            self.futures.expire()
        except (OSError, DatabaseFailed) as reason:
            log.warning("the snapshot of %s is not written yet: %s", snapshot.model, reason)
            with self._lock:
                policy.since = max(policy.since, self.every)
                policy.loads += loads

    def _drop_loads(self, ids: Sequence[str]) -> None:
        for id in ids:
            for path in self.loads.glob(f"{id}-*"):
                path.unlink(missing_ok=True)

    def _take_snapshot(self, model: str, policy: _Policy) -> None:
        """Asks for the state between what has ended and what is to be started: nothing of the
        policy is under way.
        """
        place = self.futures.place(model)
        loads, policy.loads = policy.loads, []

        def told(future: "Future[Any]") -> None:
            if future.exception() is None:
                self._ends.put((policy, Snapshot(model, place, future.result()), loads))

        self.training.do(
            model, lambda live: live.read_state(model), self.tenant_of(model)
        ).add_done_callback(told)

    def _fail(self, failure: BaseException) -> None:
        self.failed = failure
        self.training.close(failure)


def outcome_of(future: "Future[Any]") -> Outcome:
    """How a request ended, as the journal keeps it."""
    reason = future.exception()
    if reason is None:
        return Done(calls.encode_result(future.result()))
    return Failed(str(reason), Category.USER if isinstance(reason, UserError) else Category.SERVER)


def _of_store(call: Callable[[], Any]) -> Any:
    """What a store gives. A failure of it, a database that is busy say, is that of one request: no
    state has changed.
    """
    try:
        return call()
    except (DatabaseFailed, StorageFailed) as reason:  # no mistake of who asked
        raise OSError(str(reason)) from reason
    except (UserError, OSError):
        raise
    except Exception as reason:
        raise OSError(f"checkpoints cannot be reached: {reason}") from reason


def _then(future: "Future[Any]", call: Callable[[Any], Any]) -> "Future[Any]":
    """The future of what a call makes of a future's result."""
    made: Future[Any] = Future()

    def ended(future: "Future[Any]") -> None:
        try:
            made.set_result(call(future.result()))
        except BaseException as reason:
            made.set_exception(reason)

    future.add_done_callback(ended)
    return made
