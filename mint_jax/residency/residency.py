"""Residency: device slots, the host cache and storage. A request for a revision gets a lease on a
slot, at once or when the revision is loaded.

    request              acquire(digest) -> Future[AdapterLease]
    loader thread        fetch, verify, admit -> host cache; reserve a slot; transfer -> staged
    engine thread        commit_ready(), between two steps: staged -> slot; futures resolve
    request              lease.slot while it runs, lease.release() at its end

Storage is a function, ``fetch(digest)``, and so is the packed format, ``unpack(buffer)``. A load
that finds every slot of its bucket leased waits for one without occupying a worker, device memory
or the host cache.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any

import numpy as np

from mint_jax.digest import blake3_alone, blake3_of
from mint_jax.lora.tree import Slot, Stacks
from mint_jax.residency.admission import Admission, modules_of
from mint_jax.residency.host_cache import HostCache
from mint_jax.residency.host_tier import Fetch, HostTier, Unpack
from mint_jax.residency.lease import AdapterLease
from mint_jax.residency.loads import COLD, PREFETCH, WARM, ColdLoad, ColdLoads, QueueFull
from mint_jax.residency.metrics import Metrics
from mint_jax.residency.slot_table import SlotTable
from mint_jax.residency.slots import DeviceSlots


class Residency:
    """The three tiers of one base on one engine. All methods except ``commit_ready`` and
    ``wait_for`` may be called from any thread.

    Args:
        fetch, unpack: storage and format.
        admission: checks of adapters from storage.
        slots: the device's stacks.
        host_bytes: budget of the host cache.
        workers, depth, niceness: see ``ColdLoads``.
        half_life_s: seconds after which a use counts half.
        metrics: metrics to update.
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
        half_life_s: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
        metrics: Metrics | None = None,
        niceness: int = 10,
        wrote: Callable[[str, str, float], None] | None = None,
    ):
        self._wrote = wrote
        self.metrics = metrics or Metrics()
        self._clock = clock
        evicted = self.metrics.evictions
        self.host = HostCache(
            host_bytes, half_life_s, clock, lambda digest: evicted.labels("host").inc()
        )
        self._niceness, self._idle = niceness, 0  # _idle counts engines that wait for loads
        self._admission = admission
        self._tier = HostTier(
            self.host, fetch, unpack, admission, self.metrics, self._blake3, clock
        )
        self.slots = slots
        capacities = {bucket: stack.slots for bucket, stack in slots.stacks.items()}
        sizes = {bucket: slots.slot_bytes(bucket) for bucket in capacities}
        self.table = SlotTable(
            capacities, sizes, half_life_s, clock, lambda digest: evicted.labels("device").inc()
        )
        # Guards the table, the lists below and the loads' futures; acquired before other locks.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)  # a load became ready or ended
        self._ready: deque[ColdLoad] = deque()  # staged, waiting for commit_ready
        self._parked: list[tuple[int, ColdLoad]] = []  # (bucket, load) in order, waiting for a slot
        self.loads = ColdLoads(self._stage, workers, depth, clock, niceness)
        self.metrics.bytes.labels("host").set_function(lambda: self.host.nbytes)
        self.metrics.bytes.labels("device").set_function(self._device_bytes)
        self.metrics.unfinished.set_function(lambda: len(self.loads))

    @property
    def stacks(self) -> Stacks:
        """Stacks to sample from: always the same dict, whose arrays ``commit_ready`` replaces."""
        return self.slots.stacks

    def acquire(self, digest: str, tenant: str = "default") -> "Future[AdapterLease]":
        """Returns a future lease on a revision's slot: resolved at once if it is resident, else
        when its load is committed.

        Cancelling the future withdraws the request. The future raises what ``fetch``, verification
        or admission raise; a failed load leaves nothing behind.

        Raises:
            QueueFull: retry in ``retry_after_s``.
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

    def prefetch(self, digest: str, tenant: str = "default") -> bool:
        """Loads a revision into host memory, and into a slot if one is free. Returns False if the
        queue is full.
        """
        with self._lock:
            if self.table.find(digest) is None:
                try:
                    self._submit(digest, tenant, PREFETCH)
                except QueueFull:
                    return False
        return True

    def offer(self, digest: str, buffer: np.ndarray, tenant: str = "default") -> bool:
        """Runs ``prefetch`` with packed bytes that are in memory already and must not change;
        nothing is fetched. Returns True if the host has them.
        """
        return self._tier.offer(digest, buffer) and self.prefetch(digest, tenant)

    def drop(self, digest: str) -> bool:
        """Removes a revision from slot and host memory; a leased one when its requests end. Returns
        True if it is removed now.
        """
        with self._lock:
            dropped = self.host.drop(digest) & self.table.drop(digest)
            self._pump()
            return dropped

    def commit_ready(self, budget_bytes: int | None = None) -> int:
        """Writes staged adapters into their slots and resolves the requests. Called in the engine's
        thread between two steps.

        Args:
            budget_bytes: maximum bytes to write, but at least one piece. The rest, also of a large
                adapter, waits for the next call.

        Returns:
            Number of revisions that became resident.
        """
        committed = spent = 0
        while (load := self._first_ready()) is not None:
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

    def _lease(self, digest: str) -> AdapterLease | None:
        if (slot := self.table.lease(digest)) is None:
            return None
        return AdapterLease(digest, slot, self.table.modules(digest), self._release)

    def _blake3(self, buffer: np.ndarray) -> str:
        """Hashes on all cores while the engine waits or if workers have no niceness, else in the
        worker's thread at its priority.
        """
        return (blake3_alone if self._niceness and not self._idle else blake3_of)(buffer)

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """Marks the engine's thread as waiting for loads, so that loads may use all cores."""
        with self._lock:
            self._idle += 1
        try:
            yield
        finally:
            with self._lock:
                self._idle -= 1

    def _device_bytes(self) -> int:
        with self._lock:
            return self.table.nbytes

    def _first_ready(self) -> ColdLoad | None:
        with self._lock:
            return self._ready[0] if self._ready else None

    def _commit(self, load: ColdLoad) -> None:
        with self._lock:
            self._ready.popleft()
            load.staged = None
            self.table.fill(load.digest, load.seconds, load.modules)
            self.loads.finish(load)
            granted = []
            for future in load.waiting:
                if future.set_running_or_notify_cancel():
                    granted.append((future, self._lease(load.digest)))
            load.waiting = []
            self._pump()
            self._changed.notify_all()
        for future, lease in granted:  # callbacks run here, without the lock
            future.set_result(lease)

    def wait_for(self, digests: Sequence[str], tenant: str = "default") -> list[AdapterLease]:
        """Returns leases on several revisions and commits meanwhile, for jobs with nothing else to
        run on the device.

        Raises:
            QueueFull, UserError: of the first that fails; all leases are released then.
        """
        futures: list[Future[AdapterLease]] = []
        try:
            with self._waiting():
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

    def wait_ready(self, pending: Sequence[Future], timeout: float = 1.0) -> bool:
        """Waits until something can be committed or one of these requests ends, at most
        ``timeout`` seconds.

        Returns:
            True if ``commit_ready`` has something to do.
        """
        with self._waiting(), self._changed:
            self._changed.wait_for(
                lambda: self._ready or any(future.done() for future in pending), timeout
            )
            return bool(self._ready)

    def state(self) -> dict[str, Any]:
        """Returns counts, bytes and queue lengths."""
        with self._lock:
            return {
                "host": self.host.state(),
                "slots": self.table.state(),
                "device_bytes": self.table.nbytes,
                "loads": {
                    "unfinished": len(self.loads),
                    "ready": len(self._ready),
                    "waiting_for_slot": len(self._parked),
                },
                "resident": sorted(self.table.resident()),
            }

    def close(self) -> None:
        """Stops the workers; unresolved requests get ``CancelledError``."""
        for load in self.loads.close():
            self._end(load, CancelledError())

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
        with self._tier.lend(load.digest) as (adapter, schema, cold):
            load.cold, load.modules = cold, modules_of(adapter)
            bucket = self._admission.bucket(schema.config.rank)
            assert bucket is not None, "it was admitted"
            if (slot := self._slot_for(load, bucket)) is None:
                return
            staged = self.slots.stage(slot, adapter, schema.config)
        load.seconds = max(0.0, self._clock() - began)
        self.metrics.load_time.labels("storage" if cold else "host").observe(load.seconds)
        with self._lock:
            load.staged = staged
            self._ready.append(load)
            self._changed.notify_all()

    def _slot_for(self, load: ColdLoad, bucket: int) -> Slot | None:
        """Returns the slot for a load; None if it waits for one, or ends because no request waits
        for it.
        """
        with self._lock:
            if load.slot is None:
                load.slot = self.table.reserve(bucket, load.digest, evict=bool(load.waiting))
                if load.slot is None and load.waiting:
                    self._parked.append((bucket, load))
                elif load.slot is None:
                    self.loads.finish(load)
                    self._changed.notify_all()
            return load.slot

    def _pump(self) -> None:
        """Assigns slots to the loads that wait for one."""
        waiting, self._parked = self._parked, []
        for bucket, load in waiting:
            load.slot = self.table.reserve(bucket, load.digest)
            if load.slot is None:
                self._parked.append((bucket, load))
            else:
                self.loads.resume(load)

    def _end(self, load: ColdLoad, error: BaseException) -> None:
        """Ends a failed load: releases its slot and passes the error to the waiting requests."""
        with self._lock:
            if load.slot is not None:
                self.table.abandon(load.digest)
                load.slot = load.staged = None
            if load in self._ready:
                self._ready.remove(load)
            self._parked = [(bucket, other) for bucket, other in self._parked if other is not load]
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
            if future in load.waiting:
                load.waiting.remove(future)
            if load.waiting:
                return
            parked = [(bucket, other) for bucket, other in self._parked if other is not load]
            if len(parked) < len(self._parked):
                self._parked = parked
                self.loads.finish(load)
            else:
                self.loads.withdraw(load)

    def _release(self, digest: str) -> None:
        with self._lock:
            if self.table.release(digest):
                self._pump()
