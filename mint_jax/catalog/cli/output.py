"""What commands print: tables or one JSON document on stdout, progress on stderr.

Texts that strangers may have written (names, reasons, origins) are shown without control
characters: a terminal obeys those.
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
    """What a command found.

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
    """``value`` as JSON knows it: records as objects, digests as hex; a number that JSON lacks
    becomes null.
    """
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
    """A table; columns whose name begins with ``#`` are numbers and stand to the right."""
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


def facts(title: str, pairs: Iterable[tuple[str, Any]]) -> Table:
    """A table of one thing's properties; those that are None are left out."""
    made = Table(title=plain(title) or None, title_justify="left", show_header=False)
    for name, value in pairs:
        if value is not None:
            made.add_row(Text(name), Text(plain(value)))
    return made


def plain(value: Any) -> str:
    """One line of visible characters."""
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
    """Seconds since 1970 as UTC."""
    if seconds is None:
        return None
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):  # a clock that was far off
        return f"{seconds:.0f} s"


def size(count: int | float) -> str:
    """Bytes for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


class Progress:
    """One line on stderr: what, how far, how fast, how long still. Rewritten on a terminal, else a
    line every 10 s.
    """

    def __init__(self, what: str, total: int | None):
        self.what, self.total = what, total
        self._start = self._shown = time.monotonic()
        self._terminal = sys.stderr.isatty()
        self._width = 0

    def at(self, done: int, extra: str = "") -> None:
        """``done`` of ``total``."""
        now = time.monotonic()
        if now - self._shown >= (0.2 if self._terminal else 10.0):
            self._shown = now
            self._write(self._line(done, now, extra))

    def _line(self, done: int, now: float, extra: str) -> str:
        rate = done / max(now - self._start, 1e-9)
        line = f"{self.what}: {done:,}"
        if self.total is not None:
            line += f" of {self.total:,}"
        line += f", {rate:,.1f}/s"
        if self.total and rate > 0 and done < self.total:
            line += f", {(self.total - done) / rate:,.0f} s left"
        return line + (f", {extra}" if extra else "")

    def end(self, done: int, extra: str = "") -> None:
        """The last line."""
        now = time.monotonic()
        self._write(f"{self._line(done, now, extra)}, took {now - self._start:.1f} s")
        self.leave()

    def leave(self) -> None:
        """Nothing more is written over the line, if there is one."""
        if self._width:
            print(file=sys.stderr, flush=True)

    def _write(self, line: str) -> None:
        if self._terminal:
            print("\r" + line.ljust(self._width), end="", file=sys.stderr, flush=True)
            self._width = len(line)
        else:
            print(line, file=sys.stderr, flush=True)


class Stages:
    """Progress of work in several stages, one after the other; what is over at once says
    nothing.
    """

    def __init__(self, what: str):
        self.what = what
        self._stage, self._progress = "", Progress(what, None)

    def at(self, stage: str, done: int, total: int) -> None:
        """``done`` of ``total`` in this stage."""
        if stage != self._stage:
            self._progress.leave()
            self._stage, self._progress = stage, Progress(f"{self.what}: {stage}", total)
        self._progress.at(done)

    def end(self) -> None:
        """Leaves the last line."""
        self._progress.leave()
