"""A tiny base in a directory, and PEFT adapters of it, for the catalog's command line."""

import json
from pathlib import Path

import jax
import numpy as np

from mint_jax import params as params_lib
from mint_jax.lora import peft
from mint_jax.lora.config import AdapterConfig
from mint_jax.models import base as base_lib
from mint_jax.models import hf, transformer
from mint_jax.models.hf_config import from_hf
from mint_jax.models.outline import Outline, outline
from tests.adapters import random_adapter

CONFIG = AdapterConfig(2, 4.0, ("q", "v"))


def make_base(directory: Path) -> Outline:
    """Random weights of two layers."""
    fields = base_lib.RANDOM["tiny-random"] | {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
    }
    cfg = from_hf(fields)
    hf.save(params_lib.init(transformer.abstract(cfg), jax.random.key(0)), cfg, directory)
    (directory / "config.json").write_text(json.dumps(fields))
    return outline(str(directory))


def random_factors(base: Outline, seed: int, config: AdapterConfig = CONFIG):
    return random_adapter(np.random.default_rng(seed), base.specs, config)


def write_adapter(
    directory: Path, base: Outline, seed: int, config: AdapterConfig = CONFIG
) -> Path:
    """A PEFT directory."""
    peft.write_peft(
        directory, random_factors(base, seed, config), config, base.tables[0], base.name
    )
    return directory
