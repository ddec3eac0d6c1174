"""The sampling engine: continuous batching over pages, with any mixture of adapters.

    generate(requests)              runs the loop in the caller's thread until all have ended
    with engine.serving(...):       runs the loop in a thread of its own
        engine.submit(request)      from any thread; returns a stream of tokens that can be
        cancelled

One turn of the loop writes loaded adapters into slots, gives waiting samples rows and pages,
prefills blocks of prompts, and decodes all rows for some steps. ``scheduler.py`` decides,
``plans.py`` turns decisions into arrays, ``device.py`` runs them.

With several processes over one mesh, ``generate`` and ``warm`` are called in all of them and return
the same. Process 0 runs the loop and broadcasts each device call before it makes it (``calls.py``).
Serving runs in one process.

A request and its seed give the same tokens and log-probabilities, bit for bit, at one program
shape: other rows, their order, pages, prefix-cache hits (except with ``reuse_decoded``), prefill
order, preemption and steps per dispatch change nothing. Programs of different numbers of rows may
round differently (CPU matmuls of 2 to 32 rows agree); an engine with one entry in ``rows`` has only
one. The number of rows in use selects the program and, while programs are still compiling in the
background (``compiled``), so does which of them are ready.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal, Protocol

import jax
import numpy as np

from mint_jax import multihost
from mint_jax.compiling import Program, Programs, abstract
from mint_jax.errors import UserError
from mint_jax.lora.tree import Stacks
from mint_jax.models.base import Base
from mint_jax.models.paged import PAGE
from mint_jax.rollout import device, plans
from mint_jax.rollout import request as requests_
from mint_jax.rollout.cache import PagedCache, SwappedPages
from mint_jax.rollout.calls import DeviceCalls
from mint_jax.rollout.completions import completion
from mint_jax.rollout.detokenize import context_of, text_behind
from mint_jax.rollout.device import STEPS
from mint_jax.rollout.grammar import Grammars, reason_of
from mint_jax.rollout.pages import PagePool, pages_for, require_fit
from mint_jax.rollout.request import Completion, Request
from mint_jax.rollout.scheduler import (
    CachedPrompt,
    SampleState,
    Scheduler,
    longest_table,
    pages_needed,
)
from mint_jax.rollout.stops import Stops
from mint_jax.rollout.stream import Piece, Stream

ROWS = (8, 32, 128)  # decode program shapes; a step runs the smallest that holds its rows
# Blocks of one prefill call, in pages. There is one shape because shapes round differently, and how
# many blocks wait depends on other requests (layer-2 keys of SmolLM2 differ by 5e-6 between 4 and
# 16 blocks). On CPUs 4 blocks: 16 take 0.8 of the time per token when full, but 3.2 times as long
# for a prompt of 30 tokens.
CPU_BLOCKS, BLOCKS = 4, 16
# Weight of a drawn token relative to a prefilled one in fair sharing between tenants
# (arXiv:2401.00588, section 3.1).
DRAWN = 2
# Prefill calls between two decode dispatches while serving: 512 tokens on a CPU, 2,048 elsewhere.
READS = 4
# Counters that are reported as 0 from the start.
COUNTS = ("prefills", "prefilled_tokens", "reused_tokens", "decodes", "drawn_tokens", "preempted")
# Maximum seconds between checks for new requests while all present ones wait for adapters or
# programs.
LOOK_S = 0.02


class Residents(Protocol):
    """The part of ``residency.Residency`` that the engine uses."""

    @property
    def stacks(self) -> Stacks: ...

    def acquire(self, digest: str, tenant: str) -> "Future[Any]": ...

    def commit_ready(self, budget_bytes: int | None = None) -> int: ...

    def wait_ready(self, pending: Sequence[Future], timeout: float = 1.0) -> bool: ...


class Coscheduled(Protocol):
    """Work that shares the devices with the engine and orders its tenants; implemented by
    ``service.loop.Loop``.
    """

    @property
    def waiting(self) -> int: ...

    def turn(self, decoding: bool) -> bool: ...

    def began(self, tenant: str) -> None: ...

    def ended(self, tenant: str) -> None: ...

    def order(self, tenants: Iterable[str]) -> list[str]: ...

    def spent(self, seconds: float, tokens: Mapping[str, float]) -> None: ...

    def took(
        self,
        kind: Literal["prefill", "decode"],
        seconds: float,
        tokens: Mapping[tuple[str, str | None], int],
    ) -> None: ...


@dataclasses.dataclass(eq=False)
class _ActiveRequest:
    """A request that has not ended."""

    stream: Stream
    prompt: CachedPrompt
    samples: list[SampleState] = dataclasses.field(default_factory=list)
    lease: "Future[Any] | None" = None
    matcher: Any = None


class Engine:
    """The sampling engine of one base; see the module.

    Args:
        base: the resident base.
        decode: converts token ids to text, for stop strings and ``Completion.text``; None without
            a tokenizer.
        max_rows: maximum number of rows that decode together.
        rows: decode program shapes; None uses ``ROWS`` below ``max_rows``, and ``max_rows``.
        keep_routes: record the experts that every token visits, for replay in training (R3).
        cache_bytes: size of the KV cache over all devices; None uses ``cache.CACHE_BYTES``.
        steps: maximum tokens per row and dispatch, 1 to STEPS.
        reuse_decoded: also cache what decoding wrote, so that the next turn of a conversation is
            not prefilled again. Decoding and prefill differ in the last bits, so log-probabilities
            then depend on earlier requests (by at most 2e-5 in float32, see
            ``tests/rollout/decoded_test.py``).
        keep_cache: False frees the cache's memory and its prompts after each call of ``generate``,
            for training loops that change the weights in between. Next to a training step of 8
            policies over SmolLM2 the cache is 94 MB.

    Attributes:
        counts: totals so far: tokens prefilled, reused and drawn, dispatches, preempted samples.
        compiled: programs of ``programs`` that are ready, while others compile in the background;
            None compiles each program at its first call.

    Raises:
        UserError: ``keep_routes`` on a base without experts, or a size out of range.
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
        reuse_decoded: bool = False,
        keep_cache: bool = True,
    ):
        if keep_routes and not base.cfg.routed:
            raise UserError(f"keep_routes is True, but {base.name} has no experts: set it to False")
        if not 1 <= steps <= STEPS:
            raise UserError(f"steps is {steps}; expected 1 to {STEPS}")
        if max_rows < 1 or (rows is not None and (not rows or min(rows) < 1)):
            raise UserError(
                f"max_rows is {max_rows} and rows {rows}; expected row counts of at least 1"
            )
        self.base, self.decode, self.keep_routes, self.steps = base, decode, keep_routes, steps
        self.reuse_decoded, self.keep_cache = reuse_decoded, keep_cache
        self.parts = device.page_parts(base.cfg, base.mesh)
        even = math.lcm(self.parts, base.row_multiple)
        wanted = rows if rows is not None else (*(r for r in ROWS if r < max_rows), max_rows)
        # One row alone on a device would use another kind of matmul than rows on other devices. A
        # program with one row in all has no other rows to agree with.
        least = 2 * base.row_multiple if base.row_multiple > 1 else 1
        self.rows = tuple(sorted({-(-max(r, least) // even) * even for r in wanted}))
        wanted_blocks = CPU_BLOCKS if base.mesh.devices.flat[0].platform == "cpu" else BLOCKS
        self.blocks = -(-wanted_blocks // even) * even
        self.table = longest_table(base.cfg.context)
        self.counts: Counter[str] = Counter(dict.fromkeys(COUNTS, 0))
        self._grammars = Grammars(base)
        self.calls = DeviceCalls(base, keep_routes, [*self.rows, self.blocks, self.table])
        self.cache = PagedCache(base, self.rows[-1], self.calls, cache_bytes)
        self._schedule = Scheduler([PagePool(0, PAGE)] * self.parts, 0)
        self.compiled: Programs | None = None
        self._residency: Residents | None = None
        self._coscheduled: Coscheduled | None = None
        self._tokens: Counter[str] = Counter()  # fair-share tokens of this turn, by tenant
        # Tokens prefilled in this turn, by tenant and revision.
        self._read: Counter[tuple[str, str | None]] = Counter()
        self._read_from = 0.0  # time of the turn's first prefill call
        self._commit_bytes: int | None = None
        self._jobs: list[_ActiveRequest] = []
        self._inbox: list[_ActiveRequest] = []
        self._wake = threading.Condition()
        self._running = threading.Lock()  # held by the one thread that drives the devices
        self._thread: threading.Thread | None = None
        self._stopping = False
        # ``next`` of a count is atomic, so any thread may take a number.
        self._calls, self._submitted = 0, itertools.count()

    # -- public methods

    def check(self, request: Request, stacks: Stacks) -> None:
        """Raises if a request cannot be sampled; see ``request.check``.

        Raises:
            UserError: also if the cache cannot hold one sample.
        """
        requests_.check(request, self.base, stacks, self.decode is not None)
        self._grammars.matcher(request)
        require_fit(
            pages_needed(request),
            self.cache.most,
            f"a prompt of {len(request.prompt)} tokens with {request.max_tokens} new ones",
        )

    def generate(
        self,
        requests: Sequence[Request],
        stacks: Stacks | None = None,
        progress: Callable[[int, int], None] | None = None,
        between_steps: Callable[[], Any] | None = None,
        finished: Callable[[dict[int, list[Completion]]], Any] | None = None,
    ) -> list[list[Completion]]:
        """Samples every request; returns ``n`` completions for each, in the order of the requests.

        Args:
            stacks: resident adapters, by bucket rank.
            progress: called with (requests done, requests) as requests end; in processes other
                than 0, once at the end.
            between_steps: called in process 0 before each turn of the loop, while the devices are
                idle. It may write slots of ``stacks`` that no request names.
            finished: called with the completions of requests that ended, keyed by their indices;
                timed as ``progress``.

        Raises:
            UserError: see ``check``; all requests are checked before the first runs. While the
                engine serves, also what ``submit`` raises, and ``stacks`` and ``between_steps`` are
                ignored in favour of the serving loop's.
        """
        # Without requests no pool is needed: 94 MB and 18 ms in GRPO of 8 policies on SmolLM2.
        if not requests:
            return []
        stacks = self.calls.stacks if self._thread is not None else {} if stacks is None else stacks
        for request in requests:
            self.check(request, stacks)
        if self._thread is not None:
            return self._wait_for(requests, progress, finished)
        if not multihost.is_main():
            found = self._follow(stacks)
            if found and finished is not None:
                finished(dict(enumerate(found)))
            if found and progress is not None:
                progress(len(found), len(found))
            return found
        with self._driving(stacks, answered=True):
            self._calls += 1
            jobs = [self._job(request, Stream(request)) for request in requests]
            self._ensure_cache(requests)
            try:
                # Longest first (Graham 1969, longest processing time), so that samples started
                # last end soon.
                for job in sorted(jobs, key=lambda job: -job.prompt.request.max_tokens):
                    self._start(job)
                left = dict(enumerate(jobs))
                while left:
                    if between_steps is not None:
                        between_steps()
                    self._turn()
                    ended = {i: job.stream.result() for i, job in left.items() if job.stream.done}
                    for i in ended:
                        del left[i]
                    if ended and finished is not None:
                        finished(ended)
                    if ended and progress is not None:
                        progress(len(jobs) - len(left), len(jobs))
            finally:
                self._clear(jobs)
            found = [job.stream.result() for job in jobs]
            self.calls.answer(found)
            if not self.keep_cache:
                self.calls.release()
        return found

    def _wait_for(
        self, requests: Sequence[Request], progress: Any, finished: Any
    ) -> list[list[Completion]]:
        """Runs ``generate`` through the serving loop."""
        streams: list[Stream] = []
        try:
            for request in requests:
                streams.append(self.submit(request))
            for i, stream in enumerate(streams):
                result = stream.result()
                if finished is not None:
                    finished({i: result})
                if progress is not None:
                    progress(i + 1, len(streams))
        except BaseException:
            for stream in streams:
                stream.cancel()
            raise
        return [stream.result() for stream in streams]

    @contextlib.contextmanager
    def serving(
        self,
        stacks: Stacks | None = None,
        residency: Residents | None = None,
        commit_bytes: int | None = None,
        coscheduled: Coscheduled | None = None,
    ) -> Iterator["Engine"]:
        """Runs the loop in its own thread until the block ends, and then cancels requests that have
        not ended.

        Args:
            stacks: resident adapters, if there is no ``residency``.
            residency: loads adapters that requests name by ``revision``, while others decode.
            commit_bytes: approximate bytes written into slots between two turns; None is no limit.
            coscheduled: work that runs between two turns, in the loop's thread. ``wake`` notifies
                the loop of new work.

        Raises:
            UserError: several processes share the mesh.
        """
        if multihost.count() > 1:
            raise UserError(
                f"serving runs in one process, and {multihost.count()} share this mesh: call"
                " generate, or start one process"
            )
        with self._driving(residency.stacks if residency is not None else stacks or {}):
            self._residency, self._commit_bytes = residency, commit_bytes
            self._coscheduled, self._stopping = coscheduled, False
            self._ensure_cache(None)
            self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)
            self._thread.start()
            try:
                yield self
            finally:
                with self._wake:
                    self._stopping = True
                    self._wake.notify_all()
                self._thread.join()
                self._thread, self._residency, self._coscheduled = None, None, None

    @property
    def is_serving(self) -> bool:
        """True while the loop's thread accepts requests."""
        return self._thread is not None and not self._stopping

    @property
    def is_ready(self) -> bool:
        """True once the programs that every request needs are compiled; from any thread."""
        return bool(self._usable())

    def in_flight(self) -> Counter[tuple[str, str | None]]:
        """Returns the number of unfinished requests by tenant and revision; from any thread."""
        return Counter(
            (job.stream.request.tenant, job.stream.request.revision)
            for job in [*self._jobs, *self._inbox]
        )

    def state(self) -> dict[str, Any]:
        """Returns rows and pages, used and total; from any thread."""
        schedule = self._schedule
        rows = {name: len(getattr(schedule, name)) for name in ("running", "waiting", "swapped")}
        pages = {
            name: sum(getattr(part, name) for part in schedule.pages)
            for name in ("count", "available", "cached")
        }
        return {"rows": rows | {"most": self.rows[-1]}, "pages": pages}

    def wake(self) -> None:
        """Notifies the loop of new coscheduled work; from any thread."""
        with self._wake:
            self._wake.notify_all()

    def submit(self, request: Request, deadline_s: float | None = None) -> Stream:
        """Enqueues a request while the engine serves; from any thread.

        Args:
            deadline_s: seconds after which the request is cancelled.

        Raises:
            UserError: see ``check``; or the engine does not serve.
            QueueFull: the load queue of residency is full; says when to retry.
        """
        if self._thread is None:
            raise UserError(
                "the engine does not serve: submit inside `with engine.serving(...)`, or call"
                " generate"
            )
        self.check(request, self.calls.stacks)
        job = self._job(
            request, Stream(request, None if deadline_s is None else time.monotonic() + deadline_s)
        )
        if self._residency is not None and request.revision is not None and request.adapter is None:
            job.lease = self._residency.acquire(request.revision, request.tenant)
        with self._wake:
            if self._stopping or self._thread is None:
                self._release_lease(job)
                raise UserError("the engine is stopping: retry on another one")
            self._inbox.append(job)
            self._wake.notify_all()
        return job.stream

    def _follow(self, stacks: Stacks) -> list[list[Completion]]:
        with self._driving(stacks):
            return self.calls.follow()

    def warm(
        self, stacks: Stacks | None = None, progress: Callable[[str, int, int], None] | None = None
    ) -> None:
        """Allocates the cache at its maximum and compiles every program, so that no request waits
        for a compilation.

        Args:
            progress: called in process 0 with (program, done, total) before each program.
        """
        stacks = {} if stacks is None else stacks
        if multihost.is_main():
            with self._driving(stacks):
                self._ensure_cache(None)
        else:
            self._follow(stacks)
        for i, program in enumerate(todo := self.programs(stacks)):
            if progress is not None and multihost.is_main():
                progress(program.name, i, len(todo))
            program.build()

    def programs(self, stacks: Stacks) -> list[Program]:
        """Returns every program that an engine over these stacks runs."""
        cfg, params, shapes, cache = self.base.cfg, self.base.params, abstract(stacks), self.cache
        pool = device.abstract_pool(
            cfg, self.base.mesh, cache.most, self.base.dtype, self.keep_routes
        )

        def lowered(function: Any, *args: Any) -> None:
            with jax.set_mesh(self.base.mesh):
                function.lower(*args, cfg=cfg).compile()

        def prefill(score: bool = False) -> None:
            plan = plans.blocks_plan([[]] * self.parts, self.blocks, self.table, stacks, score)
            lowered(device.prefill, params, shapes, pool, plan)

        def decode(rows: int) -> None:
            plan, _ = plans.rows_plan([], rows, self.parts, self.table, cfg.vocab_size, stacks)
            lowered(device.decode, params, shapes, pool, plan, np.int32(0))

        def pages() -> None:
            ids = cache.nowhere()
            lowered(device.read_pages, pool, ids)
            with jax.set_mesh(self.base.mesh):
                contents = jax.eval_shape(functools.partial(device.read_pages, cfg=cfg), pool, ids)
            contents = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), contents)
            lowered(device.write_pages, pool, ids, contents)
            if self.keep_routes:
                lowered(device.read_pages, {"routes": pool["moe"]["routes"]}, ids)
            if self.reuse_decoded:
                lowered(device.move_pages, pool, device.PageMoves(*[ids] * 5))  # type: ignore[arg-type]

        return [
            Program("prefill", f"prefill of {self.blocks * PAGE} tokens", prefill, 0),
            *(
                Program(
                    ("decode", r),
                    f"decoding of {r} rows",
                    functools.partial(decode, r),
                    0 if r == self.rows[0] else 1,
                )
                for r in self.rows
            ),
            Program("pages", "pages to and from the host", pages, 0),
            Program("scores", "scores of a prompt", functools.partial(prefill, True), 2),
        ]

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

    def _serve(self) -> None:
        error: BaseException | None = None
        try:
            with jax.set_mesh(self.base.mesh):
                while True:
                    with self._wake:
                        while not (
                            self._inbox
                            or self._jobs
                            or self._stopping
                            or (self._coscheduled is not None and self._coscheduled.waiting)
                        ):
                            self._wake.wait()
                        if self._stopping:
                            break
                        new, self._inbox = self._inbox, []
                    for job in new:
                        self._start(job)
                    worked = (
                        self._turn()
                        if self._coscheduled is None
                        else self._turn_coscheduled(self._coscheduled)
                    )
                    # All requests wait for adapters or programs.
                    if not worked and self._residency is not None:
                        coming = [
                            job.lease
                            for job in self._jobs
                            if job.lease is not None and not job.lease.done()
                        ]
                        self._residency.wait_ready(coming, LOOK_S)
        except BaseException as failure:
            error = failure
            self.calls.drop()
            self.calls.end(failure)
        with self._wake:
            self._stopping = True
            left, self._inbox = [*self._jobs, *self._inbox], []
        self._clear(
            left, error or UserError("the engine stopped before this request ended: send it again")
        )

    def _turn_coscheduled(self, coscheduled: Coscheduled) -> bool:
        """Runs one turn of the engine and one of the coscheduled work."""
        self._schedule.prefer(coscheduled.order(self._schedule.tenants))
        began = time.perf_counter()
        self._tokens.clear()
        worked = bool(self._jobs) and self._turn()
        if self._tokens:
            coscheduled.spent(time.perf_counter() - began, self._tokens)
        return coscheduled.turn(bool(self._schedule.running)) or worked

    def _job(self, request: Request, stream: Stream) -> _ActiveRequest:
        request_by_id = requests_.stopping_by_id(request, self.base)
        if request.revision is not None:
            version: Any = request.revision
        elif request.adapter is None:
            version = None
        elif request.version is not None:
            version = request.version
        else:
            # The slot's weights have no name and may change before the next call, so its prompts
            # are shared within this call only.
            version = (
                self._calls if self._thread is None else next(self._submitted),
                request.adapter,
                self._thread is None,
            )
        return _ActiveRequest(
            stream,
            CachedPrompt(request_by_id, (request.tenant, version)),
            matcher=self._grammars.matcher(request),
        )

    def _start(self, job: _ActiveRequest) -> None:
        self._jobs.append(job)
        if self._coscheduled is not None:
            self._coscheduled.began(job.prompt.request.tenant)
        job.samples = self._schedule.add(job.prompt, job)
        for sample in job.samples:
            sample.matcher = None if job.matcher is None else job.matcher.deep_copy()
            if job.prompt.request.stop:
                assert self.decode is not None, "checked at the door"
                sample.stops = Stops(
                    self.decode, job.prompt.request.stop, job.prompt.request.prompt
                )

    def _turn(self) -> bool:
        """Runs one turn of the loop; returns True if anything was done."""
        self._read.clear()
        self._drop_cancelled()
        if self._residency is not None:
            self._residency.commit_ready(self._commit_bytes)
        if not (usable := self._usable()):
            return False
        self._schedule.rows = usable[-1] // self.parts
        before = len(self._schedule.running)
        self._schedule.admit(self._restore, self.steps, self._loaded)
        reads = 0
        # Prefill comes before decoding, because a step costs the same with idle rows. While
        # serving, READS bounds it, so that a long prompt does not stall the rows that decode.
        while any(
            todo := self._schedule.to_prefill(self.blocks // self.parts, loaded=self._loaded)
        ):
            self._prefill(todo)
            reads += 1
            if self._thread is not None and reads == READS:
                break
        while any(todo := self._schedule.to_prefill(self.blocks // self.parts, scored=True)):
            self._prefill(todo, score=True)
            reads += 1
        # Otherwise the asynchronous prefill would be timed as part of the next decode.
        if self._read and self._coscheduled is not None:
            self.calls.block_until_ready()
            self._coscheduled.took("prefill", time.perf_counter() - self._read_from, self._read)
        rows = self._schedule.to_decode(self.steps, self._preempt)
        if rows:
            most = max(Counter(s.prompt.part for s, _ in rows).values())
            self._decode(rows, next(r for r in usable if r >= self.parts * most))
        return bool(reads or rows or len(self._schedule.running) != before)

    def _usable(self) -> list[int]:
        """Returns the row counts whose decode program is compiled; empty until the programs that
        every request needs are.
        """
        if self.compiled is None:
            return list(self.rows)
        if not (self.compiled.has("prefill") and self.compiled.has("pages")):
            return []
        return [r for r in self.rows if self.compiled.has(("decode", r))]

    def _drop_cancelled(self) -> None:
        now = time.monotonic()
        for job in list(self._jobs):
            if (
                job.lease is not None
                and job.lease.done()
                and (error := job.lease.exception()) is not None
            ):
                self._clear([job], error)
            elif job.stream.cancelled or (
                job.stream.deadline is not None and now > job.stream.deadline
            ):
                for sample in job.samples:
                    if sample.finish is None:
                        self._finish(sample, "cancelled")

    def _loaded(self, sample: SampleState) -> bool:
        """Returns True if a sample can run: its scoring program is compiled and its adapter is in a
        slot, which is then written into the request.
        """
        job: _ActiveRequest = sample.owner
        if (
            self.compiled is not None
            and sample.prompt.scored_from is not None
            and not self.compiled.want("scores")
        ):
            return False
        if job.lease is None:
            return True
        # A failed load is reported in the next turn, by _drop_cancelled.
        if not job.lease.done() or job.lease.exception() is not None:
            return False
        if job.prompt.request.adapter is None:
            job.prompt.request = dataclasses.replace(
                job.prompt.request, adapter=job.lease.result().slot
            )
        return True

    # -- calls of the device

    def _prefill(self, todo: list[list[tuple[CachedPrompt, int]]], score: bool = False) -> None:
        plan = plans.blocks_plan(todo, self.blocks, self.table, self.calls.stacks, score)
        if not self._read:
            self._read_from = time.perf_counter()
        scores = self.calls.prefill(plan)
        if scores is not None:
            for part, blocks in enumerate(todo):
                for k, (prompt, i) in enumerate(blocks):
                    c, n = part * (self.blocks // self.parts) + k, len(prompt.blocks[i].tokens)
                    prompt.scores[i] = [x[c, :n].tolist() for x in scores]
        self.counts["prefills"] += 1
        for prompt, i in itertools.chain(*todo):
            self.counts["prefilled_tokens"] += len(prompt.blocks[i].tokens)
            self._tokens[prompt.request.tenant] += len(prompt.blocks[i].tokens)
            self._read[prompt.request.tenant, prompt.request.revision] += len(
                prompt.blocks[i].tokens
            )

    def _decode(self, running: list[tuple[SampleState, int]], rows: int) -> None:
        plan, places = plans.rows_plan(
            running, rows, self.parts, self.table, self.base.cfg.vocab_size, self.calls.stacks
        )
        steps = 1 if any(sample.matcher is not None for sample, _ in running) else self.steps
        if self._schedule.waiting or self._schedule.swapped:
            # Stop when the first row ends, so that a waiting sample gets its row. When training
            # runs between dispatches, stop when half of the rows end: 16 rows that started one
            # after another would otherwise draw one token per dispatch, and each dispatch would
            # wait for a training slice.
            left = sorted(sample.limit - sample.own for sample, _ in running)
            steps = min(
                steps,
                left[
                    len(left) // 2
                    if self._coscheduled is not None and self._coscheduled.waiting
                    else 0
                ],
            )
        began = time.perf_counter()
        drawn = self.calls.decode(plan, steps)
        seconds, tokens = time.perf_counter() - began, Counter[tuple[str, str | None]]()
        self.counts["decodes"] += 1
        self.counts["drawn_tokens"] += int(drawn.count.sum())
        for (sample, _), r in zip(running, places):
            n, kept = int(drawn.count[r]), sample.prompt.request.top_logprobs
            self._tokens[sample.prompt.request.tenant] += DRAWN * n
            tokens[sample.prompt.request.tenant, sample.prompt.request.revision] += n
            new = drawn.tokens[r, :n].tolist()
            sample.tokens += new
            sample.logprobs += drawn.logprobs[r, :n].tolist()
            sample.drawn_logprobs += drawn.drawn_logprobs[r, :n].tolist()
            top = None
            if kept:
                pairs = zip(
                    drawn.top_ids[r, :n, :kept].tolist(), drawn.top_logprobs[r, :n, :kept].tolist()
                )
                top = [list(zip(*pair)) for pair in pairs]
                sample.top += top
            sample.owner.stream.put(
                Piece(sample.number, new, sample.logprobs[len(sample.logprobs) - n :], top)
            )
        if self._coscheduled is not None and running:
            self._coscheduled.took("decode", seconds, tokens)
        failed: dict[_ActiveRequest, UserError] = {}
        for (sample, _), r in zip(running, places):
            if sample.matcher is not None and not drawn.stopped[r]:
                sample.matcher.consume_token(sample.tokens[-1])
            # An invalid grammar state yields a mask that allows everything.
            if sample.matcher is not None and (error := sample.matcher.get_error()):
                failed[sample.owner] = UserError(
                    f"the grammar failed during decoding: {reason_of(error)}; use a simpler grammar"
                )
                continue
            end, text = (None, None) if sample.stops is None else sample.stops.look(sample.tokens)
            if end is not None:
                sample.tokens, sample.text = sample.tokens[:end], text
                self._finish(sample, "stop")
            elif drawn.stopped[r] or (sample.matcher is not None and sample.matcher.is_stopped()):
                self._finish(sample, "stop")
            elif sample.own >= sample.limit:
                self._finish(sample, "length")
        for job, error in failed.items():
            self._clear([job], error)

    def _preempt(self, sample: SampleState) -> SwappedPages:
        self.counts["preempted"] += 1
        return self.cache.swap_out(sample.prompt.part, sample.pages[: pages_for(sample.own, PAGE)])

    def _restore(self, sample: SampleState) -> None:
        if sample.swapped is not None:
            self.cache.swap_in(
                sample.swapped, sample.prompt.part, sample.pages[: pages_for(sample.own, PAGE)]
            )
            sample.swapped = None

    # -- end of requests

    def _finish(self, sample: SampleState, why: str) -> None:
        job: _ActiveRequest = sample.owner
        if self.keep_routes and sample.tokens and sample in self._schedule.running:
            self._keep_routes(sample)
        # Weights without a digest or version cannot be named by a later call.
        if (
            self.reuse_decoded
            and sample in self._schedule.running
            and not isinstance(job.prompt.key[1], tuple)
        ):
            self._schedule.extend(sample, self.cache.move)
        self._take_out(sample)
        sample.finish = why
        if self.decode is not None and sample.text is None:
            sample.text = text_behind(
                self.decode, context_of(self.decode, job.prompt.request.prompt), sample.tokens
            )
        if all(s.finish is not None for s in job.samples):
            self.counts["reused_tokens"] += job.prompt.reused or 0
            if self._thread is not None and isinstance(job.prompt.key[1], tuple):
                self._forget(job)
            self._remove(job)
            self._release_lease(job)
            job.stream.end([completion(s) for s in job.samples])

    def _remove(self, job: _ActiveRequest) -> None:
        self._jobs.remove(job)
        if self._coscheduled is not None:
            self._coscheduled.ended(job.prompt.request.tenant)

    def _take_out(self, sample: SampleState) -> None:
        if sample.swapped is not None:
            self.cache.discard(sample.swapped)
        self._schedule.finish(sample)

    def _keep_routes(self, sample: SampleState) -> None:
        """Reads the expert ids of a sample's tokens and, once, of its prompt."""
        prompt = sample.prompt
        sample.routes = self.cache.routes(prompt.part, sample.pages, len(sample.tokens))
        if prompt.routes is None:
            prompt.routes = self.cache.routes(
                prompt.part, [block.page for block in prompt.blocks], prompt.length
            )

    def _clear(self, jobs: Sequence[_ActiveRequest], error: BaseException | None = None) -> None:
        """Removes unfinished requests from the engine, and drops cached prompts that no later
        request can name.
        """
        for job in jobs:
            if job in self._jobs:
                self._remove(job)
                for sample in job.samples:
                    if sample.finish is None:
                        self._take_out(sample)
            if not job.stream.done:
                self._release_lease(job)
                job.stream.end(error or UserError("generate ended before this request did"))
            if isinstance(job.prompt.key[1], tuple):
                self._forget(job)

    def _forget(self, job: _ActiveRequest) -> None:
        for pages in self._schedule.pages:
            pages.forget(job.prompt.key)

    def _release_lease(self, job: _ActiveRequest) -> None:
        lease, job.lease = job.lease, None
        if lease is not None and not lease.cancel() and lease.exception() is None:
            lease.result().release()

    def _ensure_cache(self, requests: Sequence[Request] | None) -> None:
        """Makes the cache large enough for ``requests``, or as large as possible."""
        if self.cache.ensure_capacity(requests):
            self._schedule = Scheduler(
                [PagePool(self.cache.pages, PAGE) for _ in range(self.parts)],
                self.rows[-1] // self.parts,
            )
