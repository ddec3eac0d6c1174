"""Hit rates of a tier of residency, slots or host memory, over uniform, Zipf and bursty traffic,
next to LRU and the optimal policy.

Command: python -m benchmarks --config=configs/bench/hot_set.py --workdir=runs/bench/hot_set
Short:   --config=configs/bench/hot_set.py:ci
Default size: about two minutes on one CPU core.
"""

from ml_collections import ConfigDict


def get_config(size: str = "default") -> ConfigDict:
    config = ConfigDict()
    config.bench = "hot_set"
    config.seed = 0
    config.n = 5  # traces of each kind
    config.names = 100_000
    config.requests = 100_000
    config.request_s = 0.01  # from one request to the next
    config.half_life_s = 600.0  # the product's
    config.zipf = 1.0  # exponent
    config.traffic = ("uniform", "zipf", "bursts")
    config.capacities = (16, 64, 512, 4096)  # slots, or adapters in host memory
    if size == "ci":
        config.n = 2
        config.names = 200
        config.requests = 1_000
        config.capacities = (16, 64)
    elif size != "default":
        raise ValueError(f"hot_set size {size!r}; expected default or ci")
    return config
