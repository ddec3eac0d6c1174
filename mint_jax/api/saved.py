"""A policy's training state in a file, written and read back with the same bits."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mint_jax import files
from mint_jax import params as params_lib
from mint_jax.errors import UserError
from mint_jax.lora.tree import AdapterConfig
from mint_jax.train.config import LossConfig, OptimizerConfig, PolicyConfig
from mint_jax.train.held import Held, notes_of

if TYPE_CHECKING:
    from mint_jax.api.model import Model
    from mint_jax.api.policy import Policy


def save(policy: "Policy", file: str | Path) -> Path:
    """Writes the file whole, or not at all.

    Raises:
        UserError: it cannot be written.
    """
    path, trainer = _path(file), policy.trainer
    held, reference = trainer.held(policy.name), trainer.reference(policy.name)
    notes: dict[str, Any] = {
        "policy": dataclasses.asdict(policy.config),
        "base": policy.model.base.fingerprint,
        "draws": policy.draws,
        "shapes": trainer.shapes.seen,  # padding decides the order of sums
    }
    if reference is not None:
        config, adapter = reference
        notes["reference"] = dataclasses.asdict(config)
        held = dataclasses.replace(held, parts={**held.parts, "reference": dict(params_lib.leaves_with_path(adapter))})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_file(path, held.to_bytes(notes))
    except OSError as error:
        raise UserError(f"file {path} cannot be written ({error.strerror or error}): choose another place") from None
    return path


def resume(model: "Model", file: str | Path, loss: LossConfig | None) -> "Policy":
    """See ``Model.resume``."""
    path = _path(file)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"file {path} cannot be read ({error.strerror or error}): give one that save_state wrote") from None
    held = Held.from_bytes(data, str(path))
    notes = notes_of(data)
    if not {"policy", "base", "draws", "shapes"} <= set(notes):
        raise UserError(f"{path} is a training state of the service: give a file that save_state wrote")
    if notes["base"] != model.base.fingerprint:
        raise UserError(
            f"{path} is of base {notes['base'][:12]}, this is {model.base.fingerprint[:12]} ({model.name}): load the base it trained on"
        )
    fields = notes["policy"]
    own = loss if loss is not None else LossConfig(**fields["loss"])
    config = PolicyConfig(fields["name"], held.config, OptimizerConfig(**fields["optimizer"]), own, fields["seed"])
    reference = held.parts.get("reference")
    state = dataclasses.replace(held, parts={name: part for name, part in held.parts.items() if name != "reference"})
    policy = model.join(config)
    trainer = model.need_trainer()
    try:
        trainer.restore(config.name, state)
        if reference is not None:
            adapter = notes["reference"]
            shape = AdapterConfig(**adapter | {"targets": tuple(adapter["targets"])})
            trainer.refer(config.name, shape, params_lib.nest(dict(reference)))
    except BaseException:
        model.remove(policy)
        raise
    policy.draws = notes["draws"]
    trainer.shapes.seen += [tuple(shape) for shape in notes["shapes"] if tuple(shape) not in trainer.shapes.seen]
    return policy


def _path(file: Any) -> Path:
    if not isinstance(file, str | Path) or not str(file):
        raise UserError(f"file is {file!r}; expected a path")
    return Path(file).expanduser()
