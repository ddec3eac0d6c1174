"""Draws a sweep: figures over a setting, and curves with bands."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import timing
from benchmarks.sweeps.grid import Picture

KINDS = ("lines", "curves")


def draw(pictures: Mapping[str, Picture], report: Mapping[str, Any], workdir: Path) -> list[str]:
    """Draws those of which there are rows; names of the files in the workdir."""
    drawn = []
    for name, picture in pictures.items():
        points = [point for point in report["points"] if point["grid"] == picture.grid]
        if rows := [row for point in points for row in point["rows"]]:
            references = [one for one in report["references"] if one["grid"] == picture.grid]
            references = [one for one in references if picture.y in one["figures"]]
            kind = {"lines": _lines, "curves": _curves}[picture.kind]
            kind(picture, rows, references, workdir / f"{name}.png")
            drawn.append(f"{name}.png")
    return drawn


def _grouped(rows: Iterable[Any], names: Iterable[str]) -> dict[str, list[Any]]:
    """Rows by the values of some settings, as a label: ``rank 8, policy adder``."""
    names, out = list(names), dict[str, list[Any]]()
    for row in rows:
        label = ", ".join(f"{name} {row['settings'][name]}" for name in names)
        out.setdefault(label, []).append(row)
    return out


def _panels(picture: Picture, rows: Sequence[Any]) -> tuple[Any, list[tuple[Any, list[Any]]]]:
    """Returns a figure with a panel for each value of ``picture.panels``, and their rows."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = _grouped(rows, filter(None, [picture.panels]))
    size = (4.6 * len(panels), 3.6)
    figure, axes = plt.subplots(1, len(panels), figsize=size, squeeze=False, sharey=True)
    for ax, title in zip(axes.flat, panels):
        ax.set_title(title)
        ax.grid(alpha=0.3)
    axes.flat[0].set_ylabel(picture.y)
    return figure, list(zip(axes.flat, panels.values()))


def _lines(picture: Picture, rows: Sequence[Any], references: Sequence[Any], path: Path) -> None:
    figure, panels = _panels(picture, rows)
    for ax, shown in panels:
        for label, line in _grouped(shown, picture.by).items():
            points = [(row["settings"][picture.x], row["figures"].get(picture.y)) for row in line]
            points = [(x, y) for x, y in points if y is not None]
            if not points:
                continue
            ends = [y["interval"] if timing.is_figure(y) else [y, y] for _, y in points]
            middle = [timing.value(y) for _, y in points]
            low = [max(0.0, m - end[0]) for m, end in zip(middle, ends)]
            high = [max(0.0, end[1] - m) for m, end in zip(middle, ends)]
            style = {"marker": "o", "ms": 4, "capsize": 2, "label": label or "ours"}
            ax.errorbar([x for x, _ in points], middle, yerr=[low, high], **style)
        _references(ax, picture, references)
        ax.set_xlabel(picture.x)
        if "x" in picture.log:
            ax.set_xscale("log", base=2)
            values = sorted({row["settings"][picture.x] for row in shown})
            ax.set_xticks(values, [_short(x) for x in values], minor=False)
        if "y" in picture.log:
            ax.set_yscale("log")
        ax.legend(fontsize=7)
    _save(figure, path)


def _short(x: float) -> str:
    """A number as a label of few characters."""
    for size, unit in ((10**6, "M"), (10**3, "k")):
        if x >= size and x % (size // 10) == 0:
            return f"{x / size:g}{unit}"
    return f"{x:g}" if x < 10**6 else f"{x:.0f}"


def _references(ax: Any, picture: Picture, references: Sequence[Any]) -> None:
    """Draws others' figures: a star where their setting is known, else a line across."""
    for k, one in enumerate(references):
        at, value = one["settings"].get(picture.x), timing.value(one["figures"][picture.y])
        words = " ".join(str(v) for name, v in one["settings"].items() if name != picture.x)
        label, colour = f"{one['who']} {words}".strip(), f"C{5 + k % 5}"
        if isinstance(at, int | float):
            ax.plot([at], [value], "*", ms=11, color=colour, label=label)
        else:
            ax.axhline(value, ls="--", lw=1, color=colour, label=label)


def _curves(picture: Picture, rows: Sequence[Any], references: Sequence[Any], path: Path) -> None:
    figure, panels = _panels(picture, rows)
    lines: dict[str, Any] = {}  # one legend for all panels, below them: curves leave no corner free
    for ax, shown in panels:
        series = _grouped(shown, picture.by)
        for label, [row, *_] in series.items():
            curve = row["curve"]
            [line] = ax.plot(curve["steps"], curve["median"])
            look = {"alpha": 0.5 / max(3, len(series)), "color": line.get_color()}
            ax.fill_between(curve["steps"], curve["low"], curve["high"], **look)
            lines.setdefault(f"{label or 'ours'}, n {curve['n']}", line)
        ax.set_xlabel("step")
    wide = 0.065 * max(map(len, lines)) + 0.6  # inches, of an entry
    across = max(1, min(len(lines), int(figure.get_figwidth() / wide)))
    rows_of_legend = -(-len(lines) // across)
    figure.legend(lines.values(), lines, fontsize=8, loc="lower center", ncols=across)
    _save(figure, path, below=0.06 * rows_of_legend + 0.02)


def _save(figure: Any, path: Path, below: float = 0.0) -> None:
    """Args: ``below``: the share of the height that stays free at the bottom."""
    import matplotlib.pyplot as plt

    figure.tight_layout(rect=(0, below, 1, 1))
    figure.savefig(path, dpi=110)
    plt.close(figure)
