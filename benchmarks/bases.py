"""Bases and GRPO jobs that benchmarks measure, from a bench's config."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from mint_jax import mesh as mesh_lib
from mint_jax.harness import settings, start
from mint_jax.harness.options import BaseSettings, GrpoSettings
from mint_jax.models.base import Base, random_params
from mint_jax.models.config import Experts, ModelConfig
from mint_jax.recipes import grpo


def open_base(config: Any) -> Base:
    """Loads the base of a bench's config, or of its plain form."""
    return start.open_base(_own(BaseSettings, config, "bench"))


def shape(section: Any) -> ModelConfig:
    """Returns the base that a section of a config describes: routed experts where it has any."""
    fields = dict(section)
    count = fields.get("experts", 0)
    width = fields.get("width") or fields.get("d_ff") or 2 * fields["d_model"]
    heads = fields.get("num_heads", 4)
    return ModelConfig(
        "qwen3_moe" if count else "qwen3",
        fields.get("vocab_size", 64),
        fields["d_model"],
        fields["layers"],
        heads,
        fields.get("num_kv_heads", heads // 2),
        fields.get("head_dim", fields["d_model"] // heads),
        width,
        rope_theta=1e6,
        qk_norm=True,
        tie_embeddings=not count,
        experts=Experts(count, fields["per_token"], width) if count else None,
    )


def random_base(cfg: ModelConfig, dtype: Any) -> Base:
    """Returns a base of random weights, made on the devices; it has no directory."""
    mesh = mesh_lib.make_mesh({"data": -1})
    return Base("random", Path("."), cfg, random_params(cfg, mesh, dtype), mesh, None, "0" * 64)


def make_grpo(config: Any, base: Base) -> grpo.ConcurrentGrpo:
    """Returns the GRPO job of a plain config; settings that are only the bench's are left out."""
    return grpo.ConcurrentGrpo(_own(GrpoSettings, config, "grpo"), base)


def _own(cls: type, config: Any, job: str) -> Any:
    tree: Mapping[str, Any] = ConfigDict(config).to_dict()
    known = [f.name for f in dataclasses.fields(cls)]
    return settings.build(cls, {n: tree[n] for n in known if n in tree} | {"job": job})
