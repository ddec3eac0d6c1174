"""Points run once, continue after kill -9, and run again when what they measure has changed."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.sweeps import rows, runner
from benchmarks.sweeps.grid import Grid, points_of
from tests.benchmarks import fake_job

FIGURES = {"s": "sides/name={side}/s", "count": "count"}
GRID = Grid(
    config="fake.py",
    axes={"k": (0, 1, 2)},
    options=("--config.k={k}",),
    each={"side": ("x",)},
    figures=FIGURES,
)


@pytest.fixture(autouse=True)
def one_code(monkeypatch):
    """What git says, once for all points; the tests change it."""
    monkeypatch.setattr(runner.stamp, "code", lambda: {"commit": "c", "dirty": False})
    monkeypatch.setattr(runner.stamp, "changes", lambda: None)


def run(grid, folder):
    points = points_of({"g": grid})
    return points, runner.run_all(points, folder, print, fake_job.program)


def ran(folder):
    path = folder / "points" / "ran"
    return Counter(path.read_text().split()) if path.is_file() else Counter()


def test_points_run_once_until_something_changes(tmp_path, monkeypatch):
    points, records = run(GRID, tmp_path)
    assert [one["state"] for one in records.values()] == ["done"] * 3
    assert run(GRID, tmp_path)[1] == records
    assert set(ran(tmp_path).values()) == {1}
    figures = {"s": {"median": 2.0, "interval": [1.0, 2.0], "n": 3}, "count": 7}
    entry = rows.entry_of(points[1], records, tmp_path)
    assert entry["rows"] == [{"settings": {"k": 1, "side": "x"}, "figures": figures}]
    assert not list(tmp_path.glob("points/*/checkpoints")), "a finished run keeps no checkpoint"
    grid = dataclasses.replace(GRID, axes={"k": (0,)})
    monkeypatch.setattr(runner.stamp, "code", lambda: {"commit": "d", "dirty": False})
    for _ in range(2):
        run(grid, tmp_path)
    assert ran(tmp_path)["g-k=0"] == 2
    monkeypatch.setattr(runner.stamp, "changes", lambda: "more")
    run(grid, tmp_path)
    run(dataclasses.replace(grid, options=(*grid.options, "--config.more=1")), tmp_path)
    assert ran(tmp_path) == {"g-k=0": 4, "g-k=1": 1, "g-k=2": 1}


WAITS = """
import dataclasses, sys
from pathlib import Path
from tests.benchmarks.runner_test import WAITING, fake_job, points_of, runner

runner.stamp.code, runner.stamp.changes = lambda: {"commit": "c", "dirty": False}, lambda: None
runner.run_all(points_of({"g": WAITING}), Path(sys.argv[1]), print, fake_job.program)
"""
WAITING = dataclasses.replace(GRID, options=(*GRID.options, "--config.wait=1"))


def test_kill_9_loses_one_point(tmp_path):
    """A sweep that is killed while a point waits kills that point, and runs it alone again."""
    root = str(Path(__file__).parents[2])
    command = [sys.executable, "-c", WAITS, str(tmp_path)]
    process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": root})
    try:
        until(lambda: ran(tmp_path)["g-k=1"] == 1)
        [child] = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    status = Path(f"/proc/{child}/status")
    until(lambda: not status.exists() or "\nState:\tZ" in status.read_text())
    done, waiting, _ = runner.runs_of(points_of({"g": WAITING}))
    code = [{"commit": "c", "dirty": False}, None]
    assert runner._record(done, tmp_path, code)
    assert runner._record(waiting, tmp_path, code) is None
    assert ran(tmp_path) == {"g-k=0": 1, "g-k=1": 1}


def until(true):
    end = time.monotonic() + 120
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)
