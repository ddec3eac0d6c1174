"""The page of the sweeps says what their committed reports say; each of its fields is one row that
the sweep of size cpu measures.
"""

import json
import subprocess
import types

import pytest

from benchmarks import figures, sweep, timing
from benchmarks.sweeps import tables
from mint_jax import stamp
from mint_jax.errors import UserError
from tests.benchmarks.configs_test import ISSUED, load
from tests.benchmarks.reports_test import leaves

REPORTS = tables.committed()


def test_the_page_says_what_the_reports_say():
    text = tables.PAGE.read_text()
    assert "<!-- figures:sweeps -->" in text
    assert tables.tables.render(text, tables.TABLES) == text, (
        "python -m benchmarks.sweeps.tables writes it"
    )


@pytest.mark.parametrize("name", REPORTS)
def test_a_committed_report_is_whole_and_of_one_commit(name):
    report, folder = REPORTS[name], tables.FOLDER / name
    assert (report["sweep"], report["size"], report["failed"]) == (name, "cpu", 0)
    assert len({point["commit"] for point in report["points"]}) == 1
    assert not any(point["dirty"] for point in report["points"])
    assert {path.name for path in folder.iterdir()} == {
        "report.json",
        "report.md",
        *report["pictures"],
    }
    assert not [
        text for text in leaves(report) if isinstance(text, str) and stamp.absolute_path(text)
    ]


@pytest.mark.parametrize("name", sorted({row.sweep for row in tables.ROWS}))
def test_every_field_is_one_row_that_the_sweep_measures(name):
    made = load(name, "cpu")
    points = [
        {
            "grid": point.grid,
            "rows": [
                {"settings": settings, "figures": point.of.figures} for settings in point.rows()
            ],
        }
        for point in sweep.points_of(made)
    ]
    fields = [
        match
        for row in tables.ROWS
        if row.sweep == name
        for match in tables._FIELD.finditer(row.text + row.figure)
    ]
    assert fields
    for match in fields:
        assert tables.field({"sweep": name, "points": points}, match[1], match[2], match[3])
        assert match[4] in tables.tables.MEASURED or match[4] in tables.tables.PLAIN


def test_a_field_that_several_rows_or_none_have_is_refused():
    rows = [
        {"settings": {"k": k, "t": ("a", "b")}, "figures": {"s": timing.median([1.0, 2.0, 3.0])}}
        for k in (1, 2)
    ]
    report = {"sweep": "x", "points": [{"grid": "g", "rows": rows}]}
    spread = []
    assert tables.filled("{g[k=1,t=('a', 'b')].s|s}", report, spread) == "2.00 s"
    assert spread == ["1.00 to 3.00, 3"]
    for settings in ("", "k=3"):
        with pytest.raises(KeyError, match=f"rows of x have g\\[{settings}\\].s"):
            tables.field(report, "g", settings, "s")


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Sweeps that end at once and leave a report of the commits ``place.commits``; published below
    ``place.to``.
    """
    to, ran = tmp_path / "published", []
    made = types.SimpleNamespace(
        commits=["a" * 40], failed=0, status=0, ran=ran, to=to, workdir=tmp_path / "runs"
    )

    def run(arguments, cwd):
        [folder] = [
            figures.Path(text.removeprefix("--workdir="))
            for text in arguments
            if text.startswith("--workdir=")
        ]
        folder.mkdir(parents=True, exist_ok=True)
        ran.append(folder.name)
        points = [{"commit": commit, "dirty": commit == "dirty"} for commit in made.commits]
        (folder / "report.json").write_text(
            json.dumps({"points": points, "failed": made.failed, "pictures": ["a.png"]})
        )
        (folder / "report.md").write_text("page")
        (folder / "a.png").write_bytes(b"picture")
        (folder / "points").mkdir(exist_ok=True)
        return subprocess.CompletedProcess(arguments, made.status)

    monkeypatch.setattr(figures.subprocess, "run", run)
    monkeypatch.setattr(tables, "FOLDER", to)
    monkeypatch.setattr(tables, "write", lambda: ran.append("page"))
    return made


def test_sweeps_are_published_with_page_and_pictures(place):
    (place.to / "handoff").mkdir(parents=True)
    (place.to / "handoff" / "old.png").touch()
    figures.run_sweeps(["handoff", "catalog"], place.workdir)
    assert place.ran == ["handoff", "page", "catalog", "page"]
    assert {path.name for path in (place.to / "handoff").iterdir()} == {
        "report.json",
        "report.md",
        "a.png",
    }


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"failed": 2}, "2 points of .* failed: start the sweep again"),
        (
            {"commits": ["a" * 40, "b" * 40]},
            "was measured at aaaaaaaaaa, bbbbbbbbbb; what is published is of one commit",
        ),
        ({"commits": ["dirty"]}, "was measured at dirty with changes"),
        ({"status": 1}, "the sweep handoff ended with status 1"),
    ],
)
def test_what_is_not_whole_is_not_published(changed, said, place):
    for name, value in changed.items():
        setattr(place, name, value)
    with pytest.raises(UserError, match=said):
        figures.run_sweeps(["handoff"], place.workdir)
    assert not place.to.exists()


def test_all_sweeps_can_be_published():
    assert set(figures.SWEEPS) == ISSUED
