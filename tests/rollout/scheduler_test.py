"""Order and pages of samples, as properties: random requests over caches that hold little more than
one of them. That contents survive is shown by ``company_test``.
"""

import itertools
import math
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from mint_jax.models.paged import PAGE
from mint_jax.rollout.pages import PagePool
from mint_jax.rollout.plans import near_pages
from mint_jax.rollout.request import Request
from mint_jax.rollout.samples import CachedPrompt, SampleState, pages_needed
from mint_jax.rollout.scheduler import Scheduler
from tests.rollout.invariants import check_schedule, is_idle

KEYS = [("a", None), ("a", "r1"), ("b", None)]
NUMBERS = st.integers(0, 10_000)
KINDS = ("add", "add", "turn", "turn", "turn", "turn", "cancel", "forget", "load")
STEPS = st.lists(st.tuples(st.sampled_from(KINDS), NUMBERS, NUMBERS), min_size=60, max_size=120)
LENGTHS = (1, 2, 20, 33, 34, 65, 66, 97, 130, 400, 420)  # of prompts
WINDOWS = st.sampled_from((None, 1, 2, 33, 34, 70))
LIMITS = (1, 3, 32, 33, 40, 64, 70, 150)
STOPS = 97  # one of so many turns ends a sample early


class Device:
    """A schedule over a device that computes nothing; ``turn`` is one turn of the engine's loop."""

    def __init__(self, parts, pages, rows, steps, blocks, window):
        near = 0 if window is None else min(pages, near_pages(window, rows, blocks) // 2)
        pools = [PagePool(pages, PAGE, near=near) for _ in range(parts)]
        self.schedule = Scheduler(pools, rows, window=window)
        self.is_scarce = 0 < near < pages
        self.steps, self.blocks, self.counts = steps, blocks, Counter()
        self.samples: list[SampleState] = []
        self.loads: list[CachedPrompt] = []  # prompts whose adapter is not there yet

    def is_loaded(self, sample: SampleState) -> bool:
        return sample.prompt not in self.loads

    def preempt(self, sample: SampleState) -> object:
        here = [s.order for s in self.schedule.running if s.prompt.part == sample.prompt.part]
        assert sample.order == max(here), "not the youngest"
        assert all(prompt.part != sample.prompt.part for prompt in self.schedule.ahead)
        self.counts["preempted"] += 1
        return object()

    def restore(self, sample: SampleState) -> None:
        assert sample.room > sample.own, "there is room for the next token"
        sample.swapped = None

    def turn(self, draw: int) -> None:
        schedule, swapped = self.schedule, set(self.schedule.swapped)
        before = set(schedule.running)
        schedule.admit(self.restore, self.steps, self.is_loaded)
        new = [s for s in schedule.running if s not in before]
        fresh = [s for s in new if s not in swapped]
        assert not fresh or not schedule.swapped, "one that was preempted is overtaken"
        ready = [s.order for s in schedule.waiting if self.is_loaded(s)]
        assert not ready or all(s.order < min(ready) for s in fresh), "one that waits is overtaken"
        assert schedule.running or not ready, "all is free and nobody runs"
        self.counts["scarce"] += self.is_scarce
        self.counts["reused"] += sum(s.prompt.reused or 0 for s in fresh if s.number == 0)
        todo = schedule.to_prefill(self.blocks, loaded=self.is_loaded)
        check_schedule(schedule)
        running = {s.prompt for s in schedule.running}
        for part, blocks in enumerate(todo):
            assert len(blocks) <= self.blocks
            for prompt, i in blocks:
                assert (prompt.part, prompt in self.loads) == (part, False)
                assert all(block.ready for block in prompt.blocks[:i]), "behind what is not written"
                self.counts["ahead"] += prompt not in running
        rows = schedule.to_decode(self.steps, self.preempt)
        check_schedule(schedule)
        assert any(todo) or rows or not schedule.running, "a turn in which nothing was done"
        for part in range(len(schedule.pages)):
            here = (s for s in schedule.running if s.prompt.part == part)
            oldest = min(here, key=lambda s: s.order, default=None)
            assert (
                oldest is None or oldest in [row.sample for row in rows] or not oldest.prompt.ready
            )
        for sample, goal, _ in rows:
            assert sample.own < goal <= min(sample.own + self.steps, sample.limit, sample.room)
            sample.tokens += [draw] * (goal - sample.own)
        for sample, *_ in rows:
            if sample.own == sample.limit or (draw + sample.order) % STOPS == 0:
                self.finish(sample)
        check_schedule(schedule)

    def finish(self, sample: SampleState) -> None:
        self.schedule.finish(sample)
        sample.finish = "end"

    def finish_all(self) -> None:
        """Ends within turns that are enough: each draws a token or reads blocks, and a prompt is
        read again only after it was preempted for a token of another sample that needed a page.
        """
        blocks = max((len(s.prompt.prefix) // PAGE + 1 for s in self.samples), default=0)
        tokens = sum(math.ceil(s.limit / self.steps) + 1 + s.limit // PAGE for s in self.samples)
        self.loads.clear()
        for turns in itertools.count():
            if is_idle(self.schedule):
                break
            assert turns <= tokens * (1 + blocks) + blocks, "it does not end"
            self.turn(turns)
        assert all(s.finish is not None and not s.pages for s in self.samples)
        assert all(pages.available == pages.count for pages in self.schedule.pages), "a leak"


def run(parts, rows, spare, longest, most, steps, blocks, window, operations) -> Counter:
    """Requests of any size up to the largest that ``longest`` and ``most`` allow, which the cache
    holds, and ``spare`` pages.
    """
    largest = pages_needed(Request((0,) * longest, max_tokens=most))
    device = Device(parts, largest + spare, rows, steps, blocks, window)
    for kind, x, y in operations:
        if kind == "add":
            length, n = min(LENGTHS[x % len(LENGTHS)], longest), 1 + (x // 10) % 3
            # prompts begin alike
            tokens = tuple(y % 4 >> (i // PAGE % 2) & 1 for i in range(length))
            limit = min(LIMITS[y % len(LIMITS)], most)
            request = Request(tokens, n=n + 8 * (x % 31 == 0), max_tokens=limit)
            prompt = CachedPrompt(request, KEYS[x % len(KEYS)])
            device.samples += device.schedule.add(prompt, owner=None)
            device.loads += [] if y % 5 else [prompt]
        elif kind == "turn":
            device.turn(x)
        elif kind == "cancel":
            if alive := [s for s in device.samples if s.finish is None]:
                device.finish(alive[x % len(alive)])
        elif kind == "forget":
            for pages in device.schedule.pages:
                pages.forget(KEYS[x % len(KEYS)])
        elif device.loads:
            device.loads.pop(x % len(device.loads))
        check_schedule(device.schedule)
        device.counts["operations"] += 1
    device.finish_all()
    return device.counts


def test_every_request_ends_in_order_with_what_it_had_whatever_comes_between():
    done = Counter()
    most, steps = st.sampled_from((33, 70, 150)), st.sampled_from((1, 5, 16))
    few, spare = st.integers(1, 3), st.integers(0, 6)
    sizes = st.integers(2, 6), spare, st.sampled_from(LENGTHS), most, steps, st.integers(1, 4)
    # few rows over many pages, which have fewer near pages
    scarce = st.integers(2, 3), spare, st.just(420), most, steps, st.just(1)

    @settings(max_examples=120)
    @given(
        st.tuples(few, *sizes, WINDOWS, STEPS)
        | st.tuples(few, *scarce, st.sampled_from((1, 2, 33)), STEPS)
    )
    def any_operations(how):
        done.update(run(*how))

    any_operations()
    assert done["operations"] >= 5_000
    assert done["preempted"] > 10, "small caches preempt"
    assert done["scarce"] > 20, "there are fewer near pages than pages"
    assert done["reused"] > 10 * PAGE, "prompts that begin alike share"
    # 48 to 280 in 14 runs, and once below 20
    assert done["ahead"] > 0, "places that nobody needs are filled"
