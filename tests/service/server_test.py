"""A server beside a clock that jumps, after long stops and on a full disk: sessions, accepted
requests, answers and checkpoints stay.
"""

import asyncio
import contextlib
import dataclasses
import errno
import os
import shutil
import time

import pytest

from mint_jax.catalog.records.database import DatabaseFailed
from mint_jax.errors import UserError
from mint_jax.lora.tree import AdapterConfig
from mint_jax.service import server_db
from mint_jax.service.server import Server, Sizes
from mint_jax.service.snapshots import Snapshot, path_of
from mint_jax.service.training_calls import Create, Load, Save
from tests.disks import FullDatabase
from tests.residency.clock import Clock
from tests.service.checkpoints_test import update
from tests.service.conftest import result_of, until
from tests.service.tinker_training_test import same_parts
from tests.train.live_test import SHAPES

SIZES = Sizes(
    slots={2: 1}, adapters={2: 1}, shapes=SHAPES, max_rows=8, host_bytes=1 << 26, session_s=3600.0
)
YEARS = 10 * 365 * 86400.0
WAIT_S = 60.0
CONFIG = AdapterConfig(1, 2.0, ("q",))
KINDS = ("weights", "sampler_weights")


@pytest.fixture
def serve(tiny_base, tmp_path):
    """``serve()``: a server over a folder, to be entered."""

    def make(folder="server", **sizes) -> Server:
        made = Server(tiny_base("llama"), tmp_path / folder, dataclasses.replace(SIZES, **sizes))
        made.tenancy.monotonic = Clock()
        return made

    return make


@pytest.fixture
def jump(monkeypatch):
    """``jump(seconds)`` sets the machine's clock, from what it is now."""
    wall, wall_ns = time.time, time.time_ns

    def set_clock(seconds: float) -> None:
        monkeypatch.setattr(time, "time", lambda: wall() + seconds)
        monkeypatch.setattr(time, "time_ns", lambda: wall_ns() + int(seconds * 1e9))

    return set_clock


def model_of(server: Server) -> tuple[str, str]:
    session = server.book.open_session("default", {})
    return session, server.book.add_model(session, 0, "default", {"rank": 1, "nbytes": 0}).id


def run(server: Server, model: str, *calls) -> tuple[list[str], list]:
    """Sends a model's first requests; returns their ids and results."""
    ids = [server.durable.submit(model, n, call).result() for n, call in enumerate(calls, 1)]
    return ids, [result_of(server.durable, id, WAIT_S) for id in ids]


@pytest.mark.parametrize("seconds", [-YEARS, YEARS])
def test_a_stop_ends_no_session_and_loses_no_accepted_request(serve, jump, seconds):
    """However long it was by the clock of the machine. What was accepted before is done, and its
    results are told.
    """
    with serve().running() as server:
        session, model = model_of(server)
        assert server.tenancy.is_open("default", session)
        saves = Save("weights", "s2"), Save("weights", "s3")
        ids, results = run(server, model, Create(CONFIG), *saves)
        assert None not in results
        server.durable.futures.delivered(ids[1])
        late = server.durable.submit(model, 5, Save("weights", "s5")).result()
    jump(seconds)
    with serve().running() as server:
        for _ in range(2):
            server.maintain()
        assert server.tenancy.is_open("default", session)
        assert [result_of(server.durable, id, WAIT_S) for id in ids] == results
        server.durable.submit(model, 4, Save("weights", "s4")).result()
        assert result_of(server.durable, late, WAIT_S) == {"path": f"tinker://{model}/weights/s5"}
        server.tenancy.monotonic.advance(SIZES.session_s - 1)
        server.maintain()
        assert model in server.live
        server.tenancy.monotonic.advance(1)
        server.maintain()
        assert not server.tenancy.is_open("default", session), (
            "now it was silent for so long while it was served"
        )


@pytest.mark.parametrize("seconds", [-YEARS, YEARS])
def test_a_clock_that_is_set_while_a_server_runs_changes_nothing(serve, jump, seconds):
    with serve().running() as server:
        session, model = model_of(server)
        saved = Save("weights", "a", ttl_s=3600)
        (_, id), (_, result) = run(server, model, Create(CONFIG), saved)
        link = server.links.make("digest/name")
        server.durable.futures.delivered(id)
        jump(seconds)
        server.maintain()
        assert server.tenancy.is_open("default", session)
        assert result_of(server.durable, id) == result
        row = server.book.checkpoint("default", model, "weights", "a")
        assert result == {"path": row.path}
        assert server.links.key_of(link) == "digest/name"
        second = server.book.open_session("default", {})
        assert [one.id for one in server.book.sessions("default", 10, 0)] == [second, session]


def test_answers_that_ended_after_a_restart_are_behind_a_cursor_from_before(serve, jump):
    """A client polls a group on with the cursor that it has; the clock may go back."""

    async def polled(server, cursor):
        answer, _ = server.answers.begin("group", None, "")
        server.answers.end(answer, "value")
        found, cursor = await server.answers.wait_group("group", cursor, 0.0)
        assert [one.id for one in found] == [answer.id]
        return cursor

    cursor = 0
    for by in (0, -YEARS, YEARS):
        jump(by)
        with serve().running() as server:
            cursor = asyncio.run(polled(server, cursor))
    assert cursor < 2**53, "clients may hold it as a float"


def held_of(server, model):
    return server.durable.do(model, lambda live: live.read_state(model)).result(WAIT_S)


@contextlib.contextmanager
def full_disk(server, call):
    """A disk that takes nothing more: SQLite's commits or a system call fail."""

    def refuse(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if call == "database":
        with FullDatabase(server.database, "COMMIT"):
            yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, call, refuse)
        yield


def ended(server, id, wait_s=WAIT_S):
    """Returns a result, or the reason of a failure that is no mistake of the client."""
    try:
        return result_of(server.durable, id, wait_s)
    except RuntimeError as reason:
        return str(reason)


@pytest.mark.parametrize("call", ["database", "fsync", "rename"])
def test_after_a_full_disk_training_continues_with_everything_acknowledged(
    serve, rng, monkeypatch, call
):
    """Each request fails once and says why, or is done; the state stays, without a restart."""
    monkeypatch.setattr(server_db, "RETRY_S", 0.05)
    notes = {"what": "x" * 60_000}  # more than the pages that a database has free

    def save(kind, name):
        return Save(kind, name, metadata=notes)

    ids, refused, reasons = [], [], []

    def send(calls, wait_s=WAIT_S):
        for call in calls:
            try:
                ids.append(server.durable.submit(model, len(ids) + 1, call).result())
                ended(server, ids[-1], wait_s)
            except DatabaseFailed as reason:
                reasons.append(str(reason))
                refused.append(call)

    with serve(every=1).running() as server:
        _, model = model_of(server)
        send([Create(CONFIG), *update(rng), save("weights", "before")])
        assert server.trouble() == ""
        with full_disk(server, call):
            saves = save("weights", "full"), save("sampler_weights", "full")
            send([*update(rng), *saves, *update(rng)], 0.5)
            if call == "database":
                assert refused
                assert "disk is full" in server.trouble()
                assert server.trouble(sampling=True) == ""
            with contextlib.suppress(UserError):
                server.book.open_session("default", {"note": notes})
            server.maintain()
        until(lambda: not server.trouble())
        reasons += [one for one in (ended(server, id) for id in ids) if isinstance(one, str)]
        assert reasons, "a request was refused, or a checkpoint could not be kept"
        for reason in reasons:
            assert any(words in reason for words in ("No space left", "disk is full")), reason
        again, count, late = refused.copy(), len(ids), (save(kind, "after") for kind in KINDS)
        refused.clear()
        send([*again, *update(rng), *late])
        assert not refused
        results = [ended(server, id) for id in ids]
        assert not [one for one in results[:4] + results[count:] if isinstance(one, str)]
        state = held_of(server, model)
        assert state.steps == 4
        saved = [one["path"] for one in results if isinstance(one, dict) and "path" in one]
        names = ("weights/before", "weights/after", "sampler_weights/after")
        assert {f"tinker://{model}/{name}" for name in names} <= set(saved)
        server.maintain()
    with serve(every=1).running() as server:
        assert server.trouble() == ""
        same_parts(held_of(server, model), state)
        for id, result in zip(ids, results):
            assert isinstance(result, str) or result_of(server.durable, id, WAIT_S) is not None
        for number, path in enumerate(saved):
            if "/weights/" in path:
                kept = server.folder / f"kept{number}"
                server.checkpoints.load(Load(path, True, "default"), kept)
            else:
                server.catalog.load(server.checkpoints.digest("default", path))


def test_a_load_survives_the_deletion_of_its_checkpoint_before_a_snapshot(serve, monkeypatch):
    """The load was acknowledged; a restart runs it again."""
    with serve().running() as server:
        (_, one), (_, other) = model_of(server), model_of(server)
        path = f"tinker://{one}/weights/x"

        def refuse(*_):
            raise OSError(errno.ENOSPC, "no space")

        monkeypatch.setattr(Snapshot, "write", refuse)
        run(server, one, Create(CONFIG, 7), Save("weights", "x"))
        loaded = server.durable.submit(other, 1, Load(path, True, "default")).result()
        assert result_of(server.durable, loaded, WAIT_S) == {"path": path}
        expected = held_of(server, one)
        server.checkpoints.remove(server.book.checkpoint("default", one, "weights", "x"))
    monkeypatch.undo()
    for _ in range(2):
        with serve().running() as server:
            same_parts(held_of(server, other), expected)
            assert result_of(server.durable, loaded, WAIT_S) == {"path": path}
    assert not list(server.durable.snapshots.loads.iterdir()), "a snapshot has it"


def test_saves_of_a_policy_are_kept_in_their_order_and_a_load_follows_them(serve, monkeypatch):
    """Sent without waiting: the first save takes longer than the second, and the load has the
    second's state.
    """
    with serve().running() as server:
        _, model = model_of(server)
        save, starts = server.checkpoints.save, []

        def slow(model, request, call, held):
            starts.append(call.metadata)
            time.sleep(0.4 if len(starts) == 1 else 0.0)
            return save(model, request, call, held)

        monkeypatch.setattr(server.checkpoints, "save", slow)
        path = f"tinker://{model}/weights/x"
        calls: list = [Create(CONFIG)]
        calls += [Save("weights", "x", overwrite=True, metadata={"turn": turn}) for turn in (1, 2)]
        calls.append(Load(path, True, "default"))
        _, results = run(server, model, *calls)
        assert results[1:] == [{"path": path}] * 3
        assert starts == [{"turn": 1}, {"turn": 2}]
        row = server.book.checkpoint("default", model, "weights", "x")
        assert row.details["metadata"] == {"turn": 2}


def test_a_policy_that_is_forgotten_on_a_full_disk_leaves_a_folder_that_opens(
    serve, tmp_path, monkeypatch
):
    """Its snapshot is needed until the database says that it is gone. Its session is over, so it
    does not come back.
    """
    monkeypatch.setattr(server_db, "RETRY_S", 0.05)
    with serve(every=1).running() as server:
        session, model = model_of(server)
        run(server, model, Create(CONFIG), Save("weights", "x"))
        snapshot = path_of(server.durable.snapshots.states, model)
        until(snapshot.exists)
        server.book.end_session(session)
        with full_disk(server, "database"):
            server.durable.forget(model)
            with pytest.raises(DatabaseFailed):
                server.durable.submit("another", 3, Create(CONFIG)).result()
            assert snapshot.exists()
            shutil.copytree(server.folder, tmp_path / "crashed")
        until(lambda: not snapshot.exists())
    with serve("crashed").running() as server:
        assert model in server.durable.restored
        # behind what the start asked of the policy
        trained = server.durable.do(model, lambda live: model in live)
        assert not trained.result(WAIT_S)
