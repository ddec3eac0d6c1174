"""Who runs next: sequences, their pages, and the order in which prompts are read and rows decode.
No arrays, no device.

    waiting --admit--> running --finish--> gone
                          |  ^
                   preempt|  |admit       no page is left for an older row: the youngest gives its
                   own pages up,
                          v  |            whose contents wait in the host's memory
                        swapped

A sequence is one sample of a request. Its prompt's blocks are held as long as any of the request's
samples run; its own pages are taken as it grows. Older sequences come first in everything, so that
each one that is admitted ends: the oldest of a part can have every page of it, and a request that
would not fit then is refused at the door.

A call of prefill costs the same with places that are empty. Blocks of prompts that wait are read
*ahead* in those that running ones leave, and are given up before anyone goes without a page for
them.
"""

import dataclasses
import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mint_jax.models.paged import PAGE, RUN, RUN_PAGES, TEAM
from mint_jax.rollout.pages import Block, Pages, pages_for
from mint_jax.rollout.request import Request


@dataclasses.dataclass(eq=False)
class Prompt:
    """A request's prompt but its last token, in the cache while samples of it run.

    Attributes:
        key: tenant and version of the weights that read it.
        part: whose pages it has.
        blocks: while ``users`` is above 0, and while it is read ahead.
        reused: tokens that were there when it was opened first.
        routes, scores: what was read of it, where asked for; scores by the number of the block.
    """

    request: Request
    key: tuple[str, Any]
    part: int = 0
    blocks: list[Block] = dataclasses.field(default_factory=list)
    users: int = 0
    reused: int | None = None
    routes: Any = None
    scores: dict[int, list[Any]] = dataclasses.field(default_factory=dict)

    @property
    def prefix(self) -> tuple[int, ...]:
        return self.request.prompt[:-1]

    @property
    def length(self) -> int:
        """Tokens of the prefix."""
        return len(self.request.prompt) - 1

    @property
    def ready(self) -> bool:
        """Whether all of it is written."""
        return all(block.ready for block in self.blocks)

    @property
    def scored_from(self) -> int | None:
        """The first of the blocks whose places are scored; they are not shared, for what is found
        in the cache has no scores.
        """
        first = self.request.first_scored
        return None if first is None else first // PAGE


@dataclasses.dataclass(eq=False)
class Sample:
    """One sample.

    Attributes:
        number: which of the request's.
        order: of admission's queue, the smallest first.
        pages: its own.
        tokens, logprobs, drawn_logprobs, top: what was drawn.
        swapped: the contents of its pages, while they are on the host.
        finish: why it has ended; None while it has not.
        text: what its tokens say, where anyone asked.
        matcher: of its grammar.
        stops: looks for its stop strings.
    """

    prompt: Prompt
    number: int
    order: int
    owner: Any = None
    pages: list[int] = dataclasses.field(default_factory=list)
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    drawn_logprobs: list[float] = dataclasses.field(default_factory=list)
    top: list[list[tuple[int, float]]] = dataclasses.field(default_factory=list)
    swapped: Any = None
    finish: str | None = None
    text: str | None = None
    routes: Any = None
    matcher: Any = None
    stops: Any = None

    @property
    def own(self) -> int:
        """Tokens of its own part that are cached: the prompt's last and all drawn but the last."""
        return len(self.tokens)

    @property
    def room(self) -> int:
        """Own tokens that its pages hold."""
        return len(self.pages) * PAGE

    @property
    def limit(self) -> int:
        """Own tokens at most."""
        return self.prompt.request.max_tokens

    @property
    def team(self) -> int | None:
        """Which team of its prompt's it reads with; a matter of the request alone, for forms of a
        product may differ in their bits.
        """
        return self.number // TEAM if self.prompt.request.n > 1 and self.prompt.length else None

    def table(self) -> list[int]:
        """Its pages: those of the prefix, up to a whole run, and its own."""
        prefix = [block.page for block in self.prompt.blocks]
        return prefix + [0] * (-len(prefix) % RUN_PAGES) + self.pages


class Schedule:
    """Sequences over the pages of every part.

    Args:
        pages: of each part.
        rows: rows of a part that run at once, at most.
    """

    def __init__(self, pages: Sequence[Pages], rows: int):
        self.pages, self.rows = list(pages), rows
        self.waiting: deque[Sample] = deque()
        self.swapped: list[Sample] = []
        self.running: list[Sample] = []
        self.ahead: list[Prompt] = []  # that hold blocks, and no sample of them runs
        self._order = itertools.count()

    @property
    def idle(self) -> bool:
        """Whether nothing is left to do."""
        return not (self.waiting or self.swapped or self.running)

    @property
    def tenants(self) -> set[str]:
        """Whose sequences wait."""
        return {s.prompt.request.tenant for s in self.waiting}

    def prefer(self, tenants: Sequence[str]) -> None:
        """Orders those that wait by their tenants, and those of one as they came."""
        if len(tenants) > 1:
            place = {tenant: i for i, tenant in enumerate(tenants)}
            self.waiting = deque(
                sorted(self.waiting, key=lambda s: (place[s.prompt.request.tenant], s.order))
            )

    def add(self, prompt: Prompt, owner: Any) -> list[Sample]:
        """Queues the samples of a request."""
        new = [Sample(prompt, i, next(self._order), owner) for i in range(prompt.request.n)]
        self.waiting.extend(new)
        return new

    def admit(
        self,
        restore: Callable[[Sample], None],
        steps: int,
        loaded: Callable[[Sample], bool] = lambda s: True,
    ) -> None:
        """Lets sequences run as long as there are rows and pages: those that were preempted first,
        then the oldest that wait.

        Args:
            restore: writes a preempted sequence's contents into the pages that it has now.
            steps: tokens that a sequence should have pages for at once.
            loaded: whether a waiting sequence's adapter is there; those whose is not are passed
                over.
        """
        for sequence in sorted(self.swapped, key=lambda s: s.order):
            if not self._place(sequence, sequence.own + 1):
                return  # nobody overtakes: younger ones would take the pages that it waits for
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

    def _place(self, sequence: Sample, tokens: int) -> bool:
        """Gives a sequence a row, its prompt and pages for ``tokens`` of its own; whether there
        were any.
        """
        prompt = sequence.prompt
        parts = (
            [prompt.part]
            if prompt.users
            else sorted(
                range(len(self.pages)), key=lambda p: (self.rows_of(p), -self.pages[p].available)
            )
        )
        wanted = pages_for(tokens, PAGE)
        for part in parts:
            if self.rows_of(part) >= self.rows or not (
                prompt.users or self._open(prompt, part, wanted)
            ):
                continue
            if (pages := self._take(part, wanted, prompt)) is None:
                continue
            if prompt in self.ahead:
                self.ahead.remove(prompt)
            prompt.users += 1
            sequence.pages = pages
            self.running.append(sequence)
            self.running.sort(key=lambda s: s.order)
            return True
        return False

    def _open(self, prompt: Prompt, part: int, spare: int, give_up: bool = True) -> bool:
        """Gives a prompt its blocks in a part, if it has not got them there; whether there are
        pages for them, and ``spare`` more.
        """
        if prompt in self.ahead:
            if prompt.part == part:
                return True
            self._close(prompt)
        while (
            opened := self.pages[part].open(prompt.key, prompt.prefix, spare, prompt.scored_from)
        ) is None:
            if not (give_up and self._give_up(part)):
                return False
        prompt.part, (prompt.blocks, found) = part, opened
        if prompt.reused is None:
            prompt.reused = found * PAGE
        return True

    def _close(self, prompt: Prompt) -> None:
        self.pages[prompt.part].close(prompt.blocks)
        prompt.blocks = []
        if prompt in self.ahead:
            self.ahead.remove(prompt)

    def _take(self, part: int, count: int, but: Prompt | None = None) -> list[int] | None:
        """Pages of a part, also of what was read ahead of ``but``; None where there are not as
        many.
        """
        while (pages := self.pages[part].take(count)) is None:
            if not self._give_up(part, but):
                return None
        return pages

    def _give_up(self, part: int, but: Prompt | None = None) -> bool:
        """Gives up the last prompt that a part has ahead; its whole blocks that are read can still
        be found. Whether there was one.
        """
        last = next(
            (
                prompt
                for prompt in reversed(self.ahead)
                if prompt.part == part and prompt is not but
            ),
            None,
        )
        if last is not None:
            self._close(last)
        return last is not None

    def rows_of(self, part: int) -> int:
        """Rows of a part that run."""
        return sum(s.prompt.part == part for s in self.running)

    def to_prefill(
        self, count: int, scored: bool = False, loaded: Callable[[Sample], bool] = lambda s: True
    ) -> list[list[tuple[Prompt, int]]]:
        """Of each part up to ``count`` blocks that are to be written next, each as its prompt and
        number; they count as written.

        Args:
            scored: those whose places are scored, as soon as all before them are written, or the
                others.
            loaded: as of ``admit``.
        """
        out: list[list[tuple[Prompt, int]]] = [[] for _ in self.pages]
        for prompt in dict.fromkeys(s.prompt for s in self.running):
            first = len(prompt.blocks) if prompt.scored_from is None else prompt.scored_from
            if not scored:
                _write(prompt, range(first), out[prompt.part], count)
            elif all(block.ready for block in prompt.blocks[:first]):
                _write(prompt, range(first, len(prompt.blocks)), out[prompt.part], count)
        if any(out) and not scored and not self.swapped:
            self._read_ahead(out, count, loaded)
        return out

    def _read_ahead(
        self, out: list[list[tuple[Prompt, int]]], count: int, loaded: Callable[[Sample], bool]
    ) -> None:
        """Fills what is left of a call, with those that wait in their order, up to the first that
        the pages do not suffice for.
        """
        for sequence in itertools.islice((s for s in self.waiting if loaded(s)), self.rows):
            prompt = sequence.prompt
            # none of its blocks is read by this program
            if prompt.users or not prompt.length or prompt.scored_from == 0:
                continue
            if prompt not in self.ahead:
                part = min(range(len(out)), key=lambda p: len(out[p]))
                if len(out[part]) == count or not self._open(
                    prompt, part, self.rows_of(part), give_up=False
                ):
                    return
                self.ahead.append(prompt)
            _write(prompt, range(len(prompt.blocks))[: prompt.scored_from], out[prompt.part], count)

    def to_decode(self, steps: int, preempt: Callable[[Sample], Any]) -> list[tuple[Sample, int]]:
        """The rows that decode next, and how many own tokens each may reach.

        A row without a page for its next token takes the youngest's; one with less than ``steps``
        goes as far as it can.

        Args:
            preempt: reads the contents of a sequence's pages, which it then loses.
        """
        out = []
        for sequence in list(self.running):
            if sequence not in self.running or not sequence.prompt.ready:
                continue
            part = sequence.prompt.part
            goal = min(
                sequence.own + (1 if sequence.matcher is not None else steps), sequence.limit
            )
            while (lacking := pages_for(goal, PAGE) - len(sequence.pages)) > 0:
                if (pages := self._take(part, lacking)) is not None:
                    sequence.pages += pages
                elif sequence.room > sequence.own:
                    goal = sequence.room
                else:
                    victim = max(
                        (s for s in self.running if s.prompt.part == part), key=lambda s: s.order
                    )
                    self._preempt(victim, preempt)
                    if victim is sequence:
                        break
            if sequence in self.running:
                out.append((sequence, goal))
        return [(s, goal) for s, goal in out if s in self.running]

    def _preempt(self, sequence: Sample, read: Callable[[Sample], Any]) -> None:
        sequence.swapped = read(sequence) if sequence.own else None
        self._release(sequence)
        self.swapped.append(sequence)

    def finish(self, sequence: Sample) -> None:
        """Ends a sequence, wherever it is; its row and pages are free at once."""
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
        self, sequence: Sample, move: Callable[[int, Sequence[tuple[int, int, int, int, int]]], Any]
    ) -> None:
        """Lets later prompts find what a sequence that runs has drawn: copies of its whole blocks
        behind its prompt's.

        A prompt's page that is not full and the sequence's own, which begin with a page of their
        own, become pages without a gap.

        Args:
            move: makes pages of a part of others, see ``device.Moves``.
        """
        prompt, own = sequence.prompt, sequence.own
        if not prompt.ready or (prompt.blocks and prompt.blocks[0].root.closed):
            return
        tokens = (*prompt.request.prompt, *sequence.tokens)[: prompt.length + own]
        pool, (begin, cut) = self.pages[prompt.part], divmod(prompt.length, PAGE)
        held, new = pool.extend(prompt.key, tokens, begin)
        # own position o stands at cut + o behind the whole blocks: page j of them has the end of
        # own page j - 1 and the beginning of j
        moves = []
        for i, block in new:
            j = i - begin
            low, first = (
                (sequence.pages[j - 1], PAGE - cut)
                if j
                else (prompt.blocks[begin].page if cut else 0, 0)
            )
            # its last page may end within the page before
            high = sequence.pages[j] if j < len(sequence.pages) else 0
            moves.append((low, high, first, cut, block.page))
        if moves:
            move(prompt.part, moves)
        for _, block in new:
            block.ready = True
        pool.close(held)

    def _release(self, sequence: Sample) -> None:
        self.running.remove(sequence)
        self.pages[sequence.prompt.part].give(sequence.pages)
        sequence.pages = []
        sequence.prompt.users -= 1
        if not sequence.prompt.users:
            self._close(sequence.prompt)

    def check(self) -> None:
        """Whether all pages are accounted for; for tests.

        Raises:
            RuntimeError: see ``Pages.check``.
        """
        for part, pool in enumerate(self.pages):
            mine = [s for s in self.running if s.prompt.part == part]
            prompts = Counter(s.prompt for s in mine)
            if len(mine) > self.rows or any(prompt.users != n for prompt, n in prompts.items()):
                raise RuntimeError(
                    f"part {part} has more rows than there are, or a prompt other users than its"
                    " samples that run"
                )
            ahead = [prompt for prompt in self.ahead if prompt.part == part]
            users = Counter(b for prompt in (*prompts, *ahead) for b in prompt.blocks)
            unseen = [b.page for b in users if not b.indexed or b.root.closed]
            pool.check([page for s in mine for page in s.pages] + unseen, users)
        if any(s.pages or s.finish for s in (*self.waiting, *self.swapped)):
            raise RuntimeError("a sequence that does not run has pages, or has ended")
        if any(prompt.users for prompt in self.ahead) or not {*self.ahead} <= {
            s.prompt for s in self.waiting
        }:
            raise RuntimeError(
                "a prompt is read ahead that runs already, or that nobody waits with"
            )


def _write(
    prompt: Prompt, numbers: Iterable[int], into: list[tuple[Prompt, int]], count: int
) -> None:
    """Adds those of a prompt's blocks that are not written, until there are ``count``."""
    for i in numbers:
        if not prompt.blocks[i].ready and len(into) < count:
            prompt.blocks[i].ready = True
            into.append((prompt, i))


def longest_table(context: int) -> int:
    """Table entries of a row of ``context`` tokens: whole runs of a prefix and of its own part."""
    return RUN_PAGES * (-(-context // RUN) + 1)


def own_pages(request: Request) -> int:
    """Pages that one sample of a request has of its own at most."""
    return pages_for(request.max_tokens, PAGE)


def pages_needed(request: Request) -> int:
    """Pages that one sample of a request takes at most, its prompt's included."""
    return pages_for(len(request.prompt) - 1, PAGE) + own_pages(request)
