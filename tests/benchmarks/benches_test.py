"""The short form of every bench runs."""

import json
import os
import re
from pathlib import Path

import pytest

from benchmarks import launch, timing

FOLDER = Path(__file__).parents[2] / "configs" / "bench"
# schedule runs in schedule_test, pretrain in pretrain_test
NAMES = sorted({path.stem for path in FOLDER.glob("*.py")} - {"pretrain", "schedule"})
NOT_ON_CPUS = {"tune_kernels"}  # reports are empty there, and say why


def load(name):
    return launch.load(f"{FOLDER / name}.py:ci")


def figures(tree):
    """All figures of a report."""
    if timing.is_figure(tree):
        return [tree]
    children = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    return [figure for child in children for figure in figures(child)]


@pytest.fixture(autouse=True)
def one_device_in_children(monkeypatch):
    """Processes that a bench starts see one device, as this one's mesh does."""
    flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ["XLA_FLAGS"])
    monkeypatch.setenv("XLA_FLAGS", flags.strip())  # XLA takes a blank for the name of a file


def check_handoff(report):
    """Both bases are measured, though each has a policy of the same name."""
    assert (report["base"], report["large"]["base"]) == ("tiny-random", "Qwen3-4B, 1 of 36 layers")
    for found in (report, report["large"]):
        assert found["same_first_token"]
        assert found["bytes"]["adapter_memory"] < found["bytes"]["merged_disk"]


def check_packed_load(report):
    """Every load that the pause is measured with ended in its window."""
    assert report["same_values"]
    assert report["decode_loads"] == load("packed_load").pause.windows


def check_fleet_real(report):
    """No client saw an error or another token, though an engine was killed."""
    found = report["kills"]
    assert (found["errors"], found["differing"], found["kills"]) == (0, 0, 1)
    assert min(found["samples"], found["policies"]) > 0


def check_fleet_timed(report):
    """Every request was answered, by the front and by Ray Serve; both loaded adapters."""
    for side in ("timed", "ray_serve", "chooser"):
        assert report["errors"][side]["median"] == 0
        assert 0 < report["cold_loads"][side]["median"] <= report["requests"]


def check_engine(report):
    """Continuous batching gives the tokens of the lockstep loop."""
    assert report["continuous_same_tokens"]


def check_active_wave(report):
    """Every row is its own adapter's, and no adapter is without effect."""
    assert (report["errors"], report["unchanged"]) == (0, 0)
    assert report["checked"] >= len(report["batches"])


def check_gpu(report):
    """Every part but the peers measured something."""
    rows = report["rows"]
    assert not [row for row in rows if row.keys() & {"failed", "stopped"}]
    assert {row["part"] for row in rows if "skipped" in row} == {"peers"}


def check_service(report):
    """No tenant's request failed, and rows waited for slices of training."""
    assert report["errors"] == report["wrong_revisions"] == 0
    assert report["gap_p50_ms"]["n"] > 0


def check_service_load(report):
    """Every answer that was checked is its revision's, and another's would have shown."""
    assert report["errors"] == report["wrong_revisions"] == 0, report["first_errors"]
    assert report["checked"] > 0
    assert report["least_distance"] > 10 * report["most_error"]


def check_fleet(report):
    """Every router loads each name at least once, the product's less often than a random one; a
    limit of loads is felt.
    """
    found = {(r["grid"], *r["settings"].values()): r["figures"] for r in report["rows"]}
    row = {key[1]: figures for key, figures in found.items() if key[0] == "row"}
    for figures in row.values():
        assert figures["distinct"] == row["chooser"]["distinct"]
        assert figures["cold_loads"]["interval"][0] >= figures["distinct"]["interval"][0]
    assert row["chooser"]["cold_loads"]["median"] < row["random"]["cold_loads"]["median"]
    assert report["goals"]["cpu"]["errors"] == 0
    errors = [found["limits", "sticky", "h200", 2, depth]["errors"] for depth in (8, 256)]
    assert errors[0]["median"] > 0.5 > errors[1]["median"] == 0


def check_recipes(report):
    """Every way has its revisions, in the order of their updates."""
    for way in ("grpo", "on_policy", "stored"):
        seconds = [row["seconds"] for row in report["rows"] if row["way"] == way]
        assert len(seconds) == 2
        assert report[way]["seconds"]["median"] == seconds[0] < seconds[1]


def check_canary(report):
    """Every judge saw every candidate's streams; equal rewards roll nothing back by evidence."""
    judges = {row["judge"] for row in report["rows"]}
    candidates = {row["candidate"] for row in report["rows"]}
    assert (len(judges), len(candidates), len(report["rows"])) == (7, 6, 42)
    for row in report["rows"]:
        assert row["rolled_back"]["n"] == load("canary").n
        if row["candidate"] == "A/A" and row["judge"] == "evidence":
            assert row["rolled_back"]["mean"] == 0


def check_merges(report):
    """Every way is there, and sums that fit omit nothing."""
    rows = report["rows"]
    assert [row["k"] for row in rows[:8]] == [1] * 4 + [2] * 2 + [3] * 2
    assert {row["way"] for row in rows if row["k"] == 4} == {
        *("average", "average cut", "sum x 2", "sum x 4", "ties", "dare", "dare_ties")
    }
    assert [row["omitted"] == 0 for row in rows] == [True] * 11 + [False] * 4
    assert report["curve"]["error 4"]["n"] == 1


def check_stand_in(report):
    """Every side has its requests, and only cold ones are answered by the stand-in."""
    assert set(report["first_token_ms"]) == {"warm", "waits", "stands_in"}
    assert report["requests"] == 10
    assert 0 < report["stood_in"] <= 1


def check_small_policies(report):
    """Every policy of the recipe is trained and loaded; of biases alone all are smaller."""
    sizes = {row["name"]: row["adapter_bytes"] for row in report["rewards"]["digit_sum"]}
    assert sizes.keys() == report["numbers"].keys() == report["loads"].keys()
    assert [*report["loads"]][:2] == ["rank8", "rank1"]
    assert max(sizes, key=sizes.get) == "rank8"
    assert report["loads"]["rank8"]["over_largest"]["median"] == 1


def check_routes(report):
    """Every router has every seed; the base loads nothing, and a named policy's share is 1."""
    routers = report["routers"]
    assert {one["share"]["n"] for one in routers.values()} == {load("routes").n}
    assert routers["named"]["share"]["mean"] == 1
    assert routers["the base"]["loads"]["mean"] == 0
    assert routers["auto 10"]["loads"]["mean"] <= routers["auto 0"]["loads"]["mean"]
    decisions = report["decisions"]["100"]
    assert 0 < decisions["p50_ms"]["percentile"] <= decisions["p99_ms"]["percentile"]
    assert 0 <= report["unseen"]["to_base"] <= 1


def check_witness(report):
    """Every fault is found in every answer, and none in honest ones."""
    assert len(report["faults"]) == 7
    assert all(one["e"]["found"] == 1 for one in report["faults"].values())
    honest = report["honest"]
    assert not any([*honest["alarms"].values(), *honest["one_process"].values()])
    assert honest["beyond_gap"] == honest["drawn_otherwise"] == 0


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_the_short_form_of_a_bench_runs(name, tmp_path):
    report = launch.run(load(name), tmp_path)
    assert json.loads(json.dumps(report)) == report
    assert report["bench"] == name
    found = figures(report)
    assert found or name in NOT_ON_CPUS, "a bench measures something"
    assert ("this is cpu" in report.get("empty", "")) == (name in NOT_ON_CPUS)
    assert all(figure["n"] >= 1 for figure in found)
    globals().get(f"check_{name}", lambda _: None)(report)
    left = {path.name for path in tmp_path.iterdir() if path.is_dir()}
    assert not left, "what a bench makes on the disk is removed"
