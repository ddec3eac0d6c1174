"""What is answered: a body for completions or a chat, or the chunks of one while it comes."""

import dataclasses
import json
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mint_jax.rollout.request import Completion
from mint_jax.rollout.stream import Piece
from mint_jax.service.growing import Growing, Places, TokenTexts
from mint_jax.service.openai_types import Asked, Prompt
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
        begins: the place of each entry in the completion's text, in characters.
    """

    text: str
    tokens: Sequence[int]
    entries: Sequence[Entry] = ()
    begins: Sequence[int] = ()


class Answer:
    """The answer to one body.

    Args:
        decode: text of token ids.
        fingerprint: of what serves, for ``system_fingerprint``.
    """

    def __init__(
        self,
        asked: Asked,
        model: Model,
        texts: TokenTexts,
        decode: Callable[[list[int]], str],
        fingerprint: str = "",
    ):
        self.asked, self.model, self._texts, self._fingerprint = asked, model, texts, fingerprint
        self.id = f"{'chatcmpl' if asked.chat else 'cmpl'}-{secrets.token_hex(12)}"
        self.created = int(time.time())
        marker = None if asked.tools is None else asked.tools.marker
        self._growing = [
            Growing(decode, texts, prompt.tokens, asked.request.stop, marker)
            for prompt in asked.prompts
            for _ in range(asked.request.n if asked.stream else 0)
        ]
        self._drawn: list[list[Entry]] = [[] for _ in self._growing]
        self._begun: set[int] = set()

    # -- all at once

    def whole(self, results: Sequence[Sequence[Completion]]) -> dict[str, Any]:
        """The body: ``results`` are the completions of each prompt."""
        choices = []
        for index, prompt, done in self._all(results):
            choice = self._choice(index, prompt, self._part(done), done)
            if self.asked.chat:
                content, calls = self._calls(index, done)
                message: dict[str, Any] = {
                    "role": "assistant",
                    "content": content if content or not calls else None,
                    "refusal": None,
                }
                choice["message"] = message | ({"tool_calls": calls} if calls else {})
            choice["finish_reason"] = self._finish(index, done)
            choices.append(choice)
        body = self._frame("chat.completion" if self.asked.chat else "text_completion", choices)
        if self.asked.chat:
            body |= self._of_prompt(self.asked.prompts[0], results[0][0])
        return body | {"usage": self._usage(results), "mint_revision": self.model.digest}

    def _all(
        self, results: Sequence[Sequence[Completion]]
    ) -> Iterator[tuple[int, Prompt, Completion]]:
        for k, (prompt, some) in enumerate(zip(self.asked.prompts, results, strict=True)):
            for i, done in enumerate(some):
                yield k * self.asked.request.n + i, prompt, done

    def _part(self, done: Completion, told: int = 0) -> Part:
        """All of a completion but the tokens of it that were told before."""
        if self.asked.silent:
            return Part("", [])
        assert done.text is not None, "the engine has a tokenizer"
        places = Places(self._texts)
        places.add(done.tokens, done.text)
        named = slice(told, self._named(done, places))
        return Part(
            done.text,
            done.tokens[told:],
            _entries(done.tokens, done.logprobs, done.top_logprobs)[named],
            places.begins[named],
        )

    def _named(self, done: Completion, places: Places) -> int:
        """Returns how many of a completion's tokens ``logprobs`` names.

        As in OpenAI's API they end where the text ends: an end token, or tokens of a stop string,
        are not among them. Callers that score tokens, who ask for ``echo`` or for ids, get every
        token.
        """
        scores = self.asked.echo or self.asked.token_ids or self.asked.as_ids
        return (
            len(done.tokens)
            if scores or done.finish != "stop"
            else places.within(len(done.text or ""))
        )

    # -- as it comes

    def chunks(self, pieces: Sequence[tuple[int, Piece]]) -> list[dict[str, Any]]:
        """Chunks for what has come: (number of the prompt, piece); one for each choice that has
        something to tell.
        """
        came: dict[int, Part] = {}
        if self.asked.whole or self.asked.silent:
            return []
        for number, piece in pieces:
            index = number * self.asked.request.n + piece.sample
            growing, drawn, before = (
                self._growing[index],
                self._drawn[index],
                came.get(index, Part("", [])),
            )
            drawn += _entries(piece.tokens, piece.logprobs, piece.top)
            count, text = growing.add(piece.tokens)
            told = slice(growing.tokens_told - count, growing.tokens_told)
            came[index] = Part(
                before.text + text,
                [*before.tokens, *growing.tokens[told]],
                [*before.entries, *drawn[told]],
                [*before.begins, *growing.places.begins[told]],
            )
        wanted = self.asked.logprobs or self.asked.token_ids
        return [
            chunk
            for index, part in came.items()
            if part.text or (wanted and part.tokens)
            for chunk in self._chunks(index, part)
        ]

    def last_chunks(self, number: int, results: Sequence[Completion]) -> list[dict[str, Any]]:
        """The last chunks of a prompt's choices."""
        out = []
        for i, done in enumerate(results):
            index = number * self.asked.request.n + i
            calls: list[dict[str, Any]] = []
            if self.asked.whole or self.asked.silent:
                part = self._part(done)
                content, calls = self._calls(index, done) if self.asked.chat else (part.text, [])
                part = dataclasses.replace(part, text=content)
            else:
                growing = self._growing[index]
                content, calls = (
                    self._calls(index, done) if self.asked.chat else (done.text or "", [])
                )
                part = dataclasses.replace(
                    self._part(done, growing.tokens_told), text=growing.end(content)
                )
            out += self._chunks(index, part, done, calls)
        return out

    def usage_chunk(self, results: Sequence[Sequence[Completion]]) -> dict[str, Any]:
        """The chunk behind all others, where it is asked for."""
        return self._frame(self._chunk, []) | {
            "usage": self._usage(results),
            "mint_revision": self.model.digest,
        }

    @property
    def _chunk(self) -> str:
        return "chat.completion.chunk" if self.asked.chat else "text_completion"

    def _chunks(
        self, index: int, part: Part, done: Completion | None = None, calls: Sequence[Any] = ()
    ) -> list[dict[str, Any]]:
        """A choice's next chunk, behind the one that opens a chat's."""
        prompt, first, out = (
            self.asked.prompts[index // self.asked.request.n],
            index not in self._begun,
            [],
        )
        self._begun.add(index)
        extra: dict[str, Any] = {}
        if self.asked.chat and first:
            opening = {
                "index": index,
                "delta": {"role": "assistant", "content": "", "refusal": None},
                "logprobs": None,
                "finish_reason": None,
            }
            out.append(self._frame(self._chunk, [opening]) | self._of_prompt(prompt, done))
        choice = self._choice(index, prompt, part, done, first)
        if self.asked.chat:
            choice["delta"] = {"content": part.text} if part.text or not calls else {}
            if calls:
                choice["delta"] |= {
                    "tool_calls": [{"index": i, **call} for i, call in enumerate(calls)]
                }
        choice["finish_reason"] = None if done is None else self._finish(index, done)
        if done is not None:
            extra["mint_revision"] = self.model.digest
        return [*out, self._frame(self._chunk, [choice]) | extra]

    def failed(self, error: dict[str, Any]) -> list[dict[str, Any]]:
        """Returns what ends a stream that has begun."""
        return [{"error": error}]

    def written(self, chunk: dict[str, Any]) -> str:
        """Returns a chunk as a stream has it."""
        return f"data: {json.dumps(chunk)}\n\n"

    end = "data: [DONE]\n\n"  # of a stream

    # -- parts

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.asked.model,
            "choices": choices,
        } | {"system_fingerprint": self._fingerprint}

    def _choice(
        self, index: int, prompt: Prompt, part: Part, done: Completion | None, first: bool = True
    ) -> dict[str, Any]:
        """What a choice has in both forms of answer; ``first``: nothing of it was told before."""
        asked = self.asked
        choice: dict[str, Any] = {"index": index}
        if asked.token_ids:
            choice["token_ids"] = list(part.tokens)
        if asked.chat:
            told = [self._token(*entry) for entry in part.entries]
            return choice | {
                "logprobs": {"content": told, "refusal": None} if asked.logprobs else None
            }
        if first:
            choice |= self._of_prompt(prompt, done)
        choice["text"] = (prompt.text if asked.echo and first else "") + part.text
        choice["logprobs"] = None
        if asked.logprobs:
            entries, begins = part.entries, part.begins
            if asked.echo:
                assert done is not None, (
                    "log-probabilities of prompts come with the whole completion"
                )
                places = Places(self._texts, shown=True)
                places.add(prompt.tokens, prompt.text)
                entries = [*self._prompt_entries(prompt, done), *entries]
                begins = [*places.begins, *(len(prompt.text) + begin for begin in begins)]
            choice["logprobs"] = self._table(entries, begins)
        return choice

    def _prompt_entries(self, prompt: Prompt, done: Completion) -> list[Entry]:
        logprobs, top = (
            done.prompt_logprobs or [],
            done.top_prompt_logprobs or [[]] * (len(prompt.tokens) - 1),
        )
        k = self.asked.request.top_logprobs
        rest = (
            (token, p, some[:k])
            for token, p, some in zip(prompt.tokens[1:], logprobs, top, strict=True)
        )
        return [(prompt.tokens[0], None, []), *rest]

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self.asked.as_ids else self._texts.text_of(token)

    def _table(self, entries: Sequence[Entry], begins: Sequence[int]) -> dict[str, Any]:
        """Log-probabilities as completions have them."""
        top = [None if p is None else self._likeliest(token, p, some) for token, p, some in entries]
        return {
            "tokens": [self._name(token) for token, _, _ in entries],
            "token_logprobs": [p for _, p, _ in entries],
            "top_logprobs": top if self.asked.request.top_logprobs else None,
            "text_offset": list(begins),
        }

    def _likeliest(
        self, token: int, logprob: float, some: Sequence[tuple[int, float]]
    ) -> dict[str, float]:
        """By text, the likeliest of each; the token itself is among them."""
        out: dict[str, float] = {}
        for other, p in some:
            out.setdefault(self._name(other), p)
        out[self._name(token)] = logprob
        return out

    def _token(
        self, token: int, logprob: float | None, some: Sequence[tuple[int, float]]
    ) -> dict[str, Any]:
        """A token as chats tell it."""
        others = [
            {"token": self._name(i), "logprob": p, "bytes": list(self._texts.bytes_of(i))}
            for i, p in some
        ]
        return {
            "token": self._name(token),
            "logprob": logprob,
            "bytes": list(self._texts.bytes_of(token)),
            "top_logprobs": others,
        }

    def _of_prompt(self, prompt: Prompt, done: Completion | None) -> dict[str, Any]:
        """vLLM's fields: the prompt's ids, and what is asked of its tokens: by id, with the rank
        where it is known.
        """
        out: dict[str, Any] = (
            {"prompt_token_ids": list(prompt.tokens)} if self.asked.token_ids else {}
        )
        if (k := self.asked.prompt_top) is None or done is None:
            return out
        places: list[Any] = [None]
        for token, p, some in zip(
            prompt.tokens[1:],
            done.prompt_logprobs or [],
            done.top_prompt_logprobs or [[]] * len(prompt.tokens),
        ):
            ranked: dict[int, tuple[float, int | None]] = {
                i: (q, rank) for rank, (i, q) in enumerate(some[:k], 1)
            }
            ranked[token] = p, ranked.get(token, (p, None))[1]
            places.append(
                {
                    str(i): {"logprob": q, "rank": rank, "decoded_token": self._name(i)}
                    for i, (q, rank) in ranked.items()
                }
            )
        return out | {"prompt_logprobs": places}

    def _calls(self, index: int, done: Completion) -> tuple[str, list[dict[str, Any]]]:
        """A chat's content and its calls of tools."""
        text = done.text or ""
        if self.asked.tools is None:
            return text, []
        content, calls = self.asked.tools.calls_in(text)
        made = [
            {
                "id": f"{self.id}-{index}-{i}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for i, call in enumerate(calls)
        ]
        return content, made

    def _finish(self, index: int, done: Completion) -> str:
        if self.asked.chat and self._calls(index, done)[1]:
            return "tool_calls"
        return "length" if self.asked.silent else FINISH.get(done.finish, done.finish)

    def _usage(self, results: Sequence[Sequence[Completion]]) -> dict[str, Any]:
        prompt = sum(len(one.tokens) for one in self.asked.prompts)
        drawn = (
            0 if self.asked.silent else sum(len(done.tokens) for some in results for done in some)
        )
        reused = sum(some[0].reused for some in results)
        details = {"cached_tokens": reused}
        return {
            "prompt_tokens": prompt,
            "completion_tokens": drawn,
            "total_tokens": prompt + drawn,
            "prompt_tokens_details": details,
        }


def _entries(
    tokens: Sequence[int],
    logprobs: Sequence[float],
    top: Sequence[Sequence[tuple[int, float]]] | None,
) -> list[Entry]:
    return list(zip(tokens, logprobs, [[]] * len(tokens) if top is None else top, strict=True))
