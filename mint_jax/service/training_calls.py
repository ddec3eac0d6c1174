"""Training calls and their results, and the names and bytes that are stored of them.

The arrays of all data are concatenated in a safetensors file; its metadata has the rest as JSON.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pydantic
import safetensors.numpy

from mint_jax.lora.tree import AdapterConfig
from mint_jax.train.blocks import Datum
from mint_jax.train.config import KINDS, OptimizerConfig
from mint_jax.train.losses import LossCoefs

ARRAYS = ("tokens", "targets", "weights", "advantages", "old_logp")
INPUT = "input:"  # begins the column of a custom loss's input
ARRAYS += ("in_ratio", "routes", "ref_logp")


class Trained(NamedTuple):
    """Log-probabilities of targets, the summed loss, for cross-entropy each target's loss, and a
    custom loss's metrics.
    """

    logprobs: list[np.ndarray]
    loss: float
    elementwise: list[np.ndarray] | None = None
    metrics: Mapping[str, float] = MappingProxyType({})


@dataclasses.dataclass(frozen=True)
class Create:
    """Takes a policy into training with a fresh adapter; ``kind`` is its optimizer."""

    config: AdapterConfig
    seed: int = 0
    kind: str = "adamw"


@dataclasses.dataclass(frozen=True, eq=False)
class ForwardBackward:
    """Adds the gradient of a loss over these data; without ``backward`` only computes the loss.
    ``columns``: for each datum whose targets were sent in another shape, the target of its row for
    each cell, ``[N, K]`` int32; else None. ``custom``: id of a custom loss, and ``inputs`` what it
    reads of each datum; ``loss`` is cross-entropy then.
    """

    data: Sequence[Datum]
    loss: LossCoefs
    backward: bool = True
    columns: Sequence[np.ndarray | None] | None = None
    custom: str | None = None
    inputs: Sequence[Mapping[str, np.ndarray]] = ()

    def result(self, logprobs: Sequence[np.ndarray], loss: float) -> Trained:
        """Returns the result of the data's log-probabilities, in the shape of the sent targets."""
        if KINDS[int(self.loss.kind)] != "cross_entropy":
            return Trained(self._as_sent(logprobs), loss)
        # a weight of 0 times minus infinity, or of 3e38 times a number
        with np.errstate(invalid="ignore", over="ignore"):
            elementwise = [
                np.where(d.weights == 0, 0, -d.weights * logp).astype(np.float32)
                for d, logp in zip(self.data, logprobs)
            ]
        return Trained(self._as_sent(logprobs), loss, self._as_sent(elementwise))

    def _as_sent(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        columns = self.columns or [None] * len(arrays)
        return [
            x if c is None else np.take_along_axis(x, c, 1)
            for x, c in zip(arrays, columns, strict=True)
        ]


@dataclasses.dataclass(frozen=True)
class Optim:
    """Updates a policy with its accumulated gradients."""

    numbers: OptimizerConfig


@dataclasses.dataclass(frozen=True)
class Load:
    """Gives a policy the state of a checkpoint, and takes it into training if it is not; without
    ``optimizer`` only the adapter. ``kind`` is the optimizer of a new policy.
    """

    path: str
    optimizer: bool
    tenant: str
    kind: str = "adamw"


@dataclasses.dataclass(frozen=True)
class Save:
    """Saves a policy after its earlier requests, with a name or for a sampler of these weights, or
    if ``inflight`` of these and later ones. ``recipients`` are age public keys that encrypt an
    external checkpoint.
    """

    kind: str
    name: str | None
    sampler: str | None = None
    ttl_s: int | None = None
    overwrite: bool = False
    metadata: dict[str, Any] | None = None
    recipients: tuple[str, ...] = ()
    inflight: bool = False


@dataclasses.dataclass(frozen=True)
class Refused:
    """A request that is invalid: it uses its number, and fails with the reason."""

    reason: str


Call = Create | ForwardBackward | Optim | Load | Save | Refused
PLAIN = {  # calls of JSON's types
    kind.__name__.lower(): pydantic.TypeAdapter[Call](kind)
    for kind in (Create, Optim, Load, Save, Refused)
}


def encode(call: Call) -> tuple[str, bytes]:
    """Returns the call's name and body."""
    if not isinstance(call, ForwardBackward):
        return type(call).__name__.lower(), _json(dataclasses.asdict(call))
    fields: dict[str, Any] = {"loss": [float(x) for x in call.loss], "backward": call.backward}
    columns = {name: [getattr(d, name) for d in call.data] for name in ARRAYS}
    if call.columns is not None:
        columns["columns"] = list(call.columns)
    if call.custom is not None:
        fields["custom"] = call.custom
        names = sorted({name for one in call.inputs for name in one})
        columns |= {INPUT + name: [one[name] for one in call.inputs] for name in names}
    return "forward_backward", _packed(fields, columns)


def decode(name: str, body: bytes) -> Call:
    """Inverts ``encode``."""
    if name in PLAIN:
        return PLAIN[name].validate_json(body)
    fields, columns = _unpacked(body)
    kind, low, high, kl_kind, *others = fields["loss"]
    loss = LossCoefs(int(kind), low, high, int(kl_kind), *others)  # type: ignore[arg-type]
    spread, names = columns.pop("columns", None), [n for n in columns if n.startswith(INPUT)]
    given = {name.removeprefix(INPUT): columns.pop(name) for name in names}
    inputs = [dict(zip(given, row)) for row in zip(*given.values(), strict=True)]
    data = [Datum(**dict(zip(columns, row))) for row in zip(*columns.values(), strict=True)]
    custom = fields.get("custom")
    inputs = inputs or [{}] * (0 if custom is None else len(data))
    return ForwardBackward(data, loss, fields["backward"], spread, custom, inputs)


def encode_result(result: Any) -> bytes:
    """Returns the bytes of ``Trained``, or of JSON."""
    if not isinstance(result, Trained):
        return b"j" + _json(result)
    columns = {"logprobs": result.logprobs}
    if result.elementwise is not None:
        columns["elementwise"] = result.elementwise
    return b"t" + _packed({"loss": result.loss, "metrics": dict(result.metrics)}, columns)


def decode_result(body: bytes) -> Any:
    """Inverts ``encode_result``."""
    if body[:1] == b"j":
        return json.loads(body[1:])
    fields, columns = _unpacked(body[1:])
    own = fields.get("metrics", {})
    return Trained(columns["logprobs"], fields["loss"], columns.get("elementwise"), own)


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _packed(fields: Mapping[str, Any], columns: Mapping[str, Sequence[np.ndarray | None]]) -> bytes:
    """Returns one file of JSON fields and of columns of arrays; a missing array has no shape."""
    tensors, shapes = {}, {}
    for name, arrays in columns.items():
        if present := [np.ravel(array) for array in arrays if array is not None]:
            tensors[name] = np.concatenate(present)
            shapes[name] = [None if array is None else array.shape for array in arrays]
    return safetensors.numpy.save(tensors, {"fields": json.dumps([fields, shapes])})


def _unpacked(body: bytes) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Inverts ``_packed``; the arrays of a column are views of one array."""
    size = int.from_bytes(body[:8], "little")
    fields, shapes = json.loads(json.loads(body[8 : 8 + size])["__metadata__"]["fields"])
    columns: dict[str, list[Any]] = {}
    for name, flat in safetensors.numpy.load(body).items():
        start, columns[name] = 0, []
        for shape in shapes[name]:
            end = start if shape is None else start + int(np.prod(shape))
            columns[name].append(None if shape is None else flat[start:end].reshape(shape))
            start = end
    return fields, columns
