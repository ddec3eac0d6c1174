"""Qwen3-Next-80B-A3B, layers with a state or keys and 512 experts in each, with 16 policies of rank
16 on 32 TPU v5p chips.

Command: python -m mint_jax.launch --config=configs/scale_up/qwen3_next_80b_a3b.py
  --workdir=runs/scale_up/qwen3_next_80b_a3b
Smallest pod: --config.topology=smallest --config.chip=v5p
Needs the ``tpu-aot`` extra and no accelerator. Not compiled yet: whether it fits is not known.
"""

from ml_collections import ConfigDict

from configs.scale_up import qwen3_5_35b_a3b
from mint_jax.models.names import SHAPES


def get_config() -> ConfigDict:
    config = qwen3_5_35b_a3b.get_config()
    config.base, config.topology = "qwen3-next-80b-a3b", "v5p:2x4x4"
    config.model = ConfigDict(SHAPES[config.base])
    return config
