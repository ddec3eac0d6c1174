"""The first minutes of make serve: seconds to an open port, the first token, the first training
step; with an empty cache, then again.

Command: python -m benchmarks --config=configs/bench/serve_start.py
Short:   --config=configs/bench/serve_start.py:ci
Default size: two minutes on two idle CPU cores.
"""

from ml_collections import ConfigDict


def get_config(size: str = "default") -> ConfigDict:
    config = ConfigDict()
    config.bench = "serve_start"
    config.base = "smollm2-135m-instruct"
    config.dtype = "float32"
    config.rank = 32
    config.tokens = 32  # of the first step
    config.program = "mint_jax.launch"  # starts the server
    config.server = ConfigDict({"ranks": (32,)})
    if size == "ci":
        config.base = "tiny-random"
        config.rank = 8
        config.server = ConfigDict(
            {"ranks": (8,), "slots": 2, "adapters": 2, "max_rows": 8, "shapes": ((1, 1, 64),)}
        )
    elif size != "default":
        raise ValueError(f"serve_start size {size!r}; expected default or ci")
    return config
