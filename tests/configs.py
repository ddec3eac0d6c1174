"""Recipes run from the configs of tests."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mint_jax import launch, recipes
from mint_jax.harness import settings

ROOT = Path(__file__).parents[1]


def read(config: Any) -> Any:
    """Returns frozen settings, of a ConfigDict or a dict where they are not frozen yet."""
    is_tree = isinstance(config, Mapping) or hasattr(config, "to_dict")
    return recipes.read(config) if is_tree else config


def load(name: str, *changes: str) -> Any:
    """Returns the settings of ``--config=name`` and changes, as ``launch`` reads them."""
    return settings.build(*launch.load(str(ROOT / name), launch.split(changes)[1]))


def tiny(name: str, **changes: Any) -> Any:
    """Returns the ConfigDict of ``configs/tiny/NAME.py`` with changes."""
    config = launch.read_config(ROOT / "configs" / "tiny" / f"{name}.py", None)
    config.update(changes)
    return config


def only(config: Any, *names: str) -> Any:
    """Removes the other policies of a ConfigDict; returns it."""
    for name in set(config.policies) - set(names):
        del config.policies[name]
    return config


def run_config(config: Any, workdir: str | Path) -> dict[str, Any]:
    """Runs the recipe of a config; returns its result."""
    return recipes.run(read(config), Path(workdir))
