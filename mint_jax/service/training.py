"""Training requests of many policies, run slice by slice in the thread that owns the devices.

Each policy's requests run in order: neither a forward and backward nor an update overtakes the
other. Requests of different policies that are ready share a step. So do several of one policy
without an update between them; their gradients add up. A request's future completes with its last
slice. The tenant with the least service goes first (``fairness.py``).
"""

import collections
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np

from mint_jax.errors import UserError
from mint_jax.service.costs import Costs, Payer
from mint_jax.service.fairness import Counters
from mint_jax.train import blocks
from mint_jax.train.blocks import Datum, TrainRequest
from mint_jax.train.config import KINDS, OptimizerConfig
from mint_jax.train.losses import LossCoefs
from mint_jax.train.slots import StateLost
from mint_jax.train.trainer import Trainer


class Trained(NamedTuple):
    """Result of a forward and backward: log-probabilities of each datum's targets, and the summed
    loss.

    ``elementwise``: for cross-entropy, the loss of each target.
    """

    logprobs: list[np.ndarray]
    loss: float
    elementwise: list[np.ndarray] | None = None

    @classmethod
    def of(
        cls, data: Sequence[Datum], loss: LossCoefs, logprobs: list[np.ndarray], total: float
    ) -> "Trained":
        """Returns the result of a request from its log-probabilities."""
        if KINDS[int(loss.kind)] != "cross_entropy":
            return cls(logprobs, total)
        # a weight of 0 times minus infinity, or of 3e38 times a number
        with np.errstate(invalid="ignore", over="ignore"):
            elementwise = [
                np.where(d.weights == 0, 0, -d.weights * logp).astype(np.float32)
                for d, logp in zip(data, logprobs)
            ]
        return cls(logprobs, total, elementwise)


@dataclasses.dataclass(eq=False)
class _Operation:
    policy: str
    tenant: str
    what: TrainRequest | OptimizerConfig | Callable[[Trainer], Any]
    future: "Future[Any]" = dataclasses.field(default_factory=Future)

    @property
    def payer(self) -> Payer:
        return Payer(self.tenant, self.policy)


class Training:
    """The queues of all policies.

    Args:
        live: the policies; only ``turn`` touches them.
        counters: service of each tenant, shared with sampling.
        woken: called, from any thread, when there is something new to do.
        costs: charged with what policies take.
    """

    def __init__(
        self,
        live: Trainer,
        counters: Counters,
        woken: Callable[[], None] = lambda: None,
        costs: Costs | None = None,
    ):
        self.live, self.counters, self.costs = live, counters, costs
        self._woken = woken
        self._lock = threading.Lock()
        self._inbox: list[_Operation] = []
        # of policies with something to do; only the devices' thread touches them
        self._queues: dict[str, collections.deque[_Operation]] = {}
        self._count = 0
        self._update_s = 0.0  # seconds of one policy's update, last measured
        self._closed: BaseException | None = None

    # any thread

    def forward_backward(
        self,
        policy: str,
        data: Sequence[Datum],
        loss: LossCoefs,
        tenant: str = "",
        backward: bool = True,
    ) -> "Future[Trained]":
        """Adds the gradient of a loss over these data to the policy's; without ``backward`` only
        computes the loss.

        Invalid data fail through the future with a ``UserError`` before anything is computed.
        """
        error: UserError | None = None
        try:
            blocks.check(data, self.live.base.cfg, self.live.declared)
            blocks.check_loss(data, loss)
        except UserError as reason:
            error = reason
        return self._enqueue(
            _Operation(policy, tenant, TrainRequest(policy, data, loss, backward)), error
        )

    def optim(
        self, policy: str, numbers: OptimizerConfig, tenant: str = ""
    ) -> "Future[dict[str, float]]":
        """Updates a policy with its accumulated gradients and these optimizer settings."""
        return self._enqueue(_Operation(policy, tenant, numbers))

    def do(self, policy: str, call: Callable[[Trainer], Any], tenant: str = "") -> "Future[Any]":
        """Runs a function in the policy's order, between steps; it may add, remove, read or replace
        the policy.
        """
        return self._enqueue(_Operation(policy, tenant, call))

    def _enqueue(self, operation: _Operation, error: BaseException | None = None) -> "Future[Any]":
        operation.future.set_running_or_notify_cancel()  # accepted training is not cancelled
        with self._lock:
            error = error or self._closed
            if error is None:
                self.counters.begin(operation.tenant)
                self._inbox.append(operation)
                self._count += 1
        if error is not None:
            operation.future.set_exception(error)
        else:
            self._woken()
        return operation.future

    @property
    def waiting(self) -> int:
        """Number of unfinished requests."""
        return self._count

    def queued(self) -> dict[str, int]:
        """Returns the number of unfinished requests of each policy that has some."""
        return {policy: len(queue) for policy, queue in list(self._queues.items())}

    # the thread that owns the devices

    def turn(self, bound_s: float | None = None) -> bool:
        """Computes one slice, of at most about ``bound_s`` seconds if a step is that short; returns
        whether there was anything to do whose programs are compiled.

        A failure that no request caused ends all requests and is raised, because what is on the
        devices may be lost.
        """
        with self._lock:
            new, self._inbox = self._inbox, []
            for operation in new:
                self._queues.setdefault(operation.policy, collections.deque()).append(operation)
        if not self._queues:
            return False
        try:
            return self._slice(bound_s)
        except BaseException as failure:
            self.close(failure)
            raise

    def close(self, reason: BaseException) -> None:
        """Fails all requests, and later ones, with this exception."""
        with self._lock:
            self._closed = reason
            left = [*self._inbox, *(one for queue in self._queues.values() for one in queue)]
            self._inbox, self._queues, self._count = [], {}, 0
        for operation in left:
            self.counters.end(operation.tenant)
            operation.future.set_exception(reason)

    def _slice(self, bound_s: float | None) -> bool:
        heads = [queue[0] for queue in self._queues.values() if self._can_start(queue[0])]
        if not heads:
            return False
        order = self.counters.order(head.tenant for head in heads)
        place = {tenant: i for i, tenant in enumerate(order)}
        heads.sort(key=lambda head: place[head.tenant])
        first = heads[0]
        try:
            if isinstance(first.what, TrainRequest):
                self._step([head for head in heads if isinstance(head.what, TrainRequest)], bound_s)
            elif isinstance(first.what, OptimizerConfig):
                most = len(heads)
                if bound_s is not None and self._update_s:
                    most = max(1, int(bound_s / self._update_s))
                updates = [head for head in heads if isinstance(head.what, OptimizerConfig)]
                self._update(updates[:most])
            else:
                self._call(first, first.what)
        except StateLost as lost:  # nothing was computed: the other policies have another turn
            self._fail(self._queues[lost.policy][0], lost)
        if first.policy in self._queues:  # behind the other policies of its tenant
            self._queues[first.policy] = self._queues.pop(first.policy)
        return True

    def _can_start(self, operation: _Operation) -> bool:
        """Returns whether the programs of an operation are compiled. Functions need none: before
        the first step every policy is on the host.
        """
        if isinstance(operation.what, TrainRequest):
            return self.live.can_move() and self.live.can_start(operation.what)
        return not isinstance(operation.what, OptimizerConfig) or self.live.can_move()

    def _step(self, heads: list[_Operation], bound_s: float | None) -> None:
        ready = self._resident([one for head in heads for one in self._until_update(head)])
        if not ready:
            return
        step = self.live.step([one.what for one in ready], bound_s)  # type: ignore[misc]
        payers = {id(one.what): one.payer for one in ready}
        tokens = collections.Counter[Payer]()
        for block in step.blocks:
            tokens[payers[id(block.work)]] += blocks.used([block])
        shares = collections.Counter[str]()
        for payer, count in tokens.items():
            shares[payer.tenant] += count
        self.counters.charge(step.seconds, shares)
        self._charge_moves(ready)
        if self.costs is not None:
            self.costs.charge("train", step.seconds, tokens)
        for one in ready:
            work: TrainRequest = one.what  # type: ignore[assignment]
            if not work.left:
                self._end(one, Trained.of(work.data, work.coefs, work.logprobs, work.loss))  # type: ignore[arg-type]

    def _resident(self, ready: list[_Operation]) -> list[_Operation]:
        """Returns the operations whose policy is in training; fails the others."""
        for one in ready:
            if one.policy not in self.live:
                message = f"policy {one.policy!r} is not in training: create or load it first"
                self._fail(one, UserError(message))
        return [one for one in ready if one.policy in self.live]

    def _until_update(self, head: _Operation) -> list[_Operation]:
        """Returns a policy's forward and backward passes before its next other operation; they may
        run in any order.
        """
        found: list[_Operation] = []
        for one in self._queues[head.policy]:
            if not isinstance(one.what, TrainRequest):
                break
            found.append(one)
        return found

    def _update(self, heads: list[_Operation]) -> None:
        if not (heads := self._resident(heads)):
            return
        began = time.perf_counter()
        results = self.live.optim({one.policy: one.what for one in heads})  # type: ignore[misc]
        seconds = time.perf_counter() - began
        self._update_s = seconds / len(heads)
        self.counters.charge(seconds, collections.Counter(one.tenant for one in heads))
        moved = self._charge_moves(heads)
        if self.costs is not None:
            payers = dict.fromkeys((one.payer for one in heads), 1)
            self.costs.charge("update", seconds - moved, payers)
        for one in heads:
            self._end(one, results[one.policy])

    def _charge_moves(self, operations: Sequence[_Operation]) -> float:
        """Charges the moves of policies to their slots; returns their seconds."""
        payers, moved = {one.policy: one.payer for one in operations}, self.live.brought()
        if self.costs is not None:
            for policy, seconds in moved.items():
                self.costs.charge("load", seconds, {payers[policy]: 1})
        return sum(moved.values())

    def _call(self, head: _Operation, call: Callable[[Trainer], Any]) -> None:
        """Runs a function. Mistakes of its caller and failing disks fail its own future."""
        began = time.perf_counter()
        result, error = None, None
        try:
            result = call(self.live)
        except (UserError, OSError) as reason:
            error = reason
        seconds = time.perf_counter() - began
        self.counters.charge(seconds, {head.tenant: 1.0})
        self.live.brought()  # included in these seconds
        if self.costs is not None:
            self.costs.charge("load", seconds, {head.payer: 1})
        if error is not None:
            self._fail(head, error)
        else:
            self._end(head, result)

    def _fail(self, operation: _Operation, reason: Exception) -> None:
        self._take(operation)
        operation.future.set_exception(reason)

    def _end(self, operation: _Operation, result: Any) -> None:
        self._take(operation)
        operation.future.set_result(result)

    def _take(self, operation: _Operation) -> None:
        queue = self._queues[operation.policy]
        queue.remove(operation)
        if not queue:
            del self._queues[operation.policy]
        with self._lock:
            self._count -= 1
        self.counters.end(operation.tenant)
