"""Runs one benchmark: ``python -m benchmarks --config=configs/bench/engine.py:ci --workdir=DIR``.

``config.bench`` names a module of this package; ``--config.x=y`` changes a setting of the file.
The result is printed as one JSON object and saved as ``WORKDIR/result.json`` with its stamp.
"""

import argparse
import dataclasses
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from benchmarks import timing
from mint_jax import host, launch, stamp
from mint_jax.errors import UserError, choice
from mint_jax.files import write_file
from mint_jax.harness import settings, start

Config = Any  # a ConfigDict, or the settings class of the benchmark
BENCHES = sorted(path.stem for path in Path(__file__).parents[1].glob("configs/bench/*.py"))


def program_of(config: str) -> tuple[str, ...]:
    """Returns the command that runs a config: a benchmark's, a sweep's, or a job's."""
    own = Path(config.partition(":")[0]).parent.name in ("bench", "sweeps")
    return sys.executable, "-m", "benchmarks" if own else "mint_jax.launch"


def settings_of(config: Config) -> type | None:
    """Returns the settings class of a benchmark; None where its config file declares them."""
    if "job" in config and "bench" not in config:
        raise UserError(
            f"this is the config of a job, {config.job!r}: run it by python -m mint_jax.launch"
        )
    if config.get("bench") not in (*BENCHES, "sweep"):
        raise choice("bench", config.get("bench"), (*BENCHES, "sweep"))
    return getattr(importlib.import_module(f"benchmarks.{config.bench}"), "Settings", None)


def load(name: str, changes: Sequence[tuple[str, str]] = ()) -> Config:
    """Reads the config ``FILE`` or ``FILE:ARGUMENT``, changed and checked."""
    file, _, argument = name.partition(":")
    config = launch.read_config(Path(file).expanduser(), argument or None)
    declared, tree = settings_of(config), config.to_dict()
    for path, text in changes:
        settings.change(declared or declaration(tree), tree, path, text)
    return settings.build(declared, tree) if declared else ConfigDict(tree)


def declaration(tree: dict[str, Any]) -> type:
    """Returns a dataclass of a file's names, with the types of its values."""
    kinds = {
        name: declaration(each) if isinstance(each, dict) else Any if each is None else type(each)
        for name, each in tree.items()
    }
    return dataclasses.make_dataclass("FileSettings", kinds.items())


def run(config: Config, workdir: Path) -> dict[str, Any]:
    """Runs a benchmark in this process and saves its config and its result."""
    workdir.mkdir(parents=True, exist_ok=True)
    saved = settings.plain(config.to_dict() if isinstance(config, ConfigDict) else config)
    write_file(workdir / "config.json", json.dumps(saved, indent=1) + "\n")
    result = importlib.import_module(f"benchmarks.{config.bench}").run(config, workdir)
    if config.bench != "sweep":
        own = {"n": config.n} if "n" in config else {}
        result = {"bench": config.bench, "device": timing.device()} | own | result
    stamped = result | {"stamp": stamp.stamp(saved)}
    write_file(workdir / "result.json", json.dumps(stamped) + "\n")
    return result


def main(argv: Sequence[str]) -> None:
    arguments, changes = launch.split(argv)
    parser = argparse.ArgumentParser("benchmarks", description=__doc__, allow_abbrev=False)
    parser.add_argument("--config", metavar="FILE[:SIZE]", required=True, help="config file")
    parser.add_argument("--workdir", metavar="DIR", help="for results; under runs/ by default")
    args = parser.parse_args(arguments)
    config = load(args.config, changes)
    workdir = args.workdir or launch.default_workdir(args.config, config.bench)
    print(f"[benchmarks] {args.config}; results in {workdir}", file=sys.stderr, flush=True)
    start.prepare()
    result = run(config, Path(workdir).expanduser())
    print(json.dumps(result), flush=True)
    if result.get("failed"):  # points of a sweep; its report has their reasons
        sys.exit(1)
    host.leave(0)
