"""1 to 1,024 distinct adapters in one batch of decoding: what a step takes over one of the bare
base, and whether rows stay themselves.

Command: python -m benchmarks --config=configs/bench/active_wave.py
  --workdir=runs/bench/active_wave
Short: --config=configs/bench/active_wave.py:ci
Default size: about eight minutes on two CPU cores, 12 GB of memory.
"""

from ml_collections import ConfigDict


def get_config(size: str = "default") -> ConfigDict:
    config = ConfigDict()
    config.bench = "active_wave"
    config.base = "smollm2-135m-instruct"
    config.dtype = "float32"
    config.mesh = ConfigDict({"data": 1, "fsdp": 1, "expert": 1, "tensor": 1})
    config.seed = 0
    config.n = 5
    config.waves = ConfigDict(
        {
            "small": {"rank": 1, "counts": (1, 8, 64, 256, 1024)},
            "large": {"rank": 8, "counts": (1, 8, 32, 64)},
        }
    )
    # rows of a program; a batch has all rows of the smallest that holds its adapters
    config.shapes = (32, 64, 256, 1024)
    config.context = 96  # positions that each row has cached
    config.row_steps = 256  # rows times steps of a timed call, about
    config.checked = 4  # rows of each batch that are decoded alone too
    if size == "ci":
        config.base = "tiny-random"
        config.n = 2
        config.waves.update({"small": {"counts": (1, 8, 64)}, "large": {"counts": (1, 8)}})
        config.shapes = (32, 64)
        config.context = 32
    elif size != "default":
        raise ValueError(f"active_wave size {size!r}; expected default or ci")
    return config
