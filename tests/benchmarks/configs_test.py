"""Every sweep at every size: its grids build, and a point is a command that its job takes. The
small sizes are run among the long.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import launch, sweep
from benchmarks.sweeps import runner
from mint_jax.errors import UserError
from mint_jax.harness import settings
from tests.benchmarks import commands

ROOT = Path(__file__).parents[2]
NAMES = sorted(path.stem for path in (ROOT / "configs" / "sweeps").glob("*.py"))
SIZES = ("ci", "cpu", "gpu", "pod")
ISSUED = {
    "handoff",
    "concurrent_grpo",
    "packed_load",
    "cold_staircase",
    "catalog",
    "active_wave",
    "scale_up",
    "learning",
}


def load(name, size):
    return launch.load(str(ROOT / "configs" / "sweeps" / f"{name}.py:{size}"))


def test_there_is_a_sweep_for_each_claim():
    assert set(NAMES) == ISSUED


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_every_point_is_a_command_that_its_job_takes(name, size, monkeypatch):
    monkeypatch.chdir(ROOT)
    made = load(name, size)
    points = sweep.points_of(made)
    assert points
    assert made.size == size
    assert {point.grid for point in points} == set(made.grids)
    assert made.references, "what others report stands next to ours"
    assert all(one.source and one.figures for one in made.references.values())
    runs = runner.runs_of(points)
    ends = [
        [run for run in runs if run.point.grid == grid][k] for grid in made.grids for k in (0, -1)
    ]
    for run in ends:
        commands.check([text.replace("{workdir}", "runs") for text in run.arguments()])


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_size_is_refused(name):
    with pytest.raises(UserError, match=f"{name} size 'huge'; expected ci, cpu, gpu or pod"):
        load(name, "huge")


def test_make_runs_all_sweeps_but_learning():
    named = re.search(r"^SWEEPS \?= (.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert named is not None
    assert set(named[1].split()) == set(NAMES) - {"learning"}


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_the_small_size_runs(name, tmp_path):
    flags = re.sub(
        r"--xla_force_host_platform_device_count=\d+", "", os.environ["XLA_FLAGS"]
    ).strip()
    command = [
        sys.executable,
        "-m",
        "benchmarks",
        f"--config=configs/sweeps/{name}.py:ci",
        f"--workdir={tmp_path}",
    ]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"XLA_FLAGS": flags}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["failed"], result["sweep"]) == (0, name)
    report = json.loads((tmp_path / "report.json").read_text())
    assert all(point["state"] == "done" and point["rows"] for point in report["points"])
    assert all(
        point[field] is not None
        for point in report["points"]
        for field in ("date", "machine", "versions", "config")
    )
    page = (tmp_path / "report.md").read_text()
    assert all(one["who"] in page for one in report["references"])
    assert result["pictures"]
    assert all((tmp_path / picture).stat().st_size > 5_000 for picture in result["pictures"])


def test_a_file_without_a_settings_class_declares_its_settings():
    tree = {"bench": "x", "n": 3, "rate": 1.0, "sizes": (1, 2), "shape": {"layers": 2}}
    declared = launch.declaration(tree)
    settings.change(declared, tree, "shape.layers", "4")
    settings.change(declared, tree, "sizes", "(3,)")
    settings.change(declared, tree, "rate", "2")
    assert (tree["shape"]["layers"], tree["sizes"], tree["rate"]) == (4, (3,), 2.0)
    with pytest.raises(UserError, match=r"did you mean shape\.layers"):
        settings.change(declared, tree, "shape.layer", "4")
    with pytest.raises(UserError, match="n is 'many'; expected a whole number"):
        settings.change(declared, tree, "n", "many")
