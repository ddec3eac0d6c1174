"""Kimi-K2, 1.04T parameters in 384 experts over latent attention, with 16 policies of rank 16 on
128 TPU v5p chips.

Command: python -m mint_jax.launch --config=configs/scale_up/kimi_k2.py
  --workdir=runs/scale_up/kimi_k2
Smallest pod: --config.topology=smallest --config.chip=v5p
Needs the ``tpu-aot`` extra and no accelerator; many minutes on two CPU cores.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.job = "scale_up"
    config.base = "kimi-k2"
    config.dtype = "bfloat16"
    config.topology = "v5p:4x4x8"  # or smallest
    config.chip = "v5p"  # whose pods smallest tries
    config.mesh = ConfigDict({"data": 1, "fsdp": 1, "expert": -1, "tensor": 8})
    config.margin = 0.05  # of the memory of each device, to stay free
    config.hlo = False  # write the compiled programs beside the result
    config.adapter = ConfigDict({"rank": 16, "alpha": 32.0, "targets": ("q_a", "q_b", "kv_a", "o")})
    config.train = ConfigDict(
        {"policies": 16, "rows": 8, "tokens": 4096, "targets": 2048, "remat": "full"}
    )
    config.rollout = ConfigDict(
        {"adapters": 16, "prompts": 128, "rollouts": 8, "prompt_tokens": 4096, "new_tokens": 4096}
    )
    config.model = ConfigDict(  # fields of the model's config.json
        {
            "architectures": ["DeepseekV3ForCausalLM"],
            "vocab_size": 163840,
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 384,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 1,
            "moe_layer_freq": 1,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "routed_scaling_factor": 2.827,
            "num_hidden_layers": 61,
            "num_attention_heads": 64,
            "num_key_value_heads": 64,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "rope_theta": 50000.0,
            "rope_scaling": {
                "type": "yarn",
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "beta_fast": 1.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
            "max_position_embeddings": 131072,
            "tie_word_embeddings": False,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-06,
            "attention_bias": False,
        }
    )
    return config
