"""From an optimizer step to the next sampled token by four paths, for SmolLM2 and for a base of Qwen3-4B's shape.

Command: python -m mint_jax.launch --config=configs/bench/handoff.py --workdir=runs/bench/handoff
Short:   --config=configs/bench/handoff.py:ci   (SmolLM2 only)
Whole:   --config=configs/bench/handoff.py:gpu  (all 36 layers in bfloat16, made on the device)
Default size: two of the 36 layers, about ten minutes on two CPU cores, 12 GB of memory.
"""

from ml_collections import ConfigDict


def get_config(size: str = "default") -> ConfigDict:
    config = ConfigDict()
    config.job = "bench"
    config.bench = "handoff"
    config.base = "smollm2-135m-instruct"
    config.dtype = "float32"
    config.mesh = ConfigDict({"data": 1, "fsdp": 1, "expert": 1, "tensor": 1})
    config.seed = 0
    config.n = 5
    config.rank = 8
    config.prompt = 16
    config.new_tokens = 64
    config.shape = ConfigDict(
        {
            "name": "Qwen3-4B",
            "layers": 2,
            "all_layers": 36,
            "vocab_size": 151936,
            "d_model": 2560,
            "num_heads": 32,
            "num_kv_heads": 8,
            "head_dim": 128,
            "d_ff": 9728,
            "rank": 32,
            "dtype": "float32",
        }
    )
    if size == "ci":
        config.shape.layers = 0
        config.new_tokens = 16
    elif size == "gpu":
        config.shape.layers = 36
        config.shape.dtype = "bfloat16"
    elif size != "default":
        raise ValueError(f"handoff size {size!r}; expected default, ci or gpu")
    return config
