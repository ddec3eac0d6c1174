"""Bases and GRPO jobs that benchmarks measure, from a bench's config."""

import dataclasses
from typing import Any

from ml_collections import ConfigDict

from mint_jax.jobs import common, grpo, options, settings
from mint_jax.models.base import Base


def open_base(config: Any) -> Base:
    """Loads the base of a bench's config, or of its plain form."""
    known, fields = [f.name for f in dataclasses.fields(options.OnBase)], ConfigDict(config)
    own = ConfigDict({name: fields[name] for name in known if name in fields} | {"job": "bench"})
    settings.fill(options.OnBase, own)
    return common.open_base(own)


def make_grpo(fields: dict[str, Any], base: Base) -> grpo.ConcurrentGrpo:
    """Returns the GRPO job of a plain config; settings that are only the bench's are left out."""
    known = [f.name for f in dataclasses.fields(options.Grpo)]
    config = settings.complete(
        ConfigDict({name: fields[name] for name in known if name in fields} | {"job": "grpo"})
    )
    return grpo.ConcurrentGrpo(config, base)
