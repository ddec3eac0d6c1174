"""Qwen3.5-35B-A3B, layers with a state or keys and 256 experts in each, with 16 policies of rank 16
on 16 TPU v5p chips.

Command: python -m mint_jax.launch --config=configs/scale_up/qwen3_5_35b_a3b.py
  --workdir=runs/scale_up/qwen3_5_35b_a3b
Smallest pod: --config.topology=smallest --config.chip=v5p
Needs the ``tpu-aot`` extra and no accelerator; many minutes on two CPU cores.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.job = "scale_up"
    config.base = "qwen3.5-35b-a3b"
    config.dtype = "bfloat16"
    config.topology = "v5p:2x2x4"  # or smallest
    config.chip = "v5p"  # whose pods smallest tries
    config.mesh = ConfigDict({"data": 1, "fsdp": 1, "expert": -1, "tensor": 2})
    config.margin = 0.05  # of the memory of each device, to stay free
    config.hlo = False  # write the compiled programs beside the result
    config.adapter = ConfigDict({"rank": 16, "alpha": 32.0, "targets": ("all-linear",)})
    config.train = ConfigDict(
        {"policies": 16, "rows": 4, "tokens": 4096, "targets": 2048, "remat": "full"}
    )
    config.rollout = ConfigDict(
        {"adapters": 16, "prompts": 64, "rollouts": 8, "prompt_tokens": 2048, "new_tokens": 2048}
    )
    config.model = ConfigDict(  # fields of the model's config.json
        {
            "architectures": ["Qwen3_5MoeForCausalLM"],
            "vocab_size": 248320,
            "hidden_size": 2048,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 40,
            "full_attention_interval": 4,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000000.0,
                "partial_rotary_factor": 0.25,
            },
            "max_position_embeddings": 262144,
            "tie_word_embeddings": False,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-06,
            "attention_bias": False,
        }
    )
    return config
