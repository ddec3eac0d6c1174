"""Every report can be measured again; only whole reports of one commit are published."""

import functools
import json
import types

import pytest

from benchmarks import figures, launch, tables
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


@pytest.fixture
def at(tmp_path, monkeypatch):
    """Replaces jobs by fake ones, at the commit of ``at.code``."""
    made = types.SimpleNamespace(
        code={"commit": "a" * 40, "dirty": False},
        commits=["a" * 40],
        failed=0,
        to=tmp_path / "reports",
        workdir=tmp_path / "work",
        written=[],
    )

    def sweep(config, folder):
        folder.mkdir(parents=True)
        points = [{"commit": commit, "dirty": commit == "dirty"} for commit in made.commits]
        whole = {"points": points, "failed": made.failed, "pictures": ["a.png"]}
        (folder / "report.json").write_text(json.dumps(whole))
        (folder / "report.md").write_text("page")
        (folder / "a.png").write_bytes(b"picture")

    fake = functools.partial(runner.run_all, program=fake_job.program)
    monkeypatch.setattr(runner, "run_all", fake)
    monkeypatch.setattr(launch, "run", sweep)
    monkeypatch.setattr(stamp, "code", lambda: made.code)
    monkeypatch.setattr(stamp, "changes", lambda: None)
    monkeypatch.setattr(tables, "CPU", made.to)
    monkeypatch.setattr(tables, "write", lambda: made.written.append("tables"))
    return made


def test_figures_are_measured_once_at_a_commit_and_published(at, tmp_path):
    pictures = (("a.png", "one.png"),)
    one = figures.Run("one", "quickstart.py", 1.0, seeds=(0, 2), pictures=pictures, folder=at.to)
    bad = figures.Run("bad", "bench/handoff.py", 2.0, ("--config.fail=0",), folder=at.to)
    for _ in range(2):
        with pytest.raises(UserError, match=r"^bad failed: see the logs"):
            figures.run_all((one, bad), at.workdir)
    ran = (at.workdir / "points" / "ran").read_text().split()
    assert ran == ["one-seed0", "one-seed2", "bad", "bad"]
    report = stamp.load(at.to / "one.json")
    assert report["sides"][0]["s"]["median"] == {"median": 2.0, "interval": [1.0, 3.0], "n": 2}
    assert report["stamp"]["commit"] == "some commit"
    assert str(tmp_path) not in (at.to / "one.json").read_text()
    assert (at.to / "one.png").read_bytes() == b"picture"
    assert {path.name for path in at.to.iterdir()} == {"one.json", "one.png"}
    assert at.written == ["tables"] * 2
    at.code["dirty"] = True
    with pytest.raises(UserError, match="commit them first"):
        figures.run_all(figures.RUNS, at.workdir)
