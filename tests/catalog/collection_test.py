"""Retention, garbage collection, compaction and verification."""

import pytest
from blake3 import blake3

from mint_jax.catalog import gc
from mint_jax.catalog.records import payload_rows
from mint_jax.catalog.records.exports import Export
from mint_jax.errors import UserError
from tests.catalog.adapters import SCHEMA, packed
from tests.catalog.conftest import same_bytes

HOUR = 3600.0


def numbers(catalog, policy="p") -> list[int]:
    return [revision.number for revision in catalog.revisions(policy)]


FIELDS = "revisions payloads payload_bytes leases packs pack_bytes abandoned moved moved_bytes"


def collect(catalog, **options):
    """Runs ``gc`` after a dry run, which must foretell it and change nothing."""

    def state():
        return catalog.stats(), catalog.audit(), {pack.name for pack in catalog.store.packs()}

    before = state()
    foretold = catalog.gc(dry_run=True, **options)
    assert state() == before
    done = catalog.gc(**options)
    for field in FIELDS.split():
        if not (field.startswith("moved") and done.revisions):  # removal changes what is joined
            assert getattr(foretold, field) == getattr(done, field), field
    return done


@pytest.fixture
def ten(catalog):
    """Policy ``p`` with ten revisions, of which retention keeps three."""
    catalog.create_policy("p", SCHEMA, keep_last=3)
    for step in range(1, 11):
        catalog.export("p", packed(step), step)
    return catalog


def test_retired_revisions_go_and_shared_bytes_stay(ten):
    ten.keep_last("p", None)
    for number in (9, 2):
        ten.retire("p", number)
    ten.export("q", packed(2), 1, create=True)
    ten.rollout("p", 1, packed(1), tokens=1, mean_reward=0.0)
    report = collect(ten)
    assert (report.revisions, report.payloads) == (["p@9", "p@2"], 1)
    assert same_bytes(ten.load("q"), packed(2))
    ten.retire("p", 8)
    ten.keep_last("p", 2)
    score = {"renderer": "r", "scorer": "s", "dataset": "d", "seed": 0, "metrics": {}}
    ten.record_evaluation("p@1", **score, isolated=1, shared=1)
    ten.promote("p", 1)
    ten.promote("p", 7)
    collect(ten)
    assert numbers(ten) == [7, 10], "the last two live ones"
    assert same_bytes(ten.load_payload(ten.rollouts("p")[0].digest), packed(1))
    ten.drop_rollouts("p", 100)
    assert collect(ten).payloads == 1
    assert ten.stats()["evaluations"] == 1, "scores outlive their revision, and so does the log"
    assert ten.audit("p", alias="serving")[0].details["digest"] == blake3(packed(1)).hexdigest()


def test_files_go_after_the_grace_period(ten, clock):
    first = ten.resolve("p@1")
    assert collect(ten, compact=False).packs == 0
    assert same_bytes(ten.store.read(first.place), packed(1))  # who resolved before can read
    clock.now -= 1e6
    assert ten.gc(compact=False).waiting == 7, "a clock set back restarts the period"
    clock.now += HOUR
    report = collect(ten, compact=False)
    assert (report.packs, report.abandoned) == (7, 0)
    assert len(list(ten.store.packs())) == 3
    with pytest.raises(UserError):
        ten.store.read(first.place)


def test_small_and_mostly_dead_packs_are_joined(catalog, clock, monkeypatch):
    for i in range(7):
        catalog.export(f"p{i}", packed(i), 1, create=True)
    real = catalog.resolve
    stale = real("p1")
    monkeypatch.setattr(gc, "LARGE", 3 * len(packed(0)))
    done = collect(catalog)
    assert (done.moved, done.moved_bytes) == (6, 6 * len(packed(0))), "in threes; one is alone"
    monkeypatch.undo()
    assert collect(catalog).moved == 7
    assert same_bytes(catalog.store.read(stale.place), packed(1))
    clock.now += HOUR
    assert catalog.gc().packs == 9
    assert len(list(catalog.store.packs())) == 1
    answers = iter([stale])  # a reader that resolved before finds the new place
    monkeypatch.setattr(catalog, "resolve", lambda *name: next(answers, None) or real(*name))
    for i in (1, 0, 6):
        assert same_bytes(catalog.load(f"p{i}"), packed(i))
    catalog.export_many([Export("q", packed(100 + i), i) for i in range(50)], create=True)
    catalog.keep_last("q", 1)
    catalog.gc()
    clock.now += HOUR
    catalog.gc()
    assert [pack.bytes < 8 * 1000 for pack in catalog.store.packs()] == [True]
    assert same_bytes(catalog.load("q"), packed(149))
    assert list(catalog.verify()) == []


def test_a_writer_whose_pack_was_swept_stores_again(place, monkeypatch):
    """It stalls between its two steps for longer than the grace period."""
    catalog, other = place.open(), place.open()
    catalog.create_policy("p", SCHEMA)
    real, swept = catalog.store.put, []

    def put(objects):
        places = real(objects)
        if not swept:
            swept.append(other.gc(grace_s=-10.0, compact=False).abandoned)
        return places

    monkeypatch.setattr(catalog.store, "put", put)
    revision = catalog.export("p", packed(1), 1)
    assert swept == [1]
    assert same_bytes(catalog.load(revision.digest), packed(1))
    assert list(catalog.verify()) == []
    monkeypatch.setattr(catalog.store, "put", lambda *args: (swept.clear(), put(*args))[1])
    with pytest.raises(
        UserError, match="were removed 5 times while they were written: lengthen gc's grace period"
    ):
        catalog.export("p", packed(2), 2)
    assert numbers(catalog) == [1]


def test_bytes_that_go_while_an_export_counts_on_them_are_stored_again(place, monkeypatch):
    catalog, other = place.open(), place.open()
    catalog.create_policy("p", SCHEMA, keep_last=1)
    for step in (1, 2):
        catalog.export("p", packed(step), step)
    real = payload_rows.known
    calls = []

    def known(connection, digests):
        found = real(connection, digests)
        calls.append(len(found))
        if len(calls) == 1:
            assert other.gc(compact=False).revisions == ["p@1"]
        return found

    monkeypatch.setattr(payload_rows, "known", known)
    revision = catalog.export("q", packed(1), 1, create=True)
    assert calls[0] == 1
    assert same_bytes(catalog.load(revision.digest), packed(1))
    assert list(catalog.verify()) == []
