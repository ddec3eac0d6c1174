"""A run and the catalog: one writer per policy, taking up again after a kill, records that are not
made twice.
"""

import dataclasses
import os
import time

import numpy as np
import pytest

from mint_jax.catalog.packed import Schema
from mint_jax.errors import UserError
from mint_jax.harness import recorder, workdir
from mint_jax.harness.catalogs import JobCatalog
from mint_jax.harness.recorder import Snapshot
from mint_jax.harness.workdir import WorkdirLock
from mint_jax.lora.tree import AdapterConfig

SCHEMA = Schema("ab" * 32, AdapterConfig(1, 2.0, ("q",)))
NAMES = ("p", "team/q")


def snapshot(value: float) -> Snapshot:
    return Snapshot(
        {"dense": {"q": {"a": np.full((1, 1, 8), value, np.float32)}}}, SCHEMA, version=1
    )


@pytest.fixture
def catalog(tmp_path):
    opened = JobCatalog(tmp_path / "catalog", create=True)
    yield opened
    opened.close()


def claimed(catalog, folder, names=NAMES, schema=SCHEMA, fixed=()):
    """As a process that begins; the one before is dead, for its lock is gone."""
    folder.mkdir(exist_ok=True)
    lock = WorkdirLock(folder)
    lock.release()
    return recorder.claim_policies(
        catalog, dict.fromkeys(names, schema), folder / "run.json", dict(fixed), lock
    )


def export(recorder, step, value, final=False, names=NAMES):
    recorder.export(
        {name: snapshot(value + i) for i, name in enumerate(names)}, step, "a test", final=final
    )


def test_one_run_at_a_time_writes_a_policy(catalog, tmp_path):
    first = claimed(catalog, tmp_path / "a").recorder
    with pytest.raises(
        UserError,
        match=(
            rf"policy 'p' is being trained by 'run [0-9a-f]{{32}} on .*process {os.getpid()} on"
            r" host"
        ),
    ):
        claimed(catalog, tmp_path / "b", names=("other", "p"))
    assert catalog.main.policy("other").session_owner is None, (
        "the refused run gave back what it had"
    )
    export(first, 1, 10.0)
    first.drain()
    again = claimed(catalog, tmp_path / "a").recorder  # the same workdir, as after a kill
    export(first, 2, 20.0)
    with pytest.raises(UserError, match="was fenced off by session 2"):
        first.drain()
    with pytest.raises(UserError, match="was fenced off"):
        export(first, 3, 30.0)
    first.stop()
    export(again, 2, 21.0)
    again.stop()
    assert [r.step for r in catalog.main.revisions("p")] == [1, 2]
    assert catalog.main.resolve("team/q").digest == snapshot(22.0).digest
    other = claimed(catalog, tmp_path / "b")  # a run that ended gave its policies back
    assert other.start == {"p": snapshot(21.0).digest, "team/q": snapshot(22.0).digest}
    other.recorder.stop()


def test_repeated_steps_make_no_second_record_and_latest_does_not_go_back(catalog, tmp_path):
    first = claimed(catalog, tmp_path / "a").recorder
    rollouts = {}

    def roll(recorder, step):
        recorder.rollout(
            "p",
            step,
            lambda recorded: rollouts.setdefault(step, (b"tokens of %d" % recorded, 3, 0.5)),
            keep=3,
        )

    for step in range(1, 6):
        export(first, step, 10.0 * step)
        roll(first, step)
    first.checkpoint("step_4", {"p": 2, "team/q": 2})
    first.drain()  # and then it is killed
    again = claimed(catalog, tmp_path / "a").recorder
    # its checkpoint is of step 2, whose revisions may be recorded already, as here
    again.resume({"p": 2, "team/q": 2})
    again.checkpoint("step_4", {"p": 2, "team/q": 2})
    for step in range(2, 8):
        export(again, step, 10.0 * step)
    for step in range(3, 8):
        roll(again, step)
    export(again, 7, 70.0, final=True)
    again.drain()
    again.stop()
    main = catalog.main
    for name in NAMES:
        assert [r.step for r in main.revisions(name)] == list(range(1, 8))
        assert [move.after for move in main.history(name, "latest")] == list(range(1, 8))
        assert again.final[name] == (main.resolve(name).digest, 7)
        assert [c.place for c in main.checkpoints(name)] == ["step_4"]
    assert [r.step for r in main.rollouts("p")] == [7, 6, 5]
    first.stop()


def test_a_run_that_ends_earlier_than_before_leaves_latest_at_its_end(catalog, tmp_path):
    first = claimed(catalog, tmp_path / "a").recorder
    for step in (1, 2, 3):
        export(first, step, 10.0 * step)
    first.stop()
    again = claimed(catalog, tmp_path / "a").recorder
    again.resume({})
    export(again, 2, 20.0, final=True)
    again.stop()
    assert catalog.main.resolve("p").number == 2
    assert [r.number for r in catalog.main.revisions("p")] == [1, 2, 3]


def test_a_policy_of_the_catalog_goes_on_and_its_steps_count_on(catalog, tmp_path):
    first = claimed(catalog, tmp_path / "a")
    assert first.start == {}
    export(first.recorder, 24, 1.0)
    first.recorder.stop()
    second = claimed(catalog, tmp_path / "b")
    assert second.start["p"] == snapshot(1.0).digest
    export(second.recorder, 1, 5.0)
    second.recorder.drain()
    killed = claimed(catalog, tmp_path / "b")
    assert killed.start == second.start, (
        "a restart begins where the run began, not at what the run itself made"
    )
    killed.recorder.stop()
    second.recorder.stop()
    assert [r.step for r in catalog.main.revisions("p")] == [24, 25]


def test_a_fixed_revision_is_looked_up_once_and_leased(catalog, tmp_path):
    source = claimed(catalog, tmp_path / "a").recorder
    export(source, 1, 1.0)
    source.stop()
    fixed = {"student": "p@latest"}
    first = claimed(catalog, tmp_path / "b", names=("student",), fixed=fixed.items())
    assert first.fixed == {"student": snapshot(1.0).digest}
    catalog.main.keep_last("p", 1)
    source = claimed(catalog, tmp_path / "a").recorder
    export(source, 2, 2.0)
    source.stop()
    catalog.main.gc(grace_s=0.0)
    catalog.main.load(first.fixed["student"])  # retention gave it up, the lease keeps it
    again = claimed(catalog, tmp_path / "b", names=("student",), fixed=fixed.items())
    assert again.fixed == first.fixed, "the alias moved, the run's source did not"
    again.recorder.stop()
    first.recorder.stop()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"base": "cd" * 32}, "is of base abababababab, this run's is cdcdcdcdcdcd"),
        ({"config": AdapterConfig(2, 2.0, ("q",))}, "has rank 1, this config says 2"),
        ({"config": AdapterConfig(1, 2.0, ("q", "k"))}, "has targets"),
    ],
)
def test_another_schema_is_refused_before_anything_is_written(change, says, catalog, tmp_path):
    claimed(catalog, tmp_path / "a").recorder.stop()
    with pytest.raises(UserError, match=says):
        claimed(catalog, tmp_path / "b", schema=dataclasses.replace(SCHEMA, **change))


def test_an_unknown_source_of_rollouts_is_refused(catalog, tmp_path):
    with pytest.raises(UserError, match="'nobody' is not in the catalog"):
        claimed(catalog, tmp_path / "a", fixed={"p": "nobody@latest"}.items())
    assert catalog.main.policy("p").session_owner is None


def test_a_run_of_another_machine_is_waited_for_until_it_proves_dead_or_alive(
    catalog, tmp_path, monkeypatch
):
    monkeypatch.setattr(recorder, "SESSION_S", 1.0)
    monkeypatch.setattr(recorder, "POLL_S", 0.05)
    monkeypatch.setattr(workdir, "_machine", lambda host: "elsewhere/1")
    first = claimed(catalog, tmp_path / "a").recorder
    monkeypatch.undo()
    monkeypatch.setattr(recorder, "POLL_S", 0.05)
    sleep, session = recorder.time.sleep, first.sessions["p"]

    def sleep_while_it_renews(seconds):
        catalog.main.renew_session(session, 60.0)
        sleep(seconds)

    monkeypatch.setattr(recorder.time, "sleep", sleep_while_it_renews)
    with pytest.raises(
        UserError, match=r"being trained by 'run [0-9a-f]{32} on elsewhere/1, process"
    ):
        claimed(catalog, tmp_path / "a")
    monkeypatch.setattr(recorder.time, "sleep", sleep)
    catalog.main.renew_session(session, 0.3)  # its last: from here it is dead
    began = time.monotonic()
    again = claimed(catalog, tmp_path / "a").recorder
    assert time.monotonic() - began > 0.2
    first.stop()
    assert catalog.main.policy("p").session_number == again.sessions["p"].number
    again.stop()
