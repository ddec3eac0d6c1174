"""MinT's row on timed engines behind the product's front, beside its simulation.

Command: python -m benchmarks --config=configs/bench/fleet_timed.py --workdir=runs/bench/fleet_timed
Short:   --config=configs/bench/fleet_timed.py:ci
Default size: about 8 minutes on two idle CPU cores.
"""

from fleet import SERVICES
from fleet import get_config as simulated
from ml_collections import ConfigDict


def get_config(size: str = "default") -> ConfigDict:
    same = simulated(size)
    config = ConfigDict()
    config.bench = "fleet_timed"
    config.service = ConfigDict(SERVICES["cpu"])
    config.engines = 2
    config.n = 3 if size == "default" else 1  # seeds
    for name in ("seed", "slots", "host", "report_s", "row"):
        config[name] = same[name]
    config.report_s = 0.25  # as often as the front asks
    return config
