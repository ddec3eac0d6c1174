"""The scheduler: which samples run, which pages they hold, and which blocks are prefilled next.

A sequence (one sample of a request) is waiting, running or swapped: if an older one needs a page
and none is free, the youngest one's own pages are swapped to the host. Older sequences have
priority everywhere, so every admitted sequence ends. Its prompt's blocks are held while any sample
of the request runs; its own pages are taken as it grows.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mint_jax.models.paged import PAGE
from mint_jax.rollout.pages import PagePool, pages_for
from mint_jax.rollout.samples import CachedPrompt, Row, SampleState

# Blocks between two snapshots of a prompt's states; its last whole block has one too.
SNAPSHOT = 16
Moves = Sequence[tuple[int, int, int, int, int]]  # columns of ``device.PageMoves``


class Scheduler:
    """Sequences and pages of every part; at most ``rows`` rows of a part run at once."""

    def __init__(
        self,
        pages: Sequence[PagePool],
        rows: int,
        has_states: bool = False,
        window: int | None = None,
    ):
        self.pages, self.rows, self.has_states = list(pages), rows, has_states
        self.window = window
        self.waiting: deque[SampleState] = deque()
        self.swapped: list[SampleState] = []
        self.running: list[SampleState] = []
        # Prompts with blocks of which no sample runs yet: a prefill call costs the same with empty
        # places. They are released before a running sequence goes without a page.
        self.ahead: list[CachedPrompt] = []
        self._order = itertools.count()

    @property
    def tenants(self) -> set[str]:
        """Tenants with waiting sequences."""
        return {s.prompt.request.tenant for s in self.waiting}

    def prefer(self, tenants: Sequence[str]) -> None:
        """Orders waiting sequences by tenant, and within a tenant by age."""
        if len(tenants) > 1:
            place = {tenant: i for i, tenant in enumerate(tenants)}
            self.waiting = deque(
                sorted(self.waiting, key=lambda s: (place[s.prompt.request.tenant], s.order))
            )

    def add(self, prompt: CachedPrompt, owner: Any) -> list[SampleState]:
        """Enqueues the samples of a request."""
        new = [SampleState(prompt, i, next(self._order), owner) for i in range(prompt.request.n)]
        self.waiting.extend(new)
        return new

    def admit(
        self,
        restore: Callable[[SampleState], None],
        steps: int,
        loaded: Callable[[SampleState], bool] = lambda s: True,
    ) -> None:
        """Starts sequences while there are rows, and pages for ``steps`` tokens: preempted ones
        first, with their contents ``restore``d, then the oldest waiting ones that are ``loaded``.
        """
        for sequence in sorted(self.swapped, key=lambda s: s.order):
            if not self._place(sequence, sequence.own + 1):
                return  # a younger sequence would take the pages that this one waits for
            self.swapped.remove(sequence)
            restore(sequence)
        passed = []
        while self.waiting:
            sequence = self.waiting.popleft()
            if not loaded(sequence):
                passed.append(sequence)
            elif not self._place(sequence, min(steps, sequence.limit)):
                passed.append(sequence)
                break
        self.waiting.extendleft(reversed(passed))

    def _place(self, sequence: SampleState, tokens: int) -> bool:
        """Gives a sequence a row, its prompt's blocks and pages for ``tokens`` own tokens."""
        prompt, wanted = sequence.prompt, pages_for(tokens, PAGE)
        parts = [prompt.part]
        if not prompt.users:
            every = range(len(self.pages))
            parts = sorted(every, key=lambda p: (self.rows_of(p), -self.pages[p].available))
        for part in parts:
            if self.rows_of(part) >= self.rows:
                continue
            if not (prompt.users or self._open(prompt, part, wanted)):
                continue
            if (pages := self._take(part, wanted, prompt)) is None:
                continue
            self._advance(prompt)
            if self.has_states:
                sequence.state = self._take_state(part, prompt)
                if sequence.state is None:
                    self.pages[part].give(pages)
                    if not prompt.users:
                        self._close(prompt)
                    continue
            if prompt in self.ahead:
                self.ahead.remove(prompt)
            prompt.users += 1
            sequence.pages = pages
            self._take_near(sequence)
            self.running.append(sequence)
            self.running.sort(key=lambda s: s.order)
            return True
        return False

    def _open(self, prompt: CachedPrompt, part: int, spare: int, give_up: bool = True) -> bool:
        """Opens a prompt's blocks, if the part has pages for them and ``spare`` more."""
        if prompt in self.ahead:
            if prompt.part == part:
                return True
            self._close(prompt)
        args = prompt.key, prompt.prefix, spare, prompt.scored_from
        while (opened := self.pages[part].open(*args)) is None:
            if not (give_up and self._give_up(part)):
                return False
        prompt.part, (prompt.blocks, found) = part, opened
        if self.window is not None:
            prompt.written = 0
            found = self._advance(prompt)
        if self.has_states:
            pool = self.pages[part]
            found = prompt.written = pool.known(prompt.blocks[:found])
            if found:
                prompt.read = prompt.blocks[found - 1]
                prompt.read.pins += 1
            prompt.state = self._take_state(part, prompt)
            if prompt.state is None:
                self._close(prompt)
                return False
        if prompt.reused is None:
            prompt.reused = found * PAGE
        return True

    def _close(self, prompt: CachedPrompt) -> None:
        if prompt.read is not None:
            prompt.read.pins -= 1
            prompt.read = None
        if prompt.state is not None:
            self.pages[prompt.part].give_state(prompt.state)
            prompt.state = None
        self._unpin(prompt, len(prompt.blocks))
        self.pages[prompt.part].close(prompt.blocks)
        prompt.blocks, prompt.written = [], None
        if prompt in self.ahead:
            self.ahead.remove(prompt)

    def _take(self, part: int, count: int, but: CachedPrompt | None = None) -> list[int] | None:
        """Takes pages of a part, also from prompts prefilled ahead except ``but``."""
        while (pages := self.pages[part].take(count)) is None and self._give_up(part, but):
            pass
        return pages

    def _take_state(self, part: int, but: CachedPrompt | None = None) -> int | None:
        while (slot := self.pages[part].take_state()) is None and self._give_up(part, but):
            pass
        return slot

    def _give_up(self, part: int, but: CachedPrompt | None = None) -> bool:
        """Releases the last prompt prefilled ahead in a part; its full blocks stay in the index."""
        for prompt in reversed(self.ahead):
            if prompt.part == part and prompt is not but:
                self._close(prompt)
                return True
        return False

    def _reach(self, position: int) -> int:
        """Returns the number of the first page that a window before ``position`` reaches."""
        assert self.window is not None
        return max(0, position - self.window + 1) // PAGE

    def _advance(self, prompt: CachedPrompt) -> int:
        """Lets a prompt go on after blocks that are written and have the near pages of a window;
        pins these, and unpins those behind them. Returns the number of blocks before that place.

        Only before a call is planned: calls read pages that their prompts have pinned.
        """
        if self.window is None or prompt.written is None:
            return 0
        near, lacking = self.pages[prompt.part].near, -1
        for i in range(prompt.written, len(prompt.blocks)):
            if not prompt.blocks[i].ready:
                break
            if prompt.blocks[i] not in near.of:
                lacking = i
            if self._reach((i + 1) * PAGE) > lacking:
                prompt.written = i + 1
        first = self._reach(min(prompt.written * PAGE, prompt.length))
        for i in range(first, prompt.written):
            if i not in prompt.near:
                self._pin(prompt, i)
        self._unpin(prompt, first)
        return prompt.written

    def _pin(self, prompt: CachedPrompt, number: int, give_up: bool = False) -> bool:
        near, block = self.pages[prompt.part].near, prompt.blocks[number]
        while not near.pin(block):
            if not (give_up and self._give_up(prompt.part, prompt)):
                return False
        prompt.near[number] = near.of[block]
        return True

    def _unpin(self, prompt: CachedPrompt, before: int) -> None:
        for i in [i for i in prompt.near if i < before]:
            self.pages[prompt.part].near.unpin(prompt.blocks[i])
            del prompt.near[i]

    def _take_near(self, sequence: SampleState) -> None:
        """Takes the near pages of a running sequence's own pages, and returns those that its window
        has left.
        """
        if self.window is None:
            return
        part, first = sequence.prompt.part, self._reach(sequence.own)
        near = self.pages[part].near
        near.give([sequence.near.pop(i) for i in [*sequence.near] if i < first])
        for i in range(first, len(sequence.pages)):
            while i not in sequence.near:
                if (page := near.take()) is not None:
                    sequence.near[i] = page
                elif not self._give_up(part, sequence.prompt):
                    raise RuntimeError("there are fewer near pages than plans.near_pages")

    def rows_of(self, part: int) -> int:
        return sum(s.prompt.part == part for s in self.running)

    def to_prefill(
        self,
        count: int,
        scored: bool = False,
        loaded: Callable[[SampleState], bool] = lambda s: True,
    ) -> list[list[tuple[CachedPrompt, int]]]:
        """Returns up to ``count`` blocks of each part to write next, as (prompt, block number), and
        marks them as ready. With ``scored``: blocks with scored positions whose predecessors are
        all written, instead of the others.
        """
        out: list[list[tuple[CachedPrompt, int]]] = [[] for _ in self.pages]
        for prompt in dict.fromkeys(s.prompt for s in self.running):
            self._advance(prompt)
            first = len(prompt.blocks) if prompt.scored_from is None else prompt.scored_from
            if not scored:
                self._write(prompt, range(first), out[prompt.part], count, True)
            elif not any(map(prompt.lacks, range(first))):
                numbers = range(first, len(prompt.blocks))
                self._write(prompt, numbers, out[prompt.part], count, True)
        if any(out) and not scored and not self.swapped:
            self._read_ahead(out, count, loaded)
        return out

    def _read_ahead(
        self,
        out: list[list[tuple[CachedPrompt, int]]],
        count: int,
        loaded: Callable[[SampleState], bool],
    ) -> None:
        """Fills a call with blocks of waiting prompts in order, while there are pages."""
        first = itertools.islice((s for s in self.waiting if loaded(s)), self.rows)
        for prompt in dict.fromkeys(s.prompt for s in first):
            # Skip prompts that run, and prompts whose every block the scoring program prefills.
            if prompt.users or not prompt.length or prompt.scored_from == 0:
                continue
            if prompt not in self.ahead:
                part = min(range(len(out)), key=lambda p: len(out[p]))
                if len(out[part]) == count or not self._open(
                    prompt, part, self.rows_of(part), give_up=False
                ):
                    return
                self.ahead.append(prompt)
            self._advance(prompt)
            numbers = range(len(prompt.blocks))[: prompt.scored_from]
            self._write(prompt, numbers, out[prompt.part], count, False)

    def to_decode(self, steps: int, preempt: Callable[[SampleState], Any]) -> list[Row]:
        """Returns the rows that decode next, and the number of own tokens that each may reach.

        A row without a page for its next token preempts the youngest, whose pages ``preempt``
        copies to the host; one with pages for fewer than ``steps`` tokens runs as far as they last.
        """
        out = []
        for sequence in self.running:
            self._take_near(sequence)  # before others take pages, and before it is preempted
        for sequence in list(self.running):
            if sequence not in self.running or not sequence.prompt.ready:
                continue
            part = sequence.prompt.part
            more = steps if sequence.matcher is None else 1
            goal = min(sequence.own + more, sequence.limit)
            while (lacking := pages_for(goal, PAGE) - len(sequence.pages)) > 0:
                if (pages := self._take(part, lacking)) is not None:
                    sequence.pages += pages
                elif sequence.room > sequence.own:
                    goal = sequence.room
                else:
                    here = (s for s in self.running if s.prompt.part == part)
                    victim = max(here, key=lambda s: s.order)
                    victim.swapped = preempt(victim) if victim.own else None
                    self._release(victim)
                    self.swapped.append(victim)
                    if victim is sequence:
                        break
            if sequence in self.running:
                self._take_near(sequence)
                out.append(Row(sequence, goal))
        return [row for row in out if row.sample in self.running]

    def finish(self, sequence: SampleState) -> None:
        """Ends a sequence in any state; its row and pages are free at once."""
        if sequence in self.running:
            self._release(sequence)
        elif sequence in self.swapped:
            self.swapped.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
            if sequence.prompt in self.ahead and all(
                s.prompt is not sequence.prompt for s in self.waiting
            ):
                self._close(sequence.prompt)
        sequence.swapped = None

    def extend(
        self,
        sequence: SampleState,
        move: Callable[[int, Moves, Moves], Any],
    ) -> None:
        """Adds the full blocks of a running sequence's drawn tokens to the prefix cache: ``move``
        copies the prompt's partial last page and the sequence's own pages, which begin with a new
        page, into pages without a gap (``device.PageMoves``), and then those of their near pages
        that are there.
        """
        prompt, own = sequence.prompt, sequence.own
        if not prompt.ready or (prompt.blocks and prompt.blocks[0].root.closed):
            return
        tokens = (*prompt.request.prompt, *sequence.tokens)[: prompt.length + own]
        pool, (begin, cut) = self.pages[prompt.part], divmod(prompt.length, PAGE)
        taken, new = pool.extend(prompt.key, tokens, begin)
        # Own position o goes to cut + o after the full blocks, so page j of them has the end of own
        # page j - 1 and the beginning of own page j.
        moves, near_moves, pinned = [], [], []
        for i, block in new:
            j = i - begin
            if j:
                low, first = sequence.pages[j - 1], PAGE - cut
            else:
                low, first = prompt.blocks[begin].page if cut else 0, 0
            # The copied tokens may end within page j - 1.
            high = sequence.pages[j] if j < len(sequence.pages) else 0
            moves.append((low, high, first, cut, block.page))
            before = sequence.near.get(j - 1) if j else prompt.near.get(begin)
            near_low, near_high = before if cut else 0, sequence.near.get(j)
            if near_low is None or near_high is None or not pool.near.pin(block):
                continue
            pinned.append(block)
            near_moves.append((near_low, near_high, first, cut, pool.near.of[block]))
        if moves:
            move(prompt.part, moves, near_moves)
        for block in pinned:
            pool.near.unpin(block)
        for _, block in new:
            block.ready = True
        pool.close(taken)

    def _release(self, sequence: SampleState) -> None:
        self.running.remove(sequence)
        pool = self.pages[sequence.prompt.part]
        pool.give(sequence.pages)
        pool.near.give(sequence.near.values())
        sequence.pages, sequence.near = [], {}
        if sequence.state is not None:
            pool.give_state(sequence.state)
            sequence.state = None
        sequence.prompt.users -= 1
        if not sequence.prompt.users:
            self._close(sequence.prompt)

    def _write(
        self,
        prompt: CachedPrompt,
        numbers: Iterable[int],
        into: list[tuple[CachedPrompt, int]],
        count: int,
        give_up: bool,
    ) -> None:
        """Appends a prompt's unwritten blocks until ``into`` has ``count``. With ``give_up``
        prompts prefilled ahead give it their near pages.
        """
        for i in numbers:
            if prompt.lacks(i) and len(into) < count:
                if self.window is not None and not self._pin(prompt, i, give_up):
                    return
                prompt.blocks[i].ready = True
                if prompt.written is not None:
                    prompt.written = i + 1
                is_last = (i + 1) % SNAPSHOT == 0 or i + 1 == prompt.shared
                if prompt.state is not None and is_last:
                    self.pages[prompt.part].snapshot(prompt.blocks[i])
                into.append((prompt, i))
