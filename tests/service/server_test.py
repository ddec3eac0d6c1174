"""A server beside a clock that jumps, after long stops and on a full disk: sessions, accepted
requests, answers and checkpoints stay.
"""

import asyncio
import contextlib
import dataclasses
import errno
import json
import logging
import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from mint_jax.catalog.records.database import DatabaseFailed
from mint_jax.errors import UserError
from mint_jax.lora.tree import AdapterConfig
from mint_jax.mesh import single_device_mesh
from mint_jax.models import base as base_lib
from mint_jax.service import server_db
from mint_jax.service.book import Book, NotFound, steady
from mint_jax.service.calls import Create, ForwardBackward, Load, Optim, Save
from mint_jax.service.durable import Snapshot, path_of
from mint_jax.service.server import Server, Sizes
from mint_jax.service.server_db import ServerDatabase
from mint_jax.train.state import OptimizerConfig
from tests.disks import FullDatabase, run_limited
from tests.residency.clock import Clock
from tests.service.tinker_training_test import same_parts
from tests.train.live_test import SHAPES, coefs, random_data

SIZES = Sizes(
    slots={2: 1}, adapters={2: 1}, shapes=SHAPES, max_rows=8, host_bytes=1 << 26, session_s=3600.0
)
YEARS = 10 * 365 * 86400.0
WAIT_S = 60.0


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
    return session, server.book.add_model(session, 0, "default", {"rank": 1, "train": {}}).id


@pytest.mark.parametrize("seconds", [-YEARS, YEARS])
def test_a_stop_ends_no_session_and_loses_no_accepted_request(serve, jump, seconds):
    """However long it was by the clock of the machine. What was accepted before is done, and its
    results are told.
    """
    with serve().running() as server:
        session, model = model_of(server)
        assert server.tenancy.is_open("default", session)
        ids = [server.durable.submit(model, 1, Create(AdapterConfig(1, 2.0, ("q",))))]
        ids += [server.durable.submit(model, n, Save("weights", f"s{n}")) for n in (2, 3)]
        results = [server.durable.result(id, WAIT_S) for id in ids]
        assert None not in results
        server.durable.futures.delivered(ids[1])
        late = server.durable.submit(model, 5, Save("weights", "s5"))
    jump(seconds)
    with serve().running() as server:
        for _ in range(2):
            server.maintain()
        assert server.tenancy.is_open("default", session)
        assert [server.durable.result(id, WAIT_S) for id in ids] == results
        server.durable.submit(model, 4, Save("weights", "s4"))
        assert server.durable.result(late, WAIT_S) == {"path": f"tinker://{model}/weights/s5"}
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
        for number, call in enumerate(
            (Create(AdapterConfig(1, 2.0, ("q",))), Save("weights", "a", ttl_s=3600)), 1
        ):
            id = server.durable.submit(model, number, call)
            path = server.durable.result(id, WAIT_S).get("path")
        link = server.links.make("digest", "name")
        server.durable.futures.delivered(id)
        jump(seconds)
        server.maintain()
        assert server.tenancy.is_open("default", session)
        assert server.durable.result(id) == {"path": path}
        assert server.book.checkpoint("default", model, "weights", "a").path == path
        assert server.links.follow(link).name == "name"
        second = server.book.open_session("default", {})
        assert [one.id for one in server.book.sessions("default", 10, 0)] == [second, session]


def test_a_session_ends_when_it_was_silent_for_so_long(serve):
    with serve().running() as server:
        heard, silent = (model_of(server)[0] for _ in range(2))
        server.maintain()
        for _ in range(3):
            server.tenancy.monotonic.advance(SIZES.session_s / 2)
            if server.book.session("default", silent).ended is None:
                server.maintain()
            assert server.tenancy.is_open("default", heard)
        assert not server.tenancy.is_open("default", silent)
        with pytest.raises(NotFound):
            server.tenancy.is_open("another", heard)


def test_answers_that_ended_after_a_restart_are_behind_a_cursor_from_before(serve, jump):
    """A client polls a group on with the cursor that it has; the clock may be behind what it
    was.
    """

    async def ended(server, cursor):
        answer, _ = server.answers.begin("group", None, "")
        server.answers.end(answer, "value")
        found, cursor = await server.answers.wait_group("group", cursor, 0.0)
        return [one.id for one in found] == [answer.id], cursor

    with serve().running() as server:
        told, cursor = asyncio.run(ended(server, 0))
        assert told
    for by in (-YEARS, YEARS):
        jump(by)
        with serve().running() as server:
            told, cursor = asyncio.run(ended(server, cursor))
            assert told
    assert cursor < 2**53, "clients may hold it as a float"


def test_a_steady_clock_reads_the_clock_of_the_machine_once(tmp_path):
    wall, monotonic = Clock(2e9), Clock(50.0)
    clock = steady(wall, monotonic)
    for seconds in (-YEARS, 3 * YEARS):
        wall.advance(seconds)
        monotonic.advance(60.0)
    assert clock() == 2e9 + 120.0


def test_what_was_made_later_comes_first_whatever_the_clock_says(tmp_path):
    clock = Clock(2e9)
    database = ServerDatabase(tmp_path / "server.db")
    book = Book(database, clock)
    made = []
    for _ in range(4):
        clock.advance(-1000.0)
        made.append(book.open_session("default", {}))
    models = [
        book.add_model(made[0], number, "default", {}).id
        for number in range(3)
        if not clock.advance(-10)
    ]
    assert [one.id for one in book.sessions("default", 3, 1)] == made[2::-1]
    assert [one.id for one in book.models("default", 10, 0)] == models[::-1]
    assert book.models_of("default", made[0]) == models
    database.close()


def fill_the_disk(directory: str):
    """Trains on a disk that somebody else fills, empties and fills again. Run by
    ``run_limited``.
    """
    logging.disable()
    server_db.RETRY_S, rng = 0.05, np.random.default_rng(0)
    base = base_lib.load(os.environ["MINT_TEST_BASE"], single_device_mesh())
    made, saves = Path(directory) / "server", {}
    report: dict = {"full": [], "failed": [], "refused": []}

    def calls(name):
        yield ForwardBackward(random_data(rng, "cross_entropy"), coefs("cross_entropy"))
        yield Optim(OptimizerConfig(0.05))
        for kind in ("weights", "sampler_weights"):
            yield Save(kind, name, metadata={"note": "x" * 20_000})

    with Server(base, made, dataclasses.replace(SIZES, every=1)).running() as server:
        _, model = model_of(server)
        server.durable.result(
            server.durable.submit(model, 1, Create(AdapterConfig(2, 2.0, ("q", "down")))), WAIT_S
        )
        number, pending, lost = 1, {}, set()
        for turn in range(4):
            with (
                open(Path(directory) / "ballast", "wb", buffering=0) as ballast,
                contextlib.suppress(OSError),
            ):
                while turn % 2:
                    ballast.write(bytes(4096))
            for call in list(calls(f"turn{turn}")):
                give_up = time.monotonic() + WAIT_S
                while True:  # a client that asks again
                    try:
                        pending[number + 1] = server.durable.submit(model, number + 1, call)
                        number += 1
                        saves |= {number: (call.kind, call.name)} if isinstance(call, Save) else {}
                        break
                    except DatabaseFailed as reason:
                        assert time.monotonic() < give_up
                        report["refused"].append(str(reason))
                        report["full"].append(server.trouble())
                        if len(report["refused"]) % 5 == 0:
                            (Path(directory) / "ballast").unlink(missing_ok=True)
                        time.sleep(0.05)
            (Path(directory) / "ballast").unlink(missing_ok=True)
            for one, id in pending.items():
                try:
                    assert server.durable.result(id, WAIT_S) is not None, one
                except RuntimeError as reason:
                    report["failed"].append(str(reason))
                    lost.add(one)
            pending.clear()
        report["steps"], report["trouble"], state = (
            held_of(server, model).steps,
            server.trouble(),
            held_of(server, model).to_bytes(),
        )
    with Server(base, made, SIZES).running() as server:
        report["same"] = held_of(server, model).to_bytes() == state
        kept = [save for number, save in saves.items() if number not in lost]
        for i, (kind, name) in enumerate(kept):
            path = f"tinker://{model}/{kind}/{name}"
            if kind == "weights":
                server.checkpoints.load(Load(path, True, "default"), made / f"kept{i}")
            else:
                server.checkpoints.fetch(server.checkpoints.digest("default", path))
        report["saved"] = len(kept)
    print(json.dumps(report))


@pytest.mark.long
def test_a_server_on_a_disk_that_is_full_from_time_to_time(hf_dirs, tmp_path, monkeypatch):
    monkeypatch.setenv("MINT_TEST_BASE", str(hf_dirs("llama")))
    report = json.loads(
        run_limited("full disk", 12, "tests.service.server_test", tmp_path).splitlines()[-1]
    )
    assert report["failed"] or report["refused"], "it was never full"
    assert report["steps"] == 4
    assert report["same"]
    assert report["trouble"] == ""
    assert report["saved"] + len(report["failed"]) == 8
    for reason in (*report["failed"], *report["refused"], *filter(None, report["full"])):
        assert any(words in reason for words in ("No space left", "disk is full")), reason


def held_of(server, model):
    return server.loop.training.do(model, lambda live: live.read_state(model)).result(WAIT_S)


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


@pytest.mark.parametrize("call", ["database", "fsync", "rename"])
def test_after_a_full_disk_training_goes_on_with_all_that_was_acknowledged(
    serve, rng, monkeypatch, call
):
    """Whatever fails of it: each request fails once and says why, or is done; the state stays, and
    nothing needs a restart.
    """
    monkeypatch.setattr(server_db, "RETRY_S", 0.05)
    notes = {"what": "x" * 60_000}  # more than the pages that a database has free
    accepted, told, reasons = {}, {}, []

    def send(server, model, number, call):
        try:
            accepted[number] = server.durable.submit(model, number, call)
        except DatabaseFailed as reason:
            reasons.append(str(reason))
            return False
        return True

    def hear(server, number, wait_s):
        """A result; of a failure that is no mistake of the client its reason."""
        try:
            result = server.durable.result(accepted[number], wait_s)
        except RuntimeError as reason:
            reasons.append(result := str(reason))
        if result is not None:
            told[number] = result
        return result

    def update():
        return ForwardBackward(random_data(rng, "cross_entropy"), coefs("cross_entropy")), Optim(
            OptimizerConfig(0.05)
        )

    with serve(every=1).running() as server:
        _, model = model_of(server)
        number = 0
        for one in (
            Create(AdapterConfig(1, 2.0, ("q",))),
            *update(),
            Save("weights", "before", metadata=notes),
        ):
            number += 1
            assert send(server, model, number, one)
            assert hear(server, number, WAIT_S) is not None
        assert server.trouble() == ""
        refused = []
        with full_disk(server, call):
            todo = [
                *update(),
                Save("weights", "full", metadata=notes),
                Save("sampler_weights", "full", metadata=notes),
                *update(),
            ]
            for one in todo:
                if refused or not send(server, model, number + 1, one):
                    # its number is free still, and those behind it would wait for it
                    refused.append(one)
                    continue
                number += 1
                hear(server, number, 0.5)
            if call == "database":
                assert refused
                assert "disk is full" in server.trouble()
                assert server.trouble(sampling=True) == ""
            with contextlib.suppress(UserError):
                server.book.open_session("default", {"note": notes})
            server.maintain()
        give_up = time.monotonic() + WAIT_S
        while server.trouble():
            assert time.monotonic() < give_up
            time.sleep(0.02)
        for one in accepted:
            if one not in told:
                assert hear(server, one, WAIT_S) is not None
        assert reasons, "a request was refused, or a checkpoint could not be kept"
        for reason in reasons:
            assert any(words in reason for words in ("No space left", "disk is full")), reason
        for one in (
            *refused,
            *update(),
            Save("weights", "after", metadata=notes),
            Save("sampler_weights", "after", metadata=notes),
        ):
            number += 1
            assert send(server, model, number, one)
            assert not isinstance(hear(server, number, WAIT_S), str)
        held = held_of(server, model)
        assert held.steps == 4
        saved = [
            result["path"]
            for result in told.values()
            if isinstance(result, dict) and "path" in result
        ]
        names = [("weights", "before"), ("weights", "after"), ("sampler_weights", "after")]
        assert {f"tinker://{model}/{kind}/{name}" for kind, name in names} <= set(saved)
        server.maintain()
    with serve(every=1).running() as server:
        assert server.trouble() == ""
        same_parts(held_of(server, model), held)
        for one, id in accepted.items():
            if not isinstance(told[one], str):
                assert server.durable.result(id, WAIT_S) is not None
        for number, path in enumerate(saved):
            if "/weights/" in path:
                server.checkpoints.load(
                    Load(path, True, "default"), server.folder / f"kept{number}"
                )
            else:
                server.checkpoints.fetch(server.checkpoints.digest("default", path))


@pytest.mark.parametrize("change", ["delete", "overwrite"])
def test_what_was_loaded_stays_though_its_checkpoint_goes_before_a_snapshot(
    serve, monkeypatch, change
):
    """The load was acknowledged; a restart does it again."""
    configs = AdapterConfig(1, 2.0, ("q",)), AdapterConfig(2, 2.0, ("v",))
    with serve().running() as server:
        _, one = model_of(server)
        _, other = model_of(server)
        path = f"tinker://{one}/weights/x"
        monkeypatch.setattr(
            Snapshot, "write", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "no space"))
        )
        for number, call in enumerate((Create(configs[0], 7), Save("weights", "x")), 1):
            server.durable.result(server.durable.submit(one, number, call), WAIT_S)
        loaded = server.durable.submit(other, 1, Load(path, True, "default"))
        assert server.durable.result(loaded, WAIT_S) == {"path": path}
        expected = held_of(server, one)
        if change == "delete":
            server.checkpoints.remove(server.book.checkpoint("default", one, "weights", "x"))
        else:
            _, third = model_of(server)
            for number, call in enumerate((Create(configs[1]), Save("weights", "x")), 1):
                server.durable.result(server.durable.submit(third, number, call), WAIT_S)
            row = server.book.checkpoint("default", third, "weights", "x")
            server.book.add_checkpoint(dataclasses.replace(row, model=one))
            server.checkpoints.reclaim()
    monkeypatch.undo()
    for restart in range(3):
        with serve().running() as server:
            same_parts(held_of(server, other), expected)
            assert server.durable.result(loaded, WAIT_S) == {"path": path}
            if restart == 1:
                update = server.durable.submit(other, 2, Save("weights", "y"))
                assert server.durable.result(update, WAIT_S)
    assert not list(server.durable.loads.iterdir()), "a snapshot has it"


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
        calls: list = [Create(AdapterConfig(1, 2.0, ("q",)))]
        calls += [Save("weights", "x", overwrite=True, metadata={"turn": turn}) for turn in (1, 2)]
        calls.append(Load(path, True, "default"))
        ids = [server.durable.submit(model, number, call) for number, call in enumerate(calls, 1)]
        assert [server.durable.result(id, WAIT_S) for id in ids[1:]] == [{"path": path}] * 3
        assert starts == [{"turn": 1}, {"turn": 2}]
        assert server.book.checkpoint("default", model, "weights", "x").details["metadata"] == {
            "turn": 2
        }


def test_a_policy_that_is_forgotten_on_a_full_disk_leaves_a_folder_that_opens(
    serve, tmp_path, monkeypatch
):
    """Its snapshot is needed until the database says that it is gone. Its session is over, so it
    does not come back.
    """
    monkeypatch.setattr(server_db, "RETRY_S", 0.05)
    with serve(every=1).running() as server:
        session, model = model_of(server)
        done = [
            server.durable.submit(model, n, call)
            for n, call in ((1, Create(AdapterConfig(1, 2.0, ("q",)))), (2, Save("weights", "x")))
        ]
        for id in done:
            server.durable.result(id, WAIT_S)
        snapshot = path_of(server.durable.states, model)
        give_up = time.monotonic() + WAIT_S
        while not snapshot.exists():
            assert time.monotonic() < give_up
            time.sleep(0.01)
        server.book.end_session(session)
        with full_disk(server, "database"):
            server.durable.forget(model)
            with pytest.raises(DatabaseFailed):
                server.durable.submit("another", 3, Create(AdapterConfig(1, 2.0, ("q",))))
            assert snapshot.exists()
            shutil.copytree(server.folder, tmp_path / "crashed")
        give_up = time.monotonic() + WAIT_S
        while snapshot.exists():
            assert time.monotonic() < give_up
            time.sleep(0.01)
    with serve("crashed").running() as server:
        assert model in server.durable.restored
        # behind what the start asked of the policy
        trained = server.loop.training.do(model, lambda live: model in live)
        assert not trained.result(WAIT_S)
