"""From an optimizer step to the next sampled token by four paths, for SmolLM2 and for a base of
Qwen3-4B's shape.

Command: python -m benchmarks --config=configs/bench/handoff.py --workdir=runs/bench/handoff
Short:   --config=configs/bench/handoff.py:ci   (two tiny bases)
Long:    --config=configs/bench/handoff.py:long (64 tokens of the large base too, as of SmolLM2)
Whole:   --config=configs/bench/handoff.py:gpu  (all 36 layers in bfloat16, made on the device)
Default size: two of the 36 layers and 8 tokens of them, about four minutes on two CPU cores, 12 GB
of memory.
"""

from ml_collections import ConfigDict


def get_config(size: str = "default") -> ConfigDict:
    config = ConfigDict()
    config.bench = "handoff"
    config.base = "smollm2-135m-instruct"
    config.dtype = "float32"
    config.as_stored = False  # two of the four paths merge, which takes weights in full
    config.mesh = ConfigDict({"data": 1, "fsdp": 1, "expert": 1, "tensor": 1})
    config.seed = 0
    config.n = 5
    config.rank = 8
    config.prompt = 16
    config.new_tokens = 64
    config.more_tokens = ()  # further numbers of tokens to time the step with
    config.parts = ("base", "large")  # the base that is named, and the one of this shape
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
            "experts": 0,  # routed, each of width d_ff; 0: a dense base
            "per_token": 0,  # experts that a token visits
            "rank": 32,
            "dtype": "float32",
            "new_tokens": 8,  # 64 on all four paths would take four of ten minutes
            "more_tokens": (),
        }
    )
    if size == "ci":
        config.base = "tiny-random"
        config.n = 2
        config.new_tokens = 4
        config.shape.update(
            {
                "layers": 1,
                "vocab_size": 512,
                "d_model": 64,
                "num_heads": 2,
                "num_kv_heads": 1,
                "head_dim": 32,
                "d_ff": 128,
            }
        )
    elif size == "long":
        config.shape.new_tokens = 64
    elif size == "gpu":
        config.shape.layers = 36
        config.shape.dtype = "bfloat16"
        config.shape.new_tokens = 64
    elif size != "default":
        raise ValueError(f"handoff size {size!r}; expected default, ci, long or gpu")
    return config
