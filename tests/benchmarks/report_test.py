"""A sweep's report has the failed and the others' rows; reports side by side flag what the
intervals do not explain.
"""

import functools
import json
import sys
from pathlib import Path

import pytest

from benchmarks import launch, report, sweep
from benchmarks.sweeps import compare, runner
from mint_jax.errors import UserError
from tests.benchmarks import fake_job

CONFIG = """
from ml_collections import ConfigDict


def get_config():
    grid = {{"config": "fake.py", "axes": {{"k": (0, 1, 2)}}, "options": ("--config.k={{k}}", "--config.fail={fail}")}}
    grid |= {{"figures": {{"s": "sides/name=x/s", "count": "count"}}, "curve": "reward", "curve_of": "p"}}
    other = {{"who": "Peer", "source": "its report", "grid": "g", "settings": {{"k": 2}}, "figures": {{"s": 9.0}}}}
    pictures = {{"s": {{"grid": "g", "x": "k", "y": "s"}}, "curves": {{"grid": "g", "kind": "curves", "y": "reward", "by": ("k",)}}}}
    return ConfigDict(
        {{"bench": "sweep", "sweep": "fake", "size": "ci", "claim": "None.", "grids": {{"g": grid}}, "references": {{"peer": other}}}}
        | {{"pictures": pictures}}
    )
"""  # noqa: E501


@pytest.fixture
def swept(tmp_path, monkeypatch, capsys):
    """Runs a sweep of three points as a user does; gives its exit status, result and folder."""
    monkeypatch.setattr(
        runner, "run_all", functools.partial(runner.run_all, program=fake_job.program)
    )
    monkeypatch.setattr(runner.stamp, "code", lambda: {"commit": "c", "dirty": False})
    monkeypatch.setattr(runner.stamp, "changes", lambda: None)

    def run(fail):
        # under one name Python takes the old byte code, of the same second and size
        config = tmp_path / f"fake_sweep_{fail}.py"
        config.write_text(CONFIG.format(fail=fail))
        status = 0
        try:
            launch.main([f"--config={config}", f"--workdir={tmp_path / 'out'}"])
        except SystemExit as error:
            status = error.code
        return status, json.loads((tmp_path / "out" / "result.json").read_text()), tmp_path / "out"

    return run


def test_a_sweep_with_a_failed_point_says_so_in_status_result_and_report(swept):
    status, result, folder = swept(fail=1)
    assert (status, result["failed"], result["points"], result["rows"]) == (1, 1, 3, 2)
    found = json.loads((folder / "report.json").read_text())
    assert [point["state"] for point in found["points"]] == ["done", "failed", "done"]
    assert found["points"][0]["commit"] == "some commit"
    page = (folder / "report.md").read_text()
    assert "| ours | 1 | failed: error: the value is 3; expected 4 |" in page
    assert "| Peer | 2 |  | 9 |" in page
    assert "2 (1 to 2, n 3)" not in page
    assert "3 (1 to 2, n 3)" in page
    assert result["pictures"] == found["pictures"] == ["curves.png", "s.png"]
    assert all((folder / name).read_bytes().startswith(b"\x89PNG") for name in result["pictures"])
    status, result, folder = swept(fail=7)
    assert (status, result["failed"], result["rows"]) == (0, 0, 3)


def figure(median, low, high):
    return {"median": median, "interval": [low, high], "n": 5}


def made(**figures):
    rows = [{"settings": {"k": 1}, "figures": figures}]
    peer = {
        "who": "Peer",
        "grid": "g",
        "settings": {"k": 1, "more": 2},
        "figures": {"s": 3.0, "other": 1},
    }
    far = {"who": "Peer", "grid": "g", "settings": {"k": 2}, "figures": {"s": 3.0}}
    return {
        "sweep": "fake",
        "size": "ci",
        "points": [{"grid": "g", "rows": rows}],
        "references": [peer, far],
    }


def test_differences_outside_of_the_intervals_are_flagged():
    a = made(s=figure(1.0, 0.9, 1.1), t=figure(1.0, 0.9, 1.1), count=3, mine=1, text="memory")
    b = made(s=figure(1.2, 1.05, 1.3), t=figure(0.8, 0.7, 0.89), count=4)
    lines = {line.name: line for line in compare.two(a, b)}
    assert {name: line.outside for name, line in lines.items()} == {
        "s": False,
        "t": True,
        "count": True,
    }
    assert lines["s"].where == "g: k 1"
    assert lines["t"].ratio == pytest.approx(0.8)
    assert not any(line.outside for line in compare.two(a, a))
    [line] = compare.with_references(a)
    assert (line.name, line.who, line.b, line.outside) == ("s", "Peer", 3.0, True)


def test_reports_of_benches_are_compared_by_path():
    a = {
        "bench": "x",
        "sides": [{"name": "p", "s": figure(1.0, 0.9, 1.1)}],
        "n": 5,
        "stamp": {"s": figure(1.0, 0.9, 1.1)},
    }
    [line] = compare.two(a, a)
    assert (line.where, line.name) == ("", "sides/p/s")
    with pytest.raises(UserError, match="no figure in common"):
        compare.two(a, {"bench": "y"})


def test_the_command_compares_a_committed_report_with_itself(tmp_path, monkeypatch, capsys):
    path = str(
        Path(sweep.__file__).parents[1] / "notebooks" / "reports" / "cpu-2-cores" / "handoff.json"
    )
    monkeypatch.setattr(sys, "argv", ["report", path, path, f"--out={tmp_path}"])
    report.main()
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith("0 of ")
    assert "| handoff_ratio |" in out
    assert (tmp_path / "comparison.md").read_text().startswith(out.strip())
    assert (tmp_path / "comparison.png").is_file()
    monkeypatch.setattr(sys, "argv", ["report", str(tmp_path / "none.json")])
    with pytest.raises(SystemExit) as ended:
        report.main()
    assert ended.value.code == 2
    assert "none.json is no report" in capsys.readouterr().err


def test_what_is_no_report_is_told(tmp_path):
    for text, words in ((None, "is no report"), ("{", "is no JSON"), ("[]", "is a list")):
        path = tmp_path / "report.json"
        path.unlink(missing_ok=True)
        if text is not None:
            path.write_text(text)
        with pytest.raises(UserError, match=words):
            report.read(path)
    with pytest.raises(UserError, match="no reference"):
        report.compared({"bench": "x"}, None)
