"""The requests in progress and one turn of the engine's loop over them.

A turn writes loaded adapters into slots, gives waiting samples rows and pages, prefills blocks of
prompts, and decodes all rows for some steps. ``scheduler.py`` decides, ``plans.py`` turns decisions
into arrays, ``calls.py`` runs them on the devices.
"""

import dataclasses
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal, Protocol

from mint_jax.compiling import Programs
from mint_jax.errors import UserError
from mint_jax.lora.tree import Stacks
from mint_jax.models.base import Base
from mint_jax.models.paged import PAGE
from mint_jax.rollout import plans
from mint_jax.rollout import request as requests_
from mint_jax.rollout.calls import DeviceCalls
from mint_jax.rollout.detokenize import Stops, context_of, text_behind
from mint_jax.rollout.drafts import Drafts
from mint_jax.rollout.grammar import Grammars, reason_of
from mint_jax.rollout.pages import PagePool
from mint_jax.rollout.request import Request
from mint_jax.rollout.samples import CachedPrompt, Row, SampleState, longest_table
from mint_jax.rollout.scheduler import Scheduler
from mint_jax.rollout.stream import Stream

# Prefill calls between two decode dispatches while serving: 512 tokens on a CPU, 2,048 elsewhere.
READS = 4
# Counters that are reported as 0 from the start.
COUNTS = ("prefills", "prefilled_tokens", "reused_tokens", "decodes", "drawn_tokens", "preempted")
# Most steps of a dispatch without drafts, in an engine that looks for them.
LOOK_STEPS = 4


class Residents(Protocol):
    """The part of ``residency.Residency`` that the engine uses."""

    @property
    def stacks(self) -> Stacks: ...
    def acquire(self, digest: str, tenant: str) -> "Future[Any]": ...
    def commit_ready(self, budget_bytes: int | None = None) -> int: ...
    def wait_ready(self, pending: Sequence[Future], timeout: float = 1.0) -> bool: ...


class Coscheduled(Protocol):
    """Work that shares the devices with the engine and orders its tenants."""

    @property
    def waiting(self) -> int: ...
    def turn(self, decoding: bool) -> bool: ...
    def began(self, tenant: str) -> None: ...
    def ended(self, tenant: str) -> None: ...
    def order(self, tenants: Iterable[str]) -> list[str]: ...
    def took(
        self,
        kind: Literal["prefill", "decode"],
        seconds: float,
        tokens: Mapping[tuple[str, str | None], int],
    ) -> None: ...


@dataclasses.dataclass(eq=False)
class ActiveRequest:
    """A request that has not ended."""

    stream: Stream
    prompt: CachedPrompt
    samples: list[SampleState] = dataclasses.field(default_factory=list)
    lease: "Future[Any] | None" = None
    matcher: Any = None

    @property
    def is_unnamed(self) -> bool:
        """True if its weights have neither a digest nor a version."""
        return isinstance(self.prompt.key[1], tuple)


class ActiveRequests:
    """Requests that have not ended, and the turns that serve them, in one thread. Settings and
    attributes are those of ``Engine`` and ``Engine.serving``.
    """

    def __init__(
        self,
        base: Base,
        calls: DeviceCalls,
        rows: tuple[int, ...],
        blocks: int,
        decode: Callable[[list[int]], str] | None,
        steps: int,
        keep_routes: bool,
        reuse_decoded: bool,
        drafts: Drafts,
    ):
        self.base, self.calls, self.parts = base, calls, calls.parts
        self.rows, self.blocks, self.table = rows, blocks, longest_table(base.cfg.context)
        self.decode, self.steps, self.keep_routes = decode, steps, keep_routes
        self.reuse_decoded, self.drafts = reuse_decoded, drafts
        self.counts: Counter[str] = Counter(dict.fromkeys(COUNTS, 0))
        self.grammars = Grammars(base)
        self.schedule = Scheduler([PagePool(0, PAGE)] * self.parts, 0)
        self.jobs: list[ActiveRequest] = []
        self.compiled: Programs | None = None
        self.residency: Residents | None = None
        self.commit_bytes: int | None = None
        self.coscheduled: Coscheduled | None = None
        self.is_serving, self.call = False, 0
        self._submitted = itertools.count()  # ``next`` is atomic, so any thread may take a number
        # Tokens prefilled in this turn, by tenant and revision.
        self._read: Counter[tuple[str, str | None]] = Counter()
        self._read_from = 0.0  # time of the turn's first prefill call

    def job(self, request: Request, stream: Stream) -> ActiveRequest:
        """Returns a request in its initial state; from any thread."""
        version: Any = request.revision
        if version is None and request.adapter is not None:
            version = request.version
            if version is None:
                # The slot's weights have no name and may change before the next call, so its
                # prompts are shared within this call only.
                call = next(self._submitted) if self.is_serving else self.call
                version = call, request.adapter, self.is_serving
        by_id = requests_.stopping_by_id(request, self.base)
        prompt = CachedPrompt(by_id, (request.tenant, version))
        return ActiveRequest(stream, prompt, matcher=self.grammars.matcher(request))

    def start(self, job: ActiveRequest) -> None:
        self.jobs.append(job)
        request = job.prompt.request
        if self.coscheduled is not None:
            self.coscheduled.began(request.tenant)
        self.drafts.began(job.prompt)
        job.samples = self.schedule.add(job.prompt, job)
        for sample in job.samples:
            sample.matcher = None if job.matcher is None else job.matcher.deep_copy()
            if request.stop:
                assert self.decode is not None, "checked at the door"
                sample.stops = Stops(self.decode, request.stop, request.prompt)

    def turn(self) -> bool:
        """Runs one turn, and one of the coscheduled work; returns True if anything was done."""
        if (coscheduled := self.coscheduled) is None:
            return self._work()
        self.schedule.prefer(coscheduled.order(self.schedule.tenants))
        worked = bool(self.jobs) and self._work()
        return coscheduled.turn(bool(self.schedule.running)) or worked

    def _work(self) -> bool:
        self._read.clear()
        self._drop_cancelled()
        if self.residency is not None:
            self.residency.commit_ready(self.commit_bytes)
        if not (usable := self.usable_rows()):
            return False
        self.schedule.rows = usable[-1] // self.parts
        before = len(self.schedule.running)
        self.schedule.admit(self._restore, self.steps, self._loaded)
        reads = 0
        # Prefill comes before decoding, because a step costs the same with idle rows. While
        # serving, READS bounds it, so that a long prompt does not stall the rows that decode.
        while any(todo := self.schedule.to_prefill(self.blocks // self.parts, loaded=self._loaded)):
            self._prefill(todo)
            reads += 1
            if self.is_serving and reads == READS:
                break
        while any(todo := self.schedule.to_prefill(self.blocks // self.parts, scored=True)):
            self._prefill(todo, score=True)
            reads += 1
        # Otherwise the asynchronous prefill would be timed as part of the next decode.
        if self._read and self.coscheduled is not None:
            self.calls.block_until_ready()
            self.coscheduled.took("prefill", time.perf_counter() - self._read_from, self._read)
        rows = self.schedule.to_decode(self.steps, self._preempt)
        if rows:
            drafted = self.drafts.rows(rows, self.schedule.rows)
            most = max(Counter(row.sample.prompt.part for row in rows + drafted).values())
            self._decode(rows, drafted, next(r for r in usable if r >= self.parts * most))
        return bool(reads or rows or len(self.schedule.running) != before)

    def usable_rows(self) -> list[int]:
        """Returns the row counts whose decode program is compiled, once requests can run."""
        if self.compiled is None:
            return list(self.rows)
        if not (self.compiled.has("prefill") and self.compiled.has("pages")):
            return []
        return [r for r in self.rows if self.compiled.has(("decode", r))]

    def _drop_cancelled(self) -> None:
        for job in list(self.jobs):
            lease = job.lease
            if lease is not None and lease.done() and (error := lease.exception()) is not None:
                self.clear([job], error)
            elif job.stream.cancelled:
                for sample in job.samples:
                    if sample.finish is None:
                        self._finish(sample, "cancelled")

    def _loaded(self, sample: SampleState) -> bool:
        """Returns True if a sample can run, and then writes its adapter's slot into the request."""
        prompt, lease = sample.prompt, sample.owner.lease
        compiled, is_scored = self.compiled, prompt.scored_from is not None
        if is_scored and compiled is not None and not compiled.want("scores"):
            return False
        if lease is None:
            return True
        # A failed load is reported in the next turn, by _drop_cancelled.
        if not lease.done() or lease.exception() is not None:
            return False
        if prompt.request.adapter is None:
            prompt.request = dataclasses.replace(prompt.request, adapter=lease.result().slot)
        return True

    def _prefill(self, todo: list[list[tuple[CachedPrompt, int]]], score: bool = False) -> None:
        sizes = self.blocks, self.table, self.calls.stacks
        plan = plans.blocks_plan(todo, *sizes, score, self.calls.kinds)
        if not self._read:
            self._read_from = time.perf_counter()
        scores = self.calls.prefill(plan)
        self.counts["prefills"] += 1
        for part, blocks in enumerate(todo):
            for c, (prompt, i) in enumerate(blocks, part * (self.blocks // self.parts)):
                request, count = prompt.request, len(prompt.blocks[i].tokens)
                if scores is not None:
                    prompt.scores[i] = [x[c, :count].tolist() for x in scores]
                self.counts["prefilled_tokens"] += count
                self._read[request.tenant, request.revision] += count

    def _decode(self, running: list[Row], drafted: list[Row], rows: int) -> None:
        every = running + drafted
        plan, places = plans.rows_plan(
            *(every, rows, self.parts, self.table, self.base.cfg.vocab_size, self.calls.stacks),
            self.calls.kinds,
        )
        steps = min(self.steps, LOOK_STEPS) if self.drafts.most else self.steps
        if drafted or any(sample.matcher is not None for sample, *_ in running):
            steps = 1
        if self.schedule.waiting or self.schedule.swapped:
            # Stop when the first row ends, so that a waiting sample gets its row. When training
            # runs between dispatches, stop when half of the rows end: 16 rows that started one
            # after another would otherwise draw one token per dispatch, and each dispatch would
            # wait for a training slice.
            left = sorted(sample.limit - sample.own for sample, *_ in running)
            trains = self.coscheduled is not None and self.coscheduled.waiting
            steps = min(steps, left[len(left) // 2 if trains else 0])
        began = time.perf_counter()
        drawn = self.calls.decode(plan, steps)
        seconds, tokens = time.perf_counter() - began, Counter[tuple[str, str | None]]()
        self.counts["decodes"] += 1
        began_at = {sample: sample.own for sample, *_ in running}
        ended = dict.fromkeys(began_at, False)
        for row, r in zip(every, places):  # a sample's rows are in the order of their drafts
            sample, request = row.sample, row.sample.prompt.request
            if ended[sample] or tuple(sample.tokens[began_at[sample] :]) != row.drafts:
                continue
            piece, ended[sample] = sample.append(drawn, r), bool(drawn.stopped[r])
            tokens[request.tenant, request.revision] += len(piece.tokens)
            sample.owner.stream.put(piece)
        self.counts["drawn_tokens"] += sum(tokens.values())
        for sample, begin in began_at.items():
            self.counts.update(self.drafts.drew(sample, sample.own - begin))
        if self.coscheduled is not None and running:
            self.coscheduled.took("decode", seconds, tokens)
        failed: dict[ActiveRequest, UserError] = {}
        for sample, stopped in ended.items():
            matcher, end = sample.matcher, None
            if matcher is not None:
                if not stopped:
                    matcher.consume_token(sample.tokens[-1])
                # An invalid grammar state yields a mask that allows everything.
                if error := matcher.get_error():
                    failed[sample.owner] = UserError(
                        f"the grammar failed during decoding: {reason_of(error)}; use a simpler"
                        " grammar"
                    )
                    continue
                stopped = stopped or matcher.is_stopped()
            if sample.stops is not None:
                end, text = sample.stops.look(sample.tokens)
                if end is not None:
                    sample.tokens, sample.text = sample.tokens[:end], text
            if stopped or end is not None:
                self._finish(sample, "stop")
            elif sample.own >= sample.limit:
                self._finish(sample, "length")
        for job, error in failed.items():
            self.clear([job], error)

    def wait_for_adapters(self, timeout: float) -> None:
        """Waits until an adapter that a request needs is loaded, at most ``timeout`` seconds."""
        if self.residency is not None:
            leases = [job.lease for job in self.jobs if job.lease is not None]
            self.residency.wait_ready([one for one in leases if not one.done()], timeout)

    def _preempt(self, sample: SampleState) -> Any:
        self.counts["preempted"] += 1
        return self.calls.swap_out(sample.prompt.part, sample.places())

    def _restore(self, sample: SampleState) -> None:
        if sample.swapped is not None:
            self.calls.swap_in(sample.swapped, sample.prompt.part, sample.places())
            sample.swapped = None

    def _finish(self, sample: SampleState, reason: str) -> None:
        job, prompt, text_of = sample.owner, sample.prompt, self.decode
        if sample in self.schedule.running:
            if self.keep_routes and sample.tokens:
                routes = self.calls.routes
                sample.routes = routes(prompt.part, sample.pages, len(sample.tokens))
                if prompt.routes is None:
                    pages = [block.page for block in prompt.blocks]
                    prompt.routes = routes(prompt.part, pages, prompt.length)
            # Blocks of drawn tokens have no snapshot of states.
            if self.reuse_decoded and not job.is_unnamed and not self.calls.states:
                self.schedule.extend(sample, self.calls.move)
        self._end(sample)
        sample.finish = reason
        if text_of is not None and sample.text is None:
            context = context_of(text_of, prompt.request.prompt)
            sample.text = text_behind(text_of, context, sample.tokens)
        if all(s.finish is not None for s in job.samples):
            self.counts["reused_tokens"] += prompt.reused or 0
            if self.is_serving:
                self._forget(job)
            self._remove(job)
            self.release_lease(job)
            job.stream.end([s.completion() for s in job.samples])

    def _end(self, sample: SampleState) -> None:
        if sample.swapped is not None:
            self.calls.discard(sample.swapped)
        self.schedule.finish(sample)

    def _remove(self, job: ActiveRequest) -> None:
        self.jobs.remove(job)
        self.drafts.ended(job.prompt)
        if self.coscheduled is not None:
            self.coscheduled.ended(job.prompt.request.tenant)

    def clear(self, jobs: Sequence[ActiveRequest], error: BaseException | None = None) -> None:
        """Removes unfinished requests, and cached prompts that no later request can name."""
        for job in jobs:
            if job in self.jobs:
                self._remove(job)
                for sample in job.samples:
                    if sample.finish is None:
                        self._end(sample)
            if not job.stream.done:
                self.release_lease(job)
                job.stream.end(error or UserError("generate ended before this request did"))
            self._forget(job)

    def _forget(self, job: ActiveRequest) -> None:
        if job.is_unnamed:
            for pages in self.schedule.pages:
                pages.forget(job.prompt.key)

    def release_lease(self, job: ActiveRequest) -> None:
        lease, job.lease = job.lease, None
        if lease is not None and not lease.cancel() and lease.exception() is None:
            lease.result().release()

    def ensure_cache(self, requests: Sequence[Request] | None) -> None:
        """Makes the cache large enough for ``requests``, or as large as possible."""
        if self.calls.ensure_capacity(requests):
            sizes = self.calls.pages, PAGE, self.calls.states, self.calls.near(self.calls.pages)
            pages, windows = [PagePool(*sizes) for _ in range(self.parts)], self.base.cfg.windows
            how = self.calls.states > 0, None if windows is None else windows.size
            self.schedule = Scheduler(pages, self.rows[-1] // self.parts, *how)
