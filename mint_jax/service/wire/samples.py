"""Samples on the wire: a request's JSON to ``rollout.request.Request``, and completions to bytes.

Axes: P tokens of the prompt, T tokens of a completion, K cells of a position as sent, k likeliest
or drawn tokens of a position.
"""

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
from mint_jax.service.wire.tensors import ModelInput, TensorBody

MAX_SAMPLES = 4096  # of one request; the answer lists their ids
NO_TOKEN, NO_LOGPROB = 0, -99999.0  # of an empty cell
_NAN = math.nan


class Named(NamedTuple):
    """The cells whose log-probabilities are requested, as sent.

    Attributes:
        tensor: ``[P - 1, K]`` token ids.
        wanted: for each of its values, row after row, whether it is an id (not -1).
        rows: the row of each value.
    """

    tensor: tensors.Tensor
    wanted: np.ndarray
    rows: np.ndarray


class SampleSpec(NamedTuple):
    """A request, and the named cells that shape its answer."""

    request: Request
    named: Named | None = None


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


def place_of(body: bytes) -> SampleRequest:
    """Returns the place of a request of ``asample``: the model to sample, the first that is given,
    and the request's number in its session. Raises ``UserError`` if it has none.
    """
    place = parse(SampleRequest, body)
    names = "sampling_session_id", "model_path", "base_model"
    if all(getattr(place, name) is None for name in names):
        raise UserError(f"the request has none of {', '.join(names)}: give one")
    if place.sampling_session_id is not None and place.seq_id is None:
        raise UserError(
            "the request has a sampling_session_id and no seq_id: number the session's requests"
            " from 0"
        )
    return place


def spec_of(raw: bytes, context: int, end_ids: Sequence[int], seed: int) -> SampleSpec:
    """Returns the content of a request, for the bare base: the caller adds revision and tenant.

    Seeds are taken modulo 2**32. With ``stop`` the model's end tokens are ordinary tokens.

    Args:
        context: maximum length of a completion without ``max_tokens``.
        end_ids: the model's end tokens, which stop a completion without ``stop``.
        seed: default.

    Raises:
        UserError: a wrong value; ``rollout.request.check`` checks ranges.
    """
    body = parse(SampleBody, raw)
    params, target = body.sampling_params or SampleParams(), body.target_prompt_logprobs
    prompt = body.prompt.tokens("prompt")
    named = None if target is None else _named(target, prompt.size - 1)
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
        target_prompt_logprobs=None if named is None else _places(named),
        prompt_alternatives=body.prompt_alt_tokens_k or 0,
        prompt_logprobs_last_n=body.prompt_logprobs_last_n,
        seed=(seed if given is None else given) % 2**32,
        stop_ids=tuple(end_ids) if stop is None else ids,
        stop=tuple(one for one in stops if isinstance(one, str)),
    )
    if request.prompt_alternatives and request.temperature != 1:
        raise UserError(
            f"temperature is {request.temperature}; prompt_alt_tokens_k draws only at 1: send"
            " two requests"
        )
    return SampleSpec(request, named)


def _named(target: tensors.TensorBody, places: int) -> Named:
    tensor = tensors.from_json(target, "target_prompt_logprobs")
    if len(tensor.shape) != 2 or tensor.shape[0] != places:
        raise UserError(
            f"target_prompt_logprobs has shape {list(tensor.shape)}; expected [{places}, K]: all of"
            " the prompt but the first"
        )
    ids = tensor.integers()
    cells = np.arange(ids.size) if tensor.cells is None else tensor.cells
    return Named(tensor, ids != -1, cells // max(tensor.shape[1], 1))


def _places(named: Named) -> tuple[tuple[int, ...], ...]:
    """Returns the wanted ids of each position."""
    ids, rows = named.tensor.integers()[named.wanted], named.rows[named.wanted]
    ends = np.searchsorted(rows, np.arange(named.tensor.shape[0] + 1))
    return tuple(tuple(ids[a:b].tolist()) for a, b in itertools.pairwise(ends))


def encode(completions: Sequence[Completion], spec: SampleSpec, protobuf: bool) -> bytes:
    """Returns the answer; ``logprobs`` are of the sampled distribution, after temperature, top-k
    and top-p.

    Positions of a prompt that were not scored have log-probability NaN (null in JSON), and no
    likeliest or drawn tokens.

    Args:
        spec: the request of these completions.
        protobuf: else the JSON of old SDKs, with newer fields only if requested.

    Raises:
        UserError: a completion was cancelled.
    """
    if cancelled := [one for one in completions if one.finish not in ("stop", "length")]:
        raise UserError(f"a sample ended as {cancelled[0].finish!r} before it was done: ask again")
    return (_proto if protobuf else _json)(completions, spec)


def _scored(first: Completion) -> np.ndarray | None:
    """Returns the prompt's log-probabilities, float32 ``[P]``."""
    found = first.prompt_logprobs
    return None if found is None else np.array([_NAN, *found], np.float32)


def _matrix(places: Sequence[Sequence[tuple[int, float]]], k: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns ids int32 and log-probabilities float32, ``[places, k]``, padded on the right and
    little-endian.
    """
    ids = np.full((len(places), k), NO_TOKEN, "<i4")
    logprobs = np.full((len(places), k), NO_LOGPROB, "<f4")
    for i, pairs in enumerate(places):
        for j, (id, logprob) in enumerate(pairs):
            ids[i, j], logprobs[i, j] = id, logprob
    return ids, logprobs


def _values(named: Named, first: Completion) -> np.ndarray:
    """Returns float32 log-probabilities of the named cells in the request's order; 0 for others."""
    found = first.target_prompt_logprobs
    counts = np.bincount(named.rows[named.wanted], minlength=named.tensor.shape[0])
    assert found is not None, "the completion is not of this request"
    out = np.zeros(named.wanted.size, "<f4")
    out[named.wanted] = [value for place, n in zip(found, counts) for value in place or [_NAN] * n]
    return out


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
        message.prompt_logprobs = scored.astype("<f4").tobytes()
    if first.top_prompt_logprobs is not None:
        top = [[], *first.top_prompt_logprobs]
        _write_top(message.topk_prompt_logprobs, top, request.top_prompt_logprobs)
    if spec.named is not None:
        _write_named(message.target_prompt_logprobs, spec.named, first)
    if first.prompt_alternatives is not None:
        both = message.prompt_alt_tokens.tokens, message.prompt_alt_tokens.logprobs
        matrix = _matrix(first.prompt_alternatives, request.prompt_alternatives)
        for tensor, array, form in zip(both, matrix, (messages.INT32, messages.FLOAT32)):
            tensor.dtype, tensor.dense = form, array.tobytes()
            tensor.shape.extend(array.shape)
    return message.SerializeToString()


def _write_top(message: Any, places: Sequence[Sequence[tuple[int, float]]], k: int) -> None:
    ids, logprobs = _matrix(places, k)
    message.token_ids, message.logprobs = ids.tobytes(), logprobs.tobytes()
    message.length, message.k = ids.shape


def _write_named(message: Any, named: Named, first: Completion) -> None:
    values, tensor = _values(named, first).tobytes(), named.tensor
    message.dtype = messages.FLOAT32
    message.shape.extend(tensor.shape)
    if tensor.rows is None or tensor.columns is None:
        message.dense = values
        return
    message.sparse_csr.values = values
    message.sparse_csr.crow_indices = tensor.rows.astype("<i8").tobytes()
    message.sparse_csr.col_indices = tensor.columns.astype("<i8").tobytes()


def _json(completions: Sequence[Completion], spec: SampleSpec) -> bytes:
    first, request = completions[0], spec.request
    sequences = []
    for one in completions:
        logprobs = np.array(one.drawn_logprobs, np.float32).tolist()
        sequence = {"stop_reason": one.finish, "tokens": one.tokens, "logprobs": logprobs}
        top = {} if one.top_logprobs is None else {"topk_logprobs": one.top_logprobs}
        sequences.append(sequence | top)
    scored, top = _scored(first), first.top_prompt_logprobs
    answer: dict[str, Any] = {
        "type": "sample",
        "sequences": sequences,
        "prompt_logprobs": (
            None if scored is None else [None if math.isnan(p) else p for p in scored.tolist()]
        ),
        "topk_prompt_logprobs": None if top is None else [None, *(place or None for place in top)],
    }
    if spec.named is not None:
        tensor = spec.named.tensor
        target = tensors.to_json(_values(spec.named, first)) | {"shape": list(tensor.shape)}
        if tensor.rows is not None and tensor.columns is not None:
            target |= {
                "sparse_crow_indices": tensor.rows.tolist(),
                "sparse_col_indices": tensor.columns.tolist(),
            }
        answer["target_prompt_logprobs"] = target
    if first.prompt_alternatives is not None:
        ids, logprobs = _matrix(first.prompt_alternatives, request.prompt_alternatives)
        both = {"tokens": tensors.to_json(ids), "logprobs": tensors.to_json(logprobs)}
        answer["prompt_alt_tokens"] = both
    return json.dumps(answer, separators=(",", ":")).encode()
