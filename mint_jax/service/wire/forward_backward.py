"""Forward and backward requests on the wire: bytes to calls, results to bytes.

A request is read in two steps: ``read`` finds its place (model and number), ``Message.batch`` its
content. A request with bad content keeps its place, and its future fails.

Axes: N positions of a datum, K targets of a position as sent, k as computed.
"""

import itertools
import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError

from mint_jax.errors import UserError
from mint_jax.service.bodies import is_protobuf
from mint_jax.service.tinker_types import RequestPlace
from mint_jax.service.training_calls import ForwardBackward, Trained
from mint_jax.service.validation import Body, Text, check, parse, shown
from mint_jax.service.wire import losses, messages, tensors
from mint_jax.service.wire.tensors import MAX_CELLS, ModelInput, Tensor, TensorBody, proto_tokens
from mint_jax.train.blocks import Datum


class Span(NamedTuple):
    """A run of a datum's positions that come from a sequence sampled here.

    Attributes:
        kind: ``prompt`` or ``sampled``: which part of the sequence.
        offset: position in that part where the run begins.
    """

    kind: str
    sequence: str
    offset: int
    length: int


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


class Message:
    """A request whose place is known.

    Attributes:
        model_id: the model.
        seq_id: the request's place among the model's requests, from 1.
    """

    def __init__(self, place: RequestPlace, body: Any):
        self.model_id, self.seq_id = place.model_id, place.seq_id
        self._body = body  # JSON, or a protobuf message

    def batch(self) -> tuple[ForwardBackward, list[tuple[Span, ...]]]:
        """Returns the call, and for each datum the runs that tile its model input, if given.
        Targets are as computed; packed ones have ``columns``, see ``tensors.packed``.

        Raises:
            UserError: it cannot be computed. ``train.blocks.check`` checks lengths against the
                training steps and ids against the vocabulary.
        """
        read = self._of_json if isinstance(self._body, bytes) else self._of_proto
        loss, config, data, backward = read()
        coefs = losses.coefs(loss, config)
        rows, columns, sources, cells = [], [], [], 0
        for i, (tokens, inputs, spans) in enumerate(data):
            sent = _sent(f"datum {i}", loss, tokens, inputs)
            targets = sent["target_tokens"]
            cells += 0 if targets.cells is None else math.prod(targets.shape)
            if cells > MAX_CELLS:
                raise UserError(
                    f"the sparse target_tokens of data 0 to {i} have {cells} cells; expected"
                    f" {MAX_CELLS} at most: send fewer"
                )
            datum, column = _datum(loss, tokens, sent)
            rows.append(datum)
            columns.append(column)
            sources.append(spans)
        packed = columns if any(column is not None for column in columns) else None
        return ForwardBackward(rows, coefs, backward, packed), sources

    def _of_proto(self) -> tuple[str, Mapping[str, Any], Any, bool]:
        body = self._body
        config = {
            key: getattr(value, value.WhichOneof("value") or "", None)
            for key, value in body.loss_fn_config_v2.items()
        }

        def data():
            for i, datum in enumerate(body.data):
                tokens = proto_tokens(datum.model_input, f"datum {i}: model_input")
                inputs = {k: (tensors.from_proto, v) for k, v in datum.loss_fn_inputs.items()}
                yield tokens, inputs, _spans(datum.model_input_spans, tokens.size, f"datum {i}")

        return body.loss_fn, config or dict(body.loss_fn_config), data(), not body.forward_only

    def _of_json(self) -> tuple[str, Mapping[str, Any], Any, bool]:
        body = parse(ForwardBackwardBody, self._body)
        backward = body.forward_backward_input is not None
        given = body.forward_backward_input or body.forward_input
        if given is None or (backward and body.forward_input is not None):
            raise UserError(
                "expected one of forward_backward_input and forward_input in the request: send it"
            )

        def data():
            for i, datum in enumerate(given.data):
                tokens = datum.model_input.tokens(f"datum {i}: model_input")
                inputs = {k: (tensors.from_json, v) for k, v in datum.loss_fn_inputs.items()}
                yield tokens, inputs, ()

        return given.loss_fn, given.loss_fn_config or {}, data(), backward


def read(body: bytes, content_type: str) -> Message:
    """Returns a request, protobuf or JSON, with its place.

    Raises:
        UserError: the bytes are malformed, or name no place.
    """
    if not is_protobuf(content_type):
        if content_type.partition(";")[0].strip().lower() != "application/json":
            raise UserError(
                f"the content type is {shown(content_type)}; send application/json or"
                " application/x-protobuf"
            )
        return Message(parse(RequestPlace, body), body)
    message = messages.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as reason:
        raise UserError(
            f"the body is no ForwardBackwardRequest ({shown(str(reason))}): send the message whole"
        ) from None
    place = {"model_id": message.model_id, "seq_id": message.seq_id}
    return Message(check(RequestPlace, place), message)


def _spans(sent: Any, length: int, what: str) -> tuple[Span, ...]:
    spans = []
    for i, one in enumerate(sent):
        name = f"{what}: model_input_spans[{i}]"
        if (arm := one.WhichOneof("span")) is None:
            raise UserError(f"{name} has no kind; expected prompt_tokens or sampled_tokens")
        run = getattr(one, arm)
        if not run.sequence_id:
            raise UserError(f"{name}.sequence_id is ''; expected the id of a sampled sequence")
        if run.offset < 0 or run.length < 0:
            raise UserError(
                f"{name} has offset {run.offset} and length {run.length}; expected neither below 0"
            )
        spans.append(Span(arm.removesuffix("_tokens"), run.sequence_id, run.offset, run.length))
    if spans and (total := sum(span.length for span in spans)) != length:
        raise UserError(
            f"{what}: model_input_spans cover {total} positions; the datum has {length}: let the"
            " runs tile it"
        )
    return tuple(spans)


def _sent(what: str, loss: str, tokens: np.ndarray, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns a datum's tensors that its loss reads, all of the shape of ``target_tokens``.

    Args:
        inputs: a tensor's reader and its argument, by name. Tensors of other losses are not read.
    """
    if unknown := [name for name in inputs if name not in losses.INPUTS]:
        raise UserError(
            f"{what}: loss_fn_inputs has {shown(unknown[0])}; {loss} reads"
            f" {', '.join(losses.INPUTS)}: leave it out"
        )
    needs = ("target_tokens", *losses.LOSSES[loss].needs)
    if missing := [name for name in needs if name not in inputs]:
        raise UserError(
            f"{what}: loss_fn_inputs has no {missing[0]}; {loss} needs {', '.join(needs)}"
        )
    if loss == "gspo" and "weights" in inputs:
        raise UserError(
            f"{what}: loss_fn_inputs has weights; gspo takes none: scale the advantages"
        )
    names = [name for name in losses.INPUTS if name in (*needs, "weights") and name in inputs]
    sent: dict[str, Tensor] = {
        name: inputs[name][0](inputs[name][1], f"{what}: {name}") for name in names
    }
    targets = sent["target_tokens"]
    soft = loss == "cross_entropy" and len(targets.shape) == 2
    if targets.shape[0] != tokens.size or len(targets.shape) != 1 + soft:
        expected = f"[{tokens.size}, K]" if soft else f"[{tokens.size}]"
        raise UserError(
            f"{what}: target_tokens has shape {list(targets.shape)}; model_input has {tokens.size}"
            f" tokens, {loss} takes {expected}"
        )
    for tensor in sent.values():
        if tensor.shape != targets.shape:
            raise UserError(
                f"{tensor.what} has shape {list(tensor.shape)}; target_tokens has"
                f" {list(targets.shape)}, the shape of all"
            )
    return sent


def _datum(
    loss: str, tokens: np.ndarray, sent: Mapping[str, Tensor]
) -> tuple[Datum, np.ndarray | None]:
    """Returns the datum of ``_sent``'s tensors, and its columns if they were packed."""
    targets = sent["target_tokens"]
    if len(targets.shape) == 2:
        weights = sent["weights"]
        if targets.cells is not None and weights.cells is not None:
            ids, floats, columns = tensors.packed(targets, weights)
            return Datum(tokens, ids, floats), columns
        ids, floats = targets.dense(targets.integers()), weights.dense(weights.floats())
        return Datum(tokens, ids, floats), None
    floats = {name: tensor.floats() for name, tensor in sent.items() if name != "target_tokens"}
    weights = floats.get("weights", np.ones(tokens.size, np.float32))
    in_ratio = None
    # the mask selects the positions of the ratio; positions outside it keep their advantages
    if loss == "gspo":
        in_ratio = (floats["sequence_ratio_mask"] != 0).astype(np.float32)
        weights = ((in_ratio != 0) | (floats["advantages"] != 0)).astype(np.float32)
    sampled = () if loss == "cross_entropy" else (floats["advantages"], floats["logprobs"])
    return Datum(tokens, targets.integers(), weights, *sampled, in_ratio=in_ratio), None


def encode(trained: Trained, protobuf: bool) -> bytes:
    """Returns the answer: ``logprobs`` of each datum and, for cross-entropy, ``elementwise_loss``.

    Args:
        trained: shaped as the targets were sent.
        protobuf: else JSON with ``NaN`` and ``Infinity``, which the JSON reader of old SDKs takes.
    """
    columns = {"logprobs": trained.logprobs}
    if trained.elementwise is not None:
        columns["elementwise_loss"] = trained.elementwise
    rows = [dict(zip(columns, row)) for row in zip(*columns.values(), strict=True)]
    answer: dict[str, Any] = {"loss_fn_output_type": "ArrayRecord"}
    answer["metrics"] = {"loss:sum": float(trained.loss)}
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
