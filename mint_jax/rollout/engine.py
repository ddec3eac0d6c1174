"""The sampling engine: continuous batching over pages, with any mixture of adapters. ``generate``
runs the loop in the caller's thread; ``serving`` runs it in a thread of its own, and ``submit``
returns a stream. With several processes over one mesh, ``generate`` and ``warm`` are called in all
of them.

A request and its seed give the same bits at one program shape, whatever other rows, pages, cache
hits (except with ``reuse_decoded``), preemption and steps per dispatch. Programs of different
numbers of rows may round differently; an engine with one entry in ``rows`` has only one.
"""

import contextlib
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from mint_jax import multihost
from mint_jax.errors import UserError
from mint_jax.lora.tree import Stacks
from mint_jax.models.base import Base
from mint_jax.rollout import device
from mint_jax.rollout import request as requests_
from mint_jax.rollout.active import ActiveRequest, ActiveRequests, Coscheduled, Residents
from mint_jax.rollout.calls import DeviceCalls
from mint_jax.rollout.device import STEPS
from mint_jax.rollout.drafts import Drafts
from mint_jax.rollout.programs import programs
from mint_jax.rollout.request import Completion, Request
from mint_jax.rollout.samples import longest_table, pages_needed
from mint_jax.rollout.stream import Stream

ROWS = (8, 32, 128)  # decode program shapes; a step runs the smallest that holds its rows
# Blocks of one prefill call, in pages. There is one shape because shapes round differently, and how
# many blocks wait depends on other requests (layer-2 keys of SmolLM2 differ by 5e-6 between 4 and
# 16 blocks). On CPUs 4 blocks: 16 take 0.8 of the time per token when full, but 3.2 times as long
# for a prompt of 30 tokens.
CPU_BLOCKS, BLOCKS = 4, 16
# Maximum seconds between checks for new requests while all present ones wait for adapters or
# programs.
LOOK_S = 0.02


class Engine:
    """The sampling engine of one base; see the module.

    Args:
        decode: converts token ids to text, for stop strings and ``Completion.text``; None without a
            tokenizer.
        rows: decode program shapes; None uses ``ROWS`` below ``max_rows``, and ``max_rows``; with
            ``speculative_tokens`` only this, so that drafts change no bit.
        keep_routes: record the experts that every token visits, for replay in training (R3).
        cache_bytes: size of the KV cache over all devices; None uses ``calls.CACHE_BYTES``.
        steps: maximum tokens per row and dispatch, 1 to STEPS.
        speculative_tokens: maximum drafts of a sample that idle rows verify in one step (see
            ``drafts``), less than STEPS; 0: none.
        reuse_decoded: also cache what decoding wrote, so that the next turn of a conversation is
            not prefilled again. Log-probabilities then depend on earlier requests, by at most 2e-5
            in float32 (``tests/rollout/decoded_test.py``): decoding and prefill round differently.
        keep_cache: False frees the cache after each call of ``generate``, as ``release`` does, for
            training loops that change the weights in between. Next to a training step of 8
            policies over SmolLM2 the cache is 94 MB.

    Attributes:
        counts: totals so far: tokens prefilled, reused and drawn, dispatches, preempted samples;
            drafts and those accepted, also by source.
        active: the requests in progress. ``active.compiled`` has the programs that are ready, while
            others compile in the background; None compiles each program at its first call.
    """

    def __init__(
        self,
        base: Base,
        decode: Callable[[list[int]], str] | None = None,
        max_rows: int = 128,
        rows: Sequence[int] | None = None,
        keep_routes: bool = False,
        cache_bytes: int | None = None,
        steps: int = STEPS,
        speculative_tokens: int = 0,
        reuse_decoded: bool = False,
        keep_cache: bool = True,
    ):
        if keep_routes and not base.cfg.routed:
            raise UserError(f"keep_routes is True, but {base.name} has no experts: set it to False")
        if not 1 <= steps <= STEPS:
            raise UserError(f"steps is {steps}; expected 1 to {STEPS}")
        if not 0 <= speculative_tokens < STEPS:
            raise UserError(
                f"speculative_tokens is {speculative_tokens}; expected 0 (none) to {STEPS - 1}"
            )
        if speculative_tokens and "states" in device.kinds(base.cfg):
            raise UserError(
                f"speculative_tokens is {speculative_tokens}, but {base.name} has layers with a"
                " state, which cannot forget a wrong draft: set it to 0"
            )
        if max_rows < 1 or (rows is not None and (not rows or min(rows) < 1)):
            raise UserError(
                f"max_rows is {max_rows} and rows {rows}; expected row counts of at least 1"
            )
        self.base, self.decode, self.keep_cache = base, decode, keep_cache
        self.parts = device.page_parts(base.cfg, base.mesh)
        even = math.lcm(self.parts, base.row_multiple)
        smaller = () if speculative_tokens else (r for r in ROWS if r < max_rows)
        wanted = rows if rows is not None else (*smaller, max_rows)
        # One row alone on a device would use another kind of matmul than rows on other devices. A
        # program with one row in all has no other rows to agree with.
        least = 2 * base.row_multiple if base.row_multiple > 1 else 1
        self.rows = tuple(sorted({-(-max(r, least) // even) * even for r in wanted}))
        wanted_blocks = CPU_BLOCKS if base.mesh.devices.flat[0].platform == "cpu" else BLOCKS
        self.blocks = -(-wanted_blocks // even) * even
        sizes = [*self.rows, self.blocks, longest_table(base.cfg.context)]
        self.calls = DeviceCalls(base, keep_routes, self.rows[-1], self.blocks, cache_bytes, sizes)
        most = None if "states" in device.kinds(base.cfg) else speculative_tokens
        how = decode, steps, keep_routes, reuse_decoded, Drafts(most)
        self.active = ActiveRequests(base, self.calls, self.rows, self.blocks, *how)
        self.counts = self.active.counts
        self._inbox: list[ActiveRequest] = []
        self._wake = threading.Condition()
        self._running = threading.Lock()  # owned by the one thread that drives the devices
        self._thread: threading.Thread | None = None
        self._stopping = False

    # -- public methods

    def check(self, request: Request, stacks: Stacks) -> None:
        """Raises ``UserError`` as ``request.check``, or if the cache cannot hold one sample."""
        requests_.check(request, self.base, stacks, self.decode is not None)
        self.active.grammars.matcher(request)
        if (needed := pages_needed(request)) > self.calls.most:
            raise UserError(
                f"a prompt of {len(request.prompt)} tokens with {request.max_tokens} new ones needs"
                f" {needed} pages, the cache has {self.calls.most}: raise --config.cache_gib, or"
                " lower the number of tokens"
            )

    def generate(
        self,
        requests: Sequence[Request],
        stacks: Stacks | None = None,
        finished: Callable[[dict[int, list[Completion]]], Any] | None = None,
    ) -> list[list[Completion]]:
        """Samples every request; returns ``n`` completions for each, in the order of the requests.
        All are checked before the first runs. While the engine serves, this is ``submit`` over the
        loop's stacks.

        Args:
            finished: called with the completions of requests as they end, keyed by their indices;
                in processes other than 0, once at the end.
        """
        # Without requests no pool is needed: 94 MB and 18 ms in GRPO of 8 policies on SmolLM2.
        if not requests:
            return []
        stacks = self.calls.stacks if self._thread is not None else {} if stacks is None else stacks
        for request in requests:
            self.check(request, stacks)
        if self._thread is not None:
            return self._wait_for(requests, finished)
        if not multihost.is_main():
            with self._driving(stacks):
                found = self.calls.follow()
            if found and finished is not None:
                finished(dict(enumerate(found)))
            return found
        with self._driving(stacks, answered=True):
            self.active.call += 1
            jobs = [self.active.job(request, Stream(request)) for request in requests]
            self.active.ensure_cache(requests)
            try:
                # Longest first (Graham 1969, longest processing time), so that samples started
                # last end soon.
                for job in sorted(jobs, key=lambda job: -job.prompt.request.max_tokens):
                    self.active.start(job)
                left = dict(enumerate(jobs))
                while left:
                    self.active.turn()
                    ended = {i: job.stream.result() for i, job in left.items() if job.stream.done}
                    for i in ended:
                        del left[i]
                    if ended and finished is not None:
                        finished(ended)
            finally:
                self.active.clear(jobs)
            found = [job.stream.result() for job in jobs]
            self.calls.answer(found)
            if not self.keep_cache:
                self.calls.release()
        return found

    def _wait_for(self, requests: Sequence[Request], finished: Any) -> list[list[Completion]]:
        streams: list[Stream] = []
        found: list[list[Completion]] = []
        try:
            for request in requests:
                streams.append(self.submit(request))
            for i, stream in enumerate(streams):
                found.append(stream.result())
                if finished is not None:
                    finished({i: found[i]})
        except BaseException:
            for stream in streams:
                stream.cancel()
            raise
        return found

    @contextlib.contextmanager
    def serving(
        self,
        stacks: Stacks | None = None,
        residency: Residents | None = None,
        commit_bytes: int | None = None,
        coscheduled: Coscheduled | None = None,
    ) -> Iterator["Engine"]:
        """Runs the loop in its own thread until the block ends, and then cancels requests that have
        not ended. Raises ``UserError`` if several processes share the mesh.

        Args:
            stacks: resident adapters, if there is no ``residency``.
            residency: loads adapters that requests name by ``revision``, while others decode.
            commit_bytes: approximate bytes written into slots between two turns; None is no limit.
            coscheduled: work between two turns, in the loop's thread; see ``wake``.
        """
        if multihost.count() > 1:
            raise UserError(
                f"serving runs in one process, and {multihost.count()} share this mesh: call"
                " generate, or start one process"
            )
        with self._driving(residency.stacks if residency is not None else stacks or {}):
            active, self._stopping = self.active, False
            active.residency, active.commit_bytes = residency, commit_bytes
            active.coscheduled, active.is_serving = coscheduled, True
            self.active.ensure_cache(None)
            self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)
            self._thread.start()
            try:
                yield self
            finally:
                with self._wake:
                    self._stopping = True
                    self._wake.notify_all()
                self._thread.join()
                self._thread, active.is_serving = None, False
                active.residency, active.coscheduled = None, None

    @property
    def is_serving(self) -> bool:
        """True while the loop's thread accepts requests."""
        return self._thread is not None and not self._stopping

    @property
    def is_ready(self) -> bool:
        """True once the programs that every request needs are compiled; from any thread."""
        return bool(self.active.usable_rows())

    def in_flight(self) -> Counter[tuple[str, str | None]]:
        """Returns the number of unfinished requests by tenant and revision; from any thread."""
        return Counter(
            (job.stream.request.tenant, job.stream.request.revision)
            for job in [*self.active.jobs, *self._inbox]
        )

    def state(self) -> dict[str, Any]:
        """Returns rows and pages, used and total; from any thread."""
        schedule = self.active.schedule
        rows = {name: len(getattr(schedule, name)) for name in ("running", "waiting", "swapped")}
        numbers = [(part.count, part.available, part.cached) for part in schedule.pages]
        pages = dict(zip(("count", "available", "cached"), map(sum, zip(*numbers))))
        return {"rows": rows | {"most": self.rows[-1]}, "pages": pages}

    def wake(self) -> None:
        """Notifies the loop of new coscheduled work; from any thread."""
        with self._wake:
            self._wake.notify_all()

    def submit(self, request: Request) -> Stream:
        """Enqueues a request; from any thread. Raises ``UserError`` as ``check`` does or if the
        engine does not serve, and ``QueueFull`` of residency.
        """
        if self._thread is None:
            raise UserError(
                "the engine does not serve: submit inside `with engine.serving(...)`, or call"
                " generate"
            )
        self.check(request, self.calls.stacks)
        job = self.active.job(request, Stream(request))
        residency = self.active.residency
        if residency is not None and request.revision is not None and request.adapter is None:
            job.lease = residency.acquire(request.revision, request.tenant)
        with self._wake:
            if self._stopping or self._thread is None:
                self.active.release_lease(job)
                raise UserError("the engine is stopping: retry on another one")
            self._inbox.append(job)
            self._wake.notify_all()
        return job.stream

    def release(self) -> None:
        """Frees the cache's memory and its prompts, in all processes."""
        with self._driving({}):
            self.calls.release() if multihost.is_main() else self.calls.follow()

    def warm(self, stacks: Stacks | None = None) -> None:
        """Allocates the cache at its maximum and compiles every program."""
        stacks = {} if stacks is None else stacks
        with self._driving(stacks):
            if multihost.is_main():
                self.active.ensure_cache(None)
            else:
                self.calls.follow()
        for program in programs(self.active, stacks):
            program.build()

    # -- the loop

    @contextlib.contextmanager
    def _driving(self, stacks: Stacks, answered: bool = False) -> Iterator[None]:
        if not self._running.acquire(blocking=False):
            raise UserError(
                "the engine is running in another thread: submit to it there, or create a second"
                " engine"
            )
        try:
            self.calls.stacks = stacks
            with jax.set_mesh(self.base.mesh):
                if multihost.is_main():
                    self.calls.begin(answered)
                yield
                self.calls.end()
        except BaseException as error:
            self.calls.drop()  # a failed call may have consumed the donated pool
            self.calls.end(error)
            raise
        finally:
            self.calls.stacks = {}
            self._running.release()

    def _has_work(self) -> bool:
        other = self.active.coscheduled
        waits = other is not None and other.waiting > 0
        return bool(self._inbox or self.active.jobs or self._stopping or waits)

    def _serve(self) -> None:
        error, active = None, self.active
        try:
            with jax.set_mesh(self.base.mesh):
                while True:
                    with self._wake:
                        self._wake.wait_for(self._has_work)
                        if self._stopping:
                            break
                        new, self._inbox = self._inbox, []
                    for job in new:
                        active.start(job)
                    if not active.turn():
                        active.wait_for_adapters(LOOK_S)
        except BaseException as failure:
            error = failure
            self.calls.drop()
            self.calls.end(failure)
        with self._wake:
            self._stopping = True
            left, self._inbox = [*self.active.jobs, *self._inbox], []
        self.active.clear(
            left, error or UserError("the engine stopped before this request ended: send it again")
        )
