"""Routers of a simulated fleet at the same requests.

All is simulated (``benchmarks.fleet_simulation``) with service curves of measured reports; other
routers are written here in the style of the products that have them. ``errors``: share of requests
refused in the end; ``refused_first``: by their first engine. ``cold_loads``, ``host_loads``: loads
from storage, from host memory. ``distinct``: names that no engine had loaded; no router has fewer
cold loads. Figures are medians over seeds.

- ``row``: MinT's row, two engines; ``half`` is one engine with half of the clients.
- ``limits``: the row, with engines that accept fewer unfinished loads.
- ``engines``: Zipf's law over more names than host memory holds, at a fixed rate per engine.
- ``million``: how many engines keep 2,300 requests in flight over a million names.
"""

import dataclasses
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import timing
from benchmarks.fleet_simulation import ROUTERS, Fleet, Service, Traffic
from benchmarks.sweeps import pictures
from benchmarks.sweeps.grid import Picture
from benchmarks.sweeps.report import table_of
from mint_jax.files import write_file

FIGURES = ("errors", "refused_first", "p50_s", "p95_s", "cold_loads", "host_loads", "distinct")
PICTURES = {
    "fleet_errors": Picture(grid="limits", x="depth", y="errors", by=("router",)),
    "fleet_cold_loads": Picture(
        grid="engines", x="engines", y="cold_loads", by=("router",), log="xy"
    ),
    "fleet_million": Picture(grid="million", x="engines", y="p95_s", by=("service",), log="xy"),
}


def run(config: Any, workdir: Path) -> dict[str, Any]:
    """Runs the bench; returns its report."""
    services = {
        name: Service(**curve, slots=config.slots, host=config.host)
        for name, curve in config.services.to_dict().items()
    }
    row, zipf, million = (Traffic(**config[name]) for name in ("row", "zipf", "million"))
    half = dataclasses.replace(row, concurrency=row.concurrency // 2)
    rows, runs = [], {}

    def add(grid: str, router: str, service: str, traffic: Traffic, count: int, n: int, **limits):
        settings = {"router": router, "service": service, "engines": count} | limits
        of, found = dataclasses.replace(services[service], **limits), []
        what = " ".join(map(str, (grid, *settings.values())))
        for seed in timing.counted(what, range(config.seed, config.seed + n)):
            found.append(Fleet(of, count, config.report_s, seed).run(router, traffic, seed))
        taken = {name: [one[name] for one in found] for name in FIGURES}
        runs[grid, *settings.values()] = taken
        rows.append({"grid": grid, "settings": settings, "figures": timing.medians_of(taken)})
        return found

    for service in config.of_row:
        for router in ROUTERS:
            add("row", router, service, row, 2, config.n)
    for service in config.of_row:
        add("half", "chooser", service, half, 1, config.n)
    for depth in config.depths:
        for router in ROUTERS:
            add("limits", router, config.service, row, 2, config.few, depth=depth)
    for count in config.engines:
        scaled = {name: getattr(zipf, name) * count for name in ("rate", "warm", "requests")}
        for router in ROUTERS:
            at = dataclasses.replace(zipf, **scaled)
            add("engines", router, config.service, at, count, config.few)
    needed: dict[str, int | None] = dict.fromkeys(config.of_million)
    for service in config.of_million:
        for count in config.million_engines:
            [found] = add("million", "chooser", service, million, count, 1)
            if not found["errors"] and found["p95_s"] <= config.target_s:
                needed[service] = needed[service] or count
    grids = [
        {"grid": name, "rows": [*found], "settings": {}, "state": "done"}
        for name, found in itertools.groupby(rows, key=lambda row: row["grid"])
    ]
    drawn = pictures.draw(PICTURES, {"points": grids, "references": []}, workdir)
    page = [f"## {one['grid']}, simulated\n\n{table_of([one], [])}\n" for one in grids]
    write_file(workdir / "fleet.md", "\n".join(page))
    return {
        "simulated": "all",
        "goals": {service: _goals(runs, service) for service in config.of_row},
        "engines_needed": needed,
        "pictures": drawn,
        "rows": rows,
    }


def _goals(runs: Mapping[tuple, Any], service: str) -> dict[str, Any]:
    """The goals at MinT's row: share of errors, ratios of p95 and of cold loads."""
    row = {router: runs["row", router, service, 2] for router in ROUTERS}
    cold = {router: one["cold_loads"] for router, one in row.items()}
    cold["distinct"] = row["chooser"]["distinct"]
    p95 = {router: one["p95_s"] for router, one in row.items()}
    p95["half"] = runs["half", "chooser", service, 1]["p95_s"]
    return {
        "errors": max(row["chooser"]["errors"]),
        "p95_over_half": timing.ratio(p95, "chooser", "half"),
        "p95_over_oracle": timing.ratio(p95, "chooser", "oracle"),
        "cold_over_activity": timing.ratio(cold, "chooser", "activity"),
        "cold_over_oracle": timing.ratio(cold, "chooser", "oracle"),
        "cold_over_distinct": timing.ratio(cold, "chooser", "distinct"),
    }
