"""1 to 64 requests for cold adapters at once, distinct ones and the same one: when each has its
slot.

Command: python -m benchmarks --config=configs/bench/cold_staircase.py
  --workdir=runs/bench/cold_staircase
Short: --config=configs/bench/cold_staircase.py:ci
Default size: adapters of Qwen3-30B-A3B's shape at rank 1 with 6 of its 48 layers, 13 MB each; one
  minute on two CPU cores, 3 GB of memory, 1 GB of disk (removed at the end).
"""

from ml_collections import ConfigDict


def get_config(size: str = "default") -> ConfigDict:
    config = ConfigDict()
    config.bench = "cold_staircase"
    config.seed = 0
    config.n = 7
    config.counts = (1, 2, 4, 8, 16, 32, 64)
    config.rank = 1
    config.dtype = "bfloat16"
    config.shape = ConfigDict(
        {
            "layers": 6,
            "experts": 128,
            "per_token": 8,
            "d_model": 2048,
            "width": 768,
            "num_heads": 32,
            "num_kv_heads": 4,
            "head_dim": 128,
        }
    )
    if size == "ci":
        config.n = 3
        config.counts = (1, 4)
        config.shape.update(
            {
                "layers": 2,
                "experts": 8,
                "d_model": 64,
                "width": 32,
                "num_heads": 2,
                "num_kv_heads": 1,
                "head_dim": 32,
            }
        )
    elif size != "default":
        raise ValueError(f"cold_staircase size {size!r}; expected default or ci")
    return config
