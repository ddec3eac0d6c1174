"""A policy's training state in a file, written and read back with the same bits."""

import dataclasses
from pathlib import Path
from typing import Any

from mint_jax import files
from mint_jax import params as params_lib
from mint_jax.errors import UserError
from mint_jax.lora.tree import AdapterConfig
from mint_jax.train.config import LossConfig, OptimizerConfig, PolicyConfig
from mint_jax.train.held import Held, notes_of
from mint_jax.train.trainer import Trainer


def save(file: str | Path, trainer: Trainer, name: str, fingerprint: str, draws: int) -> Path:
    """Writes a policy's file whole, or not at all.

    Args:
        fingerprint: of the base.
        draws: see ``Policy.draws``.

    Raises:
        UserError: it cannot be written.
    """
    path = _path(file)
    held, reference = trainer.held(name), trainer.reference(name)
    notes: dict[str, Any] = {
        "policy": dataclasses.asdict(trainer.policies[name]),
        "base": fingerprint,
        "draws": draws,
        "shapes": trainer.shapes.seen,  # padding decides the order of sums
    }
    if reference is not None:
        config, adapter = reference
        notes["reference"] = dataclasses.asdict(config)
        held = dataclasses.replace(
            held, parts={**held.parts, "reference": dict(params_lib.leaves_with_path(adapter))}
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_file(path, held.to_bytes(notes))
    except OSError as error:
        raise UserError(
            f"file {path} cannot be written ({error.strerror or error}): choose another place"
        ) from None
    return path


@dataclasses.dataclass(frozen=True)
class Saved:
    """What a file holds.

    Attributes:
        config: of the policy.
        state: adapter, moments, gradients and counters.
        reference: shape and factors of what KL terms and DPO compare with; None for the base or the
            start.
        draws: see ``Policy.draws``.
        shapes: padded sizes of the updates so far.
    """

    config: PolicyConfig
    state: Held
    reference: tuple[AdapterConfig, Any] | None
    draws: int
    shapes: list[tuple[int, ...]]

    def restore(self, trainer: Trainer) -> None:
        """Puts the state in the place of the policy's, which has joined the trainer."""
        trainer.restore(self.config.name, self.state)
        if self.reference is not None:
            trainer.refer(self.config.name, *self.reference)
        trainer.shapes.seen += [shape for shape in self.shapes if shape not in trainer.shapes.seen]


def read(file: str | Path, fingerprint: str, base: str, loss: LossConfig | None) -> Saved:
    """Reads what ``save`` wrote.

    Args:
        fingerprint, base: of the base that is here, and its name.
        loss: in the place of the policy's own.

    Raises:
        UserError: no such file, or a state of another base.
    """
    path = _path(file)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(
            f"file {path} cannot be read ({error.strerror or error}): give one that save_state"
            " wrote"
        ) from None
    held = Held.from_bytes(data, str(path))
    notes = notes_of(data)
    if not {"policy", "base", "draws", "shapes"} <= set(notes):
        raise UserError(
            f"{path} is a training state of the service: give a file that save_state wrote"
        )
    if notes["base"] != fingerprint:
        raise UserError(
            f"{path} is of base {notes['base'][:12]}, this is {fingerprint[:12]} ({base}): load the"
            " base it trained on"
        )
    fields = notes["policy"]
    own = loss if loss is not None else LossConfig(**fields["loss"])
    config = PolicyConfig(
        fields["name"], held.config, OptimizerConfig(**fields["optimizer"]), own, fields["seed"]
    )
    compared, reference = held.parts.get("reference"), None
    if compared is not None:
        adapter = notes["reference"]
        shape = AdapterConfig(**adapter | {"targets": tuple(adapter["targets"])})
        reference = shape, params_lib.nest(dict(compared))
    state = dataclasses.replace(
        held, parts={name: part for name, part in held.parts.items() if name != "reference"}
    )
    return Saved(
        config, state, reference, notes["draws"], [tuple(shape) for shape in notes["shapes"]]
    )


def _path(file: Any) -> Path:
    if not isinstance(file, str | Path) or not str(file):
        raise UserError(f"file is {file!r}; expected a path")
    return Path(file).expanduser()
