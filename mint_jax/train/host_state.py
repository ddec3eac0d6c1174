"""One policy's training state off the device, in host memory or in a file: adapter, AdamW moments
and accumulated gradients, at the adapter's own rank and targets.

It returns to any slot whose stack has its targets, with the same bits.
"""

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import safetensors.numpy

from mint_jax import files
from mint_jax import params as params_lib
from mint_jax.digest import blake3_of
from mint_jax.errors import UserError
from mint_jax.lora.basis import with_basis
from mint_jax.lora.tree import AdapterConfig, adapter_specs, init_adapter, widths_of
from mint_jax.train.state import TrainStack, slot_of

PARTS = ("factors", "mu", "nu", "grad")


@dataclasses.dataclass(frozen=True, eq=False)
class HostState:
    """A policy's state on the host.

    Attributes:
        parts: trees ``{path: [L, R, D]}`` by ``PARTS``. Parts that are zero are left out: moments
            before the first update, gradients if none are pending; ``factors`` are always there.
        steps, skipped: updates applied, and updates skipped because a gradient was not finite.
    """

    config: AdapterConfig
    parts: Mapping[str, Mapping[str, np.ndarray]]
    steps: int = 0
    skipped: int = 0

    @classmethod
    def of(cls, config: AdapterConfig, adapter: Any) -> "HostState":
        """Returns the state of an adapter before its first update."""
        return cls(
            config,
            {"factors": {path: np.asarray(x) for path, x in params_lib.leaves_with_path(adapter)}},
        )

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for part in self.parts.values() for array in part.values())

    def adapter(self) -> Any:
        return params_lib.nest(dict(self.parts["factors"]))

    def without_gradients(self) -> "HostState":
        return dataclasses.replace(
            self, parts={name: part for name, part in self.parts.items() if name != "grad"}
        )

    def fresh(self) -> "HostState":
        """Returns the same adapter before its first update."""
        return HostState(self.config, {"factors": self.parts["factors"]})

    def to_bytes(self, notes: Mapping[str, Any] | None = None) -> bytes:
        """Returns a safetensors file for ``from_bytes``, with JSON for ``notes_of``."""
        tensors = {
            f"{name}/{path}": np.ascontiguousarray(array)
            for name, part in self.parts.items()
            for path, array in part.items()
        }
        metadata = {"config": dataclasses.asdict(self.config), "notes": dict(notes or {})}
        metadata |= {name: getattr(self, name) for name in ("steps", "skipped")}
        # One metadata entry only: safetensors writes several in varying order, and equal states
        # must have equal bytes.
        return safetensors.numpy.save(tensors, {"training_state": json.dumps(metadata)})

    @classmethod
    def from_bytes(cls, data: bytes, what: str) -> "HostState":
        """Reads a file of ``to_bytes``. Raises ``UserError`` for any other."""
        try:
            metadata = json.loads(_metadata(data)["training_state"])
            tensors = safetensors.numpy.load(data)
        except (ValueError, KeyError, TypeError, safetensors.SafetensorError) as reason:
            raise UserError(
                f"{what} is not a training state of mint_jax ({reason}): give a file that it wrote"
            ) from None
        config, _ = metadata.pop("config"), metadata.pop("notes")
        parts: dict[str, dict[str, np.ndarray]] = {}
        for name, array in tensors.items():
            part, path = name.split("/", 1)
            parts.setdefault(part, {})[path] = array
        config = AdapterConfig(**config | {"targets": tuple(config["targets"])})
        return cls(config, parts, **metadata)


def notes_of(data: bytes) -> dict[str, Any]:
    """Returns the notes stored by ``HostState.to_bytes``."""
    return json.loads(_metadata(data)["training_state"])["notes"]


def _metadata(data: bytes) -> dict[str, str]:
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]


def fresh(base_specs: Any, config: AdapterConfig, seed: int, init: str = "uniform") -> HostState:
    """Returns a new policy's state, with an adapter from its seed; ``init`` as in ``INITS``."""
    return HostState.of(config, init_adapter(base_specs, config, seed, init))


def parts_of(one: TrainStack) -> dict[str, Any]:
    return dict(zip(PARTS, (one.adapters.factors, one.mu, one.nu, one.grad_sum)))


def padded(state: HostState, stack: TrainStack) -> TrainStack:
    """Pads a state with zeros to the shapes of this stack's slots, and adds the output basis."""
    like = jax.eval_shape(slot_of, stack, np.int32(0))
    widths = widths_of(dict(params_lib.leaves_with_path(like.adapters.factors)))
    own = {**state.parts, "factors": with_basis(state.parts["factors"], widths)}

    def put(name: str, path: str, like: Any) -> np.ndarray:
        out = np.zeros(like.shape, like.dtype)
        if path in own.get(name, {}):
            out[..., : state.config.rows, :] = own[name][path]
        return out

    factors, *rest = (
        params_lib.map_with_path(functools.partial(put, name), tree)
        for name, tree in parts_of(like).items()
    )
    adapters = dataclasses.replace(
        like.adapters, factors=factors, scale=np.float32(state.config.scale)
    )
    return TrainStack(adapters, *rest, np.int32(state.steps), np.int32(state.skipped))  # type: ignore[arg-type]


def to_host(
    one: TrainStack, config: AdapterConfig, base_specs: Any, wanted: Sequence[str] = PARTS
) -> HostState:
    """Copies these ``PARTS`` of a slot to the host; moments only if an update has made them."""
    paths = {path for path, _ in params_lib.leaves_with_path(adapter_specs(base_specs, config))}
    steps, skipped = (int(x) for x in jax.device_get((one.steps, one.skipped)))
    parts = {}
    for name, tree in parts_of(one).items():
        if name in wanted and (name not in ("mu", "nu") or steps):
            arrays = dict(params_lib.leaves_with_path(tree))
            arrays = jax.device_get({path: arrays[path] for path in arrays if path in paths})
            parts[name] = {
                path: np.array(leaf)[..., : config.rows, :].copy() for path, leaf in arrays.items()
            }
    return HostState(config, parts, steps, skipped)


@dataclasses.dataclass(frozen=True)
class SpilledState:
    """A state in a file; ``digest`` is verified on reading."""

    path: Path
    digest: str

    @classmethod
    def write(cls, state: HostState, path: Path) -> "SpilledState":
        data = state.to_bytes()
        files.write_file(path, data)
        return cls(path, blake3_of(data))

    def read(self) -> HostState:
        """Returns the state. Raises ``UserError`` if the file is damaged."""
        data = self.path.read_bytes()
        if blake3_of(data) != self.digest:
            raise UserError(
                f"{self.path} is damaged: its digest is not {self.digest}; restore the policy from"
                " a checkpoint"
            )
        return HostState.from_bytes(data, str(self.path))
