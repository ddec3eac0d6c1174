"""Tables on terminals of any width: no line is longer, no number is broken."""

import io

import pytest
from rich.console import Console

from mint_jax.harness import report

COLUMNS = ("policy", "margin_before", "margin_after", "preferred_after", "adapter_bytes", "note")
ROWS = [
    (f"policy{i}", 0.0, 1234.56789 + i, 0.987, 123456789 + i, "some words that may wrap")
    for i in range(3)
]


@pytest.mark.parametrize("width", [40, 200])
def test_a_table_fits_the_terminal(width):
    out = io.StringIO()
    report.table("held out", COLUMNS, ROWS, Console(file=out, width=width, highlight=False))
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= width
    for value in ("1234.568", "1236.568", "123456791", "0.987"):
        assert value in text
    assert all(column in text.replace("\n", " ") for column in COLUMNS)
    assert text.count("held out") == 1


def test_a_result_is_a_table_with_the_names_of_revisions(capsys, tmp_path):
    row = {"name": "adder", "reward_after": 0.75, "revision": "ab" * 32, "number": 3}
    found = {"job": "grpo", "policies": [row], "wall_s": 1.5, "stamp": {"config": {}}}
    report.result(found, tmp_path / "result.json")
    out = capsys.readouterr().out
    assert "adder@3" in out
    assert "0.750" in out
    assert "abab" not in out
    assert out.splitlines()[-2:] == ["wall_s 1.5", f"result: {tmp_path / 'result.json'}"]
