"""kill -9 at every boundary and at random moments: what was acknowledged stays, what was not is
there whole or not at all.
"""

import multiprocessing
import os
import random
import shutil
import tempfile
import time
from pathlib import Path

import pytest

from mint_jax.catalog.lifecycle import Catalog
from tests.catalog.conftest import DATABASES, Place, make_place
from tests.catalog.faults import deeds, inspect
from tests.catalog.postgres import _roomy

SERVER = multiprocessing.get_context("forkserver")  # imports once, forks for every worker
SERVER.set_forkserver_preload(["tests.catalog.faults.inspect", "pytest"])


@pytest.fixture
def memory(tmp_path):
    """A folder in memory where there is room: a killed process loses nothing of it, and syncing
    costs nothing.
    """
    folder = tempfile.mkdtemp(prefix="mint-kill-", dir=_roomy("/dev/shm") or tmp_path)
    yield Path(folder)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(params=DATABASES)
def killing(request, memory):
    """A catalog that nobody else has open, and so must be recovered by whoever comes next."""
    found = Killing(make_place(request, request.param, memory), str(memory / "logs"))
    assert found.wait(found.fork(deeds.warm)) == (0, None)
    return found


def work(place: Place, task, arguments: dict, answer) -> None:
    """The life of a worker, whose catalog is its own."""
    with Catalog.open(place.database, place.payloads, actor="nursery") as catalog:
        answer.send(task(catalog, **arguments))


class Killing:
    """Kills workers and looks at what they leave."""

    def __init__(self, place: Place, logs: str):
        self.place, self.logs, self.kills, self.workers = place, logs, 0, 0

    def log(self) -> str:
        self.workers += 1
        return f"{self.logs}/{self.workers}"

    def fork(self, task, **arguments):
        """Starts ``task(catalog, **arguments)`` in a fresh process; it and its answer's pipe."""
        receiver, sender = SERVER.Pipe(duplex=False)
        bare = Place(self.place.database, self.place.payloads, None)  # type: ignore[arg-type]
        process = SERVER.Process(target=work, args=(bare, task, arguments, sender))
        process.start()
        sender.close()
        return process, receiver

    def wait(self, started) -> tuple[int, object]:
        """Exit code, negative for a signal, and the value returned."""
        process, receiver = started
        try:
            value = receiver.recv()
        except EOFError:
            value = None
        process.join()
        assert process.exitcode in (0, -9)
        return process.exitcode, value

    def inspect(self, collect: bool) -> None:
        assert self.wait(self.fork(inspect.inspect, logs=self.logs, collect=collect)) == (0, [])

    def every_boundary(self, kind: str) -> int:
        """Kills a deed at each of its boundaries in turn; how many there were."""
        for boundary in range(1000):
            log, where = self.log(), {"kind": kind, "boundary": boundary}
            started = self.fork(deeds.killed_at, number=self.workers, log=log, **where)
            code, passed = self.wait(started)
            if code == 0:
                assert passed <= boundary
                self.inspect(collect=True)
                return boundary
            self.kills += 1
        raise AssertionError("a deed without an end")

    def random_moment(self, choice: random.Random, together: int) -> None:
        """Kills some workers that write at once, each at a random moment after it has begun."""
        running = []
        for _ in range(together):
            log, seed = self.log(), choice.getrandbits(30)
            how = {"seed": seed, "grace_s": 0.0 if together == 1 else 3600.0}
            started = self.fork(deeds.for_ever, number=self.workers, log=log, **how)
            running.append((started, Path(log)))
        for (process, _), log in running:
            while not (log.exists() and '"begun"' in log.read_text()):
                time.sleep(0.001)
            time.sleep(choice.uniform(0, 0.03))
            process.kill()
        for started, _ in running:
            assert self.wait(started)[0] == -9
            self.kills += 1
        self.inspect(collect=together == 1)


@pytest.mark.parametrize(
    "killing",
    [
        pytest.param("sqlite", marks=pytest.mark.long),
        pytest.param("postgres", marks=pytest.mark.slow),
    ],
    indirect=True,
)
def test_killed_at_every_boundary(killing):
    counts = {kind: killing.every_boundary(kind) for kind in deeds.KINDS}
    print(f"\n{killing.kills} kills: {counts}")
    assert min(counts.values()) >= 3, "a transaction has a beginning, a statement and an end"


@pytest.mark.parametrize("kills", [6, pytest.param(2000, marks=pytest.mark.slow)])
def test_killed_at_random_moments(killing, kills):
    choice = random.Random(int(os.environ["MINT_TEST_SEED"]))
    while killing.kills < kills:
        killing.random_moment(choice, choice.choice([1, 4, 8]))
