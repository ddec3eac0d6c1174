"""Gemma-4-26B-A4B, an MLP and 128 experts in each layer, with 16 policies of rank 16 on eight
TPU v5p chips.

Command: python -m mint_jax.launch --config=configs/scale_up/gemma_4_26b_a4b.py
  --workdir=runs/scale_up/gemma_4_26b_a4b
Smallest pod: --config.topology=smallest --config.chip=v5p
Needs the ``tpu-aot`` extra and no accelerator. Not compiled yet: whether it fits is not known.
"""

from ml_collections import ConfigDict

from configs.scale_up import gpt_oss_20b
from mint_jax.models.names import SHAPES


def get_config() -> ConfigDict:
    config = gpt_oss_20b.get_config()
    config.base = "gemma-4-26b-a4b"
    config.model = ConfigDict(SHAPES[config.base])
    return config
