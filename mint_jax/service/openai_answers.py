"""Answers of completions and chats: one body, or the chunks of a stream."""

import dataclasses
import json
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

from mint_jax.rollout.request import Completion
from mint_jax.rollout.stream import Piece
from mint_jax.service.openai_types import CompletionSpec, Prompt
from mint_jax.service.text_stream import Offsets, TextStream, TokenTexts
from mint_jax.service.weights import Model

FINISH = {"cancelled": "abort"}  # vLLM's word; no word of OpenAI's fits

# a token, its log-probability, and the likeliest tokens at its position
Entry = tuple[int, float | None, Sequence[tuple[int, float]]]


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a completion, or all of it.

    Attributes:
        text: decoded text.
        tokens: their ids.
        entries: of the tokens that ``logprobs`` names.
        starts: offset of each entry in the completion's text, in characters.
    """

    text: str = ""
    tokens: Sequence[int] = ()
    entries: Sequence[Entry] = ()
    starts: Sequence[int] = ()


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
        self._streams = [
            TextStream(decode, texts, prompt.tokens, spec.request.stop, marker)
            for prompt in spec.prompts
            for _ in range(spec.request.n if spec.body.stream else 0)
        ]
        self._entries: list[list[Entry]] = [[] for _ in self._streams]
        self._opened: set[int] = set()  # choices with a chunk

    # -- whole answers

    def whole(self, results: Sequence[Sequence[Completion]]) -> dict[str, Any]:
        """Returns the body; ``results`` are the completions of each prompt."""
        choices = []
        for prompt, completions in zip(self.spec.prompts, results, strict=True):
            for done in completions:
                content, calls = self._calls(len(choices), done)
                choice = self._choice(len(choices), prompt, self._rest(prompt, done), done)
                if self.spec.chat:
                    message = {"role": "assistant", "content": content, "refusal": None}
                    if calls:
                        message |= {"content": content or None, "tool_calls": calls}
                    choice["message"] = message
                choices.append(choice | {"finish_reason": self._finish(done, calls)})
        body = self._frame("chat.completion" if self.spec.chat else "text_completion", choices)
        if self.spec.chat:
            body |= self._prompt_ids(self.spec.prompts[0])
        return body | {"usage": self.usage_of(results), "mint_revision": self.model.digest}

    def _rest(self, prompt: Prompt, done: Completion, sent: int = 0) -> Part:
        """Returns a completion without its first ``sent`` tokens, but with all of its text.

        As in OpenAI's API the entries end with the text: an end token or the tokens of a stop
        string have none. Clients that score tokens (``echo``, or ids) get all entries.
        """
        if self.spec.silent:
            return Part()
        assert done.text is not None, "the engine has a tokenizer"
        offsets, body = Offsets(self._texts, prompt.tokens), self.spec.body
        offsets.add(done.tokens, done.text)
        count = len(done.tokens)
        scores = body.echo or body.return_token_ids or body.return_tokens_as_token_ids
        if done.finish == "stop" and not scores:
            count = offsets.within(len(done.text))
        entries = _entries(done.tokens, done.logprobs, done.top_logprobs)
        return Part(done.text, done.tokens[sent:], entries[sent:count], offsets.starts[sent:count])

    # -- streams

    def chunks(self, pieces: Sequence[tuple[int, Piece]]) -> list[dict[str, Any]]:
        """Returns a chunk for each choice with new text, from (number of the prompt, piece)."""
        if self.spec.whole or self.spec.silent:
            return []
        sampled: dict[int, list[int]] = {}
        for number, piece in pieces:
            index = number * self.spec.request.n + piece.sample
            sampled.setdefault(index, []).extend(piece.tokens)
            self._entries[index] += _entries(piece.tokens, piece.logprobs, piece.top)
        out, wanted = [], self.spec.logprobs or self.spec.body.return_token_ids
        for index, tokens in sampled.items():
            stream = self._streams[index]
            begin, text = stream.count, stream.add(tokens)
            new = slice(begin, stream.count)
            starts = stream.offsets.starts[new]
            part = Part(text, stream.tokens[new], self._entries[index][new], starts)
            if text or (wanted and part.tokens):
                out += self._chunks(index, part)
        return out

    def last_chunks(self, number: int, results: Sequence[Completion]) -> list[dict[str, Any]]:
        """Returns the last chunks of a prompt's choices."""
        out = []
        for index, done in enumerate(results, number * self.spec.request.n):
            (content, calls), stream = self._calls(index, done), self._streams[index]
            part = self._rest(self.spec.prompts[number], done, stream.count)
            if not self.spec.silent:
                part = dataclasses.replace(part, text=stream.end(content))
            out += self._chunks(index, part, done, calls)
        return out

    def usage(self, results: Sequence[Sequence[Completion]]) -> list[dict[str, Any]]:
        """Returns the chunk with the usage, if the body asks for it."""
        options = self.spec.body.stream_options
        if options is None or not options.include_usage:
            return []
        usage = {"usage": self.usage_of(results), "mint_revision": self.model.digest}
        return [self._frame(self._kind, []) | usage]

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
            out.append(self._frame(self._kind, [opening]) | self._prompt_ids(prompt))
        choice = self._choice(index, prompt, part, done, first)
        if self.spec.chat:
            delta: dict[str, Any] = {"content": part.text} if part.text or not calls else {}
            if calls:
                delta["tool_calls"] = [{"index": i} | c for i, c in enumerate(calls)]
            choice["delta"] = delta
        choice["finish_reason"] = None if done is None else self._finish(done, calls)
        last = {} if done is None else {"mint_revision": self.model.digest}
        return [*out, self._frame(self._kind, [choice]) | last]

    def failed(self, error: dict[str, Any]) -> list[dict[str, Any]]:
        """Returns the chunk that ends a stream that failed midway."""
        return [{"error": error}]

    def written(self, chunk: dict[str, Any]) -> str:
        """Returns a chunk as the stream's text."""
        return f"data: {json.dumps(chunk)}\n\n"

    # -- parts of both

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.spec.body.model,
            "choices": choices,
            "system_fingerprint": self._fingerprint,
        }

    def _choice(
        self, index: int, prompt: Prompt, part: Part, done: Completion | None, first: bool = True
    ) -> dict[str, Any]:
        """Returns the fields of a choice or, with ``first``, of its first chunk."""
        spec, entries, starts = self.spec, part.entries, part.starts
        choice: dict[str, Any] = {"index": index, "logprobs": None}
        if spec.body.return_token_ids:
            choice["token_ids"] = list(part.tokens)
        if spec.chat:
            if spec.logprobs:
                tokens = [self._token(*entry) for entry in entries]
                choice["logprobs"] = {"content": tokens, "refusal": None}
            return choice
        if first:
            choice |= self._prompt_ids(prompt)
        choice["text"] = (prompt.text if spec.echo and first else "") + part.text
        if spec.logprobs:
            if spec.echo:
                assert done is not None, "scores of prompts come with the whole completion"
                offsets = Offsets(self._texts, special=True)
                offsets.add(prompt.tokens, prompt.text)
                scores, top = done.prompt_logprobs or [], done.top_prompt_logprobs
                start: Entry = (prompt.tokens[0], None, [])
                entries = [start, *_entries(prompt.tokens[1:], scores, top), *entries]
                starts = [*offsets.starts, *(len(prompt.text) + start for start in starts)]
            choice["logprobs"] = self._table(entries, starts)
        return choice

    def _name(self, token: int) -> str:
        if self.spec.body.return_tokens_as_token_ids:
            return f"token_id:{token}"
        return self._texts.text_of(token)

    def _table(self, entries: Sequence[Entry], starts: Sequence[int]) -> dict[str, Any]:
        """Returns log-probabilities in the form of completions."""
        top: list[dict[str, float] | None] = []
        for token, logprob, likeliest in entries:
            names: dict[str, float] = {}
            for other, p in likeliest:
                names.setdefault(self._name(other), p)
            top.append(None if logprob is None else names | {self._name(token): logprob})
        return {
            "tokens": [self._name(token) for token, _, _ in entries],
            "token_logprobs": [p for _, p, _ in entries],
            "top_logprobs": top if self.spec.request.top_logprobs else None,
            "text_offset": list(starts),
        }

    def _token(
        self, token: int, logprob: float | None, likeliest: Sequence[tuple[int, float]]
    ) -> dict[str, Any]:
        """Returns a token in the form of chats."""

        def shown(token: int, logprob: float | None) -> dict[str, Any]:
            text = list(self._texts.bytes_of(token))
            return {"token": self._name(token), "logprob": logprob, "bytes": text}

        return shown(token, logprob) | {"top_logprobs": [shown(*one) for one in likeliest]}

    def _prompt_ids(self, prompt: Prompt) -> dict[str, Any]:
        ids = self.spec.body.return_token_ids
        return {"prompt_token_ids": list(prompt.tokens)} if ids else {}

    def _calls(self, index: int, done: Completion) -> tuple[str, list[dict[str, Any]]]:
        """Returns an answer's content and its tool calls."""
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

    def _finish(self, done: Completion, calls: Sequence[Any]) -> str:
        if calls:
            return "tool_calls"
        return "length" if self.spec.silent else FINISH.get(done.finish, done.finish)

    def usage_of(self, results: Sequence[Sequence[Completion]]) -> dict[str, Any]:
        """Returns the token counts of completions of each prompt."""
        prompt = sum(len(one.tokens) for one in self.spec.prompts)
        sampled = sum(len(done.tokens) for completions in results for done in completions)
        sampled = 0 if self.spec.silent else sampled
        cached = sum(completions[0].reused for completions in results)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": sampled,
            "total_tokens": prompt + sampled,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


def _entries(
    tokens: Sequence[int],
    logprobs: Sequence[float],
    top: Sequence[Sequence[tuple[int, float]]] | None,
) -> list[Entry]:
    return list(zip(tokens, logprobs, [[]] * len(tokens) if top is None else top, strict=True))
