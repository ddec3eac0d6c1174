"""mint_jax: many LoRA policies over one resident, frozen base model.

Trains many policies at once, exports each step as an immutable adapter revision, samples, evaluates
and rolls back revisions, and never builds a merged checkpoint. Reading order: ``launch``,
``recipes``, ``train`` and ``rollout``, ``models``, ``lora``.

``import mint_jax as mint`` gives the names below. Each is imported on first use, since some take
seconds.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_NAMES = {  # name -> module
    "load": "api",
    "open": "api",
    "config": "api",
    "read_config": "api",
    "run": "api",
    "Model": "api",
    "Policy": "api",
    "Store": "api",
    "Stored": "api",
    "Evaluation": "api",
    "groups": "api.episodes",
    "register_loss": "train.losses",
    "register_environment": "envs.env",
    "Tokens": "train.losses",
    "Catalog": "catalog.lifecycle",
    "Trainer": "train.trainer",
    "PolicyConfig": "train.config",
    "LossConfig": "train.config",
    "OptimizerConfig": "train.config",
    "AdapterConfig": "lora.config",
    "MergeConfig": "lora.merge",
    "Group": "train.batch",
    "TrainSequence": "train.batch",
    "Engine": "rollout.engine",
    "Request": "rollout.request",
    "Completion": "rollout.request",
    "Scorer": "rollout.score",
    "Example": "envs.env",
    "ListEnvironment": "envs.env",
    "UserError": "errors",
}
__all__ = ["__version__", *_NAMES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_NAMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
