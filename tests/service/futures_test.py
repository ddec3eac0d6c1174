"""Futures: identity of requests, order, waits of threads and tasks, what a restart brings back,
disks that refuse.
"""

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


def run_all(futures, result=b"done"):
    """Takes and finishes everything that is ready; what was taken."""
    taken = []
    while (request := futures.take()) is not None:
        taken.append((request.model, request.seq_id, request.is_again))
        futures.finish(request.id, Done(result))
    return taken


def fill(futures, model, count, body=b"body"):
    return [futures.submit(model, n, "step", body) for n in range(1, count + 1)]


def rows(futures, table):
    futures.place("m")  # everything before is written
    return futures._database.read(f"SELECT count(*) FROM {table}")[0][0]


def release(futures, ids):
    """The client has these results, and their time is over."""
    for id in ids:
        assert futures.wait(id, 30) == Done(b"done")
        futures.delivered(id)
    futures._clock.advance(KEEP_S)
    futures.expire()


def test_one_request_submitted_at_once_by_many_runs_once(folder):
    with opened(folder) as futures, concurrent.futures.ThreadPoolExecutor(16) as pool:
        for n in range(1, 20):
            ids = {
                done.result()
                for done in [pool.submit(futures.submit, "m", n, "step", b"x") for _ in range(16)]
            }
            assert len(ids) == 1
        assert run_all(futures) == [("m", n, False) for n in range(1, 20)]


@pytest.mark.parametrize(
    ("model", "seq_id", "call", "why"),
    [
        ("", 1, "step", "model is ''"),
        ("m", 0, "step", "seq_id .* is 0"),
        ("m", -1, "step", "-1"),
        ("m", 1, "c" * 1001, "call is 'ccc"),
    ],
)
def test_a_request_that_cannot_be_named_is_refused(folder, model, seq_id, call, why):
    with opened(folder) as futures, pytest.raises(UserError, match=why):
        futures.submit(model, seq_id, call, b"")


def test_a_snapshot_that_does_not_fit_the_database_is_refused(folder, memory):
    with opened(folder, clock=Clock()) as futures:
        ids = fill(futures, "m", 2)
        place = futures.place("m")
        with pytest.raises(UserError, match="it is of another database"):
            futures.snapshot("m", place + 1)
        run_all(futures)
        release(futures, ids)
        place = futures.place("m")
        futures.snapshot("m", place)
        assert (rows(futures, "payloads"), rows(futures, "requests")) == (0, 0)
        with pytest.raises(Gone, match="request 2 of 'm' has run"):
            futures.submit("m", 2, "step", b"body")
    with (
        pytest.raises(UserError, match=f"of place 0, but requests up to {place} are deleted"),
        opened(folder),
    ):
        pass
    with (
        pytest.raises(UserError, match=f"snapshot of 'm' is of place {place}, .* end at 0"),
        opened(memory / "another", {"m": place}),
    ):
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
    with opened(folder) as futures:
        ids = fill(futures, "m", 30)
        taken = futures.take()
        assert taken is not None
        caught = []

        def ask():
            with pytest.raises(Gone) as error:
                futures.wait(ids[5], 30)
            caught.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        time.sleep(0.05)
        futures.forget("m")
        futures.forget("m")
        thread.join(30)
        assert len(caught) == 1, "the wait ended"
        futures.finish(taken.id, Done(b"too late"))
        assert futures.take() is None
        assert (rows(futures, "payloads"), rows(futures, "requests")) == (0, 0)
        fresh = futures.submit("m", 1, "step", b"a new life")
    with opened(folder) as futures:
        assert run_all(futures) == [("m", 1, False)]
        assert futures.wait(fresh, 30) == Done(b"done")
        with pytest.raises(Gone):
            futures.wait(ids[0])


def test_threads_and_tasks_wait_for_one_future(folder):
    with opened(folder) as futures:
        [id] = fill(futures, "m", 1)
        found = []
        threads = [
            threading.Thread(target=lambda: found.append(futures.wait(id, 30))) for _ in range(10)
        ]
        for thread in threads:
            thread.start()

        async def ask():
            tasks = [asyncio.create_task(futures.wait_task(id, 30)) for _ in range(10)]
            short = asyncio.create_task(futures.wait_task(id, 0.05))
            dropped = asyncio.create_task(futures.wait_task(id, 30))
            assert await short is None
            dropped.cancel()
            futures.take()
            futures.finish(id, Done(b"for all"))
            return await asyncio.gather(*tasks)

        assert asyncio.run(ask()) == [Done(b"for all")] * 10
        for thread in threads:
            thread.join(30)
        assert found == [Done(b"for all")] * 10
        late = futures.submit("m", 2, "step", b"x")
        began = time.monotonic()
        assert futures.wait(late, 0.1) is None
        assert time.monotonic() - began >= 0.1
        assert len(futures._waker) == 0, "ended waits leave nothing"


@pytest.mark.parametrize("statement", ["INSERT", "COMMIT"])
@pytest.mark.parametrize("back", [True, False])
def test_a_request_that_the_disk_refused_has_no_id(folder, monkeypatch, statement, back):
    """All who asked for it get the error, also those that came while it was on its way, and may ask
    again. Results stay readable, and what ended meanwhile is seen once there is space. Or there is
    none until the process ends: then it runs once more.
    """
    monkeypatch.setattr(server_db, "RETRY_S", 0.05)
    with opened(folder) as futures:
        kept, running, last = fill(futures, "m", 3)
        request = futures.take()
        assert request is not None
        futures.finish(request.id, Done(b"kept"))
        assert futures.wait(kept, 30) == Done(b"kept")
        for _ in range(2):
            futures.take()
        gate = threading.Event()
        with contextlib.ExitStack() as full:
            full.enter_context(FullDatabase(futures._database, statement, gate))
            with concurrent.futures.ThreadPoolExecutor(9) as pool:
                asked = [pool.submit(futures.submit, "m", 4 + k % 2, "s", b"x") for k in range(8)]
                task = pool.submit(lambda: asyncio.run(futures.submit_task("m", 6, "step", b"x")))
                time.sleep(0.05)
                gate.set()
                for one in [*asked, task]:
                    with pytest.raises(DatabaseFailed, match="disk is full"):
                        one.result(30)
            assert "disk is full" in futures._database.trouble
            with pytest.raises(DatabaseFailed):
                futures.submit("m", 4, "step", b"x")
            for id, result in ((running, b"second"), (last, b"third")):
                futures.finish(id, Done(result))
                futures.delivered(kept)
            futures.forget("nobody")
            with pytest.raises(DatabaseFailed):
                futures.place("m")
            assert futures.take() is None, "what is not in the database is not run"
            assert futures.wait(kept) == Done(b"kept")
            time.sleep(0.2)  # several probes
            assert futures.wait(running) is None
            if not back:
                futures._database.close()
                assert futures.wait(running) is None
        if back:
            assert [futures.wait(id, 30) for id in (running, last)] == [
                Done(b"second"),
                Done(b"third"),
            ]
            assert futures._database.trouble == ""
            id = futures.submit("m", 4, "another call", b"another body")
            assert run_all(futures) == [("m", 4, False)]
            assert futures.wait(id, 30) == Done(b"done")
    with opened(folder) as futures:
        assert futures.wait(kept) == Done(b"kept")
        again = [("m", 1, True), ("m", 2, back), ("m", 3, back)] + [("m", 4, True)] * back
        assert run_all(futures) == again
        expected = [Done(b"second"), Done(b"third")] if back else [Done(b"done")] * 2
        assert [futures.wait(id, 30) for id in (running, last)] == expected


def test_a_full_queue_refuses_a_request_without_a_trace(folder):
    gate = threading.Event()
    with (
        opened(folder, queue_bytes=2000) as futures,
        concurrent.futures.ThreadPoolExecutor(2) as pool,
    ):
        futures._database.write(lambda connection: gate.wait(30))
        first = pool.submit(futures.submit, "m", 1, "step", bytes(1950))
        while not futures._database._queued:
            time.sleep(0.001)
        with pytest.raises(Overloaded):
            futures.submit("m", 2, "step", bytes(100))
        with pytest.raises(Overloaded):
            asyncio.run(futures.submit_task("m", 2, "step", bytes(100)))
        gate.set()
        assert futures.wait(first.result(30)) is None
        futures.submit("m", 2, "step", b"another")
        assert run_all(futures) == [("m", 1, False), ("m", 2, False)]


def test_flipped_bits_are_told_or_harmless(folder):
    """Wherever they are in the file: no result that is given differs from what was written."""
    choice = random.Random(os.environ["MINT_TEST_SEED"])
    with opened(folder) as futures:
        ids = fill(futures, "m", 8, b"body " * 300)
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
