"""Answers of completions and chats: one body, or the chunks of a stream."""

import collections
import dataclasses
import json
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

from mint_jax.rollout.request import Completion
from mint_jax.rollout.stream import Piece
from mint_jax.service.growing import Growing, Places, TokenTexts
from mint_jax.service.openai_types import CompletionSpec, Prompt
from mint_jax.service.weights import Model

FINISH = {"cancelled": "abort"}  # vLLM's word; no word of OpenAI's fits


# a token, its log-probability, the likeliest tokens of its place
Entry = tuple[int, float | None, Sequence[tuple[int, float]]]


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a completion, or all of it.

    Attributes:
        text: decoded text.
        tokens: their ids.
        entries: of the tokens that ``logprobs`` names, see ``Answer._named``.
        starts: position of each entry in the completion's text, in characters.
    """

    text: str = ""
    tokens: Sequence[int] = ()
    entries: Sequence[Entry] = ()
    starts: Sequence[int] = ()

    def __add__(self, other: "Part") -> "Part":
        return Part(
            self.text + other.text,
            [*self.tokens, *other.tokens],
            [*self.entries, *other.entries],
            [*self.starts, *other.starts],
        )


class Answer:
    """The answer to one body.

    Args:
        decode: returns the text of token ids.
        fingerprint: of the server, for ``system_fingerprint``.
    """

    end = "data: [DONE]\n\n"  # of a stream

    def __init__(
        self,
        spec: CompletionSpec,
        model: Model,
        texts: TokenTexts,
        decode: Callable[[list[int]], str],
        fingerprint: str = "",
    ):
        self.spec, self.model, self._texts, self._fingerprint = spec, model, texts, fingerprint
        self.id = f"{'chatcmpl' if spec.chat else 'cmpl'}-{secrets.token_hex(12)}"
        self.created = int(time.time())
        marker = None if spec.tools is None else spec.tools.marker
        self._partial = [
            Growing(decode, texts, prompt.tokens, spec.request.stop, marker)
            for prompt in spec.prompts
            for _ in range(spec.request.n if spec.stream else 0)
        ]
        self._drawn: list[list[Entry]] = [[] for _ in self._partial]
        self._opened: set[int] = set()  # choices with a chunk

    # -- whole answers

    def whole(self, results: Sequence[Sequence[Completion]]) -> dict[str, Any]:
        """Returns the body; ``results`` are the completions of each prompt."""
        choices = []
        for prompt, completions in zip(self.spec.prompts, results, strict=True):
            for done in completions:
                choice = self._choice(len(choices), prompt, self._part(done), done)
                if self.spec.chat:
                    content, calls = self._calls(len(choices), done)
                    content = content if content or not calls else None
                    message = {"role": "assistant", "content": content, "refusal": None}
                    choice["message"] = message | ({"tool_calls": calls} if calls else {})
                choices.append(choice | {"finish_reason": self._finish(len(choices), done)})
        body = self._frame("chat.completion" if self.spec.chat else "text_completion", choices)
        if self.spec.chat:
            body |= self._about_prompt(self.spec.prompts[0], results[0][0])
        return body | {"usage": self._usage(results), "mint_revision": self.model.digest}

    def _part(self, done: Completion, sent: int = 0) -> Part:
        """Returns a completion without its first ``sent`` tokens."""
        if self.spec.silent:
            return Part()
        assert done.text is not None, "the engine has a tokenizer"
        places = Places(self._texts)
        places.add(done.tokens, done.text)
        entries = _entries(done.tokens, done.logprobs, done.top_logprobs)
        named = slice(sent, self._named(done, places))
        return Part(done.text, done.tokens[sent:], entries[named], places.begins[named])

    def _named(self, done: Completion, places: Places) -> int:
        """Returns the number of a completion's tokens that ``logprobs`` names.

        As in OpenAI's API they end with the text: an end token or the tokens of a stop string are
        not among them. Clients that score tokens (``echo``, or ids) get all tokens.
        """
        if self.spec.echo or self.spec.token_ids or self.spec.as_ids or done.finish != "stop":
            return len(done.tokens)
        return places.within(len(done.text or ""))

    # -- streams

    def chunks(self, pieces: Sequence[tuple[int, Piece]]) -> list[dict[str, Any]]:
        """Returns a chunk for each choice with new text, from (number of the prompt, piece)."""
        parts: dict[int, Part] = collections.defaultdict(Part)
        if self.spec.whole or self.spec.silent:
            return []
        for number, piece in pieces:
            index = number * self.spec.request.n + piece.sample
            partial, drawn = self._partial[index], self._drawn[index]
            drawn += _entries(piece.tokens, piece.logprobs, piece.top)
            count, text = partial.add(piece.tokens)
            new = slice(partial.tokens_told - count, partial.tokens_told)
            parts[index] += Part(text, partial.tokens[new], drawn[new], partial.places.begins[new])
        wanted = self.spec.logprobs or self.spec.token_ids
        return [
            chunk
            for index, part in parts.items()
            if part.text or (wanted and part.tokens)
            for chunk in self._chunks(index, part)
        ]

    def last_chunks(self, number: int, results: Sequence[Completion]) -> list[dict[str, Any]]:
        """Returns the last chunks of a prompt's choices."""
        out = []
        for index, done in enumerate(results, number * self.spec.request.n):
            content, calls = self._calls(index, done) if self.spec.chat else (done.text or "", [])
            if self.spec.silent:
                part = Part()
            elif self.spec.whole:
                part = dataclasses.replace(self._part(done), text=content)
            else:
                partial = self._partial[index]
                rest = self._part(done, partial.tokens_told)
                part = dataclasses.replace(rest, text=partial.end(content))
            out += self._chunks(index, part, done, calls)
        return out

    def usage_chunk(self, results: Sequence[Sequence[Completion]]) -> dict[str, Any]:
        """Returns the last chunk, with the usage."""
        usage = {"usage": self._usage(results), "mint_revision": self.model.digest}
        return self._frame(self._kind, []) | usage

    @property
    def _kind(self) -> str:
        return "chat.completion.chunk" if self.spec.chat else "text_completion"

    def _chunks(
        self, index: int, part: Part, done: Completion | None = None, calls: Sequence[Any] = ()
    ) -> list[dict[str, Any]]:
        """Returns a choice's next chunk, after the chunk that opens a chat's."""
        prompt, first = self.spec.prompts[index // self.spec.request.n], index not in self._opened
        self._opened.add(index)
        out = []
        if self.spec.chat and first:
            role = {"role": "assistant", "content": "", "refusal": None}
            opening = {"index": index, "delta": role, "logprobs": None, "finish_reason": None}
            out.append(self._frame(self._kind, [opening]) | self._about_prompt(prompt, done))
        choice = self._choice(index, prompt, part, done, first)
        if self.spec.chat:
            delta: dict[str, Any] = {"content": part.text} if part.text or not calls else {}
            if calls:
                delta["tool_calls"] = [{"index": i} | c for i, c in enumerate(calls)]
            choice["delta"] = delta
        choice["finish_reason"] = None if done is None else self._finish(index, done)
        last = {} if done is None else {"mint_revision": self.model.digest}
        return [*out, self._frame(self._kind, [choice]) | last]

    def failed(self, error: dict[str, Any]) -> list[dict[str, Any]]:
        """Returns the chunk that ends a stream that failed midway."""
        return [{"error": error}]

    def written(self, chunk: dict[str, Any]) -> str:
        """Returns a chunk as the stream's text."""
        return f"data: {json.dumps(chunk)}\n\n"

    # -- parts

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.spec.model,
            "choices": choices,
            "system_fingerprint": self._fingerprint,
        }

    def _choice(
        self, index: int, prompt: Prompt, part: Part, done: Completion | None, first: bool = True
    ) -> dict[str, Any]:
        """Returns the fields of a choice or, with ``first``, of its first chunk."""
        spec = self.spec
        choice: dict[str, Any] = {"index": index, "logprobs": None}
        if spec.token_ids:
            choice["token_ids"] = list(part.tokens)
        if spec.chat:
            if spec.logprobs:
                tokens = [self._token(*entry) for entry in part.entries]
                choice["logprobs"] = {"content": tokens, "refusal": None}
            return choice
        if first:
            choice |= self._about_prompt(prompt, done)
        choice["text"] = (prompt.text if spec.echo and first else "") + part.text
        if spec.logprobs:
            entries, starts = part.entries, part.starts
            if spec.echo:
                assert done is not None, "scores of prompts come with the whole completion"
                places = Places(self._texts, shown=True)
                places.add(prompt.tokens, prompt.text)
                entries = [*self._prompt_entries(prompt, done), *entries]
                starts = [*places.begins, *(len(prompt.text) + start for start in starts)]
            choice["logprobs"] = self._table(entries, starts)
        return choice

    def _prompt_entries(self, prompt: Prompt, done: Completion) -> list[Entry]:
        k, tokens = self.spec.request.top_logprobs, prompt.tokens
        rest = _entries(tokens[1:], done.prompt_logprobs or [], done.top_prompt_logprobs)
        return [(tokens[0], None, []), *((token, p, top[:k]) for token, p, top in rest)]

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self.spec.as_ids else self._texts.text_of(token)

    def _table(self, entries: Sequence[Entry], starts: Sequence[int]) -> dict[str, Any]:
        """Returns log-probabilities in the form of completions."""
        top = [None if p is None else self._likeliest(token, p, some) for token, p, some in entries]
        return {
            "tokens": [self._name(token) for token, _, _ in entries],
            "token_logprobs": [p for _, p, _ in entries],
            "top_logprobs": top if self.spec.request.top_logprobs else None,
            "text_offset": list(starts),
        }

    def _likeliest(
        self, token: int, logprob: float, some: Sequence[tuple[int, float]]
    ) -> dict[str, float]:
        """Returns the likeliest tokens by text, the sampled one among them."""
        out: dict[str, float] = {}
        for other, p in some:
            out.setdefault(self._name(other), p)
        out[self._name(token)] = logprob
        return out

    def _token(
        self, token: int, logprob: float | None, some: Sequence[tuple[int, float]]
    ) -> dict[str, Any]:
        """Returns a token in the form of chats."""

        def shown(token: int, logprob: float | None) -> dict[str, Any]:
            text = list(self._texts.bytes_of(token))
            return {"token": self._name(token), "logprob": logprob, "bytes": text}

        return shown(token, logprob) | {"top_logprobs": [shown(*one) for one in some]}

    def _about_prompt(self, prompt: Prompt, done: Completion | None) -> dict[str, Any]:
        """Returns vLLM's fields: the prompt's ids, and its tokens' log-probabilities by id."""
        tokens, k = prompt.tokens, self.spec.prompt_top
        out: dict[str, Any] = {"prompt_token_ids": list(tokens)} if self.spec.token_ids else {}
        if k is None or done is None:
            return out
        places: list[Any] = [None]
        for token, p, top in _entries(
            tokens[1:], done.prompt_logprobs or [], done.top_prompt_logprobs
        ):
            ranked: dict[int, tuple[float | None, int | None]] = {
                i: (q, rank) for rank, (i, q) in enumerate(top[:k], 1)
            }
            ranked[token] = p, ranked.get(token, (p, None))[1]
            shown = {i: {"logprob": q, "rank": rank} for i, (q, rank) in ranked.items()}
            places.append({str(i): shown[i] | {"decoded_token": self._name(i)} for i in shown})
        return out | {"prompt_logprobs": places}

    def _calls(self, index: int, done: Completion) -> tuple[str, list[dict[str, Any]]]:
        """Returns a chat's content and its tool calls."""
        text = done.text or ""
        if self.spec.tools is None:
            return text, []
        content, calls = self.spec.tools.calls_in(text)
        return content, [
            {
                "id": f"{self.id}-{index}-{i}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for i, call in enumerate(calls)
        ]

    def _finish(self, index: int, done: Completion) -> str:
        if self.spec.chat and self._calls(index, done)[1]:
            return "tool_calls"
        return "length" if self.spec.silent else FINISH.get(done.finish, done.finish)

    def _usage(self, results: Sequence[Sequence[Completion]]) -> dict[str, Any]:
        prompt = sum(len(one.tokens) for one in self.spec.prompts)
        drawn = sum(len(done.tokens) for some in results for done in some)
        drawn = 0 if self.spec.silent else drawn
        return {
            "prompt_tokens": prompt,
            "completion_tokens": drawn,
            "total_tokens": prompt + drawn,
            "prompt_tokens_details": {"cached_tokens": sum(some[0].reused for some in results)},
        }


def _entries(
    tokens: Sequence[int],
    logprobs: Sequence[float],
    top: Sequence[Sequence[tuple[int, float]]] | None,
) -> list[Entry]:
    return list(zip(tokens, logprobs, [[]] * len(tokens) if top is None else top, strict=True))
