"""A process that uses futures as a service does, until it is killed: clients that submit, an
executor, snapshots, deliveries.

``python -m tests.service.victim FOLDER SEED``. FOLDER has the database, ``state.json`` with the
last snapshot, and ``told``: a line of JSON for each thing that a client was told, written right
after it was.
"""

import json
import os
import random
import sys
import threading
import time
from pathlib import Path

from mint_jax.files import write_file
from mint_jax.service.futures import Category, Done, Failed, Futures, Outcome
from mint_jax.service.server_db import ServerDatabase

MODELS = ("a", "b", "c")
WINDOW = 3  # requests of a model that are submitted out of order


def fails(seq_id: int) -> bool:
    return seq_id % 7 == 0


def body(model: str, seq_id: int) -> bytes:
    return f"{model} {seq_id} ".encode() * (seq_id % 30)


def outcome(model: str, seq_id: int) -> Outcome:
    return (
        Failed(f"no {seq_id}", Category.USER) if fails(seq_id) else Done(body(model, seq_id)[:50])
    )


def load(folder: Path) -> tuple[dict[str, list[int]], dict[str, int]]:
    """The last snapshot: numbers of the requests that each model's state was changed by, and its
    place.
    """
    path = folder / "state.json"
    return tuple(json.loads(path.read_text())) if path.exists() else ({}, {})  # type: ignore[return-value]


def told(folder: Path) -> list[list]:
    """What all victims so far were told; a line is one write, which no kill divides."""
    path = folder / "told"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class Victim:
    """Threads that work for ever."""

    def __init__(self, folder: Path, seed: int):
        self.folder, self.seed = folder, seed
        known = told(folder)
        self.given = {(line[1], line[2]): line[3] for line in known if line[0] == "given"}
        acknowledged = {line[1] for line in known if line[0] == "acknowledging"}
        self.open = [id for id in self.given.values() if id not in acknowledged]
        self.lock = threading.Lock()
        self.state, places = load(folder)
        self.lines = os.open(folder / "told", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self.futures = Futures(ServerDatabase(folder / "server.db"), places, keep_s=0.01)
        for id in acknowledged:  # the last may not have reached the disk
            self.futures.delivered(id)

    def say(self, *fields: object) -> None:
        os.write(self.lines, (json.dumps(fields) + "\n").encode())

    def submit(self, model: str) -> None:
        """A client: some requests ahead of each other, each until it has an id."""
        choice = random.Random(f"{self.seed} {model}")
        first = 1
        while True:
            window = [n for n in range(first, first + WINDOW) if (model, n) not in self.given]
            choice.shuffle(window)
            for seq_id in window:
                id = self.futures.submit(model, seq_id, "step", body(model, seq_id))
                self.say("given", model, seq_id, id)
                if choice.random() < 0.7:
                    self.futures.wait(id, 0.002)  # not too far ahead of the others
                self.open.append(id)
            first += WINDOW

    def execute(self) -> None:
        """The one who owns the states."""
        choice = random.Random(f"{self.seed} executor")
        while True:
            if (request := self.futures.take()) is None:
                time.sleep(0.0005)
                continue
            assert self.futures.body(request.id) == body(request.model, request.seq_id)
            if not fails(request.seq_id):
                self.state.setdefault(request.model, []).append(request.seq_id)
            self.futures.finish(request.id, outcome(request.model, request.seq_id))
            if choice.random() < 0.1:
                places = {model: self.futures.place(model) for model in self.state}
                write_file(self.folder / "state.json", json.dumps([self.state, places]))
                for model, place in places.items():
                    self.futures.snapshot(model, place)

    def collect(self) -> None:
        """Asks for results, the older ones first."""
        choice = random.Random(f"{self.seed} collector")
        while True:
            with self.lock:
                id = self.open.pop(choice.randrange(min(4, len(self.open)))) if self.open else ""
            if not id or (found := self.futures.wait(id, 0.01)) is None:
                self.open += [id] if id else []
                time.sleep(0.0005)
                continue
            self.say(
                "result", id, found.result.decode() if isinstance(found, Done) else found.error
            )
            if choice.random() < 0.9:
                self.say("acknowledging", id)
                self.futures.delivered(id)
            self.futures.expire()

    def run(self) -> None:
        def work(task, *arguments) -> None:
            try:
                task(*arguments)
            except BaseException as error:
                self.say("error", repr(error))
                os._exit(1)

        tasks = [(self.submit, model) for model in MODELS] + [
            (self.execute,),
            (self.collect,),
            (self.collect,),
        ]
        for task in tasks:
            threading.Thread(target=work, args=task).start()
        print("begun", flush=True)


if __name__ == "__main__":
    Victim(Path(sys.argv[1]), int(sys.argv[2])).run()
