"""Kimi-K2 with 16 policies of rank 16 on every linear layer, those of all 384 experts too, on 128
TPU v5p chips.

10.3 billion parameters an adapter. Smaller pods were not compiled: on 64 chips what belongs to the
experts doubles, which makes about 90 of a chip's 102 GB before the first activation (20.7 GB of
base and 32.9 of adapters, moments and gradients on 128).

Command: python -m mint_jax.launch --config=configs/scale_up/kimi_k2_experts.py
  --workdir=runs/scale_up/kimi_k2_experts
Needs the ``tpu-aot`` extra and no accelerator; many minutes on two CPU cores.
"""

from ml_collections import ConfigDict

from configs.scale_up import kimi_k2


def get_config() -> ConfigDict:
    config = kimi_k2.get_config()
    config.adapter.targets = ("q_a", "q_b", "kv_a", "o", "gate", "up", "down")
    config.train.rows = 4  # of 4,096 tokens; 8 would need 106 of 95 GiB
    return config
