"""Qwen3-4B with 16 policies of rank 32 on four TPU v5p chips.

Command: python -m mint_jax.launch --config=configs/scale_up/qwen3_4b.py
  --workdir=runs/scale_up/qwen3_4b
Smallest pod: --config.topology=smallest --config.chip=v5p
Needs the ``tpu-aot`` extra and no accelerator; several minutes on two CPU cores.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.job = "scale_up"
    config.base = "qwen3-4b"
    config.dtype = "bfloat16"
    config.topology = "v5p:2x2x1"  # or smallest
    config.chip = "v5p"  # whose pods smallest tries
    config.mesh = ConfigDict({"data": 1, "fsdp": -1, "expert": 1, "tensor": 2})
    config.margin = 0.05  # of the memory of each device, to stay free
    config.hlo = False  # write the compiled programs beside the result
    config.adapter = ConfigDict(
        {"rank": 32, "alpha": 64.0, "targets": ("q", "k", "v", "o", "gate", "up", "down")}
    )
    config.train = ConfigDict(
        {"policies": 16, "rows": 2, "tokens": 2048, "targets": 1024, "remat": "full"}
    )
    config.rollout = ConfigDict(
        {"adapters": 16, "prompts": 32, "rollouts": 8, "prompt_tokens": 1024, "new_tokens": 1024}
    )
    config.model = ConfigDict(  # fields of the model's config.json
        {
            "architectures": ["Qwen3ForCausalLM"],
            "vocab_size": 151936,
            "hidden_size": 2560,
            "intermediate_size": 9728,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rope_theta": 1000000.0,
            "max_position_embeddings": 40960,
            "tie_word_embeddings": True,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-06,
            "attention_bias": False,
        }
    )
    return config
