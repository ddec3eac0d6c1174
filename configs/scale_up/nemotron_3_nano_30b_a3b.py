"""Nemotron-3-Nano-30B-A3B, layers of Mamba-2, attention or 128 experts, with 16 policies of rank 16
on eight TPU v5p chips.

Command: python -m mint_jax.launch --config=configs/scale_up/nemotron_3_nano_30b_a3b.py
  --workdir=runs/scale_up/nemotron_3_nano_30b_a3b
Smallest pod: --config.topology=smallest --config.chip=v5p
Needs the ``tpu-aot`` extra and no accelerator. Of each chip's memory 61 % is free.
"""

from ml_collections import ConfigDict

from configs.scale_up import gpt_oss_20b
from mint_jax.models.names import SHAPES


def get_config() -> ConfigDict:
    config = gpt_oss_20b.get_config()
    config.base = "nemotron-3-nano-30b-a3b"
    config.adapter.targets = ("q", "k", "v", "o", "in", "out")
    config.model = ConfigDict(SHAPES[config.base])
    return config
