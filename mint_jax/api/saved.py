"""File of one policy's training state; reading restores the same bits."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mint_jax import files
from mint_jax import params as params_lib
from mint_jax.errors import UserError
from mint_jax.lora.tree import AdapterConfig
from mint_jax.train.config import LossConfig, OptimizerConfig, PolicyConfig
from mint_jax.train.host_state import HostState, notes_of
from mint_jax.train.trainer import Trainer


def save(file: str | Path, trainer: Trainer, name: str, fingerprint: str, draws: int) -> Path:
    """Writes a policy's training state atomically and returns the path. ``fingerprint`` is the
    base's, ``draws`` is ``Policy.draws``.
    """
    path = _path(file)
    state, reference = trainer.read_state(name), trainer.references.get(name)
    notes: dict[str, Any] = {
        "policy": dataclasses.asdict(trainer.policies[name]),
        "base": fingerprint,
        "draws": draws,
        "shapes": trainer.shapes.shapes,  # padding decides the order of sums
    }
    if reference is not None:
        config, adapter = reference
        notes["reference"] = dataclasses.asdict(config)
        state = dataclasses.replace(
            state, parts={**state.parts, "reference": dict(params_lib.leaves_with_path(adapter))}
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_file(path, state.to_bytes(notes))
    except OSError as error:
        raise UserError(
            f"file {path} cannot be written ({error.strerror or error}): choose another place"
        ) from None
    return path


def read(
    file: str | Path, fingerprint: str, base: str, loss: LossConfig | None
) -> tuple[PolicyConfig, int, Callable[[Trainer], None]]:
    """Reads a file that ``save`` wrote; returns the policy's config and ``Policy.draws``, and a
    function that replaces the state of the policy in a trainer that has it.

    Args:
        fingerprint, base: fingerprint and name of the loaded base.
        loss: replaces the policy's own loss.
    """
    path = _path(file)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(
            f"file {path} cannot be read ({error.strerror or error}): give a file that"
            " save_state wrote"
        ) from None
    state, notes = HostState.from_bytes(data, str(path)), notes_of(data)
    if not {"policy", "base", "draws", "shapes"} <= set(notes):
        raise UserError(
            f"{path} is a training state of the service: give a file that save_state wrote"
        )
    if notes["base"] != fingerprint:
        raise UserError(
            f"{path} belongs to base {notes['base'][:12]}, but {base} is"
            f" {fingerprint[:12]}: load the base that the policy trained over"
        )
    given, parts = notes["policy"], dict(state.parts)
    own = LossConfig(**given["loss"]) if loss is None else loss
    optimizer = OptimizerConfig(**given["optimizer"])
    how = state.config, optimizer, own, given["seed"]
    config = PolicyConfig(given["name"], *how, dropout=given["dropout"])
    compared = parts.pop("reference", None)

    def restore(trainer: Trainer) -> None:
        trainer.replace(config.name, dataclasses.replace(state, parts=parts))
        if compared is not None:
            shape = AdapterConfig(**notes["reference"])
            trainer.refer(config.name, shape, params_lib.nest(dict(compared)))
        known = trainer.shapes.shapes
        known += [shape for shape in map(tuple, notes["shapes"]) if shape not in known]

    return config, notes["draws"], restore


def _path(file: Any) -> Path:
    if not isinstance(file, str | Path) or not str(file):
        raise UserError(f"file is {file!r}; expected a path")
    return Path(file).expanduser()
