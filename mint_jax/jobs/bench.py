"""Benches: ``config.bench`` names a module of ``mint_jax.bench``; each prints one JSON object."""

import dataclasses
import importlib
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from mint_jax.errors import choice
from mint_jax.jobs import BENCHES, common, grpo, options, settings
from mint_jax.jobs.common import Config
from mint_jax.models.base import Base


def open_base(config: Config | dict[str, Any]) -> Base:
    """``common.open_base`` of a bench's config or of its plain form, which crosses to another
    process.
    """
    known, fields = [f.name for f in dataclasses.fields(options.OnBase)], ConfigDict(config)
    mine = ConfigDict({name: fields[name] for name in known if name in fields})
    settings.fill(options.OnBase, mine)
    return common.open_base(mine)


def make_grpo(fields: dict[str, Any], base: Base) -> grpo.ConcurrentGrpo:
    """The GRPO job of a plain config, which may have a bench's own settings besides."""
    known = [f.name for f in dataclasses.fields(options.Grpo)]
    config = settings.complete(
        ConfigDict({name: fields[name] for name in known if name in fields} | {"job": "grpo"})
    )
    return grpo.ConcurrentGrpo(config, base)


def run(config: Config, workdir: Path) -> dict[str, Any]:
    """Runs a bench; returns the result it prints."""
    if config.bench not in BENCHES:
        raise choice("bench", config.bench, BENCHES)
    common.save_config(config, workdir)
    bench: Any = importlib.import_module(f"mint_jax.bench.{config.bench}")
    return bench.run(config, workdir, open_base=open_base, make_grpo=make_grpo)
