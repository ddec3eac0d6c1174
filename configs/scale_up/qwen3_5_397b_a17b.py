"""Qwen3.5-397B-A17B, layers with a state or keys and 512 experts in each, with 16 policies of rank
16 on 64 TPU v5p chips.

Command: python -m mint_jax.launch --config=configs/scale_up/qwen3_5_397b_a17b.py
--workdir=runs/scale_up/qwen3_5_397b_a17b
Smallest pod: --config.topology=smallest --config.chip=v5p
Needs the ``tpu-aot`` extra and no accelerator; many minutes on two CPU cores.
"""

from ml_collections import ConfigDict

from configs.scale_up import qwen3_5_35b_a3b


def get_config() -> ConfigDict:
    config = qwen3_5_35b_a3b.get_config()
    config.base = "qwen3.5-397b-a17b"
    config.topology = "v5p:4x4x4"
    config.mesh.tensor = 4
    config.train.rows = 2  # of 4,096 tokens; 4 would need 108 of 95 GiB
    sizes = {"hidden_size": 4096, "num_hidden_layers": 60, "num_attention_heads": 32}
    sizes |= {"moe_intermediate_size": 1024, "shared_expert_intermediate_size": 1024}
    sizes |= {"num_experts": 512, "num_experts_per_tok": 10, "linear_num_value_heads": 64}
    config.model.update(sizes)
    return config
