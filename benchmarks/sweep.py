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
        records = runner.run_all(points, workdir, say)
        entries = [rows.entry_of(point, records, workdir) for point in points]
        failed = [entry for entry in entries if entry["state"] == "failed"]
        whole = {name: getattr(made, name) for name in ("bench", "sweep", "size", "claim")}
        whole |= {
            "grids": {n: {"about": g.about, "config": g.config} for n, g in made.grids.items()},
            "points": stamp.without_paths(entries),
            "references": [dataclasses.asdict(one) for one in made.references.values()],
            "failed": len(failed),
        }
        whole["pictures"] = pictures.draw(made.pictures, whole, workdir)
        report.write(whole, workdir)
    finally:
        lock.release()
    done = len(entries) - len(failed)
    say(f"[sweep] {made.sweep}: {done} points done, {len(failed)} failed; {workdir / 'report.md'}")
    for entry in failed:
        say(f"[sweep] {entry['name']} failed: {entry['reason']}")
    return {name: whole[name] for name in ("bench", "sweep", "size", "failed", "pictures")} | {
        "points": len(entries),
        "rows": sum(len(entry["rows"]) for entry in entries),
        "report": str(workdir / "report.json"),
    }


def points_of(made: Settings) -> list[grid.Point]:
    """The points of a sweep's settings, whose names are checked: pictures come last."""
    checks: list[tuple[str, str, Any]] = []  # a setting's name, its value and its choices
    for what, named in (("references", made.references), ("pictures", made.pictures)):
        checks += [(f"{what}.{n}.grid", one.grid, made.grids) for n, one in named.items()]
    for name, picture in made.pictures.items():
        of = made.grids.get(picture.grid, grid.Grid(config=""))
        settings, at = {**of.axes, **of.each}, f"pictures.{name}"
        used = filter(None, (picture.x, picture.panels, *picture.by))
        checks += [(f"{at}.kind", picture.kind, pictures.KINDS)]
        checks += [(f"a setting of {at}", setting, settings) for setting in used]
        if picture.kind == "lines":
            checks += [(f"{at}.y", picture.y, of.figures)]
    for what, value, choices in checks:
        if value not in choices:
            raise choice(what, value, choices)
    return grid.points_of(made.grids)
