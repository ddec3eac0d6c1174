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
    stamps = [result["stamp"] for result in results]
    extra = {"seeds": list(point.of.seeds)} if point.of.seeds else {}
    return entry | {"rows": rows} | extra | {name: stamps[-1][name] for name in STAMP}


def _row(
    point: Point,
    settings: dict[str, Any],
    results: Sequence[Any],
    runs: Sequence[Run],
    workdir: Path,
) -> dict[str, Any]:
    figures = {
        name: merged([figure_at(result, path, settings) for result in results])
        for name, path in point.of.figures.items()
    }
    row: dict[str, Any] = {"settings": settings, "figures": figures}
    if point.of.curve:
        name = point.of.curve_of.format(**settings)
        row["curve"] = band(
            [_column(run.folder(workdir) / "metrics.jsonl", name, point.of.curve) for run in runs]
        )
    return row


def merged(values: Sequence[Any]) -> Any:
    """One run's figure as it is; of several the median, smallest and largest value."""
    if len(values) == 1:
        return values[0]
    return timing.merge([float(timing.value(value)) for value in values])


def band(columns: Sequence[Mapping[int, float]]) -> dict[str, list[float] | int]:
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
