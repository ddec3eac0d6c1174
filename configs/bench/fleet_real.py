"""A fleet of real engines under kills; see docs/fleet.md.

Command: python -m benchmarks --config=configs/bench/fleet_real.py --workdir=runs/bench/fleet_real
Short:   --config=configs/bench/fleet_real.py:ci
Default size: about 20 minutes on two idle CPU cores, ten of them under kills.
"""

from ml_collections import ConfigDict


def get_config(size: str = "default") -> ConfigDict:
    config = ConfigDict()
    config.bench = "fleet_real"
    config.fleet = "configs/fleet.py"
    config.engines = 2
    config.n = 5  # rounds of the front's cost, and streams whose engine is killed
    config.members = (4, 64)  # engines at which a choice is timed
    config.calls = 5000
    config.requests = 40  # of a round
    config.tokens = 100  # of a stream
    config.clients = 3  # that sample, and that train
    config.trainers = 1
    config.steps = 4  # of a policy
    config.kills = 10
    config.every_s = 60.0
    if size == "ci":
        config.fleet = "configs/fleet.py:ci"
        config.n, config.requests, config.tokens = 1, 3, 48
        config.calls = 100
        config.clients, config.kills, config.every_s = 1, 1, 1.0
    elif size != "default":
        raise ValueError(f"fleet_real size {size!r}; expected default or ci")
    return config
