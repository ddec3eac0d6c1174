"""Metrics in Weights & Biases and MLflow: the packages themselves, without a server, and read back
with their own readers.
"""

import json
import runpy
from pathlib import Path

import pytest

from mint_jax import trackers
from mint_jax.errors import UserError
from mint_jax.harness import start
from mint_jax.recipes import dry_run
from tests.configs import read, run_config

ROOT = Path(__file__).parents[1]

ROWS = [  # policy b comes to its first step when a has done its second
    (0, "a", {"reward": 0.25, "note": "text"}),
    (1, "a", {"reward": 0.5}),
    (0, "b", {"reward": float("nan"), "tokens": 3}),
]


@pytest.fixture
def mlflow_store(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path / 'mlflow'}")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")


def curves_of_mlflow(experiment: str) -> tuple[str, dict[str, list[tuple[int, float]]]]:
    from mlflow import MlflowClient

    client = MlflowClient()
    [run] = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    history = {key: client.get_metric_history(run.info.run_id, key) for key in run.data.metrics}
    return run.info.status, {
        key: sorted((one.step, one.value) for one in found) for key, found in history.items()
    }


def test_rows_reach_mlflow_and_a_resumed_run_goes_on_in_the_same_one(tmp_path, mlflow_store):
    named, config = {"mlflow": "taste", "wandb": ""}, {"seed": 3}
    first = trackers.Trackers(tmp_path, named, config)
    for row in ROWS:
        first.write(*row)
    first.close(finished=False)
    expected = {"a/reward": [(0, 0.25), (1, 0.5)], "b/tokens": [(0, 3.0)]}
    assert curves_of_mlflow("taste") == ("FAILED", expected)
    again = trackers.Trackers(tmp_path, named, config)
    again.write(2, "a", {"reward": 0.75})
    again.close()
    assert curves_of_mlflow("taste") == (
        "FINISHED",
        expected | {"a/reward": [(0, 0.25), (1, 0.5), (2, 0.75)]},
    )


def test_rows_reach_wandb(tmp_path, monkeypatch):
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    made = trackers.Trackers(tmp_path, {"wandb": "taste"}, {"seed": 3})
    for row in ROWS:
        made.write(*row)
    made.close()
    # the package's own process writes the file when it hears of the run's end, which nobody waits
    # for otherwise
    wandb.teardown()
    [file] = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert json.loads((tmp_path / "trackers.json").read_text())["wandb"] in file.name
    rows = history_of(file)
    last = rows.pop()
    assert last.pop("b/reward") != 0.0  # NaN, in the tool's own spelling
    assert last == {"b/tokens": 3, "b/step": 0}, "though another policy was a step ahead"
    assert rows == [{"a/reward": 0.25, "a/step": 0}, {"a/reward": 0.5, "a/step": 1}]


def history_of(file) -> list[dict]:
    """What an offline run has kept: the package's own messages, in a log of 32 KiB blocks as
    LevelDB writes it.
    """
    from wandb.proto import wandb_internal_pb2

    data, at, message, found = file.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        # 1: a whole message; 2, 3, 4: its parts
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        message += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            record, message = wandb_internal_pb2.Record.FromString(message), b""
            if record.WhichOneof("record_type") == "history":
                items = ((i.key or ".".join(i.nested_key), i) for i in record.history.item)
                found.append({k: json.loads(i.value_json) for k, i in items if k[0] != "_"})
    return found


def test_an_outage_is_said_once_and_ends_nothing(tmp_path, monkeypatch, capsys):
    class Away:
        id, down, taken = "7", True, []

        def __init__(self, *_):
            pass

        def log(self, step, name, numbers):
            if self.down:
                raise ConnectionError("no route to host")
            self.taken.append((step, name, numbers))

        def close(self, finished):
            raise ConnectionError("no route to host")

    monkeypatch.setitem(trackers.KINDS, "wandb", Away)
    made = trackers.Trackers(tmp_path, {"wandb": "p"}, {})
    for row in ROWS:
        made.write(*row)
    told = capsys.readouterr().err
    assert told.startswith("wandb does not take metrics (no route to host); they are in metrics")
    assert told.count("\n") == 1
    Away.down = False
    made.write(2, "a", {"reward": 1.0})
    assert capsys.readouterr().err == "wandb takes metrics again\n"
    assert Away.taken == [(2, "a", {"a/reward": 1.0})]
    made.close()
    assert "wandb does not take metrics" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ImportError("wandb"), r"that is not installed: pip install 'mint-jax\[wandb\]'"),
        (RuntimeError("no key"), r"wandb='p' cannot begin a run \(no key\): check its address"),
    ],
)
def test_a_tracker_that_cannot_begin_is_told_before_any_step(tmp_path, monkeypatch, error, told):
    def begin(*_):
        raise error

    monkeypatch.setitem(trackers.KINDS, "wandb", begin)
    with pytest.raises(UserError, match=told):
        trackers.Trackers(tmp_path, {"wandb": "p"}, {})


RETRIES = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}


@pytest.mark.parametrize(
    ("kind", "environment", "told"),
    [
        ("wandb", {"WANDB_MODE": "online", "WANDB_API_KEY": ""}, r"no API key: set WANDB_API_KEY"),
        ("mlflow", {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9"} | RETRIES, "127.0.0.1"),
    ],
)
def test_a_tracker_without_key_or_server_is_refused_before_anything_is_claimed(
    tmp_path, monkeypatch, kind, environment, told
):
    """The base is not loaded, the policies are not claimed, and a dry run says the same."""
    monkeypatch.setenv("HOME", str(tmp_path))  # no netrc of whoever runs the tests
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(start, "open_base", lambda *_: pytest.fail("loaded"))
    config = runpy.run_path(str(ROOT / "configs" / "tiny" / "sft.py"))["get_config"]()
    config[kind] = "project"
    for refuse in (
        lambda: run_config(config, tmp_path / "work"),
        lambda: dry_run.describe(read(config), tmp_path / "work"),
    ):
        with pytest.raises(UserError, match=rf"{kind}='project' cannot begin a run \(.*{told}"):
            refuse()
    assert not (tmp_path / "work").exists()
