"""Answers of completions and chats: a stream of chunks, or its choices as one body."""

import dataclasses
import secrets
import time
from collections.abc import Iterable, Sequence
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
    """A part of a completion. ``entries`` are the tokens that ``logprobs`` names, ``starts`` their
    offsets in the completion's text, in characters.
    """

    text: str = ""
    tokens: Sequence[int] = ()
    entries: Sequence[Entry] = ()
    starts: Sequence[int] = ()


class Answer:
    """The answer to one body; ``fingerprint`` is the server's, for ``system_fingerprint``."""

    end = "data: [DONE]\n\n"  # of a stream

    def __init__(
        self, spec: CompletionSpec, model: Model, texts: TokenTexts, fingerprint: str = ""
    ):
        self.spec, self.model, self._texts = spec, model, texts
        self.created = int(time.time())
        self._frame = {
            "id": f"{'chatcmpl' if spec.chat else 'cmpl'}-{secrets.token_hex(12)}",
            "object": "chat.completion.chunk" if spec.chat else "text_completion",
            "created": self.created,
            "model": spec.body.model,
            "system_fingerprint": fingerprint,
        }
        marker = None if spec.tools is None else spec.tools.marker
        self._streams = [
            TextStream(texts, prompt.tokens, spec.request.stop, marker)
            for prompt in spec.prompts
            for _ in range(spec.request.n)
        ]
        self._entries: list[list[Entry]] = [[] for _ in self._streams]
        self._opened: set[int] = set()  # choices with a chunk

    def whole(self, results: Sequence[Sequence[Completion]]) -> dict[str, Any]:
        """Returns the body: the choices of the last chunks, which have all if they are the first.

        Args:
            results: the completions of each prompt.
        """
        chunks = [c for n, result in enumerate(results) for c in self.last_chunks(n, result)]
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        body = self._frame | {"choices": choices} | self._usage(results)
        if not self.spec.chat:
            return body
        body["choices"] = [choice for choice in choices if "role" not in choice["delta"]]
        for choice in body["choices"]:
            message = {"role": "assistant", "content": None, "refusal": None} | choice.pop("delta")
            for call in message.get("tool_calls", ()):
                del call["index"]
            choice["message"] = message
        prompt = self._prompt_ids(self.spec.prompts[0])
        return body | {"object": "chat.completion"} | prompt

    def chunks(self, pieces: Iterable[tuple[int, Piece]]) -> list[dict[str, Any]]:
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
            (content, calls), part = self._calls(index, done), Part()
            if not self.spec.silent:
                part = self._rest(done, self._streams[index], content)
            out += self._chunks(index, part, done, calls)
        return out

    def finish(self, results: Sequence[Sequence[Completion]]) -> list[dict[str, Any]]:
        """Returns the chunk with the usage, if the body asks for it."""
        options = self.spec.body.stream_options
        if options is None or not options.include_usage:
            return []
        return [self._frame | {"choices": []} | self._usage(results)]

    def failed(self, error: dict[str, Any]) -> list[dict[str, Any]]:
        """Returns the chunk that ends a stream that failed midway."""
        return [{"error": error}]

    def _rest(self, done: Completion, stream: TextStream, content: str) -> Part:
        """Returns what a stream has not sent of a completion.

        As in OpenAI's API the entries end with the text: an end token or the tokens of a stop
        string have none. Clients that score tokens (``echo``, or ids) get all entries.
        """
        assert done.text is not None, "the engine has a tokenizer"
        offsets, body = stream.offsets, self.spec.body
        offsets.add(done.tokens[len(offsets.starts) :], done.text)
        sent, count = stream.count, len(done.tokens)
        scores = body.echo or body.return_token_ids or body.return_tokens_as_token_ids
        if done.finish == "stop" and not scores:
            count = offsets.within(len(done.text))
        entries = _entries(done.tokens, done.logprobs, done.top_logprobs)[sent:count]
        return Part(stream.end(content), done.tokens[sent:], entries, offsets.starts[sent:count])

    def _chunks(
        self, index: int, part: Part, done: Completion | None = None, calls: Sequence[Any] = ()
    ) -> list[dict[str, Any]]:
        """Returns a choice's next chunk, after the chunk that opens a chat's."""
        prompt, first = self.spec.prompts[index // self.spec.request.n], index not in self._opened
        self._opened.add(index)
        out: list[dict[str, Any]] = []
        choice: dict[str, Any] = {"index": index, "logprobs": None, "finish_reason": None}
        if self.spec.chat and first:
            opening = choice | {"delta": {"role": "assistant", "content": "", "refusal": None}}
            out.append(self._frame | {"choices": [opening]} | self._prompt_ids(prompt))
        if self.spec.body.return_token_ids:
            choice["token_ids"] = list(part.tokens)
        if self.spec.chat:
            choice["delta"] = {"content": part.text} if part.text or not calls else {}
            choice["delta"] |= {"tool_calls": calls} if calls else {}
            if self.spec.logprobs:
                tokens = [
                    self._token(id, logprob) | {"top_logprobs": [self._token(*t) for t in top]}
                    for id, logprob, top in part.entries
                ]
                choice["logprobs"] = {"content": tokens, "refusal": None}
        else:
            choice |= self._prompt_ids(prompt) if first else {}
            echoed = prompt.text if self.spec.body.echo and first else ""
            choice["text"] = echoed + part.text
            if self.spec.logprobs:
                choice["logprobs"] = self._table(part, prompt, done)
        last = {}
        if done is not None:
            ends = "length" if self.spec.silent else FINISH.get(done.finish, done.finish)
            choice["finish_reason"] = "tool_calls" if calls else ends
            last = {"mint_revision": self.model.digest}
        return [*out, self._frame | {"choices": [choice]} | last]

    def _table(self, part: Part, prompt: Prompt, done: Completion | None) -> dict[str, Any]:
        """Returns log-probabilities in the form of completions, with ``echo`` the prompt's too."""
        entries, starts = part.entries, part.starts
        if self.spec.body.echo:
            assert done is not None, "scores of prompts come with the whole completion"
            offsets = Offsets(self._texts, special=True)
            offsets.add(prompt.tokens, prompt.text)
            scores, likeliest = done.prompt_logprobs or [], done.top_prompt_logprobs
            start: Entry = (prompt.tokens[0], None, [])
            entries = [start, *_entries(prompt.tokens[1:], scores, likeliest), *entries]
            starts = [*offsets.starts, *(len(prompt.text) + start for start in starts)]
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

    def _token(self, token: int, logprob: float | None) -> dict[str, Any]:
        """Returns a token in the form of chats."""
        text = list(self._texts.bytes_of(token))
        return {"token": self._name(token), "logprob": logprob, "bytes": text}

    def _name(self, token: int) -> str:
        if self.spec.body.return_tokens_as_token_ids:
            return f"token_id:{token}"
        return self._texts.text_of(token)

    def _prompt_ids(self, prompt: Prompt) -> dict[str, Any]:
        ids = self.spec.body.return_token_ids
        return {"prompt_token_ids": list(prompt.tokens)} if ids else {}

    def _calls(self, index: int, done: Completion) -> tuple[str, list[dict[str, Any]]]:
        """Returns an answer's content and its tool calls."""
        text, calls = done.text or "", []
        if self.spec.tools is not None:
            text, calls = self.spec.tools.read(text)
        return text, [
            {
                "index": i,
                "id": f"{self._frame['id']}-{index}-{i}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for i, call in enumerate(calls)
        ]

    def usage_of(self, results: Sequence[Sequence[Completion]]) -> dict[str, Any]:
        """Returns the token counts of the completions of each prompt."""
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

    def _usage(self, results: Sequence[Sequence[Completion]]) -> dict[str, Any]:
        return {"usage": self.usage_of(results), "mint_revision": self.model.digest}


def _entries(
    tokens: Sequence[int],
    logprobs: Sequence[float],
    top: Sequence[Sequence[tuple[int, float]]] | None,
) -> list[Entry]:
    return list(zip(tokens, logprobs, [[]] * len(tokens) if top is None else top, strict=True))
