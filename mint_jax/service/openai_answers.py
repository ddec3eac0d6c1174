"""Answers of completions and chats: a stream of chunks, or its choices as one body."""

import dataclasses
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mint_jax.rollout.request import Completion
from mint_jax.rollout.stream import Piece
from mint_jax.service import pins
from mint_jax.service.openai_types import Prompt, Spec
from mint_jax.service.pins import Pin
from mint_jax.service.text_stream import Offsets, TextStream, TokenTexts
from mint_jax.service.weights import Model

EVERY = 10**9  # more tokens than a choice has
FINISH = {"cancelled": "abort"}  # vLLM's word; no word of OpenAI's fits

# a token, its log-probability, and the likeliest tokens at its position
Entry = tuple[int, float | None, Sequence[tuple[int, float]]]
Object = dict[str, Any]  # of JSON


@dataclasses.dataclass(frozen=True)
class Part:
    """The next part of a choice; the last one has the completion and its tool calls. ``entries``
    are the tokens that ``logprobs`` names, ``starts`` their offsets in the text, in characters.
    """

    text: str = ""
    tokens: Sequence[int] = ()
    entries: Sequence[Entry] = ()
    starts: Sequence[int] = ()
    done: Completion | None = None
    calls: Sequence[Object] = ()


class Answer:
    """The answer to one body; ``fingerprint`` is the server's, for ``system_fingerprint``. A pinned
    one leaves out what its client has. ``key``: its name behind a prefix, random by default.

    Attributes:
        witness: returns the witness of a completion by the numbers of its prompt and sample; for a
            body that asks for it.
    """

    end = "data: [DONE]\n\n"  # of a stream
    witness: Callable[[int, int, Completion], Object] | None = None
    takes_reward = False

    def __init__(
        self,
        spec: Spec,
        model: Model,
        texts: TokenTexts,
        fingerprint: str = "",
        pin: Pin | None = None,
        key: str = "",
    ):
        self.spec, self.model, self._texts, self._is_pinned = spec, model, texts, pin is not None
        self._pin = pin or Pin("", key or secrets.token_hex(12), 0, int(time.time()))
        self._events, self._ended = self._pin.events, {*self._pin.ended}
        self._skip = {index: len(tokens) for index, tokens in self._pin.sent.items()}
        self._skip |= dict.fromkeys(self._ended, EVERY)
        self._sent: dict[int, list[int]] = {}  # since the last comment
        self._frame: Object = {
            "id": f"{'chatcmpl' if spec.chat else 'cmpl'}-{self._pin.id}",
            "object": "chat.completion.chunk" if spec.chat else "text_completion",
            "created": self._pin.at,
            "model": model.name,
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

    @property
    def id(self) -> str:
        """The id that clients know the answer by."""
        return self._frame["id"]

    def whole(self, results: Sequence[Sequence[Completion]]) -> Object:
        """Returns the body: the last chunks have the whole choices, if they are the first.

        Args:
            results: the completions of each prompt.
        """
        chunks = [c for n, result in enumerate(results) for c in self.last_chunks(n, result)]
        body = chunks[0] | {"choices": [chunk["choices"][0] for chunk in chunks]}
        for choice in body["choices"] if self.spec.chat else ():
            body["object"] = "chat.completion"
            choice["message"] = {"content": None} | choice.pop("delta")
            for call in choice["message"].get("tool_calls", ()):
                del call["index"]
        return body | {"usage": self.usage(results)}

    def chunks(self, pieces: Iterable[tuple[int, Piece]]) -> list[Object]:
        """Returns a chunk for each choice with new text, from (number of the prompt, piece)."""
        if self.spec.whole or self.spec.silent:
            return []
        sampled: dict[int, list[int]] = {}
        for number, piece in pieces:
            index = number * self.spec.request.n + piece.sample
            sampled.setdefault(index, []).extend(piece.tokens)
            self._entries[index] += _entries(piece.tokens, piece.logprobs, piece.top)
        out = []
        for index, tokens in sampled.items():
            stream = self._streams[index]
            begin, text = stream.count, stream.add(tokens)
            new = slice(begin, stream.count)
            entries, starts = self._entries[index][new], stream.offsets.starts[new]
            part = Part(text, stream.tokens[new], entries, starts)
            if text or (part.tokens and (self.spec.logprobs or self.spec.body.return_token_ids)):
                out += self._chunks(index, part)
        return out

    def last_chunks(self, number: int, results: Sequence[Completion]) -> list[Object]:
        """Returns the last chunks of a prompt's choices."""
        out = []
        for index, done in enumerate(results, number * self.spec.request.n):
            chunks = self._chunks(index, self._rest(index, done))
            out += [] if index in self._ended else chunks
            self._ended.add(index)
        return out

    def unsent(self, pieces: Iterable[tuple[int, Piece]]) -> list[tuple[int, Piece]]:
        """Returns pieces without the tokens that the client has, which pass through the choices."""
        out = []
        for number, piece in pieces:
            index, count = number * self.spec.request.n + piece.sample, len(piece.tokens)
            skip = min(self._skip.get(index, 0), count)
            if skip:
                self._skip[index] -= skip
                self.chunks([(number, piece.part(0, skip))])
            if skip < count:
                self._sent.setdefault(index, []).extend(piece.tokens[skip:])
                out.append((number, piece.part(skip, count)))
        return out

    def progress(self, chunks: Sequence[Object]) -> str:
        """Counts chunks as sent; returns the comment that says so, if the answer is pinned."""
        self._events += len(chunks)
        sent, self._sent = self._sent, {}
        return pins.comment_of(self._events, sent, self._ended) if self._is_pinned else ""

    def finish(self, results: Sequence[Sequence[Completion]]) -> list[Object]:
        """Returns the chunk with the usage, if the body asks for it."""
        options = self.spec.body.stream_options
        if options is None or not options.include_usage:
            return []
        last = {"choices": [], "usage": self.usage(results), "mint_revision": self.model.digest}
        return [self._frame | last]

    def failed(self, error: Object) -> list[Object]:
        """Returns the chunk that ends a stream that failed midway."""
        return [{"error": error}]

    def usage(self, results: Sequence[Sequence[Completion]]) -> Object:
        """Returns the token counts of the completions of each prompt."""
        prompt = sum(len(one.tokens) for one in self.spec.prompts)
        sampled = sum(len(done.tokens) for completions in results for done in completions)
        sampled = 0 if self.spec.silent else sampled
        cached = {"cached_tokens": sum(completions[0].reused for completions in results)}
        usage = {"prompt_tokens": prompt, "completion_tokens": sampled}
        return usage | {"total_tokens": prompt + sampled, "prompt_tokens_details": cached}

    def _rest(self, index: int, done: Completion) -> Part:
        """Returns the part of a completion that its stream has not sent.

        As in OpenAI's API the entries end with the text: an end token or the tokens of a stop
        string have none. Clients that score tokens (``echo``, or ids) get all entries.
        """
        if self.spec.silent:
            return Part(done=dataclasses.replace(done, finish="length"))
        assert done.text is not None, "the engine has a tokenizer"
        tools, stream, body = self.spec.tools, self._streams[index], self.spec.body
        content, calls = (done.text, []) if tools is None else tools.read(done.text)
        offsets, sent, count = stream.offsets, stream.count, len(done.tokens)
        offsets.add(done.tokens[len(offsets.starts) :], done.text)
        scores = body.echo or body.return_token_ids or body.return_tokens_as_token_ids
        if done.finish == "stop" and not scores:
            count = offsets.within(len(done.text))
        entries = _entries(done.tokens, done.logprobs, done.top_logprobs)[sent:count]
        listed = []
        for i, call in enumerate(calls):
            one = {"index": i, "id": f"{self._frame['id']}-{index}-{i}", "type": "function"}
            listed.append(one | {"function": dataclasses.asdict(call)})
        starts = offsets.starts[sent:count]
        return Part(stream.end(content), done.tokens[sent:], entries, starts, done, listed)

    def _chunks(self, index: int, part: Part) -> list[Object]:
        """Returns the chunk of a choice's next part; the last one names the revision."""
        body, prompt = self.spec.body, self.spec.prompts[index // self.spec.request.n]
        first, done = index not in self._opened, part.done
        self._opened.add(index)
        choice: Object = {"index": index, "logprobs": None, "finish_reason": None}
        chunk = self._frame | {"choices": [choice]}
        if done is not None:
            ends = FINISH.get(done.finish, done.finish)
            choice["finish_reason"] = "tool_calls" if part.calls else ends
            chunk["mint_revision"] = self.model.digest
            if self.witness is not None:
                choice["mint_witness"] = self.witness(*divmod(index, self.spec.request.n), done)
        if body.return_token_ids:
            choice["token_ids"] = list(part.tokens)
            if first:
                (chunk if self.spec.chat else choice)["prompt_token_ids"] = list(prompt.tokens)
        if self.spec.chat:
            delta: Object = {"role": "assistant", "refusal": None} if first else {}
            delta |= {"content": part.text} if part.text or not part.calls else {}
            choice["delta"] = delta | ({"tool_calls": part.calls} if part.calls else {})
            if self.spec.logprobs:
                choice["logprobs"] = {"content": self._scores(part), "refusal": None}
        else:
            choice["text"] = (prompt.text if body.echo and first else "") + part.text
            if self.spec.logprobs:
                choice["logprobs"] = self._table(part, prompt)
        return [chunk]

    def _table(self, part: Part, prompt: Prompt) -> Object:
        """Returns log-probabilities in the form of completions, with ``echo`` the prompt's too."""
        entries, starts = part.entries, part.starts
        if self.spec.body.echo:
            assert part.done is not None, "scores of prompts come with the whole completion"
            offsets = Offsets(self._texts, special=True)
            offsets.add(prompt.tokens, prompt.text)
            scores, likeliest = part.done.prompt_logprobs or [], part.done.top_prompt_logprobs
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

    def _scores(self, part: Part) -> list[Object]:
        """Returns log-probabilities in the form of chats and responses."""
        return [
            self._token(id, logprob) | {"top_logprobs": [self._token(*other) for other in top]}
            for id, logprob, top in part.entries
        ]

    def _token(self, token: int, logprob: float | None) -> Object:
        text = list(self._texts.bytes_of(token))
        return {"token": self._name(token), "logprob": logprob, "bytes": text}

    def _name(self, token: int) -> str:
        if self.spec.body.return_tokens_as_token_ids:
            return f"token_id:{token}"
        return self._texts.text_of(token)


def _entries(
    tokens: Sequence[int],
    logprobs: Sequence[float],
    top: Sequence[Sequence[tuple[int, float]]] | None,
) -> list[Entry]:
    return list(zip(tokens, logprobs, [[]] * len(tokens) if top is None else top, strict=True))
