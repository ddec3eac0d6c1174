"""Rewards of a judge: a language model behind an OpenAI-compatible API that scores answers.

A judge that does not answer, or gives no score, costs its row (``env.Unscored``).
"""

import contextlib
import dataclasses
import json
import os
import random
import re
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException
from typing import Any

from mint_jax.envs.env import Example, ListEnvironment, Unscored
from mint_jax.envs.questions import split
from mint_jax.errors import UserError, choice

ATTEMPTS = 5  # if a connection fails, or the API answers 5xx or one of RETRIED
RETRIED = 408, 409, 429
BACKOFF_S, MAX_WAIT_S = 1.0, 30.0  # the first wait, which doubles, and the longest
TEMPLATE = """\
Question:
{question}

Reference answer:
{reference}

Answer to judge:
{answer}

Judge the answer. End with a line "Score: N", from 0 (useless) to 10 (as good as the reference)."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any) -> None:
        """Refuses redirects, which would take the key to another host."""


_OPENER = urllib.request.build_opener(_NoRedirect)


@dataclasses.dataclass(frozen=True)
class Judge:
    """A model that scores answers.

    Attributes:
        url, model: address of the API, such as http://127.0.0.1:8000/v1, and the model's name.
        template: text that it reads, with {answer}, {question} and {reference}.
        pattern: regular expression with one group, the score; its last match counts.
        lowest, highest: range of scores; a number outside it counts as no score.
        body: further fields of a request.
        key_variable: environment variable that has the API key; empty: no key.
        timeout_s: seconds that the API may be silent.
    """

    url: str
    model: str
    template: str = TEMPLATE
    pattern: str = r'(?i)score[\s:=*"]*(-?\d+(?:\.\d+)?)'
    lowest: float = 0.0
    highest: float = 10.0
    body: Mapping[str, Any] = dataclasses.field(default_factory=lambda: {"temperature": 0})
    key_variable: str = "OPENAI_API_KEY"
    timeout_s: float = 60.0

    def __post_init__(self):
        try:
            groups = re.compile(self.pattern).groups
        except re.error:
            groups = 0
        variable = "an environment variable with the API key; set it, or '' if no key is needed"
        for name, is_right, expected in (
            ("url", re.match(r"https?://\w", self.url), "http://… or https://…"),
            ("template", "{answer}" in self.template, "text with {answer}"),
            ("pattern", groups == 1, "a regular expression with one group, the score"),
            ("key_variable", not self.key_variable or self._key.isprintable(), variable),
        ):
            if not is_right:
                raise UserError(f"{name} is {getattr(self, name)!r:.200}; expected {expected}")

    @property
    def _key(self) -> str:
        return os.environ.get(self.key_variable, "").strip() or "\n"  # none is not printable

    def score(self, question: str, answer: str, reference: str = "") -> float:
        """Returns the score of an answer. Raises ``Unscored``: the judge gave none."""
        given = {"question": question, "answer": answer, "reference": reference}
        text = re.sub(r"\{(question|answer|reference)\}", lambda at: given[at[1]], self.template)
        said = self._ask(text)
        with contextlib.suppress(IndexError, ValueError):
            value = float(re.findall(self.pattern, said)[-1])
            if self.lowest <= value <= self.highest:  # not NaN
                return value
        raise Unscored(
            f"the judge's answer {said[-200:]!r} has no score from {self.lowest:g} to"
            f" {self.highest:g} where pattern {self.pattern!r} finds one"
        )

    def _ask(self, text: str) -> str:
        """Returns the judge's answer."""
        messages = [{"role": "user", "content": text}]
        body = {"model": self.model, "messages": messages, **self.body}
        headers = {"Content-Type": "application/json", "User-Agent": "mint_jax"}
        if self.key_variable:
            headers["Authorization"] = f"Bearer {self._key}"
        place = f"{self.url.rstrip('/')}/chat/completions"
        request = urllib.request.Request(place, json.dumps(body).encode(), headers)
        for attempt in range(ATTEMPTS):
            wait_s = BACKOFF_S * 2**attempt * random.uniform(0.5, 1.0)
            try:
                with _OPENER.open(request, timeout=self.timeout_s) as answer:
                    [found, *_] = json.load(answer)["choices"]
                if found.get("finish_reason") == "length":
                    reason = "its answer was cut off: raise the limit of tokens in body"
                    break
                return str(found["message"]["content"])
            except urllib.error.HTTPError as error:
                reason = f"HTTP {error.code}"
                with contextlib.suppress(OSError, HTTPException):
                    reason += f": {error.read(200)!r}"
                if error.code < 500 and error.code not in RETRIED:
                    break
                after = error.headers.get("Retry-After", "")
                wait_s = max(wait_s, float(after)) if after.isdigit() else wait_s
            except (OSError, HTTPException) as error:
                reason = f"{type(error).__name__}: {error}"
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                reason = f"no chat completion ({type(error).__name__}: {error})"
                break
            if attempt + 1 < ATTEMPTS:
                time.sleep(min(wait_s, MAX_WAIT_S))
        raise Unscored(f"the judge {self.model!r} at {place} gave no answer, {reason}")


def judged(
    path: str,
    url: str,
    model: str,
    held_out: int | str = 64,
    instruction: str = "",
    question: str = "question",
    answer: str = "answer",
    concurrency: int = 16,
    **judge: Any,
) -> ListEnvironment:
    """Builds an environment of questions whose answers a judge scores.

    Args:
        path, held_out, instruction, question: as in ``questions``.
        answer: column of the reference answer; empty: none.
        concurrency: answers that are judged at once.
        judge: further fields of ``Judge``.
    """
    known = [field.name for field in dataclasses.fields(Judge)]
    for name in judge.keys() - known:
        raise choice("setting of a judge", name, known)
    made = Judge(url, model, **judge)

    def score(completion: str, example: Example) -> float:
        messages = [message for message in example.messages if isinstance(message, dict)]
        asked = [f"{message['role']}: {message['content']}" for message in messages]
        text = messages[0]["content"] if len(messages) == 1 else "\n\n".join(asked)
        return made.score(text, completion.strip(), example.answer)

    examples = split(path, held_out, instruction, question, answer, lambda text: text)
    return ListEnvironment(*examples, score, concurrency)


def check(options: Mapping[str, Any]) -> None:
    """Asks the judge for the score of one reference. Raises ``UserError``: it gave none."""
    environment = judged(**options)
    first = [*environment.train, *environment.held_out][0]
    try:
        environment.reward(first.answer, first)
    except Unscored as error:
        raise UserError(f"environment 'judge' cannot score a reference answer, {error}") from None
