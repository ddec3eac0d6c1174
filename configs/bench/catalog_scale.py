"""A catalog of a thousand to a hundred thousand revisions, or a million: names, loads, memory.

Command: python -m benchmarks --config=configs/bench/catalog_scale.py --workdir=runs/catalog_scale
Short:   --config=configs/bench/catalog_scale.py:ci
Million: --config=configs/bench/catalog_scale.py:million (nine minutes, 4 GB of disk, then removed)
Biases:  --config=configs/bench/catalog_scale.py:bias, a million policies of 36 KB (40 GB of disk,
  then removed)
Default size: four minutes on two idle CPU cores, 1 GB of memory.
"""

from ml_collections import ConfigDict


def get_config(size: str = "default") -> ConfigDict:
    config = ConfigDict()
    config.bench = "catalog_scale"
    config.seed = 0
    config.entries = (1_000, 10_000, 100_000)
    config.form = "tiny"  # a name of benchmarks/catalog_fill.py's FORMS
    config.per_policy = 4  # revisions of a policy
    config.batch = 5_000  # exports of one transaction
    config.requests = 100_000  # of each kind
    config.database = "sqlite"  # or postgres, a server of the bench's own
    config.traffic = ("uniform", "zipf", "bursts")  # that names are resolved and loaded by
    config.promotions = 200
    config.zipf = 1.0  # exponent
    config.host_entries = 512  # adapters in the host cache
    config.slots = 16
    config.loads = 20_000
    config.disk_loads = 1_000
    if size == "ci":
        config.entries = (200, 1_000)
        config.requests = 500
        config.promotions = 20
        config.loads = 100
        config.disk_loads = 30
    elif size == "million":
        config.entries = (1_000, 10_000, 100_000, 1_000_000)
        config.requests = 30_000
        config.loads = 5_000
    elif size == "bias":
        config.form, config.per_policy = "bias", 1
        config.entries = (1_000, 1_000_000)
        config.batch = 2_000
        config.requests = 30_000
        config.loads = 5_000
    elif size != "default":
        raise ValueError(f"catalog_scale size {size!r}; expected default, ci, million or bias")
    return config
