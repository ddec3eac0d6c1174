"""MinT's row on timed engines behind the product's front, beside its simulation and Ray Serve.

Command: python -m benchmarks --config=configs/bench/fleet_timed.py --workdir=runs/bench/fleet_timed
Short:   --config=configs/bench/fleet_timed.py:ci
Default size: about 8 minutes on two idle CPU cores. `many`, 16 engines whose loads take as long as
MinT published, also behind Ray Serve: about 45 minutes, of which the CPU is idle for most.
`most`: 64 engines of a quarter of that speed, without Ray Serve, about 10 minutes: at full speed
front, clients and engines in one process need more than two cores (median 3.5 times the simulated).
"""

from ml_collections import ConfigDict

from benchmarks.fleet_simulation import MINT_ROW, SERVICES


def get_config(size: str = "default") -> ConfigDict:
    config = ConfigDict()
    config.bench = "fleet_timed"
    config.service = ConfigDict(SERVICES["cpu"])
    config.engines = 2
    config.n = 3  # seeds
    config.seed = 0
    config.slots = 32
    config.host = 2048
    config.ray_serve = False  # the same engines behind Ray Serve, twice
    config.report_s = 0.25  # between an engine's reports, as the front asks
    config.row = ConfigDict(MINT_ROW)
    if size == "ci":
        config.n, config.ray_serve = 1, True
        config.row.update({"names": 128, "requests": 300, "concurrency": 60, "prewarm": 8})
    elif size == "many":
        config.service = ConfigDict(SERVICES["published_loads"])
        config.engines = 16
        config.ray_serve = True
    elif size == "most":
        one = SERVICES["published_loads"]
        slow = {name: 4 * one[name] for name in ("load_s", "next_load_s")}
        slow["steps"] = tuple((rows, 4 * seconds) for rows, seconds in one["steps"])
        config.service = ConfigDict(one | slow)
        config.engines = 64
    elif size != "default":
        raise ValueError(f"fleet_timed size {size!r}; expected default, many, most or ci")
    return config
