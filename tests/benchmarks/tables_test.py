"""Pages show the figures of committed reports, and reports name their commit and intervals."""

import re

import pytest

from benchmarks import tables, timing
from mint_jax import stamp

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
    assert not [name for name in stamp.FIELDS if report["stamp"].get(name) is None]
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
