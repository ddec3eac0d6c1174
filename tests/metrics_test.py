"""Metric rows and TensorBoard scalars, dropping rows on resume, progress lines."""

import json
import re
import struct
import time

import pytest
from tensorboardX.proto import event_pb2

from mint_jax import metrics
from mint_jax.errors import UserError
from tests.disks import LIMITS, run_limited
from tests.marks import first


def read(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def scalars(directory) -> list[tuple[str, int, float]]:
    """What is in the event files: records of u64 length, u32 checksum, payload, u32 checksum."""
    found = []
    for path in directory.iterdir():
        data, at = path.read_bytes(), 0
        while at < len(data):
            (size,) = struct.unpack_from("<Q", data, at)
            event = event_pb2.Event.FromString(data[at + 12 : at + 12 + size])
            found += [(v.tag, event.step, v.simple_value) for v in event.summary.value]
            at += 16 + size
    return found


def test_rows_are_complete_lines_at_once_and_numbers_reach_tensorboard(tmp_path):
    writer, before = metrics.MetricsWriter(tmp_path), time.time()
    writer.write(0, "blue", {"loss": 0.5, "tokens": 7, "note": "日"})
    writer.write(1, "red", {"loss": float("inf")})
    rows = read(tmp_path / "metrics.jsonl")  # before it is closed
    assert all(abs(row.pop("time") - before) < 3600 for row in rows)  # a clock of this hour
    assert rows == [
        {"step": 0, "name": "blue", "loss": 0.5, "tokens": 7, "note": "日"},
        {"step": 1, "name": "red", "loss": float("inf")},
    ]
    for _ in range(2):  # the second as when an interruption meets a run's end
        writer.close()
    assert set(scalars(tmp_path / "tensorboard")) == {
        ("blue/loss", 0, 0.5),
        ("blue/tokens", 0, 7.0),
        ("red/loss", 1, float("inf")),
    }


def test_rows_at_or_after_a_policys_step_are_dropped(rng, tmp_path):
    path, keep = tmp_path / "metrics.jsonl", {"a": 3, "b": 0, "c": 9}
    rows = [
        {"step": int(rng.integers(6)), "name": name, "loss": float(rng.normal())}
        for name in rng.choice(["a", "b", "c"], 60)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    metrics.truncate_rows(path, keep)
    assert read(path) == [row for row in rows if row["step"] < keep[row["name"]]]
    writer = metrics.MetricsWriter(tmp_path, tensorboard=False)
    writer.write(3, "a", {})
    writer.close()
    assert read(path)[-1]["step"] == 3


@pytest.mark.parametrize("cut", [1, 10])
def test_a_last_line_that_a_crash_cut_short_is_dropped(tmp_path, cut):
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": i, "name": "a", "loss": 0.125}) + "\n" for i in range(3)]
    path.write_text("".join(lines)[:-cut])
    metrics.truncate_rows(path, {"a": 9})
    whole = 3 if cut == 1 else 2  # only the line end is missing
    assert path.read_text() == "".join(lines[:whole])


def fill_the_disk(directory):
    """Writes rows until the room is used up, and then some; prints what came of it. Run by
    ``run_limited``.
    """
    told = []
    writer = metrics.MetricsWriter(directory, tensorboard=True)
    for step in range(20_000):
        try:
            writer.write(step, "a", {"loss": 0.5, "text": "x" * 200})
        except UserError as error:
            told.append(str(error))
            if len(told) == 20:  # more than the queue of a writer that works in a thread takes
                break
    writer.close()
    print(json.dumps(told))


@pytest.mark.parametrize("limit", first(1, LIMITS))
def test_a_full_disk_is_one_line_and_nothing_hangs(limit, tmp_path):
    told = json.loads(run_limited(limit, 1, "tests.metrics_test", tmp_path))
    assert len(told) == 20
    said = r"\S*(metrics\.jsonl|tensorboard) cannot be written \(.*\): free or allow the space.*"
    assert all(re.fullmatch(said, one) for one in told)  # one line each
