"""Qwen3.5-397B-A17B, layers with a state or keys and 512 experts in each, with 16 policies of rank
16 on 64 TPU v5p chips.

Command: python -m mint_jax.launch --config=configs/scale_up/qwen3_5_397b_a17b.py
  --workdir=runs/scale_up/qwen3_5_397b_a17b
Smallest pod: --config.topology=smallest --config.chip=v5p
Needs the ``tpu-aot`` extra and no accelerator: 23 minutes of CPU time, 48 on two busy cores. On 32
chips base, training state, adapters and caches alone take 122.6 of 95 GiB a device.
"""

from ml_collections import ConfigDict

from configs.scale_up import qwen3_5_35b_a3b
from mint_jax.models.names import SHAPES


def get_config() -> ConfigDict:
    config = qwen3_5_35b_a3b.get_config()
    config.base = "qwen3.5-397b-a17b"
    config.topology = "v5p:4x4x4"
    config.mesh.tensor = 4
    config.model = ConfigDict(SHAPES[config.base])
    return config
