"""The sampling engine against torch + transformers, against a static loop, and against memory.

Command: python -m benchmarks --config=configs/bench/engine.py --workdir=runs/bench/engine
Short: --config=configs/bench/engine.py:ci
One part: --config.parts="('continuous',)", of decode, prefill, continuous and prefix
Needs the ``bench`` extra.
Default size: ten minutes on two CPU cores, 5 GB of memory.
"""

from ml_collections import ConfigDict


def get_config(size: str = "default") -> ConfigDict:
    config = ConfigDict()
    config.bench = "engine"
    config.base = "smollm2-135m-instruct"
    config.dtype = "float32"
    config.mesh = ConfigDict({"data": 1, "fsdp": 1, "expert": 1, "tensor": 1})
    config.seed = 0
    config.n = 5
    config.parts = ("decode", "prefill", "continuous", "prefix")
    # of the array that is read for its bandwidth, about as many as the base has
    config.read_bytes = 1 << 29
    config.decode = ConfigDict(
        {"rows": (1, 8, 32), "context": 128, "tokens": 32, "trial_tokens": 8}
    )
    config.prefill = ConfigDict({"rows": 4, "prompt": 512})
    config.continuous = ConfigDict(
        {"rows": 8, "requests": 24, "prompt": (16, 256), "tokens": (8, 256)}
    )
    config.prefix = ConfigDict({"samples": 16, "prompt": 512, "tokens": 16})
    if size == "ci":
        config.base = "tiny-random"
        config.n = 2
        config.read_bytes = 1 << 26
        config.decode.update({"rows": (1, 8), "context": 32, "tokens": 4, "trial_tokens": 2})
        config.prefill.update({"rows": 2, "prompt": 64})
        config.continuous.update({"rows": 4, "requests": 8, "prompt": (4, 40), "tokens": (2, 40)})
        config.prefix.update({"samples": 4, "prompt": 64, "tokens": 4})
    elif size != "default":
        raise ValueError(f"engine size {size!r}; expected default or ci")
    return config
