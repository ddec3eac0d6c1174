"""Time to the first token while adapters are loaded: waiting, and answered by a stand-in.

Command: python -m benchmarks --config=configs/bench/stand_in.py --workdir=runs/bench/stand_in
Short:   --config=configs/bench/stand_in.py:ci
Default size: about 5 minutes on two idle CPU cores.
"""

from ml_collections import ConfigDict


def get_config(size: str = "default") -> ConfigDict:
    if (tiny := size == "ci") == (size == "default"):
        raise ValueError(f"stand_in size {size!r}; expected default or ci")
    config = ConfigDict({"bench": "stand_in", "dtype": "float32", "seed": 0})
    config.base = "tiny-random" if tiny else "smollm2-135m-instruct"
    config.rank = 4 if tiny else 32
    config.policies, config.slots = (6, 3) if tiny else (40, 4)
    config.clients, config.requests, config.tokens = (2, 10, 2) if tiny else (3, 100, 8)
    config.n = 1 if tiny else 5
    return config
