"""Turns the results of runs into rows of a report, merged over seeds."""

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import timing
from benchmarks.sweeps.grid import Point, figure_at
from benchmarks.sweeps.runner import Run, result_of, runs_of

STAMP = ("commit", "dirty", "date", "machine", "versions", "config")


def entry_of(point: Point, records: Mapping[str, dict[str, Any]], workdir: Path) -> dict[str, Any]:
    """A point as the report has it; a finished one has ``rows`` and the keys of ``STAMP`` too."""
    runs = runs_of([point])
    outcomes = [records[run.name] for run in runs]
    failed = [
        f"{run.name}: {one['reason']}" if len(runs) > 1 else one["reason"]
        for run, one in zip(runs, outcomes)
        if one["state"] == "failed"
    ]
    entry = {
        "name": point.name,
        "grid": point.grid,
        "settings": point.settings,
        "state": "failed" if failed else "done",
        "reason": "; ".join(failed),
        "command": outcomes[0]["command"],
        "seconds": round(sum(one["seconds"] for one in outcomes), 1),
        "rows": [],
    }
    if failed:
        return entry
    results = [result_of(run, workdir) for run in runs]
    try:
        rows = [_row(point, settings, results, runs, workdir) for settings in point.rows()]
    except KeyError as error:
        return entry | {"state": "failed", "reason": str(error.args[0])}
    extra = {"seeds": list(point.of.seeds)} if point.of.seeds else {}
    return entry | {"rows": rows} | extra | {name: results[-1]["stamp"][name] for name in STAMP}


def _row(
    point: Point, settings: dict[str, Any], results: list[Any], runs: list[Run], workdir: Path
) -> dict[str, Any]:
    of, row = point.of, {"settings": settings, "figures": {}}
    for name, path in of.figures.items():
        found = [figure_at(result, path, settings) for result in results]
        row["figures"][name] = found[0] if len(found) == 1 else timing.merge(_numbers(found))
    if of.curve:
        name = of.curve_of.format(**settings)
        files = [run.folder(workdir) / "metrics.jsonl" for run in runs]
        row["curve"] = _band([_column(file, name, of.curve) for file in files])
    return row


def _numbers(figures: Sequence[Any]) -> list[float]:
    return [float(timing.value(figure)) for figure in figures]


def _band(columns: Sequence[Mapping[int, float]]) -> dict[str, list[float] | int]:
    """Median, smallest and largest of each step that all runs have."""
    steps = sorted(set.intersection(*(set(column) for column in columns)))
    at = [[column[step] for column in columns] for step in steps]
    return {
        "steps": steps,
        "median": [statistics.median(values) for values in at],
        "low": [min(values) for values in at],
        "high": [max(values) for values in at],
        "n": len(columns),
    }


def _column(path: Path, name: str, column: str) -> dict[int, float]:
    """A column of a policy's rows, by step."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    found = {row["step"]: row[column] for row in rows if row["name"] == name and column in row}
    if not found:
        raise KeyError(f"metrics.jsonl has no {column} of {name}")
    return found
