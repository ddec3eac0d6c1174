"""Runs a sweep: a grid of points over jobs and benchmarks, each in its own process.

The same command continues a stopped sweep and repeats failed points. One report has all points next
to figures that others report.
"""

import dataclasses
from pathlib import Path
from typing import Any

from benchmarks.sweeps import grid, pictures, report, rows, runner
from mint_jax import stamp
from mint_jax.errors import choice
from mint_jax.harness.start import say
from mint_jax.harness.workdir import WorkdirLock


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a sweep; ``claim`` says in a sentence what it shows."""

    bench: str
    sweep: str
    size: str
    claim: str
    grids: dict[str, grid.Grid]
    references: dict[str, grid.Reference]
    pictures: dict[str, grid.Picture]


def run(made: Settings, workdir: Path) -> dict[str, Any]:
    """Runs the points that are not done, then writes ``report.json``, ``report.md`` and the
    pictures.
    """
    points = points_of(made)
    lock = WorkdirLock(workdir)
    try:
        return _run(made, points, workdir)
    finally:
        lock.release()


def _run(made: Settings, points: list[grid.Point], workdir: Path) -> dict[str, Any]:
    records = runner.run_all(points, workdir, say)
    entries = [rows.entry_of(point, records, workdir) for point in points]
    failed = sum(entry["state"] == "failed" for entry in entries)
    whole = {
        "bench": "sweep",
        "sweep": made.sweep,
        "size": made.size,
        "claim": made.claim,
        "grids": {
            name: {"about": one.about, "config": one.config} for name, one in made.grids.items()
        },
        "points": stamp.without_paths(entries),
        "references": [dataclasses.asdict(one) for one in made.references.values()],
        "failed": failed,
    }
    whole["pictures"] = pictures.draw(made.pictures, whole, workdir)
    report.write(whole, workdir)
    say(
        f"[sweep] {made.sweep}: {len(entries) - failed} points done, {failed} failed;"
        f" {workdir / 'report.md'}"
    )
    for entry in entries:
        if entry["state"] == "failed":
            say(f"[sweep] {entry['name']} failed: {entry['reason']}")
    return {name: whole[name] for name in ("bench", "sweep", "size", "failed", "pictures")} | {
        "points": len(entries),
        "rows": sum(len(entry["rows"]) for entry in entries),
        "report": str(workdir / "report.json"),
    }


def points_of(made: Settings) -> list[grid.Point]:
    """The points of a sweep's settings."""
    for what, named in (("references", made.references), ("pictures", made.pictures)):
        for name, one in named.items():
            if one.grid not in made.grids:
                raise choice(f"{what}.{name}.grid", one.grid, made.grids)
    for name, picture in made.pictures.items():
        of = made.grids[picture.grid]
        if picture.kind not in pictures.KINDS:
            raise choice(f"pictures.{name}.kind", picture.kind, pictures.KINDS)
        for setting in filter(None, (picture.x, picture.panels, *picture.by)):
            if setting not in {**of.axes, **of.each}:
                raise choice(f"a setting of pictures.{name}", setting, {**of.axes, **of.each})
        drawn = of.figures if picture.kind == "lines" else {picture.y: ""}
        if picture.y not in drawn:
            raise choice(f"pictures.{name}.y", picture.y, drawn)
    return grid.points_of(made.grids)
