"""The programs that ``launch`` runs: each module has ``run(settings, workdir) -> result``."""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mint_jax.aot.settings import ScaleUpSettings
from mint_jax.errors import UserError, choice
from mint_jax.harness import options, settings
from mint_jax.harness.options import RecipeSettings

SETTINGS: dict[str, type[RecipeSettings]] = {
    "grpo": options.GrpoSettings,
    "sft": options.SftSettings,
    "dpo": options.DpoSettings,
    "evaluate": options.EvaluateSettings,
    "sample": options.SampleSettings,
    "score": options.ScoreSettings,
    "serve": options.ServeSettings,
    "fleet": options.FleetSettings,
    "convert": options.ConvertSettings,
    "scale_up": ScaleUpSettings,
}


def of_job(job: Any, config: Mapping[str, Any] | None = None) -> type[RecipeSettings]:
    """Returns the class of a job's settings; ``config`` is the one that should name it."""
    if job is None and config is not None and "bench" in config:
        raise UserError(
            f"this is the config of a benchmark, {config['bench']!r}: run it by"
            " python -m benchmarks"
        )
    if job not in SETTINGS:
        raise choice("job", job, SETTINGS)
    return SETTINGS[job]


def read(config: Mapping[str, Any]) -> Any:
    """Returns the settings of a config, which names its ``job``; see ``settings.build``."""
    tree = config.to_dict() if hasattr(config, "to_dict") else dict(config)  # type: ignore[attr-defined]
    return settings.build(of_job(tree.get("job"), tree), tree)


def run(settings: RecipeSettings, workdir: Path) -> dict[str, Any]:
    """Runs a recipe; returns its result."""
    module = importlib.import_module(f"mint_jax.{settings.folder}.{settings.job}")
    return module.run(settings, workdir)
