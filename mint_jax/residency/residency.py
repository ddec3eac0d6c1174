"""Residency: device slot <- host cache <- storage. Asked for a revision, it gives a lease on a
slot, now or when loaded.

    request              acquire(digest) -> Future[Lease]
    loader's thread      fetch, verify, admit -> host cache; reserve a slot; transfer -> staged
    engine's thread      commit_ready(), between two steps: staged -> slot; futures resolve
    request              lease.slot while it runs, lease.release() at its end

Storage is a function, ``fetch(digest)``, and so is the packed format, ``unpack(buffer)``. A load
that finds every slot of its bucket leased waits for one without holding a worker, device memory or
a place in the host cache.
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
from mint_jax.errors import UserError
from mint_jax.lora.tree import Slot, Stacks
from mint_jax.residency import others
from mint_jax.residency.admission import Admission, modules_of
from mint_jax.residency.host_cache import HostCache
from mint_jax.residency.host_tier import Fetch, HostTier, Unpack
from mint_jax.residency.lease import Lease
from mint_jax.residency.loads import COLD, PREFETCH, WARM, ColdLoads, Load, QueueFull
from mint_jax.residency.metrics import Metrics
from mint_jax.residency.quotas import Quotas
from mint_jax.residency.slot_table import SlotTable
from mint_jax.residency.slots import DeviceSlots


class Residency:
    """The three tiers of one base on one engine. All but ``commit_ready`` and ``wait_for`` may be
    called from any thread.

    Args:
        fetch, unpack: storage and format.
        admission: what is checked of an adapter that comes from storage.
        slots: the device's stacks.
        host_bytes: budget of the host cache.
        workers, depth, size_of, niceness: see ``ColdLoads``.
        half_life_s: after so long a use counts half.
        metrics: where to count.
        digest_of: the revision digest of packed bytes; by default BLAKE3, on all cores while the
            engine waits for loads or where the workers have no niceness, else in the worker's
            thread, whose priority it keeps.
        wrote: called with (digest, tenant, seconds) for each piece of an adapter once it is in its
            slot; the loop waits for that.
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
        quotas: Quotas | None = None,
        half_life_s: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
        size_of: Callable[[str], int | None] | None = None,
        metrics: Metrics | None = None,
        digest_of: Callable[[np.ndarray], str] | None = None,
        niceness: int = 10,
        wrote: Callable[[str, str, float], None] | None = None,
    ):
        self._wrote = wrote
        self.metrics = metrics or Metrics()
        self._clock = clock
        evicted = self.metrics.evictions
        self.host = HostCache(
            host_bytes, quotas, half_life_s, clock, lambda digest: evicted.labels("host").inc()
        )
        self._niceness, self._idle = niceness, 0  # the second counts engines that wait
        self._admission = admission
        digest_of = digest_of or self._blake3
        self._tier = HostTier(self.host, fetch, unpack, admission, self.metrics, digest_of, clock)
        self.slots = slots
        capacities = {bucket: stack.slots for bucket, stack in slots.stacks.items()}
        sizes = {bucket: slots.slot_bytes(bucket) for bucket in capacities}
        self.table = SlotTable(
            capacities,
            sizes,
            quotas,
            half_life_s,
            clock,
            lambda digest: evicted.labels("device").inc(),
        )
        # of the table, the lists below and the loads' futures; taken before any other
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)  # something became ready, or a load ended
        self._ready: deque[Load] = deque()  # staged, waiting for commit_ready
        self._parked: list[tuple[int, Load]] = []  # (bucket, load) waiting for a slot, in order
        self.loads = ColdLoads(
            self._stage, workers, depth, quotas, clock, size_of, niceness=niceness
        )
        self.metrics.bytes.labels("host").set_function(lambda: self.host.nbytes)
        self.metrics.bytes.labels("device").set_function(self._device_bytes)
        self.metrics.unfinished.set_function(lambda: len(self.loads))

    @property
    def stacks(self) -> Stacks:
        """The stacks to sample from; one dict for good, whose arrays ``commit_ready`` replaces."""
        return self.slots.stacks

    def acquire(self, digest: str, tenant: str = "default") -> "Future[Lease]":
        """A lease on a revision's slot: at once when it is resident, else when its load is
        committed.

        Cancelling the future withdraws the request. The future raises what ``fetch``, the
        verification or the admission raise; nothing of a failed load stays.

        Raises:
            QueueFull: ask again in ``retry_after_s``.
        """
        future: Future[Lease] = Future()
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
        """A hint: brings a revision to the host, and to a slot if one is free. False where the
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
        """A hint with the packed bytes, which must not change later: as ``prefetch``, and nothing
        is fetched. Whether the host has them.
        """
        return self._tier.offer(digest, buffer, tenant) and self.prefetch(digest, tenant)

    def pin(self, digest: str, tenant: str = "default") -> bool:
        """Brings a revision to host and slot and keeps it there. False where the queue is full: the
        pin then holds from its arrival.
        """
        with self._lock:
            self.host.pin(digest)
            self.table.pin(digest)
            if self.table.find(digest) is None:
                try:
                    self._submit(digest, tenant, COLD)
                except QueueFull:
                    return False
        return True

    def unpin(self, digest: str) -> None:
        """Takes a pin away."""
        with self._lock:
            self.host.unpin(digest)
            self.table.unpin(digest)
            self._pump()

    def drop(self, digest: str) -> bool:
        """Removes a revision from slot and host; a leased one goes when its requests have ended.
        Whether it is gone now.
        """
        with self._lock:
            gone = self.host.drop(digest) & self.table.drop(digest)
            self._pump()
            return gone

    def eta(self, digest: str) -> float:
        """Seconds until a revision should be ready to commit: 0 for a resident one, an estimate for
        any other.
        """
        with self._lock:
            if self.table.find(digest) is not None:
                return 0.0
            load = self.loads.find(digest)
            return self.loads.eta_of_new(digest) if load is None else self.loads.eta(load)

    def commit_ready(self, budget_bytes: int | None = None) -> int:
        """Writes what is staged into its slots and resolves the requests. For the engine's thread,
        between two steps.

        Args:
            budget_bytes: write at most this many, but at least one piece; what is left, also the
                rest of a large adapter, waits for the next call.

        Returns:
            How many revisions became resident.
        """
        committed = spent = 0
        while (load := self._first_ready()) is not None:
            staged = load.staged
            piece = staged.nbytes // staged.pieces
            if budget_bytes is not None and spent and spent + piece > budget_bytes:
                break
            try:
                began = time.perf_counter()
                others.write(staged.number)
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

    def _lease(self, digest: str) -> Lease | None:
        slot = self.table.lease(digest)
        return (
            None if slot is None else Lease(digest, slot, self.table.modules(digest), self._release)
        )

    def _blake3(self, buffer: np.ndarray) -> str:
        return (blake3_alone if self._niceness and not self._idle else blake3_of)(buffer)

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """The engine's thread has nothing to run until a load ends: loads may have all cores."""
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

    def _first_ready(self) -> Load | None:
        with self._lock:
            return self._ready[0] if self._ready else None

    def _commit(self, load: Load) -> None:
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

    def wait_for(self, digests: Sequence[str], tenant: str = "default") -> list[Lease]:
        """Leases on several revisions, committing meanwhile: for a job that has nothing else to run
        on the device.

        Raises:
            QueueFull, UserError: of the first that fails; no lease is left then.
        """
        futures: list[Future[Lease]] = []
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
        """Sleeps until something can be committed, or one of these requests has ended, or for
        ``timeout`` seconds.

        Returns:
            Whether ``commit_ready`` has something to do.
        """
        with self._waiting(), self._changed:
            self._changed.wait_for(
                lambda: self._ready or any(future.done() for future in pending), timeout
            )
            return bool(self._ready)

    def state(self) -> dict[str, Any]:
        """What is where: counts, bytes and queues."""
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
                "bytes_per_s": self.loads.bytes_per_s,
                "resident": sorted(self.table.resident()),
            }

    def close(self) -> None:
        """Ends the workers; requests that are not resolved get ``CancelledError``."""
        for load in self.loads.close():
            self._end(load, CancelledError())

    def _submit(self, digest: str, tenant: str, priority: int) -> Load:
        try:
            load, dropped = self.loads.submit(digest, tenant, priority)
        except QueueFull as full:
            self.metrics.refusals.labels(
                "prefetch_dropped" if priority == PREFETCH else full.reason
            ).inc()
            raise
        if dropped is not None:
            self.metrics.refusals.labels("prefetch_dropped").inc()
        return load

    def _stage(self, load: Load) -> None:
        """A worker's part of a load; every error goes to those who wait."""
        try:
            self._bring(load)
        except Exception as error:
            self.metrics.refusals.labels("failed").inc()
            self._end(load, error)

    def _bring(self, load: Load) -> None:
        began = self._clock()
        if load.slot is None:
            self.metrics.queue_wait.observe(max(0.0, began - load.submitted_at))
        with self._tier.lend(load.digest, load.tenant) as (adapter, schema, cold, nbytes):
            load.cold, load.nbytes, load.modules = cold, nbytes, modules_of(adapter)
            bucket = self._admission.bucket(schema.config.rank)
            assert bucket is not None, "it was admitted"
            if (slot := self._slot_for(load, bucket)) is None:
                return
            with others.staging(load.digest, slot) as number:
                staged = self.slots.stage(slot, adapter, schema.config)
            staged.number = number
        load.seconds = max(0.0, self._clock() - began)
        self.metrics.load_time.labels("storage" if cold else "host").observe(load.seconds)
        with self._lock:
            load.staged = staged
            self._ready.append(load)
            self._changed.notify_all()

    def _slot_for(self, load: Load, bucket: int) -> Slot | None:
        """The slot that a load is to fill; None where it waits for one, or ends because no request
        waits for it.
        """
        with self._lock:
            if load.slot is None:
                wanted = bool(load.waiting) or self.table.is_pinned(load.digest)
                load.slot = self.table.reserve(bucket, load.digest, load.tenant, evict=wanted)
                if load.slot is None and wanted:
                    self._parked.append((bucket, load))
                elif load.slot is None:
                    self.loads.finish(load)
                    self._changed.notify_all()
            return load.slot

    def _pump(self) -> None:
        """Gives slots to the loads that wait for one."""
        waiting, self._parked = self._parked, []
        for bucket, load in waiting:
            try:
                load.slot = self.table.reserve(bucket, load.digest, load.tenant)
            except UserError:
                # there will be none: a worker finds that again and fails the waiting requests,
                # without our lock
                self.loads.resume(load)
                continue
            if load.slot is None:
                self._parked.append((bucket, load))
            else:
                self.loads.resume(load)

    def _end(self, load: Load, error: BaseException) -> None:
        """Ends a load that failed: nothing of it stays, and everyone who waits hears why."""
        if load.staged is not None:
            others.abandon(load.staged.number)
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

    def _withdraw(self, load: Load, future: "Future[Lease]") -> None:
        """Takes a cancelled request out; a load that no request waits for is forgotten where it has
        not begun.
        """
        if not future.cancelled():
            return
        with self._lock:
            if future in load.waiting:
                load.waiting.remove(future)
            if load.waiting or self.table.is_pinned(load.digest):
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
