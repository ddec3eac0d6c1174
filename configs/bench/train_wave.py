"""So many policies in one training step against one policy with the same rows, and against a step
for each.

Command: python -m benchmarks --config=configs/bench/train_wave.py --workdir=runs/bench/train_wave
Short: --config=configs/bench/train_wave.py:ci
Default size: 64 policies, about two minutes on two CPU cores, 4 GB of memory.
"""

from ml_collections import ConfigDict


def get_config(size: str = "default") -> ConfigDict:
    config = ConfigDict()
    config.bench = "train_wave"
    config.base = "smollm2-135m-instruct"
    config.dtype = "float32"
    config.mesh = ConfigDict({"data": 1, "fsdp": 1, "expert": 1, "tensor": 1})
    config.seed = 0
    config.n = 5
    config.policies = 64
    config.rank = 8
    config.rows = 256
    config.tokens = 15  # of each row, behind its first
    config.one_by_one = 64  # policies, at most, that are also stepped one after another
    if size == "ci":
        config.base = "tiny-random"
        config.n = 2
        config.policies = 2
        config.rows = 8
    elif size != "default":
        raise ValueError(f"train_wave size {size!r}; expected default or ci")
    return config
