"""Places that fail under the whole catalog: a server that crashes, a disk that is full, a bucket
that answers with errors.
"""

import concurrent.futures
import json
import signal
import threading
import uuid
from pathlib import Path

import pytest

from mint_jax.catalog.lifecycle import Catalog
from mint_jax.catalog.records.exports import Export
from mint_jax.catalog.storage.payloads import PayloadStore
from mint_jax.errors import UserError
from tests.catalog import buckets
from tests.catalog.adapters import packed
from tests.catalog.conftest import DATABASES, make_place, rows, same_bytes
from tests.catalog.payloads_test import proxy, s3  # noqa: F401 - fixtures
from tests.disks import LIMITS, run_limited
from tests.marks import first


def test_a_server_that_crashes_while_many_export(request, postgres_server, tmp_path):
    """Every answer is true: what was acknowledged is there, what was refused is there at most once,
    nothing else.
    """
    place = make_place(request, "postgres", tmp_path)
    catalog = place.open(timeout_s=60)
    crashed, told = threading.Event(), []

    def work(worker: int) -> None:
        step = 0
        while not (crashed.is_set() and step >= 10):
            value = 1000 * worker + step
            try:
                names = ("shared", f"own{worker}")
                items = [Export(name, packed(value), value) for name in names]
                one = catalog.export_many(items, create=True)
            except UserError as error:
                told.append((value, worker, None, str(error)))
            else:
                told.append((value, worker, [revision.number for revision in one], ""))
            step += 1

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        running = [pool.submit(work, worker) for worker in range(4)]
        try:
            for number in range(3):
                seen = len(told)
                while len(told) < seen + 8 and not any(one.done() for one in running):
                    crashed.wait(0.01)
                postgres_server.halt(signal.SIGQUIT if number != 1 else signal.SIGINT)
                postgres_server.start()
        finally:
            crashed.set()
        for one in running:
            one.result()
    found = {one.step: one.number for one in catalog.revisions("shared")}
    assert len(found) == len(catalog.revisions("shared")), "a revision is there twice"
    for value, worker, numbers, reason in told:
        own = {one.step: one.number for one in catalog.revisions(f"own{worker}")}
        if numbers is None:
            assert "database postgresql" in reason
            assert (value in own) == (value in found)
        else:
            assert [found[value], own[value]] == numbers
            assert same_bytes(catalog.load(f"shared@{numbers[0]}"), packed(value))
    assert set(found) <= {value for value, *_ in told}
    assert list(catalog.verify()) == []


def fill_the_disk(directory: str):
    """Exports until the disk is full, looks at what is there, makes room, goes on. Run by
    ``run_limited``.
    """
    report: dict = {"refused": []}
    catalog = Catalog.open(Path(directory) / "catalog", timeout_s=5)
    kept: dict[int, int] = {}
    for step in range(60):
        try:
            kept[step] = catalog.export("p", packed(step, width=30_000), step, create=True).number
        except UserError as error:
            report["refused"].append(str(error))
            break
    report["kept"] = len(kept)
    report["loads"] = all(
        same_bytes(catalog.load(f"p@{number}"), packed(step, width=30_000))
        for step, number in kept.items()
    )
    report["visible"] = len(catalog.revisions("p"))
    catalog.close()
    with Catalog.open(Path(directory) / "catalog", timeout_s=5) as catalog:
        report["again"] = len(catalog.revisions("p"))
        report["damage"] = [str(finding) for finding in catalog.verify()]
        report["staging"] = list(catalog.store._storage.list("staging/"))
    print(json.dumps(report))


@pytest.mark.parametrize("limit", first(1, LIMITS))
def test_a_full_disk_refuses_and_keeps_all(tmp_path, limit):
    report = json.loads(run_limited(limit, 2, "tests.catalog.faults.places_test", tmp_path))
    if limit == "full disk":
        assert len(report["refused"]) == 1
        assert "disk" in report["refused"][0]
        assert "\n" not in report["refused"][0]
    assert report["kept"] == report["visible"] == report["again"] > 0
    assert report["loads"]
    assert report["damage"] == report["staging"] == []


def fails(times: int, fault):
    """A fault for the first so many requests."""
    left = [times]

    def decide(method: str, path: str):
        left[0] -= 1
        return fault if left[0] >= 0 else None

    return decide


@pytest.fixture(params=DATABASES)
def in_bucket(request, tmp_path, s3):  # noqa: F811 - the fixture
    place = make_place(request, request.param, tmp_path)
    catalog = Catalog.open(
        place.database, f"s3://{buckets.BUCKET}/{uuid.uuid4().hex}", actor="tester"
    )
    yield catalog
    catalog.close()


@pytest.mark.parametrize(
    "fault",
    [500, *(pytest.param(fault, marks=pytest.mark.long) for fault in (503, "hang up", 0.3))],
    ids=["500", "503", "hang up", "slow"],
)
def test_a_bucket_that_fails_for_a_while_is_waited_for(in_bucket, s3, fault):  # noqa: F811
    catalog = in_bucket
    s3.fault = fails(2, fault)
    catalog.export_many([Export(f"p{i}", packed(i), 1) for i in range(4)], create=True)
    s3.fault = fails(2, fault)
    for i in range(4):
        assert same_bytes(catalog.load(f"p{i}"), packed(i))
    catalog.export("p0", packed(10), 2)
    catalog.keep_last("p0", 1)
    s3.fault = fails(2, fault)
    assert catalog.gc(grace_s=-10.0).revisions == ["p0@1"]
    s3.fault = fails(2, fault)
    assert catalog.gc(grace_s=-10.0).packs >= 1
    assert list(catalog.verify()) == []


def test_a_bucket_that_goes_on_failing_changes_nothing(in_bucket, s3):  # noqa: F811
    catalog = in_bucket
    catalog.export("p", packed(1), 1, create=True)
    catalog.export("p", packed(2), 2)
    catalog.keep_last("p", 1)
    before = (catalog.stats(), catalog.audit())
    catalog.store = PayloadStore(catalog.store.url, timeout=2.0)
    s3.fault = lambda method, path: 500
    with pytest.raises(UserError, match="s3://"):
        catalog.export("p", packed(3), 3)
    with pytest.raises(UserError, match="s3://"):
        catalog.load("p")
    assert catalog.resolve("p").number == 2, "names need no bucket"
    assert (catalog.stats(), catalog.audit()) == before
    with pytest.raises(UserError, match="s3://"):
        catalog.gc(grace_s=-10.0)
    s3.fault = lambda method, path: None
    assert same_bytes(catalog.load("p"), packed(2))
    assert catalog.export("p", packed(3), 3).number == 3
    catalog.gc(grace_s=-10.0)
    catalog.gc(grace_s=-10.0)
    assert list(catalog.verify()) == []
    live = {name for (name,) in rows(catalog, "SELECT name FROM packs WHERE state = 'live'")}
    assert {info.name for info in catalog.store.packs()} == live
