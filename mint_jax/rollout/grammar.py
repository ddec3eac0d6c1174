"""Token masks for completions constrained by a JSON schema, a regular expression or a list of
choices.

``llguidance`` (Rust) computes a mask on the host in tens of microseconds per token. A dispatch with
such a row therefore decodes one token. Other rows still draw the same bits, because the number of
steps is data and not a shape.
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

# JSON in the layout of ``json.dumps``. With free white space, a model at a high temperature may
# write nothing else. A schema with this key overrides the layout.
LAYOUT = {
    "x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
}
KEPT = 256  # compiled grammars in the LRU cache
# Masks are computed in the engine's thread. One mask for (a{1000}){1000} takes 2 s with the default
# limit of 1,000,000, and 0.03 s with this one.
FUEL = 200_000
# llguidance follows references by recursion, and a stack overflow kills the process: a chain of
# 1,500 references overflows 8 MiB. Schemas are limited to LONGEST characters and compiled in a
# thread whose stack holds the longest chain; only pages that are used take memory.
LONGEST, STACK = 1 << 18, 512 << 20

Matcher = Any  # llguidance.LLMatcher


def grammar_of(request: Request) -> tuple[str, str] | None:
    """Returns the kind and the text of a request's grammar; None without one."""
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
        self._lock = threading.Lock()  # requests are checked in their callers' threads

    def matcher(self, request: Request) -> Matcher | None:
        """Returns a new matcher in its initial state; None for a request without a grammar. Raises
        ``UserError`` for a grammar that no text matches or that cannot be compiled, and for a base
        without a tokenizer.
        """
        named = grammar_of(request)
        if named is None:
            return None
        with self._lock:
            found = self._compiled.get(named)
        if found is None:
            found = self._compile(*named)  # may take seconds, so outside the lock
        with self._lock:
            self._compiled[named] = found
            self._compiled.move_to_end(named)
            if len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
        return found.deep_copy()

    def _compile(self, kind: str, text: str) -> Matcher:
        if len(text) > LONGEST:
            raise BadField(kind, f"{kind} has {len(text)} characters; expected at most {LONGEST}")
        try:
            return _on_large_stack(
                lambda: _matcher(self._tokens(kind), kind, text, self._base.cfg.vocab_size)
            )
        except UserError:
            raise
        except (ValueError, RecursionError) as error:
            is_deep = isinstance(error, RecursionError)
            reason = "it is nested too deeply" if is_deep else reason_of(str(error))
        raise BadField(kind, f"{kind} {text[:200]!r} cannot be used: {reason}; change the grammar")

    def _tokens(self, kind: str) -> Any:
        tokenizer = self._base.need_tokenizer()
        with self._lock:
            if self._tokenizer is None:
                end = tokenizer.eos_id
                if end is None:
                    raise UserError(
                        f"{kind} needs an end token, and the tokenizer in {self._base.directory}"
                        " defines none"
                    )
                self._tokenizer = llguidance.LLTokenizer(
                    tokenizer.sources[0], n_vocab=self._base.cfg.vocab_size, eos_token=end
                )
            return self._tokenizer


def _matcher(tokenizer: Any, kind: str, text: str, vocab: int) -> Matcher:
    """Raises ``ValueError`` with the reason if no text matches, or the grammar is too large."""
    limits = llguidance.LLParserLimits(initial_lexer_fuel=FUEL, verbose_errors=False)
    matcher = llguidance.LLMatcher(tokenizer, _grammar(kind, text), log_level=0, limits=limits)
    begun = matcher.deep_copy()
    if not begun.get_error():
        mask_of(begun, vocab)
    # A schema whose every value contains itself forces endless tokens: the parser's limit finds it
    # at the first of them.
    if not begun.get_error() and (forced := begun.compute_ff_tokens()):
        begun.consume_token(forced[0])
    if error := begun.get_error():
        raise ValueError(error)
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
    line = error.strip().splitlines()[0]
    return "no text matches it" if line.startswith("NoExtension") else line


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
        raise ValueError("expected at least one choice, none of them empty")
    return llguidance.LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, choices)))


def words(vocab: int) -> int:
    return -(-vocab // 32)


def mask_of(matcher: Matcher, vocab: int) -> np.ndarray:
    """Returns the mask of allowed next tokens, ``[words]`` uint32: token i is bit ``i % 32`` of
    word ``i // 32``.
    """
    out = llguidance.numpy.allocate_token_bitmask(1, vocab)
    llguidance.numpy.fill_next_token_bitmask(matcher, out, 0)
    return out[0].view(np.uint32)
