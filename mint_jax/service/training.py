"""Training requests of many policies, run a slice at a time by the thread that owns the devices.

Each policy's requests run in the order in which they came: a forward and backward never overtakes
an update, nor an update a forward and backward. Requests of different policies that are ready
together go in one step, and so do several of one policy with no update between, whose gradients add
up. A request's future completes with its own last slice. Who was served least comes first
(``fairness.py``).
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
from mint_jax.train.live import Live, StateLost
from mint_jax.train.losses import LossCoefs


class Trained(NamedTuple):
    """What a forward and backward gives: of each datum the log-probabilities of its targets, and
    the loss, a sum.

    ``elementwise``: of cross-entropy each target's own part of the loss.
    """

    logprobs: list[np.ndarray]
    loss: float
    elementwise: list[np.ndarray] | None = None

    @classmethod
    def of(
        cls, data: Sequence[Datum], loss: LossCoefs, logprobs: list[np.ndarray], total: float
    ) -> "Trained":
        """What a request gives whose log-probabilities are there."""
        if KINDS[int(loss.kind)] != "cross_entropy":
            return cls(logprobs, total)
        # a weight of 0 times minus infinity, or of 3e38 times some
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
    what: TrainRequest | OptimizerConfig | Callable[[Live], Any]
    future: "Future[Any]" = dataclasses.field(default_factory=Future)


def _payer(operation: _Operation) -> Payer:
    return Payer(operation.tenant, operation.policy)


class Training:
    """The queues of all policies.

    Args:
        live: the policies; only ``turn`` touches them.
        counters: whose turn it is, shared with sampling.
        woken: called, from any thread, when there is something new to do.
        costs: told what policies took.
    """

    def __init__(
        self,
        live: Live,
        counters: Counters,
        woken: Callable[[], None] = lambda: None,
        costs: Costs | None = None,
    ):
        self.live, self.counters, self.costs = live, counters, costs
        self._woken = woken
        self._lock = threading.Lock()
        self._inbox: list[_Operation] = []
        # of policies with something to do; the thread's own
        self._queues: dict[str, collections.deque[_Operation]] = {}
        self._count = 0
        self._update_s = 0.0  # an update of one policy, as measured last
        self._closed: BaseException | None = None

    # -- from any thread

    def forward_backward(
        self,
        policy: str,
        data: Sequence[Datum],
        loss: LossCoefs,
        tenant: str = "",
        backward: bool = True,
    ) -> "Future[Trained]":
        """Adds the gradient of a loss over these data to the policy's; without ``backward`` it only
        tells what it would be.

        What cannot be trained on fails through the future, with a ``UserError``, before anything of
        it is computed.
        """
        refused: UserError | None = None
        try:
            blocks.check(data, self.live.base.cfg, self.live.shapes)
            blocks.check_loss(data, loss)
        except UserError as reason:
            refused = reason
        return self._ask(
            _Operation(policy, tenant, TrainRequest(policy, data, loss, backward)), refused
        )

    def optim(
        self, policy: str, numbers: OptimizerConfig, tenant: str = ""
    ) -> "Future[dict[str, float]]":
        """Updates a policy by the gradients that were added before, with these numbers."""
        return self._ask(_Operation(policy, tenant, numbers))

    def do(self, policy: str, call: Callable[[Live], Any], tenant: str = "") -> "Future[Any]":
        """Calls this in the policy's order, between steps: to let it join or leave, to save or to
        load it.
        """
        return self._ask(_Operation(policy, tenant, call))

    def _ask(self, operation: _Operation, refused: BaseException | None = None) -> "Future[Any]":
        # what was asked for is done: training is not cancelled
        operation.future.set_running_or_notify_cancel()
        with self._lock:
            refused = refused or self._closed
            if refused is None:
                self.counters.begin(operation.tenant)
                self._inbox.append(operation)
                self._count += 1
        if refused is not None:
            operation.future.set_exception(refused)
        else:
            self._woken()
        return operation.future

    @property
    def waiting(self) -> int:
        """Requests that have not ended."""
        return self._count

    def queued(self) -> dict[str, int]:
        """Requests that have not ended, of each policy that has some."""
        return {policy: len(queue) for policy, queue in list(self._queues.items())}

    # -- the thread that owns the devices

    def turn(self, bound_s: float | None = None) -> bool:
        """Computes one slice, of at most about ``bound_s`` seconds where any is that short; whether
        there was anything to do for which the programs are compiled.

        A failure that is nobody's mistake ends all requests, and is raised: what is on the devices
        may be lost.
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
        """Ends all requests with this reason, and refuses further ones."""
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
        place = {
            tenant: i for i, tenant in enumerate(self.counters.order(head.tenant for head in heads))
        }
        heads.sort(key=lambda head: place[head.tenant])
        first = heads[0]
        try:
            if isinstance(first.what, TrainRequest):
                self._step([head for head in heads if isinstance(head.what, TrainRequest)], bound_s)
            elif isinstance(first.what, OptimizerConfig):
                many = (
                    len(heads)
                    if bound_s is None or not self._update_s
                    else max(1, int(bound_s / self._update_s))
                )
                self._update(
                    [head for head in heads if isinstance(head.what, OptimizerConfig)][:many]
                )
            else:
                self._call(first, first.what)
        except (
            StateLost
        ) as lost:  # before anything was computed: the requests of other policies have another turn
            self._fail(self._queues[lost.policy][0], lost)
        if first.policy in self._queues:  # behind the other policies of its tenant
            self._queues[first.policy] = self._queues.pop(first.policy)
        return True

    def _can_start(self, operation: _Operation) -> bool:
        """Whether what it needs is compiled; calls need nothing, for before the first step every
        policy is on the host.
        """
        if isinstance(operation.what, TrainRequest):
            return self.live.can_move() and self.live.can_start(operation.what)
        return not isinstance(operation.what, OptimizerConfig) or self.live.can_move()

    def _step(self, heads: list[_Operation], bound_s: float | None) -> None:
        ready = [one for head in heads for one in self._until_update(head)]
        if not (ready := self._here(ready)):
            return
        step = self.live.step([one.what for one in ready], bound_s)  # type: ignore[misc]
        shares: collections.Counter[str] = collections.Counter()
        payers, tokens = {id(one.what): _payer(one) for one in ready}, collections.Counter[Payer]()
        for block in step.blocks:
            tokens[payers[id(block.work)]] += blocks.used([block])
        for payer, count in tokens.items():
            shares[payer.tenant] += count
        self.counters.charge(step.seconds, shares)
        self._charge(ready)
        if self.costs is not None:
            self.costs.charge("train", step.seconds, tokens)
        for one in ready:
            work: TrainRequest = one.what  # type: ignore[assignment]
            if not work.left:
                self._end(one, Trained.of(work.data, work.coefs, work.logprobs, work.loss))  # type: ignore[arg-type]

    def _here(self, ready: list[_Operation]) -> list[_Operation]:
        """Those whose policy is in training; of the others the future fails."""
        for one in ready:
            if one.policy not in self.live:
                self._fail(
                    one,
                    UserError(f"policy {one.policy!r} is not in training: create or load it first"),
                )
        return [one for one in ready if one.policy in self.live]

    def _until_update(self, head: _Operation) -> list[_Operation]:
        """The forward and backward passes of a policy that may run in any order: those before the
        next of its other requests.
        """
        found: list[_Operation] = []
        for one in self._queues[head.policy]:
            if not isinstance(one.what, TrainRequest):
                break
            found.append(one)
        return found

    def _update(self, heads: list[_Operation]) -> None:
        if not (heads := self._here(heads)):
            return
        began = time.perf_counter()
        told = self.live.optim({one.policy: one.what for one in heads})  # type: ignore[misc]
        seconds = time.perf_counter() - began
        self._update_s = seconds / len(heads)
        self.counters.charge(seconds, collections.Counter(one.tenant for one in heads))
        moved = self._charge(heads)
        if self.costs is not None:
            self.costs.charge("update", seconds - moved, dict.fromkeys(map(_payer, heads), 1))
        for one in heads:
            self._end(one, told[one.policy])

    def _charge(self, operations: Sequence[_Operation]) -> float:
        """Tells what it took to bring policies to their slots; how long that was of all
        together.
        """
        payers, moved = {one.policy: _payer(one) for one in operations}, self.live.brought()
        if self.costs is not None:
            for policy, seconds in moved.items():
                self.costs.charge("load", seconds, {payers[policy]: 1})
        return sum(moved.values())

    def _call(self, head: _Operation, call: Callable[[Live], Any]) -> None:
        """Mistakes, and disks that fail, are told to who asked; others go on."""
        began = time.perf_counter()
        result, refused = None, None
        try:
            result = call(self.live)
        except (UserError, OSError) as reason:
            refused = reason
        seconds = time.perf_counter() - began
        self.counters.charge(seconds, {head.tenant: 1.0})
        self.live.brought()  # is a part of these seconds
        if self.costs is not None:
            self.costs.charge("load", seconds, {_payer(head): 1})
        if refused is not None:
            self._fail(head, refused)
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
