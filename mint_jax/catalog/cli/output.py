"""Output of commands: tables or one JSON document on stdout, progress on stderr.

Text that strangers may have written (names, reasons, origins) is shown without control characters,
which a terminal would execute.
"""

import dataclasses
import io
import json
import math
import sys
import time
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text


@dataclasses.dataclass
class Result:
    """The result of a command.

    Attributes:
        data: for ``--json``.
        parts: tables and lines for people.
        code: the exit status.
    """

    data: Any
    parts: Sequence[Table | str]
    code: int = 0


def show(result: Result, as_json: bool) -> None:
    """Prints a result to stdout."""
    if as_json:
        print(
            json.dumps(ready(result.data), indent=1, ensure_ascii=True, allow_nan=False), flush=True
        )
        return
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names are unicode, terminals not always
    # Piped, a table is as wide as its content: nothing is cut off or wrapped.
    console = Console(
        file=sys.stdout, width=None if sys.stdout.isatty() else 10_000, highlight=False
    )
    for part in result.parts:
        console.print(Text(plain(part)) if isinstance(part, str) else part)


def ready(value: Any) -> Any:
    """Converts a value for JSON: records to objects, numbers that JSON lacks to null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: ready(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    if isinstance(value, dict):
        return {str(key): ready(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [ready(child) for child in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Table:
    """Returns a table; columns whose name starts with ``#`` are numbers, aligned right."""
    made = Table(title=plain(title) or None, title_justify="left", header_style="bold")
    for column in columns:
        made.add_column(
            Text(column.removeprefix("#")),
            justify="right" if column.startswith("#") else "left",
            overflow="fold",
        )
    for row in rows:
        made.add_row(*(Text(plain(cell)) for cell in row))
    return made


def records(title: str, found: Iterable[Any], columns: str) -> Table:
    """Returns a table of some attributes of records; ``columns`` are their names."""
    names = columns.split()
    rows = [[_cell(name, getattr(one, name)) for name in names] for one in found]
    heads = [f"#{name}" if name in _NUMBERS else name for name in names]
    return table(title, [head.removesuffix("_at").replace("_", " ") for head in heads], rows)


_NUMBERS = {"id", "number", "step", "bytes", "version", "before", "after", "tokens", "mean_reward"}


def _cell(name: str, value: Any) -> Any:
    if name == "at" or name.endswith("_at"):
        return when(value)
    if name == "digest" and value is not None:
        return value[:12]
    if isinstance(value, tuple):
        return ", ".join(value)
    if isinstance(value, dict):
        text = json.dumps(value, sort_keys=True) if value else ""
        return text if len(text) <= 60 else text[:57] + "..."
    return f"{value:,}" if name == "bytes" else value


def facts(title: str, pairs: Iterable[tuple[str, Any]]) -> Table:
    """Returns a table of properties, without those that are None."""
    made = Table(title=plain(title) or None, title_justify="left", show_header=False)
    for name, value in pairs:
        if value is not None:
            made.add_row(Text(name), Text(plain(value)))
    return made


def plain(value: Any) -> str:
    """Formats a value as one line of visible characters."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    text = value if isinstance(value, str) else str(value)
    return "".join(
        char if _is_visible(char) else char.encode("unicode_escape", "backslashreplace").decode()
        for char in text
    )


def _is_visible(char: str) -> bool:
    category = unicodedata.category(char)
    return category[0] != "C" and category not in ("Zl", "Zp")


def when(seconds: float | None) -> str | None:
    """Formats seconds since 1970 as UTC."""
    if seconds is None:
        return None
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):  # a clock far off
        return f"{seconds:.0f} s"


def size(count: int | float) -> str:
    """Formats a number of bytes."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


class ProgressLine:
    """A line on stderr: how far, how fast, time left. Rewritten on a terminal, else written every
    10 s.
    """

    def __init__(self, title: str):
        self._title, self._line = title, ""
        self._terminal = sys.stderr.isatty()
        self._start = self._shown = time.monotonic()

    def at(self, done: int, total: int, note: str = "") -> None:
        """Reports ``done`` of ``total``."""
        now = time.monotonic()
        rate = done / max(now - self._start, 1e-9)
        line = f"{self._title}: {done:,} of {total:,}, {rate:,.1f}/s"
        if rate > 0 and done < total:
            line += f", {(total - done) / rate:,.0f} s left"
        line += f", {note}" if note else ""
        width, self._line = len(self._line), line
        if now - self._shown >= (0.2 if self._terminal else 10.0):
            self._shown = now
            end = "" if self._terminal else "\n"
            start = "\r" if self._terminal else ""
            print(start + line.ljust(width), end=end, file=sys.stderr, flush=True)

    def end(self) -> None:
        """Prints the last line."""
        if self._line:
            start = "\r" if self._terminal else ""
            print(start + self._line, file=sys.stderr, flush=True)
