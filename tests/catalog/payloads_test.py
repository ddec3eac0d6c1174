"""Packs in a folder, in memory and in a bucket: exact, whole or not there, damage named, failures
explained.
"""

import os
import time
import uuid

import numpy as np
import pytest
from blake3 import blake3

from mint_jax.catalog.storage import bucket, pack_format
from mint_jax.catalog.storage.pack_format import Name
from mint_jax.catalog.storage.payloads import (
    PackMissing,
    PayloadStore,
    Place,
    StorageFailed,
)
from mint_jax.errors import UserError
from tests.catalog import buckets

LONG_S3 = ["folder", "memory", pytest.param("s3", marks=pytest.mark.long)]


@pytest.fixture(scope="module")
def proxy():
    with buckets.s3_server() as found:
        yield found


@pytest.fixture
def s3(proxy, monkeypatch):
    """The environment and a server without faults."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in buckets.environment(proxy.url).items():
        monkeypatch.setenv(name, value)
    proxy.fault = lambda method, path: None
    yield proxy
    proxy.fault = lambda method, path: None


@pytest.fixture
def url_of(tmp_path, request):
    def make(kind: str) -> str:
        if kind == "s3":
            request.getfixturevalue("s3")
            return f"s3://{buckets.BUCKET}/{uuid.uuid4().hex}"
        return str(tmp_path / "payloads") if kind == "folder" else f"memory://{uuid.uuid4().hex}"

    return make


@pytest.fixture(params=LONG_S3)
def store(request, url_of, monkeypatch):
    monkeypatch.setattr(bucket, "PART", 50_000)
    return PayloadStore(url_of(request.param), timeout=20.0)


def sha(data) -> str:
    return blake3(data).hexdigest()


def random_objects(rng, count) -> list[bytes]:
    return [rng.bytes(int(n)) for n in np.exp(rng.uniform(0, np.log(30_000), count))]


def keys(store) -> list[str]:
    return [
        key for prefix in ("packs/", "parts/", "staging/") for key in store._storage.list(prefix)
    ]


@pytest.mark.parametrize("store", ["folder", "memory", "s3"], indirect=True)
def test_objects_are_read_back_listed_and_deleted(rng, store):
    start = time.time()
    array = np.frombuffer(rng.bytes(160), np.uint8)
    objects = [b"", *random_objects(rng, 8), rng.bytes(130_000), b"", memoryview(b"x"), array]
    places = store.put(iter(objects))
    other = store.put([b"other", array.view(np.float64)])
    assert store.put([]) == []
    assert len({place.pack for place in places}) == 1
    assert all(place.offset % 64 == 0 for place in places)
    wanted = [bytes(data) for data in objects]
    reopened = PayloadStore(store.url, timeout=20.0)
    order = rng.permutation(len(places))
    assert [one.tobytes() for one in reopened.read_many(places[i] for i in order)] == [
        wanted[i] for i in order
    ]
    for data, place in list(zip(wanted, places))[-4:]:
        assert not store.read(place, sha(data)).flags.writeable
    found = {info.name: info for info in store.packs()}
    assert found.keys() == {places[0].pack, other[0].pack}
    for name, info in found.items():
        assert info.bytes == Name.parse(name).size == store.read(Place(name, 0, info.bytes)).size
        assert start - 2 <= info.started_at <= time.time() + 2
    held = store.read(places[1])
    for _ in range(2):
        store.delete(places[0].pack)
    assert held.tobytes() == wanted[1]
    with pytest.raises(PackMissing, match=r"is not in .*resolve the revision again"):
        store.read(places[1])
    assert [one.tobytes() for one in store.read_many(other)] == [b"other", array.tobytes()]


class Broken(Exception):
    pass


def test_a_put_that_fails_in_the_middle_leaves_nothing(rng, store):
    def objects():
        yield from random_objects(rng, 10)
        yield rng.bytes(200_000)
        raise Broken

    with pytest.raises(Broken):
        store.put(objects())
    assert keys(store) == []
    assert store.put([b"x"])


def test_leftovers_are_swept_and_living_writers_are_not(rng, store):
    kept = store.put([rng.bytes(120_000)])
    writer = store._storage.writer(pack_format.new_stem())  # as a killed process leaves it
    writer.write(rng.bytes(120_000))
    if isinstance(writer, bucket._BucketWriter):
        while writer._under_way:
            store._storage.wait(writer._under_way.pop(), "write to")
    before = keys(store)
    left = [key for key in before if writer._stem in key]
    assert len(left) == (1 if store.url.startswith("/") else 2)
    assert store.sweep() == []
    assert store.sweep(older_s=3600) == []
    assert sorted(store.sweep(older_s=-10, dry_run=True)) == sorted(left)
    assert keys(store) == before
    assert sorted(store.sweep(older_s=-10)) == sorted(left)
    assert keys(store) == [key for key in before if key not in left]
    assert store.read(kept[0]).size == 120_000
    assert store.sweep(older_s=-10) == []


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (500, "no answer within|InternalError|asked to fail"),
        (403, r"PERMISSION_DENIED.*set AWS_ACCESS_KEY_ID"),
        (60.0, r"no answer within 2 s\): check that the storage is up"),
    ],
    ids=["500", "403", "slow"],
)
def test_a_bucket_that_goes_on_failing_is_an_error_in_time(rng, url_of, s3, fault, reason):
    store = PayloadStore(url_of("s3"), timeout=2.0)
    place = store.put([b"data"])[0]
    s3.fault = lambda method, path: fault
    for call in (
        lambda: store.put([b"more"]),
        lambda: store.read(place),
        lambda: list(store.packs()),
        lambda: store.delete(place.pack),
    ):
        with pytest.raises(StorageFailed, match=reason) as caught:
            call()
        assert f"s3://{buckets.BUCKET}/" in str(caught.value)
        assert s3.url in str(caught.value)
        assert "\n" not in str(caught.value)
    s3.fault = lambda method, path: None
    assert store.read(place).tobytes() == b"data"


def test_places_are_urls_of_folders_and_buckets(tmp_path, monkeypatch, url_of):
    place = PayloadStore(tmp_path / "my folder").put([b"x"])[0]
    monkeypatch.chdir(tmp_path)
    for url in ("my folder", f"file://{tmp_path}/my%20folder", str(tmp_path / "my folder/")):
        assert PayloadStore(url).read(place).tobytes() == b"x"
    assert PayloadStore("gs://bucket/path")._storage._store.spec().to_json()["driver"] == "gcs"
    for url in ("http://host/x", "s3://", "gs:///path", "file://host/path", "file://", "memory://"):
        with pytest.raises(UserError, match="write "):
            PayloadStore(url)
    url_of("s3")
    store = PayloadStore("s3://no-such-bucket/path", timeout=3.0)
    missing = r"s3://no-such-bucket/path.*NoSuchBucket.*create the bucket, or correct the URL"
    with pytest.raises(StorageFailed, match=missing):
        store.put([b"x"])
    with pytest.raises(StorageFailed, match="Invalid S3 bucket name"):
        PayloadStore("s3://No_Bucket!/path")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    unreachable = r"127.0.0.1:9.*Could not connect.*check the network and AWS_ENDPOINT_URL"
    with pytest.raises(StorageFailed, match=unreachable):
        PayloadStore(f"s3://{buckets.BUCKET}", timeout=2.0).put([b"x"])
