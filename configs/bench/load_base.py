"""Peak host memory while a base is loaded, over what the base takes; and the logits error of 8-bit
bases.

Command: python -m benchmarks --config=configs/bench/load_base.py --workdir=runs/bench/load_base
Short: --config=configs/bench/load_base.py:ci
Writes a checkpoint of 2 GB into the workdir and removes it; about three minutes on two CPU cores.
"""

from ml_collections import ConfigDict


def get_config(size: str = "default") -> ConfigDict:
    config = ConfigDict()
    config.bench = "load_base"
    config.base = "smollm2-135m-instruct"
    config.dtype = "float32"
    config.mesh = ConfigDict({"data": -1, "fsdp": 1, "expert": 1, "tensor": 1})
    config.gigabytes = 2.0
    config.n = 5  # loads of each kind, each in a process of its own
    # fields of the checkpoint's config.json; gigabytes decides the layers
    config.model = ConfigDict(
        {
            "architectures": ["Qwen3MoeForCausalLM"],
            "vocab_size": 32000,
            "hidden_size": 1024,
            "intermediate_size": 1024,
            "moe_intermediate_size": 384,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "norm_topk_prob": True,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 4096,
        }
    )
    if size == "ci":
        config.base = "tiny-random"
        config.n = 1
        config.gigabytes = 0.01
        config.model.update(
            {
                "vocab_size": 512,
                "hidden_size": 64,
                "moe_intermediate_size": 32,
                "num_experts": 4,
                "num_experts_per_tok": 2,
            }
        )
        config.model.update({"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32})
    elif size != "default":
        raise ValueError(f"load_base size {size!r}; expected default or ci")
    return config
