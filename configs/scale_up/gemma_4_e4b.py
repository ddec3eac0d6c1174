"""Gemma-4-E4B with 16 policies of rank 32 on four TPU v5p chips.

Command: python -m mint_jax.launch --config=configs/scale_up/gemma_4_e4b.py
  --workdir=runs/scale_up/gemma_4_e4b
Smallest pod: --config.topology=smallest --config.chip=v5p
Needs the ``tpu-aot`` extra and no accelerator. Of each chip's memory 59 % is free.
"""

from ml_collections import ConfigDict

from configs.scale_up import qwen3_4b
from mint_jax.models.names import SHAPES


def get_config() -> ConfigDict:
    config = qwen3_4b.get_config()
    config.base = "gemma-4-e4b"
    config.model = ConfigDict(SHAPES[config.base])
    return config
