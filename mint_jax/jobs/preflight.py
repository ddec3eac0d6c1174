"""Checks what a config names outside itself (bases, files, folders, packages, pods) before JAX is
imported or anything is written.

``launch`` and ``--dry_run`` run the same checks. What needs the base, the devices or a data file's
rows is checked by the job.
"""

import importlib.util
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mint_jax.aot import chips
from mint_jax.envs import env as env_lib
from mint_jax.errors import UserError
from mint_jax.jobs import options
from mint_jax.models import names

TRACKERS = ("wandb", "mlflow")  # setting, package and extra have one name
SERVE = ("fastapi", "uvicorn", "google.protobuf", "zstandard", "pyrage")


def check(config: Any, workdir: Path) -> None:
    """Raises ``UserError`` for the first thing that the run would need and that is not there."""
    _workdir(workdir)
    declared = options.OF_JOB[config.job]
    if issubclass(declared, options.OnBase):
        names.check(config.base)
    if issubclass(declared, options.WithCatalog):
        _catalog(config, made_here=issubclass(declared, options.Training) or config.job == "serve")
    if issubclass(declared, options.Training):
        for name in TRACKERS:
            if config[name]:
                need_package(name, name, f"{name}={config[name]!r}")
        for name, section in config.policies.items():
            _policy(f"policies.{name}", section)
    if config.job in ("sample", "score"):
        files(config)
    elif config.job == "evaluate":
        _environment("env", **dict(config.env))
    elif config.job == "serve":
        for module in SERVE:
            need_package(module, "serve", "the service")
        _existing(config, ("peft_folder",), Path.is_dir, "folder")
        _existing(config, ("certificate", "private_key"), Path.is_file, "file")
    elif config.job == "pretrain":
        for section in config.envs:
            _environment("envs", **dict(section))
    elif config.job == "scale_up":
        if config.topology == "smallest":
            chips.names(config.chip)
        else:
            chips.canonical(config.topology)
        chips.need_compiler(config.chip if config.topology == "smallest" else config.topology)


def need_package(module: str, extra: str, what: str) -> None:
    """Refuses what needs an optional package that is not installed; the package is looked for, not
    imported.

    Raises:
        UserError: with the extra to install.
    """
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # a parent package is missing
        found = None
    if found is None:
        raise UserError(
            f"{what} needs the package {module}, which is not installed: pip install"
            f" 'mint-jax[{extra}]'"
        )


def _workdir(workdir: Path) -> None:
    """Refuses a workdir that cannot be made or written; makes nothing."""
    there = next(folder for folder in (workdir, *workdir.absolute().parents) if folder.exists())
    if not there.is_dir():
        raise UserError(
            f"workdir {workdir} cannot be written ({there} is no folder): choose another --workdir"
        )
    if not os.access(there, os.W_OK | os.X_OK):
        raise UserError(
            f"workdir {workdir} cannot be written (no permission in {there}): choose another"
            " --workdir"
        )


def _catalog(config: Any, made_here: bool) -> None:
    """A database's driver, and a catalog that is there where the job only reads one."""
    place = config.catalog
    if place.startswith(("postgres://", "postgresql")):
        need_package("psycopg", "postgres", "a catalog in PostgreSQL")
    if (
        place
        and not made_here
        and "://" not in place
        and not (Path(place) / "catalog.db").is_file()
    ):
        raise UserError(
            f"catalog {place} does not exist: set --config.catalog to a catalog's folder or its"
            " database's URL"
        )


def _policy(where: str, section: Any) -> None:
    """The environment, or the data file, of one policy in training."""
    if "env" in section and not isinstance(section.env, str):
        _environment(f"{where}.env", **dict(section.env))
    if "data" in section:
        if section.data.path:
            _data(f"{where}.data.path", Path(section.data.path))
        else:
            fields = options.Data.__dataclass_fields__
            own = {key: value for key, value in section.data.items() if key not in fields}
            _environment(f"{where}.data", section.data.env, **own)


def _environment(where: str, name: str, **own: Any) -> None:
    """An environment that can be imported and takes these options; of the shipped one that reads a
    file, that file.
    """
    env_lib.check_options(name, **own)
    if name == "jsonl":
        _data(f"{where}.path", Path(own["path"]))


def _data(where: str, path: Path) -> None:
    if not path.is_file():
        raise UserError(f"{where}: data file {path} does not exist: check the path in the config")
    if path.suffix in (".parquet", ".arrow"):
        need_package("pyarrow", "data", f"reading {path}")


def files(config: Any) -> tuple[Path, Path]:
    """Input, which must exist, and output of a batch job.

    Raises:
        UserError: either is not set, or the input does not exist.
    """
    for name in ("input", "output"):
        if not config[name]:
            raise UserError(f"{name} is empty: set --config.{name}=FILE.jsonl")
    if not Path(config.input).is_file():
        raise UserError(f"input {config.input} does not exist: set --config.input to a JSONL file")
    if config.input.endswith((".parquet", ".arrow")):
        need_package("pyarrow", "data", f"reading {config.input}")
    return Path(config.input), Path(config.output)


def _existing(config: Any, settings: Iterable[str], test: Any, kind: str) -> None:
    for name in settings:
        if config[name] and not test(Path(config[name])):
            raise UserError(
                f"{name} is {config[name]!r}; expected a {kind} that exists: set --config.{name},"
                " or leave it empty"
            )
