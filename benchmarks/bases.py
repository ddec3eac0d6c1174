"""Bases and GRPO jobs that benchmarks measure, from a bench's config."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from mint_jax.harness import settings, start
from mint_jax.harness.options import BaseSettings
from mint_jax.models.base import Base
from mint_jax.recipes import grpo
from mint_jax.recipes.options import GrpoSettings


def open_base(config: Any) -> Base:
    """Loads the base of a bench's config, or of its plain form."""
    return start.open_base(_own(BaseSettings, config, "bench"))


def make_grpo(config: Any, base: Base) -> grpo.ConcurrentGrpo:
    """Returns the GRPO job of a plain config; settings that are only the bench's are left out."""
    return grpo.ConcurrentGrpo(_own(GrpoSettings, config, "grpo"), base)


def _own(cls: type, config: Any, job: str) -> Any:
    tree: Mapping[str, Any] = config.to_dict() if hasattr(config, "to_dict") else config
    known = [f.name for f in dataclasses.fields(cls)]
    return settings.build(cls, {n: tree[n] for n in known if n in tree} | {"job": job})
