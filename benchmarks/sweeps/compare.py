"""Two reports side by side: of two runs, or ours and what others report; a difference outside of
the intervals is flagged.

A figure is found in the other report by its name and by the settings of its row. What was counted
has no interval: any difference is one. Of two figures with intervals a difference is flagged where
these do not overlap, which at 95 % each is stricter than a test at 95 %.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import timing
from benchmarks.sweeps.report import shown
from mint_jax.errors import UserError

IGNORED = ("stamp", "config", "command", "load_average")
DRAWN = 40  # figures, the farthest apart first


class Line(NamedTuple):
    """One figure on both sides.

    Attributes:
        where: grid and settings of its row; empty in a bench's report.
        name: of the figure.
        a, b: a figure, or a number.
        who: whose b is.
    """

    where: str
    name: str
    a: Any
    b: Any
    who: str

    @property
    def ratio(self) -> float | None:
        """b over a; None where a is 0."""
        return timing.value(self.b) / timing.value(self.a) if timing.value(self.a) else None

    @property
    def outside(self) -> bool:
        """Whether the two differ by more than their intervals explain."""
        (low_a, high_a), (low_b, high_b) = _ends(self.a), _ends(self.b)
        return high_a < low_b or high_b < low_a


def two(a: Mapping[str, Any], b: Mapping[str, Any], who: str = "B") -> list[Line]:
    """The figures that both reports have.

    Raises:
        UserError: there are none.
    """
    others = {(where, name): figure for where, name, figure in figures_of(b)}
    lines = [
        Line(where, name, mine, others[where, name], who)
        for where, name, mine in figures_of(a)
        if (where, name) in others
    ]
    if not lines:
        raise UserError(
            "the two reports have no figure in common: they must be of one sweep or one bench, and"
            " of common settings"
        )
    return lines


def with_references(report: Mapping[str, Any]) -> list[Line]:
    """Our figures beside those that others report of the same settings; a setting that one side
    does not name is not compared.
    """
    lines = []
    for one in report.get("references", ()):
        for where, settings, figures in _rows(report):
            shared = settings.keys() & one["settings"].keys()
            if where.split(":")[0] == one["grid"] and all(
                settings[name] == one["settings"][name] for name in shared
            ):
                both = (
                    name
                    for name, value in one["figures"].items()
                    if _is_number(value) and _is_number(figures.get(name))
                )
                lines += [
                    Line(where, name, figures[name], one["figures"][name], one["who"])
                    for name in both
                ]
    return lines


def figures_of(report: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Grid and settings, name and value of each figure; of a bench's report all that has an
    interval, by its path.
    """
    if "points" in report and "sweep" in report:
        for where, _, figures in _rows(report):
            yield from (
                (where, name, figure) for name, figure in figures.items() if _is_number(figure)
            )
    else:
        yield from (("", path, figure) for path, figure in _walk(report, ""))


def _rows(report: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
    for point in report["points"]:
        for row in point["rows"]:
            words = ", ".join(f"{name} {value}" for name, value in row["settings"].items())
            yield f"{point['grid']}: {words}", row["settings"], row["figures"]


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


def _ends(figure: Any) -> tuple[float, float]:
    return tuple(figure["interval"]) if timing.is_figure(figure) else (figure, figure)


def _is_number(figure: Any) -> bool:
    return timing.is_figure(figure) or (
        isinstance(figure, int | float) and not isinstance(figure, bool)
    )


def table(lines: Sequence[Line], a: str, b: str) -> str:
    """Markdown: both sides, their ratio, and a flag."""
    out = [f"| where | figure | {a} | {b} | {b} / {a} | |", "|" + " --- |" * 6]
    for line in lines:
        ratio = "" if line.ratio is None else f"{line.ratio:.3g}"
        other = shown(line.b) if line.who == b else f"{shown(line.b)}, {line.who}"
        out.append(
            f"| {line.where} | {line.name} | {shown(line.a)} | {other} | {ratio} |"
            f" {'outside' if line.outside else ''} |"
        )
    return "\n".join(out)


def draw(lines: Sequence[Line], a: str, b: str, path: Path) -> None:
    """b over a of each figure, with what its intervals allow; filled where it is outside of
    them.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    ratios = [(line, line.ratio) for line in lines if line.ratio is not None and line.ratio > 0]
    chosen = sorted(ratios, key=lambda one: -max(one[1], 1 / one[1]))[:DRAWN]
    figure, ax = plt.subplots(figsize=(9, 1 + 0.28 * max(1, len(chosen))))
    for k, (line, ratio) in enumerate(chosen):
        (low_a, high_a), (low_b, high_b) = _ends(line.a), _ends(line.b)
        if low_a > 0 and low_b > 0:
            ax.plot([low_b / high_a, high_b / low_a], [k, k], color="C0", lw=1)
        ax.plot(
            [ratio],
            [k],
            "o",
            color="C3" if line.outside else "C0",
            mfc="C3" if line.outside else "w",
        )
    ax.axvline(1.0, color="grey", lw=0.8)
    ax.set_yticks(
        range(len(chosen)), [f"{line.where} {line.name}"[-70:] for line, _ in chosen], fontsize=6
    )
    ax.invert_yaxis()
    ax.set_xscale("log")
    ax.set_xlabel(f"{b} / {a}; filled: outside of the intervals")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
