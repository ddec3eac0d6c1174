"""Pages show the figures of committed reports, and reports name their commit and intervals."""

import json
import re

import pytest

from benchmarks import figures, sweep, tables, timing
from mint_jax import stamp
from tests.benchmarks.configs_test import load

REPORTS = sorted(
    path for path in tables.REPORTS.glob("*/*.json") if path.parent in (tables.CPU, tables.PODS)
)
GPU = sorted(tables.REPORTS.glob("nvidia-*/*.json"))
SWEEPS = sorted((tables.CPU / "sweeps").glob("*/report.json"))
FIELDS = [
    match
    for path in sorted(tables.TEMPLATES.iterdir())
    for match in tables.FIELD.findall(path.read_text())
]


def leaves(tree):
    """Returns all values of a report; a figure is one value."""
    if timing.is_figure(tree):
        return [tree]
    children = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    return [leaf for child in children for leaf in leaves(child)] if children else [tree]


def has_no_absolute_path(report):
    return not [x for x in leaves(report) if isinstance(x, str) and stamp.absolute_path(x)]


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda path: path.name)
def test_pages_say_what_the_reports_say(page):
    text = page.read_text()
    assert "<!-- figures:" in text
    assert tables.render(text) == text, "python -m benchmarks.tables writes it"


@pytest.mark.parametrize("path", [*REPORTS, *GPU], ids=lambda path: path.stem)
def test_a_report_names_its_commit_and_its_intervals(path):
    report = stamp.load(path)
    assert not stamp.lacks(report)
    assert re.fullmatch(r"[0-9a-f]{40}", report["stamp"]["commit"])
    if path in GPU:  # lent now and then, so its reports may have uncommitted changes
        assert "NVIDIA" in report["stamp"]["machine"]["devices"]
    else:
        assert report["stamp"]["dirty"] is False
    assert has_no_absolute_path(report)
    found = [x for x in leaves(report) if timing.is_figure(x)]
    assert found or path.parent != tables.CPU
    for figure in found:
        low, high = figure["interval"]
        assert low <= timing.value(figure) <= high
        assert figure["n"] >= 1


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.parent.name)
def test_a_report_of_a_sweep_is_whole_and_of_one_commit(path):
    report = stamp.load(path)
    assert (report["sweep"], report["size"], report["failed"]) == (path.parent.name, "cpu", 0)
    assert len({point["commit"] for point in report["points"]}) == 1
    assert not any(point["dirty"] for point in report["points"])
    files = {"report.json", "report.md", *report["pictures"]}
    assert {file.name for file in path.parent.iterdir()} == files
    assert has_no_absolute_path(report)


def test_every_measured_field_has_an_interval():
    reports = tables.Reports()
    for name, path, kind in FIELDS:
        assert kind in tables.MEASURED or kind in tables.PLAIN
        found = reports.field(name, path)
        if kind in tables.MEASURED and not name.startswith("sweeps/"):
            assert timing.is_figure(found), f"{name}: {path} has no n and interval"
            assert found["n"] >= 2, f"{name}: {path} was measured once"


@pytest.mark.parametrize("name", figures.SWEEPS)
def test_every_field_of_a_sweep_is_one_row_of_its_config(name):
    points = [
        {
            "grid": point.grid,
            "rows": [{"settings": row, "figures": point.of.figures} for row in point.rows()],
        }
        for point in sweep.points_of(load(name, "cpu"))
    ]
    reports = tables.Reports()
    reports.loaded[f"sweeps/{name}"] = {"sweep": name, "points": points}
    for report, path, _ in FIELDS:
        if report == f"sweeps/{name}":
            assert reports.field(report, path)


def test_a_row_shows_values_and_intervals(monkeypatch, tmp_path):
    machine = {"cpu": "A CPU", "cores": 2, "memory_bytes": 24e9, "devices": "1 x cpu"}
    at = {"machine": machine, "versions": {"jax": "0.10.2"}, "dirty": False}
    ratio = {"median": 366.912, "interval": [339.2, 390.04], "n": 5}
    ms = {"percentile": 0.373, "interval": [0.36, 0.41], "n": 100_000}
    x = {"ratio": ratio, "parts": [{"name": "a", "ms": ms}], "stamp": at | {"commit": "a" * 40}}
    y = {"bytes": 538_090_408, "stamp": at | {"commit": "b" * 40, "dirty": True}}
    rows = [{"settings": {"k": k}, "figures": {"s": ratio}} for k in (1, 2)]
    swept = {"sweep": "z", "points": [{"grid": "g", "rows": rows} | x["stamp"]]}
    for name, report in (("x", x), ("y", y), ("z", swept)):
        (tmp_path / f"{name}.json").write_text(json.dumps(report))
    monkeypatch.setattr(tables, "CPU", tmp_path)
    assert tables.fill("| {x:ratio|times} of {x:parts.a.ms|ms} | {spread} |") == (
        "| 367× of 0.37 ms | 339 to 390, 5 / 0.36 to 0.41, 100,000 |\n"
    )
    assert tables.fill("{y:bytes|count} {x:ratio over x:ratio|ratio} {z:g[k=2].s|s}") == (
        "538,090,408 1.00 367 s\n"
    )
    assert tables.fill("{x:ratio|times} {sources}.") == (
        "367× at `aaaaaaaaaa` on A CPU, 2 cores, 24 GB; jax 0.10.2.\n"
    )
    both = tables.fill("{x:ratio|times} {y:bytes|MB} {sources}")
    assert "(x);" in both
    assert "`bbbbbbbbbb` with changes" in both
    for field in ("x:parts.b", "z:g[].s", "z:g[k=3].s"):
        with pytest.raises(KeyError):
            tables.fill(f"{{{field}|times}}")


def test_bytes_on_the_wire_are_marked_as_a_minimum_where_they_are():
    sent = {"a": {"bytes": int(2e9), "at_least": True}, "b": {"bytes": int(1e9), "at_least": False}}
    assert tables.shown(sent, "sent", []) == "≥ 3.0 GB"
    assert tables.shown({"b": sent["b"]}, "sent", []) == "1.0 GB"
    assert tables.shown({"bound": "compute", "step_s": 0.873}, "bound", []) == "compute, 873 ms"


def test_paths_of_a_machine_stay_out_of_reports():
    report = {"catalog": "/home/somebody/runs/catalog", "bases": ["~/bases/x", "runs/y"]}
    assert stamp.without_paths(report) == {"catalog": "catalog", "bases": ["x", "runs/y"]}
