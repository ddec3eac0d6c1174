"""Forward and backward requests on the wire: bytes to calls, results to bytes.

A request is read in two steps: ``read`` finds its place (model and number), ``Message.batch`` its
content. A request with bad content keeps its place, and its future fails.

Axes: N positions of a datum, K targets of a position as sent, k as computed.
"""

import dataclasses
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError

from mint_jax.errors import UserError, choice
from mint_jax.service import custom_loss
from mint_jax.service.bodies import NO_MESSAGE, is_protobuf
from mint_jax.service.custom_loss import Loss
from mint_jax.service.tinker_types import FLOAT32_MAX, RequestPlace
from mint_jax.service.training_calls import ForwardBackward, Trained
from mint_jax.service.validation import Body, Text, check, parse, shown
from mint_jax.service.wire import messages, tensors
from mint_jax.service.wire.tensors import MAX_CELLS, ModelInput, Tensor, TensorBody
from mint_jax.train.blocks import Datum
from mint_jax.train.config import KINDS, KL_KINDS
from mint_jax.train.losses import NO_LOSS, LossCoefs

CLIP, SAMPLED = ("clip_low_threshold", "clip_high_threshold"), ("logprobs", "advantages")
OPTIONAL = {"stable_reinforce": ("weights", "logprobs")}  # of other losses: weights
INPUTS = ("target_tokens", "weights", *SAMPLED, "sequence_ratio_mask")
# With lp = log p(target), q = logprobs, A = advantages, r = exp(lp - q), sg = no gradient, w =
# weights (1 unless sent), each summed over every position:
#     cross_entropy          -w lp
#     importance_sampling    -w r A
#     ppo                    -w min(r A, clip(r, low, high) A)
#     cispo                  -w sg(clip(r, low, high)) lp A
#     dro                    -w (lp A - beta/2 (lp - q)^2)
#     gspo                   as ppo; r = exp(mean of lp - q over sequence_ratio_mask)
#     stable_reinforce       -w sg(min(r, 1) (A - kl_coeff (lp - q))) lp, over sampled tokens alone
# The last one's authors publish no formula. Ours is REINFORCE with truncated importance weights
# (arXiv 1802.01561, section 4.1) and the penalty of KL(policy || sampler) in the advantage.
# `blocks.fill` passes the sampler's log-probabilities as the old ones: `train.losses`' k is 1.
# Loss -> inputs besides target_tokens, and options with their defaults; None: required.
LOSSES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "cross_entropy": (("weights",), {}),
    "importance_sampling": (SAMPLED, {}),
    "ppo": (SAMPLED, dict(zip(CLIP, (0.8, 1.2)))),
    "cispo": (SAMPLED, dict(zip(CLIP, (0.0, 4.0)))),
    # the contract has no default, and peers differ by a hundred
    "dro": (SAMPLED, {"beta": None}),
    "gspo": ((*SAMPLED, "sequence_ratio_mask"), dict(zip(CLIP, (0.8, 1.2)))),
    "stable_reinforce": (("advantages",), {"kl_coeff": 0.0}),
}


class Span(NamedTuple):
    """A run of a datum's positions that come from a sequence sampled here: from its ``prompt`` or
    its ``sampled`` part (the kind), where the run begins at ``offset``.
    """

    kind: str
    sequence: str
    offset: int
    length: int


class Spans(NamedTuple):
    """Runs that tile a datum's model input, and those that tile its targets; empty: not given."""

    model_input_spans: tuple[Span, ...]
    loss_fn_input_spans: tuple[Span, ...]


class DatumBody(Body):
    model_input: ModelInput
    loss_fn_inputs: dict[str, TensorBody]


class BatchBody(Body):
    data: list[DatumBody]
    loss_fn: Text
    loss_fn_config: dict[str, Any] | None = None


class ForwardBackwardBody(RequestPlace):
    forward_backward_input: BatchBody | None = None
    forward_input: BatchBody | None = None


class Message(NamedTuple):
    """A request whose place is known; its body is JSON or a protobuf message."""

    model_id: str
    seq_id: int
    body: Any

    def batch(self) -> tuple[ForwardBackward, list[Spans]]:
        """Returns the call, and for each datum the runs that tile it, if given.

        Targets are as computed; packed ones have ``columns``, see ``tensors.packed``. Without sent
        ``logprobs`` a datum of ``stable_reinforce`` has no ``old_logp``. Raises ``UserError``;
        ``train.blocks.check`` checks lengths against the training steps and ids against the
        vocabulary.
        """
        batch, config, backward = _content(self.body)
        custom = _custom(config) if batch.loss_fn == "custom" else None
        loss = NO_LOSS if custom else loss_of(batch.loss_fn, config)
        cells, rows, columns, sources, extra = 0, [], [], [], []
        for i, sent in enumerate(batch.data):
            what = f"datum {i}"
            tokens = tensors.tokens_of(sent.model_input, f"{what}: model_input")
            if custom:
                inputs = _custom_inputs(what, custom, tokens.size, sent.loss_fn_inputs)
            else:
                inputs = _inputs(what, batch.loss_fn, tokens.size, sent.loss_fn_inputs)
            sparse = (math.prod(one.shape) for one in inputs.values() if one.csr is not None)
            cells += max(sparse, default=0)
            if cells > MAX_CELLS:
                found = f"the sparse target_tokens of data 0 to {i} have {cells} cells"
                raise UserError(f"{found}; expected {MAX_CELLS} at most: send fewer")
            if custom:
                own = {name: one.numbers() for name, one in inputs.items()}
                targets = own.pop("logprobs")
                datum, column = Datum(tokens, targets, np.ones(targets.shape, np.float32)), None
                extra.append(own)
            else:
                datum, column = _datum(batch.loss_fn, tokens, inputs)
            spans = Spans(*(_spans(sent, name, tokens.size, what) for name in Spans._fields))
            if batch.loss_fn == "stable_reinforce":
                datum = _of_sampled(datum, spans.loss_fn_input_spans, what)
            rows.append(datum)
            columns.append(column)
            sources.append(spans)
        packed = columns if any(column is not None for column in columns) else None
        id = config["loss_id"] if custom else None
        return ForwardBackward(rows, loss, backward, packed, id, extra), sources


def read(body: bytes, content_type: str) -> Message:
    """Returns a request, protobuf or JSON, with its place. Raises ``UserError`` if it has none."""
    if is_protobuf(content_type):
        message = messages.ForwardBackwardRequest()
        try:
            message.ParseFromString(body)
        except DecodeError as reason:
            text = f"{NO_MESSAGE} ({shown(str(reason))}): send the message whole"
            raise UserError(text) from None
        place = check(RequestPlace, {"model_id": message.model_id, "seq_id": message.seq_id})
        return Message(place.model_id, place.seq_id, message)
    if content_type.partition(";")[0].strip().lower() != "application/json":
        expected = "application/json or application/x-protobuf"
        raise UserError(f"the content type is {shown(content_type)}; send {expected}")
    place = parse(RequestPlace, body)
    return Message(place.model_id, place.seq_id, body)


def _content(body: Any) -> tuple[Any, Mapping[str, Any], bool]:
    """Returns data and loss, the loss's options, and whether gradients are requested."""
    if isinstance(body, bytes):
        read = parse(ForwardBackwardBody, body)
        sent = [one for one in (read.forward_backward_input, read.forward_input) if one is not None]
        if len(sent) != 1:
            raise UserError("the request has not one of forward_backward_input and forward_input")
        return sent[0], sent[0].loss_fn_config or {}, read.forward_input is None
    config = {
        key: getattr(value, value.WhichOneof("value") or "", None)
        for key, value in body.loss_fn_config_v2.items()
    }
    return body, config or dict(body.loss_fn_config), not body.forward_only


def loss_of(name: str, config: Mapping[str, Any]) -> LossCoefs:
    """Returns a loss and its options as numbers; thresholds are ratios, not distances from 1.
    Raises ``UserError`` for an unknown loss or option, or a bad value.
    """
    if name not in LOSSES:
        raise choice("loss_fn", name[:80], (*LOSSES, "custom"))
    options = LOSSES[name][1]
    numbers = options | dict(config)
    for key, value in numbers.items():
        if key not in options:
            takes = ", ".join(options) or "no options"
            raise UserError(f"loss_fn_config has {shown(key)}; {name} takes {takes}")
        if value is None and key not in config:
            raise UserError(f"loss_fn_config has no {key}; {name} needs it: give a number")
        if (
            not isinstance(value, int | float)
            or isinstance(value, bool)
            or not abs(value) <= FLOAT32_MAX
        ):
            raise UserError(f"loss_fn_config.{key} is {shown(value)}; expected a finite number")
    low, high = (float(numbers.get(key, default)) for key, default in zip(CLIP, (0, math.inf)))
    beta, kl = (float(numbers.get(key, 0)) for key in ("beta", "kl_coeff"))
    if not 0 <= low <= high:
        found = f"clip_low_threshold is {low} and clip_high_threshold {high}"
        raise UserError(f"{found}; expected ratios, 0 <= low <= high, 0.8 and 1.2 say")
    if min(beta, kl) < 0:
        raise UserError(f"beta or kl_coeff is {min(beta, kl)}; expected at least 0")
    if name == "stable_reinforce":
        truncated = NO_LOSS._replace(kind=KINDS.index("cispo"), ratio_high=1.0)
        return truncated._replace(kl_kind=KL_KINDS.index("k1"), kl=kl)
    return NO_LOSS._replace(kind=KINDS.index(name), ratio_low=low, ratio_high=high, beta=beta)


def _spans(sent: Any, field: str, length: int, what: str) -> tuple[Span, ...]:
    spans = []
    for i, one in enumerate(getattr(sent, field, ())):
        name = f"{what}: {field}[{i}]"
        if (arm := one.WhichOneof("span")) is None:
            raise UserError(f"{name} has no kind; expected prompt_tokens or sampled_tokens")
        run = getattr(one, arm)
        if not run.sequence_id or run.offset < 0 or run.length < 0:
            found = (
                f"sequence_id {shown(run.sequence_id)}, offset {run.offset}, length {run.length}"
            )
            raise UserError(f"{name} has {found}; expected an id, and no number below 0")
        spans.append(Span(arm.removesuffix("_tokens"), run.sequence_id, run.offset, run.length))
    if spans and (total := sum(span.length for span in spans)) != length:
        found = f"{what}: {field} cover {total} positions; the datum has {length}"
        raise UserError(f"{found}: let the runs tile it")
    return tuple(spans)


def _of_sampled(datum: Datum, spans: Sequence[Span], what: str) -> Datum:
    """Returns a datum of which only sampled targets count, with the sampler as its reference."""
    if not spans:
        remedy = "name the sequences that it was sampled in (Datum.with_provenance)"
        raise UserError(f"{what} has no loss_fn_input_spans; stable_reinforce needs them: {remedy}")
    sampled = np.repeat([one.kind == "sampled" for one in spans], [one.length for one in spans])
    if (elsewhere := np.flatnonzero((datum.advantages != 0) & ~sampled)).size:
        found = f"{what} has an advantage at {elsewhere[0]}, which loss_fn_input_spans say"
        raise UserError(f"{found} was not sampled; expected 0 there")
    weights = datum.weights * sampled
    return dataclasses.replace(datum, weights=weights, ref_logp=datum.old_logp)


def _inputs(what: str, loss: str, length: int, sent: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns a datum's tensors that its loss reads, all of the shape of ``target_tokens``."""
    needs = ("target_tokens", *LOSSES[loss][0])
    takes = [name for name in INPUTS if (loss, name) != ("gspo", "weights")]
    found = f"{what}: loss_fn_inputs has"
    if unknown := [name for name in sent if name not in takes]:
        raise UserError(f"{found} {shown(unknown[0])}; {loss} takes only {', '.join(takes)}")
    if missing := [name for name in needs if name not in sent]:
        raise UserError(f"{found} no {missing[0]}; {loss} needs {', '.join(needs)}")
    read = (name for name in takes if name in (*needs, *OPTIONAL.get(loss, ("weights",))))
    inputs = {n: tensors.tensor_of(sent[n], f"{what}: {n}") for n in read if n in sent}
    targets = inputs["target_tokens"]
    soft = loss == "cross_entropy" and len(targets.shape) == 2
    shape = (length, *targets.shape[1:]) if soft else (length,)
    for tensor in inputs.values():
        if tensor.shape != shape:
            expected = f"{list(shape)}, a row for each token of model_input, all of one shape"
            raise UserError(f"{tensor.what} has shape {list(tensor.shape)}; expected {expected}")
    return inputs


def _custom(config: Mapping[str, Any]) -> Loss:
    if not isinstance(id := config.get("loss_id"), str) or len(config) > 1:
        raise UserError("custom takes the loss_id of create_custom_loss, and no other option")
    return custom_loss.of_id(id)


def _custom_inputs(
    what: str, loss: Loss, length: int, sent: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Returns a datum's tensors that a custom loss reads; ``logprobs`` are its targets."""
    inputs = {}
    for name, rank in ((one.name, one.rank) for one in loss.inputs):
        key = "target_tokens" if name == "logprobs" else name
        if key not in sent:
            raise UserError(f"{what}: loss_fn_inputs has no {key}; {loss.name} needs it")
        one = tensors.tensor_of(sent[key], f"{what}: {key}")
        fits = one.shape[0] == length and len(one.shape) == rank if rank else one.shape == (1,)
        if not fits:
            expected = f"rank {rank}, a row for each of {length} tokens" if rank else "one number"
            raise UserError(f"{one.what} has shape {list(one.shape)}; {loss.name} needs {expected}")
        if name == "logprobs":
            one.integers()
        inputs[name] = one if rank else dataclasses.replace(one, shape=())
    return inputs


def _datum(
    loss: str, tokens: np.ndarray, inputs: Mapping[str, Tensor]
) -> tuple[Datum, np.ndarray | None]:
    """Returns the datum of ``_inputs``' tensors, and its columns if they were packed."""
    targets = inputs["target_tokens"]
    ids = targets.dense(targets.integers())
    others = (name for name in inputs if name != "target_tokens")
    floats = {name: inputs[name].dense(inputs[name].floats()) for name in others}
    weights, in_ratio = floats.get("weights", np.ones(ids.shape, np.float32)), None
    if loss == "cross_entropy":
        columns = None
        if ids.ndim == 2:
            ids, weights, columns = tensors.packed(ids, weights)
        return Datum(tokens, ids, weights), columns
    # the mask selects the positions of the ratio; positions outside it keep their advantages
    if loss == "gspo":
        in_ratio = (floats["sequence_ratio_mask"] != 0).astype(np.float32)
        weights = ((in_ratio != 0) | (floats["advantages"] != 0)).astype(np.float32)
    sampled = floats["advantages"], floats.get("logprobs")
    return Datum(tokens, ids, weights, *sampled, in_ratio=in_ratio), None


def encode(trained: Trained, protobuf: bool) -> bytes:
    """Returns the answer: ``logprobs`` of each datum and, for cross-entropy, ``elementwise_loss``,
    shaped as the targets were sent. JSON has ``NaN`` and ``Infinity``, which old SDKs read.
    """
    columns = {"logprobs": trained.logprobs}
    if trained.elementwise is not None:
        columns["elementwise_loss"] = trained.elementwise
    rows = [dict(zip(columns, row)) for row in zip(*columns.values(), strict=True)]
    answer: dict[str, Any] = {"loss_fn_output_type": "ArrayRecord"}
    answer["metrics"] = {"loss:sum": float(trained.loss), **trained.metrics}
    if not protobuf:
        outputs = [{name: tensors.to_json(array) for name, array in row.items()} for row in rows]
        return json.dumps(answer | {"loss_fn_outputs": outputs}, separators=(",", ":")).encode()
    message = messages.ForwardBackwardOutput(**answer)
    # one record has one trailing shape
    for trailing, run in itertools.groupby(rows, lambda row: row["logprobs"].shape[1:]):
        record, together = message.loss_fn_outputs.add(type_tag="ArrayRecord"), list(run)
        record.num_datums = len(together)
        for name in together[0]:
            arrays = [row[name].astype("<f4") for row in together]
            field = record.fields[name]
            offsets = np.cumsum([0, *(array.nbytes for array in arrays)])
            field.data = b"".join(array.tobytes() for array in arrays)
            field.offsets, field.dtype = offsets.astype("<i8").tobytes(), messages.FLOAT32
            field.trailing_shape.extend(trailing)
    return message.SerializeToString()
