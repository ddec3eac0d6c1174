"""Completions of given prompts: JSONL in, JSONL out, base and adapters mixed in one batch.

A line is ``{"prompt": "text"}``, ``{"messages": [...]}`` (with ``tools`` and
``chat_template_kwargs`` for the chat template, if any) or ``{"tokens": [...]}``, with an optional
``id``, ``adapter`` (a PEFT directory, or a revision of ``config.catalog``), any setting of
``config.sampling`` in place of its default, ``logit_bias``, what is added to logits by token id,
``{"17": -100}``, and ``target_prompt_logprobs`` and ``prompt_logprobs_last_n``, see
``rollout.request``. A result is ``{"id", "prompt_tokens", "revision", "completions": [{"tokens",
"logprobs", "text", "finish"}]}``, in the order of the input, with ``top_logprobs`` as lists of
[token, log-probability] where a line asks for them, and what it asks of its prompt's places by the
settings' names; ``revision`` is the digest of the adapter that drew the tokens, null for the bare
base. More adapters than ``config.slots`` take turns. A run that was interrupted is resumed by the
same command; see ``output``.
"""

import dataclasses
import json
import math
import time
from pathlib import Path
from typing import Any

from mint_jax.data import chat
from mint_jax.data.sources import numbered_rows
from mint_jax.errors import UserError
from mint_jax.jobs import adapters, catalogs, common, preflight, settings
from mint_jax.jobs.common import Config
from mint_jax.jobs.output import Output
from mint_jax.jobs.score import check_row, made_from, tokens_of
from mint_jax.metrics import Progress
from mint_jax.models.base import Base
from mint_jax.residency.pool import AdapterBatch
from mint_jax.rollout.engine import Engine
from mint_jax.rollout.request import Completion, Request

SETTINGS = {  # per-line settings and their types
    "max_tokens": (int,),
    "temperature": (int, float),
    "top_k": (int,),
    "top_p": (int, float),
    "min_p": (int, float),
    "repetition_penalty": (int, float),
    "frequency_penalty": (int, float),
    "presence_penalty": (int, float),
    "ignore_eos": (bool,),
    "top_logprobs": (int,),
    "prompt_logprobs": (bool,),
    "top_prompt_logprobs": (int,),
    "target_prompt_logprobs": (list, tuple),
    "prompt_alternatives": (int,),
    "prompt_logprobs_last_n": (int,),
    "json_schema": (str, dict),
    "regex": (str,),
    "choice": (list, tuple),
    "seed": (int,),
    "n": (int,),
    "stop": (str, list, tuple),
    "stop_ids": (list, tuple),
    "logit_bias": (dict,),
}


OF_PROMPT = (
    "prompt_logprobs",
    "top_prompt_logprobs",
    "target_prompt_logprobs",
    "prompt_alternatives",
)
KEYS = ("id", "adapter", "prompt", "messages", "tokens", "text", *chat.OF_CHATS, *SETTINGS)


def request_of(base: Base, row: dict[str, Any], defaults: dict[str, Any], where: str) -> Request:
    """The request of one line, for the bare base; a completion also ends at the checkpoint's own
    end tokens.
    """
    settings = {
        name: value
        for given in (defaults, row)
        for name, value in given.items()
        if name in SETTINGS
    }
    for name, value in settings.items():
        wanted = SETTINGS[name]
        if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
            raise UserError(
                f"{where}: {name} is {value!r}; expected {' or '.join(t.__name__ for t in wanted)}"
            )
    ends = (
        ()
        if settings.pop("ignore_eos", False) or base.tokenizer is None
        else base.tokenizer.eos_ids
    )
    settings["logit_bias"] = tuple(
        _bias(where, *one) for one in settings.get("logit_bias", {}).items()
    )
    if isinstance(schema := settings.get("json_schema"), dict):
        settings["json_schema"] = json.dumps(schema)
    settings |= {name: settings.get(name) or None for name in ("json_schema", "regex")}
    settings["choice"] = tuple(settings.get("choice", ())) or None
    if "target_prompt_logprobs" in settings:
        settings["target_prompt_logprobs"] = tuple(
            _targets(where, ids) for ids in settings["target_prompt_logprobs"]
        )
    settings["stop_ids"] = (*settings.get("stop_ids", ()), *ends)
    settings["stop"] = tuple(
        [settings["stop"]] if isinstance(settings.get("stop"), str) else settings.get("stop", ())
    )
    return Request(prompt=tuple(_prompt(base, row, where)), **settings)


def _bias(where: str, token: str, bias: Any) -> tuple[int, float]:
    if not token.isdecimal() or isinstance(bias, bool) or not isinstance(bias, int | float):
        raise UserError(
            f"{where}: logit_bias has {token!r}: {bias!r}; expected numbers by token id, as in"
            ' {"17": -100}'
        )
    return int(token), float(bias)


def _targets(where: str, ids: Any) -> tuple[int, ...]:
    if not isinstance(ids, list | tuple) or not all(type(i) is int for i in ids):
        raise UserError(
            f"{where}: target_prompt_logprobs has {ids!r}; expected a list of token ids for each"
            " place of the prompt but the first"
        )
    return tuple(ids)


def _prompt(base: Base, row: dict[str, Any], where: str) -> list[int]:
    """The token ids of a line's ``prompt``, ``messages``, ``tokens`` or ``text``."""
    given = [name for name in ("prompt", "messages", "tokens", "text") if name in row]
    if len(given) > 1:
        raise UserError(f"{where} has {' and '.join(given)}: give one of them")
    if "prompt" in row and not isinstance(row["prompt"], str):
        raise UserError(
            f"{where}: prompt is {str(row['prompt'])[:80]}; expected a string; a conversation is"
            " called messages"
        )
    if "messages" in row:
        messages = row["messages"]
        turns = messages if isinstance(messages, list) else []
        if not turns or not all(
            isinstance(m, dict) and isinstance(m.get("role"), str) for m in turns
        ):
            wanted = 'expected a list of {"role": ..., "content": ...}; plain text is called prompt'
            raise UserError(f"{where}: messages is {str(messages)[:80]!r}; {wanted}")
        return chat.prompt_tokens(base.need_tokenizer(), row, where)
    if given := [name for name in chat.OF_CHATS if name in row]:
        raise UserError(
            f"{where} has {given[0]} beside plain text, which no chat template renders: give"
            " messages, or leave it out"
        )
    return common.encode(base, row["prompt"]) if "prompt" in row else tokens_of(base, row, where)


def run(config: Config, workdir: Path) -> dict[str, Any]:
    """Samples ``config.input`` into ``config.output``; returns the result it prints."""
    settings.complete(config)  # a caller other than launch may leave settings out
    common.save_config(config, workdir)
    source, path = preflight.files(config)
    places, rows = zip(*numbered_rows(source))
    with Output(path, len(rows), made_from(config, rows)) as output:
        todo = [n for n in range(len(rows)) if n not in output.rows]
        base = common.open_base(config)
        decode = base.tokenizer.decode if base.tokenizer is not None else None
        engine = Engine(base, decode, config.max_rows, cache_bytes=common.cache_bytes(config))
        requests = []
        for row, where in zip(rows, places):
            check_row(row, KEYS, where)
            requests.append(request_of(base, row, dict(config.sampling), where))
            try:
                engine.check(requests[-1], {})
            except UserError as error:
                raise UserError(f"{where}: {error}") from None
        names = [rows[n].get("adapter") for n in todo]
        progress = Progress("sample", len(rows), done=len(output.rows))

        def sampled(turn: AdapterBatch) -> list[list[Completion]]:
            mine = [todo[i] for i in turn.rows]
            digests = [pool.digests.get(names[i] or "") for i in turn.rows]
            slots = [turn.slot(names[i]) for i in turn.rows]

            def done(results: dict[int, list[Completion]]) -> None:
                output.add(
                    {
                        mine[i]: _result(rows[mine[i]], mine[i], requests[mine[i]], digests[i], c)
                        for i, c in results.items()
                    }
                )
                progress.update(len(output.rows), "prompts")

            placed = [
                dataclasses.replace(requests[n], adapter=s, revision=d)
                for n, s, d in zip(mine, slots, digests)
            ]
            return engine.generate(placed, turn.stacks, finished=done)

        with (
            catalogs.reading(config) as catalog,
            adapters.pool_of(base, names, catalog, config.slots) as pool,
        ):
            output.begin(
                {"base's fingerprint": base.fingerprint}
                | {f"adapter {n}": d for n, d in pool.digests.items()}
            )
            began = time.monotonic()
            results = pool.run(sampled)
            spent = time.monotonic() - began
        output.finish()
    return {
        "job": "sample",
        "prompts": len(rows),
        "tokens": sum(len(c["tokens"]) for row in output.rows.values() for c in row["completions"]),
        "adapters": len({row.get("adapter") for row in rows} - {None, ""}),
        "tokens_per_s": round(
            sum(len(c.tokens) for completions in results for c in completions) / spent, 1
        ),
        "resumed": len(rows) - len(todo),
        "output": str(path),
    }


def _of_prompt(completion: Completion) -> dict[str, Any]:
    """What was asked of the prompt's places; NaN, which JSON has not, is null."""
    told = {name: getattr(completion, name) for name in OF_PROMPT}
    if told["prompt_logprobs"] is not None:
        told["prompt_logprobs"] = [None if math.isnan(p) else p for p in told["prompt_logprobs"]]
    return {name: value for name, value in told.items() if value is not None}


def _result(
    row: dict[str, Any],
    n: int,
    request: Request,
    revision: str | None,
    completions: list[Completion],
) -> dict[str, Any]:
    return {
        "id": row.get("id", n),
        "prompt_tokens": list(request.prompt),
        "revision": revision,
        **_of_prompt(completions[0]),
        "completions": [
            {"tokens": c.tokens, "logprobs": c.logprobs, "text": c.text, "finish": c.finish}
            | ({} if c.top_logprobs is None else {"top_logprobs": c.top_logprobs})
            for c in completions
        ],
    }
