"""Compares two reports: ``python -m benchmarks.compare A B`` prints a table of common figures.

A and B are reports of one benchmark or one sweep: files, or folders with a ``report.json`` or a
``result.json``. A figure is matched by its name and the settings of its row. Figures whose
intervals do not overlap are marked ``outside``; a count has no interval, so any difference is.
"""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks import timing
from benchmarks.sweeps.report import shown
from benchmarks.tables import source
from mint_jax import stamp

FILES = ("report.json", "result.json")
IGNORED = ("stamp", "config", "command", "load_average")


def figures_of(report: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the figures of a report: a sweep's row by row, a benchmark's by path."""
    if "sweep" not in report:
        yield from _walk(report, "")
        return
    for point in report["points"]:
        for row in point["rows"]:
            words = ", ".join(f"{name} {value}" for name, value in row["settings"].items())
            for name, figure in row["figures"].items():
                if isinstance(figure, dict | int | float) and not isinstance(figure, bool):
                    yield f"{point['grid']}: {words}: {name}", figure


def _walk(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    if timing.is_figure(tree):
        yield path, tree
    elif isinstance(tree, dict):
        for name, child in tree.items():
            if name not in IGNORED:
                yield from _walk(child, f"{path}/{name}" if path else name)
    elif isinstance(tree, list):
        for k, child in enumerate(tree):
            name = child.get("name", k) if isinstance(child, dict) else k
            yield from _walk(child, f"{path}/{name}")


def is_outside(a: Any, b: Any) -> bool:
    """True where the intervals of two figures do not overlap."""
    (low_a, high_a), (low_b, high_b) = (
        one["interval"] if timing.is_figure(one) else (one, one) for one in (a, b)
    )
    return high_a < low_b or high_b < low_a


def table(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    """Returns a Markdown table of common figures: both, their ratio and the mark."""
    second = dict(figures_of(b))
    out = ["| figure | A | B | B / A | |", "|" + " --- |" * 5]
    for name, x in figures_of(a):
        if (y := second.get(name)) is not None:
            ratio = f"{timing.value(y) / timing.value(x):.3g}" if timing.value(x) else ""
            mark = "outside" if is_outside(x, y) else ""
            out.append(f"| {name} | {shown(x)} | {shown(y)} | {ratio} | {mark} |")
    return "\n".join(out)


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    folders = map(Path, sys.argv[1:])
    files = [next((f / n for n in FILES if (f / n).is_file()), f) for f in folders]
    if missing := [str(file) for file in files if not file.is_file()]:
        sys.exit(f"{missing[0]} does not exist: give two reports, or folders with {FILES[0]}")
    a, b = map(stamp.load, files)
    print(f"A: {source(a)}\n\nB: {source(b)}\n\n{table(a, b)}")


if __name__ == "__main__":
    main()
