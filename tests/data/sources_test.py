"""Data files: what is read, what is written, and what is refused with a line number."""

import bz2
import gzip
import json
import lzma

import pyarrow
import pyarrow.ipc
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from pyarrow import feather, parquet

from mint_jax.data.sources import numbered_rows, write_rows
from mint_jax.errors import UserError

numbers = st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False)
leaves = st.none() | st.booleans() | numbers | st.text(max_size=10)


def read_rows(path):
    return [row for _, row in numbered_rows(path)]


def nested(leaf, keys, max_leaves):
    def around(inner):
        return st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3)

    return st.recursive(leaf, around, max_leaves=max_leaves)


values = nested(leaves, st.text(max_size=5), 6)
rows_of_lines = st.dictionaries(st.text(max_size=5), values, max_size=4)


def test_what_is_written_is_read_back(tmp_path):
    @settings(max_examples=60)
    @given(st.lists(rows_of_lines, min_size=1, max_size=5))
    def check(rows):
        write_rows(tmp_path / "new" / "rows.jsonl", rows)
        assert read_rows(tmp_path / "new" / "rows.jsonl") == rows
        lines = (tmp_path / "new" / "rows.jsonl").read_bytes().decode().split("\n")
        assert [json.loads(line) for line in lines[:-1]] == rows
        assert lines[-1] == ""
        assert [p.name for p in (tmp_path / "new").iterdir()] == ["rows.jsonl"]

    check()


SMALL = st.none() | st.booleans() | st.integers(-9, 9) | st.text("ab", max_size=2)
NESTED = nested(SMALL, st.sampled_from("abc"), 8)
rows_of_tables = st.dictionaries(st.sampled_from("xyz"), NESTED, min_size=1, max_size=3)


def without_nulls(value):
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def table_of(rows):
    names = dict.fromkeys(key for row in rows for key in row)
    return pyarrow.table({name: [row.get(name) for row in rows] for name in names})


def write_table(path, table):
    if path.suffix == ".parquet":
        parquet.write_table(table, path)
    elif path.suffix == ".feather":
        feather.write_feather(table, str(path))
    else:
        with pyarrow.ipc.new_stream(str(path), table.schema) as stream:
            stream.write_table(table)


@pytest.mark.parametrize("suffix", [".parquet", ".arrow", ".feather"])
def test_tables_give_the_rows_that_were_written(tmp_path, suffix):
    """Arrow gives every row the fields of all, null where there was none; a row of JSONL has only
    its own.
    """
    path = tmp_path / f"rows{suffix}"

    # most columns mix types
    @settings(max_examples=60, suppress_health_check=[HealthCheck.filter_too_much])
    @given(st.lists(rows_of_tables, min_size=1, max_size=4))
    def check(rows):
        try:
            table = table_of(rows)
        except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError, pyarrow.ArrowNotImplementedError):
            assume(False)  # values of two types in one column, or a struct of no fields
        if path.suffix == ".parquet":
            assume("struct<>" not in str(table.schema))  # which it cannot hold
        write_table(path, table)
        assert read_rows(path) == [without_nulls(row) for row in rows]

    check()


COMPRESSORS = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda data: pyarrow.compress(data, "zstd", asbytes=True),
}


@pytest.mark.parametrize("suffix", COMPRESSORS)
def test_compressed_lines_are_read_and_damage_is_told(tmp_path, suffix):
    path, rows = tmp_path / f"rows.jsonl{suffix}", [{"a": f"{i} 日"} for i in range(20_000)]
    data = COMPRESSORS[suffix]("".join(json.dumps(row) + "\r\n" for row in rows).encode())
    path.write_bytes(data)
    assert read_rows(path) == rows
    assert numbered_rows(path)[2][0] == f"{path}:3"
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(UserError, match=r"rows.jsonl.*(is not valid JSON|be read beyond line)"):
        read_rows(path)
    path.write_bytes(b"not compressed")
    with pytest.raises(UserError, match=rf"rows.jsonl{suffix} cannot be read beyond line 0"):
        read_rows(path)


DEEP = b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
TWICE = b'{"a": 1}\n{"a": 1, "b": {"c": 1, "d": 2, "c": 3}}'


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("none.jsonl", None, "none.jsonl does not exist"),
        ("rows.csv.gz", b"", "suffix '.csv.gz'; expected .jsonl"),
        ("rows.jsonl", TWICE, r"rows.jsonl:2 is not valid JSON \(key 'c' is repeated\)"),
        ("rows.jsonl", b'{"a": NaN}', r"rows.jsonl:1 is not valid JSON \(NaN is not a JSON number"),
        ("rows.jsonl", DEEP, r"rows.jsonl:1 is not valid JSON \(.*recursion"),
        ("rows.jsonl", '{"a": 1}'.encode("utf-16"), "rows.jsonl:1 is not UTF-8 text"),
        ("rows.jsonl", b"", "has no rows"),
        ("rows.jsonl", b'{"a": 1}\n\n{"a": \n', r"rows.jsonl:3 is not valid JSON"),
        ("rows.jsonl", b'{"a": 1}\n[1, 2]\n', r"rows.jsonl:2 is a list; expected one JSON object"),
        ("rows.arrow", b"ARROW1 and no more", "rows.arrow is not a readable arrow file"),
        ("rows.parquet", b"PAR1 and no more", "rows.parquet is not a readable parquet file"),
    ],
)
def test_bad_files_are_refused(tmp_path, name, data, message):
    if data is not None:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError, match=message):
        read_rows(tmp_path / name)
