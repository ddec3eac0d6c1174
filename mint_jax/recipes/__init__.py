"""The programs that ``launch`` runs: each module has ``run(settings, workdir) -> result``."""

import importlib
from pathlib import Path
from typing import Any

from mint_jax.harness.options import RecipeSettings


def run(settings: RecipeSettings, workdir: Path) -> dict[str, Any]:
    """Runs a recipe; returns its result."""
    return importlib.import_module(f"mint_jax.{settings.folder}.{settings.job}").run(
        settings, workdir
    )
