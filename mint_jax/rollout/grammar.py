"""Completions that follow a JSON schema, a regular expression or a list of choices: which tokens
may come next.

``llguidance`` (Rust) computes the mask on the host in tens of microseconds a token, so a batch with
such a row decodes one token a dispatch; what other rows draw is the same, bit for bit, as a
dispatch's steps are never more than data.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import llguidance
import llguidance.numpy
import numpy as np

from mint_jax.errors import UserError
from mint_jax.models.base import Base
from mint_jax.rollout.request import BadField, Request
from mint_jax.rollout.schemas import has_finite_value

# JSON as ``json.dumps`` writes it: where white space is free, a model at a high temperature may
# write nothing else. A schema that has this key says itself how it is.
LAYOUT = {
    "x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
}
KEPT = 256  # grammars that are compiled once for all requests that name them
# A mask is computed in the engine's thread. With the default limit (1,000,000) one for
# (a{1000}){1000} takes 2 s; with this one 0.03 s.
FUEL = 200_000
# llguidance follows references by recursion, and a stack that overflows ends the process: chains of
# 1,500 do in 8 MiB. Schemas of at most LONGEST characters are compiled in a thread whose stack (of
# which only used pages take memory) holds the longest chain in them.
LONGEST, STACK = 1 << 18, 512 << 20

Matcher = Any  # llguidance.LLMatcher


def grammar_of(request: Request) -> tuple[str, str] | None:
    """What kind of grammar a request has, and its text; None without one.

    Raises:
        UserError: more than one.
    """
    choice = None if request.choice is None else json.dumps(request.choice)
    given = {"json_schema": request.json_schema, "regex": request.regex, "choice": choice}
    named = [(kind, text) for kind, text in given.items() if text is not None]
    if len(named) > 1:
        raise UserError(
            f"a request has {' and '.join(kind for kind, _ in named)}: give one of them"
        )
    return named[0] if named else None


class Grammars:
    """The grammars over one base's tokens."""

    def __init__(self, base: Base):
        self._base = base
        self._tokenizer: Any = None
        self._compiled: OrderedDict[tuple[str, str], Matcher] = OrderedDict()
        self._lock = threading.Lock()  # requests are checked in the threads of those who ask

    def matcher(self, request: Request) -> Matcher | None:
        """A new matcher at its beginning; None for a request without a grammar.

        Raises:
            UserError: a grammar that no text fits or that cannot be compiled, or a base without a
                tokenizer.
        """
        named = grammar_of(request)
        if named is None:
            return None
        with self._lock:
            found = self._compiled.get(named)
        if found is None:
            found = self._compile(*named)  # may take seconds: not under the lock
        with self._lock:
            self._compiled[named] = found
            self._compiled.move_to_end(named)
            if len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
        return found.deep_copy()

    def _compile(self, kind: str, text: str) -> Matcher:
        if len(text) > LONGEST:
            raise BadField(
                kind, f"{kind} has {len(text)} characters; at most {LONGEST} are possible"
            )
        try:
            return _on_large_stack(
                lambda: _matcher(self._tokens(kind), kind, text, self._base.cfg.vocab_size)
            )
        except UserError:
            raise
        except (ValueError, RecursionError) as error:
            reason = (
                "it is nested too deeply"
                if isinstance(error, RecursionError)
                else reason_of(str(error))
            )
        raise BadField(
            kind, f"{kind} {text[:200]!r} cannot be used: {reason}; give one that some text fits"
        )

    def _tokens(self, kind: str) -> Any:
        """Returns llguidance's own tokenizer, made once."""
        tokenizer = self._base.need_tokenizer()
        with self._lock:
            if self._tokenizer is None:
                end = tokenizer.eos_id
                if end is None:
                    raise UserError(
                        f"{kind} needs an end token, and the tokenizer in {self._base.directory}"
                        " names none"
                    )
                self._tokenizer = llguidance.LLTokenizer(
                    tokenizer.sources[0], n_vocab=self._base.cfg.vocab_size, eos_token=end
                )
            return self._tokenizer


def _matcher(tokenizer: Any, kind: str, text: str, vocab: int) -> Matcher:
    """Raises ``ValueError`` with the reason where nothing fits a grammar, or it is too large."""
    limits = llguidance.LLParserLimits(initial_lexer_fuel=FUEL, verbose_errors=False)
    matcher = llguidance.LLMatcher(tokenizer, _grammar(kind, text), log_level=0, limits=limits)
    begun = matcher.deep_copy()
    if not begun.get_error():
        mask_of(begun, vocab)
    if error := begun.get_error():
        raise ValueError(error)
    if kind == "json_schema" and not has_finite_value(json.loads(text)):
        raise ValueError("no JSON of finite length fits it")
    return matcher


def _on_large_stack(call: Callable[[], Any]) -> Any:
    done: Future[Any] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:
            done.set_exception(error)

    before = threading.stack_size(STACK)
    try:
        threading.Thread(target=run, name="grammar", daemon=True).start()
    finally:
        threading.stack_size(before)
    return done.result()


def reason_of(error: str) -> str:
    """Returns the first line of llguidance's message, in words."""
    line = error.strip().splitlines()[0]
    return "nothing fits it" if line.startswith("NoExtension") else line


def _grammar(kind: str, text: str) -> str:
    if kind == "json_schema":
        schema = json.loads(text)
        if isinstance(schema, dict):
            schema = LAYOUT | schema
        return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
    if kind == "regex":
        return llguidance.LLMatcher.grammar_from_regex(text)
    choices = json.loads(text)
    if not choices or not all(isinstance(choice, str) and choice for choice in choices):
        raise ValueError("expected texts, at least one, none of them empty")
    return llguidance.LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, choices)))


def words(vocab: int) -> int:
    """32-bit words of a mask over the vocabulary."""
    return -(-vocab // 32)


def mask_of(matcher: Matcher, vocab: int) -> np.ndarray:
    """Which tokens may come next: ``[words]`` uint32, token i at bit ``i % 32`` of word ``i //
    32``.
    """
    out = llguidance.numpy.allocate_token_bitmask(1, vocab)
    llguidance.numpy.fill_next_token_bitmask(matcher, out, 0)
    return out[0].view(np.uint32)
