"""gpt-oss-20b, 32 experts and windows of 128, with 16 policies of rank 16 on eight TPU v5p chips.

Command: python -m mint_jax.launch --config=configs/scale_up/gpt_oss_20b.py
  --workdir=runs/scale_up/gpt_oss_20b
Smallest pod: --config.topology=smallest --config.chip=v5p
Needs the ``tpu-aot`` extra and no accelerator; several minutes on two CPU cores.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.job = "scale_up"
    config.base = "gpt-oss-20b"
    config.dtype = "bfloat16"
    config.topology = "v5p:2x2x2"  # or smallest
    config.chip = "v5p"  # whose pods smallest tries
    config.mesh = ConfigDict({"data": 1, "fsdp": 1, "expert": -1, "tensor": 1})
    config.margin = 0.05  # of the memory of each device, to stay free
    config.hlo = False  # write the compiled programs beside the result
    config.adapter = ConfigDict({"rank": 16, "alpha": 32.0, "targets": ("q", "k", "v", "o")})
    config.train = ConfigDict(
        {"policies": 16, "rows": 2, "tokens": 2048, "targets": 1024, "remat": "full"}
    )
    config.rollout = ConfigDict(
        {"adapters": 16, "prompts": 32, "rollouts": 8, "prompt_tokens": 1024, "new_tokens": 1024}
    )
    config.model = ConfigDict(  # fields of the model's config.json
        {
            "architectures": ["GptOssForCausalLM"],
            "vocab_size": 201088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "num_hidden_layers": 24,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "sliding_window": 128,
            "rope_theta": 150000,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 32.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            "max_position_embeddings": 131072,
            "tie_word_embeddings": False,
            "rms_norm_eps": 1e-05,
            "attention_bias": True,
        }
    )
    return config
