"""One policy's training state off the device: adapter, AdamW's moments and what has accumulated, at
the adapter's own rank and targets.

What is zero is not kept: moments before the first update, gradients where none are pending. It lies
in host memory or in a file, and comes back to any slot whose stack has its targets, with the same
bits.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from mint_jax import files
from mint_jax import params as params_lib
from mint_jax.digest import blake3_of
from mint_jax.errors import UserError
from mint_jax.lora.tree import AdapterConfig, adapter_specs

PARTS = ("factors", "mu", "nu", "grad")


@dataclasses.dataclass(frozen=True, eq=False)
class Held:
    """A policy's state on the host.

    Attributes:
        config: its adapter's.
        parts: of ``PARTS`` the trees ``{path: [L, R, D]}`` that are not zero; ``factors`` always.
        count: updates that the moments have seen.
        steps, skipped: updates applied, and refused because the gradient was not finite.
    """

    config: AdapterConfig
    parts: Mapping[str, Mapping[str, np.ndarray]]
    count: int = 0
    steps: int = 0
    skipped: int = 0

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for part in self.parts.values() for array in part.values())

    def adapter(self) -> Any:
        """The adapter as a tree."""
        return params_lib.nest(dict(self.parts["factors"]))

    def without_gradients(self) -> "Held":
        """As a checkpoint keeps it: pending gradients are no part of one."""
        return dataclasses.replace(
            self, parts={name: part for name, part in self.parts.items() if name != "grad"}
        )

    def fresh(self) -> "Held":
        """The same adapter before its first update."""
        return Held(self.config, {"factors": self.parts["factors"]})

    def to_bytes(self, notes: Mapping[str, Any] | None = None) -> bytes:
        """A safetensors file; ``from_bytes`` reads it.

        Args:
            notes: JSON that goes with it, for ``notes_of``.
        """
        tensors = {
            f"{name}/{path}": np.ascontiguousarray(array)
            for name, part in self.parts.items()
            for path, array in part.items()
        }
        told = {"config": dataclasses.asdict(self.config), "notes": dict(notes or {})}
        told |= {name: getattr(self, name) for name in ("count", "steps", "skipped")}
        # One entry: of several, safetensors writes now this and now that one first, and equal
        # states would have different bytes.
        return safetensors.numpy.save(tensors, {"training_state": json.dumps(told)})

    @classmethod
    def from_bytes(cls, data: bytes, what: str) -> "Held":
        """What ``to_bytes`` made.

        Raises:
            UserError: it is something else.
        """
        try:
            told = json.loads(_metadata(data)["training_state"])
            tensors = safetensors.numpy.load(data)
        except (ValueError, KeyError, TypeError, safetensors.SafetensorError) as reason:
            raise UserError(
                f"{what} is no training state of mint_jax ({reason}): give a file that it wrote"
            ) from None
        config, _ = told.pop("config"), told.pop("notes")
        parts: dict[str, dict[str, np.ndarray]] = {}
        for name, array in tensors.items():
            part, path = name.split("/", 1)
            parts.setdefault(part, {})[path] = array
        return cls(AdapterConfig(**config | {"targets": tuple(config["targets"])}), parts, **told)


def notes_of(data: bytes) -> dict[str, Any]:
    """The notes that ``Held.to_bytes`` was given."""
    return json.loads(_metadata(data)["training_state"])["notes"]


def _metadata(data: bytes) -> dict[str, str]:
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]


def fresh(base_specs: Any, config: AdapterConfig, seed: int) -> Held:
    """A new policy's state: A uniform in ±1/sqrt(D), B zero; for ``embed`` A zero, B normal, as
    ``lora.tree.init_adapter`` has them.

    The numbers are drawn on the host from the seed and each factor's path (Philox): ranks and
    targets that no policy had before compile nothing. They are not those that ``init_adapter``
    draws on the device from the same seed.
    """
    factors = {}
    for path, spec in params_lib.leaves_with_path(adapter_specs(base_specs, config)):
        draw = np.random.Generator(
            np.random.Philox(
                key=np.array([seed & 0xFFFFFFFFFFFFFFFF, params_lib.path_seed(path)], np.uint64)
            )
        )
        if path == "embed/b":
            factors[path] = draw.standard_normal(spec.shape, np.float32)
        elif path.endswith("/a") and path != "embed/a":
            factors[path] = (2 * draw.random(spec.shape, np.float32) - 1) * np.float32(
                spec.shape[-1] ** -0.5
            )
        else:
            factors[path] = np.zeros(spec.shape, np.float32)
    return Held(config, {"factors": factors})


@dataclasses.dataclass(frozen=True)
class Spilled:
    """A state in a file.

    Attributes:
        digest: of its bytes, compared when it is read.
    """

    path: Path
    digest: str
    nbytes: int

    @classmethod
    def write(cls, held: Held, path: Path) -> "Spilled":
        """The file is on the disk when this returns."""
        data = held.to_bytes()
        files.write_file(path, data)
        return cls(path, blake3_of(data), len(data))

    def read(self) -> Held:
        """The state.

        Raises:
            UserError: the file is damaged.
        """
        data = self.path.read_bytes()
        if blake3_of(data) != self.digest:
            raise UserError(
                f"{self.path} is damaged: its digest is not {self.digest}; restore the policy from"
                " a checkpoint"
            )
        return Held.from_bytes(data, str(self.path))
