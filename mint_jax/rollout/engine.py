"""The sampling engine's door: requests in, completions out.

``DenseEngine`` packs requests into blocks of equal shape and runs ``generate``. A paged engine with continuous batching
takes its place behind the same two types and the same ``generate`` method.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from mint_jax import multihost
from mint_jax.data.buckets import ShapeBook, round_up
from mint_jax.errors import UserError
from mint_jax.lora.blocks import bind_blocks, plan_blocks
from mint_jax.lora.tree import Slot, Stacks, check_resident
from mint_jax.models.base import Base
from mint_jax.rollout import generate as program
from mint_jax.rollout.sample import Penalties, SamplingParams

# Tokens between two looks of the host: at stop strings, which only text shows, and at what else it has to do between steps. A look
# waits for the device and reads back all tokens; between looks up to 15 tokens are drawn in vain behind a stop string, and cut off.
CHECK_EVERY = 16
MAX_ALTERNATIVES = 20  # tokens whose log-probabilities are told at each place, as many as OpenAI's API tells


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt, sampled ``n`` times.

    Attributes:
        prompt: token ids, at least one.
        adapter: None samples the bare base.
        n: completions wanted.
        max_tokens: new tokens at most.
        temperature, top_k, top_p, min_p: see ``SamplingParams``.
        repetition_penalty, frequency_penalty, presence_penalty: see ``rollout.sample.Penalties``.
        logit_bias: (token id, what is added to its logit), each id once.
        top_logprobs: of how many of the likeliest tokens at each place the log-probabilities are wanted.
        seed: completion i uses ``seed + i``; the same seed gives the same tokens in any batch.
        stop_ids: token ids that end a completion; the id itself is kept.
        stop: strings that end a completion: its text ends before the string, its tokens with the one completing it. One that is a
            special token of the tokenizer, which decoded text leaves out, ends it by that token's id.
        revision: digest of the revision that is in the adapter's slot, for the completions to name (law 7).
    """

    prompt: tuple[int, ...]
    adapter: Slot | None = None
    n: int = 1
    max_tokens: int = 64
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    top_logprobs: int = 0
    seed: int = 0
    stop_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    revision: str | None = None

    @property
    def penalised(self) -> bool:
        """Whether anything changes its logits before temperature and filters."""
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty, self.logit_bias) != (1, 0, 0, ())


@dataclasses.dataclass(frozen=True)
class Completion:
    """One sampled continuation.

    Attributes:
        tokens: ids, including a final stop id.
        logprobs: float32, one a token, under the model itself (temperature 1, no filter, no penalty).
        drawn_logprobs: those under the distribution that drew the tokens, temperature, filters and penalties included; ``logprobs``
            where none changes anything, and in greedy decoding.
        finish: ``stop`` or ``length``.
        text: decoded text before a stop string; None without a tokenizer.
        routes: the experts that the input before each token visited, ``[tokens, L, X]``; None unless the engine records them.
        prompt_routes: those of the prompt but its last token, ``[prompt - 1, L, X]``; one array for all samples of a prompt.
        revision: digest of the revision that was sampled, as its request said; None for the bare base.
        top_logprobs: for each token the (id, log-probability under the model itself) of the likeliest at its place, the likeliest first;
            None unless asked for.
    """

    tokens: list[int]
    logprobs: list[float]
    drawn_logprobs: list[float]
    finish: str
    text: str | None
    routes: np.ndarray | None = None
    prompt_routes: np.ndarray | None = None
    revision: str | None = None
    top_logprobs: list[list[tuple[int, float]]] | None = None


class _Drawn(NamedTuple):
    """What the device drew so far, on the host."""

    tokens: np.ndarray
    logprobs: np.ndarray
    drawn_logprobs: np.ndarray
    lengths: np.ndarray
    stopped: np.ndarray
    done: np.ndarray

    def row(self, r: int, n: int | None = None) -> tuple[list[int], list[float], list[float]]:
        """The first ``n`` tokens of a row, or all, and their two log-probabilities."""
        kept = slice(0, self.lengths[r] if n is None else n)
        return self.tokens[r, kept].tolist(), self.logprobs[r, kept].tolist(), self.drawn_logprobs[r, kept].tolist()


class _Top(NamedTuple):
    """The likeliest tokens at each place and their log-probabilities, ``[B, C, K]``, on the host."""

    ids: np.ndarray
    logprobs: np.ndarray

    def put(self, completion: Completion, row: int, count: int) -> Completion:
        """The completion of a row with the ``count`` likeliest; as it is where none were asked for."""
        if not count:
            return completion
        ids, logprobs = (part[row, : len(completion.tokens), :count].tolist() for part in self)
        return dataclasses.replace(completion, top_logprobs=[list(zip(*pair)) for pair in zip(ids, logprobs)])


class _Routes(NamedTuple):
    """Experts of prompts ``[L, Q, T, X]`` and of new tokens ``[L, B, C, X]``, on the host."""

    prompts: np.ndarray
    new: np.ndarray

    def put(self, completions: list[Completion], prompt: int, rows: range, length: int) -> list[Completion]:
        """The completions of one prompt with their routes."""
        before = self.prompts[:, prompt, :length].swapaxes(0, 1)
        out = []
        for row, c in zip(rows, completions):
            own = self.new[:, row, : len(c.tokens) - 1].swapaxes(0, 1)  # the last token was drawn, but never read
            out.append(dataclasses.replace(c, routes=np.concatenate([before[-1:], own]), prompt_routes=before[:-1]))
        return out


class DenseEngine:
    """Samples with a dense cache, one group of blocks at a time.

    Args:
        base: the resident base.
        decode: text of token ids, for stop strings and ``Completion.text``; None without a tokenizer.
        max_rows: rows decoded together at most.
        keep_routes: record the experts that every token visits, for replay in training (R3).

    Raises:
        UserError: ``keep_routes`` with a base that has no experts.
    """

    def __init__(self, base: Base, decode: Callable[[list[int]], str] | None = None, max_rows: int = 256, keep_routes: bool = False):
        if keep_routes and base.cfg.experts is None:
            raise UserError(f"replay asks for routes, but {base.name} has no experts: switch it off")
        self.keep_routes = keep_routes
        self.base = base
        self.decode = decode
        self.max_rows = max_rows
        self.shapes = ShapeBook()

    def generate(
        self,
        requests: Sequence[Request],
        stacks: Stacks | None = None,
        progress: Callable[[int, int], None] | None = None,
        between_steps: Callable[[], Any] | None = None,
        shapes: ShapeBook | None = None,
        finished: Callable[[dict[int, list[Completion]]], Any] | None = None,
    ) -> list[list[Completion]]:
        """Samples every request; results are in the order of the requests, ``n`` completions each.

        Args:
            stacks: resident adapters, by bucket rank.
            between_steps: called before each group and after at most ``CHECK_EVERY`` tokens a row, while the device has no step
                under way: the place to write other slots of ``stacks``. The rows that run took copies of theirs.
            progress: called with (requests done, requests) after each group.
            shapes: the book of padded sizes to go by, where results must not depend on what else this engine sampled.
            finished: called after each group with the completions of its requests, by their indices.

        Raises:
            UserError: an empty prompt, one that does not fit the context, token ids outside the vocabulary, settings out of their
                range, or stop strings that cannot match. Checked for all requests before the first is run.
        """
        for request in requests:
            self.check(request, stacks or {})
        requests = [self._stopping_by_id(request) for request in requests]
        out: list[list[Completion]] = [[] for _ in requests]
        done = 0
        for n in sorted({r.n for r in requests}):
            same = [i for i, r in enumerate(requests) if r.n == n]
            for group in self._groups(same, requests):
                if between_steps is not None:
                    between_steps()
                results = dict(self._run(group, requests, stacks or {}, between_steps, shapes or self.shapes))
                for i, completions in results.items():
                    out[i] = completions
                done += len(group)
                if finished is not None:
                    finished(results)
                if progress is not None:
                    progress(done, len(requests))
        return out

    def check(self, request: Request, stacks: Stacks) -> None:
        """Refuses a request that cannot be sampled; see ``generate``."""
        context, vocab = self.base.cfg.context, self.base.cfg.vocab_size
        if not request.prompt:
            raise UserError("a prompt has no tokens: give at least one (a bos token, say)")
        if request.max_tokens < 1 or request.n < 1:
            raise UserError(f"max_tokens is {request.max_tokens} and n is {request.n}; both must be at least 1")
        ranges = request.temperature >= 0, 0 <= request.top_k < 2**31, 0 < request.top_p <= 1, 0 <= request.min_p <= 1
        if not all(ranges):
            raise UserError(
                f"temperature {request.temperature}, top_k {request.top_k}, top_p {request.top_p}, min_p {request.min_p}: "
                "expected temperature >= 0, top_k >= 0 (0: all), 0 < top_p <= 1, 0 <= min_p <= 1"
            )
        if not 0 <= request.top_logprobs <= MAX_ALTERNATIVES:
            raise UserError(f"top_logprobs is {request.top_logprobs}; expected 0 to {MAX_ALTERNATIVES}")
        if len(request.prompt) + request.max_tokens > context:
            raise UserError(
                f"a prompt of {len(request.prompt)} tokens and max_tokens {request.max_tokens} exceed the context of {context}: "
                "shorten the prompt or lower max_tokens"
            )
        if min(request.prompt) < 0 or max(request.prompt) >= vocab:
            wrong = next(token for token in request.prompt if not 0 <= token < vocab)
            raise UserError(f"a prompt has token id {wrong}; this base has ids 0 to {vocab - 1}")
        penalties = request.repetition_penalty, request.frequency_penalty, request.presence_penalty
        if not (all(map(math.isfinite, penalties)) and request.repetition_penalty > 0):
            raise UserError(
                f"repetition_penalty {penalties[0]}, frequency_penalty {penalties[1]}, presence_penalty {penalties[2]}: expected finite "
                "numbers, the first above 0 (1: none)"
            )
        for token, bias in request.logit_bias:
            if not (isinstance(token, int) and 0 <= token < vocab and math.isfinite(bias)):
                raise UserError(f"logit_bias has {bias} for token {token!r}; expected a finite number for one of the ids 0 to {vocab - 1}")
        if len({token for token, _ in request.logit_bias}) < len(request.logit_bias):
            raise UserError(f"logit_bias names a token twice: {request.logit_bias}; give each id once")
        if not 0 <= request.seed < 2**32:
            raise UserError(f"seed is {request.seed}; expected 0 to {2**32 - 1}")
        if wrong := [i for i in request.stop_ids if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < 2**31]:
            raise UserError(f"stop_ids has {wrong[0]!r}; expected token ids, 0 to {vocab - 1}")
        check_resident(request.adapter, stacks)
        self._check_stop(request.stop)

    def _check_stop(self, stop: tuple[str, ...]) -> None:
        if not isinstance(stop, tuple) or not all(isinstance(text, str) for text in stop):
            raise UserError(
                f'stop is {stop!r}; expected strings: quote them, in a file as stop=(" 6",), on a command line as '
                "--config.sampling.stop=\"(' 6',)\""
            )
        if "" in stop:
            raise UserError("a stop string is empty: remove it, it would end every completion at once")
        if stop and self.decode is None:
            raise UserError(f"stop strings {stop!r} need a tokenizer, and {self.base.directory} has none: use stop_ids")
        for text in stop:
            if held := [special for special in self._special if special in text and special != text]:
                raise UserError(
                    f"stop string {text!r} holds the special token {held[0]!r}, which decoded text leaves out, so it would never match: "
                    f"stop at {held[0]!r} alone, or at text alone"
                )

    @property
    def _special(self) -> dict[str, int]:
        return {} if self.base.tokenizer is None else self.base.tokenizer.special_ids

    def _stopping_by_id(self, request: Request) -> Request:
        """The request with special tokens among its stop strings as ids."""
        ids = [self._special[text] for text in request.stop if text in self._special]
        if not ids:
            return request
        rest = tuple(text for text in request.stop if text not in self._special)
        return dataclasses.replace(request, stop=rest, stop_ids=(*request.stop_ids, *ids))

    def _groups(self, members: list[int], requests: Sequence[Request]) -> list[list[int]]:
        """Requests that run together: at most ``max_rows`` rows, of similar length where there are more than fit."""
        per_group = max(1, self.max_rows // requests[members[0]].n)
        if len(members) > per_group:
            members = sorted(members, key=lambda i: (len(requests[i].prompt), requests[i].max_tokens))
        return [members[k : k + per_group] for k in range(0, len(members), per_group)]

    def _run(
        self,
        group: list[int],
        requests: Sequence[Request],
        stacks: Stacks,
        between_steps: Callable[[], Any] | None,
        shapes: ShapeBook,
    ) -> Iterator[tuple[int, list[Completion]]]:
        """Samples one group of requests with equal ``n``; yields each request's index and completions."""
        rollouts = requests[group[0]].n
        plan = plan_blocks([requests[i].adapter for i in group], self.base.row_multiple)
        order = [None if k is None else requests[group[k]] for k in plan.order]
        T, C = shapes.fit((max(len(r.prompt) for r in order if r), max(r.max_tokens for r in order if r)), least=(16, 8))
        prompts, lengths, sampling, limits = _arrays(order, rollouts, min(T, self.base.cfg.context))
        rows = [r for r in order for _ in range(rollouts)]
        lora = bind_blocks(plan, stacks, self.base.dtype)
        args = self.base.params, lora
        with jax.set_mesh(self.base.mesh):
            asked = any(r and r.top_logprobs for r in order)
            sizes = {
                "rollouts": rollouts,
                "new_tokens": min(C, self.base.cfg.context),
                "keep_routes": self.keep_routes,
                "keep_top": MAX_ALTERNATIVES if asked else 0,  # one program for any number
            }
            cache, state, prompt_routes = program.prefill(*args, prompts, lengths, sampling, limits, cfg=self.base.cfg, **sizes)
            watching = any(r and r.stop for r in rows)
            steps = np.int32(CHECK_EVERY if watching or between_steps is not None else C)
            while True:
                state = program.decode(*args, cache, lengths, state, sampling, limits, steps, cfg=self.base.cfg)
                drawn = _Drawn(*multihost.to_host(tuple(getattr(state, field) for field in _Drawn._fields)))
                done = drawn.done
                if watching:
                    # Every process would find the same here, but each in its own time, and one that left the loop alone would
                    # be missed in the next step's collectives: one of them says.
                    done = np.array(multihost.agree("rows that are done", lambda drawn=drawn: self._done(drawn, rows).tolist()))
                    state = dataclasses.replace(state, done=done)
                if done.all():
                    break
                if between_steps is not None:
                    between_steps()
        recorded = None if prompt_routes is None else _Routes(*multihost.to_host((prompt_routes, state.routes)))
        top = None if state.top is None else _Top(*multihost.to_host(state.top))
        for k, i in enumerate(plan.order):
            if i is not None:
                request = requests[group[i]]
                mine = range(k * rollouts, (k + 1) * rollouts)
                completions = [self._completion(drawn, r, request) for r in mine]
                if top is not None:
                    completions = [top.put(c, r, request.top_logprobs) for c, r in zip(completions, mine)]
                yield group[i], completions if recorded is None else recorded.put(completions, k, mine, len(request.prompt))

    def _done(self, drawn: _Drawn, rows: Sequence[Request | None]) -> np.ndarray:
        """``[B]`` bool: rows that the device found done, and those whose text holds a stop string."""
        return drawn.done | [r is not None and self._cut(drawn.row(k)[0], r)[0] is not None for k, r in enumerate(rows)]

    def _cut(self, tokens: list[int], request: Request) -> tuple[int | None, str | None]:
        """How many tokens it takes to complete the first stop string, and the text before it."""
        if self.decode is None:
            return None, None
        text = self.decode(tokens)
        if not any(stop in text for stop in request.stop):
            return None, text
        low, high = 1, len(tokens)
        # The shortest prefix whose text holds a stop string, by halves: a token may complete several characters, or half of one, so
        # that where a text is cut says nothing of which token did it; once there, a stop string stays in all longer prefixes.
        while low < high:
            middle = (low + high) // 2
            if any(stop in self.decode(tokens[:middle]) for stop in request.stop):
                high = middle
            else:
                low = middle + 1
        text = self.decode(tokens[:low])
        return low, text[: min(text.find(stop) for stop in request.stop if stop in text)]

    def _completion(self, drawn: _Drawn, row: int, request: Request) -> Completion:
        cut, text = self._cut(drawn.row(row)[0], request)
        finish = "stop" if cut is not None or drawn.stopped[row] else "length"
        return Completion(*drawn.row(row, cut), finish, text, revision=request.revision)


def _arrays(order: Sequence[Request | None], rollouts: int, length: int) -> tuple[np.ndarray, np.ndarray, SamplingParams, program.Limits]:
    """Prompts ``[Q, T]``, lengths ``[Q]`` and per-row settings ``[Q G]``; padding has an empty prompt and no tokens to draw."""
    filled = [r or Request((0,), max_tokens=0) for r in order]
    prompts = np.zeros((len(order), length), np.int32)
    for row, request in enumerate(filled):
        prompts[row, : len(request.prompt)] = request.prompt
    rows = [r for r in filled for _ in range(rollouts)]
    stop_ids = np.full((len(rows), max(1, max(len(r.stop_ids) for r in rows))), -1, np.int32)
    for row, request in enumerate(rows):
        stop_ids[row, : len(request.stop_ids)] = request.stop_ids

    def column(dtype: type, values: Iterable[float]) -> Any:
        return np.array(list(values), dtype)

    # The noise of a row follows from its request's seed and its number among the request's samples, not from its place in this
    # batch: the same request draws the same tokens in any company.
    sampling = SamplingParams(
        temperature=column(np.float32, (r.temperature for r in rows)),
        top_k=column(np.int32, (r.top_k for r in rows)),
        top_p=column(np.float32, (r.top_p for r in rows)),
        min_p=column(np.float32, (r.min_p for r in rows)),
        seed=column(np.uint32, ((r.seed + k % rollouts) & 0xFFFFFFFF for k, r in enumerate(rows))),
        penalties=_penalties(rows),
    )
    limits = program.Limits(column(np.int32, (r.max_tokens for r in rows)), stop_ids)  # type: ignore[arg-type]
    return prompts, column(np.int32, (len(r.prompt) for r in filled)), sampling, limits


def _penalties(rows: Sequence[Request]) -> Penalties | None:
    if not any(r.penalised for r in rows):
        return None
    bias_ids = np.full((len(rows), round_up(max(1, max(len(r.logit_bias) for r in rows)))), -1, np.int32)
    bias = np.zeros(bias_ids.shape, np.float32)
    for row, request in enumerate(rows):
        if request.logit_bias:
            bias_ids[row, : len(request.logit_bias)], bias[row, : len(request.logit_bias)] = zip(*request.logit_bias)
    columns = np.array([(r.repetition_penalty, r.frequency_penalty, r.presence_penalty) for r in rows], np.float32)
    return Penalties(*columns.T, bias_ids, bias)  # type: ignore[arg-type]
