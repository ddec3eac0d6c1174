"""Output of commands: tables or one JSON document on stdout, progress on stderr.

Both are made from the same data. Text that strangers may have written (names, reasons, origins) is
shown without control characters, which a terminal would execute.
"""

import contextlib
import dataclasses
import io
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from mint_jax.catalog.records.names import is_visible

COLUMNS = {  # of the tables of lists; all by default
    "policies": "policy state revisions aliases base session_owner tags touched_at",
    "revisions": "number step digest bytes state pinned origin created_at",
    "aliases": "name number digest version updated_at",
    "canaries": "id alias parent candidate share margin state e_worse e_fit e_needed"
    " parent_answers parent_reward candidate_answers candidate_reward updated_at",
    "entries": "id at action policy alias before after actor why details",
    "rollouts": "step tokens mean_reward digest created_at",
    "evaluations": "policy number digest scorer renderer dataset seed isolated shared metrics",
    "findings": "kind digest revisions what",
}
DIGESTS = ("digest", "base", "dataset")  # columns whose first 12 digits are shown


@dataclasses.dataclass
class Result:
    """The result of a command.

    Attributes:
        data: a record, printed as JSON, or as a table of its values and one of each list in it.
        note: a last line for people.
        code: the exit status.
    """

    data: Any
    note: str = ""
    code: int = 0


def show(result: Result, as_json: bool) -> None:
    """Prints a result to stdout."""
    data = ready(result.data)
    if as_json:
        print(json.dumps(data, indent=1, ensure_ascii=True, allow_nan=False), flush=True)
        return
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names are unicode, terminals not always
    # piped, a table is as wide as its content: nothing is cut off or wrapped
    width = None if sys.stdout.isatty() else 10_000
    console = Console(file=sys.stdout, width=width, highlight=False)
    values = {key: value for key, value in data.items() if _is_value(value)}
    if any(value is not None for value in values.values()):
        console.print(_facts("", values))
    for key, value in data.items():
        if isinstance(value, dict) and not _is_value(value):
            console.print(_facts(key, value))
        elif isinstance(value, list) and value:
            console.print(_table(key, value, COLUMNS.get(key, "").split()))
    if result.note:
        console.print(Text(plain(result.note)))


def ready(value: Any) -> Any:
    """Converts a value for JSON: records to objects, numbers that JSON lacks to null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): ready(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [ready(child) for child in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _is_value(value: Any) -> bool:
    """True for what fits in a cell: a number, a text, or a few short texts by name."""
    if isinstance(value, dict):
        return all(isinstance(each, str) for each in value.values())
    return not isinstance(value, list)


def _facts(title: str, values: Mapping[str, Any]) -> Table:
    made = Table(title=plain(title) or None, title_justify="left", show_header=False)
    for name, value in values.items():
        if value not in (None, "", [], {}):
            made.add_row(Text(_head(name)), Text(_cell(name, value)))
    return made


def _table(title: str, rows: Sequence[Any], columns: Sequence[str]) -> Table:
    made = Table(title=plain(title) or None, title_justify="left", header_style="bold")
    if not isinstance(rows[0], dict):
        rows, columns = [{title: row} for row in rows], [title]
    columns = columns or list(rows[0])
    for name in columns:
        numeric = all(isinstance(row[name], int | float | None) for row in rows)
        justify = "right" if numeric and not _is_time(name) else "left"
        made.add_column(Text(_head(name)), justify=justify, overflow="fold")
    for row in rows:
        row = row | {name: row[name][:12] for name in DIGESTS if row.get(name)}
        made.add_row(*(Text(_cell(name, row[name])) for name in columns))
    return made


def _head(name: str) -> str:
    return name.removesuffix("_at").replace("_", " ")


def _is_time(name: str) -> bool:
    return name.endswith(("_at", "_expires")) or name == "at"


def _cell(name: str, value: Any) -> str:
    if value is not None and _is_time(name):
        return _when(value)
    if isinstance(value, dict):
        return ", ".join(f"{plain(key)}={_cell('', each)}" for key, each in value.items())
    if isinstance(value, list):
        return ", ".join(_cell("", each) for each in value)
    if name.endswith("bytes") and value is not None:
        return f"{value:,}"
    return plain(value)


def plain(value: Any) -> str:
    """Formats a value as one line of visible characters."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    return "".join(
        char if is_visible(char) else char.encode("unicode_escape", "backslashreplace").decode()
        for char in str(value)
    )


def _when(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):  # a clock far off
        return f"{seconds:.0f} s"


@contextlib.contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Shows progress on stderr; yields a function of the number done."""
    done_of = MofNCompleteColumn(separator=" of ")
    columns = (TextColumn("{task.description}"), done_of, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as shown:
        task = shown.add_task(title, total=total)
        yield lambda done: shown.update(task, completed=done)
