"""Compares two reports: ``python -m benchmarks.compare A B`` prints a table of common figures.

A and B are reports of one benchmark or one sweep: files, or folders with a ``report.json`` or a
``result.json``. A figure is matched by its name and the settings of its row. Figures whose
intervals do not overlap are marked ``outside``; a count has no interval, so any difference is.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import timing
from benchmarks.sweeps.report import shown
from benchmarks.tables import source
from mint_jax import stamp
from mint_jax.errors import UserError

FILES = ("report.json", "result.json")
IGNORED = ("stamp", "config", "command", "load_average")


class Line(NamedTuple):
    """One figure of two reports, named by its path and, of a sweep, the settings of its row."""

    name: str
    a: Any
    b: Any

    @property
    def ratio(self) -> float | None:
        """b / a; None where a is 0."""
        return timing.value(self.b) / timing.value(self.a) if timing.value(self.a) else None

    @property
    def is_outside(self) -> bool:
        """True where the intervals do not overlap."""
        (low_a, high_a), (low_b, high_b) = (
            one["interval"] if timing.is_figure(one) else (one, one) for one in (self.a, self.b)
        )
        return high_a < low_b or high_b < low_a


def read(path: Path) -> dict[str, Any]:
    """Loads a report."""
    file = next((path / name for name in FILES if (path / name).is_file()), path)
    try:
        report = stamp.load(file)
    except (OSError, ValueError) as error:
        report = error
    if not isinstance(report, dict):
        raise UserError(
            f"{path} is no report ({report}): give a JSON file, or a folder with"
            f" {' or '.join(FILES)}"
        )
    return report


def compare(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Line]:
    """Returns the figures that both reports have."""
    second = dict(figures_of(b))
    lines = [Line(name, found, second[name]) for name, found in figures_of(a) if name in second]
    if not lines:
        raise UserError(
            "the reports have no figure in common: give two of one sweep or of one benchmark"
        )
    return lines


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


def table(lines: list[Line]) -> str:
    """Returns a Markdown table: both figures, their ratio and the mark."""
    out = ["| figure | A | B | B / A | |", "|" + " --- |" * 5]
    for line in lines:
        ratio = "" if line.ratio is None else f"{line.ratio:.3g}"
        mark = "outside" if line.is_outside else ""
        out.append(f"| {line.name} | {shown(line.a)} | {shown(line.b)} | {ratio} | {mark} |")
    return "\n".join(out)


def main() -> None:
    parser = argparse.ArgumentParser("benchmarks.compare", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("a", type=Path, metavar="A")
    parser.add_argument("b", type=Path, metavar="B")
    given = parser.parse_args()
    try:
        a, b = read(given.a), read(given.b)
        lines = compare(a, b)
        print(f"A: {source(a)}\n\nB: {source(b)}\n\n{table(lines)}\n")
        print(f"{sum(line.is_outside for line in lines)} of {len(lines)} figures are outside.")
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
