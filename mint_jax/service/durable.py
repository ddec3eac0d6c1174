"""Training requests that survive a restart, run slice by slice in the devices' thread.

    submit -> futures -> turn (the devices' thread) -> finisher's thread -> futures -> wait

Requests of different policies that are ready share a step, and so do passes of one policy without
an update between them. The tenant with the least service goes first (``fairness.py``).
"""

import collections
import dataclasses
import functools
import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

from mint_jax import files
from mint_jax.catalog.records.database import DatabaseFailed
from mint_jax.catalog.storage.payloads import StorageFailed
from mint_jax.digest import blake3_of
from mint_jax.errors import UserError
from mint_jax.service import training_calls as codec
from mint_jax.service.checkpoints import Checkpoints
from mint_jax.service.costs import BASE, Costs, Kind, Payer
from mint_jax.service.fairness import Counters
from mint_jax.service.futures import Category, Done, Failed, Futures, TrainingRequest
from mint_jax.service.server_db import ServerDatabase
from mint_jax.service.training_calls import (
    Call,
    Create,
    ForwardBackward,
    Load,
    Optim,
    Refused,
    Save,
)
from mint_jax.train import blocks, host_state
from mint_jax.train.blocks import TrainRequest
from mint_jax.train.config import OptimizerConfig
from mint_jax.train.host_state import HostState
from mint_jax.train.slots import StateLost
from mint_jax.train.trainer import Trainer

log = logging.getLogger("mint_jax.service")
KEPT_GAPS = 10_000  # the last gaps between two dispatches of decoding rows
MAX_PASSES = 64  # of one policy that are read from the database for one step


class Unavailable(UserError):
    """The server has failed or is closing: try again once it has restarted."""


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A policy's state between two requests, and the place up to which it has everything."""

    model: str
    place: int
    state: HostState

    def write(self, folder: Path) -> None:
        """Replaces the policy's file durably."""
        data = self.state.to_bytes({"model": self.model, "place": self.place})
        files.write_file(path_of(folder, self.model), bytes.fromhex(blake3_of(data)) + data)

    @classmethod
    def read(cls, path: Path) -> "Snapshot":
        """Reads a file of ``write``. Raises ``UserError`` if it is damaged."""
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
    """Returns the path of a policy's snapshot."""
    return folder / f"{blake3_of(model.encode())[:32]}.safetensors"


@dataclasses.dataclass(eq=False)
class _Operation:
    """A request, or a function with a ``future``. ``work`` is for the devices' thread, None before
    the request is read.
    """

    policy: str
    tenant: str
    request: TrainingRequest | None = None
    future: "Future[Any] | None" = None
    call: Call | None = None
    work: TrainRequest | OptimizerConfig | Callable[[Trainer], Any] | None = None
    ended: bool = False
    result: Any = None
    error: BaseException | None = None

    @property
    def payer(self) -> Payer:
        return Payer(self.tenant, self.policy)

    def end(self, result: Any = None, error: BaseException | None = None) -> None:
        self.ended, self.result, self.error = True, result, error


@dataclasses.dataclass(eq=False)
class _SinceSnapshot:
    """Changes of a policy since its last snapshot: its time, updates, ids of load requests."""

    at: float = dataclasses.field(default_factory=time.monotonic)
    updates: int = 0
    is_due: bool = False
    loads: list[str] = dataclasses.field(default_factory=list)


class Durable:
    """Training requests of one server.

    A restart loads each policy's snapshot and runs the requests after it again, in the same order.
    The state is then the same except for the order of float32 sums, because a request may share its
    step with others than before. A loaded checkpoint may be deleted, so its file is kept under
    ``loads`` until a snapshot includes it.

    Args:
        live: the policies; only ``slice`` touches them.
        gap_s, idle_gap_s: seconds of a slice, unless the shortest is longer, while rows decode and
            while none does; the latter delays the first token of a new request.
        every, every_s: updates of a policy, and seconds, after which an update ends with a
            snapshot.
        store: of checkpoints; requests that load or save need it.
        tenant_of: returns the tenant that a policy's time is charged to.
        on_result: called in the devices' thread for each request that succeeds for the first time.
        on_end: called with a policy and the number of a request that has ended, None of a forgotten
            policy.

    Attributes:
        gaps: seconds that decoding rows waited for slices.
        restored: policies that a snapshot restored.
        failed: reason why no request is accepted any more.

    Raises:
        DatabaseDamaged, DatabaseFailed, UserError: see ``Futures``; or a snapshot is damaged.
    """

    def __init__(
        self,
        folder: Path,
        live: Trainer,
        database: ServerDatabase,
        costs: Costs | None = None,
        wake: Callable[[], None] = lambda: None,
        gap_s: float = 0.5,
        idle_gap_s: float = 2.0,
        every: int = 16,
        every_s: float = 60.0,
        store: Checkpoints | None = None,
        tenant_of: Callable[[str], str] = str,
        on_result: Callable[[str, Call, Any], None] = lambda model, call, result: None,
        on_end: Callable[[str, int | None], None] = lambda model, number: None,
    ):
        if every < 1 or every_s <= 0 or not 0 < gap_s <= idle_gap_s:
            raise UserError(
                f"every is {every}, every_s {every_s}, gap_s {gap_s}, idle_gap_s {idle_gap_s};"
                " expected at least 1 update, and seconds above 0 with gap_s at most idle_gap_s"
            )
        self.live, self.costs = live, costs or Costs(database)
        self.counters = counters = Counters()
        self.gap_s, self.idle_gap_s, self.every, self.every_s = gap_s, idle_gap_s, every, every_s
        self.gaps: collections.deque[float] = collections.deque(maxlen=KEPT_GAPS)
        self.store, self.tenant_of, self._wake = store, tenant_of, wake
        self._on_result, self._on_end = on_result, on_end
        self.failed: BaseException | None = None
        # of ``rollout.active.Coscheduled``
        self.began, self.ended, self.order = counters.begin, counters.end, counters.order
        self._lock = threading.Lock()  # of the inbox and of ``_changes``
        self._inbox: list[tuple[_Operation, bool]] = []  # with True if its file is there
        self._changes = collections.defaultdict[str, _SinceSnapshot](_SinceSnapshot)
        # of policies with something to do; paused ones wait for a file; only the devices' thread
        # touches them
        self._queues: dict[str, collections.deque[_Operation]] = {}
        self._paused: set[str] = set()
        self._update_s = 0.0  # seconds of one policy's update, last measured
        self.states, self.loads = folder / "states", folder / "loads"
        self.loads.mkdir(parents=True, exist_ok=True)
        found = [Snapshot.read(path) for path in sorted(self.states.glob("*.safetensors"))]
        places = {snapshot.model: snapshot.place for snapshot in found}
        self.futures = Futures(database, places, on_ready=wake)
        self.restored = list(places)
        self._to_join = [(one.model, one.state) for one in found]  # by the first slice
        for path in self.loads.iterdir():
            if path.name.partition("-")[0] not in self.futures:
                path.unlink()
        self._io = ThreadPoolExecutor(2, "checkpoints")
        self._finisher = ThreadPoolExecutor(1, "finisher")  # results and snapshots, in order

    # any thread

    def submit(self, model: str, seq_id: int, call: Call) -> str:
        """Returns the id of a request, as ``Futures.submit`` does. Raises ``Unavailable``."""
        return self.futures.submit(model, seq_id, *self._encoded(call))

    async def submit_task(self, model: str, seq_id: int, call: Call) -> str:
        """``submit`` for an asyncio task."""
        return await self.futures.submit_task(model, seq_id, *self._encoded(call))

    def _encoded(self, call: Call) -> tuple[str, bytes]:
        if self.failed is not None:
            raise Unavailable(f"this server takes no more requests: {self.failed}")
        return codec.encode(call)

    def result(self, id: str, timeout_s: float = 0.0) -> Any:
        """Returns the result of a request; None if it has not ended. Raises ``UserError``: the
        caller's mistake failed it; ``RuntimeError``: something else did; ``Gone``.
        """
        outcome = self.futures.wait(id, timeout_s)
        if isinstance(outcome, Failed):
            raise (UserError if outcome.category == Category.USER else RuntimeError)(outcome.error)
        return None if outcome is None else codec.decode_result(outcome.result)

    def do(self, policy: str, call: Callable[[Trainer], Any], tenant: str = "") -> "Future[Any]":
        """Runs a function in the policy's order, between steps. A restart does not run it again."""
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        with self._lock:
            if self.failed is not None:
                future.set_exception(self.failed)
                return future
            self._take()
            self._inbox.append((_Operation(policy, tenant, future=future, work=call), False))
        self._wake()
        return future

    def forget(self, model: str) -> None:
        """Deletes a policy: its state, its snapshot, its requests and their results."""
        self.futures.forget(model, lambda: path_of(self.states, model).unlink(missing_ok=True))
        self._on_end(model, None)
        with self._lock:
            changes = self._changes.pop(model, _SinceSnapshot())
        self._drop_loads(changes.loads)
        self.do(model, lambda live: model in live and live.leave(model), self.tenant_of(model))

    @property
    def waiting(self) -> int:
        """Number of policies with something to do, and of requests not looked at yet."""
        if self.failed is not None:
            return 0
        new = len(self._inbox) + len(self._to_join) + self.futures.num_ready
        return len(self._queues) - len(self._paused) + new

    def queued(self) -> dict[str, int]:
        """Returns the number of unfinished requests of each policy that has some."""
        return {policy: len(queue) for policy, queue in list(self._queues.items())}

    def stop(self, reason: BaseException) -> None:
        """Refuses further requests. Unfinished ones run after a restart."""
        with self._lock:
            self.failed = self.failed or reason
            left, self._inbox = [one for one, _ in self._inbox], []
        queues, self._queues, self._paused = self._queues, {}, set()
        for operation in itertools.chain(left, *queues.values()):
            if operation.future is not None:
                operation.future.set_exception(reason)

    def close(self) -> None:
        """Ends the threads, once ``slice`` is called no more; results so far are written."""
        self._io.shutdown()
        self._finisher.shutdown()
        self.futures.end_waits()

    # the thread that owns the devices; see ``rollout.active.Coscheduled``

    def turn(self, decoding: bool) -> bool:
        began = time.perf_counter()
        worked = self.slice(self.gap_s if decoding else self.idle_gap_s)
        if worked and decoding:
            self.gaps.append(time.perf_counter() - began)
        return worked

    def took(
        self,
        kind: Literal["prefill", "decode"],
        seconds: float,
        tokens: Mapping[tuple[str, str | None], int],
    ) -> None:
        shares = {Payer(tenant, digest or BASE): n for (tenant, digest), n in tokens.items()}
        self._charge(kind, seconds, shares)

    def slice(self, bound_s: float | None = None) -> bool:
        """Computes one slice of about ``bound_s`` seconds at most; returns whether there was
        anything to do. A failure that no request caused ends all requests and is raised, because
        what is on the devices may be lost.
        """
        if self.failed is not None:
            return False
        try:
            self._sort()
            return self._slice(bound_s)
        except BaseException as failure:
            self.stop(failure)
            raise

    def _take(self) -> None:
        """Takes requests that are ready; needs the lock."""
        while (request := self.futures.take()) is not None:
            operation = _Operation(request.model, self.tenant_of(request.model), request)
            self._inbox.append((operation, False))

    def _sort(self) -> None:
        """Joins restored policies, and appends new operations to their queues."""
        while self._to_join:
            policy, state = self._to_join.pop()
            try:
                self.live.join(policy, state)
            except (UserError, OSError) as error:  # no slot fits it since a setting was changed
                log.warning("policy %s is not restored: %s", policy, error)
        with self._lock:
            self._take()
            inbox, self._inbox = self._inbox, []
        for operation, is_back in inbox:
            if is_back:
                self._paused.discard(operation.policy)
                self._pop_ended(operation.policy)
            else:
                self.counters.begin(operation.tenant)
                self._queues.setdefault(operation.policy, collections.deque()).append(operation)

    def _slice(self, bound_s: float | None) -> bool:
        heads = [head for policy in list(self._queues) if (head := self._head(policy)) is not None]
        if not heads:
            return False
        order = self.counters.order(head.tenant for head in heads)
        heads.sort(key=lambda head: order.index(head.tenant))
        first = heads[0]
        try:
            if isinstance(first.work, TrainRequest):
                self._step([head for head in heads if isinstance(head.work, TrainRequest)], bound_s)
            elif isinstance(first.work, OptimizerConfig):
                updates = [head for head in heads if isinstance(head.work, OptimizerConfig)]
                if bound_s is not None and self._update_s:
                    updates = updates[: max(1, int(bound_s / self._update_s))]
                self._update(updates)
            else:
                self._call(first)
        except StateLost as lost:  # nothing was computed: the other policies have another turn
            self._queues[lost.policy][0].end(error=lost)
        for head in heads:
            self._pop_ended(head.policy)
        if first.policy in self._queues:  # behind the other policies of its tenant
            self._queues[first.policy] = self._queues.pop(first.policy)
        return True

    def _head(self, policy: str) -> _Operation | None:
        """Returns a policy's next operation, if it can run now."""
        while policy in self._queues and policy not in self._paused:
            head = self._queues[policy][0]
            self._read(head)
            if policy in self._paused:
                return None
            if head.ended:
                self._pop_ended(policy)
                continue
            # the programs of passes and updates may not be compiled yet; functions need none
            trains = isinstance(head.work, TrainRequest | OptimizerConfig)
            if trains and not self.live.can_move():
                return None
            if isinstance(head.work, TrainRequest) and not self.live.can_start(head.work):
                return None
            return head
        return None

    def _read(self, one: _Operation) -> None:
        """Reads and checks a request that comes next."""
        if one.work is not None or one.ended:
            return
        assert one.request is not None
        if (body := self.futures.body(one.request.id)) is None:  # its model was forgotten
            one.end()
            return
        try:
            one.call = codec.decode(one.request.call, body)
            match one.call:
                case ForwardBackward(data, loss, backward):
                    blocks.check(data, self.live.base.cfg, self.live.declared)
                    one.work = TrainRequest(one.policy, data, loss, backward)
                case Optim(numbers):
                    one.work = numbers
                case Save() if one.request.is_again:  # it was written before
                    one.end({})
                case Save() as call:
                    one.work = functools.partial(self._save, one, call)
                case Create() | Load() as call:
                    begin = functools.partial(self._begin, one, one.request, call)
                    self._in_background(one, begin)
                case Refused(reason):
                    raise UserError(reason)
            trains = isinstance(one.work, TrainRequest | OptimizerConfig)
            if trains and one.policy not in self.live:
                message = f"policy {one.policy!r} is not in training: create or load it first"
                raise UserError(message)
        except (UserError, OSError) as error:
            one.end(error=error)

    def _step(self, heads: list[_Operation], bound_s: float | None) -> None:
        works: dict[int, tuple[TrainRequest, _Operation]] = {}
        for one in itertools.chain.from_iterable(map(self._until_update, heads)):
            assert isinstance(one.work, TrainRequest)
            works[id(one.work)] = one.work, one
        step = self.live.step([work for work, _ in works.values()], bound_s)
        tokens = collections.Counter[Payer]()
        for block in step.blocks:
            tokens[works[id(block.work)][1].payer] += blocks.used([block])
        self._charge("train", step.seconds, tokens)
        self._charge_moves()
        for work, one in works.values():
            if not work.left:
                assert isinstance(one.call, ForwardBackward)
                one.end(one.call.result(work.logprobs, work.loss))  # type: ignore[arg-type]

    def _until_update(self, head: _Operation) -> list[_Operation]:
        """Returns a policy's passes before its next other operation; they may run in any order."""
        found: list[_Operation] = []
        for one in itertools.islice(self._queues[head.policy], MAX_PASSES):
            if one.request is None or one.request.call != "forward_backward":
                break
            self._read(one)
            if not one.ended:
                found.append(one)
        return found

    def _update(self, heads: list[_Operation]) -> None:
        began = time.perf_counter()
        results = self.live.optim({one.policy: one.work for one in heads})  # type: ignore[misc]
        seconds = time.perf_counter() - began
        self._update_s = seconds / len(heads)
        seconds -= self._charge_moves()
        self._charge("update", seconds, dict.fromkeys((one.payer for one in heads), 1))
        for one in heads:
            one.end(results[one.policy])

    def _call(self, head: _Operation) -> None:
        """Runs a function. Mistakes of its caller and failing disks fail its own operation."""
        began = time.perf_counter()
        try:
            result = head.work(self.live)  # type: ignore[operator, misc]
            if head.policy not in self._paused:
                head.end(result)
        except (UserError, OSError) as error:
            head.end(error=error)
        seconds = time.perf_counter() - began
        self.live.brought()  # included in these seconds
        self._charge("load", seconds, {head.payer: 1})

    def _charge_moves(self) -> float:
        """Charges the moves of policies to their slots; returns their seconds."""
        moved = self.live.brought()
        for policy, seconds in moved.items():
            self._charge("load", seconds, {Payer(self.tenant_of(policy), policy): 1})
        return sum(moved.values())

    def _charge(self, kind: Kind, seconds: float, shares: Mapping[Payer, float]) -> None:
        self.costs.charge(kind, seconds, shares)
        self.counters.charge(seconds, [(payer.tenant, share) for payer, share in shares.items()])

    def _pop_ended(self, policy: str) -> None:
        """Hands over the results of a policy's first operations; takes a snapshot if one is due."""
        operations = self._queues.get(policy, ())
        while operations and operations[0].ended:
            one = operations.popleft()
            self.counters.end(one.tenant)
            if one.future is not None:
                if one.error is not None:
                    one.future.set_exception(one.error)
                else:
                    one.future.set_result(one.result)
            elif one.call is not None or one.error is not None:  # else it was forgotten
                assert one.request is not None
                self._later(self._finish, one, one.request)
                if one.error is None and one.call is not None:
                    if not one.request.is_again:
                        self._on_result(policy, one.call, one.result)
                    if isinstance(one.call, Create | Load | Optim):
                        self._count_change(one.request, one.call)
        if not operations:
            self._queues.pop(policy, None)

    def _count_change(self, request: TrainingRequest, call: Call) -> None:
        """Takes a snapshot if one is due; no later request has started."""
        with self._lock:
            if request.id not in self.futures:  # its model was forgotten
                return
            changes = self._changes[request.model]
            changes.updates += 1
            if isinstance(call, Load):  # a snapshot now: the checkpoint may be deleted later
                changes.is_due = True
                changes.loads.append(request.id)
            overdue = time.monotonic() - changes.at >= self.every_s
            if not (changes.is_due or overdue or changes.updates >= self.every):
                return
            self._changes[request.model] = _SinceSnapshot()
        try:
            state = self.live.read_state(request.model)
        except UserError as error:  # the policy has left, or its file is lost
            log.warning("no snapshot of %s is taken: %s", request.model, error)
        else:
            self._later(self._write_snapshot, request, state, changes.loads)

    # checkpoints, in threads of their own

    def _in_background(self, one: _Operation, call: Callable[[], None]) -> None:
        """Runs a function that changes the operation; its policy waits."""
        self._paused.add(one.policy)

        def run() -> None:
            try:
                call()
            except Exception as error:  # no state has changed
                one.end(error=error)
            with self._lock:
                self._inbox.append((one, True))
            self._wake()

        self._io.submit(run)

    def _begin(self, one: _Operation, request: TrainingRequest, call: Create | Load) -> None:
        """Makes or reads the state that a policy begins with."""
        if isinstance(call, Load):
            assert self.store is not None
            state = self.store.load(call, self.loads / request.id)
            result = {"path": call.path}
        else:
            state, result = host_state.fresh(self.live.specs, call.config, call.seed), {}

        def begin(live: Trainer) -> dict[str, Any]:
            is_loaded = isinstance(call, Load) and one.policy in live
            (live.replace if is_loaded else live.join)(one.policy, state)
            return result

        one.work = begin

    def _save(self, one: _Operation, call: Save, live: Trainer) -> None:
        """Reads the policy, and writes the checkpoint in the background."""
        read = live.read_state if call.kind == "weights" else live.read_adapter
        state = read(one.policy).without_gradients()
        assert one.request is not None
        assert self.store is not None
        save, id = self.store.save, one.request.id
        self._in_background(one, lambda: one.end(save(one.policy, id, call, state)))

    # the finisher's thread: results and snapshots to the disk

    def _later(self, call: Callable[..., None], *args: Any) -> None:
        def run() -> None:
            try:
                call(*args)
            except BaseException as failure:
                self.failed = failure

        self._finisher.submit(run)

    def _finish(self, one: _Operation, request: TrainingRequest) -> None:
        if one.error is None:
            outcome = Done(codec.encode_result(one.result))
        else:
            is_mistake = isinstance(one.error, UserError)
            is_mistake &= not isinstance(one.error, (DatabaseFailed, StorageFailed))  # UserErrors
            outcome = Failed(str(one.error), Category.USER if is_mistake else Category.SERVER)
        self.futures.finish(request.id, outcome)
        self._on_end(one.policy, request.seq_id)

    def _write_snapshot(
        self, request: TrainingRequest, state: HostState, loads: Sequence[str]
    ) -> None:
        """Writes the snapshot after a request. If the disk refuses, the older one stays, and the
        policy's next update tries again.
        """
        model = request.model
        try:
            snapshot = Snapshot(model, self.futures.place(model), state)
            snapshot.write(self.states)
            if request.id not in self.futures:  # forgotten
                self.futures.place(model)  # by now the deletion is durable
                path_of(self.states, model).unlink(missing_ok=True)
                return
            self.futures.snapshot(model, snapshot.place)
            self._drop_loads(loads)
        except (OSError, DatabaseFailed) as error:
            log.warning("the snapshot of %s is not written yet: %s", model, error)
            with self._lock:
                changes = self._changes[model]
                changes.is_due = True
                changes.loads += loads

    def _drop_loads(self, ids: Sequence[str]) -> None:
        for id in ids:
            for path in self.loads.glob(f"{id}-*"):
                path.unlink(missing_ok=True)
