"""Every report can be measured again; only whole reports of one commit are published."""

import json
import subprocess
import types
from pathlib import Path

import pytest

from benchmarks import figures, tables
from mint_jax import stamp
from mint_jax.errors import UserError
from tests.benchmarks import commands

RUNS = [*figures.RUNS, *figures.POD_RUNS]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run.folder.name}-{run.name}")
def test_commands_of_figures_are_valid(run, tmp_path):
    commands.check(figures.command(run, tmp_path, tmp_path, seed=3 if run.seeds else None)[2:])


def test_every_report_is_measured_by_a_run():
    files = {path for folder in (tables.CPU, tables.PODS) for path in folder.glob("*.json")}
    assert files == {run.folder / f"{run.name}.json" for run in RUNS if run.committed}
    published = {path.parent.name for path in (tables.CPU / "sweeps").glob("*/report.json")}
    assert published == set(figures.SWEEPS)


@pytest.fixture
def at(tmp_path, monkeypatch):
    """Replaces jobs by ones that leave a report of their seed, at the commit of ``at.code``."""
    made = types.SimpleNamespace(
        calls=[],
        code={"commit": "a" * 40, "dirty": False},
        commits=["a" * 40],
        failed=0,
        to=tmp_path / "reports",
        workdir=tmp_path / "work",
    )

    def run(arguments, cwd, env=None, stdout=None, stderr=None):
        given = dict(text.split("=", 1) for text in arguments if "=" in text)
        folder = Path(given["--workdir"])
        folder.mkdir(parents=True, exist_ok=True)
        made.calls.append(f"{folder.parent.name}/{folder.name}")
        loss = 1.0 + int(given.get("--config.seed", 0))
        result = {"loss": loss, "catalog": str(folder), "stamp": dict(made.code)}
        (folder / "result.json").write_text(json.dumps(result))
        points = [{"commit": commit, "dirty": commit == "dirty"} for commit in made.commits]
        whole = {"points": points, "failed": made.failed, "pictures": ["a.png"]}
        (folder / "report.json").write_text(json.dumps(whole))
        (folder / "report.md").write_text("page")
        (folder / "a.png").write_bytes(b"picture")
        return subprocess.CompletedProcess(arguments, int("bad" in str(folder)))

    monkeypatch.setattr(figures.subprocess, "run", run)
    monkeypatch.setattr(stamp, "code", lambda: made.code)
    monkeypatch.setattr(tables, "CPU", made.to)
    monkeypatch.setattr(tables, "write", lambda: made.calls.append("tables"))
    return made


def test_figures_are_measured_once_at_a_commit_and_published(at, tmp_path, capsys):
    pictures = (("a.png", "one.png"),)
    one = figures.Run("one", "quickstart.py", 1.0, seeds=(0, 2), pictures=pictures, folder=at.to)
    two = figures.Run("two", "bench/handoff.py", 2.0, folder=at.to)
    figures.run_all((one, two), at.workdir)
    assert at.calls == ["one/seed0", "one/seed2", "two/run", "tables"]
    report = stamp.load(at.to / "one.json")
    assert report["loss"] == {"median": 2.0, "interval": [1.0, 3.0], "n": 2}
    assert report["stamp"]["commit"] == "a" * 40
    assert str(tmp_path) not in (at.to / "one.json").read_text()
    assert (at.to / "one.png").read_bytes() == b"picture"
    assert "[figures] 1/2 one (0:00, 3:00 left)" in capsys.readouterr().err
    figures.run_all((one, two), at.workdir)  # nothing is left to measure
    assert at.calls[4:] == ["tables"]
    at.code["commit"] = "b" * 40
    figures.run_all((two,), at.workdir)
    assert at.calls[5:] == ["two/run", "tables"]


def test_uncommitted_code_and_failed_jobs_are_not_published(at):
    at.code["dirty"] = True
    with pytest.raises(UserError, match="commit them first"):
        figures.run_all(figures.RUNS, at.workdir)
    at.code["dirty"] = False
    with pytest.raises(UserError, match=r"bad ended with status 1: see .*log"):
        figures.run_all((figures.Run("bad", "quickstart.py", 1.0, folder=at.to),), at.workdir)
    assert not at.to.exists()


def test_sweeps_replace_the_published_ones(at):
    old = at.to / "sweeps" / "handoff" / "old.png"
    old.parent.mkdir(parents=True)
    old.touch()
    figures.run_sweeps(["handoff", "catalog"], at.workdir)
    assert at.calls == ["work/handoff", "work/catalog", "tables"]
    assert {path.name for path in old.parent.iterdir()} == {"report.json", "report.md", "a.png"}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"failed": 2}, "2 points of .* failed: start the sweep again"),
        ({"commits": ["a" * 40, "b" * 40]}, "was measured at aaaaaaaaaa, bbbbbbbbbb; only one"),
        ({"commits": ["dirty"]}, "was measured at dirty with changes"),
    ],
)
def test_partial_sweeps_are_not_published(changed, message, at):
    vars(at).update(changed)
    with pytest.raises(UserError, match=message):
        figures.run_sweeps(["handoff"], at.workdir)
    assert not at.to.exists()
    with pytest.raises(UserError, match="the sweep bad ended with status 1"):
        figures.run_sweeps(["bad"], at.workdir)
