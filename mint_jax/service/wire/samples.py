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
from mint_jax.service.tinker_types import SampleRequest
from mint_jax.service.validation import Body, Number, Text, TokenId, parse
from mint_jax.service.wire import messages, tensors
from mint_jax.service.wire.tensors import ModelInput, Tensor, TensorBody, to_json, to_proto

MAX_SAMPLES = 4096  # of one request; the answer lists their ids
NO_TOKEN, NO_LOGPROB = 0, -99999.0  # of an empty cell
Pairs = Sequence[Sequence[tuple[int, float]]]  # tokens and log-probabilities of each position


class SampleSpec(NamedTuple):
    """A request, and the ``[P - 1, K]`` tokens to score as sent, -1 for none: they shape its
    answer.
    """

    request: Request
    named: Tensor | None = None


Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]
Top = Annotated[int, Field(ge=0, le=ALTERNATIVES)]


class SampleParams(Body):
    max_tokens: Int32 | None = None
    temperature: Number | None = None
    top_k: Int32 | None = None
    top_p: Number | None = None
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
    most, given, stop = params.max_tokens, params.seed, params.stop
    stops = [] if stop is None else [stop] if isinstance(stop, str) else stop
    ids = tuple(one for one in stops if isinstance(one, int))
    request = Request(
        tuple(prompt.tolist()),
        n=body.num_samples or 1,
        max_tokens=max(1, context - prompt.size) if most is None else most,
        temperature=1.0 if params.temperature is None else params.temperature,
        top_k=0 if params.top_k in (None, -1) else params.top_k,
        top_p=1.0 if params.top_p is None else params.top_p,
        top_logprobs=body.topk_sample_logprobs or 0,
        prompt_logprobs=bool(body.prompt_logprobs),
        top_prompt_logprobs=body.topk_prompt_logprobs or 0,
        target_prompt_logprobs=None if named is None else _targets(named, prompt.size - 1),
        prompt_alternatives=body.prompt_alt_tokens_k or 0,
        prompt_logprobs_last_n=body.prompt_logprobs_last_n,
        seed=(seed if given is None else given) % 2**32,
        stop_ids=tuple(end_ids) if stop is None else ids,
        stop=tuple(one for one in stops if isinstance(one, str)),
    )
    if request.prompt_alternatives and request.temperature != 1:
        value = f"temperature is {request.temperature}"
        raise UserError(f"{value}; prompt_alt_tokens_k draws only at 1: send two requests")
    return SampleSpec(request, named)


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
    return (_proto if protobuf else _json)(completions, spec)


def _scored(first: Completion) -> np.ndarray | None:
    """Returns the prompt's log-probabilities, float32 ``[P]``."""
    found = first.prompt_logprobs
    return None if found is None else np.array([math.nan, *found], "<f4")


def _matrix(places: Pairs, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns ids int32 and log-probabilities float32, ``[places, k]``, padded on the right."""
    cells = np.empty((len(places), k), "<i4,<f4")
    cells[:] = NO_TOKEN, NO_LOGPROB
    for row, pairs in zip(cells, places):
        row[: len(pairs)] = pairs
    return cells["f0"], cells["f1"]


def _target_logprobs(spec: SampleSpec, first: Completion) -> Tensor | None:
    """Returns the log-probabilities of the scored tokens as these were sent; 0 for -1."""
    if spec.named is None:
        return None
    ids, found = spec.request.target_prompt_logprobs, first.target_prompt_logprobs
    assert ids is not None, "the specification has named cells and no targets"
    assert found is not None, "the completion is not of this request"
    rows = [place or [math.nan] * len(wanted) for wanted, place in zip(ids, found)]
    values = np.zeros(spec.named.values.size, np.float32)
    values[spec.named.values != -1] = list(itertools.chain(*rows))
    return dataclasses.replace(spec.named, values=values)


def _proto(completions: Sequence[Completion], spec: SampleSpec) -> bytes:
    first, request = completions[0], spec.request
    message = messages.SampleResponse(prompt_cache_hit_tokens=first.reused)
    for one in completions:
        reason = messages.STOP if one.finish == "stop" else messages.LENGTH
        sequence = message.sequences.add(stop_reason=reason)
        sequence.tokens = np.array(one.tokens, "<i4").tobytes()
        sequence.logprobs = np.array(one.drawn_logprobs, "<f4").tobytes()
        if one.top_logprobs is not None:
            _write_top(sequence.topk_sampled_logprobs, one.top_logprobs, request.top_logprobs)
    if (scored := _scored(first)) is not None:
        message.prompt_logprobs = scored.tobytes()
    if (top := first.top_prompt_logprobs) is not None:
        _write_top(message.topk_prompt_logprobs, [[], *top], request.top_prompt_logprobs)
    if (targets := _target_logprobs(spec, first)) is not None:
        to_proto(targets, message.target_prompt_logprobs)
    if (drawn := first.prompt_alternatives) is not None:
        ids, logprobs = _matrix(drawn, request.prompt_alternatives)
        to_proto(ids, message.prompt_alt_tokens.tokens)
        to_proto(logprobs, message.prompt_alt_tokens.logprobs)
    return message.SerializeToString()


def _write_top(message: Any, places: Pairs, k: int) -> None:
    ids, logprobs = _matrix(places, k)
    message.token_ids, message.logprobs = ids.tobytes(), logprobs.tobytes()
    message.length, message.k = ids.shape


def _json(completions: Sequence[Completion], spec: SampleSpec) -> bytes:
    first, top, sequences = completions[0], completions[0].top_prompt_logprobs, []
    for one in completions:
        logprobs = np.array(one.drawn_logprobs, np.float32).tolist()
        sequence = {"stop_reason": one.finish, "tokens": one.tokens, "logprobs": logprobs}
        likeliest = {} if one.top_logprobs is None else {"topk_logprobs": one.top_logprobs}
        sequences.append(sequence | likeliest)
    scored = _scored(first)
    answer: dict[str, Any] = {
        "type": "sample",
        "sequences": sequences,
        "prompt_logprobs": (
            None if scored is None else [None if math.isnan(p) else p for p in scored.tolist()]
        ),
        "topk_prompt_logprobs": None if top is None else [None, *(place or None for place in top)],
    }
    if (targets := _target_logprobs(spec, first)) is not None:
        answer["target_prompt_logprobs"] = to_json(targets)
    if (drawn := first.prompt_alternatives) is not None:
        ids, logprobs = _matrix(drawn, spec.request.prompt_alternatives)
        answer["prompt_alt_tokens"] = {"tokens": to_json(ids), "logprobs": to_json(logprobs)}
    return json.dumps(answer, separators=(",", ":")).encode()
