"""Tenants that train and sample over one base in one process: what sharing saves, gaps between
dispatches of rows, and memory.

Command: python -m benchmarks --config=configs/bench/service.py --workdir=runs/bench/service
Short:   --config=configs/bench/service.py:ci
Default size: about fifteen minutes on two CPU cores, 6 GB of memory, 1 GB of disk.
"""

from ml_collections import ConfigDict


def get_config(size: str = "default") -> ConfigDict:
    config = ConfigDict()
    config.bench = "service"
    config.base = "smollm2-135m-instruct"
    config.dtype = "float32"
    config.mesh = ConfigDict({"data": 1, "fsdp": 1, "expert": 1, "tensor": 1})
    config.seed = 0
    config.n = 5
    config.tenants = (1, 4, 8, 32)  # the last beyond the slots: states of policies are moved about
    config.rank = 8
    config.targets = ("all-linear",)
    config.slots = 8
    # blocks, rows and tokens of a step
    config.shapes = ((1, 1, 32), (4, 1, 32), (8, 1, 32), (1, 1, 256))
    config.sequences, config.tokens = 1, 32  # of a tenant's round
    config.gap_s = 0.5
    config.flood_rounds, config.flood_depth = 40, 8
    config.decode = ConfigDict({"rows": 8, "tokens": 64})
    config.handoffs = 20
    config.memory_tenants = 8
    if size == "ci":
        config.base = "tiny-random"
        config.n = 2
        config.tenants = (1, 3)
        config.slots = 3
        config.shapes = ((1, 1, 16), (3, 1, 16))
        config.sequences, config.tokens = 1, 16
        config.flood_rounds, config.flood_depth = 4, 2
        config.decode.update({"rows": 2, "tokens": 64})
        config.handoffs = 3
        config.memory_tenants = 2
    elif size != "default":
        raise ValueError(f"service size {size!r}; expected default or ci")
    return config
