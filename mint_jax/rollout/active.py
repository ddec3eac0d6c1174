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
from mint_jax.rollout.cache import PagedCache, SwappedPages
from mint_jax.rollout.calls import DeviceCalls
from mint_jax.rollout.completions import completion
from mint_jax.rollout.detokenize import context_of, text_behind
from mint_jax.rollout.grammar import Grammars, reason_of
from mint_jax.rollout.pages import PagePool, pages_for
from mint_jax.rollout.request import Request
from mint_jax.rollout.samples import CachedPrompt, SampleState, longest_table
from mint_jax.rollout.scheduler import Scheduler
from mint_jax.rollout.stops import Stops
from mint_jax.rollout.stream import Stream

# Weight of a drawn token relative to a prefilled one in fair sharing between tenants
# (arXiv:2401.00588, section 3.1).
DRAWN = 2
# Prefill calls between two decode dispatches while serving: 512 tokens on a CPU, 2,048 elsewhere.
READS = 4
# Counters that are reported as 0 from the start.
COUNTS = ("prefills", "prefilled_tokens", "reused_tokens", "decodes", "drawn_tokens", "preempted")


class Residents(Protocol):
    """The part of ``residency.Residency`` that the engine uses."""

    @property
    def stacks(self) -> Stacks: ...

    def acquire(self, digest: str, tenant: str) -> "Future[Any]": ...

    def commit_ready(self, budget_bytes: int | None = None) -> int: ...

    def wait_ready(self, pending: Sequence[Future], timeout: float = 1.0) -> bool: ...


class Coscheduled(Protocol):
    """Work that shares the devices with the engine and orders its tenants; implemented by
    ``service.durable.Durable``.
    """

    @property
    def waiting(self) -> int: ...

    def turn(self, decoding: bool) -> bool: ...

    def began(self, tenant: str) -> None: ...

    def ended(self, tenant: str) -> None: ...

    def order(self, tenants: Iterable[str]) -> list[str]: ...

    def spent(self, seconds: float, shares: Mapping[str, float]) -> None: ...

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


class ActiveRequests:
    """Requests that have not ended, and the turns that serve them; one thread runs the turns.

    Args:
        calls, cache: device calls and KV cache of the engine.
        rows, blocks: decode program shapes, and blocks of a prefill call, over all parts.
        decode, steps, keep_routes, reuse_decoded: as in ``Engine``.

    Attributes:
        counts: totals so far, see ``Engine``.
        compiled: as in ``Engine``.
        is_serving: requests come from any thread while turns run.
        call: number of the current call of ``Engine.generate``.
        residency, commit_bytes, coscheduled: as in ``Engine.serving``.
    """

    def __init__(
        self,
        base: Base,
        calls: DeviceCalls,
        cache: PagedCache,
        rows: tuple[int, ...],
        blocks: int,
        decode: Callable[[list[int]], str] | None,
        steps: int,
        keep_routes: bool,
        reuse_decoded: bool,
    ):
        self.base, self.calls, self.cache, self.parts = base, calls, cache, cache.parts
        self.rows, self.blocks, self.table = rows, blocks, longest_table(base.cfg.context)
        self.decode, self.steps, self.keep_routes = decode, steps, keep_routes
        self.reuse_decoded = reuse_decoded
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
        self._tokens: Counter[str] = Counter()  # fair-share tokens of this turn, by tenant
        # Tokens prefilled in this turn, by tenant and revision.
        self._read: Counter[tuple[str, str | None]] = Counter()
        self._read_from = 0.0  # time of the turn's first prefill call

    def job(self, request: Request, stream: Stream) -> ActiveRequest:
        """Returns a request in its initial state; from any thread."""
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
                next(self._submitted) if self.is_serving else self.call,
                request.adapter,
                self.is_serving,
            )
        return ActiveRequest(
            stream,
            CachedPrompt(request_by_id, (request.tenant, version)),
            matcher=self.grammars.matcher(request),
        )

    def start(self, job: ActiveRequest) -> None:
        """Enqueues a request's samples."""
        self.jobs.append(job)
        if self.coscheduled is not None:
            self.coscheduled.began(job.prompt.request.tenant)
        job.samples = self.schedule.add(job.prompt, job)
        for sample in job.samples:
            sample.matcher = None if job.matcher is None else job.matcher.deep_copy()
            if job.prompt.request.stop:
                assert self.decode is not None, "checked at the door"
                sample.stops = Stops(
                    self.decode, job.prompt.request.stop, job.prompt.request.prompt
                )

    def turn(self) -> bool:
        """Runs one turn of the loop and one of the coscheduled work; returns True if anything was
        done.
        """
        if (coscheduled := self.coscheduled) is None:
            return self._work()
        self.schedule.prefer(coscheduled.order(self.schedule.tenants))
        began = time.perf_counter()
        self._tokens.clear()
        worked = bool(self.jobs) and self._work()
        if self._tokens:
            coscheduled.spent(time.perf_counter() - began, self._tokens)
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
            most = max(Counter(s.prompt.part for s, _ in rows).values())
            self._decode(rows, next(r for r in usable if r >= self.parts * most))
        return bool(reads or rows or len(self.schedule.running) != before)

    def usable_rows(self) -> list[int]:
        """Returns the row counts whose decode program is compiled; empty until the programs that
        every request needs are.
        """
        if self.compiled is None:
            return list(self.rows)
        if not (self.compiled.has("prefill") and self.compiled.has("pages")):
            return []
        return [r for r in self.rows if self.compiled.has(("decode", r))]

    def _drop_cancelled(self) -> None:
        for job in list(self.jobs):
            if (
                job.lease is not None
                and job.lease.done()
                and (error := job.lease.exception()) is not None
            ):
                self.clear([job], error)
            elif job.stream.cancelled:
                for sample in job.samples:
                    if sample.finish is None:
                        self._finish(sample, "cancelled")

    def _loaded(self, sample: SampleState) -> bool:
        """Returns True if a sample can run: its scoring program is compiled and its adapter is in a
        slot, which is then written into the request.
        """
        job: ActiveRequest = sample.owner
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
            request, count = prompt.request, len(prompt.blocks[i].tokens)
            self.counts["prefilled_tokens"] += count
            self._tokens[request.tenant] += count
            self._read[request.tenant, request.revision] += count

    def _decode(self, running: list[tuple[SampleState, int]], rows: int) -> None:
        plan, places = plans.rows_plan(
            running, rows, self.parts, self.table, self.base.cfg.vocab_size, self.calls.stacks
        )
        steps = 1 if any(sample.matcher is not None for sample, _ in running) else self.steps
        if self.schedule.waiting or self.schedule.swapped:
            # Stop when the first row ends, so that a waiting sample gets its row. When training
            # runs between dispatches, stop when half of the rows end: 16 rows that started one
            # after another would otherwise draw one token per dispatch, and each dispatch would
            # wait for a training slice.
            left = sorted(sample.limit - sample.own for sample, _ in running)
            trains = self.coscheduled is not None and self.coscheduled.waiting
            steps = min(steps, left[len(left) // 2 if trains else 0])
        began = time.perf_counter()
        drawn = self.calls.decode(plan, steps)
        seconds, tokens = time.perf_counter() - began, Counter[tuple[str, str | None]]()
        self.counts["decodes"] += 1
        self.counts["drawn_tokens"] += int(drawn.count.sum())
        for (sample, _), r in zip(running, places):
            piece, request = sample.append(drawn, r), sample.prompt.request
            self._tokens[request.tenant] += DRAWN * len(piece.tokens)
            tokens[request.tenant, request.revision] += len(piece.tokens)
            sample.owner.stream.put(piece)
        if self.coscheduled is not None and running:
            self.coscheduled.took("decode", seconds, tokens)
        failed: dict[ActiveRequest, UserError] = {}
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
            self.clear([job], error)

    def wait_for_adapters(self, timeout: float) -> None:
        """Waits until an adapter that a request needs is loaded, at most ``timeout`` seconds."""
        if self.residency is not None:
            leases = [job.lease for job in self.jobs if job.lease is not None]
            self.residency.wait_ready([one for one in leases if not one.done()], timeout)

    def _preempt(self, sample: SampleState) -> SwappedPages:
        self.counts["preempted"] += 1
        return self.cache.swap_out(sample.prompt.part, sample.pages[: pages_for(sample.own, PAGE)])

    def _restore(self, sample: SampleState) -> None:
        if sample.swapped is not None:
            self.cache.swap_in(
                sample.swapped, sample.prompt.part, sample.pages[: pages_for(sample.own, PAGE)]
            )
            sample.swapped = None

    def _finish(self, sample: SampleState, why: str) -> None:
        job: ActiveRequest = sample.owner
        if self.keep_routes and sample.tokens and sample in self.schedule.running:
            self._keep_routes(sample)
        # Weights without a digest or version cannot be named by a later call.
        if (
            self.reuse_decoded
            and sample in self.schedule.running
            and not isinstance(job.prompt.key[1], tuple)
        ):
            self.schedule.extend(sample, self.cache.move)
        self._take_out(sample)
        sample.finish = why
        if self.decode is not None and sample.text is None:
            sample.text = text_behind(
                self.decode, context_of(self.decode, job.prompt.request.prompt), sample.tokens
            )
        if all(s.finish is not None for s in job.samples):
            self.counts["reused_tokens"] += job.prompt.reused or 0
            if self.is_serving and isinstance(job.prompt.key[1], tuple):
                self._forget(job)
            self._remove(job)
            self.release_lease(job)
            job.stream.end([completion(s) for s in job.samples])

    def _remove(self, job: ActiveRequest) -> None:
        self.jobs.remove(job)
        if self.coscheduled is not None:
            self.coscheduled.ended(job.prompt.request.tenant)

    def _take_out(self, sample: SampleState) -> None:
        if sample.swapped is not None:
            self.cache.discard(sample.swapped)
        self.schedule.finish(sample)

    def _keep_routes(self, sample: SampleState) -> None:
        """Reads the expert ids of a sample's tokens and, once, of its prompt."""
        prompt = sample.prompt
        sample.routes = self.cache.routes(prompt.part, sample.pages, len(sample.tokens))
        if prompt.routes is None:
            prompt.routes = self.cache.routes(
                prompt.part, [block.page for block in prompt.blocks], prompt.length
            )

    def clear(self, jobs: Sequence[ActiveRequest], error: BaseException | None = None) -> None:
        """Removes unfinished requests from the engine, and drops cached prompts that no later
        request can name.
        """
        for job in jobs:
            if job in self.jobs:
                self._remove(job)
                for sample in job.samples:
                    if sample.finish is None:
                        self._take_out(sample)
            if not job.stream.done:
                self.release_lease(job)
                job.stream.end(error or UserError("generate ended before this request did"))
            if isinstance(job.prompt.key[1], tuple):
                self._forget(job)

    def _forget(self, job: ActiveRequest) -> None:
        for pages in self.schedule.pages:
            pages.forget(job.prompt.key)

    def release_lease(self, job: ActiveRequest) -> None:
        """Releases the adapter of a request, loaded or not."""
        lease, job.lease = job.lease, None
        if lease is not None and not lease.cancel() and lease.exception() is None:
            lease.result().release()

    def ensure_cache(self, requests: Sequence[Request] | None) -> None:
        """Makes the cache large enough for ``requests``, or as large as possible."""
        if self.cache.ensure_capacity(requests):
            self.schedule = Scheduler(
                [PagePool(self.cache.pages, PAGE) for _ in range(self.parts)],
                self.rows[-1] // self.parts,
            )
