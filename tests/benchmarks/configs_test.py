"""Every benchmark config has what its code reads; every point of a sweep is a command its job
takes. The long tests run the small sizes.
"""

import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from benchmarks import launch, sweep
from benchmarks.sweeps import runner
from mint_jax.harness.options import BaseSettings, GrpoSettings
from tests.benchmarks import commands

ROOT = Path(__file__).parents[2]
NAMES = sorted(path.stem for path in (ROOT / "configs" / "sweeps").glob("*.py"))
SIZES = ("ci", "cpu", "gpu", "pod")
BENCHES = sorted((ROOT / "configs" / "bench").glob("*.py"))
CODE = {path: path.read_text() for path in (ROOT / "benchmarks").glob("*.py")}
OF_CONFIG_DICT = {"to_dict", "to_json_best_effort"}


@pytest.mark.parametrize("path", BENCHES, ids=lambda path: path.stem)
def test_a_benchmark_reads_the_settings_that_its_config_has(path):
    """Each size that the config's docstring names has all settings; none is unused."""
    sizes = dict.fromkeys(re.findall(rf"{path.stem}\.py((?::\w+)?)", path.read_text()))
    assert ":ci" in sizes
    for size in sizes:
        config = launch.load(f"{path}{size}")
        source = CODE[ROOT / "benchmarks" / f"{config.bench}.py"]
        assert "\ndef run(" in source
        read = set(re.findall(r"(?<![\w.])config\.(?!json)(\w+)", source)) - OF_CONFIG_DICT
        assert read <= set(config), "a setting without a value"
        known = {field.name for one in (BaseSettings, GrpoSettings) for field in fields(one)}
        unused = [
            n for n in set(config) - known if not re.search(rf"\b{n}\b", "".join(CODE.values()))
        ]
        assert not unused, "a setting that no benchmark reads"


def load(name, size):
    return launch.load(str(ROOT / "configs" / "sweeps" / f"{name}.py:{size}"))


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


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_the_small_size_runs(name, tmp_path):
    one = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ["XLA_FLAGS"])
    command = [sys.executable, "-m", "benchmarks", f"--config=configs/sweeps/{name}.py:ci"]
    done = subprocess.run(
        [*command, f"--workdir={tmp_path}"],
        cwd=ROOT,
        env=os.environ | {"XLA_FLAGS": one.strip()},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads((tmp_path / "report.json").read_text())
    for point in report["points"]:
        assert point["state"] == "done"
        assert all(point[field] for field in ("rows", "date", "machine", "versions", "config"))
    page = (tmp_path / "report.md").read_text()
    assert all(one["who"] in page for one in report["references"])
    assert report["pictures"]
    assert all((tmp_path / picture).stat().st_size > 5_000 for picture in report["pictures"])
