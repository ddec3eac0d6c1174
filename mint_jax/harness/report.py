"""Results as people look at them: tables on the terminal and pictures."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

_console = Console(stderr=True, highlight=False)


def table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[Any]],
    console: Console = _console,
) -> None:
    """Prints a table, by default on stderr. Where its numbers do not fit the terminal, each row is
    a table of its own.
    """
    out = Table(title=title or None, title_justify="left")
    for i, column in enumerate(columns):
        numeric = all(isinstance(row[i], int | float) for row in rows)
        justify = "right" if numeric else "left"
        out.add_column(column, justify=justify, no_wrap=numeric, overflow="fold")
    for row in rows:
        out.add_row(*map(_shown, row))
    # a measure is cut to the width that is given
    unbounded = console.options.update(max_width=1 << 16)
    if Measurement.get(console, unbounded, out).minimum <= console.width or len(columns) < 3:
        console.print(out)
        return
    for k, row in enumerate(rows):
        single = Table(columns[0], _shown(row[0]), title=(title or None) if k == 0 else None)
        for column, value in zip(columns[1:], row[1:]):
            single.add_row(column, _shown(value))
        console.print(single)


def _shown(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else escape(str(value))


def result(found: Mapping[str, Any], file: Path) -> None:
    """Prints a job's result on stdout: each list of records as a table, in which a revision is
    ``policy@3``, then the single values, and the file that has all of it.
    """
    for key, rows in found.items():
        if not isinstance(rows, list) or not rows or not isinstance(rows[0], dict):
            continue
        if {"name", "number", "revision"} <= rows[0].keys():
            rows = [row | {"revision": f"{row['name']}@{row['number']}"} for row in rows]
        columns = [n for n, value in rows[0].items() if _is_single(value) and n != "number"]
        cells = [[row.get(name, "") for name in columns] for row in rows]
        table(f"{found.get('job', '')} {key}".strip(), columns, cells, Console(highlight=False))
    single = [f"{k} {v}" for k, v in found.items() if _is_single(v) and k != "job"]
    whole: Any = {"break_long_words": False, "break_on_hyphens": False}
    print(*textwrap.wrap(", ".join(single), 120, **whole), sep="\n")
    print(f"result: {file}", flush=True)


def _is_single(value: Any) -> bool:
    return isinstance(value, int | float | str)


def curves(
    rows: Mapping[str, Sequence[Mapping[str, Any]]],
    metric: str,
    file: Path,
    held_out: Mapping[str, tuple[float, float]] = MappingProxyType({}),
) -> None:
    """Draws a metric over the steps, one panel a policy: its value, its moving mean, and the
    held-out value before and after training where that is given.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = min(4, len(rows))
    lines = -(-len(rows) // columns)
    size = (3.4 * columns, 2.8 * lines)
    figure, axes = plt.subplots(lines, columns, figsize=size, squeeze=False, sharey=True)
    for ax in axes.flat[len(rows) :]:
        ax.axis("off")
    for ax, (name, steps) in zip(axes.flat, rows.items()):
        values = [step[metric] for step in steps]
        numbers = range(1, len(values) + 1)
        smooth = [np.mean(values[max(0, i - 5) : i]) for i in numbers]
        ax.plot(numbers, values, lw=0.8, alpha=0.5, color="C0")
        ax.plot(numbers, smooth, lw=1.8, color="C0", label="training, mean of 5")
        ax.set(title=name, xlabel="step")
        ax.grid(alpha=0.3)
        if name in held_out:
            ax.plot([0, len(values)], held_out[name], "o", color="C3", label="held out")
            ax.set_title("{}: {:.2f} → {:.2f}".format(name, *held_out[name]))
    axes[0, 0].set_ylabel(metric)
    axes[0, 0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    plt.close(figure)
