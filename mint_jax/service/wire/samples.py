"""Samples on the wire: a request's JSON to ``rollout.request.Request``, and completions to bytes.

Axes: P tokens of the prompt, T tokens of a completion, K cells of a position as sent, k likeliest
or drawn tokens of a position.
"""

import dataclasses
import itertools
import json
import math
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import Field

from mint_jax.errors import UserError
from mint_jax.rollout.device import ALTERNATIVES
from mint_jax.rollout.request import Completion, Request
from mint_jax.service.tinker_types import NullableBody, SampleRequest
from mint_jax.service.validation import Number, Text, TokenId, parse
from mint_jax.service.wire import messages, tensors
from mint_jax.service.wire.tensors import ModelInput, Tensor, TensorBody, to_json, to_proto

MAX_SAMPLES = 4096  # of one request; the answer lists their ids
NO_TOKEN, NO_LOGPROB = 0, -99999.0  # of an empty cell
Pairs = Sequence[Sequence[tuple[int, float]]]  # tokens and log-probabilities of each position


class SampleSpec(NamedTuple):
    """A request, and the ``[P - 1, K]`` tokens to score as sent, -1 for none: they shape its
    answer. ``recorded``: log-probabilities are kept for ``stable_reinforce``.
    """

    request: Request
    named: Tensor | None = None
    recorded: bool = False


Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]
Top = Annotated[int, Field(ge=0, le=ALTERNATIVES)]


class SampleParams(NullableBody):
    max_tokens: Int32 | None = None
    temperature: Number = 1.0
    top_k: Int32 = -1
    top_p: Number = 1.0
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: Text | list[Text] | list[TokenId] | None = None


class SampleBody(SampleRequest):
    prompt: ModelInput
    sampling_params: SampleParams | None = None
    num_samples: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] | None = None
    prompt_logprobs: bool | None = None
    topk_sample_logprobs: Top | None = None
    topk_prompt_logprobs: Top | None = None
    prompt_alt_tokens_k: Top | None = None
    prompt_logprobs_last_n: Int32 | None = None
    target_prompt_logprobs: TensorBody | None = None
    record_stability_info: bool | None = None


def spec_of(raw: bytes, context: int, end_ids: Sequence[int], seed: int) -> SampleSpec:
    """Returns the content of a request, for the bare base: the caller adds revision and tenant.

    Seeds are taken modulo 2**32. With ``stop`` the model's end tokens are ordinary tokens. Raises
    ``UserError``; ``rollout.request.check`` checks ranges.

    Args:
        context: maximum length of a completion without ``max_tokens``.
        end_ids: the model's end tokens, which stop a completion without ``stop``.
        seed: default.
    """
    body = parse(SampleBody, raw)
    params, target = body.sampling_params or SampleParams(), body.target_prompt_logprobs
    prompt = tensors.tokens_of(body.prompt, "prompt")
    named = None if target is None else tensors.tensor_of(target, "target_prompt_logprobs")
    room = max(1, context - prompt.size)
    stops = [params.stop] if isinstance(params.stop, str) else params.stop or []
    ids = tuple(end_ids) if params.stop is None else tuple(x for x in stops if isinstance(x, int))
    if body.prompt_alt_tokens_k and params.temperature != 1:
        value = f"temperature is {params.temperature}"
        raise UserError(f"{value}; prompt_alt_tokens_k draws only at 1: send two requests")
    request = Request(
        tuple(prompt.tolist()),
        n=body.num_samples or 1,
        max_tokens=room if params.max_tokens is None else params.max_tokens,
        temperature=params.temperature,
        top_k=0 if params.top_k == -1 else params.top_k,
        top_p=params.top_p,
        top_logprobs=body.topk_sample_logprobs or 0,
        prompt_logprobs=bool(body.prompt_logprobs),
        top_prompt_logprobs=body.topk_prompt_logprobs or 0,
        target_prompt_logprobs=None if named is None else _targets(named, prompt.size - 1),
        prompt_alternatives=body.prompt_alt_tokens_k or 0,
        prompt_logprobs_last_n=body.prompt_logprobs_last_n,
        seed=(seed if params.seed is None else params.seed) % 2**32,
        stop_ids=ids,
        stop=tuple(one for one in stops if isinstance(one, str)),
    )
    return SampleSpec(request, named, bool(body.record_stability_info))


def _targets(named: Tensor, places: int) -> tuple[tuple[int, ...], ...]:
    """Returns the tokens to score at each position."""
    if len(named.shape) != 2 or named.shape[0] != places:
        shape = f"{list(named.shape)}; expected [{places}, K], all of the prompt but the first"
        raise UserError(f"target_prompt_logprobs has shape {shape}")
    wanted = named.integers() != -1
    ids, rows = named.values[wanted], named.cells[wanted] // max(named.shape[1], 1)
    ends = np.searchsorted(rows, np.arange(places + 1))
    return tuple(tuple(ids[a:b].tolist()) for a, b in itertools.pairwise(ends))


def encode(completions: Sequence[Completion], spec: SampleSpec, protobuf: bool) -> bytes:
    """Returns the answer; ``logprobs`` are of the sampled distribution, after temperature, top-k
    and top-p.

    Positions of a prompt that were not scored have log-probability NaN (null in JSON), and no
    likeliest or drawn tokens. JSON is for old SDKs, with newer fields only if requested.
    """
    first, targets = completions[0], None
    if spec.named is not None:  # in the layout in which they were sent, 0 for -1
        scores = first.target_prompt_logprobs or ()
        rows = zip(spec.request.target_prompt_logprobs or (), scores, strict=True)
        values = np.zeros(spec.named.values.size, np.float32)
        found = itertools.chain(*(place or [math.nan] * len(ids) for ids, place in rows))
        values[spec.named.values != -1] = list(found)
        targets = dataclasses.replace(spec.named, values=values)
    drawn = None
    if first.prompt_alternatives is not None:
        drawn = _matrix(first.prompt_alternatives, spec.request.prompt_alternatives)
    return (_proto if protobuf else _json)(completions, spec.request, targets, drawn)


def _matrix(places: Pairs, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns ids int32 and log-probabilities float32, ``[places, k]``, padded on the right."""
    cells = np.empty((len(places), k), "<i4,<f4")
    cells[:] = NO_TOKEN, NO_LOGPROB
    for row, pairs in zip(cells, places):
        row[: len(pairs)] = pairs
    return cells["f0"], cells["f1"]


def _proto(
    completions: Sequence[Completion], request: Request, targets: Tensor | None, drawn: Any
) -> bytes:
    def write_top(message: Any, places: Pairs, k: int) -> None:
        ids, logprobs = _matrix(places, k)
        message.token_ids, message.logprobs = ids.tobytes(), logprobs.tobytes()
        message.length, message.k = ids.shape

    first = completions[0]
    message = messages.SampleResponse(prompt_cache_hit_tokens=first.reused)
    for one in completions:
        reason = messages.STOP if one.finish == "stop" else messages.LENGTH
        sequence = message.sequences.add(stop_reason=reason)
        sequence.tokens = np.array(one.tokens, "<i4").tobytes()
        sequence.logprobs = np.array(one.drawn_logprobs, "<f4").tobytes()
        if one.top_logprobs is not None:
            write_top(sequence.topk_sampled_logprobs, one.top_logprobs, request.top_logprobs)
    if (scored := first.prompt_logprobs) is not None:
        message.prompt_logprobs = np.array([math.nan, *scored], "<f4").tobytes()
    if (top := first.top_prompt_logprobs) is not None:
        write_top(message.topk_prompt_logprobs, [[], *top], request.top_prompt_logprobs)
    if targets is not None:
        to_proto(targets, message.target_prompt_logprobs)
    if drawn is not None:
        to_proto(drawn[0], message.prompt_alt_tokens.tokens)
        to_proto(drawn[1], message.prompt_alt_tokens.logprobs)
    return message.SerializeToString()


def _json(
    completions: Sequence[Completion], request: Request, targets: Tensor | None, drawn: Any
) -> bytes:
    first, sequences = completions[0], []
    for one in completions:
        logprobs = np.array(one.drawn_logprobs, np.float32).tolist()
        sequence = {"stop_reason": one.finish, "tokens": one.tokens, "logprobs": logprobs}
        likeliest = {} if one.top_logprobs is None else {"topk_logprobs": one.top_logprobs}
        sequences.append(sequence | likeliest)
    answer: dict[str, Any] = {"type": "sample", "sequences": sequences}
    answer |= {"prompt_logprobs": None, "topk_prompt_logprobs": None}
    if (scored := first.prompt_logprobs) is not None:
        values = np.array(scored, np.float32).tolist()
        answer["prompt_logprobs"] = [None, *(None if math.isnan(p) else p for p in values)]
    if (top := first.top_prompt_logprobs) is not None:
        answer["topk_prompt_logprobs"] = [None, *(place or None for place in top)]
    if targets is not None:
        answer["target_prompt_logprobs"] = to_json(targets)
    if drawn is not None:
        answer["prompt_alt_tokens"] = dict(zip(("tokens", "logprobs"), map(to_json, drawn)))
    return json.dumps(answer, separators=(",", ":")).encode()
