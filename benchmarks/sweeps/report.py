"""Writes a sweep's report: ``report.json``, and ``report.md`` with others' figures."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import tables, timing
from mint_jax.files import write_file


def write(report: dict[str, Any], workdir: Path) -> None:
    """Writes both files."""
    write_file(workdir / "report.json", json.dumps(report, indent=1) + "\n")
    write_file(workdir / "report.md", markdown(report))


def markdown(report: Mapping[str, Any]) -> str:
    """The report as a page: a table a grid, pictures, what failed, and where the figures come
    from.
    """
    parts = [f"# Sweep {report['sweep']}, {report['size']}", report["claim"]]
    for name, grid in report["grids"].items():
        points = [point for point in report["points"] if point["grid"] == name]
        references = [one for one in report["references"] if one["grid"] == name]
        parts += [f"## {name}", *filter(None, [grid["about"]]), table_of(points, references)]
        parts += dict.fromkeys(
            f"{one['who']}: {one['source']}{'; ' + one['note'] if one['note'] else ''}."
            for one in references
        )
    parts += [f"![{name}]({name})" for name in report["pictures"]]
    parts += ["## Where it comes from", *sources(report["points"])]
    return "\n\n".join(parts) + "\n"


def table_of(points: Sequence[Mapping[str, Any]], references: Iterable[Mapping[str, Any]]) -> str:
    """Settings, then figures with interval and n; below ours what others report; a failed point has
    its reason.
    """
    references = list(references)
    ours = [(point, row) for point in points for row in point["rows"]]
    settings = _names([row["settings"] for _, row in ours] + [one["settings"] for one in points])
    figures = _names([row["figures"] for _, row in ours] + [one["figures"] for one in references])
    head = ["whose", *settings, *figures]
    lines = [_line(head), "|" + " --- |" * len(head)]
    for point in points:
        for row in point["rows"]:
            cells = _values(settings, row["settings"]) + _values(figures, row["figures"])
            lines.append(_line(["ours", *cells]))
        if point["state"] == "failed":
            reason = [f"failed: {point['reason']}", *[""] * (len(figures) - 1)]
            lines.append(_line(["ours", *_values(settings, point["settings"]), *reason]))
    for one in references:
        cells = _values(settings, one["settings"]) + _values(figures, one["figures"])
        lines.append(_line([one["who"], *cells]))
    return "\n".join(lines)


def sources(points: Iterable[Mapping[str, Any]]) -> list[str]:
    """A line for each commit and machine; a point's command is in ``report.json``."""
    found: dict[str, list[str]] = {}
    for point in points:
        if "commit" in point:
            at = f"{tables.source({'stamp': point})}, {point['machine']['devices']}"
            found.setdefault(at, []).append(point["date"])
    return [
        f"{len(dates)} points {at}; {min(dates)} to {max(dates)}." for at, dates in found.items()
    ]


def shown(figure: Any) -> str:
    """A figure as tables have it: ``1.73 (1.7 to 1.8, n 5)``."""
    if timing.is_figure(figure):
        low, high = figure["interval"]
        value = _number(timing.value(figure))
        return f"{value} ({_number(low)} to {_number(high)}, n {figure['n']:,})"
    if isinstance(figure, int | float) and not isinstance(figure, bool):
        return _number(figure)
    return "" if figure is None else str(figure)


def _number(value: float) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _names(dicts: Iterable[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for one in dicts for name in one))


def _values(names: Sequence[str], of: Mapping[str, Any]) -> list[str]:
    return [shown(of.get(name)) for name in names]


def _line(cells: Iterable[Any]) -> str:
    words = (str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells)
    return "| " + " | ".join(words) + " |"
