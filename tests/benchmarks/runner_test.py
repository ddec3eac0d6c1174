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


def run(grid, folder, said=None):
    points = points_of({"g": grid})
    say = (said if said is not None else []).append
    return points, runner.run_all(points, folder, say, fake_job.program)


def ran(folder):
    path = folder / "points" / "ran"
    return Counter(path.read_text().split()) if path.is_file() else Counter()


def test_points_run_once_with_progress_until_something_changes(tmp_path, monkeypatch):
    said = []
    points, records = run(GRID, tmp_path, said)
    assert [one["state"] for one in records.values()] == ["done"] * 3
    assert [line.split(" (")[0] for line in said] == [f"[runs] {k + 1}/3 g-k={k}" for k in range(3)]
    assert all("left)" in line for line in said)
    assert run(GRID, tmp_path)[1] == records
    assert set(ran(tmp_path).values()) == {1}
    entry = rows.entry_of(points[1], records, tmp_path)
    assert entry["rows"] == [
        {
            "settings": {"k": 1, "side": "x"},
            "figures": {"s": {"median": 2.0, "interval": [1.0, 2.0], "n": 3}, "count": 7},
        }
    ]
    assert entry["commit"] == "some commit"
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


def test_kill_9_loses_one_point(tmp_path):
    """The sweep is a process that is killed while a point waits: that point is killed with it, and
    alone is run again.
    """
    code = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1])\nfrom"
        " tests.benchmarks.runner_test import GRID, dataclasses, points_of, runner,"
        "fake_job\nrunner.stamp.code, runner.stamp.changes = (lambda: {'commit': 'c', 'dirty':"
        " False}), (lambda: None)\ngrid = dataclasses.replace(GRID, options=(*GRID.options,"
        " '--config.wait=' + sys.argv[3]))\nrunner.run_all(points_of({'g': grid}),"
        " Path(sys.argv[2]), print, fake_job.program)\n"
    )
    root = str(Path(__file__).parents[2])
    process = subprocess.Popen(
        [sys.executable, "-c", code, root, str(tmp_path), "1"],
        env=os.environ | {"PYTHONPATH": root},
    )
    try:
        until(lambda: ran(tmp_path)["g-k=1"] == 1)
        [child] = children(process.pid)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    until(
        lambda: (
            not Path(f"/proc/{child}").exists()
            or "\nState:\tZ" in Path(f"/proc/{child}/status").read_text()
        )
    )
    waiting = dataclasses.replace(GRID, options=(*GRID.options, "--config.wait=1"))
    first = runner.runs_of(points_of({"g": waiting}))
    assert runner._record(first[0], tmp_path, [{"commit": "c", "dirty": False}, None])
    assert runner._record(first[1], tmp_path, [{"commit": "c", "dirty": False}, None]) is None
    assert not (tmp_path / "points" / "g-k=1" / "record.json").exists()
    assert ran(tmp_path) == {"g-k=0": 1, "g-k=1": 1}


def until(true):
    end = time.monotonic() + 120
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def children(pid):
    return [int(x) for x in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
