"""Qwen3-30B-A3B with adapters of rank 16 on all linear layers and experts: 8 in training, 16 in
sampling, on eight TPU v5p chips.

Command: python -m mint_jax.launch --config=configs/scale_up/qwen3_30b_a3b_experts.py
  --workdir=runs/scale_up/qwen3_30b_a3b_experts
Needs the ``tpu-aot`` extra and no accelerator; several minutes on two CPU cores.
"""

from ml_collections import ConfigDict

from configs.scale_up import qwen3_30b_a3b


def get_config() -> ConfigDict:
    config = qwen3_30b_a3b.get_config()
    config.adapter.targets = ("q", "k", "v", "o", "gate", "up", "down")
    config.train.policies = 8
    return config
