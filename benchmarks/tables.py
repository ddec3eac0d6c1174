"""Fills the tables of README and docs from the reports under ``notebooks/reports``.

A page has ``<!-- figures:NAME -->`` and ``<!-- /figures -->``; the text between them is
``templates/NAME.md`` with its fields filled in. A field is ``{report:path|format}``:

- ``report`` is a file below ``notebooks/reports/cpu-2-cores`` or ``notebooks/reports``;
- ``path`` has keys joined by dots; an entry of a list is found by its ``name`` or as ``last``, and
  a row of a sweep by its settings: ``grid[rank=1,path=disk].figure``. ``a over b`` is a ratio;
- ``format`` is a name in ``MEASURED``, which takes figures with an interval, or in ``PLAIN``.

``{spread}`` lists the intervals of its line's measured fields, ``{sources}`` the commit and machine
of all reports on the page, ``{accelerators}`` what ran on accelerators. ``python -m
benchmarks.tables`` writes the pages.
"""

import re
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import timing
from mint_jax import stamp

REPORTS = stamp.ROOT / "notebooks" / "reports"
CPU, PODS = REPORTS / "cpu-2-cores", REPORTS / "tpu-aot"
TEMPLATES = Path(__file__).with_name("templates")
PAGES = (
    stamp.ROOT / "README.md",
    *(
        stamp.ROOT / "docs" / f"{name}.md"
        for name in ("numbers", "kernels", "pods", "sweeps", "beyond")
    ),
)
_BLOCK = re.compile(r"(<!-- figures:(\w+) -->\n).*?(<!-- /figures -->)", re.DOTALL)
FIELD = re.compile(r"\{([\w/-]+):([^{}|]+)\|(\w+)\}")


def _digits(x: float) -> str:
    """Formats three significant digits; whole numbers from 100 on."""
    if abs(x) >= 100:
        return f"{x:,.0f}"
    return f"{x:.3g}" if x == 0 or abs(x) >= 10 else f"{x:.{2 if abs(x) >= 1 else 3}f}"


MEASURED: dict[str, tuple[Callable[[float], str], str]] = {  # format -> number, unit
    "times": (_digits, "×"),
    "ratio": (lambda x: f"{x:.2f}", ""),
    "percent": (lambda x: f"{100 * x:+.3g}", " %"),
    "s": (_digits, " s"),
    "ms": (lambda x: f"{x:.2g}" if x < 1 else f"{x:.1f}", " ms"),
    "3": (lambda x: f"{x:.3f}", ""),
}
PLAIN: dict[str, Callable[[Any], str]] = {
    "count": lambda x: f"{timing.value(x):,.0f}",
    "G": lambda x: f"{x / 1e9:.4g} G",
    "MB": lambda x: f"{timing.value(x) / 1e6:,.0f} MB",
    "GB": lambda x: f"{timing.value(x) / 1e9:.1f} GB",
    "most_GB": lambda x: f"{max(x['interval']) / 1e9:.1f} GB",
    "median": lambda x: f"{timing.value(x):g}",
    "share": lambda x: f"{x:.3f}",
    "part": lambda x: f"{100 * x:.1f} %",
    "whole_part": lambda x: f"{100 * x:.0f} %",
    "of_100": lambda x: f"{x:.2g} %",
    "range": lambda x: "{:.0f} to {:.0f}".format(*x["interval"]),
    "ends": lambda x: "{:.3f} ({:.3f} to {:.3f})".format(timing.value(x), *x["interval"]),
    "text": str,
    "list": lambda x: ", ".join(map(str, x)),
    "reasons": lambda x: "; ".join(f"`{name}`: {why}" for name, why in x.items()),
    "sent": lambda x: (
        ("≥ " if any(kind["at_least"] for kind in x.values()) else "")
        + f"{sum(kind['bytes'] for kind in x.values()) / 1e9:.1f} GB"
    ),
    "bound": lambda x: f"{x['bound']}, {_digits(1e3 * x['step_s'])} ms",
}


class Reports:
    """Committed reports, loaded when a field first names them."""

    def __init__(self) -> None:
        self.loaded: dict[str, dict[str, Any]] = {}

    def __getitem__(self, name: str) -> dict[str, Any]:
        if name not in self.loaded:
            files = (CPU / f"{name}.json", CPU / name / "report.json", REPORTS / f"{name}.json")
            self.loaded[name] = stamp.load(next(filter(Path.is_file, files), files[0]))
        return self.loaded[name]

    def field(self, name: str, path: str) -> Any:
        """Returns the value at a path of a report.

        The interval of a ratio of two figures spans the ends of both.
        """
        if " over " in path:
            top, _, below = path.partition(" over ")
            other, _, below = below.rpartition(":")
            above, divisor = self.field(name, top), self.field(other or name, below)
            if not timing.is_figure(above):
                return above / divisor
            (low, high), (least, most) = above["interval"], divisor["interval"]
            whole, n = above["median"] / divisor["median"], min(above["n"], divisor["n"])
            return {"median": whole, "interval": [low / most, high / least], "n": n}
        if row := re.fullmatch(r"(\w+)\[(.*)\]\.(\w+)", path):
            return _row(self[name], *row.groups())
        found: Any = self[name]
        for key in path.split("."):
            if isinstance(found, list):
                found = {row.get("name"): row for row in found} | {"last": found[-1]}
            if not isinstance(found, Mapping) or key not in found:
                raise KeyError(f"report {name} has no {path}")
            found = found[key]
        return found

    def sources(self) -> str:
        """Returns commit, machine and versions of every report that was named."""
        groups: dict[str, list[str]] = {}
        for name, report in self.loaded.items():
            groups.setdefault(source(report), []).append(name.rpartition("/")[2])
        if len(groups) == 1:
            return next(iter(groups))
        return "; ".join(f"{at} ({', '.join(names)})" for at, names in groups.items())


def _row(report: Mapping[str, Any], grid: str, settings: str, figure: str) -> Any:
    """Returns a figure of the one row of a sweep that has these settings."""
    wanted = dict(one.split("=", 1) for one in re.split(r",(?=\w+=)", settings) if one)
    found = []
    for row in (row for at in report["points"] if at["grid"] == grid for row in at["rows"]):
        own = {key: str(value) for key, value in row["settings"].items()}
        if wanted.items() <= own.items() and figure in row["figures"]:
            found.append(row["figures"][figure])
    if len(found) != 1:
        raise KeyError(f"{len(found)} rows of {report['sweep']} have {grid}[{settings}].{figure}")
    return found[0]


def source(report: Mapping[str, Any]) -> str:
    """Returns commit, machine and versions of a report, as pages show them."""
    at = report["points"][0] if "points" in report else report.get("stamp")
    if at is None:
        return "before reports carried their commit"
    machine = at["machine"]
    return (
        f"at `{at['commit'][:10]}`{' with changes' if at['dirty'] else ''} on {machine['cpu']},"
        f" {machine['cores']} cores, {machine['memory_bytes'] / 1e9:.0f} GB; jax"
        f" {at['versions']['jax']}"
    )


def shown(found: Any, kind: str, spread: list[str]) -> str:
    """Formats a value; interval and n of a measured one are appended to ``spread``."""
    if kind in PLAIN:
        return PLAIN[kind](found)
    number, unit = MEASURED[kind]
    if timing.is_figure(found):
        low, high = map(number, found["interval"])
        spread.append(f"{low} to {high}, {found['n']:,}")
    return number(timing.value(found)) + unit


def fill(template: str) -> str:
    """Fills in the fields of a template."""
    reports, lines = Reports(), []
    for line in template.splitlines():
        spread: list[str] = []
        line = FIELD.sub(lambda at, s=spread: shown(reports.field(at[1], at[2]), at[3], s), line)
        lines.append(line.replace("{spread}", " / ".join(spread)))
    text = "\n".join(lines).replace("{sources}", reports.sources())
    if "{accelerators}" in text:
        text = text.replace("{accelerators}", _accelerators())
    wrapped = [
        line if line.startswith("|") else textwrap.fill(line, 118, break_on_hyphens=False)
        for line in text.splitlines()
    ]
    return "\n".join(wrapped) + "\n"


def _accelerators() -> str:
    """Returns a sentence that names the reports measured on accelerators."""
    measured: dict[str, list[str]] = {}
    for file in sorted(REPORTS.glob("*/*.json")):
        if file.parent not in (CPU, PODS):
            device = stamp.load(file)["stamp"]["machine"]["devices"]
            measured.setdefault(device, []).append(f"`{file.stem}`")
    ran = "; ".join(f"{', '.join(names)} on {device}" for device, names in measured.items())
    here = f"Measured on an accelerator: {ran}." if ran else "Nothing was run on an accelerator."
    if not any("TPU" in device for device in measured):
        here += " Nothing was run on a TPU: programs for TPUs are compiled ahead of time."
    return f"{here} All other times are of a CPU."


def render(page: str) -> str:
    """Returns a page with its tables filled in."""
    return _BLOCK.sub(
        lambda at: at[1] + fill((TEMPLATES / f"{at[2]}.md").read_text()) + at[3], page
    )


def write() -> None:
    """Writes all pages."""
    for page in PAGES:
        page.write_text(render(page.read_text()))


if __name__ == "__main__":
    write()
