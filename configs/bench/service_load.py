"""Clients over HTTP train, save and sample more policies and revisions than there are slots:
errors, wrong weights, latencies, memory.

Command: python -m benchmarks --config=configs/bench/service_load.py
  --workdir=runs/bench/service_load
Short: --config=configs/bench/service_load.py:ci
Default size: ten minutes of load behind the three that it takes two cores to make the revisions;
  12 GB of memory, 10 GB of disk.
"""

from ml_collections import ConfigDict


def get_config(size: str = "default") -> ConfigDict:
    config = ConfigDict()
    config.bench = "service_load"
    config.base = "smollm2-135m-instruct"
    config.dtype = "float32"
    config.seed = 0
    config.clients, config.policies, config.revisions = 200, 64, 512
    config.seconds = 600.0
    config.rank = 8
    config.sequences, config.tokens = 1, 32  # of a round of training
    config.prompt, config.new_tokens = 8, 16  # tokens of a sample
    config.pause_s = 30.0  # between two requests of a client, on average: what two cores can answer
    config.heartbeat_s = 10.0
    config.save_every = 16  # rounds of a policy
    config.check_every = 5  # answers
    # by which the server's memory may grow in the last third of the load, beyond its caches
    config.growth_mb = 100.0
    config.program = "mint_jax.launch"  # starts the server
    config.server = ConfigDict(
        {"ranks": (8,), "slots": 16, "adapters": 16, "max_rows": 32, "snapshot_every": 16}
    )
    config.server.shapes = ((1, 1, 32), (4, 1, 32), (16, 1, 32))
    if size == "ci":
        config.base = "tiny-random"
        config.clients, config.policies, config.revisions = 8, 6, 12
        config.seconds = 10.0
        config.tokens = 15
        config.new_tokens = 20  # more than one dispatch draws
        config.pause_s = 0.05
        config.heartbeat_s = 0.5
        config.save_every = 4
        config.check_every = 5
        config.server.update({"slots": 2, "adapters": 2, "max_rows": 8, "snapshot_every": 4})
        config.server.shapes = ((4, 1, 32),)  # answers are scored in training too
    elif size != "default":
        raise ValueError(f"service_load size {size!r}; expected default or ci")
    return config
