"""Data files: what is read, what is written, and what is refused with a line number."""

import gzip
import json

import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from mint_jax.data.sources import numbered_rows, read_rows, write_rows
from mint_jax.errors import UserError

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def test_what_is_written_is_read_back(tmp_path):
    @settings(max_examples=60)
    @given(st.lists(st.dictionaries(st.text(max_size=5), values, max_size=4), min_size=1, max_size=5))
    def check(rows):
        write_rows(tmp_path / "new" / "rows.jsonl", rows)
        assert read_rows(tmp_path / "new" / "rows.jsonl") == rows
        lines = (tmp_path / "new" / "rows.jsonl").read_bytes().decode().split("\n")
        assert [json.loads(line) for line in lines[:-1]] == rows
        assert lines[-1] == ""
        assert [p.name for p in (tmp_path / "new").iterdir()] == ["rows.jsonl"]

    check()


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".ndjson"])
def test_blank_lines_and_foreign_line_ends_are_skipped(tmp_path, suffix):
    path = tmp_path / f"rows{suffix}"
    path.write_bytes(b'\n{"a": 1}\r\n   \n{"a": "\xe6\x97\xa5\\u2028"}')
    assert numbered_rows(str(path)) == [(f"{path}:2", {"a": 1}), (f"{path}:4", {"a": "日\u2028"})]


def test_parquet_rows_equal_the_table(tmp_path):
    rows = [{"question": "q 日", "answer": i, "chat": [{"role": "user", "content": "x"}] * i} for i in range(3)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    assert read_rows(tmp_path / "rows.parquet") == rows


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("none.jsonl", None, "none.jsonl does not exist"),
        ("rows.csv", b"a,b\n", "suffix '.csv'; expected .jsonl or .parquet"),
        ("rows", b"{}", "suffix ''; expected"),
        ("rows.jsonl", b"", "has no rows"),
        ("rows.jsonl", b"\n \n\n", "has no rows"),
        ("rows.jsonl", b'{"a": 1}\n\n{"a": \n', r"rows.jsonl:3 is not valid JSON"),
        ("rows.jsonl", b"{'a': 1}", r"rows.jsonl:1 is not valid JSON"),
        ("rows.jsonl", b'{"a": 1}\n[1, 2]\n', r"rows.jsonl:2 is a list; expected one JSON object"),
        ("rows.jsonl", b'{"a": 1}\n{}\n"x"', r"rows.jsonl:3 is a str"),
        ("rows.jsonl", b'{"a": 1} {"a": 2}\n', r"rows.jsonl:1 is not valid JSON"),
        ("rows.jsonl", b'{"a": 1}\n{"a": "caf\xe9"}\n', r"rows.jsonl.*UTF-8|rows.jsonl.*utf-8"),  # latin-1
        ("rows.jsonl", gzip.compress(b'{"a": 1}\n', mtime=0), r"rows.jsonl.*UTF-8|rows.jsonl.*utf-8"),
        ("rows.parquet", b"PAR1 and no more", "rows.parquet is not a readable parquet file"),
        ("rows.parquet", b"", "rows.parquet is not a readable parquet file"),
    ],
)
def test_bad_files_are_refused(tmp_path, name, data, message):
    if data is not None:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError, match=message):
        read_rows(tmp_path / name)


def test_a_folder_and_an_empty_table_are_refused(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        read_rows(tmp_path)
    parquet.write_table(pyarrow.table({"a": pyarrow.array([], pyarrow.int32())}), tmp_path / "rows.parquet")
    with pytest.raises(UserError, match="has no rows"):
        read_rows(tmp_path / "rows.parquet")


def test_an_output_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        write_rows(tmp_path / "file" / "rows.jsonl", [{"a": 1}])


def test_rows_that_fail_half_way_leave_the_old_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    write_rows(path, [{"a": 1}])

    def rows():
        yield {"a": 2}
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_rows(path, rows())
    assert read_rows(path) == [{"a": 1}]


def test_half_of_a_character_that_was_read_can_be_written(tmp_path):
    """JSON may hold one (``"\\ud83d"``); results that repeat an input's id must not be lost over it."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"id": "\\ud83d"}\n')
    rows = read_rows(path)
    write_rows(tmp_path / "out.jsonl", rows)
    assert read_rows(tmp_path / "out.jsonl") == rows
