"""Training requests and their results as they are stored: a name and bytes, from which the call is
made again after a restart.

Arrays of all data stand behind each other in a safetensors file, whose metadata has the rest as
JSON.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import safetensors.numpy

from mint_jax.errors import UserError
from mint_jax.lora.tree import AdapterConfig
from mint_jax.service.training import Trained
from mint_jax.train.blocks import Datum
from mint_jax.train.config import OptimizerConfig
from mint_jax.train.losses import LossCoefs

ARRAYS = ("tokens", "targets", "weights", "advantages", "old_logp", "in_ratio", "routes")


@dataclasses.dataclass(frozen=True)
class Create:
    """Takes a policy into training with a fresh adapter."""

    config: AdapterConfig
    seed: int = 0


@dataclasses.dataclass(frozen=True, eq=False)
class ForwardBackward:
    """See ``training.Training.forward_backward``.

    Attributes:
        columns: for each datum whose targets are told in another shape than they have here, ``[N,
            K]`` int32: which target of its row is each cell's; else None.
    """

    data: Sequence[Datum]
    loss: LossCoefs
    backward: bool = True
    columns: Sequence[np.ndarray | None] | None = None

    def in_sent_shape(self, trained: Trained) -> Trained:
        """Returns a result in the shape of the sent targets."""
        if self.columns is None:
            return trained

        def spread(arrays: list[np.ndarray]) -> list[np.ndarray]:
            return [
                x if c is None else np.take_along_axis(x, c, 1)
                for x, c in zip(arrays, self.columns or (), strict=True)
            ]

        elementwise = None if trained.elementwise is None else spread(trained.elementwise)
        return Trained(spread(trained.logprobs), trained.loss, elementwise)


@dataclasses.dataclass(frozen=True)
class Optim:
    """See ``training.Training.optim``."""

    numbers: OptimizerConfig


@dataclasses.dataclass(frozen=True)
class Load:
    """Gives a policy the state of a checkpoint, and takes it into training where it is not.

    Attributes:
        path: see ``checkpoints.Path``.
        optimizer: AdamW's moments too; else the adapter alone.
        tenant: who asks.
    """

    path: str
    optimizer: bool
    tenant: str


@dataclasses.dataclass(frozen=True)
class Save:
    """Keeps a policy as it is once all that was asked of it before has run.

    Attributes:
        kind: see ``checkpoints.Kind``.
        name: the checkpoint's; None keeps it for a sampler alone.
        sampler: who samples these weights, where somebody does.
        ttl_s: seconds until it is gone; None: never.
        overwrite: an older one of this name goes.
        metadata: the user's.
        recipients: age public keys to which an external checkpoint is encrypted; none: it is not.
    """

    kind: str
    name: str | None
    sampler: str | None = None
    ttl_s: int | None = None
    overwrite: bool = False
    metadata: dict[str, Any] | None = None
    recipients: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Refused:
    """A request whose content cannot be used: its number is used up all the same, and the reason is
    its outcome.
    """

    reason: str


Call = Create | ForwardBackward | Optim | Load | Save | Refused
# those of JSON's own types
PLAIN: dict[str, Any] = {"load": Load, "save": Save, "refused": Refused}


def encode(call: Call) -> tuple[str, bytes]:
    """The call's name and body."""
    if isinstance(call, Create):
        return "create", _json({"config": dataclasses.asdict(call.config), "seed": call.seed})
    if isinstance(call, Optim):
        return "optim", _json(dataclasses.asdict(call.numbers))
    for name, kind in PLAIN.items():
        if isinstance(call, kind):
            return name, _json(dataclasses.asdict(call))
    assert isinstance(call, ForwardBackward)
    told = {"loss": [float(x) for x in call.loss], "backward": call.backward}
    columns = {name: [getattr(d, name) for d in call.data] for name in ARRAYS}
    return "forward_backward", _packed(
        told, columns | ({} if call.columns is None else {"columns": call.columns})
    )


def decode(name: str, body: bytes) -> Call:
    """The call that ``encode`` was given.

    Raises:
        UserError: there is no such call.
    """
    if name == "create":
        told = json.loads(body)
        config = told["config"]
        return Create(AdapterConfig(**config | {"targets": tuple(config["targets"])}), told["seed"])
    if name == "optim":
        return Optim(OptimizerConfig(**json.loads(body)))
    if name in PLAIN:
        fields = json.loads(body)
        return PLAIN[name](
            **{
                key: tuple(value) if isinstance(value, list) else value
                for key, value in fields.items()
            }
        )
    if name != "forward_backward":
        raise UserError(
            f"there is no training request {name!r}: the database is of another version of mint_jax"
        )
    told, columns = _unpacked(body)
    kind, low, high, kl_kind, *others = told["loss"]
    loss = LossCoefs(int(kind), low, high, int(kl_kind), *others)  # type: ignore[arg-type]
    spread = columns.pop("columns", None)
    data = [Datum(**dict(zip(columns, row))) for row in zip(*columns.values(), strict=True)]
    return ForwardBackward(data, loss, told["backward"], spread)


def encode_result(result: Any) -> bytes:
    """Bytes of what a call gave: ``Trained``, or numbers by name."""
    if isinstance(result, Trained):
        columns = {"logprobs": result.logprobs} | (
            {} if result.elementwise is None else {"elementwise": result.elementwise}
        )
        return b"t" + _packed({"loss": result.loss}, columns)
    return b"j" + _json(result)


def decode_result(body: bytes) -> Any:
    """Inverts ``encode_result``."""
    if body[:1] == b"j":
        return json.loads(body[1:])
    told, columns = _unpacked(body[1:])
    return Trained(columns["logprobs"], told["loss"], columns.get("elementwise"))


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _packed(told: Mapping[str, Any], columns: Mapping[str, Sequence[np.ndarray | None]]) -> bytes:
    """One file of the arrays of all rows; an array that a row does not have has no shape."""
    tensors, shapes = {}, {}
    for name, arrays in columns.items():
        there = [array for array in arrays if array is not None]
        if there:
            tensors[name] = np.concatenate(
                [np.ascontiguousarray(array).reshape(-1) for array in there]
            )
            shapes[name] = [None if array is None else array.shape for array in arrays]
    return safetensors.numpy.save(tensors, {"told": json.dumps([told, shapes])})


def _unpacked(body: bytes) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Inverts ``_packed``; the rows' arrays are views of one array."""
    size = int.from_bytes(body[:8], "little")
    told, shapes = json.loads(json.loads(body[8 : 8 + size])["__metadata__"]["told"])
    columns: dict[str, list[Any]] = {}
    for name, flat in safetensors.numpy.load(body).items():
        start, columns[name] = 0, []
        for shape in shapes[name]:
            if shape is None:
                columns[name].append(None)
                continue
            end = start + int(np.prod(shape))
            columns[name].append(flat[start:end].reshape(shape))
            start = end
    return told, columns
