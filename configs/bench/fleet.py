"""Routers of a simulated fleet: the product's chooser, what others do, and perfect knowledge.

Command: python -m benchmarks --config=configs/bench/fleet.py --workdir=runs/bench/fleet
Short:   --config=configs/bench/fleet.py:ci
Default size: about 15 minutes on one idle CPU core. All of it is simulated.
"""

from ml_collections import ConfigDict

from benchmarks.fleet_simulation import MINT_ROW, SERVICES


def get_config(size: str = "default") -> ConfigDict:
    config = ConfigDict()
    config.bench = "fleet"
    config.seed = 0
    config.n = 20  # seeds of MinT's row
    config.few = 5  # seeds of other grids
    config.services = ConfigDict(SERVICES)
    config.slots = 32
    config.host = 2048
    config.report_s = 0.5  # between an engine's reports to the front
    config.row = MINT_ROW
    config.of_row = ("cpu", "h200", "published_loads")
    config.service = "h200"  # of the grids limits and engines
    config.depths = (96, 112, 120, 256)  # the product's default is 256
    config.engines = (4, 16)
    config.zipf = {  # requests, warm, rate: per engine
        "kind": "zipf",
        "names": 100_000,
        "zipf": 1.0,
        "requests": 600,
        "tokens": 32,
        "rate": 30.0,
        "warm": 600,
    }
    config.million = {
        "kind": "zipf",
        "names": 1_000_000,
        "zipf": 1.0,
        "requests": 15_000,
        "tokens": 32,
        "concurrency": 2300,
        "warm": 15_000,
    }
    config.of_million = ("cpu", "h200")
    config.million_engines = (16, 32, 48, 64, 96, 128)
    config.target_s = 2.0  # p95 of a request's time
    if size == "ci":
        config.n = config.few = 2
        config.row.update({"names": 128, "requests": 300, "concurrency": 60, "prewarm": 8})
        config.of_row = ("cpu",)
        config.depths = (8, 256)
        config.engines = (2, 4)
        config.zipf.update({"names": 1000, "requests": 60, "warm": 20})
        config.million.update({"names": 1000, "requests": 300, "concurrency": 60, "warm": 100})
        config.of_million = ("h200",)
        config.million_engines = (2, 4)
    elif size != "default":
        raise ValueError(f"fleet size {size!r}; expected default or ci")
    return config
