"""kill -9 of a process that submits, runs, acknowledges, takes snapshots and deletes: every id that
was given out is found again, and every request changes its model's state once, in order.

Each victim loads the last snapshot, replays, and goes on; between two victims this process opens
the database and compares.
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mint_jax.service.futures import Gone
from tests.service import victim
from tests.service.conftest import opened

ROOT = Path(__file__).parents[2]


def kill(folder: Path, choice: random.Random) -> None:
    """Starts a victim and kills it at a random moment of its work."""
    command = [
        sys.executable,
        "-m",
        "tests.service.victim",
        str(folder),
        str(choice.getrandbits(30)),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    time.sleep(choice.uniform(0, 0.15))
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, victim.told(folder)[-1]
    process.stdout.close()


def look(folder: Path) -> dict[str, int]:
    """Opens what a victim has left, and compares; counts."""
    known = victim.told(folder)
    assert not [line for line in known if line[0] == "error"]
    given: dict[tuple[str, int], str] = {}
    for _, model, seq_id, id in (line for line in known if line[0] == "given"):
        assert given.setdefault((model, seq_id), id) == id
    assert len(set(given.values())) == len(given)
    acknowledged = {line[1] for line in known if line[0] == "acknowledging"}
    delivered = {line[1] for line in known if line[0] == "result"}
    state, places = victim.load(folder)
    counts = {"given": len(given), "gone": 0, "pending": 0, "done": 0, "run": 0, "again": 0}
    with opened(folder, places) as futures:
        for (model, seq_id), id in given.items():
            try:
                outcome = futures.wait(id)
            except Gone:
                assert id in acknowledged, (
                    f"request {seq_id} of {model} was given {id}, which is lost"
                )
                counts["gone"] += 1
                continue
            if outcome is None:
                assert id not in delivered, (
                    f"request {seq_id} of {model} had a result, which is lost"
                )
                counts["pending"] += 1
                assert futures.submit(model, seq_id, "step", victim.body(model, seq_id)) == id
            else:
                assert outcome == victim.outcome(model, seq_id)
                counts["done"] += 1
        while (request := futures.take()) is not None:
            assert futures.body(request.id) == victim.body(request.model, request.seq_id)
            if not victim.fails(request.seq_id):
                state.setdefault(request.model, []).append(request.seq_id)
            counts["again" if request.is_again else "run"] += 1
    for applied in state.values():
        assert applied == [
            n for n in range(1, max(applied, default=0) + 1) if not victim.fails(n)
        ], "twice, lost or out of order"
    for model in victim.MODELS:
        first_not_given = next(n for n in range(1, len(given) + 2) if (model, n) not in given)
        assert {n for n in range(1, first_not_given) if not victim.fails(n)} <= {
            *state.get(model, ())
        }, "accepted, and never run"
    return counts


@pytest.mark.parametrize(
    "kills",
    [5, pytest.param(50, marks=pytest.mark.long), pytest.param(1000, marks=pytest.mark.slow)],
)
def test_a_killed_service_loses_no_request_and_runs_none_twice(memory, kills):
    choice = random.Random(int(os.environ["MINT_TEST_SEED"]))
    counts = look(memory)
    for _ in range(kills):
        kill(memory, choice)
        counts = look(memory)
    print(f"\n{counts}")
    assert counts["given"] > 0
