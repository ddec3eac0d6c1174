"""Adapters of an expert's gate and up over the base's grouped product, by every implementation that
runs here, beside the floor of bytes.

Command: python -m benchmarks --config=configs/bench/kernels.py --workdir=runs/bench/kernels
Short:   --config=configs/bench/kernels.py:ci
Real:    --config=configs/bench/kernels.py:qwen3 (Qwen3-30B-A3B's widths in bfloat16, for an
accelerator with 32 GB) Default size: a small layer in float32, a minute and a half on two CPU
cores, 4 GB of memory.
"""

from ml_collections import ConfigDict


def _cell(tokens: int, adapters: int, rank: int, backward: bool = False) -> ConfigDict:
    return ConfigDict({"tokens": tokens, "adapters": adapters, "rank": rank, "backward": backward})


def get_config(size: str = "default") -> ConfigDict:
    config = ConfigDict()
    config.bench = "kernels"
    config.seed = 0
    config.n = 5
    config.dtype = "float32"
    config.size = ConfigDict({"experts": 32, "per_token": 8, "d_model": 512, "width": 192})
    config.cells = ConfigDict(
        {
            "decode_1": _cell(64, 1, 16),
            "decode_64": _cell(64, 64, 16),
            "decode_64_rank_1": _cell(64, 64, 1),
            "prefill_8": _cell(1024, 8, 16),
            "train_8": _cell(1024, 8, 16, True),
        }
    )
    if size == "ci":
        config.n = 2
        config.size.update({"experts": 4, "per_token": 2, "d_model": 128, "width": 128})
        config.cells = ConfigDict({"decode": _cell(16, 4, 4), "train": _cell(16, 2, 4, True)})
    elif size == "qwen3":
        config.dtype = "bfloat16"
        config.n = 7
        config.size.update({"experts": 128, "d_model": 2048, "width": 768})
        config.cells = ConfigDict(
            {
                "decode_64": _cell(64, 64, 16),
                "decode_1024_rank_2": _cell(1024, 1024, 2),
                "prefill_8": _cell(1024, 8, 16),
                "prefill_64": _cell(1024, 64, 16),
                "train_8": _cell(2048, 8, 16, True),
            }
        )
    elif size != "default":
        raise ValueError(f"kernels size {size!r}; expected default, ci or qwen3")
    return config
