"""Every report can be measured again; only whole reports of one commit are published."""

import pytest

from benchmarks import figures, tables
from benchmarks.sweeps import runner
from tests.benchmarks import commands

RUNS = [*figures.RUNS, *figures.POD_RUNS]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run.folder.name}-{run.name}")
def test_commands_of_figures_are_valid(run):
    commands.check(runner.runs_of([run.point])[0].arguments())


def test_every_report_is_measured_by_a_run():
    files = {path for folder in (tables.CPU, tables.PODS) for path in folder.glob("*.json")}
    assert files == {run.folder / f"{run.name}.json" for run in RUNS if run.committed}
    published = {path.parent.name for path in (tables.CPU / "sweeps").glob("*/report.json")}
    assert published == set(figures.SWEEPS)
