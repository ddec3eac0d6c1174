"""The sampling engine: continuous batching over pages, any mixture of adapters, the same bits in
any company.

    generate(requests)              runs the loop in the caller's thread until all are answered
    with engine.serving(...):       runs it in a thread of its own
        engine.submit(request)      from any thread: a stream of tokens, with a result, to be
        cancelled

One turn of the loop: adapters that have arrived are written into slots; waiting samples get rows
and pages; blocks of prompts are prefilled; all rows decode some steps. ``schedule.py`` decides,
``plans.py`` says it to the device, ``device.py`` does it.

Of several processes over one mesh the first runs the loop, and tells the others each call of the
devices before it makes it (``calls.py``): one schedule, one clock, and requests that come, are
cancelled or wait for adapters when they do. ``generate`` and ``warm`` are called in all of them and
return the same; while process 0 serves, the others ``follow``.

A request and its seed give the same tokens and log-probabilities, bit for bit, at one number of
rows, whatever the other rows, their order, the pages, hits of the prompts' cache (but with
``reuse_decoded``), when its blocks are prefilled, preemption and the steps of a dispatch. Programs
of different numbers of rows may round differently (on a CPU products of 2 to 32 rows sum alike); an
engine with one entry in ``rows`` has but one. Which of them runs depends on how many rows there are
and, while programs are compiled beside the loop (``compiled``), on which are ready.
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
from mint_jax.lora.tree import Slot, Stacks
from mint_jax.models.base import Base
from mint_jax.models.paged import PAGE
from mint_jax.rollout import device, plans
from mint_jax.rollout import request as requests_
from mint_jax.rollout.answers import completion
from mint_jax.rollout.cache import Cache, Kept
from mint_jax.rollout.calls import Calls, Obeys
from mint_jax.rollout.detokenize import context_of, text_behind
from mint_jax.rollout.device import STEPS
from mint_jax.rollout.grammar import Grammars, reason_of
from mint_jax.rollout.pages import Pages, pages_for, require_fit
from mint_jax.rollout.request import Completion, Request
from mint_jax.rollout.schedule import Prompt, Sample, Schedule, longest_table, pages_needed
from mint_jax.rollout.stops import Stops
from mint_jax.rollout.stream import Piece, Stream

ROWS = (8, 32, 128)  # shapes of decoding: the smallest that holds the rows there are is run
# Blocks of a prefill, in pages: one number, for programs of different ones round differently, and
# how many blocks wait at once is a matter of company (SmolLM2's keys of its second layer differ by
# 5e-6 between 4 and 16). On a CPU 128 tokens: 512 at once would take
# 0.8 of their time, and 3.2 times as long for a prompt of 30.
CPU_BLOCKS, BLOCKS = 4, 16
# what a token that is drawn counts beside one that is prefilled, where tenants share (arXiv
# 2401.00588, section 3.1)
DRAWN = 2
# calls of prefill between two dispatches while the engine serves: 512 tokens on a CPU, 2,048
# elsewhere
READS = 4
# all are shown from the start, as 0
COUNTS = ("prefills", "prefilled_tokens", "reused_tokens", "decodes", "drawn_tokens", "preempted")
# how long new requests may go unseen while all that are there wait for adapters or programs
LOOK_S = 0.02


class Lease(Protocol):
    """A hold on a slot."""

    slot: Slot

    def release(self) -> None: ...


class Residents(Protocol):
    """What is asked of residency: see ``residency.Residency``."""

    @property
    def stacks(self) -> Stacks: ...

    def acquire(self, digest: str, tenant: str) -> "Future[Any]": ...

    def commit_ready(self, budget_bytes: int | None = None) -> int: ...

    def wait_ready(self, pending: Sequence[Future], timeout: float = 1.0) -> bool: ...


class Beside(Protocol):
    """What shares the devices, and decides whose samples come first: see ``service.loop.Loop``."""

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
class _Job:
    """One request in the engine."""

    stream: Stream
    prompt: Prompt
    samples: list[Sample] = dataclasses.field(default_factory=list)
    lease: "Future[Any] | None" = None
    matcher: Any = None


class Engine:
    """See the module.

    Args:
        base: the resident base.
        decode: text of token ids, for stop strings and ``Completion.text``; None without a
            tokenizer.
        max_rows: rows decoded together at most.
        rows: the numbers of rows that are programs, instead of those of ``ROWS`` below ``max_rows``
            and that itself.
        keep_routes: record the experts that every token visits, for replay in training (R3).
        cache_bytes: of the cache, over all devices; None: see ``cache.CACHE_BYTES``.
        steps: tokens of a row between two looks of the host, 1 to STEPS.
        reuse_decoded: prompts may begin with what was drawn before, a conversation's turns say, and
            are not read again as far as the cache has them. What decoding wrote differs in the last
            bits from what prefill would write, and so do log-probabilities behind it (by at most
            2e-5 in float32, which ``tests/rollout/decoded_test.py`` holds): they depend on what was
            asked before.
        keep_cache: False: the cache's memory is free between two calls of ``generate``, and what
            prompts left there is gone; for those who train in between, with weights that nobody
            samples again. Beside a step of 8 policies over SmolLM2 it was 94 MB.

    Attributes:
        counts: what was done so far: tokens prefilled, reused and drawn, dispatches, samples
            preempted.
        compiled: while it is compiled what ``programs`` lists, which of these may be run; None:
            any, compiled where it is called.

    Raises:
        UserError: ``keep_routes`` with a base that has no experts; sizes out of their range.
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
            raise UserError(
                f"replay asks for routes, but {base.name} has no experts: switch it off"
            )
        if not 1 <= steps <= STEPS:
            raise UserError(f"steps is {steps}; expected 1 to {STEPS}")
        if max_rows < 1 or (rows is not None and (not rows or min(rows) < 1)):
            raise UserError(
                f"max_rows is {max_rows} and rows {rows}; expected numbers of rows, at least 1"
            )
        self.base, self.decode, self.keep_routes, self.steps = base, decode, keep_routes, steps
        self.reuse_decoded, self.keep_cache = reuse_decoded, keep_cache
        self.parts = device.page_parts(base.cfg, base.mesh)
        even = math.lcm(self.parts, base.row_multiple)
        wanted = rows if rows is not None else (*(r for r in ROWS if r < max_rows), max_rows)
        # One row alone on a device, with others on other devices, would be another class of
        # products; a program of one row has no others.
        least = 2 * base.row_multiple if base.row_multiple > 1 else 1
        self.rows = tuple(sorted({-(-max(r, least) // even) * even for r in wanted}))
        wanted_blocks = CPU_BLOCKS if base.mesh.devices.flat[0].platform == "cpu" else BLOCKS
        self.blocks = -(-wanted_blocks // even) * even
        self.table = longest_table(base.cfg.context)
        self.counts: Counter[str] = Counter(dict.fromkeys(COUNTS, 0))
        self._grammars = Grammars(base)
        self.calls = Calls(base, keep_routes, [*self.rows, self.blocks, self.table])
        self.cache = Cache(base, self.rows[-1], self.calls, cache_bytes)
        self._schedule = Schedule([Pages(0, PAGE)] * self.parts, 0)
        self.compiled: Programs | None = None
        self._residency: Residents | None = None
        self._beside: Beside | None = None
        self._tokens: Counter[str] = Counter()  # of each tenant in this turn
        # tokens prefilled in this turn, of each tenant and revision
        self._read: Counter[tuple[str, str | None]] = Counter()
        self._read_from = 0.0  # when the first of them went to the devices
        self._commit_bytes: int | None = None
        self._jobs: list[_Job] = []
        self._inbox: list[_Job] = []
        self._wake = threading.Condition()
        self._running = threading.Lock()  # one thread at a time drives the device
        self._thread: threading.Thread | None = None
        self._stopping = False
        # a count is one step: any thread may take a number
        self._calls, self._asked = 0, itertools.count()

    # -- the doors

    def check(self, request: Request, stacks: Stacks) -> None:
        """Refuses a request that cannot be sampled; see ``request.check``.

        Raises:
            UserError: also where the cache cannot hold one sample.
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
        """Samples every request; results are in the order of the requests, ``n`` completions each.

        Args:
            stacks: resident adapters, by bucket rank.
            between_steps: called before each turn of the loop, while the device has nothing under
                way: the place to write other slots of ``stacks`` than those that requests name. Of
                several processes, in the first.
            progress: called with (requests done, requests) as they end; of several processes, in
                the others once all have.
            finished: called with the completions of requests that ended, by their indices; as
                ``progress``.

        Raises:
            UserError: see ``check``: for all requests before the first is run. While the engine
                serves, also what ``submit`` raises; ``stacks`` and ``between_steps`` are then the
                loop's own.
        """
        # in every process; a pool would be made for none (94 MB and 18 ms in GRPO of eight policies
        # on SmolLM2)
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
            self._hold(requests)
            try:
                # The largest limits first (Graham 1969, "longest processing time"): what is begun
                # last is then done soon.
                for job in sorted(jobs, key=lambda job: -job.prompt.request.max_tokens):
                    self._begin(job)
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
        """``generate`` through the loop that serves."""
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
        beside: Beside | None = None,
    ) -> Iterator["Engine"]:
        """Runs the loop in a thread of its own, for ``submit``, until the block ends; what has not
        ended then is cancelled.

        Of several processes the first serves; the others call ``follow`` meanwhile.

        Args:
            stacks: adapters that are there; or
            residency: brings those that requests name by ``revision``, while others decode.
            commit_bytes: bytes written into slots between two turns, about; None is all that is
                there.
            beside: has a turn of its own between two of the loop's, in the loop's thread; ``wake``
                tells that it has something to do.

        Raises:
            UserError: this is not process 0.
        """
        if not multihost.is_main():
            raise UserError(
                f"process {multihost.index()} cannot serve, process 0 does: call follow here"
            )
        with self._driving(residency.stacks if residency is not None else stacks or {}):
            self._residency, self._commit_bytes, self._beside, self._stopping = (
                residency,
                commit_bytes,
                beside,
                False,
            )
            self._hold(None)
            self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)
            self._thread.start()
            try:
                yield self
            finally:
                with self._wake:
                    self._stopping = True
                    self._wake.notify_all()
                self._thread.join()
                self._thread, self._residency, self._beside = None, None, None

    @property
    def serves(self) -> bool:
        """Whether the loop runs, and takes requests."""
        return self._thread is not None and not self._stopping

    @property
    def able(self) -> bool:
        """Whether what every request needs is compiled; from any thread."""
        return bool(self._usable())

    def in_flight(self) -> Counter[tuple[str, str | None]]:
        """Requests that have not ended, by tenant and revision; from any thread."""
        return Counter(
            (job.stream.request.tenant, job.stream.request.revision)
            for job in [*self._jobs, *self._inbox]
        )

    def state(self) -> dict[str, Any]:
        """How much is under way and how much there is room for; from any thread."""
        schedule = self._schedule
        rows = {name: len(getattr(schedule, name)) for name in ("running", "waiting", "swapped")}
        pages = {
            name: sum(getattr(part, name) for part in schedule.pages)
            for name in ("count", "available", "cached")
        }
        return {"rows": rows | {"most": self.rows[-1]}, "pages": pages}

    def wake(self) -> None:
        """Tells the loop to look at what is beside it; from any thread."""
        with self._wake:
            self._wake.notify_all()

    def submit(self, request: Request, deadline_s: float | None = None) -> Stream:
        """Asks for a request while the engine serves; from any thread.

        Args:
            deadline_s: seconds after which it is cancelled.

        Raises:
            UserError: see ``check``; or the engine does not serve.
            QueueFull: residency's, with the time after which to ask again.
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
                self._give_back(job)
                raise UserError("the engine is being stopped: ask another one")
            self._inbox.append(job)
            self._wake.notify_all()
        return job.stream

    def follow(self, stacks: Stacks | None = None, residency: Obeys | None = None) -> None:
        """Does what process 0 tells as long as it serves; for every other process, with the same
        arguments as ``serving`` there.

        Args:
            residency: this process's side of it, ``residency.others.Others``.

        Raises:
            UserError: serving failed in process 0 by a mistake, or this is process 0.
            RuntimeError: it failed otherwise, or process 0 is gone.
        """
        if multihost.is_main():
            raise UserError("process 0 leads: call serving here, and follow in the others")
        self._follow(residency.stacks if residency is not None else stacks or {}, residency)

    def _follow(self, stacks: Stacks, residency: Obeys | None = None) -> list[list[Completion]]:
        with self._driving(stacks):
            return self.calls.follow(residency)

    def warm(
        self, stacks: Stacks | None = None, progress: Callable[[str, int, int], None] | None = None
    ) -> None:
        """Makes the cache as large as it may be, and compiles every program, so that no request
        waits for one.

        Args:
            progress: called with (what, done, in all) before each; of several processes, in the
                first.
        """
        stacks = {} if stacks is None else stacks
        if multihost.is_main():
            with self._driving(stacks):
                self._hold(None)
        else:
            self._follow(stacks)
        for i, program in enumerate(todo := self.programs(stacks)):
            if progress is not None and multihost.is_main():
                progress(program.name, i, len(todo))
            program.build()

    def programs(self, stacks: Stacks) -> list[Program]:
        """Every program of an engine that serves over these stacks."""
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
                held = jax.eval_shape(functools.partial(device.read_pages, cfg=cfg), pool, ids)
            held = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), held)
            lowered(device.write_pages, pool, ids, held)
            if self.keep_routes:
                lowered(device.read_pages, {"routes": pool["moe"]["routes"]}, ids)
            if self.reuse_decoded:
                lowered(device.move_pages, pool, device.Moves(*[ids] * 5))  # type: ignore[arg-type]

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
                "the engine is at work in another thread: submit to it there, or make an engine of"
                " your own"
            )
        try:
            self.calls.stacks = stacks
            with jax.set_mesh(self.base.mesh):
                if multihost.is_main():
                    self.calls.begin(answered)
                yield
                self.calls.end()
        except BaseException as error:
            self.calls.drop()  # a call that failed may have taken the pool along
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
                            or (self._beside is not None and self._beside.waiting)
                        ):
                            self._wake.wait()
                        if self._stopping:
                            break
                        new, self._inbox = self._inbox, []
                    for job in new:
                        self._begin(job)
                    worked = (
                        self._turn() if self._beside is None else self._turn_beside(self._beside)
                    )
                    # nothing to do but to wait for adapters or programs
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
            left, error or UserError("the engine was stopped before this request ended: ask again")
        )

    def _turn_beside(self, beside: Beside) -> bool:
        """One turn, and one of what is beside it."""
        self._schedule.prefer(beside.order(self._schedule.tenants))
        began = time.perf_counter()
        self._tokens.clear()
        worked = bool(self._jobs) and self._turn()
        if self._tokens:
            beside.spent(time.perf_counter() - began, self._tokens)
        return beside.turn(bool(self._schedule.running)) or worked

    def _job(self, request: Request, stream: Stream) -> _Job:
        asked = requests_.stopping_by_id(request, self.base)
        if request.revision is not None:
            version: Any = request.revision
        elif request.adapter is None:
            version = None
        elif request.version is not None:
            version = request.version
        else:
            # a slot whose weights have no name, and may be others for the next call: its prompts
            # are shared within this one
            version = (
                self._calls if self._thread is None else next(self._asked),
                request.adapter,
                self._thread is None,
            )
        return _Job(
            stream,
            Prompt(asked, (request.tenant, version)),
            matcher=self._grammars.matcher(request),
        )

    def _begin(self, job: _Job) -> None:
        self._jobs.append(job)
        if self._beside is not None:
            self._beside.began(job.prompt.request.tenant)
        job.samples = self._schedule.add(job.prompt, job)
        for sample in job.samples:
            sample.matcher = None if job.matcher is None else job.matcher.deep_copy()
            if job.prompt.request.stop:
                assert self.decode is not None, "checked at the door"
                sample.stops = Stops(
                    self.decode, job.prompt.request.stop, job.prompt.request.prompt
                )

    def _turn(self) -> bool:
        """One turn of the loop; whether anything was done."""
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
        # Prompts are read before rows decode: a step costs the same with rows that are idle. While
        # the engine serves, somebody looks at the rows that decode, and long prompts are read
        # beside them.
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
        # their seconds must not be told as those of rows that decode next
        if self._read and self._beside is not None:
            self.calls.settle()
            self._beside.took("prefill", time.perf_counter() - self._read_from, self._read)
        rows = self._schedule.to_decode(self.steps, self._preempt)
        if rows:
            most = max(Counter(s.prompt.part for s, _ in rows).values())
            self._decode(rows, next(r for r in usable if r >= self.parts * most))
        return bool(reads or rows or len(self._schedule.running) != before)

    def _usable(self) -> list[int]:
        """The numbers of rows that can be decoded; none before all that any request needs is
        compiled.
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

    def _loaded(self, sample: Sample) -> bool:
        """Whether a sample's adapter is in a slot, which it fills in, and what it needs is
        compiled.
        """
        job: _Job = sample.owner
        if (
            self.compiled is not None
            and sample.prompt.scored_from is not None
            and not self.compiled.want("scores")
        ):
            return False
        if job.lease is None:
            return True
        # a failure is told at the next turn
        if not job.lease.done() or job.lease.exception() is not None:
            return False
        if job.prompt.request.adapter is None:
            job.prompt.request = dataclasses.replace(
                job.prompt.request, adapter=job.lease.result().slot
            )
        return True

    # -- calls of the device

    def _prefill(self, todo: list[list[tuple[Prompt, int]]], score: bool = False) -> None:
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

    def _decode(self, running: list[tuple[Sample, int]], rows: int) -> None:
        plan, places = plans.rows_plan(
            running, rows, self.parts, self.table, self.base.cfg.vocab_size, self.calls.stacks
        )
        steps = 1 if any(sample.matcher is not None for sample, _ in running) else self.steps
        if self._schedule.waiting or self._schedule.swapped:
            # Someone can have the row that is the first to reach its limit. Where training follows
            # each dispatch, half of the rows: of 16 rows that began one after another each dispatch
            # would draw a token a row, and then wait for a slice.
            left = sorted(sample.limit - sample.own for sample, _ in running)
            steps = min(
                steps,
                left[len(left) // 2 if self._beside is not None and self._beside.waiting else 0],
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
        if self._beside is not None and running:
            self._beside.took("decode", seconds, tokens)
        failed: dict[_Job, UserError] = {}
        for (sample, _), r in zip(running, places):
            if sample.matcher is not None and not drawn.stopped[r]:
                sample.matcher.consume_token(sample.tokens[-1])
            # its last mask may have been no mask
            if sample.matcher is not None and (error := sample.matcher.get_error()):
                failed[sample.owner] = UserError(
                    f"its grammar cannot be followed any further: {reason_of(error)}; give a"
                    " simpler one"
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

    def _preempt(self, sample: Sample) -> Kept:
        self.counts["preempted"] += 1
        return self.cache.keep(sample.prompt.part, sample.pages[: pages_for(sample.own, PAGE)])

    def _restore(self, sample: Sample) -> None:
        if sample.swapped is not None:
            self.cache.restore(
                sample.swapped, sample.prompt.part, sample.pages[: pages_for(sample.own, PAGE)]
            )
            sample.swapped = None

    # -- ends

    def _finish(self, sample: Sample, why: str) -> None:
        job: _Job = sample.owner
        if self.keep_routes and sample.tokens and sample in self._schedule.running:
            self._keep_routes(sample)
        # Weights without a name are those of this call, and nobody asks for them later.
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
            self._give_back(job)
            job.stream.end([completion(s) for s in job.samples])

    def _remove(self, job: _Job) -> None:
        self._jobs.remove(job)
        if self._beside is not None:
            self._beside.ended(job.prompt.request.tenant)

    def _take_out(self, sample: Sample) -> None:
        if sample.swapped is not None:
            self.cache.forget(sample.swapped)
        self._schedule.finish(sample)

    def _keep_routes(self, sample: Sample) -> None:
        """Reads the experts that a sample's tokens visited, and once those of its prompt."""
        prompt = sample.prompt
        sample.routes = self.cache.routes(prompt.part, sample.pages, len(sample.tokens))
        if prompt.routes is None:
            prompt.routes = self.cache.routes(
                prompt.part, [block.page for block in prompt.blocks], prompt.length
            )

    def _clear(self, jobs: Sequence[_Job], error: BaseException | None = None) -> None:
        """Takes jobs that have not ended out of the engine, and forgets the prompts that nobody can
        ask for again.
        """
        for job in jobs:
            if job in self._jobs:
                self._remove(job)
                for sample in job.samples:
                    if sample.finish is None:
                        self._take_out(sample)
            if not job.stream.done:
                self._give_back(job)
                job.stream.end(error or UserError("the call was ended before this request was"))
            if isinstance(job.prompt.key[1], tuple):
                self._forget(job)

    def _forget(self, job: _Job) -> None:
        for pages in self._schedule.pages:
            pages.forget(job.prompt.key)

    def _give_back(self, job: _Job) -> None:
        lease, job.lease = job.lease, None
        if lease is not None and not lease.cancel() and lease.exception() is None:
            lease.result().release()

    def _hold(self, requests: Sequence[Request] | None) -> None:
        """Makes the cache large enough for requests, or as large as it may be."""
        if self.cache.hold(requests):
            self._schedule = Schedule(
                [Pages(self.cache.pages, PAGE) for _ in range(self.parts)],
                self.rows[-1] // self.parts,
            )
