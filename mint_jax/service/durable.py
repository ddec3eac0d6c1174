"""Training requests that survive a restart, run slice by slice in the devices' thread.

    submit -> futures -> turn (the devices' thread) -> finisher's thread -> futures -> wait

Requests of different policies that are ready share a step, and so do passes of one policy without
an update between them. The tenant with the least service goes first (``fairness.py``).
"""

import collections
import dataclasses
import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

from mint_jax.catalog.records.database import DatabaseFailed
from mint_jax.catalog.storage.payloads import StorageFailed
from mint_jax.errors import UserError
from mint_jax.service import custom_loss
from mint_jax.service import training_calls as codec
from mint_jax.service.checkpoints import Checkpoints
from mint_jax.service.costs import BASE, Costs, Kind, Payer
from mint_jax.service.fairness import Counters
from mint_jax.service.futures import Category, Futures, Outcome, TrainingRequest
from mint_jax.service.server_db import ServerDatabase
from mint_jax.service.snapshots import Snapshots
from mint_jax.service.training_calls import Call, Create, ForwardBackward, Load, Optim, Save
from mint_jax.train import blocks, host_state
from mint_jax.train.blocks import TrainRequest
from mint_jax.train.config import OptimizerConfig
from mint_jax.train.slots import StateLost
from mint_jax.train.trainer import Trainer

log = logging.getLogger("mint_jax.service")
KEPT_GAPS = 10_000  # the last gaps between two dispatches of decoding rows
MAX_PASSES = 64  # of one policy that are read from the database for one step


class Unavailable(UserError):
    """The server has failed or is closing: try again once it has restarted."""


@dataclasses.dataclass(eq=False)
class _Operation:
    """A request, or a function of ``do``. ``work`` is for the devices' thread, None before the
    request is read; ``waits`` while a thread works for it. ``trained`` is the result of a custom
    loss, known before its gradient is added. ``payer`` is known once it is in its policy's queue.
    """

    policy: str
    request: TrainingRequest | None = None
    tenant: str | None = None
    payer: Payer = Payer("", "")
    call: Call | None = None
    work: TrainRequest | OptimizerConfig | Callable[[Trainer], Any] | None = None
    waits: bool = False
    trained: codec.Trained | None = None
    future: "Future[Any]" = dataclasses.field(default_factory=Future)


class Durable:
    """Training requests of one server.

    A restart loads each policy's snapshot and runs the requests after it again, in the same order.
    The state is then the same except for the order of float32 sums, because a request may share its
    step with others than before.

    Args:
        live: the policies; only ``slice`` touches them.
        gap_s, idle_gap_s: seconds of a slice, unless the shortest is longer, while rows decode and
            while none does; the latter delays the first token of a new request.
        counters: of the tenants' service, which other servers over the same devices share.
        every, every_s: changes of a policy, and seconds, after which its snapshot is due.
        store: of checkpoints; requests that load or save need it.
        tenant_of: returns the tenant that a policy's time is charged to.
        on_result: called in the devices' thread for each request that succeeds for the first time.
        on_end: called with a policy and the number of an ended request, None if it is forgotten.

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
        counters: Counters | None = None,
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
        self.counters = counters = counters or Counters()
        self.gap_s, self.idle_gap_s = gap_s, idle_gap_s
        self.gaps: collections.deque[float] = collections.deque(maxlen=KEPT_GAPS)
        self.store, self.tenant_of, self._wake = store, tenant_of, wake
        self._on_result, self._on_end = on_result, on_end
        self.failed: BaseException | None = None
        # of ``rollout.active.Coscheduled``
        self.began, self.ended, self.order = counters.begin, counters.end, counters.order
        self._lock = threading.Lock()  # of the inbox
        self._inbox: list[_Operation] = []
        # of policies with something to do; only the devices' thread touches them
        self._queues: dict[str, collections.deque[_Operation]] = {}
        self._update_s = 0.0  # seconds of one policy's update, last measured
        self.snapshots = Snapshots(folder, every, every_s)
        found = self.snapshots.read()
        places = {snapshot.model: snapshot.place for snapshot in found}
        self.restored = list(places)
        self._to_join = [(one.model, one.state) for one in found]  # by the first slice
        self.futures = Futures(database, places, lambda one: self._add(_Operation(one.model, one)))
        again = {one.request.id for one in self._inbox if one.request is not None}
        links = {path.name.partition("-")[0] for path in self.snapshots.loads.iterdir()}
        self.snapshots.unlink(links - again)
        self._io = ThreadPoolExecutor(2, "checkpoints")
        self._finisher = ThreadPoolExecutor(1, "finisher")

    # any thread

    def submit(self, model: str, seq_id: int, call: Call) -> "Future[str]":
        """Returns the id of a request, as ``Futures.submit`` does. Raises ``Unavailable``."""
        if self.failed is not None:
            raise Unavailable(f"this server takes no more requests: {self.failed}")
        return self.futures.submit(model, seq_id, *codec.encode(call))

    def do(self, policy: str, call: Callable[[Trainer], Any], tenant: str = "") -> "Future[Any]":
        """Runs a function in the policy's order, between steps. A restart does not run it again."""
        one = _Operation(policy, tenant=tenant, work=call)
        one.future.set_running_or_notify_cancel()
        self._add(one)
        return one.future

    def _add(self, one: _Operation) -> None:
        with self._lock:
            if self.failed is None:
                self._inbox.append(one)
            elif one.request is None:  # requests run after a restart
                one.future.set_exception(self.failed)
        self._wake()

    def forget(self, model: str) -> None:
        """Deletes a policy: its state, its snapshot, its requests and their results."""
        self.futures.forget(model, lambda: self.snapshots.remove(model))
        self._on_end(model, None)
        self.snapshots.forget(model)
        self.do(model, lambda live: model in live and live.leave(model), self.tenant_of(model))

    @property
    def waiting(self) -> int:
        """Number of policies with something to do, and of requests not looked at yet."""
        if self.failed is not None:
            return 0
        ready = sum(not queue[0].waits for queue in self._queues.values())
        return ready + len(self._inbox) + len(self._to_join)

    def queued(self) -> dict[str, int]:
        """Returns the number of unfinished requests of each policy that has some."""
        return {policy: len(queue) for policy, queue in list(self._queues.items())}

    def stop(self, reason: BaseException) -> None:
        """Refuses further requests. Unfinished ones run after a restart."""
        with self._lock:
            self.failed = self.failed or reason
            left, self._inbox = self._inbox, []
        queues, self._queues = self._queues, {}
        for one in itertools.chain(*queues.values()):
            self.counters.end(one.payer.tenant)
        for one in itertools.chain(left, *queues.values()):
            if one.request is None and not one.future.done():
                one.future.set_exception(reason)

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

    def _sort(self) -> None:
        """Joins restored policies, and appends new operations to their queues."""
        while self._to_join:
            policy, state = self._to_join.pop()
            try:
                self.live.join(policy, state)
            except (UserError, OSError) as error:  # no slot fits it since a setting was changed
                log.warning("policy %s is not restored: %s", policy, error)
        with self._lock:
            inbox, self._inbox = self._inbox, []
        for one in inbox:
            tenant = self.tenant_of(one.policy) if one.tenant is None else one.tenant
            one.payer = Payer(tenant, one.policy)
            self.counters.begin(tenant)
            self._queues.setdefault(one.policy, collections.deque()).append(one)

    def _slice(self, bound_s: float | None) -> bool:
        heads = [head for policy in list(self._queues) if (head := self._head(policy)) is not None]
        if not heads:
            return False
        order = self.order(head.payer.tenant for head in heads)
        heads.sort(key=lambda head: order.index(head.payer.tenant))
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
            self._queues[lost.policy][0].future.set_exception(lost)
        for head in heads:
            self._pop_ended(head.policy)
        if first.policy in self._queues:  # behind the other policies of its tenant
            self._queues[first.policy] = self._queues.pop(first.policy)
        return True

    def _head(self, policy: str) -> _Operation | None:
        """Returns a policy's next operation, if it can run now."""
        while policy in self._queues:
            head = self._queues[policy][0]
            self._read(head)
            if head.waits:
                return None
            if head.future.done():
                self._pop_ended(policy)
                continue
            # the programs of passes and updates may not be compiled yet; functions need none
            match head.work:
                case TrainRequest() as work:
                    can_run = self.live.can_move() and self.live.can_start(work)
                case OptimizerConfig() as numbers:
                    can_run = self.live.can_move() and self.live.can_update(policy, numbers)
                case _:
                    can_run = True
            return head if can_run else None
        return None

    def _read(self, one: _Operation) -> None:
        """Reads and checks a request that comes next."""
        if one.work is not None or one.waits or one.future.done():
            return
        request = one.request
        assert request is not None
        if (body := self.futures.body(request)) is None:  # its model was forgotten
            one.future.cancel()
            return
        try:
            one.call = call = codec.decode(request.call, body)
            match call:
                case ForwardBackward(data, loss, backward):
                    blocks.check(data, self.live.base.cfg, self.live.declared)
                    backward = backward and call.custom is None
                    one.work = TrainRequest(one.policy, data, loss, backward)
                case Optim(numbers):
                    one.work = numbers
                case Save() if request.is_again:  # it was written before
                    one.future.set_result({})
                case Save(kind):
                    read = Trainer.read_state if kind == "weights" else Trainer.read_adapter
                    one.work = lambda live: read(live, one.policy).without_gradients()
                case Create() | Load():
                    self._in_background(one, lambda: self._beginning(one.policy, request.id, call))
                case codec.Refused(reason):
                    raise UserError(reason)
            if isinstance(call, ForwardBackward | Optim) and one.policy not in self.live:
                raise UserError(
                    f"policy {one.policy!r} is not in training: create or load it first"
                )
        except (UserError, OSError) as error:
            one.future.set_exception(error)

    def _step(self, heads: list[_Operation], bound_s: float | None) -> None:
        works = {
            one.work: one
            for one in itertools.chain.from_iterable(map(self._until_update, heads))
            if isinstance(one.work, TrainRequest)
        }
        step = self.live.step(list(works), bound_s)
        tokens = collections.Counter[Payer]()
        for block in step.blocks:
            tokens[works[block.work].payer] += blocks.used([block])
        self._charge("train", step.seconds, tokens)
        self._charge_moves()
        for work, one in works.items():
            if not work.left and isinstance(call := one.call, ForwardBackward):
                if call.custom is not None and one.trained is None:
                    self._differentiate(one, call, work.logprobs)
                else:
                    result = call.result(work.logprobs, work.loss)  # type: ignore[arg-type]
                    one.future.set_result(one.trained or result)

    def _differentiate(self, one: _Operation, call: ForwardBackward, logprobs: list[Any]) -> None:
        """Computes a custom loss in the background; the work that adds its gradient follows."""

        def run() -> codec.Trained | TrainRequest:
            assert call.custom is not None
            loss, metrics, weights = custom_loss.differentiate(call.custom, logprobs, call.inputs)
            one.trained = codec.Trained(logprobs, loss, metrics=metrics)
            data = [dataclasses.replace(d, weights=w) for d, w in zip(call.data, weights)]
            return TrainRequest(one.policy, data, call.loss) if call.backward else one.trained

        if call.backward:
            one.work = None
        self._in_background(one, run)

    def _until_update(self, head: _Operation) -> list[_Operation]:
        """Returns a policy's passes before its next other operation; they may run in any order."""
        found: list[_Operation] = []
        for one in itertools.islice(self._queues[head.policy], MAX_PASSES):
            if one.request is None or one.request.call != "forward_backward":
                break
            self._read(one)
            if not one.future.done() and not one.waits:
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
            one.future.set_result(results[one.policy])

    def _call(self, head: _Operation) -> None:
        """Runs a function. Mistakes of its caller and failing disks fail its own operation."""
        began, request, call = time.perf_counter(), head.request, head.call
        try:
            result = head.work(self.live)  # type: ignore[operator, misc]
            if isinstance(call, Save):
                assert request is not None
                assert self.store is not None
                save, about = self.store.save, (head.policy, request.id, call, result)
                self._in_background(head, lambda: save(*about))
            else:
                head.future.set_result(result)
        except (UserError, OSError) as error:
            head.future.set_exception(error)
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
        while operations and operations[0].future.done():
            one = operations.popleft()
            self.counters.end(one.payer.tenant)
            request, call, future = one.request, one.call, one.future
            if request is None or future.cancelled():
                continue
            is_done = future.exception() is None
            if call is not None and is_done and not request.is_again:
                self._on_result(policy, call, future.result())
            self._later(self._finish, request, future)
            if is_done and isinstance(call, Create | Load | Optim):
                self._snapshot_if_due(request, call)
        if not operations:
            self._queues.pop(policy, None)

    def _snapshot_if_due(self, request: TrainingRequest, call: Call) -> None:
        """Counts a change of the policy, which no later request has changed."""
        if request not in self.futures:  # its model was forgotten
            return
        if (changes := self.snapshots.due(request, isinstance(call, Load))) is None:
            return
        try:
            state = self.live.read_state(request.model)
        except UserError as error:  # the policy has left, or its file is lost
            log.warning("no snapshot of %s is taken: %s", request.model, error)
        else:
            self._later(self.snapshots.write, request, state, changes, self.futures)

    # checkpoints and custom losses, in threads of their own

    def _in_background(self, one: _Operation, call: Callable[[], Any]) -> None:
        """Calls a function that returns the operation's work, or its result if it has done its
        work; its policy waits.
        """
        one.waits, has_worked = True, one.work is not None

        def run() -> None:
            try:
                found = call()
                if has_worked:
                    one.future.set_result(found)
                else:
                    one.work = found
            except Exception as error:  # no state has changed
                one.future.set_exception(error)
            one.waits = False
            self._wake()

        self._io.submit(run)

    def _beginning(
        self, policy: str, id: str, call: Create | Load
    ) -> Callable[[Trainer], dict[str, Any]]:
        """Makes or reads the state that a policy begins with; returns what brings it there."""
        if isinstance(call, Create):
            state, result = host_state.fresh(self.live.specs, call.config, call.seed), {}
        else:
            assert self.store is not None
            state, result = self.store.load(call, self.snapshots.loads / id), {"path": call.path}

        def begin(live: Trainer) -> dict[str, Any]:
            replaces = isinstance(call, Load) and policy in live
            (live.replace if replaces else live.join)(policy, state)
            return result

        return begin

    # the finisher's thread: results and snapshots to the disk, in order

    def _later(self, call: Callable[..., None], *args: Any) -> None:
        def run() -> None:
            try:
                call(*args)
            except BaseException as failure:
                self.failed = failure

        self._finisher.submit(run)

    def _finish(self, request: TrainingRequest, future: "Future[Any]") -> None:
        if (error := future.exception()) is None:
            outcome = Outcome(codec.encode_result(future.result()))
        else:
            failed = isinstance(error, DatabaseFailed | StorageFailed)  # UserErrors
            is_mistake = isinstance(error, UserError) and not failed
            category = Category.USER if is_mistake else Category.SERVER
            outcome = Outcome(str(error).encode(), category)
        self.futures.finish(request, outcome)
        self._on_end(request.model, request.seq_id)
