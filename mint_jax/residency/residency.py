"""Residency: device slots, the host cache and storage. A request for a revision gets a lease on a
slot, at once or when the revision is loaded.

    request              acquire(digest) -> Future[AdapterLease]
    loader thread        fetch, verify, admit -> host cache; reserve a slot; transfer -> staged
    engine thread        commit_ready(), between two steps: staged -> slot; futures resolve
    request              lease.slot while it runs, lease.release() at its end
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, NamedTuple

import numpy as np

from mint_jax.digest import blake3_alone, blake3_of
from mint_jax.errors import UserError
from mint_jax.lora.tree import Slot, Stacks
from mint_jax.residency.admission import Admission, modules_of, verify
from mint_jax.residency.loads import (
    COLD,
    HOST_SHARE,
    PREFETCH,
    WARM,
    ColdLoad,
    ColdLoads,
    QueueFull,
)
from mint_jax.residency.metrics import Metrics
from mint_jax.residency.slots import DeviceSlots
from mint_jax.residency.tier import Tier

# digest -> the packed object, uint8, read-only; it must not change later
Fetch = Callable[[str], np.ndarray]
# packed object -> (tree of views into it ``[L, (E,) r, D]``, schema with .base and .config)
Unpack = Callable[[np.ndarray], tuple[Any, Any]]
# A mapping takes whole pages, and one of the 65,530 mappings that a process may have.
COPY_BELOW = 1 << 20


class Occupant(NamedTuple):
    """A slot, and the number of modules (projections, layers, experts) that its revision binds."""

    slot: Slot
    modules: int


class AdapterLease:
    """Keeps a revision in its slot until it is released, once or several times."""

    def __init__(self, digest: str, occupant: Occupant, on_release: Callable[[str], None]):
        self.digest, (self.slot, self.modules) = digest, occupant
        self._on_release: Callable[[str], None] | None = on_release

    def release(self) -> None:
        on_release, self._on_release = self._on_release, None
        if on_release is not None:
            on_release(self.digest)


class Residency:
    """The three tiers of one base on one engine: packed bytes on the ``host``, slots of each rank
    bucket on the ``device``. All methods except ``commit_ready`` and ``wait_for`` may be called
    from any thread.

    Args:
        host_bytes: budget of the host cache.
        workers, depth, niceness: see ``ColdLoads``.
        wrote: called with (digest, tenant, seconds) after each piece of an adapter is in its slot;
            the loop blocks until it is.
    """

    def __init__(
        self,
        fetch: Fetch,
        unpack: Unpack,
        admission: Admission,
        slots: DeviceSlots,
        host_bytes: int,
        *,
        workers: int = 4,
        depth: int = 256,
        clock: Callable[[], float] = time.monotonic,
        metrics: Metrics | None = None,
        niceness: int = 10,
        wrote: Callable[[str, str, float], None] | None = None,
    ):
        self._fetch, self._unpack, self._admission, self.slots = fetch, unpack, admission, slots
        self._clock, self._niceness, self._wrote = clock, niceness, wrote
        self._is_waiting = False  # the engine's thread waits for loads, which may use all cores
        self.metrics = metrics or Metrics()

        def tier(capacity: int, name: str) -> Tier:
            evicted = self.metrics.evictions.labels(name)
            return Tier(capacity, clock=clock, on_evict=lambda digest: evicted.inc())

        self.host = tier(host_bytes, "host")
        self.device = {b: tier(stack.slots, "device") for b, stack in slots.stacks.items()}
        # Guards slots, the lists below and the loads' futures; acquired before other locks.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)  # a load became ready or ended
        self._ready: deque[ColdLoad] = deque()  # staged, waiting for commit_ready
        # (bucket, load) in order. A load that waits for a slot occupies no worker, device memory
        # or host cache.
        self._parked: list[tuple[int, ColdLoad]] = []
        self.loads = ColdLoads(self._stage, workers, depth, clock, niceness)
        self.metrics.bytes.labels("host").set_function(lambda: self.host.size)
        self.metrics.bytes.labels("device").set_function(self._device_bytes)
        self.metrics.unfinished.set_function(lambda: len(self.loads))

    @property
    def stacks(self) -> Stacks:
        """Stacks to sample from: always the same dict, whose arrays ``commit_ready`` replaces."""
        return self.slots.stacks

    def acquire(self, digest: str, tenant: str = "default") -> "Future[AdapterLease]":
        """Requests a lease; that of a cold revision resolves in ``commit_ready``. Raises
        ``QueueFull``.
        """
        future: Future[AdapterLease] = Future()
        with self._lock:
            if (lease := self._lease(digest)) is not None:
                self.metrics.hits.labels("device").inc()
                future.set_result(lease)
                return future
            self.metrics.misses.labels("device").inc()
            load = self._submit(digest, tenant, WARM if digest in self.host else COLD)
            if load.waiting:
                self.metrics.joined.inc()
            load.waiting.append(future)
        future.add_done_callback(lambda future: self._withdraw(load, future))
        return future

    def wait_for(self, digests: Sequence[str], tenant: str = "default") -> list[AdapterLease]:
        """Returns leases on several revisions and commits meanwhile. Raises the first error, and
        releases all leases then.
        """
        futures: list[Future[AdapterLease]] = []
        try:
            futures.extend(self.acquire(digest, tenant) for digest in digests)
            while pending := [future for future in futures if not future.done()]:
                if not self.commit_ready():
                    self.wait_ready(pending)
            return [future.result() for future in futures]
        except BaseException:
            for future in futures:
                if not future.cancel() and future.exception() is None:
                    future.result().release()
            raise

    def prefetch(self, digest: str, tenant: str = "default") -> bool:
        """Loads a revision, into a slot if one is free; returns False if the queue is full."""
        with self._lock:
            if self._tier_of(digest) is None:
                try:
                    self._submit(digest, tenant, PREFETCH)
                except QueueFull:
                    return False
        return True

    def eta_s(self, digest: str) -> float:
        """Returns the seconds until a revision could be in a slot, estimated from recent loads."""
        if any(digest in tier for tier in self.device.values()):
            return 0.0
        share = HOST_SHARE if digest in self.host else 1.0
        return (1 + len(self.loads) / self.loads.workers) * self.loads.expected_s * share

    def offer(self, digest: str, buffer: np.ndarray, tenant: str = "default") -> bool:
        """Prefetches a revision whose packed bytes are in memory and must not change; returns True
        if the host cache has them. An adapter that does not fit is reported when it is requested.
        """
        if self.host.lease(digest) is None:
            try:
                if not self._admitted(digest, buffer, self._clock())[-1]:
                    return False
            except UserError:
                return False
        self.host.release(digest)
        return self.prefetch(digest, tenant)

    def state(self) -> dict[str, Any]:
        """Returns counts, bytes and queue lengths."""
        with self._lock:
            host, loads = self.host, {"unfinished": len(self.loads), "ready": len(self._ready)}
            entries = {"entries": len(host.copies), "budget_bytes": host.capacity}
            return {
                "host": {"bytes": host.size} | entries | host.state(),
                "slots": {
                    bucket: {"slots": one.capacity, "free": one.capacity - one.size} | one.state()
                    for bucket, one in self.device.items()
                },
                "device_bytes": self._device_bytes(),
                "loads": loads | {"waiting_for_slot": len(self._parked)},
                "resident": sorted(d for tier in self.device.values() for d in tier.resident()),
            }

    def close(self) -> None:
        """Stops the workers; unresolved requests get ``CancelledError``."""
        for load in self.loads.close():
            self._end(load, CancelledError())

    # -- the engine's thread

    def commit_ready(self, budget_bytes: int | None = None) -> int:
        """Writes staged adapters into their slots, at least one piece and then at most
        ``budget_bytes``, and resolves the requests. Returns the number of revisions that became
        resident.
        """
        committed = spent = 0
        while self._ready:
            load = self._ready[0]
            staged = load.staged
            piece = staged.nbytes // staged.pieces
            if budget_bytes is not None and spent and spent + piece > budget_bytes:
                break
            try:
                began = time.perf_counter()
                whole = self.slots.write(staged)
                if self._wrote is not None:
                    self.slots.settle(staged.slot.bucket)
                    self._wrote(load.digest, load.tenant, time.perf_counter() - began)
            except Exception as error:
                self._end(load, error)
                raise
            if whole:
                self._commit(load)
                committed += 1
            spent += piece
        return committed

    def wait_ready(self, pending: Sequence[Future], timeout: float = 1.0) -> bool:
        """Waits until one of these requests ends or ``commit_ready`` has something to do (True)."""
        self._is_waiting = True
        try:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._ready or any(future.done() for future in pending), timeout
                )
                return bool(self._ready)
        finally:
            self._is_waiting = False

    def _commit(self, load: ColdLoad) -> None:
        with self._lock:
            self._ready.popleft()
            tier = self.device[load.slot.bucket]
            load.staged = None
            tier.confirm(load.digest, load.seconds)
            self.loads.finish(load)
            granted = [
                (future, self._lease(load.digest))
                for future in load.waiting
                if future.set_running_or_notify_cancel()
            ]
            load.waiting = []
            tier.release(load.digest)
            self._pump()
            self._changed.notify_all()
        for future, lease in granted:  # callbacks run here, without the lock
            future.set_result(lease)

    # -- leases

    def _tier_of(self, digest: str) -> Tier | None:
        return next((tier for tier in self.device.values() if digest in tier), None)

    def _lease(self, digest: str) -> AdapterLease | None:
        if (tier := self._tier_of(digest)) is None or (copy := tier.lease(digest)) is None:
            return None
        return AdapterLease(digest, copy.value, self._release)

    def _release(self, digest: str) -> None:
        with self._lock:
            tier = self._tier_of(digest)
            assert tier is not None, "a leased revision is resident"
            if tier.release(digest):
                self._pump()

    def _device_bytes(self) -> int:
        return sum(tier.size * self.slots.slot_bytes(b) for b, tier in self.device.items())

    # -- loads

    def _submit(self, digest: str, tenant: str, priority: int) -> ColdLoad:
        try:
            load, dropped = self.loads.submit(digest, tenant, priority)
        except QueueFull as full:
            reason = "prefetch_dropped" if priority == PREFETCH else full.reason
            self.metrics.refusals.labels(reason).inc()
            raise
        if dropped is not None:
            self.metrics.refusals.labels("prefetch_dropped").inc()
        return load

    def _stage(self, load: ColdLoad) -> None:
        """Runs a worker's part of a load; errors go to the waiting requests."""
        try:
            self._bring(load)
        except Exception as error:
            self.metrics.refusals.labels("failed").inc()
            self._end(load, error)

    def _bring(self, load: ColdLoad) -> None:
        began = self._clock()
        if load.slot is None:
            self.metrics.queue_wait.observe(max(0.0, began - load.submitted_at))
        copy, kept = self.host.lease(load.digest), True
        load.cold = copy is None
        (self.metrics.misses if load.cold else self.metrics.hits).labels("host").inc()
        if copy is None:
            adapter, schema, kept = self._admitted(load.digest, self._fetch(load.digest), began)
        try:  # the host's bytes stay until they are transferred
            if copy is not None:
                adapter, schema = self._unpack(copy.value)
            load.modules = modules_of(adapter)
            bucket = self._admission.bucket(schema.config.rank)
            assert bucket is not None, "it was admitted"
            with self._lock:
                is_wanted = bool(load.waiting)
                if load.slot is None and not self._reserve(load, bucket, evict=is_wanted):
                    if is_wanted:
                        self._parked.append((bucket, load))
                    else:
                        self.loads.finish(load)
                        self._changed.notify_all()
                    return
            assert load.slot is not None, "it was reserved"
            staged = self.slots.stage(load.slot, adapter, schema.config)
        finally:
            if kept:
                self.host.release(load.digest)
        load.seconds = max(0.0, self._clock() - began)
        self.metrics.load_time.labels("storage" if load.cold else "host").observe(load.seconds)
        with self._lock:
            load.staged = staged
            self._ready.append(load)
            self._changed.notify_all()

    def _admitted(self, digest: str, fetched: np.ndarray, began: float) -> tuple[Any, Any, bool]:
        """Verifies and admits bytes from storage. Returns views, schema, and True if the bytes are
        now in the host cache, leased.
        """
        buffer, copy = fetched, self.host.reserve(digest, fetched.nbytes)
        if copy is None:
            self.metrics.uncached.inc()
        else:
            copy.value = buffer = _compact(fetched)
        # All cores hash while the engine waits or if workers have no niceness.
        digest_of = blake3_alone if self._niceness and not self._is_waiting else blake3_of
        try:
            verify(digest, buffer, digest_of)
            adapter, schema = self._unpack(buffer)
            self._admission.check(digest, adapter, schema)
        except BaseException:
            if copy is not None:
                self.host.discard(digest)
            raise
        if copy is not None:
            self.host.confirm(digest, self._clock() - began)
        return adapter, schema, copy is not None

    def _reserve(self, load: ColdLoad, bucket: int, evict: bool = True) -> bool:
        """Reserves a slot for a load; returns False if none is free or may be evicted."""
        tier = self.device[bucket]
        if (copy := tier.reserve(load.digest, 1, evict)) is None:
            return False
        taken = {other.value.slot.index for other in tier.copies.values() if other is not copy}
        load.slot = Slot(bucket, next(i for i in range(tier.capacity) if i not in taken))
        copy.value = Occupant(load.slot, load.modules)
        return True

    def _pump(self) -> None:
        """Assigns slots to the loads that wait for one."""
        parked = []
        for bucket, load in self._parked:
            if self._reserve(load, bucket):
                self.loads.resume(load)
            else:
                parked.append((bucket, load))
        self._parked = parked

    def _unpark(self, load: ColdLoad) -> bool:
        before = len(self._parked)
        self._parked = [(bucket, other) for bucket, other in self._parked if other is not load]
        return len(self._parked) < before

    def _end(self, load: ColdLoad, error: BaseException) -> None:
        """Ends a failed load: releases its slot and passes the error to the waiting requests."""
        with self._lock:
            if load.slot is not None:
                self.device[load.slot.bucket].discard(load.digest)
                load.slot = load.staged = None
            if load in self._ready:
                self._ready.remove(load)
            self._unpark(load)
            self.loads.finish(load)
            waiting, load.waiting = load.waiting, []
            self._pump()
        for future in waiting:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
        with self._changed:
            self._changed.notify_all()

    def _withdraw(self, load: ColdLoad, future: "Future[AdapterLease]") -> None:
        """Removes a cancelled request; a load without requests is dropped if it has not started."""
        if not future.cancelled():
            return
        with self._lock:
            load.waiting = [other for other in load.waiting if other is not future]
            if load.waiting:
                return
            if self._unpark(load):
                self.loads.finish(load)
            else:
                self.loads.withdraw(load)


def _compact(buffer: np.ndarray) -> np.ndarray:
    """Returns the buffer, or a copy of a slice of a large read or of a small mapping."""
    owner = buffer
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    if owner.base is None:
        wasteful = owner.nbytes > 1.1 * buffer.nbytes
    elif isinstance(owner.base, bytes | bytearray | memoryview):
        wasteful = memoryview(owner.base).nbytes > 1.1 * buffer.nbytes
    else:  # a mapping: unread pages cost nothing
        wasteful = buffer.nbytes < COPY_BELOW
    if wasteful:
        buffer = buffer.copy()
        buffer.flags.writeable = False
    return buffer
