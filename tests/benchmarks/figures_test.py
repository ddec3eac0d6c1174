"""Every report can be measured again; only whole reports of one commit are published."""

import functools

import pytest

from benchmarks import figures, tables
from benchmarks.sweeps import runner
from mint_jax import stamp
from mint_jax.errors import UserError
from tests.benchmarks import commands, fake_job

RUNS = [*figures.RUNS, *figures.POD_RUNS]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run.folder.name}-{run.name}")
def test_commands_of_figures_are_valid(run):
    commands.check(runner.runs_of([run.point])[0].arguments())


def test_every_report_is_measured_by_a_run():
    files = {path for folder in (tables.CPU, tables.PODS) for path in folder.glob("*.json")}
    assert files == {run.folder / f"{run.name}.json" for run in RUNS if run.committed}
    published = {path.parent.name for path in (tables.CPU / "sweeps").glob("*/report.json")}
    assert published == set(figures.SWEEPS)


def test_figures_are_measured_once_at_a_commit_and_published(tmp_path, monkeypatch):
    code, written, to, workdir = {"commit": "a" * 40, "dirty": False}, [], tmp_path / "to", tmp_path
    fake = functools.partial(runner.run_all, program=fake_job.program)
    monkeypatch.setattr(runner, "run_all", fake)
    monkeypatch.setattr(stamp, "code", lambda: code)
    monkeypatch.setattr(stamp, "changes", lambda: None)
    monkeypatch.setattr(tables, "write", lambda: written.append("tables"))
    pictures = (("a.png", "one.png"),)
    one = figures.Run("one", "quickstart.py", 1.0, seeds=(0, 2), pictures=pictures, folder=to)
    bad = figures.Run("bad", "bench/handoff.py", 2.0, ("--config.fail=0",), folder=to)
    for _ in range(2):
        with pytest.raises(UserError, match=r"^bad failed: see the logs"):
            figures.run_all((one, bad), workdir)
    ran = (workdir / "points" / "ran").read_text().split()
    assert ran == ["one-seed0", "one-seed2", "bad", "bad"]
    report = stamp.load(to / "one.json")
    assert report["sides"][0]["s"]["median"] == {"median": 2.0, "interval": [1.0, 3.0], "n": 2}
    assert report["stamp"]["commit"] == "some commit"
    assert str(tmp_path) not in (to / "one.json").read_text()
    assert (to / "one.png").read_bytes() == b"picture"
    assert {path.name for path in to.iterdir()} == {"one.json", "one.png"}
    assert written == ["tables"] * 2
    code["dirty"] = True
    with pytest.raises(UserError, match="commit them first"):
        figures.run_all(figures.RUNS, workdir)
