"""Checks command lines that benchmarks build."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks import launch as bench_launch
from mint_jax import launch
from mint_jax.harness import settings

ROOT = Path(__file__).parents[2]


def check(arguments: Sequence[str]) -> None:
    """Loads the config of a command with its changes, as its program does; raises ``UserError``."""
    others, changes = launch.split(arguments)
    [name] = [a.removeprefix("--config=") for a in others if a.startswith("--config=")]
    if "benchmarks" in bench_launch.program_of(name):
        bench_launch.load(str(ROOT / name), changes)
    else:
        settings.build(*launch.load(str(ROOT / name), changes))
