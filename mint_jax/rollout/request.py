"""What is asked of the engine, and what it answers."""

import dataclasses
import hashlib
from typing import Any

import numpy as np

from mint_jax.errors import UserError
from mint_jax.lora.tree import Slot, Stacks, check_resident
from mint_jax.models.base import Base
from mint_jax.rollout.device import ALTERNATIVES
from mint_jax.rollout.ranges import check_ranges

MAX_STOP_IDS = 64  # of a request, those of special tokens among its stop strings included
MAX_BIASES = 300  # as many as OpenAI's API takes
MAX_BIAS = 1e30  # times the largest repetition penalty, still far within float32


class BadField(UserError):
    """A field of a ``Request`` is wrong.

    Attributes:
        field: its name.
    """

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
        adapter: None samples the bare base, or what residency has of ``revision``.
        n: completions wanted.
        max_tokens: new tokens at most.
        temperature, top_k, top_p, min_p: see ``SamplingParams``; within ``ranges.RANGES``.
        repetition_penalty, frequency_penalty, presence_penalty: see ``rollout.sample.Penalties``;
            within ``ranges.RANGES``.
        logit_bias: (token id, what is added to its logit), each id once.
        top_logprobs: of how many of the likeliest tokens at each place the log-probabilities are
            wanted.
        prompt_logprobs: whether the log-probabilities of the prompt's own tokens are wanted.
        top_prompt_logprobs: at each place of the prompt, as ``top_logprobs``.
        target_prompt_logprobs: ids at each place of the prompt but the first, at most ALTERNATIVES,
            whose log-probabilities there are wanted; -1 for none.
        prompt_alternatives: how many tokens are drawn at each place of the prompt but the first,
            each for itself.
        prompt_logprobs_last_n: what is asked of the prompt's places is told of its last n tokens
            alone, and the rest of it may come from the cache; None: of all.
        json_schema, regex, choice: what a completion must be, see ``grammar.py``; one of them at
            most.
        seed: completion i draws from a hash of seed and i; the same seed gives the same tokens in
            any batch.
        stop_ids: token ids that end a completion; the id itself is kept.
        stop: strings that end a completion: its text ends before the string, its tokens with the
            one completing it. One that is a special token of the tokenizer, which decoded text
            leaves out, ends it by that token's id.
        revision: digest of the revision that is in the adapter's slot, for the completions to name
            (law 7).
        version: of weights in the adapter's slot that have no digest yet, a number that no others
            have: prompts that they read stay in the cache for later calls, as those of a revision
            do. Of a slot with neither they are shared within one call.
        tenant: who asks: prompts are shared, and quotas counted, within a tenant.
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

    @property
    def first_scored(self) -> int | None:
        """The first place whose next token is scored; None where nothing is asked of the prompt."""
        asked = (
            self.prompt_logprobs,
            self.top_prompt_logprobs,
            self.target_prompt_logprobs is not None,
            self.prompt_alternatives,
        )
        if not any(asked):
            return None
        last = len(self.prompt) - 1
        return (
            0 if self.prompt_logprobs_last_n is None else max(0, last - self.prompt_logprobs_last_n)
        )


@dataclasses.dataclass(frozen=True, repr=False)
class Completion:
    """One sampled continuation.

    Attributes:
        tokens: ids, including a final stop id.
        logprobs: float32, one a token, under the model itself (temperature 1, no filter, no
            penalty).
        drawn_logprobs: those under the distribution that drew the tokens, temperature, filters and
            penalties included; ``logprobs`` where none changes anything, and in greedy decoding.
        finish: ``stop``, ``length`` or ``cancelled``.
        text: decoded text before a stop string; None without a tokenizer.
        routes: the experts that the input before each token visited, ``[tokens, L, X]``; None
            unless the engine records them.
        prompt_routes: those of the prompt but its last token, ``[prompt - 1, L, X]``; one array for
            all samples of a prompt.
        revision: digest of the revision that was sampled, as its request said; None for the bare
            base.
        top_logprobs: for each token the (id, log-probability under the model itself) of the
            likeliest at its place, the likeliest first; None unless asked for.
        prompt_logprobs: log-probabilities of the prompt's tokens but the first, under the model
            itself; None unless asked for. NaN for those before the last n, where only these are
            asked for; the next three have empty lists there.
        top_prompt_logprobs: as ``top_logprobs``, at the places of the prompt's tokens but the
            first.
        target_prompt_logprobs: of the ids that the request names at each of these places; 0 for -1.
        prompt_alternatives: (id, log-probability) of the tokens drawn at each of these places.
        reused: tokens of the prompt that were in the cache when it came.
        request: what was asked, for ``mint_jax.groups``; None unless the Python face asked.
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
        what = (
            f"{len(self.tokens)} tokens"
            if self.text is None
            else f"{self.text!r:.80}, {len(self.tokens)} tokens"
        )
        return f"Completion({what}, {self.finish})"


def seed_of(seed: int, sample: int) -> int:
    """The seed of one sample: a hash, so that neighbouring requests' samples never are each
    other's, as with ``seed + sample``.
    """
    return int.from_bytes(
        hashlib.blake2b(f"{seed}/{sample}".encode(), digest_size=4).digest(), "little"
    )


def check(request: Request, base: Base, stacks: Stacks, can_decode: bool) -> None:
    """Refuses a request that cannot be sampled.

    Args:
        can_decode: whether there is text of token ids, for stop strings.

    Raises:
        UserError: an empty prompt, one that does not fit the context, token ids outside the
            vocabulary, settings out of their range, or stop strings that cannot match.
    """
    context, vocab = base.cfg.context, base.cfg.vocab_size
    if not request.prompt:
        raise BadField("prompt", "a prompt has no tokens: give at least one (a bos token, say)")
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
        raise BadField(
            "prompt", f"a prompt has token id {wrong}; this base has ids 0 to {vocab - 1}"
        )
    _check_biases(request.logit_bias, vocab)
    _check_targets(request, vocab)
    if not 0 <= request.seed < 2**32:
        raise UserError(f"seed is {request.seed}; expected 0 to {2**32 - 1}")
    if wrong := [
        i
        for i in request.stop_ids
        if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < 2**31
    ]:
        raise BadField(
            "stop_ids", f"stop_ids has {wrong[0]!r}; expected token ids, 0 to {vocab - 1}"
        )
    check_resident(request.adapter, stacks)
    _check_stop(request.stop, base, can_decode)
    if (count := len(stopping_by_id(request, base).stop_ids)) > MAX_STOP_IDS:
        raise BadField(
            "stop_ids",
            f"a request stops at {count} token ids; at most {MAX_STOP_IDS} are possible: give the"
            " rest as stop strings",
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
        raise BadField("logit_bias", f"logit_bias names a token twice: {biases}; give each id once")
    if len(biases) > MAX_BIASES:
        raise BadField(
            "logit_bias", f"logit_bias has {len(biases)} tokens; at most {MAX_BIASES} are possible"
        )


def _check_targets(request: Request, vocab: int) -> None:
    if (last := request.prompt_logprobs_last_n) is not None and last < 0:
        raise UserError(
            f"prompt_logprobs_last_n is {last}; expected how many of the prompt's last tokens are"
            " scored, at least 0"
        )
    if (targets := request.target_prompt_logprobs) is None:
        return
    if len(targets) != (places := len(request.prompt) - 1):
        raise UserError(
            f"target_prompt_logprobs has {len(targets)} places; a prompt of {places + 1} tokens has"
            f" {places}, all but the first"
        )
    if (most := max(map(len, targets), default=0)) > ALTERNATIVES:
        raise UserError(
            f"target_prompt_logprobs names {most} ids at one place; at most {ALTERNATIVES} are"
            " possible"
        )
    if wrong := [i for ids in targets for i in ids if not -1 <= i < vocab]:
        raise UserError(
            f"target_prompt_logprobs has token id {wrong[0]}; this base has ids 0 to {vocab - 1},"
            " and -1 is none"
        )


def _check_stop(stop: Any, base: Base, can_decode: bool) -> None:
    if not isinstance(stop, tuple) or not all(isinstance(text, str) for text in stop):
        raise UserError(
            f'stop is {stop!r}; expected strings: quote them, in a file as stop=(" 6",), on a'
            " command line as --config.sampling.stop=\"(' 6',)\""
        )
    if "" in stop:
        raise BadField(
            "stop", "a stop string is empty: remove it, it would end every completion at once"
        )
    if stop and not can_decode:
        raise UserError(
            f"stop strings {stop!r} need a tokenizer, and {base.directory} has none: use stop_ids"
        )
    for text in stop:
        if held := [special for special in _special(base) if special in text and special != text]:
            raise BadField(
                "stop",
                f"stop string {text!r} holds the special token {held[0]!r}, which decoded text"
                f" leaves out, so it would never match: stop at {held[0]!r} alone, or at text"
                " alone",
            )


def _special(base: Base) -> dict[str, int]:
    return {} if base.tokenizer is None else base.tokenizer.special_ids


def stopping_by_id(request: Request, base: Base) -> Request:
    """The request with special tokens among its stop strings as ids."""
    ids = [_special(base)[text] for text in request.stop if text in _special(base)]
    if not ids:
        return request
    rest = tuple(text for text in request.stop if text not in _special(base))
    return dataclasses.replace(
        request, stop=rest, stop_ids=tuple(dict.fromkeys((*request.stop_ids, *ids)))
    )
