"""Exports: payload first, then metadata; many writers at once, in threads and in processes."""

import concurrent.futures
import threading

import pytest
from blake3 import blake3

from mint_jax.catalog.lifecycle import Catalog
from mint_jax.catalog.records import exports
from mint_jax.catalog.records.exports import Export
from mint_jax.errors import UserError
from tests.catalog.adapters import SCHEMA, packed
from tests.catalog.conftest import same_bytes


def visible(place) -> tuple[int, ...]:
    """What another process would see."""
    with Catalog.open(place.database, place.payloads) as other:
        stats = other.stats()
        assert list(other.verify()) == []
        return stats["revisions"], stats["payloads"], stats["aliases"], stats["audit"]


def test_nothing_is_visible_before_the_bytes_are_durable(place, monkeypatch):
    """Law 6: whatever breaks, and wherever, an export is there whole or not at all."""
    catalog = place.open()
    catalog.create_policy("p", SCHEMA)
    catalog.export("p", packed(0), 0)
    before = visible(place)
    order = []
    real_put, real_commit = catalog.store.put, exports.commit

    def put(objects):
        assert visible(place) == before
        places = real_put(objects)
        order.append("put")
        assert visible(place) == before  # durable, and still nobody knows
        return places

    def commit(connection, author, prepared, places, create):
        order.append("commit")
        for ready in prepared:
            assert same_bytes(catalog.store.read(places[ready.digest]), packed(1))
        made = real_commit(connection, author, prepared, places, create)
        # SQLite's readers see the same, but its writer would wait for `visible`
        if place.database.startswith("postgresql"):
            assert visible(place) == before
        return made

    monkeypatch.setattr(catalog.store, "put", put)
    monkeypatch.setattr(exports, "commit", commit)
    catalog.export("p", packed(1), 1)
    assert order == ["put", "commit"]
    assert visible(place) == (2, 2, 1, before[3] + 1)


def test_everything_at_once(place, monkeypatch):
    """Exporters, a promoter and a collector that gives no grace: what is named loads, and nothing
    is damaged.
    """
    catalog = place.open()
    for policy in range(3):
        catalog.create_policy(f"p{policy}", SCHEMA, keep_last=2)
        catalog.export(f"p{policy}", packed(0), 0)
    # it would remove what is being written, if it gave no grace
    monkeypatch.setattr(catalog.store, "sweep", lambda *_: [])
    stop = threading.Event()

    def export(worker: int) -> None:
        for step in range(1, 15):
            items = [
                Export(f"p{policy}", packed((worker + step) % 4), 100 * worker + step)
                for policy in range(3)
            ]
            made = catalog.export_many(items[worker:] + items[:worker])
            for revision in made:
                [lease] = catalog.lease([f"{revision.policy}@latest"], "reader")
                assert blake3(catalog.load(lease.digest).tobytes()).hexdigest() == lease.digest
                catalog.release(lease)

    def promote() -> int:
        moves = 0
        while not stop.is_set():
            catalog.promote("p0", "latest")
            moves += catalog.resolve("p0@serving").number > 0
        return moves

    def collect() -> int:
        removed = 0
        while not stop.is_set():
            removed += catalog.gc(grace_s=0.0).payloads
        return removed

    with concurrent.futures.ThreadPoolExecutor(5) as pool:
        others = [pool.submit(promote), pool.submit(collect)]
        exporters = [pool.submit(export, worker) for worker in range(3)]
        try:
            for exporter in exporters:
                exporter.result()
        finally:
            stop.set()
        assert all(other.result() > 0 for other in others)
    assert list(catalog.verify()) == []
    for policy in range(3):
        numbers = [entry.after for entry in catalog.audit(f"p{policy}", alias="latest")]
        assert len(numbers) == 43
        catalog.load(f"p{policy}")


def test_every_way_in_looks_at_the_numbers_and_the_record_tells(place, tmp_path):
    """``finite`` is True for a checked export, False for a forced one."""
    catalog = place.open()
    good, bad = packed(1), packed(float("nan"))
    catalog.export("good", good, 1, create=True)
    catalog.export("bad", bad, 1, create=True, force=True)
    # these bytes come in as no adapter
    catalog.rollout("good", 1, packed(2), tokens=1, mean_reward=0.0)
    catalog.export("good", packed(2), 2)
    found = {name: catalog.resolve(name).finite for name in ("good@1", "good@2", "bad")}
    assert found == {"good@1": True, "good@2": True, "bad": False}
    assert [one.finite for one in catalog.resolve_many(["good", "bad"])] == [True, False]
    with pytest.raises(UserError, match="NaN or infinite"):
        catalog.export("bad", bad, 2)  # its bytes are held already: they are looked at all the same
