"""Revisions in packs against one Orbax checkpoint each: bytes, files, export, cold load.

Command: python -m benchmarks --config=configs/bench/revision_stores.py --workdir=runs/stores
Short:   --config=configs/bench/revision_stores.py:ci
Default size: under five minutes on two CPU cores, 1 GB of disk, removed at the end.
"""

from ml_collections import ConfigDict


def get_config(size: str = "default") -> ConfigDict:
    config = ConfigDict()
    config.bench = "revision_stores"
    config.seed = 0
    config.n = 5  # rounds; each measures every store
    config.entries = 10_000  # revisions
    config.others = 1_000  # revisions in Orbax, which takes longer
    config.loads = 20  # cold loads of a round
    # all seven projections: 14 arrays
    config.shape = ConfigDict({"layers": 2, "d_model": 256, "rank": 1})
    if size == "ci":
        config.entries, config.others, config.loads = 50, 50, 5
    elif size != "default":
        raise ValueError(f"revision_stores size {size!r}; expected default or ci")
    return config
