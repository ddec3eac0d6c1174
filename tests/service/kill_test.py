"""kill -9 of a process that submits, runs, delivers and takes snapshots: every id that was given
out is found again, and every request changes its model's state once, in order.

``python -m tests.service.kill_test FOLDER`` forks a process for each seed that it reads; these are
killed. Each loads the last snapshot, replays, and continues; between two of them the test opens the
database and compares. FOLDER has the database, ``state.json`` with the last snapshot, and ``log``:
a line of JSON for each answer that a client received, written right after it.
"""

import asyncio
import contextlib
import json
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mint_jax.files import write_file
from mint_jax.service.futures import Category, Futures, Gone, Outcome
from mint_jax.service.server_db import ServerDatabase

ROOT = Path(__file__).parents[2]
MODELS = ("a", "b", "c")
WINDOW = 3  # requests of a model that are submitted out of order


def fails(seq_id: int) -> bool:
    return seq_id % 7 == 0


def body(model: str, seq_id: int) -> bytes:
    return f"{model} {seq_id} ".encode() * (seq_id % 30)


def outcome(model: str, seq_id: int) -> Outcome:
    if fails(seq_id):
        return Outcome(f"no {seq_id}".encode(), Category.USER)
    return Outcome(body(model, seq_id)[:50])


def load(folder: Path) -> tuple[dict[str, list[int]], dict[str, int]]:
    """Returns the numbers of the requests in each model's snapshot, and its place."""
    path = folder / "state.json"
    return tuple(json.loads(path.read_text())) if path.exists() else ({}, {})  # type: ignore[return-value]


def log_of(folder: Path) -> list[list]:
    """Returns the answers that clients received; a line is one write, which no kill divides."""
    path = folder / "log"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def work(folder: Path, seed: int) -> None:
    """Runs clients, an executor and collectors of results forever."""
    known = log_of(folder)
    given = {(line[1], line[2]): line[3] for line in known if line[0] == "given"}
    delivered = {line[1] for line in known if line[0] == "delivering"}
    waiting = [id for id in given.values() if id not in delivered]
    lines = os.open(folder / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    state, places = load(folder)
    ready: queue.SimpleQueue = queue.SimpleQueue()
    futures = Futures(ServerDatabase(folder / "server.db"), places, ready.put, keep_s=0.01)
    for id in delivered:  # the last notes may not have reached the disk
        futures.delivered(id)

    def write(*fields: object) -> None:
        os.write(lines, (json.dumps(fields) + "\n").encode())

    def submit(choice: random.Random, model: str) -> None:
        first = 1
        while True:
            window = [n for n in range(first, first + WINDOW) if (model, n) not in given]
            choice.shuffle(window)
            for seq_id in window:
                id = futures.submit(model, seq_id, "step", body(model, seq_id)).result()
                write("given", model, seq_id, id)
                if choice.random() < 0.7:
                    asyncio.run(futures.wait(id, 0.002))  # not too far ahead of the others
                waiting.append(id)
            first += WINDOW

    def execute(choice: random.Random, _: str) -> None:
        while True:
            request = ready.get()
            assert futures.body(request) == body(request.model, request.seq_id)
            if not fails(request.seq_id):
                state.setdefault(request.model, []).append(request.seq_id)
            futures.finish(request, outcome(request.model, request.seq_id))
            if choice.random() < 0.1:
                now = {model: futures.place(model) for model in state}
                write_file(folder / "state.json", json.dumps([state, now]))
                for model, place in now.items():
                    futures.snapshot(model, place)

    def collect(choice: random.Random, _: str) -> None:
        while True:
            id = waiting.pop(choice.randrange(min(4, len(waiting)))) if waiting else ""
            if not id or asyncio.run(futures.wait(id, 0.01)) is None:
                waiting.extend([id] if id else [])
                time.sleep(0.0005)
                continue
            write("result", id)
            if choice.random() < 0.9:
                write("delivering", id)
                futures.delivered(id)
            futures.expire()

    def run(task, name: str) -> None:
        try:
            task(random.Random(f"{seed} {task.__name__} {name}"), name)
        except BaseException as error:
            write("error", repr(error))
            os._exit(1)

    for task, name in [*((submit, model) for model in MODELS), (execute, ""), (collect, "")]:
        threading.Thread(target=run, args=(task, name)).start()
    print(os.getpid(), flush=True)


@contextlib.contextmanager
def killer(folder: Path) -> Iterator[Callable[[random.Random], None]]:
    """Yields a function that starts a process and kills it at a random moment of its work."""
    command = [sys.executable, "-m", "tests.service.kill_test", folder]
    pipes: dict = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": ""}, **pipes) as made:
        assert made.stdin is not None
        assert made.stdout is not None

        def kill(choice: random.Random) -> None:
            print(choice.getrandbits(30), file=made.stdin, flush=True)
            pid = int(made.stdout.readline())
            time.sleep(choice.uniform(0, 0.15))
            os.kill(pid, signal.SIGKILL)
            assert made.stdout.readline() == f"ended {signal.SIGKILL:d}\n", log_of(folder)[-1]

        yield kill
        made.stdin.close()


def compare(folder: Path) -> int:
    """Opens what a killed process has left, and compares; returns how many ids were given out."""
    known = log_of(folder)
    assert not [line for line in known if line[0] == "error"]
    given: dict[tuple[str, int], str] = {}
    for _, model, seq_id, id in (line for line in known if line[0] == "given"):
        assert given.setdefault((model, seq_id), id) == id
    assert len(set(given.values())) == len(given)
    delivered = {line[1] for line in known if line[0] == "delivering"}
    had_results = {line[1] for line in known if line[0] == "result"}
    state, places = load(folder)
    with ServerDatabase(folder / "server.db") as database:
        ready: queue.SimpleQueue = queue.SimpleQueue()
        futures = Futures(database, places, ready.put)
        for (model, seq_id), id in given.items():
            try:
                found = futures.outcome(id)
            except Gone:
                assert id in delivered, f"request {seq_id} of {model} was given {id}, which is lost"
                continue
            if found is None:
                assert id not in had_results, f"request {seq_id} of {model} had a result"
                again = futures.submit(model, seq_id, "step", body(model, seq_id))
                assert again.result() == id
            else:
                assert found == outcome(model, seq_id)
        while not ready.empty():
            request = ready.get()
            assert futures.body(request) == body(request.model, request.seq_id)
            if not fails(request.seq_id):
                state.setdefault(request.model, []).append(request.seq_id)
    for model in MODELS:
        applied = state.get(model, [])
        up_to = max(applied, default=0)
        assert applied == [n for n in range(1, up_to + 1) if not fails(n)], "twice or out of order"
        not_given = next(n for n in range(1, len(given) + 2) if (model, n) not in given)
        accepted = {n for n in range(1, not_given) if not fails(n)}
        assert accepted <= set(applied), "accepted, and never run"
    return len(given)


@pytest.mark.parametrize(
    "kills",
    [5, pytest.param(50, marks=pytest.mark.long), pytest.param(1000, marks=pytest.mark.slow)],
)
def test_a_killed_service_loses_no_request_and_runs_none_twice(memory, kills):
    choice = random.Random(int(os.environ["MINT_TEST_SEED"]))
    with killer(memory) as kill:
        for _ in range(kills):
            kill(choice)
            given = compare(memory)
    assert given > 0


if __name__ == "__main__":
    for line in sys.stdin:
        if (pid := os.fork()) == 0:
            work(Path(sys.argv[1]), int(line))
            threading.Event().wait()
        print("ended", os.waitpid(pid, 0)[1], flush=True)
