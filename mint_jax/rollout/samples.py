"""Samples of requests and the prompts that they share, while they wait or run, and completions."""

import dataclasses
from typing import Any, NamedTuple

from mint_jax.models.paged import EMPTY, PAGE, RUN, RUN_PAGES, TEAM
from mint_jax.rollout.device import Drawn
from mint_jax.rollout.pages import Block, pages_for
from mint_jax.rollout.request import Completion, Request
from mint_jax.rollout.stream import Piece


@dataclasses.dataclass(eq=False)
class CachedPrompt:
    """A request's prompt except its last token, in the ``blocks`` of a mesh ``part`` while samples
    of the request run.

    Attributes:
        key: tenant and version.
        reused: tokens that were cached when it was first opened.
        near: near pages that it has pinned, by block number.
        state: slot of the states after its last written block, on bases that have states.
        read: block whose snapshot it starts from, pinned while it is open.
        written: on bases with windows or states, number of leading blocks after which it can go on.
        scores: by block number.
    """

    request: Request
    key: tuple[str, Any]
    part: int = 0
    blocks: list[Block] = dataclasses.field(default_factory=list)
    users: int = 0
    reused: int | None = None
    near: dict[int, int] = dataclasses.field(default_factory=dict)
    state: int | None = None
    read: Block | None = None
    written: int | None = None
    routes: Any = None
    scores: dict[int, list[Any]] = dataclasses.field(default_factory=dict)

    @property
    def prefix(self) -> tuple[int, ...]:
        return self.request.prompt[:-1]

    @property
    def length(self) -> int:
        return len(self.request.prompt) - 1

    @property
    def ready(self) -> bool:
        """True if every block is written."""
        return not any(map(self.lacks, range(len(self.blocks))))

    def lacks(self, number: int) -> bool:
        """Returns True if a block is to be written, or the prompt cannot go on after it."""
        block = self.blocks[number]
        return not block.ready or (self.written is not None and number >= self.written)

    @property
    def source(self) -> int:
        """Slot of the states after the prefix."""
        if not self.blocks:
            return EMPTY
        if self.read is not None and self.read is self.blocks[-1]:
            assert self.read.state is not None
            return self.read.state
        return -1 if self.state is None else self.state

    @property
    def scored_from(self) -> int | None:
        """First block whose positions are scored."""
        # Such blocks are not shared, because cached blocks have no scores.
        first = self.request.first_scored
        return None if first is None else first // PAGE

    @property
    def shared(self) -> int:
        """Number of whole blocks that later prompts can find."""
        whole = self.length // PAGE
        return whole if self.scored_from is None else min(whole, self.scored_from)

    def scored(self) -> dict[str, Any]:
        """Returns the requested scores, keyed by the fields of ``Completion``."""
        request, first = self.request, self.request.first_scored
        if first is None:
            return {}
        # Each entry: logprobs of the targets, ids and logprobs of the most likely tokens, ids and
        # logprobs of the drawn alternatives.
        places: list[Any] = [None] * first
        if self.scores:
            scored = [place for i in sorted(self.scores) for place in zip(*self.scores[i])]
            places += scored[first - min(self.scores) * PAGE :]
        else:  # cancelled before prefill, or a prompt of one token
            places += [None] * (self.length - first)

        def pairs(kind: int, count: int) -> list[list[Any]] | None:
            if not count:
                return None
            both = (([], []) if at is None else (at[kind], at[kind + 1]) for at in places)
            return [list(zip(ids[:count], logprobs[:count])) for ids, logprobs in both]

        out: dict[str, Any] = {
            "top_prompt_logprobs": pairs(1, request.top_prompt_logprobs),
            "prompt_alternatives": pairs(3, request.prompt_alternatives),
        }
        if request.prompt_logprobs:
            out["prompt_logprobs"] = [float("nan") if at is None else at[0][0] for at in places]
        if (targets := request.target_prompt_logprobs) is not None:
            out["target_prompt_logprobs"] = [
                [] if at is None else [0.0 if i < 0 else p for i, p in zip(ids, at[0][1:])]
                for at, ids in zip(places, targets, strict=True)
            ]
        return out


@dataclasses.dataclass(eq=False)
class SampleState:
    """One sample of a request.

    Attributes:
        number, order: index among the request's samples, and admission order, smallest first.
        pages, state: its own pages, and its slot of states.
        near: near pages of its own pages that a window reaches, by number among ``pages``.
        swapped: handle of its pages' contents while they are on the host.
        finish: reason that it ended; None while it runs.
        matcher, stops: state of its grammar, and search for its stop strings.
        reach: most drafts at once: as many as were accepted last, twice as many if all were.
    """

    prompt: CachedPrompt
    number: int
    order: int
    owner: Any = None
    pages: list[int] = dataclasses.field(default_factory=list)
    state: int | None = None
    near: dict[int, int] = dataclasses.field(default_factory=dict)
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
    reach: int = 2

    @property
    def own(self) -> int:
        """Number of its own cached tokens: the prompt's last and all drawn except the last."""
        return len(self.tokens)

    @property
    def room(self) -> int:
        """Number of own tokens that its pages hold."""
        return len(self.pages) * PAGE

    @property
    def limit(self) -> int:
        return self.prompt.request.max_tokens

    @property
    def team(self) -> int | None:
        """Team that it reads its prompt with."""
        # A function of the request only: attention of a team and of one row may round differently.
        return self.number // TEAM if self.prompt.request.n > 1 and self.prompt.length else None

    def append(self, drawn: Drawn, row: int) -> Piece:
        """Appends the tokens of a row of a dispatch, and returns them."""
        n, kept = int(drawn.count[row]), self.prompt.request.top_logprobs
        tokens, logprobs = drawn.tokens[row, :n].tolist(), drawn.logprobs[row, :n].tolist()
        self.tokens += tokens
        self.logprobs += logprobs
        self.drawn_logprobs += drawn.drawn_logprobs[row, :n].tolist()
        if not kept:
            return Piece(self.number, tokens, logprobs)
        ids, values = drawn.top_ids[row, :n, :kept], drawn.top_logprobs[row, :n, :kept]
        top = [list(zip(*pair)) for pair in zip(ids.tolist(), values.tolist())]
        self.top += top
        return Piece(self.number, tokens, logprobs, top)

    def table(self) -> list[int]:
        """Returns its pages: those of the prefix, padded to a whole run, then its own."""
        prefix = [block.page for block in self.prompt.blocks]
        return prefix + [0] * (self._begin - len(prefix)) + self.pages

    @property
    def _begin(self) -> int:
        """Entry of its table where its own pages begin."""
        return -(-len(self.prompt.blocks) // RUN_PAGES) * RUN_PAGES

    def near_table(self) -> dict[int, int]:
        """Returns its near pages by entry of its table."""
        return self.prompt.near | {self._begin + i: page for i, page in self.near.items()}

    def places(self) -> dict[str, list[int]]:
        """Returns what it fills of a pool's places, by kind (``device.kind_of``)."""
        used = pages_for(self.own, PAGE)
        near = [page for i, page in sorted(self.near.items()) if i < used]
        states = [] if self.state is None else [self.state]
        return {"pages": self.pages[:used], "near": near, "states": states}

    def completion(self) -> Completion:
        """Returns its completion, once it has ended."""
        n, request, prompt = len(self.tokens), self.prompt.request, self.prompt
        return Completion(
            self.tokens,
            self.logprobs[:n],
            self.drawn_logprobs[:n],
            self.finish or "",
            self.text,
            routes=self.routes,
            prompt_routes=prompt.routes,
            revision=request.revision,
            top_logprobs=self.top[:n] if request.top_logprobs else None,
            reused=prompt.reused or 0,
            **prompt.scored(),
        )


class Row(NamedTuple):
    """A row of a decode dispatch: a sample, the number of own tokens that it may reach, and the
    drafts that it and the rows before it verify, of which it reads the last.
    """

    sample: SampleState
    goal: int
    drafts: tuple[int, ...] = ()

    @property
    def own(self) -> int:
        return self.sample.own + len(self.drafts)

    @property
    def token(self) -> int:
        """The token that it reads."""
        sample = self.sample
        drawn = [sample.prompt.request.prompt[-1], *sample.tokens[-1:], *self.drafts]
        return drawn[-1]


def longest_table(context: int) -> int:
    """Returns the table entries of a row: whole runs of prefix and of own tokens."""
    return RUN_PAGES * (-(-context // RUN) + 1)


def own_pages(request: Request) -> int:
    """Returns the maximum number of own pages of one sample of a request."""
    return pages_for(request.max_tokens, PAGE)


def pages_needed(request: Request) -> int:
    """Returns the maximum number of pages of one sample, with its prompt."""
    return pages_for(len(request.prompt) - 1, PAGE) + own_pages(request)
