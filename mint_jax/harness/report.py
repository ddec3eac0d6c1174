"""Results as people look at them: tables on the terminal and pictures."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from mint_jax.envs.env import Example

_console = Console(stderr=True, highlight=False)


def table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[Any]],
    console: Console | None = None,
) -> None:
    """Prints a table, on stderr if no console says otherwise; numbers are right-aligned and never
    broken.

    Columns that do not fit beside the others go to a further table, behind the first column again.
    """
    console = console or _console
    shown: list[int] = []
    # a measure is cut to the width that is asked for
    anything = console.options.update(max_width=1 << 16)
    for i in range(len(columns)):
        wider = _table(title, columns, rows, [*shown, i])
        if len(shown) > 1 and Measurement.get(console, anything, wider).minimum > console.width:
            console.print(_table(title, columns, rows, shown))
            shown, title = [0], ""
        shown.append(i)
    console.print(_table(title, columns, rows, shown))


def _table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], shown: Sequence[int]
) -> Table:
    out = Table(title=title or None, title_justify="left")
    for i in shown:
        numeric = all(isinstance(row[i], int | float) for row in rows)
        out.add_column(
            columns[i], justify="right" if numeric else "left", no_wrap=numeric, overflow="fold"
        )
    for row in rows:
        out.add_row(
            *(f"{row[i]:.3f}" if isinstance(row[i], float) else escape(str(row[i])) for i in shown)
        )
    return out


def result(found: Mapping[str, Any], file: Path) -> None:
    """Prints a job's result on stdout: each list of records as a table, then the single values, and
    where all of it is.
    """
    records = {
        key: value
        for key, value in found.items()
        if isinstance(value, list) and value and isinstance(value[0], dict)
    }
    for key, rows in records.items():
        shown = [_named(row) for row in rows]
        columns = [name for name, value in shown[0].items() if isinstance(value, int | float | str)]
        cells = [[row.get(name, "") for name in columns] for row in shown]
        table(f"{found.get('job', '')} {key}".strip(), columns, cells, Console(highlight=False))
    single = [
        f"{key} {value}"
        for key, value in found.items()
        if isinstance(value, int | float | str) and key != "job"
    ]
    for line in textwrap.wrap(
        ", ".join(single), 120, break_long_words=False, break_on_hyphens=False
    ):
        print(line)
    print(f"result: {file}", flush=True)


def _named(row: Mapping[str, Any]) -> dict[str, Any]:
    """A record whose revision goes by the name that commands take, ``policy@3``, in place of digest
    and number.
    """
    if {"name", "number", "revision"} <= row.keys():
        return {key: value for key, value in row.items() if key != "number"} | {
            "revision": f"{row['name']}@{row['number']}"
        }
    return dict(row)


def completions(
    name: str, examples: Sequence[Example], before: Sequence[str], after: Sequence[str], count: int
) -> None:
    """A policy's first completions, before training and after."""
    rows = []
    for example, old, new in list(zip(examples, before, after))[:count]:
        asked = (
            example.messages
            if isinstance(example.messages, str)
            else example.messages[-1]["content"]
        )
        rows.append((asked, old, new, example.answer))
    table(f"{name}: sample completions", ("prompt", "before", "after", "answer"), rows)


def curves(history: dict[str, list[float]], label: str, path: Path) -> None:
    """One line a policy over its steps."""
    plt = _pyplot()
    figure, ax = plt.subplots(figsize=(6, 3.6))
    for name, values in history.items():
        ax.plot(range(1, len(values) + 1), values, label=name)
    ax.set_xlabel("step")
    ax.set_ylabel(label)
    ax.grid(alpha=0.3)
    ax.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def reward_curves(
    history: dict[str, list[float]], held_out: dict[str, tuple[float, float]], path: Path
) -> None:
    """One panel a policy: training reward a step, its moving mean, and the held-out reward before
    and after.
    """
    plt = _pyplot()
    columns = min(4, len(history))
    lines = -(-len(history) // columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(3.4 * columns, 2.8 * lines), squeeze=False, sharey=True
    )
    for ax, (name, rewards) in zip(axes.flat, history.items()):
        steps = range(1, len(rewards) + 1)
        ax.plot(steps, rewards, lw=0.8, alpha=0.5, color="C0")
        smooth = [
            sum(rewards[max(0, i - 4) : i + 1]) / len(rewards[max(0, i - 4) : i + 1])
            for i in range(len(rewards))
        ]
        ax.plot(steps, smooth, lw=1.8, color="C0", label="training, mean of 5")
        before, after = held_out[name]
        ax.plot([0, len(rewards)], [before, after], "o", color="C3", label="held out")
        ax.set_title(f"{name}: {before:.2f} → {after:.2f}", fontsize=10)
        ax.set_xlabel("step")
        ax.grid(alpha=0.3)
    axes[0, 0].set_ylabel("reward")
    axes[0, 0].legend(fontsize=7)
    for ax in list(axes.flat)[len(history) :]:
        ax.axis("off")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
