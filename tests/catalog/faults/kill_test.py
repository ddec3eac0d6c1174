"""kill -9 at every boundary and at random moments: what was acknowledged stays, what was not is
there whole or not at all.
"""

import os
import random
import shutil
import signal
import tempfile
import time
from pathlib import Path

import pytest

from tests.catalog.conftest import DATABASES, make_place
from tests.catalog.faults import deeds
from tests.catalog.faults.nursery import Nursery
from tests.catalog.postgres import _roomy


@pytest.fixture
def memory(tmp_path):
    """A folder in memory where there is room: a killed process loses nothing of it, and syncing
    costs nothing.
    """
    folder = tempfile.mkdtemp(prefix="mint-kill-", dir=_roomy("/dev/shm") or tmp_path)
    yield Path(folder)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(params=DATABASES)
def nursery(request, memory):
    """With a catalog that nobody else has open, and so must be recovered by whoever comes next."""
    place = make_place(request, request.param, memory)
    found = Nursery(place.database, place.payloads)
    found.logs = str(memory / "logs")
    yield found
    found.close()


class Killing:
    """Kills workers and looks at what they leave."""

    def __init__(self, nursery: Nursery):
        self.nursery, self.kills, self.workers = nursery, 0, 0

    def log(self) -> str:
        self.workers += 1
        return f"{self.nursery.logs}/{self.workers}"

    def inspect(self, collect: bool) -> None:
        assert self.nursery.run("inspect.inspect", logs=self.nursery.logs, collect=collect) == []

    def every_boundary(self, kind: str, reads: bool) -> int:
        """Kills a deed at each of its boundaries in turn; how many there were."""
        for boundary in range(1000):
            log = self.log()
            arguments = {
                "number": self.workers,
                "log": log,
                "kind": kind,
                "boundary": boundary,
                "reads": reads,
            }
            code, passed = self.nursery.wait(self.nursery.fork("deeds.killed_at", **arguments))
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
            log = self.log()
            arguments = {
                "number": self.workers,
                "log": log,
                "seed": choice.getrandbits(30),
                "grace_s": 0.0 if together == 1 else 3600.0,
            }
            running.append((self.nursery.fork("deeds.for_ever", **arguments), Path(log)))
        for process, log in running:
            while not (log.exists() and '"begun"' in log.read_text()):
                time.sleep(0.001)
            time.sleep(choice.uniform(0, 0.03))
            os.kill(process, signal.SIGKILL)
        for process, _ in running:
            assert self.nursery.wait(process)[0] == -9
            self.kills += 1
        self.inspect(collect=together == 1)


@pytest.mark.parametrize(
    ("nursery", "reads"),
    [
        pytest.param("sqlite", False, marks=pytest.mark.long),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("postgres", False), ("sqlite", True), ("postgres", True))
        ),
    ],
    ids=["sqlite-writes", "postgres-writes", "sqlite-every call", "postgres-every call"],
    indirect=["nursery"],
)
def test_killed_at_every_boundary(nursery, reads):
    killing = Killing(nursery)
    counts = {kind: killing.every_boundary(kind, reads) for kind in deeds.KINDS}
    print(f"\n{killing.kills} kills: {counts}")
    assert min(counts.values()) >= 3, "a transaction has a beginning, a statement and an end"


@pytest.mark.parametrize("kills", [20, pytest.param(2000, marks=pytest.mark.slow)])
def test_killed_at_random_moments(nursery, kills):
    choice = random.Random(int(os.environ["MINT_TEST_SEED"]))
    killing = Killing(nursery)
    while killing.kills < kills:
        killing.random_moment(choice, choice.choice([1, 4, 8]))
