"""Lays reports side by side: ``python -m benchmarks.report A [B]``.

A and B are reports of sweeps or benches, as files or as folders with a ``report.json`` or
``result.json``. With one of them the table has ours and what others report; with two it has both. A
figure whose difference the intervals do not explain is flagged ``outside``. The table goes to
stdout, with the picture into the folder of ``--out``.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from benchmarks.sweeps import compare
from benchmarks.tables import source
from mint_jax import stamp
from mint_jax.errors import UserError
from mint_jax.files import write_file

FILES = ("report.json", "result.json")


def read(path: Path) -> dict[str, Any]:
    """A report.

    Raises:
        UserError: there is none, or it is no JSON object.
    """
    file = next((path / name for name in FILES if (path / name).is_file()), path)
    if not file.is_file():
        raise UserError(
            f"{path} is no report: give a JSON file, or a folder with {' or '.join(FILES)}"
        )
    try:
        report = stamp.load(file)
    except ValueError as error:
        raise UserError(
            f"{file} is no JSON ({error}): give a report of a sweep or of a bench"
        ) from None
    if not isinstance(report, dict):
        raise UserError(
            f"{file} is a {type(report).__name__}: give a report of a sweep or of a bench"
        )
    return report


def compared(a: dict[str, Any], b: dict[str, Any] | None) -> tuple[list[compare.Line], str, str]:
    """The lines, and what their two columns are called.

    Raises:
        UserError: there is nothing to compare.
    """
    if b is not None:
        return compare.two(a, b), "A", "B"
    lines = compare.with_references(a)
    if not lines:
        raise UserError("the report has no reference with a figure of ours: give a second report")
    return lines, "ours", "theirs"


def _origin(report: dict[str, Any]) -> str:
    if "points" in report and "sweep" in report:
        done = [point for point in report["points"] if "commit" in point]
        stamps = {source({"stamp": point}) for point in done}
        return (
            f"sweep {report['sweep']}, {report['size']},"
            f" {'; '.join(sorted(stamps)) or 'no point is done'}"
        )
    return f"{report.get('bench', report.get('job', 'report'))}, {source(report)}"


def main() -> None:
    parser = argparse.ArgumentParser(
        "benchmarks.report", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("a", type=Path, metavar="A")
    parser.add_argument("b", type=Path, metavar="B", nargs="?")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs") / "report",
        help="folder for comparison.md and comparison.png",
    )
    given = parser.parse_args()
    try:
        a, b = read(given.a), read(given.b) if given.b else None
        lines, left, right = compared(a, b)
        origins = [f"A: {_origin(a)}", *([f"B: {_origin(b)}"] if b else [])]
        outside = sum(line.outside for line in lines)
        text = "\n\n".join(
            [
                *origins,
                compare.table(lines, left, right),
                f"{outside} of {len(lines)} figures are outside of the intervals.",
            ]
        )
        given.out.mkdir(parents=True, exist_ok=True)
        compare.draw(lines, left, right, given.out / "comparison.png")
        write_file(given.out / "comparison.md", text + "\n\n![comparison](comparison.png)\n")
        print(text)
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
