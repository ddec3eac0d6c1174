"""Futures: identity of requests, waits of threads and tasks, deletion, full and damaged disks."""

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
from mint_jax.service.futures import KEEP_S, Done, Gone
from mint_jax.service.server_db import FolderBusy, Overloaded
from tests.disks import FullDatabase
from tests.residency.clock import Clock
from tests.service.conftest import opened


@pytest.fixture
def folder(memory):
    return memory / "server"


def run_all(futures):
    """Takes and finishes everything that is ready; returns what was taken."""
    taken = []
    while (request := futures.take()) is not None:
        taken.append((request.model, request.seq_id, request.is_again))
        futures.finish(request.id, Done(b"done"))
    return taken


def fill(futures, count, body=b"body"):
    return [futures.submit("m", n, "step", body) for n in range(1, count + 1)]


def rows(futures):
    futures.place("m")  # everything before is written
    tables = ("payloads", "requests")
    return [futures._database.read(f"SELECT count(*) FROM {name}")[0][0] for name in tables]


def release(futures, ids):
    """Delivers these results and waits for their time to pass."""
    for id in ids:
        assert futures.wait(id, 30) == Done(b"done")
        futures.delivered(id)
    futures._clock.advance(KEEP_S)
    futures.expire()


def test_one_request_submitted_at_once_by_many_runs_once(folder):
    with opened(folder) as futures, concurrent.futures.ThreadPoolExecutor(16) as pool:
        for n in range(1, 20):
            asked = [pool.submit(futures.submit, "m", n, "step", b"x") for _ in range(16)]
            assert len({done.result() for done in asked}) == 1
        assert run_all(futures) == [("m", n, False) for n in range(1, 20)]


def test_a_snapshot_that_does_not_fit_the_database_is_refused(folder, memory):
    with opened(folder, clock=Clock()) as futures:
        ids = fill(futures, 2)
        run_all(futures)
        release(futures, ids)
        place = futures.place("m")
        futures.snapshot("m", place)
        assert rows(futures) == [0, 0]
        with pytest.raises(Gone, match="request 2 of 'm' has run"):
            futures.submit("m", 2, "step", b"body")
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
            id = futures.submit("m", n, "step", bytes(20_000))
            run_all(futures)
            release(futures, [id])
            futures.snapshot("m", futures.place("m"))
            sizes += [sum(path.stat().st_size for path in folder.iterdir())] * (n in (300, 600))
    assert sizes[1] <= sizes[0] + 100_000
    assert sizes[1] < 10_000_000


def test_a_model_that_is_forgotten_holds_nothing(folder):
    with opened(folder) as futures, concurrent.futures.ThreadPoolExecutor(1) as pool:
        ids = fill(futures, 30)
        taken = futures.take()
        assert taken is not None
        waiting = pool.submit(futures.wait, ids[5], 30)
        while not len(futures._waker):
            time.sleep(0.001)
        futures.forget("m")
        futures.forget("m")
        with pytest.raises(Gone):
            waiting.result(30)
        futures.finish(taken.id, Done(b"too late"))
        assert futures.take() is None
        assert rows(futures) == [0, 0]
        fresh = futures.submit("m", 1, "step", b"a new life")
    with opened(folder) as futures:
        assert run_all(futures) == [("m", 1, False)]
        assert futures.wait(fresh, 30) == Done(b"done")
        with pytest.raises(Gone):
            futures.wait(ids[0])


def test_threads_and_tasks_wait_for_one_future(folder):
    with opened(folder) as futures, concurrent.futures.ThreadPoolExecutor(10) as pool:
        [id] = fill(futures, 1)
        threads = [pool.submit(futures.wait, id, 30) for _ in range(10)]

        async def ask():
            tasks = [asyncio.create_task(futures.wait_task(id, 30)) for _ in range(10)]
            short = asyncio.create_task(futures.wait_task(id, 0.05))
            dropped = asyncio.create_task(futures.wait_task(id, 30))
            assert await short is None
            dropped.cancel()
            run_all(futures)
            return await asyncio.gather(*tasks)

        assert asyncio.run(ask()) == [Done(b"done")] * 10
        assert [thread.result(30) for thread in threads] == [Done(b"done")] * 10
        late = futures.submit("m", 2, "step", b"x")
        began = time.monotonic()
        assert futures.wait(late, 0.1) is None
        assert time.monotonic() - began >= 0.1
        assert len(futures._waker) == 0, "ended waits leave nothing"


@pytest.mark.parametrize(("statement", "back"), [("INSERT", True), ("COMMIT", False)])
def test_a_request_that_the_disk_refused_has_no_id(folder, monkeypatch, statement, back):
    """Everyone who asked for it gets the error, and may ask again. Earlier results stay readable;
    later ones follow once there is space. If there is none until the process ends, their requests
    run once more.
    """
    monkeypatch.setattr(server_db, "RETRY_S", 0.05)
    with opened(folder) as futures:
        kept, *others = fill(futures, 3)
        first = futures.take()
        assert first is not None
        futures.finish(first.id, Done(b"kept"))
        assert futures.wait(kept, 30) == Done(b"kept")
        assert [futures.take() is None for _ in others] == [False, False]
        gate = threading.Event()
        with FullDatabase(futures._database, statement, gate):
            with concurrent.futures.ThreadPoolExecutor(9) as pool:
                asked = [pool.submit(futures.submit, "m", 4 + k % 2, "s", b"x") for k in range(8)]
                task = pool.submit(lambda: asyncio.run(futures.submit_task("m", 6, "step", b"x")))
                time.sleep(0.05)
                gate.set()
                for one in [*asked, task]:
                    with pytest.raises(DatabaseFailed, match="disk is full"):
                        one.result(30)
            assert "disk is full" in futures._database.trouble
            for refused in (lambda: futures.submit("m", 4, "s", b"x"), lambda: futures.place("m")):
                with pytest.raises(DatabaseFailed):
                    refused()
            for id in others:
                futures.finish(id, Done(b"late"))
                futures.delivered(kept)
            assert futures.take() is None, "requests that are not in the database do not run"
            assert futures.wait(kept) == Done(b"kept")
            time.sleep(0.2)  # several probes
            if not back:
                futures._database.close()
            assert futures.wait(others[0]) is None
        if back:
            assert [futures.wait(id, 30) for id in others] == [Done(b"late")] * 2
            assert futures._database.trouble == ""
            id = futures.submit("m", 4, "another call", b"another body")
            assert run_all(futures) == [("m", 4, False)]
            assert futures.wait(id, 30) == Done(b"done")
    with opened(folder) as futures:
        assert futures.wait(kept) == Done(b"kept")
        again = [("m", 1, True), ("m", 2, back), ("m", 3, back)] + [("m", 4, True)] * back
        assert run_all(futures) == again
        expected = Done(b"late" if back else b"done")
        assert [futures.wait(id, 30) for id in others] == [expected] * 2


def test_a_full_queue_refuses_a_request_without_a_trace(folder):
    gate = threading.Event()
    with (
        opened(folder, queue_bytes=2000) as futures,
        concurrent.futures.ThreadPoolExecutor(1) as pool,
    ):
        futures._database.write(lambda connection: gate.wait(30))
        first = pool.submit(futures.submit, "m", 1, "step", bytes(1950))
        while not futures._database._queued:
            time.sleep(0.001)
        with pytest.raises(Overloaded):
            futures.submit("m", 2, "step", bytes(100))
        gate.set()
        assert futures.wait(first.result(30)) is None
        futures.submit("m", 2, "step", b"another")
        assert run_all(futures) == [("m", 1, False), ("m", 2, False)]


def test_flipped_bits_are_told_or_harmless(folder):
    """Wherever they are in the file: no result that is given differs from what was written."""
    choice = random.Random(os.environ["MINT_TEST_SEED"])
    with opened(folder) as futures:
        ids = fill(futures, 8, b"body " * 300)
        for _ in range(5):
            request = futures.take()
            assert request is not None
            futures.finish(request.id, Done(request.id.encode() * 100))
        places = {"m": futures.place("m")}
    path, told = folder / "server.db", []
    whole = path.read_bytes()
    for _ in range(100):
        data = bytearray(whole)
        data[choice.randrange(len(data))] ^= 1 << choice.randrange(8)
        path.write_bytes(data)
        with contextlib.suppress(Gone):
            try:
                with opened(folder, places) as futures:
                    expected = [Done(id.encode() * 100) for id in ids[:5]] + [None] * 3
                    for id, outcome in zip(ids, expected, strict=True):
                        assert futures.wait(id) in (outcome, None)
            except UserError as error:
                told.append(str(error))
    assert len(told) > 2
    # one that lost its counter is "another database"
    assert all(str(path) in reason or "another database" in reason for reason in told)


def test_a_folder_is_opened_once(folder):
    with opened(folder), pytest.raises(FolderBusy, match="stop the other process"), opened(folder):
        pass
