"""Training that survives a restart: accepted requests are in the database before their ids are
returned, and states are kept as snapshots.

    submit -> futures -> executor's thread -> training (the loop's thread) -> finisher's thread
           -> futures -> wait, and snapshots

A snapshot is one policy's state with its pending gradients, between two of its requests, and the
place up to which it has everything. A restart loads each policy's snapshot and runs the requests
after it again, in the same order. The state is then the same except for the order of float32 sums,
because a request may share its step with other requests than before. Nothing accepted is lost, and
clients see nothing run twice.

While the disk refuses writes, new requests are refused and accepted ones continue: their results
are returned once they are written, and a snapshot is tried again with the policy's next request.
A policy's save or load waits for its saves before it. A loaded file is
kept under ``loads`` until a snapshot includes it, so a restart can load it again although the
checkpoint is deleted.
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
from typing import Any

from mint_jax import files
from mint_jax.catalog.records.database import DatabaseFailed
from mint_jax.catalog.storage.interface import StorageFailed
from mint_jax.digest import blake3_of
from mint_jax.errors import UserError
from mint_jax.service import calls
from mint_jax.service.calls import Call, Load, Save
from mint_jax.service.checkpoints import Checkpoints
from mint_jax.service.futures import Category, Done, Failed, Futures, Outcome, TrainingRequest
from mint_jax.service.server_db import ServerDatabase
from mint_jax.service.training import Training
from mint_jax.train import host_state
from mint_jax.train.host_state import HostState
from mint_jax.train.trainer import Trainer

log = logging.getLogger("mint_jax.service")
TAKE_S = 0.5  # the executor checks this often whether it must end


class Unavailable(UserError):
    """The server has failed or is closing: try again once it has restarted."""


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A policy's state, and the place up to which it has everything."""

    model: str
    place: int
    state: HostState

    def write(self, folder: Path) -> None:
        """Replaces the policy's file, which is on the disk when this returns."""
        data = self.state.to_bytes({"model": self.model, "place": self.place})
        files.write_file(path_of(folder, self.model), bytes.fromhex(blake3_of(data)) + data)

    @classmethod
    def read(cls, path: Path) -> "Snapshot":
        """Reads a file of ``write``.

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
        notes = host_state.notes_of(data)
        return cls(notes["model"], notes["place"], HostState.from_bytes(data, str(path)))


def path_of(folder: Path, model: str) -> Path:
    """Returns the path of a policy's snapshot; its name is a digest because models' names may have
    any characters.
    """
    return folder / f"{blake3_of(model.encode())[:32]}.safetensors"


@dataclasses.dataclass(eq=False)
class _PolicyQueue:
    """One policy's requests between the threads.

    Attributes:
        running: requests in training that are not finished, in order, with their future once that
            is done.
        waiting: requests that wait for a snapshot, or for a save that they may load.
        snapshot_due: a snapshot is taken once nothing is running.
        updates, at: updates since the last snapshot, and its time.
        loads: ids of the load requests since the last snapshot.
    """

    running: collections.deque[list[Any]] = dataclasses.field(default_factory=collections.deque)
    waiting: collections.deque[TrainingRequest] = dataclasses.field(
        default_factory=collections.deque
    )
    snapshot_due: bool = False
    updates: int = 0
    at: float = 0.0
    loads: list[str] = dataclasses.field(default_factory=list)


class Durable:
    """Training requests of one server.

    Args:
        folder: of ``states`` and ``loads``.
        training: the loop's; its policies belong to this object.
        database: of the requests.
        every: updates of a policy between two snapshots.
        every_s: seconds after which the policy's next request ends with a snapshot in any case.
        clock: monotonic seconds.
        store: of checkpoints; requests that load or save need it.
        tenant_of: returns the tenant that a policy's time is charged to.
        on_result: called in the loop's thread with the model, the call and the result of each
            request that succeeds for the first time.
        on_end: called with a policy and the number of a request that has ended; the number is None
            when the policy was forgotten.
        futures: options of ``Futures``.

    Attributes:
        futures: ids and results.
        restored: policies that a snapshot restored.

    Raises:
        DatabaseDamaged, DatabaseFailed, UserError: see ``Futures``; or a snapshot is damaged.
    """

    def __init__(
        self,
        folder: Path,
        training: Training,
        database: ServerDatabase,
        every: int = 16,
        every_s: float = 60.0,
        clock: Any = time.monotonic,
        store: Checkpoints | None = None,
        tenant_of: Callable[[str], str] = str,
        on_result: Callable[[str, Call, Any], None] = lambda model, call, result: None,
        on_end: Callable[[str, int | None], None] = lambda model, number: None,
        **futures: Any,
    ):
        if every < 1 or every_s <= 0:
            raise UserError(
                f"every is {every} and every_s {every_s}; expected at least 1 update, and more than"
                " 0 seconds"
            )
        self.training, self.every, self.every_s, self._clock = training, every, every_s, clock
        self.store, self.tenant_of = store, tenant_of
        self._on_result, self._on_end = on_result, on_end
        self._saving = ThreadPoolExecutor(2, "saving")
        self.states, self.loads = folder / "states", folder / "loads"
        self.loads.mkdir(parents=True, exist_ok=True)
        found = [Snapshot.read(path) for path in sorted(self.states.glob("*.safetensors"))]
        self.futures = Futures(database, {s.model: s.place for s in found}, **futures)
        self.restored = [snapshot.model for snapshot in found]
        for path in self.loads.iterdir():
            if not self.futures.is_needed(path.name.partition("-")[0]):
                path.unlink()
        for snapshot in found:
            self._do(snapshot.model, lambda live, s=snapshot: live.join(s.model, s.state))
        self._policies: collections.defaultdict[str, _PolicyQueue] = collections.defaultdict(
            lambda: _PolicyQueue(at=clock())
        )
        self._lock = threading.Lock()  # of the policies
        # (policy, entry of ``running``, future) or (queue, snapshot, loads); None ends the thread
        self._ends: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._closing = False
        self.failed: BaseException | None = None
        self._threads = [
            threading.Thread(target=run, name=name, daemon=True)
            for name, run in (("executor", self._execute), ("finisher", self._finish_all))
        ]
        for thread in self._threads:
            thread.start()

    # any thread

    def submit(self, model: str, seq_id: int, call: Call) -> str:
        """Returns the id of a request, which is durable by then. See ``Futures.submit``.

        Raises:
            Conflict, Gone, Overloaded, DatabaseFailed: as there.
            Unavailable: the server has failed or is closing.
        """
        return self.futures.submit(model, seq_id, *self._encoded(call))

    async def submit_task(self, model: str, seq_id: int, call: Call) -> str:
        """``submit`` for an asyncio task."""
        return await self.futures.submit_task(model, seq_id, *self._encoded(call))

    def _encoded(self, call: Call) -> tuple[str, bytes]:
        if self.failed is not None or self._closing:
            raise Unavailable(
                f"this server takes no more requests: {self.failed or 'it is being closed'}"
            )
        return calls.encode(call)

    def result(self, id: str, timeout_s: float = 0.0) -> Any:
        """Returns the result of a request; None if it has not ended.

        Raises:
            UserError: the caller's mistake failed the request.
            RuntimeError: something else failed it.
            Gone: the id is unknown, or the result is no longer kept.
        """
        outcome = self.futures.wait(id, timeout_s)
        if isinstance(outcome, Failed):
            raise (UserError if outcome.category == Category.USER else RuntimeError)(outcome.error)
        return None if outcome is None else calls.decode_result(outcome.result)

    def forget(self, model: str) -> None:
        """Deletes a policy: its state, its snapshot, its requests and their results."""
        self.futures.forget(model, lambda: path_of(self.states, model).unlink(missing_ok=True))
        self._on_end(model, None)
        with self._lock:
            if (policy := self._policies.pop(model, None)) is not None:
                self._drop_loads(policy.loads)
        self._do(model, lambda live: model in live and live.leave(model))

    def close(self) -> None:
        """Ends the threads. Unfinished requests run again after a restart."""
        self._closing = True
        self._ends.put(None)
        for thread in self._threads:
            thread.join()
        self._saving.shutdown()
        self.futures.close()

    def _do(self, model: str, call: Callable[[Any], Any]) -> "Future[Any]":
        return self.training.do(model, call, self.tenant_of(model))

    def _fail(self, failure: BaseException) -> None:
        self.failed = failure
        self.training.close(failure)

    # the executor's thread: requests to training

    def _execute(self) -> None:
        try:
            while not self._closing and self.failed is None:
                if (request := self.futures.take(TAKE_S)) is not None:
                    with self._lock:
                        policy = self._policies[request.model]
                        policy.waiting.append(request)
                        self._start_ready(policy)
        except BaseException as failure:
            self._fail(failure)

    def _start_ready(self, policy: _PolicyQueue) -> None:
        """Starts waiting requests: none while a snapshot is due, and no load or save before the
        saves that it follows.
        """
        while policy.waiting and not policy.snapshot_due:
            saving = any(request.call == "save" for request, _ in policy.running)
            if saving and policy.waiting[0].call in ("load", "save"):
                break
            self._start(policy, policy.waiting.popleft())

    def _start(self, policy: _PolicyQueue, request: TrainingRequest) -> None:
        running: list[Any] = [request, None]
        policy.running.append(running)
        try:
            call = calls.decode(request.call, request.body)
            future = self._dispatch(request, call)
            if not request.is_again:
                future.add_done_callback(
                    lambda future: (
                        future.exception() or self._on_result(request.model, call, future.result())
                    )
                )
        except (UserError, OSError) as error:
            future = Future()
            future.set_exception(error)
        future.add_done_callback(lambda future: self._ends.put((request.model, running, future)))

    def _dispatch(self, request: TrainingRequest, call: Call) -> "Future[Any]":
        model, training, tenant = request.model, self.training, self.tenant_of(request.model)
        if isinstance(call, calls.ForwardBackward):
            future = training.forward_backward(model, call.data, call.loss, tenant, call.backward)
            return _then(future, call.in_sent_shape)
        if isinstance(call, calls.Optim):
            return training.optim(model, call.numbers, tenant)
        if isinstance(call, calls.Refused):
            raise UserError(call.reason)
        if isinstance(call, Save):
            return self._save(request, call)
        if isinstance(call, Load):
            state = self._of_store("load", call, self.loads / request.id)
            result = {"path": call.path}
        else:
            state, result = host_state.fresh(training.live.specs, call.config, call.seed), {}

        def begin(live: Trainer) -> dict[str, Any]:
            if isinstance(call, Load) and model in live:
                live.replace(model, state)
            else:
                live.join(model, state)
            return result

        return self._do(model, begin)

    def _save(self, request: TrainingRequest, call: Save) -> "Future[Any]":
        """Reads the policy in its turn, and writes the checkpoint in another thread. A repeated
        request was written before.
        """
        if request.is_again:
            saved: Future[Any] = Future()
            saved.set_result({})
            return saved
        model, weights = request.model, call.kind == "weights"

        def read(live: Trainer) -> HostState:
            return (
                live.read_state(model).without_gradients() if weights else live.read_adapter(model)
            )

        def write(state: HostState) -> dict[str, Any]:
            return self._of_store("save", model, request.id, call, state)

        return _then(self._do(model, read), write, self._in_saving_thread)

    def _in_saving_thread(self, call: Callable[..., Any], *args: Any) -> None:
        if not self._closing:
            self._saving.submit(call, *args)

    def _of_store(self, method: str, *args: Any) -> Any:
        """Calls the store. Its failure, such as a busy database, becomes an ``OSError`` that fails
        one request: no state has changed.
        """
        try:
            return getattr(self.store, method)(*args)
        except (DatabaseFailed, StorageFailed) as error:  # UserErrors, but not the client's
            raise OSError(str(error)) from error
        except (UserError, OSError):
            raise
        except Exception as error:
            raise OSError(f"checkpoints cannot be reached: {error}") from error

    # the finisher's thread: results and snapshots to the disk

    def _finish_all(self) -> None:
        try:
            while (item := self._ends.get()) is not None:
                if isinstance(item[1], Snapshot):
                    self._write_snapshot(*item)
                else:
                    self._finish(*item)
        except BaseException as failure:
            self._fail(failure)

    def _finish(self, model: str, running: list[Any], future: "Future[Any]") -> None:
        """Finishes a policy's requests that have ended, in order, and takes a snapshot if one is
        due.
        """
        running[1] = future
        with self._lock:
            policy = self._policies[model]
            ended = []
            while policy.running and policy.running[0][1] is not None:
                ended.append(policy.running.popleft())
            for request, done in ended:
                if not isinstance(done.exception(), (UserError, OSError, type(None))):
                    raise done.exception()  # unfinished requests run again after a restart
                if request.call == "load":  # a snapshot now: the checkpoint may be deleted later
                    policy.updates += self.every
                    policy.loads.append(request.id)
                policy.updates += request.call in ("optim", "create")
        for request, done in ended:
            self.futures.finish(request.id, outcome_of(done))
            self._on_end(model, request.seq_id)
        with self._lock:
            overdue = policy.updates and self._clock() - policy.at >= self.every_s
            policy.snapshot_due |= bool(policy.updates >= self.every or overdue)
            if policy.snapshot_due and not policy.running:
                try:
                    self._take_snapshot(model, policy)
                    policy.updates = 0
                except DatabaseFailed as error:  # the end of the next request tries again
                    log.warning("no snapshot of %s is taken now: %s", model, error)
                policy.snapshot_due, policy.at = False, self._clock()
            self._start_ready(policy)

    def _take_snapshot(self, model: str, policy: _PolicyQueue) -> None:
        """Asks the loop for the state; none of the policy's requests is running."""
        place = self.futures.place(model)
        loads, policy.loads = policy.loads, []

        def put(future: "Future[Any]") -> None:
            if future.exception() is None:
                self._ends.put((policy, Snapshot(model, place, future.result()), loads))

        self._do(model, lambda live: live.read_state(model)).add_done_callback(put)

    def _write_snapshot(
        self, policy: _PolicyQueue, snapshot: Snapshot, loads: Sequence[str]
    ) -> None:
        """Writes a snapshot, unless its policy was forgotten: a restart would restore it.

        If the disk refuses, the older snapshot stays, and the end of the policy's next request
        tries again.
        """
        try:
            snapshot.write(self.states)
            with self._lock:
                forgotten = self._policies.get(snapshot.model) is not policy
            if forgotten:
                self.futures.place(snapshot.model)  # by now the deletion is durable
                path_of(self.states, snapshot.model).unlink(missing_ok=True)
                return
            self.futures.snapshot(snapshot.model, snapshot.place)
            self._drop_loads(loads)
            self.futures.expire()
        except (OSError, DatabaseFailed) as error:
            log.warning("the snapshot of %s is not written yet: %s", snapshot.model, error)
            with self._lock:
                policy.updates = max(policy.updates, self.every)
                policy.loads += loads

    def _drop_loads(self, ids: Sequence[str]) -> None:
        for id in ids:
            for path in self.loads.glob(f"{id}-*"):
                path.unlink(missing_ok=True)


def outcome_of(future: "Future[Any]") -> Outcome:
    """Returns the outcome of a request as the database keeps it."""
    error = future.exception()
    if error is None:
        return Done(calls.encode_result(future.result()))
    return Failed(str(error), Category.USER if isinstance(error, UserError) else Category.SERVER)


def _then(
    future: "Future[Any]",
    call: Callable[[Any], Any],
    run: Callable[..., Any] = lambda call, *args: call(*args),
) -> "Future[Any]":
    """Returns the future of a function of another future's result; ``run`` calls it."""
    made: Future[Any] = Future()

    def ended(future: "Future[Any]") -> None:
        try:
            made.set_result(call(future.result()))
        except BaseException as error:
            made.set_exception(error)

    future.add_done_callback(lambda future: run(ended, future))
    return made
