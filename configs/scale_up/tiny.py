"""A decoder of a few megabytes on four TPU v5e chips: the scale-up job in seconds.

Command: python -m mint_jax.launch --config=configs/scale_up/tiny.py --workdir=runs/scale_up/tiny
Smallest pod: --config.topology=smallest --config.chip=v5e
Needs the ``tpu-aot`` extra and no accelerator; about a minute on two CPU cores.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.job = "scale_up"
    config.base = "tiny"
    config.dtype = "bfloat16"
    config.topology = "v5e:2x2"  # or smallest
    config.chip = "v5e"  # whose pods smallest tries
    config.mesh = ConfigDict({"data": 1, "fsdp": -1, "expert": 1, "tensor": 2})
    config.margin = 0.05  # of the memory of each device, to stay free
    config.hlo = False  # write the compiled programs beside the result
    config.adapter = ConfigDict(
        {"rank": 4, "alpha": 8.0, "targets": ("q", "k", "v", "o", "gate", "up", "down")}
    )
    config.train = ConfigDict(
        {"policies": 2, "rows": 2, "tokens": 128, "targets": 64, "remat": "full"}
    )
    config.rollout = ConfigDict(
        {"adapters": 2, "prompts": 4, "rollouts": 2, "prompt_tokens": 128, "new_tokens": 128}
    )
    config.model = ConfigDict(  # fields of the model's config.json
        {
            "architectures": ["Qwen3ForCausalLM"],
            "vocab_size": 2048,
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "rope_theta": 1000000.0,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": True,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-06,
            "attention_bias": False,
        }
    )
    return config
