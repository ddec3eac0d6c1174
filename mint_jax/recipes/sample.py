"""Completions of given prompts: JSONL in, JSONL out, base and adapters mixed in one batch.

A line has ``prompt``, ``messages`` or ``tokens``. It may have an ``id``, an ``adapter`` (a PEFT
directory, or a revision of ``config.catalog``), any setting of ``config.sampling`` and of
``LineOptions``; see ``rollout.request``. A result is ``{"id", "prompt_tokens", "revision",
"completions": [{"tokens", "logprobs", "text", "finish"}]}``, in the order of the input;
``revision`` is the adapter's digest, null for the bare base. See ``harness.batch``.
"""

import dataclasses
import functools
import json
import math
from pathlib import Path
from typing import Any

from mint_jax import fields
from mint_jax.data import chat
from mint_jax.errors import UserError
from mint_jax.harness import batch
from mint_jax.harness.options import LineSampling, SampleSettings
from mint_jax.models.base import Base
from mint_jax.rollout.engine import Engine
from mint_jax.rollout.request import Completion, Request

OF_PROMPT = (
    *("prompt_logprobs", "top_prompt_logprobs", "target_prompt_logprobs"),
    "prompt_alternatives",
)
FORMS = ("prompt", "messages", "tokens", "text")


@dataclasses.dataclass(frozen=True)
class LineOptions(LineSampling):
    """Settings of one line."""

    logit_bias: dict = dataclasses.field(default_factory=dict)
    target_prompt_logprobs: tuple[tuple[int, ...], ...] | None = None
    prompt_logprobs_last_n: int | None = None


SETTINGS = tuple(f.name for f in dataclasses.fields(LineOptions))


def run(config: SampleSettings, folder: Path) -> dict[str, Any]:
    """Samples ``config.input`` into ``config.output``; returns the result."""
    decides = {f"sampling.{name}": value for name, value in vars(config.sampling).items()}
    how = functools.partial(sampler, config=config)
    common, rows, drawn, seconds = batch.run(config, folder, how, decides)
    new = sum(len(c.tokens) for completions in drawn for c in completions)
    return {
        "job": "sample",
        "prompts": len(rows),
        "tokens": sum(len(c["tokens"]) for row in rows for c in row["completions"]),
        "tokens_per_s": round(new / seconds, 1),
        **common,
    }


def sampler(base: Base, config: SampleSettings) -> batch.Program:
    """Returns a program that samples requests of many adapters."""
    decode = base.tokenizer.decode if base.tokenizer is not None else None
    engine = Engine(base, decode, **config.sampler)

    def prepare(row: batch.Row, where: str) -> Request:
        request = request_of(base, row, vars(config.sampling), where)
        try:
            engine.check(request, {})
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
        return request

    def compute(inputs, slots, digests, stacks, done) -> list[list[Completion]]:
        requests = [
            dataclasses.replace(request, adapter=slot, revision=digest)
            for request, slot, digest in zip(inputs, slots, digests)
        ]
        return engine.generate(requests, stacks, finished=done)

    keys = ("id", "adapter", *FORMS, *chat.OF_CHATS, *SETTINGS)
    return batch.Program("prompts", keys, prepare, compute, _to_row)


def _to_row(request: Request, result: list[Completion], digest: str | None) -> batch.Row:
    row = {"prompt_tokens": list(request.prompt), "revision": digest}
    row |= _present(result[0], *OF_PROMPT)
    if (values := row.get("prompt_logprobs")) is not None:  # JSON has no NaN
        row["prompt_logprobs"] = [None if math.isnan(p) else p for p in values]
    names = "tokens", "logprobs", "text", "finish"
    completions = [
        {name: getattr(c, name) for name in names} | _present(c, "top_logprobs") for c in result
    ]
    return row | {"completions": completions}


def _present(completion: Completion, *names: str) -> dict[str, Any]:
    """Returns the values that a completion has."""
    found = {name: getattr(completion, name) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def request_of(base: Base, row: batch.Row, defaults: dict[str, Any], where: str) -> Request:
    """Returns the request of one line for the bare base; the checkpoint's end tokens end a
    completion too.
    """
    given = defaults | {name: row[name] for name in SETTINGS if name in row}
    if isinstance(given["json_schema"], dict):
        given["json_schema"] = json.dumps(given["json_schema"])
    given = fields.check(LineOptions, given, where)
    ends = base.tokenizer.eos_ids if base.tokenizer is not None else ()
    if not given.pop("ignore_eos"):
        given["stop_ids"] = (*given["stop_ids"], *ends)
    biases = given.get("logit_bias", {}).items()
    given["logit_bias"] = tuple(_bias(where, token, bias) for token, bias in biases)
    given |= {name: given[name] or None for name in ("json_schema", "regex", "choice")}
    return Request(prompt=tuple(_prompt(base, row, where)), **given)


def _bias(where: str, token: str, bias: Any) -> tuple[int, float]:
    if not token.isdecimal() or isinstance(bias, bool) or not isinstance(bias, int | float):
        raise UserError(
            f"{where}: logit_bias has {token!r}: {bias!r}; expected numbers by token id, as in"
            ' {"17": -100}'
        )
    return int(token), float(bias)


def _prompt(base: Base, row: batch.Row, where: str) -> list[int]:
    """Returns the token ids of a line's prompt."""
    given = [name for name in FORMS if name in row]
    if len(given) > 1:
        raise UserError(f"{where} has {' and '.join(given)}: give one of them")
    if "messages" in row:
        return chat.prompt_tokens(base.need_tokenizer(), row, where)
    if given := [name for name in chat.OF_CHATS if name in row]:
        raise UserError(
            f"{where} has {given[0]} and plain text, which no chat template renders: give"
            " messages, or leave it out"
        )
    return batch.tokens_of(base, row, where)
