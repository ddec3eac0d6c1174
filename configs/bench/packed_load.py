"""File to device slot of an adapter shaped for Qwen3-30B-A3B at rank 1: 37,248 tensors, 672
tensors, or one packed object.

Command: python -m benchmarks --config=configs/bench/packed_load.py
  --workdir=runs/bench/packed_load
Short: --config=configs/bench/packed_load.py:ci
Default size: a few minutes on two CPU cores, 8 GB of memory, 2 GB of disk (removed at the end).
"""

from ml_collections import ConfigDict


def get_config(size: str = "default") -> ConfigDict:
    config = ConfigDict()
    config.bench = "packed_load"
    config.seed = 0
    config.n = 7
    config.parts = ("loads", "stages", "host", "pause", "peft")
    config.host_fills = 5  # of the host cache, each in a process of its own
    config.distinct = 16
    config.rank = 1
    config.dtype = "bfloat16"
    config.shape = ConfigDict(
        {
            "layers": 48,
            "experts": 128,
            "per_token": 8,
            "d_model": 2048,
            "width": 768,
            "num_heads": 32,
            "num_kv_heads": 4,
            "head_dim": 128,
        }
    )
    config.pause = ConfigDict(
        {
            "layers": 6,
            "d_model": 768,
            "vocab_size": 16384,
            "rows": 16,
            "quiet": 32,
            "longest": 256,
            "windows": 9,
        }
    )
    config.peft = ConfigDict({"layers": 8, "d_model": 512, "rank": 8})
    if size == "ci":
        config.n = 5
        config.host_fills = 1
        config.shape.update(
            {
                "layers": 4,
                "experts": 16,
                "d_model": 256,
                "width": 96,
                "num_heads": 4,
                "num_kv_heads": 2,
                "head_dim": 64,
            }
        )
        config.pause.update(
            {"layers": 2, "d_model": 128, "vocab_size": 512, "quiet": 10, "windows": 5}
        )
        config.peft.update({"layers": 2, "d_model": 64})
    elif size != "default":
        raise ValueError(f"packed_load size {size!r}; expected default or ci")
    return config
