"""A sweep reports failed points and published figures."""

import functools
import json

import pytest

from benchmarks import launch
from benchmarks.sweeps import runner
from tests.benchmarks import fake_job

CONFIG = """
from ml_collections import ConfigDict


def get_config():
    grid = {{
        "config": "fake.py",
        "axes": {{"k": (0, 1, 2)}},
        "options": ("--config.k={{k}}", "--config.fail={fail}"),
        "figures": {{"s": "sides/name=x/s", "count": "count"}},
        "curve": "reward",
        "curve_of": "p",
    }}
    other = {{"who": "Peer", "source": "its report", "grid": "g", "settings": {{"k": 2}}, "figures": {{"s": 9.0}}}}
    pictures = {{
        "s": {{"grid": "g", "x": "k", "y": "s"}},
        "curves": {{"grid": "g", "kind": "curves", "y": "reward", "by": ("k",)}},
    }}
    return ConfigDict(
        {{"bench": "sweep", "sweep": "fake", "size": "ci", "claim": "None.", "grids": {{"g": grid}}}}
        | {{"references": {{"peer": other}}, "pictures": pictures}}
    )
"""  # noqa: E501


@pytest.fixture
def swept(tmp_path, monkeypatch):
    """Runs a sweep of three points as a user does; returns status, result and folder."""
    fake = functools.partial(runner.run_all, program=fake_job.program)
    monkeypatch.setattr(runner, "run_all", fake)
    monkeypatch.setattr(runner.stamp, "code", lambda: {"commit": "c", "dirty": False})
    monkeypatch.setattr(runner.stamp, "changes", lambda: None)

    def run(fail):
        # a new name each time: Python reuses byte code of the same second and size
        config = tmp_path / f"fake_sweep_{fail}.py"
        config.write_text(CONFIG.format(fail=fail))
        status = 0
        try:
            launch.main([f"--config={config}", f"--workdir={tmp_path / 'out'}"])
        except SystemExit as error:
            status = error.code
        return status, json.loads((tmp_path / "out" / "result.json").read_text()), tmp_path / "out"

    return run


def test_a_failed_point_is_in_status_result_and_report(swept):
    status, result, folder = swept(fail=1)
    assert (status, result["failed"], result["points"], result["rows"]) == (1, 1, 3, 2)
    found = json.loads((folder / "report.json").read_text())
    assert [point["state"] for point in found["points"]] == ["done", "failed", "done"]
    page = (folder / "report.md").read_text()
    for line in ("| ours | 1 | failed: error: the value is 3; expected 4 |", "| Peer | 2 |  | 9 |"):
        assert line in page
    assert "3 (1 to 2, n 3)" in page
    assert result["pictures"] == found["pictures"] == ["curves.png", "s.png"]
    assert all((folder / name).read_bytes().startswith(b"\x89PNG") for name in result["pictures"])
    swept(fail=1)
    ran = (folder / "points" / "ran").read_text().split()
    assert ran == ["g-k=0", "g-k=1", "g-k=2", "g-k=1"], "only the failed point runs again"
