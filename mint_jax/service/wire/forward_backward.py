"""Forward and backward on the wire: a request's bytes as a call, and what it gave as bytes.

A request is taken in two steps. ``read`` tells which place of which model it has, ``Message.asked``
what is wanted there: one with bad data has a place all the same, and fails there.

Axes: N positions of a datum, K targets of a position as they were sent, k as they are computed.
"""

import itertools
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError

from mint_jax.errors import UserError
from mint_jax.service.calls import ForwardBackward
from mint_jax.service.training import Trained
from mint_jax.service.wire import losses, messages, tensors
from mint_jax.service.wire.reading import (
    integer,
    is_protobuf,
    json_object,
    json_tokens,
    mapping,
    need_json,
    proto_tokens,
    sequence,
    shown,
    text,
)
from mint_jax.service.wire.tensors import MAX_CELLS, Tensor
from mint_jax.train.blocks import Datum


class Span(NamedTuple):
    """A run of a datum's positions that a sequence sampled here has too.

    Attributes:
        kind: ``prompt`` or ``sampled``: which part of the sequence.
        sequence: its id.
        offset: where in that part the run begins.
        length: positions of the run.
    """

    kind: str
    sequence: str
    offset: int
    length: int


class Spans(NamedTuple):
    """Where a datum's positions came from, run behind run over all of them; empty where nothing is
    told.
    """

    model_input: tuple[Span, ...] = ()
    loss_fn_inputs: tuple[Span, ...] = ()


class Asked(NamedTuple):
    """A request.

    Attributes:
        call: with its data's targets as they are computed; those that were packed have ``columns``,
            see ``tensors.packed``.
        spans: of each datum.
    """

    call: ForwardBackward
    spans: list[Spans]


class Message:
    """A request whose place is known.

    Attributes:
        model_id: whose.
        seq_id: its place among the model's requests, from 1.
    """

    def __init__(self, body: Any):
        self._proto = not isinstance(body, Mapping)
        told = {"model_id": body.model_id, "seq_id": body.seq_id} if self._proto else body
        self.model_id = text(told.get("model_id"), "model_id")
        self.seq_id = integer(told.get("seq_id"), "seq_id", 1)
        self._body = body

    def asked(self) -> Asked:
        """What is wanted.

        Raises:
            UserError: it is not computable; lengths of data against the steps there are and ids
                against the vocabulary are left to ``train.blocks.check``.
        """
        loss, config, data, backward = self._of_proto() if self._proto else self._of_json()
        coefs = losses.coefs(loss, config)
        rows, columns, sources, cells = [], [], [], 0
        for i, (tokens, inputs, spans) in enumerate(data):
            sent = _sent(f"datum {i}", loss, tokens, inputs)
            cells += (
                0
                if sent["target_tokens"].cells is None
                else tensors.volume(sent["target_tokens"].shape)
            )
            if cells > MAX_CELLS:
                raise UserError(
                    f"the sparse target_tokens of data 0 to {i} have {cells} cells; expected"
                    f" {MAX_CELLS} at most: send fewer"
                )
            datum, column = _datum(f"datum {i}", loss, tokens, sent)
            rows.append(datum)
            columns.append(column)
            sources.append(spans)
        packed = columns if any(column is not None for column in columns) else None
        return Asked(ForwardBackward(rows, coefs, backward, packed), sources)

    def _of_proto(self) -> tuple[str, Mapping[str, Any], Any, bool]:
        body = self._body
        arms = {
            key: (value, value.WhichOneof("value")) for key, value in body.loss_fn_config_v2.items()
        }
        config = {
            key: None if arm is None else getattr(value, arm) for key, (value, arm) in arms.items()
        }

        def data():
            for i, datum in enumerate(body.data):
                what = f"datum {i}"
                tokens = proto_tokens(datum.model_input, f"{what}: model_input")
                spans = Spans(
                    *(
                        _spans(
                            getattr(datum, f"{name}_spans"), tokens.size, f"{what}: {name}_spans"
                        )
                        for name in _SPANNED
                    )
                )
                yield (
                    tokens,
                    {k: (tensors.from_proto, v) for k, v in datum.loss_fn_inputs.items()},
                    spans,
                )

        return body.loss_fn, config or dict(body.loss_fn_config), data(), not body.forward_only

    def _of_json(self) -> tuple[str, Mapping[str, Any], Any, bool]:
        given = [
            name
            for name in ("forward_backward_input", "forward_input")
            if self._body.get(name) is not None
        ]
        if len(given) != 1:
            raise UserError(
                f"the request has {' and '.join(given) or 'no input'}; expected"
                " forward_backward_input or forward_input"
            )
        told = mapping(self._body[given[0]], given[0])

        def data():
            for i, value in enumerate(sequence(told.get("data"), "data")):
                datum = mapping(value, f"datum {i}")
                tokens = json_tokens(datum.get("model_input"), f"datum {i}: model_input")
                inputs = mapping(datum.get("loss_fn_inputs"), f"datum {i}: loss_fn_inputs")
                yield tokens, {k: (tensors.from_json, v) for k, v in inputs.items()}, Spans()

        loss = text(told.get("loss_fn"), "loss_fn")
        return (
            loss,
            mapping(told.get("loss_fn_config") or {}, "loss_fn_config"),
            data(),
            given[0] == "forward_backward_input",
        )


_SPANNED = ("model_input", "loss_fn_input")


def read(body: bytes, content_type: str) -> Message:
    """A request, protobuf or JSON, as its place; the JSON of ``/forward`` says itself that nothing
    is added to the gradient.

    Args:
        body: decompressed.

    Raises:
        UserError: nothing can be made of the bytes, or they name no place.
    """
    if not is_protobuf(content_type):
        need_json(content_type)
        return Message(json_object(body))
    message = messages.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as reason:
        raise UserError(
            f"the body is no ForwardBackwardRequest ({shown(str(reason))}): send the message whole"
        ) from None
    return Message(message)


def _spans(told: Any, length: int, what: str) -> tuple[Span, ...]:
    spans = []
    for i, one in enumerate(told):
        if (arm := one.WhichOneof("span")) is None:
            raise UserError(f"{what}[{i}] is of no kind; expected prompt_tokens or sampled_tokens")
        run = getattr(one, arm)
        if run.offset < 0 or run.length < 0:
            raise UserError(
                f"{what}[{i}] has offset {run.offset} and length {run.length}; expected neither"
                " below 0"
            )
        spans.append(
            Span(
                arm.removesuffix("_tokens"),
                text(run.sequence_id, f"{what}[{i}].sequence_id"),
                run.offset,
                run.length,
            )
        )
    if spans and (total := sum(span.length for span in spans)) != length:
        raise UserError(
            f"{what} cover {total} positions; the datum has {length}: let the runs tile it"
        )
    return tuple(spans)


def _sent(what: str, loss: str, tokens: np.ndarray, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """A datum's tensors that its loss reads, all of the shape of ``target_tokens``.

    Args:
        inputs: a tensor's reader and what it reads, by name. Those of other losses are not read.
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
    expected = f"[{tokens.size}, K]" if soft else f"[{tokens.size}]"
    if targets.shape[0] != tokens.size or len(targets.shape) != 1 + soft:
        raise UserError(
            f"{what}: target_tokens has shape {list(targets.shape)}; model_input has {tokens.size}"
            f" tokens, {loss} takes {expected}"
        )
    for tensor in sent.values():
        if tensor.shape != targets.shape:
            raise UserError(
                f"{tensor.what} has shape {list(tensor.shape)}; target_tokens has"
                f" {list(targets.shape)}, which all have"
            )
    return sent


def _datum(
    what: str, loss: str, tokens: np.ndarray, sent: Mapping[str, Tensor]
) -> tuple[Datum, np.ndarray | None]:
    """The datum of tensors that ``_sent`` gave, and where its cells went if they were packed."""
    targets = sent["target_tokens"]
    if len(targets.shape) == 2:
        weights = sent["weights"]
        if targets.cells is not None and weights.cells is not None:
            ids, floats, columns = tensors.packed(targets, weights)
            return Datum(tokens, ids, floats), columns
        return (
            Datum(tokens, targets.dense(targets.integers()), weights.dense(weights.floats())),
            None,
        )
    floats = {name: tensor.floats() for name, tensor in sent.items() if name != "target_tokens"}
    weights = floats.get("weights")
    in_ratio = None
    # the mask is of the ratio alone: positions outside of it have the ratio, and what advantage
    # they were given
    if loss == "gspo":
        in_ratio = (floats["sequence_ratio_mask"] != 0).astype(np.float32)
        weights = ((in_ratio != 0) | (floats["advantages"] != 0)).astype(np.float32)
    if weights is None:
        weights = np.ones(tokens.size, np.float32)
    sampled = () if loss == "cross_entropy" else (floats["advantages"], floats["logprobs"])
    return Datum(tokens, targets.integers(), weights, *sampled, in_ratio=in_ratio), None


def encode(trained: Trained, protobuf: bool) -> bytes:
    """The answer: of each datum ``logprobs`` and, for cross-entropy, ``elementwise_loss``.

    Args:
        trained: shaped as the targets were sent, see ``ForwardBackward.told``.
        protobuf: else JSON, with ``NaN`` and ``Infinity`` where a number is none, as Python's
            reader, which old SDKs use, takes them.
    """
    columns = {"logprobs": trained.logprobs} | (
        {} if trained.elementwise is None else {"elementwise_loss": trained.elementwise}
    )
    rows = [dict(zip(columns, row)) for row in zip(*columns.values(), strict=True)]
    if not protobuf:
        outputs = [{name: tensors.to_json(array) for name, array in told.items()} for told in rows]
        answer = {
            "loss_fn_output_type": "ArrayRecord",
            "loss_fn_outputs": outputs,
            "metrics": {"loss:sum": float(trained.loss)},
        }
        return json.dumps(answer, separators=(",", ":")).encode()
    message = messages.ForwardBackwardOutput(
        loss_fn_output_type="ArrayRecord", metrics={"loss:sum": trained.loss}
    )
    # shapes of one record agree
    for trailing, run in itertools.groupby(rows, lambda told: told["logprobs"].shape[1:]):
        record, together = message.loss_fn_outputs.add(type_tag="ArrayRecord"), list(run)
        record.num_datums = len(together)
        for name in together[0]:
            arrays = [told[name].astype("<f4") for told in together]
            field = record.fields[name]
            field.data = b"".join(array.tobytes() for array in arrays)
            field.offsets = (
                np.cumsum([0, *(array.nbytes for array in arrays)]).astype("<i8").tobytes()
            )
            field.dtype = messages.FLOAT32
            field.trailing_shape.extend(trailing)
    return message.SerializeToString()
