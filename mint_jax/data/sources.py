"""Rows of data files: JSONL and parquet, checked as they are read."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mint_jax.errors import UserError
from mint_jax.files import write_file

Row = dict[str, Any]


def read_rows(path: str | Path) -> list[Row]:
    """All rows of a ``.jsonl`` or ``.parquet`` file; see ``numbered_rows``."""
    return [row for _, row in numbered_rows(path)]


def numbered_rows(path: str | Path) -> list[tuple[str, Row]]:
    """All rows of a ``.jsonl`` or ``.parquet`` file, each with its place: ``file:line`` as an editor counts, or the row's number.

    Raises:
        UserError: no such file, another suffix, a line that is no JSON object, no rows, or parquet without pyarrow.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"data file {path} does not exist: check the path in the config")
    if path.suffix in (".jsonl", ".json", ".ndjson"):
        rows = list(_jsonl(path))
    elif path.suffix == ".parquet":
        rows = _parquet(path)
    else:
        raise UserError(f"data file {path} has suffix {path.suffix!r}; expected .jsonl or .parquet")
    if not rows:
        raise UserError(f"data file {path} has no rows: check that it was written completely")
    return rows


def _jsonl(path: Path) -> Iterator[tuple[str, Row]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8", "strict"))
            except UnicodeDecodeError as error:
                raise UserError(f"{path}:{number} is not UTF-8 text ({error.reason}): convert or decompress the file") from None
            except json.JSONDecodeError as error:
                raise UserError(f"{path}:{number} is not valid JSON ({error.msg}): write one JSON object a line") from None
            if not isinstance(row, dict):
                raise UserError(f"{path}:{number} is a {type(row).__name__}; expected one JSON object a line")
            yield f"{path}:{number}", row


def _parquet(path: Path) -> list[tuple[str, Row]]:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise UserError(f"reading {path} needs pyarrow: pip install 'mint-jax[data]', or convert it to .jsonl") from None
    try:
        return [(f"{path} row {n}", row) for n, row in enumerate(parquet.read_table(path).to_pylist(), 1)]
    except Exception as error:  # pyarrow raises its own types
        raise UserError(f"{path} is not a readable parquet file ({error})") from None


def write_rows(path: str | Path, rows: Iterable[Row]) -> None:
    """Writes JSONL; the file appears whole or not at all.

    Raises:
        UserError: the folder cannot be written.
    """
    path = Path(path)
    try:
        write_file(path, "".join(map(json_line, rows)))
    except OSError as error:
        raise UserError(f"output {path} cannot be written ({error}): choose another path or free disk space") from None


def json_line(row: Row) -> str:
    """A row as a line of JSONL, with its end."""
    text = json.dumps(row, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a character, which only an escape can write
        text = json.dumps(row)
    return text + "\n"
