"""Sampling on the wire: a request's JSON as ``rollout.request.Request``, and completions as bytes.

Axes: P tokens of the prompt, T tokens of a completion, K cells of a place as they were sent, k
likeliest or drawn of a place.
"""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mint_jax.errors import UserError
from mint_jax.rollout.device import ALTERNATIVES
from mint_jax.rollout.request import Completion, Request
from mint_jax.service.wire import messages, tensors
from mint_jax.service.wire.reading import (
    boolean,
    integer,
    json_object,
    json_tokens,
    mapping,
    number,
    sequence,
    text,
)

MAX_SAMPLES = 4096  # of one request, whose ids are answered at once
MAX_PLACE = 2**63 - 1  # a copy of a client begins at a random number of up to 1e9, times 1e9
NO_TOKEN, NO_LOGPROB = 0, -99999.0  # of a cell that holds nothing
_NAN = math.nan


class Named(NamedTuple):
    """The cells whose log-probabilities a request names, as it sent them.

    Attributes:
        tensor: ``[P - 1, K]`` token ids.
        wanted: for each of its values, row after row, whether it is an id: -1 is none.
        rows: the row of each value.
    """

    tensor: tensors.Tensor
    wanted: np.ndarray
    rows: np.ndarray


class Asked(NamedTuple):
    """A request, and what its answer is shaped by."""

    request: Request
    named: Named | None = None


class Message:
    """A request of ``asample`` whose place is known.

    Attributes:
        sampling_session_id, base_model, model_path: what is to be sampled; the first of them that
            is not None.
        seq_id: its place in the session, from 0; None where there is no session.
    """

    def __init__(self, told: Mapping[str, Any]):
        names = "sampling_session_id", "model_path", "base_model"
        of = {name: text(told[name], name) for name in names if told.get(name) is not None}
        if not of:
            raise UserError(f"the request has none of {', '.join(names)}: say what to sample")
        self.sampling_session_id, self.model_path, self.base_model = (
            of.get(name) for name in names
        )
        self.seq_id = (
            None if told.get("seq_id") is None else integer(told["seq_id"], "seq_id", 0, MAX_PLACE)
        )
        if self.sampling_session_id is not None and self.seq_id is None:
            raise UserError(
                "the request has a sampling_session_id and no seq_id: number the session's requests"
                " from 0"
            )
        self._told = told

    def asked(self, context: int, end_ids: Sequence[int], seed: int) -> Asked:
        """What is wanted, of the bare base: adapter, revision and tenant are the caller's to add.

        A seed is told modulo 2**32. ``stop`` replaces what stops by itself: with one, the model's
        end tokens are tokens like others.

        Args:
            context: tokens that the base reads; without ``max_tokens`` a completion goes up to
                there.
            end_ids: of the model's end of text, at which it stops unless ``stop`` is given.
            seed: where none is told.

        Raises:
            UserError: a value is of the wrong type; ranges are left to ``rollout.request.check``.
        """
        told = self._told
        prompt = json_tokens(told.get("prompt"), "prompt")
        params = mapping(told.get("sampling_params") or {}, "sampling_params")
        stop, stop_ids = _stop(params.get("stop"), end_ids)

        def given(name: str, default: Any, of: Mapping[str, Any] = told) -> Any:
            """The value, or the default where it is null or not there."""
            return default if of.get(name) is None else of[name]

        max_tokens, last = params.get("max_tokens"), told.get("prompt_logprobs_last_n")
        named = (
            None
            if told.get("target_prompt_logprobs") is None
            else _named(told["target_prompt_logprobs"], prompt.size - 1)
        )
        top_k = integer(given("top_k", -1, params), "top_k")
        request = Request(
            tuple(prompt.tolist()),
            n=integer(given("num_samples", 1), "num_samples", 1, MAX_SAMPLES),
            max_tokens=(
                max(1, context - prompt.size)
                if max_tokens is None
                else integer(max_tokens, "max_tokens")
            ),
            temperature=number(given("temperature", 1.0, params), "temperature"),
            top_k=0 if top_k == -1 else top_k,
            top_p=number(given("top_p", 1.0, params), "top_p"),
            top_logprobs=integer(
                given("topk_sample_logprobs", 0), "topk_sample_logprobs", 0, ALTERNATIVES
            ),
            prompt_logprobs=boolean(given("prompt_logprobs", False), "prompt_logprobs"),
            top_prompt_logprobs=integer(
                given("topk_prompt_logprobs", 0), "topk_prompt_logprobs", 0, ALTERNATIVES
            ),
            target_prompt_logprobs=None if named is None else _places(named),
            prompt_alternatives=integer(
                given("prompt_alt_tokens_k", 0), "prompt_alt_tokens_k", 0, ALTERNATIVES
            ),
            prompt_logprobs_last_n=(
                None if last is None else integer(last, "prompt_logprobs_last_n")
            ),
            seed=integer(given("seed", seed, params), "seed", -(2**63), 2**64 - 1) % 2**32,
            stop_ids=stop_ids,
            stop=stop,
        )
        if request.prompt_alternatives and request.temperature != 1:
            raise UserError(
                f"temperature is {request.temperature}; prompt_alt_tokens_k draws at 1 alone: ask"
                " for them apart"
            )
        return Asked(request, named)


def read(body: bytes) -> Message:
    """A request as its place.

    Args:
        body: decompressed JSON. Fields that are not known are passed over: SDKs grow.

    Raises:
        UserError: it is none, or names nothing to sample.
    """
    return Message(json_object(body))


def _stop(told: Any, end_ids: Sequence[int]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Strings and ids that end a completion."""
    if told is None:
        return (), tuple(end_ids)
    if isinstance(told, str):
        return (text(told, "stop"),), ()
    if all(isinstance(one, str) for one in sequence(told, "stop")):
        return tuple(text(one, "stop") for one in told), ()
    return (), tuple(integer(one, "stop", 0) for one in told)


def _named(told: Any, places: int) -> Named:
    tensor = tensors.from_json(told, "target_prompt_logprobs")
    if len(tensor.shape) != 2 or tensor.shape[0] != places:
        raise UserError(
            f"target_prompt_logprobs has shape {list(tensor.shape)}; expected [{places}, K]: all of"
            " the prompt but the first"
        )
    ids = tensor.integers()
    cells = np.arange(ids.size) if tensor.cells is None else tensor.cells
    return Named(tensor, ids != -1, cells // max(tensor.shape[1], 1))


def _places(named: Named) -> tuple[tuple[int, ...], ...]:
    """The ids that are wanted at each place."""
    ids, rows = named.tensor.integers()[named.wanted], named.rows[named.wanted]
    ends = np.searchsorted(rows, np.arange(named.tensor.shape[0] + 1))
    return tuple(tuple(ids[a:b].tolist()) for a, b in itertools.pairwise(ends))


def encode(completions: Sequence[Completion], asked: Asked, protobuf: bool) -> bytes:
    """The answer; ``logprobs`` are those of the distribution that was drawn from, after
    temperature, top-k and top-p.

    Places of a prompt that were not scored have log-probability NaN (null in JSON), and nothing
    among their likeliest and drawn.

    Args:
        asked: what the completions are of.
        protobuf: else the JSON of old SDKs; what these did not know is there if it was asked for.

    Raises:
        UserError: a completion was cancelled.
    """
    if cancelled := [one for one in completions if one.finish not in ("stop", "length")]:
        raise UserError(f"a sample ended as {cancelled[0].finish!r} before it was done: ask again")
    return (_proto if protobuf else _json)(completions, asked)


def _scored(first: Completion) -> np.ndarray | None:
    """``[P]`` float32 log-probabilities of the prompt."""
    return (
        None
        if first.prompt_logprobs is None
        else np.array([_NAN, *first.prompt_logprobs], np.float32)
    )


def _matrix(places: Sequence[Sequence[tuple[int, float]]], k: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids int32 and log-probabilities float32, both ``[places, k]``; cells behind the last of a
    place hold nothing.
    """
    ids, logprobs = (
        np.full((len(places), k), NO_TOKEN, np.int32),
        np.full((len(places), k), NO_LOGPROB, np.float32),
    )
    for i, pairs in enumerate(places):
        for j, (id, logprob) in enumerate(pairs):
            ids[i, j], logprobs[i, j] = id, logprob
    return ids, logprobs


def _values(named: Named, first: Completion) -> np.ndarray:
    """Log-probabilities of the named cells, float32, as the request lists them; 0 where it named
    nothing.
    """
    told, counts = (
        first.target_prompt_logprobs,
        np.bincount(named.rows[named.wanted], minlength=named.tensor.shape[0]),
    )
    assert told is not None, "the completion is not of this request"
    out = np.zeros(named.wanted.size, np.float32)
    out[named.wanted] = [value for place, n in zip(told, counts) for value in place or [_NAN] * n]
    return out


def _proto(completions: Sequence[Completion], asked: Asked) -> bytes:
    first, request = completions[0], asked.request
    message = messages.SampleResponse(prompt_cache_hit_tokens=first.reused)
    for one in completions:
        sequence = message.sequences.add(
            stop_reason=messages.STOP if one.finish == "stop" else messages.LENGTH
        )
        sequence.tokens, sequence.logprobs = (
            np.array(one.tokens, "<i4").tobytes(),
            np.array(one.drawn_logprobs, "<f4").tobytes(),
        )
        if one.top_logprobs is not None:
            _write_top(sequence.topk_sampled_logprobs, one.top_logprobs, request.top_logprobs)
    if (scored := _scored(first)) is not None:
        message.prompt_logprobs = scored.astype("<f4").tobytes()
    if first.top_prompt_logprobs is not None:
        _write_top(
            message.topk_prompt_logprobs,
            [[], *first.top_prompt_logprobs],
            request.top_prompt_logprobs,
        )
    if asked.named is not None:
        _write_named(message.target_prompt_logprobs, asked.named, first)
    if first.prompt_alternatives is not None:
        both = message.prompt_alt_tokens.tokens, message.prompt_alt_tokens.logprobs
        for tensor, array in zip(
            both, _matrix(first.prompt_alternatives, request.prompt_alternatives)
        ):
            tensor.dtype = messages.INT32 if array.dtype.kind == "i" else messages.FLOAT32
            tensor.dense = array.astype(array.dtype.newbyteorder("<")).tobytes()
            tensor.shape.extend(array.shape)
    return message.SerializeToString()


def _write_top(message: Any, places: Sequence[Sequence[tuple[int, float]]], k: int) -> None:
    ids, logprobs = _matrix(places, k)
    message.token_ids, message.logprobs = (
        ids.astype("<i4").tobytes(),
        logprobs.astype("<f4").tobytes(),
    )
    message.length, message.k = ids.shape


def _write_named(message: Any, named: Named, first: Completion) -> None:
    values, tensor = _values(named, first).astype("<f4").tobytes(), named.tensor
    message.dtype = messages.FLOAT32
    message.shape.extend(tensor.shape)
    if tensor.rows is None or tensor.columns is None:
        message.dense = values
        return
    message.sparse_csr.values = values
    message.sparse_csr.crow_indices = tensor.rows.astype("<i8").tobytes()
    message.sparse_csr.col_indices = tensor.columns.astype("<i8").tobytes()


def _json(completions: Sequence[Completion], asked: Asked) -> bytes:
    first, request = completions[0], asked.request
    sequences = []
    for one in completions:
        logprobs = np.array(one.drawn_logprobs, np.float32).tolist()
        told = {"stop_reason": one.finish, "tokens": one.tokens, "logprobs": logprobs}
        sequences.append(
            told if one.top_logprobs is None else told | {"topk_logprobs": one.top_logprobs}
        )
    scored, top = _scored(first), first.top_prompt_logprobs
    answer: dict[str, Any] = {
        "type": "sample",
        "sequences": sequences,
        "prompt_logprobs": (
            None if scored is None else [None if math.isnan(p) else p for p in scored.tolist()]
        ),
        "topk_prompt_logprobs": None if top is None else [None, *(place or None for place in top)],
    }
    if asked.named is not None:
        tensor = asked.named.tensor
        told = tensors.to_json(_values(asked.named, first)) | {"shape": list(tensor.shape)}
        if tensor.rows is not None and tensor.columns is not None:
            told |= {
                "sparse_crow_indices": tensor.rows.tolist(),
                "sparse_col_indices": tensor.columns.tolist(),
            }
        answer["target_prompt_logprobs"] = told
    if first.prompt_alternatives is not None:
        ids, logprobs = _matrix(first.prompt_alternatives, request.prompt_alternatives)
        answer["prompt_alt_tokens"] = {
            "tokens": tensors.to_json(ids),
            "logprobs": tensors.to_json(logprobs),
        }
    return json.dumps(answer, separators=(",", ":")).encode()
