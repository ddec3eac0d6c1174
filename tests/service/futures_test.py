"""Futures: identity of requests, waits of tasks, deletion, full and damaged disks."""

import asyncio
import concurrent.futures
import contextlib
import os
import random
import threading
import time

import pytest

from mint_jax.catalog.records.database import DatabaseFailed
from mint_jax.errors import UserError
from mint_jax.service import server_db
from mint_jax.service.futures import KEEP_S, Futures, Gone, Outcome
from mint_jax.service.server_db import FolderBusy, Overloaded, ServerDatabase
from tests.disks import FullDatabase
from tests.residency.clock import Clock

DONE = Outcome(b"done")


@pytest.fixture
def folder(memory):
    return memory / "server"


class Opened(Futures):
    """Futures with a list of what is ready, and calls that wait."""

    def __init__(self, database, places=None, **options):
        self.ready, self.database = [], database
        super().__init__(database, places, self.ready.append, **options)

    def send(self, seq_id, body=b"body", model="m"):
        return self.submit(model, seq_id, "step", body).result()

    def get(self, id):
        return asyncio.run(self.wait(id, 30))

    def run_all(self):
        """Finishes everything that is ready; returns what it was."""
        taken = []
        while self.ready:
            request = self.ready.pop(0)
            taken.append((request.seq_id, request.is_again))
            self.finish(request, DONE)
        return taken

    def release(self, ids):
        """Delivers these results and waits for their time to pass."""
        for id in ids:
            assert self.get(id) == DONE
            self.delivered(id)
        self._clock.advance(KEEP_S)
        self.expire()

    def rows(self):
        self.place("m")  # everything before is written
        tables = ("payloads", "requests")
        return [self.database.read(f"SELECT count(*) FROM {name}")[0][0] for name in tables]


@contextlib.contextmanager
def opened(folder, places=None, queue_bytes=1 << 26, **options):
    with ServerDatabase(folder / "server.db", queue_bytes) as database:
        yield Opened(database, places, **options)


def test_one_request_submitted_at_once_by_many_runs_once(folder):
    with opened(folder) as futures, concurrent.futures.ThreadPoolExecutor(16) as pool:
        for n in range(1, 20):
            assert len(set(pool.map(futures.send, [n] * 16))) == 1
        assert futures.run_all() == [(n, False) for n in range(1, 20)]


def test_a_snapshot_that_does_not_fit_the_database_is_refused(folder, memory):
    with opened(folder, clock=Clock()) as futures:
        ids = [futures.send(n) for n in (1, 2)]
        futures.run_all()
        futures.release(ids)
        place = futures.place("m")
        futures.snapshot("m", place)
        assert futures.rows() == [0, 0]
        with pytest.raises(Gone, match="request 2 of 'm' has run"):
            futures.send(2)
    refused = {
        f"of place 0, but requests up to {place} are deleted": opened(folder),
        f"of place {place}, .* it is of another database": opened(memory / "new", {"m": place}),
    }
    for match, opening in refused.items():
        with pytest.raises(UserError, match=match), opening:
            pass


def test_a_database_does_not_grow_with_what_is_settled(folder):
    sizes = []
    with opened(folder, clock=Clock()) as futures:
        for n in range(1, 601):
            id = futures.send(n, bytes(20_000))
            futures.run_all()
            futures.release([id])
            futures.snapshot("m", futures.place("m"))
            sizes += [sum(path.stat().st_size for path in folder.iterdir())] * (n in (300, 600))
    assert sizes[1] <= sizes[0] + 100_000
    assert sizes[1] < 10_000_000


def test_tasks_wait_until_an_end_a_timeout_or_the_end_of_their_model(folder):
    async def ask(futures, ids):
        tasks = [asyncio.create_task(futures.wait(id, 30)) for id in (ids[0], ids[0], ids[1])]
        dropped = asyncio.create_task(futures.wait(ids[0], 30))
        assert await futures.wait(ids[0], 0.05) is None
        dropped.cancel()
        futures.finish(futures.ready.pop(0), DONE)
        assert await asyncio.gather(*tasks[:2]) == [DONE] * 2
        taken = futures.ready.pop(0)
        futures.forget("m")
        with pytest.raises(Gone):
            await tasks[2]
        futures.finish(taken, Outcome(b"too late"))

    with opened(folder) as futures:
        asyncio.run(ask(futures, [futures.send(n) for n in (1, 2, 3)]))
        assert not futures._waker._waiting, "ended waits leave nothing"
        assert futures.rows() == [0, 0]
        assert futures.body(futures.ready.pop(0)) is None
        fresh = futures.send(1, b"a new life")
    with opened(folder) as futures:
        assert futures.run_all() == [(1, False)]
        assert futures.get(fresh) == DONE


@pytest.mark.parametrize(("statement", "back"), [("INSERT", True), ("COMMIT", False)])
def test_a_request_that_the_disk_refused_has_no_id(folder, monkeypatch, statement, back):
    """Everyone who asked for it gets the error, and may ask again. Earlier results stay readable;
    later ones follow once there is space. If there is none until the process ends, their requests
    run once more.
    """
    monkeypatch.setattr(server_db, "RETRY_S", 0.05)
    late = Outcome(b"late")
    with opened(folder) as futures:
        kept, *others = [futures.send(n) for n in (1, 2, 3)]
        futures.finish(futures.ready.pop(0), DONE)
        assert futures.get(kept) == DONE
        gate = threading.Event()
        with FullDatabase(futures.database, statement, gate):
            asked = [futures.submit("m", 4 + k % 2, "s", b"x") for k in range(8)]
            gate.set()
            for one in asked:
                with pytest.raises(DatabaseFailed, match="disk is full"):
                    one.result(30)
            assert "disk is full" in futures.database.trouble
            for refused in (lambda: futures.submit("m", 4, "s", b"x"), lambda: futures.place("m")):
                with pytest.raises(DatabaseFailed):
                    refused()
            for request in futures.ready:
                futures.finish(request, late)
                futures.delivered(kept)
            assert len(futures.ready) == 2, "requests that are not in the database do not run"
            futures.ready.clear()
            assert futures.outcome(kept) == DONE
            time.sleep(0.2)  # several probes
            assert futures.outcome(others[0]) is None
            if not back:
                futures.database.close()
        if back:
            assert [futures.get(id) for id in others] == [late] * 2
            assert futures.database.trouble == ""
            id = futures.submit("m", 4, "another call", b"another body").result()
            assert futures.run_all() == [(4, False)]
            assert futures.get(id) == DONE
    with opened(folder) as futures:
        assert futures.outcome(kept) == DONE
        again = [(1, True), (2, back), (3, back)] + [(4, True)] * back
        assert futures.run_all() == again
        assert [futures.get(id) for id in others] == [late if back else DONE] * 2


def test_a_full_queue_refuses_a_request_without_a_trace(folder):
    gate = threading.Event()
    with opened(folder, queue_bytes=2000) as futures:
        futures.database.write(lambda connection: gate.wait(30))
        first = futures.submit("m", 1, "step", bytes(1950))
        with pytest.raises(Overloaded):
            futures.send(2, bytes(100))
        gate.set()
        assert futures.outcome(first.result()) is None
        futures.send(2, b"another")
        assert futures.run_all() == [(1, False), (2, False)]


def test_flipped_bits_are_refused_or_harmless(folder):
    """Wherever they are in the file: no result that is given differs from what was written."""
    choice = random.Random(os.environ["MINT_TEST_SEED"])
    with opened(folder) as futures:
        ids = [futures.send(n, b"body " * 300) for n in range(1, 9)]
        for request in futures.ready[:5]:
            futures.finish(request, Outcome(request.id.encode() * 100))
        places = {"m": futures.place("m")}
    path, reasons = folder / "server.db", []
    whole = path.read_bytes()
    for _ in range(100):
        data = bytearray(whole)
        data[choice.randrange(len(data))] ^= 1 << choice.randrange(8)
        path.write_bytes(data)
        with contextlib.suppress(Gone):
            try:
                with opened(folder, places) as futures:
                    expected = [Outcome(id.encode() * 100) for id in ids[:5]] + [None] * 3
                    for id, outcome in zip(ids, expected, strict=True):
                        assert futures.outcome(id) in (outcome, None)
            except UserError as error:
                reasons.append(str(error))
    assert len(reasons) > 2
    # one that lost its counter is "another database"
    assert all(str(path) in reason or "another database" in reason for reason in reasons)


def test_a_folder_is_opened_once(folder):
    with opened(folder), pytest.raises(FolderBusy, match="stop the other process"), opened(folder):
        pass
