"""Requests to the engine, their validation, and completions."""

import dataclasses
import hashlib
from typing import Any

import numpy as np

from mint_jax.errors import UserError
from mint_jax.lora.tree import Slot, Stacks, check_resident
from mint_jax.models.base import Base
from mint_jax.rollout.device import ALTERNATIVES
from mint_jax.rollout.ranges import check_ranges

MAX_STOP_IDS = 64  # per request, including special tokens among its stop strings
MAX_BIASES = 300  # the limit of OpenAI's API
MAX_BIAS = 1e30  # times the largest repetition penalty this is still far within float32


class BadField(UserError):
    """An invalid ``field`` of a ``Request``."""

    def __init__(self, field: str, message: str):
        super().__init__(message)
        self.field = field


class ContextExceeded(BadField):
    """Prompt and ``max_tokens`` do not fit the context."""


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt, sampled ``n`` times.

    Attributes:
        prompt: token ids, at least one.
        adapter: slot to sample with. None uses the slot that residency has for ``revision``, or the
            bare base.
        max_tokens: maximum number of new tokens.
        temperature, top_k, top_p, min_p: see ``SamplingParams``; within ``ranges.RANGES``.
        repetition_penalty, frequency_penalty, presence_penalty: see ``rollout.sample.Penalties``;
            within ``ranges.RANGES``.
        logit_bias: (token id, value added to its logit), each id once.
        top_logprobs: number of most likely tokens returned at each position.
        prompt_logprobs: return the log-probabilities of the prompt's tokens.
        top_prompt_logprobs: as ``top_logprobs``, at each position of the prompt.
        target_prompt_logprobs: ids to score at each position of the prompt except the first, at
            most ALTERNATIVES; -1 is padding.
        prompt_alternatives: number of tokens drawn independently at each position of the prompt
            except the first.
        prompt_logprobs_last_n: score only the last n tokens of the prompt, so that the rest can
            come from the cache; None scores all.
        json_schema, regex, choice: constraint on the completion, see ``grammar.py``; at most one.
        seed: completion i draws from a hash of seed and i; the same seed gives the same tokens in
            any batch.
        stop_ids: token ids that end a completion; the id itself is kept.
        stop: strings that end a completion. The text ends before the string, the tokens with the
            one that completes it. A special token of the tokenizer, which decoded text omits, is
            matched by its id.
        revision: digest of the revision in the adapter's slot; completions carry it (law 7).
        version: unique number of weights without a digest. Prompts stay in the cache for later
            calls, as with ``revision``; with neither they are shared within one call only.
        tenant: owner of the request; prompts are shared and quotas counted per tenant.
        drafts: completions that these samples may resemble, such as an earlier revision's, for an
            engine with ``speculative_tokens``. They change the speed, never the tokens.
        prefixes: the first tokens of each sample, if they are known, such as those that the client
            of a broken stream has. Idle rows verify many at once; they change the speed, never the
            tokens.
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
    prompt_logprobs: bool = False
    top_prompt_logprobs: int = 0
    target_prompt_logprobs: tuple[tuple[int, ...], ...] | None = None
    prompt_alternatives: int = 0
    prompt_logprobs_last_n: int | None = None
    json_schema: str | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    seed: int = 0
    stop_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    revision: str | None = None
    version: int | None = None
    tenant: str = "default"
    drafts: tuple[tuple[int, ...], ...] = ()
    prefixes: tuple[tuple[int, ...], ...] = ()

    @property
    def first_scored(self) -> int | None:
        """First position whose next token is scored; None if the prompt is not scored."""
        numbers = self.prompt_logprobs, self.top_prompt_logprobs, self.prompt_alternatives
        if not any(numbers) and self.target_prompt_logprobs is None:
            return None
        count = self.prompt_logprobs_last_n
        return 0 if count is None else max(0, len(self.prompt) - 1 - count)


@dataclasses.dataclass(frozen=True, repr=False)
class Completion:
    """One sampled continuation. Fields that a request did not ask for are None.

    Attributes:
        tokens: ids, including a final stop id.
        logprobs: float32 per token, under the unmodified model (temperature 1, no filter, no
            penalty).
        drawn_logprobs: float32 per token, under the distribution that was sampled. Equal to
            ``logprobs`` without temperature, filters and penalties, and in greedy decoding.
        finish: ``stop``, ``length`` or ``cancelled``.
        text: decoded text before a stop string; None without a tokenizer.
        routes: expert ids visited by the input before each token, ``[tokens, L, X]``, if the engine
            records them.
        prompt_routes: those of the prompt except its last token, ``[prompt - 1, L, X]``; one array
            shared by all samples of a prompt.
        revision: digest of the sampled revision; None for the bare base.
        top_logprobs: (id, log-probability under the unmodified model) of the most likely tokens at
            each position, in descending order.
        prompt_logprobs: of the prompt's tokens except the first, under the unmodified model. With
            ``prompt_logprobs_last_n``, earlier entries are NaN, and empty lists in the next three
            fields.
        top_prompt_logprobs: as ``top_logprobs``, at each of these positions.
        target_prompt_logprobs: of the requested ids at each of these positions; 0 for -1.
        prompt_alternatives: (id, log-probability) of the tokens drawn at each of these positions.
        reused: prompt tokens found in the cache.
        request: for ``mint_jax.groups``; None except in completions of the Python API.
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
    prompt_logprobs: list[float] | None = None
    top_prompt_logprobs: list[list[tuple[int, float]]] | None = None
    target_prompt_logprobs: list[list[float]] | None = None
    prompt_alternatives: list[list[tuple[int, float]]] | None = None
    reused: int = 0
    request: Request | None = None

    def __repr__(self) -> str:
        text = "" if self.text is None else f"{self.text!r:.80}, "
        return f"Completion({text}{len(self.tokens)} tokens, {self.finish})"


def seed_of(seed: int, sample: int) -> int:
    # A hash: ``seed + sample`` would give requests with neighbouring seeds the same samples.
    digest = hashlib.blake2b(f"{seed}/{sample}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


def check(request: Request, base: Base, stacks: Stacks, can_decode: bool) -> None:
    """Raises ``UserError`` if a request cannot be sampled. ``can_decode``: the engine can decode
    tokens to text, which stop strings need.
    """
    context, vocab = base.cfg.context, base.cfg.vocab_size
    if not request.prompt:
        raise BadField("prompt", "the prompt is empty: give at least one token, such as bos")
    if request.max_tokens < 1 or request.n < 1:
        raise UserError(
            f"max_tokens is {request.max_tokens} and n is {request.n}; both must be at least 1"
        )
    check_ranges(request)
    for name in ("top_logprobs", "top_prompt_logprobs", "prompt_alternatives"):
        if not 0 <= getattr(request, name) <= ALTERNATIVES:
            raise UserError(f"{name} is {getattr(request, name)}; expected 0 to {ALTERNATIVES}")
    if len(request.prompt) + request.max_tokens > context:
        raise ContextExceeded(
            "prompt" if len(request.prompt) >= context else "max_tokens",
            f"a prompt of {len(request.prompt)} tokens and max_tokens {request.max_tokens} exceed"
            f" the context of {context}: shorten the prompt or lower max_tokens",
        )
    if min(request.prompt) < 0 or max(request.prompt) >= vocab:
        wrong = next(token for token in request.prompt if not 0 <= token < vocab)
        what = f"a prompt has token id {wrong}; this base has ids 0 to {vocab - 1}"
        raise BadField("prompt", what)
    _check_biases(request.logit_bias, vocab)
    _check_targets(request, vocab)
    if not 0 <= request.seed < 2**32:
        raise UserError(f"seed is {request.seed}; expected 0 to {2**32 - 1}")
    for i in request.stop_ids:
        if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < 2**31:
            raise BadField("stop_ids", f"stop_ids has {i!r}; expected token ids, 0 to {vocab - 1}")
    _check_drafts("drafts", request.drafts, vocab)
    _check_drafts("prefixes", request.prefixes, vocab)
    check_resident(request.adapter, stacks)
    _check_stop(request.stop, base, can_decode)
    if (count := len(stopping_by_id(request, base).stop_ids)) > MAX_STOP_IDS:
        raise BadField(
            "stop_ids",
            f"a request stops at {count} token ids; at most {MAX_STOP_IDS} are possible: use stop"
            " strings for the rest",
        )


def _check_biases(biases: tuple[tuple[int, float], ...], vocab: int) -> None:
    for token, bias in biases:
        if not (isinstance(token, int) and 0 <= token < vocab and abs(bias) <= MAX_BIAS):
            raise BadField(
                "logit_bias",
                f"logit_bias has {bias} for token {token!r}; expected a finite number, at most"
                f" {MAX_BIAS:g} in size (-{MAX_BIAS:g} bans a token), for one of the ids 0 to"
                f" {vocab - 1}",
            )
    if len({token for token, _ in biases}) < len(biases):
        raise BadField("logit_bias", f"logit_bias repeats a token: {biases}; give each id once")
    if len(biases) > MAX_BIASES:
        raise BadField(
            "logit_bias", f"logit_bias has {len(biases)} tokens; expected at most {MAX_BIASES}"
        )


def _check_drafts(name: str, drafts: Any, vocab: int) -> None:
    if isinstance(drafts, tuple) and all(isinstance(one, tuple) for one in drafts):
        every = [token for one in drafts for token in one]
        if all(type(token) is int and 0 <= token < vocab for token in every):
            return
    raise BadField(
        name, f"{name} is {drafts!r:.80}; expected tuples of token ids, 0 to {vocab - 1}"
    )


def _check_targets(request: Request, vocab: int) -> None:
    if (last := request.prompt_logprobs_last_n) is not None and last < 0:
        raise UserError(
            f"prompt_logprobs_last_n is {last}; expected the number of final prompt tokens to"
            " score, at least 0"
        )
    if (targets := request.target_prompt_logprobs) is None:
        return
    if len(targets) != (places := len(request.prompt) - 1):
        raise UserError(
            f"target_prompt_logprobs has {len(targets)} entries; a prompt of {places + 1} tokens"
            f" needs {places}, one for each token except the first"
        )
    if (most := max(map(len, targets), default=0)) > ALTERNATIVES:
        raise UserError(
            f"target_prompt_logprobs has {most} ids at one position; expected at most"
            f" {ALTERNATIVES}"
        )
    if wrong := [i for ids in targets for i in ids if not -1 <= i < vocab]:
        raise UserError(
            f"target_prompt_logprobs has token id {wrong[0]}; expected ids 0 to {vocab - 1}, or -1"
            " for padding"
        )


def _check_stop(stop: Any, base: Base, can_decode: bool) -> None:
    if not isinstance(stop, tuple) or not all(isinstance(text, str) for text in stop):
        raise UserError(
            f'stop is {stop!r}; expected strings: quote them, in a file as stop=(" 6",), on a'
            " command line as --config.sampling.stop=\"(' 6',)\""
        )
    if "" in stop:
        raise BadField(
            "stop", "a stop string is empty: remove it, since it would end every completion at once"
        )
    if stop and not can_decode:
        raise UserError(
            f"stop strings {stop!r} need a tokenizer, and {base.directory} has none: use stop_ids"
        )
    for text in stop:
        if inner := [special for special in _special(base) if special in text and special != text]:
            raise BadField(
                "stop",
                f"stop string {text!r} contains the special token {inner[0]!r}, which decoded text"
                f" omits, so it can never match: use {inner[0]!r} alone, or a string without it",
            )


def _special(base: Base) -> dict[str, int]:
    return {} if base.tokenizer is None else base.tokenizer.special_ids


def stopping_by_id(request: Request, base: Base) -> Request:
    """Returns the request with special tokens in ``stop`` moved to ``stop_ids``."""
    special = _special(base)
    ids = [special[text] for text in request.stop if text in special]
    if not ids:
        return request
    rest = tuple(text for text in request.stop if text not in special)
    all_ids = tuple(dict.fromkeys((*request.stop_ids, *ids)))
    return dataclasses.replace(request, stop=rest, stop_ids=all_ids)
