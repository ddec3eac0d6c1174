"""What the pages say is what the reports say, and reports say where they come from: stamps, n,
intervals, tables.
"""

import json
import math
import re

import numpy as np
import pytest

from benchmarks import figures, tables, timing
from mint_jax import stamp
from mint_jax.errors import UserError
from tests.benchmarks import commands

REPORTS = {
    f"{folder.name}/{path.stem}": path
    for folder in (tables.CPU, tables.PODS)
    for path in sorted(folder.glob("*.json"))
}
UNSTAMPED = tables.unstamped()
RUNS = {
    f"{run.folder.name}/{run.name}": run
    for run in (*figures.RUNS, *figures.POD_RUNS)
    if run.committed
}


def leaves(tree):
    """All values below a report, with figures whole."""
    if isinstance(tree, dict) and not timing.is_figure(tree):
        return [leaf for child in tree.values() for leaf in leaves(child)]
    if isinstance(tree, list):
        return [leaf for child in tree for leaf in leaves(child)]
    return [tree]


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda path: path.name)
def test_pages_say_what_the_reports_say(page):
    text = page.read_text()
    assert "<!-- figures:" in text
    assert tables.render(text) == text, "python -m benchmarks.tables writes it"


@pytest.mark.parametrize("name", REPORTS)
def test_a_report_says_where_it_comes_from(name):
    report = stamp.load(REPORTS[name])
    if name in UNSTAMPED:
        assert "stamp" not in report, "it is stamped: strike it off unstamped.txt"
        return
    assert stamp.lacks(report) == []
    assert report["stamp"]["dirty"] is False
    assert re.fullmatch(r"[0-9a-f]{40}", report["stamp"]["commit"])
    assert not [x for x in leaves(report) if isinstance(x, str) and stamp.absolute_path(x)]
    found = [x for x in leaves(report) if timing.is_figure(x)]
    if REPORTS[name].parent == tables.CPU:
        assert found, "nothing in it has n and an interval"
    for figure in found:
        low, high = figure["interval"]
        assert low <= timing.value(figure) <= high
        assert figure["n"] >= 1


GPU = sorted((stamp.ROOT / "notebooks" / "reports" / "nvidia-h100").glob("*.json"))


@pytest.mark.parametrize("path", GPU, ids=lambda path: path.stem)
def test_a_gpus_report_says_where_it_comes_from(path):
    """Of a machine that is lent now and then: changes on top of the commit are told, not
    refused.
    """
    report = json.loads(path.read_text())
    assert re.fullmatch(r"[0-9a-f]{40}", report["stamp"]["commit"])
    assert "H100" in report["stamp"]["machine"]["devices"]
    assert not [x for x in leaves(report) if isinstance(x, str) and stamp.absolute_path(x)]
    assert all(
        x["interval"][0] <= timing.value(x) <= x["interval"][1]
        for x in leaves(report)
        if timing.is_figure(x)
    )


def test_every_report_can_be_measured_again():
    assert set(UNSTAMPED) <= set(RUNS)
    assert set(RUNS) - set(UNSTAMPED) <= set(REPORTS), "a report that is quoted is missing"
    assert set(REPORTS) <= set(RUNS)
    for run in RUNS.values():
        assert (stamp.ROOT / "configs" / run.config.split(":")[0]).is_file()


@pytest.mark.parametrize("run", [*figures.RUNS, *figures.POD_RUNS], ids=lambda run: run.name)
def test_commands_of_figures_are_taken(run, tmp_path):
    commands.check(figures.command(run, tmp_path, tmp_path, seed=3 if run.seeds else None)[2:])


def test_every_measured_field_of_a_page_has_its_interval():
    reports = tables.Reports(tables.CPU)
    for row in tables.ROWS:
        if f"cpu-2-cores/{row.report}" in UNSTAMPED and not reports.has(row.report):
            continue
        for report, path, kind in tables._FIELD.findall(row.text + row.figure):
            name = report or row.report
            assert kind in tables.MEASURED or kind in tables.PLAIN
            found = reports.field(name, path)
            if kind in tables.MEASURED and f"cpu-2-cores/{name}" not in UNSTAMPED:
                assert timing.is_figure(found), f"{name}: {path} has no n and interval"
                assert found["n"] >= 2, f"{name}: {path} was measured once"


def test_a_row_shows_value_interval_and_n(tmp_path):
    report = {
        "ratio": {"median": 366.912, "interval": [339.2, 390.04], "n": 5},
        "parts": [
            {"name": "a", "ms": {"percentile": 0.373, "interval": [0.36, 0.41], "n": 100_000}}
        ],
        "bytes": 538_090_408,
    }
    (tmp_path / "x.json").write_text(json.dumps(report))
    spread: list[str] = []
    said = tables._fill(
        "{ratio|times} of {parts.a.ms|ms}, {x:bytes|count}", "x", tables.Reports(tmp_path), spread
    )
    assert said == "367× of 0.37 ms, 538,090,408"
    assert spread == ["339 to 390, 5", "0.36 to 0.41, 100,000"]
    with pytest.raises(KeyError, match=r"report x has no parts\.b"):
        tables.Reports(tmp_path).field("x", "parts.b")


def test_a_table_names_each_commit_that_it_quotes(tmp_path):
    machine = {"cpu": "A CPU", "cores": 2, "memory_bytes": 24e9, "devices": "1 x cpu"}
    for name, commit, dirty in (
        ("x", "a" * 40, False),
        ("y", "b" * 40, True),
        ("z", "a" * 40, False),
    ):
        at = {"commit": commit, "dirty": dirty, "machine": machine, "versions": {"jax": "0.10.2"}}
        (tmp_path / f"{name}.json").write_text(json.dumps({"stamp": at}))
    one, two = tables.Reports(tmp_path), tables.Reports(tmp_path)
    assert [one["x"], one["z"]]
    assert one.where() == "Measured at `aaaaaaaaaa` on A CPU, 2 cores, 24 GB; jax 0.10.2."
    assert [two["x"], two["y"], two["z"]]
    assert "`aaaaaaaaaa` on A CPU" in two.where()
    assert two.where().endswith(
        "`bbbbbbbbbb` with changes on A CPU, 2 cores, 24 GB; jax 0.10.2 (y)."
    )


def test_the_table_of_pods_says_what_was_compiled_and_what_are_minima(tmp_path, monkeypatch):
    def program(least):
        sent = {
            "all-gather": {"count": 3, "bytes": int(2e9), "at_least": least},
            "all-reduce": {"count": 1, "bytes": int(1e9), "at_least": False},
        }
        estimate = {"bound": "compute", "step_s": 0.873}
        return {
            "argument_bytes": 1e9,
            "temporary_bytes": 2e9,
            "free_hbm_fraction": 0.5,
            "collectives": sent,
            "estimate": estimate,
        }

    report = {
        "topology": "v5p:2x2x1",
        "chips": 4,
        "parameters": 4e9,
        "policies": 16,
        "adapter_percent_of_base": 1.6423,
        "adapter": {"rank": 32, "alpha": 64.0, "targets": ["q", "o"]},
        "train": program(True),
        "prefill": program(False),
        "decode": {"free_hbm_fraction": -0.5, "refused": "no room"},
        "colocated": {"argument_bytes": 1e9, "temporary_bytes": 2e9, "free_hbm_fraction": 0.4},
    }
    for name in tables.BASES:
        (tmp_path / f"{name}.json").write_text(json.dumps(report))
    tried = {"v5p:2x2x1": "the mesh needs 8 devices", "v5p:2x2x2": "fits"}
    (tmp_path / "kimi_k2_smallest.json").write_text(json.dumps({"tried": tried}))
    monkeypatch.setattr(tables, "PODS", tmp_path)
    said = tables.TABLES["pods"]()
    row = (
        "| Qwen3-4B | v5p:2x2x1 | 4 | 4 G | 16, 1.6 % | 32: q, o | train | 1.0 GB | 2.0 GB | 50 % |"
        " ≥ 3.0 GB | compute, 873 ms |"
    )
    assert row in said
    assert (
        "|  |  |  |  |  |  | prefill | 1.0 GB | 2.0 GB | 50 % | 3.0 GB | compute, 873 ms |" in said
    )
    assert "decode |  |  | -50 % |  | refused by the compiler |" in said
    assert "`v5p:2x2x1`: the mesh needs 8 devices; `v5p:2x2x2`: fits." in said


@pytest.mark.parametrize(("n", "q"), [(5, 50), (7, 50), (200, 50), (2000, 99)])
def test_intervals_of_quantiles_hold_the_truth_as_often_as_they_say(n, q, rng):
    held = 0
    for _ in range(400):
        figure = timing.percentile(rng.exponential(size=n), q)
        low, high = figure["interval"]
        assert low <= figure["percentile"] <= high
        held += low <= -math.log(1 - q / 100) <= high
    assert held / 400 > 0.90  # 95 % but for n = 5 (94 %), less three deviations of 400 draws


def test_a_ratio_is_of_medians_and_its_interval_is_paired(rng):
    spell = np.exp(rng.normal(size=9))  # of the machine: it meets both sides of a round
    times = {"slow": (3 * spell).tolist(), "fast": spell.tolist()}
    assert timing.ratio(times, "slow", "fast") == {"median": 3.0, "interval": [3.0, 3.0], "n": 9}
    assert timing.ratio(times, "slow", "fast", less=1)["median"] == 2.0
    noisy = {"slow": [3.0, 2.0, 9.0], "fast": [1.0, 1.5, 1.2]}
    figure = timing.ratio(noisy, "slow", "fast")
    assert figure["median"] == pytest.approx(3.0 / 1.2, rel=1e-4)
    low, high = figure["interval"]
    assert low < figure["median"] < high


def test_runs_merge_into_figures():
    policies = [
        {"name": "a", "loss": loss, "bytes": 7, "revision": name}
        for loss, name in ((3.0, "x"), (1.0, "y"))
    ]
    runs = [{"job": "sft", "policies": [policy]} for policy in policies]
    merged = {
        "name": "a",
        "loss": {"median": 2.0, "interval": [1.0, 3.0], "n": 2},
        "bytes": 7,
        "revision": ["x", "y"],
    }
    assert timing.merge(runs) == {"job": "sft", "policies": [merged]}
    assert timing.mean([1.0, 2.0, 3.0, 4.0])["mean"] == 2.5


def test_paths_of_a_machine_stay_out_of_reports():
    report = {
        "catalog": "/home/somebody/runs/catalog",
        "stamp": {"config": {"base": ["~/bases/x", "runs/y"]}},
    }
    assert stamp.without_paths(report) == {
        "catalog": "catalog",
        "stamp": {"config": {"base": ["x", "runs/y"]}},
    }


@pytest.fixture
def at(tmp_path, monkeypatch):
    """A place for reports; jobs are made up: each returns its seed, at the commit of
    ``at.code``.
    """
    place = tmp_path / "reports"
    calls: list[str] = []
    code = {"commit": "a" * 40, "dirty": False}

    def run(arguments, cwd, env, stdout, stderr):
        [folder] = [
            figures.Path(a.removeprefix("--workdir="))
            for a in arguments
            if a.startswith("--workdir=")
        ]
        calls.append(f"{folder.parent.name}/{folder.name}")
        seed = next((int(a.split("=")[1]) for a in arguments if a.startswith("--config.seed=")), 0)
        (folder / "result.json").write_text(
            json.dumps({"loss": 1.0 + seed, "catalog": str(folder), "stamp": dict(code)})
        )
        (folder / "curve.png").write_bytes(b"picture")
        return type("Done", (), {"returncode": int(folder.parent.name == "bad")})

    monkeypatch.setattr(figures.subprocess, "run", run)
    monkeypatch.setattr(stamp, "code", lambda: code)
    monkeypatch.setattr(tables, "write", lambda: calls.append("tables"))
    return type(
        "At", (), {"place": place, "calls": calls, "code": code, "workdir": tmp_path / "work"}
    )


def test_all_figures_are_measured_once_at_a_commit_and_published(at, tmp_path, capsys, monkeypatch):
    listed = tmp_path / "unstamped.txt"
    listed.write_text("reports/one\nreports/other\n")
    monkeypatch.setattr(figures.publish, "__defaults__", (listed,))
    runs = (
        figures.Run(
            "one",
            "quickstart.py",
            1.0,
            seeds=(0, 2),
            pictures=(("curve.png", "one.png"),),
            folder=at.place,
        ),
        figures.Run("two", "bench/handoff.py", 2.0, folder=at.place),
    )
    figures.run_all(runs, at.workdir)
    assert at.calls == ["one/seed0", "one/seed2", "two/run", "tables"]
    report = stamp.load(at.place / "one.json")
    assert report["loss"] == {"median": 2.0, "interval": [1.0, 3.0], "n": 2}
    assert report["stamp"]["commit"] == "a" * 40
    assert str(tmp_path) not in (at.place / "one.json").read_text()
    assert (at.place / "one.png").read_bytes() == b"picture"
    assert listed.read_text() == "reports/other\n"
    assert "[figures] 1/2 one (0:00, 3:00 left)" in capsys.readouterr().err
    figures.run_all(runs, at.workdir)  # goes on: nothing is left to measure
    assert at.calls[4:] == ["tables"]
    at.code["commit"] = "b" * 40
    figures.run_all(runs[1:], at.workdir)
    assert at.calls[5:] == ["two/run", "tables"]


def test_uncommitted_code_and_failed_jobs_are_not_published(at):
    at.code["dirty"] = True
    with pytest.raises(UserError, match="commit them first"):
        figures.run_all(figures.RUNS, at.workdir)
    at.code["dirty"] = False
    with pytest.raises(UserError, match=r"bad ended with status 1: see .*log"):
        figures.run_all((figures.Run("bad", "quickstart.py", 1.0, folder=at.place),), at.workdir)
    assert not at.place.exists()
