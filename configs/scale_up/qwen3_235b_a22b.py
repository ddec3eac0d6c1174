"""Qwen3-235B-A22B, 128 experts, with 16 policies of rank 16 on 64 TPU v5p chips.

Command: python -m mint_jax.launch --config=configs/scale_up/qwen3_235b_a22b.py
  --workdir=runs/scale_up/qwen3_235b_a22b
Smallest pod: --config.topology=smallest --config.chip=v5p
Needs the ``tpu-aot`` extra and no accelerator; several minutes on two CPU cores.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.job = "scale_up"
    config.base = "qwen3-235b-a22b"
    config.dtype = "bfloat16"
    config.topology = "v5p:4x4x4"  # or smallest
    config.chip = "v5p"  # whose pods smallest tries
    config.mesh = ConfigDict({"data": 1, "fsdp": 1, "expert": -1, "tensor": 4})
    config.margin = 0.05  # of the memory of each device, to stay free
    config.hlo = False  # write the compiled programs beside the result
    config.adapter = ConfigDict({"rank": 16, "alpha": 32.0, "targets": ("q", "k", "v", "o")})
    config.train = ConfigDict(
        {"policies": 16, "rows": 4, "tokens": 4096, "targets": 2048, "remat": "full"}
    )
    config.rollout = ConfigDict(
        {"adapters": 16, "prompts": 64, "rollouts": 8, "prompt_tokens": 2048, "new_tokens": 2048}
    )
    config.model = ConfigDict(  # fields of the model's config.json
        {
            "architectures": ["Qwen3MoeForCausalLM"],
            "vocab_size": 151936,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "moe_intermediate_size": 1536,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 94,
            "num_attention_heads": 64,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "rope_theta": 1000000.0,
            "max_position_embeddings": 40960,
            "tie_word_embeddings": False,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "hidden_act": "silu",
            "rms_norm_eps": 1e-06,
            "attention_bias": False,
        }
    )
    return config
