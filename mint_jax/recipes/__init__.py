"""The programs that ``launch`` runs: each module has ``run(settings, workdir) -> result``."""

import importlib
from pathlib import Path
from typing import Any

from mint_jax.harness.options import RecipeSettings

RECIPES = {  # job -> module
    name: f"mint_jax.recipes.{name}"
    for name in (
        *("grpo", "sft", "dpo", "evaluate", "sample", "score", "serve"),
        *("pretrain", "scale_up"),
    )
}
ALONE = ("pretrain",)  # run in one process


def run(settings: RecipeSettings, workdir: Path) -> dict[str, Any]:
    """Runs a recipe; returns its result."""
    return importlib.import_module(RECIPES[settings.job]).run(settings, workdir)
