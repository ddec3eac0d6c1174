"""Gemma-4-31B with 16 policies of rank 32 on eight TPU v5p chips.

Command: python -m mint_jax.launch --config=configs/scale_up/gemma_4_31b.py
  --workdir=runs/scale_up/gemma_4_31b
Smallest pod: --config.topology=smallest --config.chip=v5p
Needs the ``tpu-aot`` extra and no accelerator. Not compiled yet: whether it fits is not known.
"""

from ml_collections import ConfigDict

from configs.scale_up import qwen3_4b
from mint_jax.models.names import SHAPES


def get_config() -> ConfigDict:
    config = qwen3_4b.get_config()
    config.base, config.topology = "gemma-4-31b", "v5p:2x2x2"
    config.model = ConfigDict(SHAPES[config.base])
    return config
