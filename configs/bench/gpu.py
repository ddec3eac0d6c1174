"""One GPU against its own limits: training, decoding, prefill, handoff, and peers.

Command: python -m benchmarks --config=configs/bench/gpu.py --workdir=runs/bench/gpu
Short: --config=configs/bench/gpu.py:ci
Hardware: one GPU of 80 GB, Qwen3-4B's shape in bfloat16. Nine minutes with empty caches. Results
  are appended to WORKDIR/gpu.jsonl as they come. --config.parts="('floors', 'train_8')" runs some
  parts only.
"""

from ml_collections import ConfigDict


def get_config(size: str = "h100") -> ConfigDict:
    config = ConfigDict()
    config.bench = "gpu"
    config.base = "random:qwen3-4b"
    config.dtype = "bfloat16"
    config.seed = 0
    config.n = 5
    config.seconds = 600.0  # parts that do not fit are skipped
    config.limits = ConfigDict(
        {  # seconds that must be left for a part to begin, and after which it adds no further row
            "floors": (10, 40),
            "train_passes": (40, 100),
            "decode": (30, 120),
            "prefill": (15, 60),
            "adapters": (30, 90),
            "train_8": (60, 150),
            "handoff": (30, 90),
            "peers": (60, 150),
        }
    )
    config.parts = (
        *("peers", "floors", "decode", "adapters", "train_passes"),
        *("prefill", "handoff", "train_8"),
    )
    config.floors = ConfigDict({"read_bytes": 4 << 30, "rows": 16384, "loops": 8})
    config.train = ConfigDict({"rows": 32, "tokens": 512, "rank": 16, "pass_tokens": 8192})
    config.decode = ConfigDict(
        {
            "rows": (1, 8, 64),
            "context": 160,
            "tokens": 64,
            "cache_bytes": 8 << 30,
            "rank": 16,
            "adapters": (1, 8, 64),
        }
    )
    config.prefill = ConfigDict({"tokens": 8192})
    config.handoff = ConfigDict({"rank": 32, "prompt": 32, "n": 40, "cache_bytes": 1 << 30})
    config.peers = ConfigDict({"base": "random:qwen3-4b", "rows": 16})  # rows of one pass
    if size == "ci":
        config.base = "tiny-random"
        config.n = 1
        config.floors.update({"read_bytes": 1 << 20, "rows": 64, "loops": 2})
        config.train.update({"rows": 8, "tokens": 16, "rank": 2, "pass_tokens": 64})
        config.decode.update({"rows": (2,), "context": 32, "tokens": 16, "rank": 2})
        config.decode.update({"cache_bytes": 1 << 24, "adapters": (1, 2)})
        config.prefill.tokens = 64
        config.handoff.update({"rank": 2, "prompt": 8, "n": 3, "cache_bytes": 1 << 22})
        config.peers.base = ""  # none: tests of the others import torch
    elif size != "h100":
        raise ValueError(f"gpu size {size!r}; expected h100 or ci")
    return config
