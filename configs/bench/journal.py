"""Training requests made durable, through the journal of futures against a row each in SQLite:
requests a second of 1, 8 and 64 clients.

Command: python -m benchmarks --config=configs/bench/journal.py --workdir=runs/bench/journal
Short:   --config=configs/bench/journal.py:ci
Default size: a minute or two on two CPU cores, 0.3 GB of disk (removed at the end).
"""

from ml_collections import ConfigDict


def get_config(size: str = "default") -> ConfigDict:
    config = ConfigDict()
    config.bench = "journal"
    config.seed = 0
    config.n = 5  # rounds; in each both sides have their turn
    config.threads = (1, 8, 64)  # clients
    config.requests = 100  # of a client in a round
    # of all clients in a round, at most, in the database, which takes so much longer
    config.rows = 256
    config.body_bytes = 8192
    config.result_bytes = 1024
    if size == "ci":
        config.n = 2
        config.threads = (1, 8)
        config.requests, config.rows = 10, 20
    elif size != "default":
        raise ValueError(f"journal size {size!r}; expected default or ci")
    return config
