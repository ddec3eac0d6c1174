"""Metrics in Weights & Biases: the package itself, offline, and read back with its own reader."""

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


def test_rows_reach_wandb(tmp_path, monkeypatch):
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    made = trackers.Wandb(tmp_path, "taste", {"seed": 3})
    for row in ROWS:
        made.write(*row)
    made.close()
    # the package's own process writes the file when it hears of the run's end, which nobody waits
    # for otherwise
    wandb.teardown()
    [file] = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert json.loads((tmp_path / "wandb.json").read_text()) in file.name
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
                items = {
                    item.key or ".".join(item.nested_key): json.loads(item.value_json)
                    for item in record.history.item
                }
                found.append(
                    {key: value for key, value in items.items() if not key.startswith("_")}
                )
    return found


def test_an_outage_is_said_once_and_ends_nothing(tmp_path, monkeypatch, capsys):
    import wandb

    class Away:
        id, down, taken = "7", True, []

        def define_metric(self, *_, **__):
            pass

        def log(self, numbers):
            if self.down:
                raise ConnectionError("no route to host")
            self.taken.append(numbers)

        def finish(self, status):
            raise ConnectionError("no route to host")

    monkeypatch.setattr(wandb, "init", lambda **_: Away())
    made = trackers.Wandb(tmp_path, "p", {})
    for row in ROWS:
        made.write(*row)
    says = "wandb does not take metrics (no route to host); they are in metrics.jsonl, and the run"
    assert capsys.readouterr().err == f"{says} goes on\n"
    Away.down = False
    made.write(2, "a", {"reward": 1.0})
    assert capsys.readouterr().err == "wandb takes metrics again\n"
    assert Away.taken == [{"a/reward": 1.0, "a/step": 2}]
    made.close()
    assert capsys.readouterr().err == f"{says} goes on\n"


def test_a_run_without_a_key_is_refused_before_anything_is_claimed(tmp_path, monkeypatch):
    """The base is not loaded, the policies are not claimed, and a dry run says the same."""
    monkeypatch.setenv("HOME", str(tmp_path))  # no netrc of the user who runs the tests
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_API_KEY", "")
    monkeypatch.setattr(start, "open_base", lambda *_: pytest.fail("loaded"))
    config = runpy.run_path(str(ROOT / "configs" / "tiny" / "sft.py"))["get_config"]()
    config.wandb = "project"
    for refuse in (
        lambda: run_config(config, tmp_path / "work"),
        lambda: dry_run.describe(read(config), tmp_path / "work"),
    ):
        with pytest.raises(UserError, match=r"wandb='project' cannot begin a run \(no API key"):
            refuse()
    assert not (tmp_path / "work").exists()
