"""Data files: rows of JSONL, parquet and Arrow, checked while they are read."""

import bz2
import gzip
import io
import json
import lzma
import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from mint_jax.errors import UserError
from mint_jax.files import write_file

Row = dict[str, Any]
LINES = (".jsonl", ".json", ".ndjson")
TABLES = (".parquet", ".arrow", ".feather")


def numbered_rows(path: str | Path) -> list[tuple[str, Row]]:
    """Returns all rows of a data file, each with its place: file and line, or row of a table.

    The suffix selects the format: one JSON object a line (``.jsonl``, ``.json``, ``.ndjson``, also
    with ``.gz``, ``.bz2``, ``.xz`` or ``.zst``), or a table (``.parquet``, ``.arrow``,
    ``.feather``). Null fields of a table count as absent at every depth, as in JSONL.

    Raises ``UserError``: the file is missing, empty, damaged or has an unknown suffix; a line is no
    JSON object (a repeated key and NaN are invalid); two columns have one name.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"data file {path} does not exist: check the path in the config")
    *_, form, packed = ["", "", *path.suffixes]
    if packed not in OPENERS:
        form, packed = packed, ""
    if form in LINES:
        rows = list(_jsonl(path, packed))
    elif form in TABLES and not packed:
        rows = _table(path)
    else:
        raise UserError(
            f"data file {path} has suffix {form + packed!r}; expected .jsonl (or .jsonl.gz,"
            " .bz2, .xz, .zst), .parquet or .arrow"
        )
    if not rows:
        raise UserError(f"data file {path} has no rows: check that it was written completely")
    return rows


def _open_zstd(path: Path) -> IO[bytes]:
    pyarrow: Any = _pyarrow(path)
    return io.BufferedReader(pyarrow.CompressedInputStream(str(path), "zstd"))


OPENERS: dict[str, Callable[[Path], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _open_zstd,
}


def _jsonl(path: Path, packed: str) -> Iterator[tuple[str, Row]]:
    number = 0
    try:
        with OPENERS[packed](path) if packed else path.open("rb") as file:
            for number, line in enumerate(file, 1):
                text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                if text.strip():
                    yield f"{path}:{number}", _object(text, f"{path}:{number}")
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise UserError(
            f"{path} cannot be read beyond line {number} ({error}): write it again"
        ) from None


def _object(line: bytes, where: str) -> Row:
    """Parses one line to its JSON object."""
    hooks = {"object_pairs_hook": _pairs, "parse_constant": _refuse, "parse_float": _finite}
    try:
        row = json.loads(line.decode(), **hooks)
    except UnicodeDecodeError as error:
        raise UserError(
            f"{where} is not UTF-8 text ({error.reason}): convert it, or name a compressed file so"
            " (.jsonl.gz)"
        ) from None
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", str(error))  # without the line and column of this line
        raise UserError(
            f"{where} is not valid JSON ({reason}): write one JSON object a line"
        ) from None
    if not isinstance(row, dict):
        raise UserError(f"{where} is a {type(row).__name__}; expected one JSON object a line")
    return row


def _pairs(pairs: list[tuple[str, Any]]) -> Row:
    found: Row = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {key!r} is repeated")
        found[key] = value
    return found


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a JSON number; use null")


def _finite(text: str) -> float:
    if math.isinf(value := float(text)):
        raise ValueError(f"{text} is too large a number")
    return value


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow
    except ImportError:
        raise UserError(
            f"reading {path} needs pyarrow: pip install 'mint-jax[data]', or convert it to .jsonl"
        ) from None
    return pyarrow


def _table(path: Path) -> list[tuple[str, Row]]:
    """Returns the rows of a parquet or Arrow file."""
    pyarrow = _pyarrow(path)
    try:
        from pyarrow import ipc, parquet

        if path.suffix == ".parquet":
            table = parquet.read_table(path)
        else:
            # pandas writes Arrow's file format, Hugging Face datasets its stream format
            with pyarrow.memory_map(str(path)) as file:
                is_file = file.read(6) == b"ARROW1"
                file.seek(0)
                table = (ipc.open_file if is_file else ipc.open_stream)(file).read_all()
        names = table.column_names
        if twice := [name for name in names if names.count(name) > 1]:
            raise UserError(f"{path} has two columns {twice[0]!r}: rename one")
        rows = table.to_pylist(maps_as_pydicts="strict")
    except UserError:
        raise
    except Exception as error:  # pyarrow raises its own types
        raise UserError(f"{path} is not a readable {path.suffix[1:]} file ({error})") from None
    return [(f"{path} row {n}", _present(row)) for n, row in enumerate(rows, 1)]


def _present(value: Any) -> Any:
    """Returns a value of a table without the null fields of its structs."""
    if isinstance(value, dict):
        return {name: _present(one) for name, one in value.items() if one is not None}
    return list(map(_present, value)) if isinstance(value, list) else value


def write_rows(path: str | Path, rows: Iterable[Row]) -> None:
    """Writes JSONL atomically. Raises ``UserError``: the folder cannot be written."""
    path = Path(path)
    try:
        write_file(path, "".join(map(json_line, rows)))
    except OSError as error:
        raise UserError(
            f"output {path} cannot be written ({error}): choose another path or free disk space"
        ) from None


def json_line(row: Row) -> str:
    """Returns a row as one line of JSONL, with its newline."""
    text = json.dumps(row, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate can only be written as an escape
        text = json.dumps(row)
    return text + "\n"
