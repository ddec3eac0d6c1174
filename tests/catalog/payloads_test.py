"""Packs in a folder, in memory and in a bucket: exact, whole or not there, damage named, failures
explained.
"""

import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3

from mint_jax.catalog.storage import bucket, pack_format, payloads
from mint_jax.catalog.storage.pack_format import Name
from mint_jax.catalog.storage.payloads import (
    PackDamaged,
    PackMissing,
    PayloadStore,
    Place,
    StorageFailed,
)
from mint_jax.errors import UserError
from tests.catalog import buckets

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
SERVER = multiprocessing.get_context("forkserver")  # imports once, forks for every writer
SERVER.set_forkserver_preload(["mint_jax.catalog.storage.payloads", "pytest"])
LONG_S3 = ["folder", "memory", pytest.param("s3", marks=pytest.mark.long)]


@pytest.fixture(scope="module")
def proxy():
    with buckets.s3_server() as found:
        yield found


@pytest.fixture
def s3(proxy, monkeypatch):
    """The environment and the proxy of a server without faults."""
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


def random_objects(rng, count, largest=30_000) -> list[bytes]:
    return [rng.bytes(int(n)) for n in np.exp(rng.uniform(0, np.log(largest), count))]


def keys(store) -> list[str]:
    return [
        key for prefix in ("packs/", "parts/", "staging/") for key in store._storage.list(prefix)
    ]


def stored(store, key) -> bytes:
    if isinstance(store._storage, bucket.Bucket):
        return store._storage._store.read(key).result().value
    return Path(store.url, key).read_bytes()


def overwrite(store, key, data) -> None:
    """Writes an object without the store."""
    if isinstance(store._storage, bucket.Bucket):
        store._storage._store.write(key, data).result()
    else:
        Path(store.url, key).parent.mkdir(parents=True, exist_ok=True)
        Path(store.url, key).write_bytes(data)


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
        assert start - 2 <= info.mtime <= time.time() + 2
    held = store.read(places[1])
    for _ in range(2):
        store.delete(places[0].pack)
    assert held.tobytes() == wanted[1]
    with pytest.raises(PackMissing, match=r"is not in .*resolve the revision again"):
        store.read(places[1])
    assert [one.tobytes() for one in store.read_many(other)] == [b"other", array.tobytes()]


@pytest.mark.parametrize("part", [1000, 4096, 1 << 20])
@pytest.mark.parametrize("kind", ["memory", "s3"])
def test_parts_of_any_size_are_one_pack(rng, url_of, monkeypatch, kind, part):
    monkeypatch.setattr(bucket, "PART", part)
    store = PayloadStore(url_of(kind))
    for total in (1, part - 1, part, part + 1, 2 * part, 2 * part + 1):
        first = 0 if total % 2 else total // 2
        objects = [rng.bytes(first), rng.bytes(total - first)]
        places = store.put(objects)
        assert [data.tobytes() for data in store.read_many(places)] == objects
        name = Name.parse(places[0].pack)
        found = [key for key in keys(store) if pack_format.stem_of(key) == name.stem]
        assert found == [name.key, *name.parts]
        assert len(found) == -(-name.size // part)
        store.delete(str(name))
    assert keys(store) == []


def test_large_objects_in_a_folder_are_mapped_without_an_open_file(rng, url_of):
    store = PayloadStore(url_of("folder"))
    objects = [b"small", *(rng.bytes(MIB + i) for i in range(3))]
    places = store.put(objects)[1:]
    before = len(os.listdir("/proc/self/fd"))
    held = [store.read(place) for _ in range(50) for place in places]
    assert len(os.listdir("/proc/self/fd")) == before
    assert all(data.ctypes.data % 4096 == 0 for data in held)
    assert Path("/proc/self/maps").read_text().count(places[0].pack) == len(held)
    store.delete(places[0].pack)
    assert [data.tobytes() for data in held[-3:]] == objects[1:], "deleted, but mapped"
    view = held[0][5:10]
    del held
    assert Path("/proc/self/maps").read_text().count(places[0].pack) == 1, "a view keeps its map"
    assert view.tobytes() == objects[1][5:10]


HOSTILE = ["", "..", "../../etc/passwd", "a" * 32, "x" * 100_000]
HOSTILE += [f"{'a' * 32}-{end}" for end in ("0", "05", "5/", "5\n", "-5", "5-0", 10**15)]
HOSTILE += [f"{'a' * 32}-{10**14}-1", f"{'A' * 32}-5"]


@pytest.mark.parametrize("store", ["folder"], indirect=True)
def test_names_and_places_that_no_pack_has_are_refused(store):
    for name in HOSTILE:
        for call in (store.delete, lambda pack: store.read(Place(pack, 0, 1))):
            with pytest.raises(UserError, match="is not the name of a pack") as caught:
                call(name)
            assert len(str(caught.value)) < 300
    pack = store.put([b"data"])[0].pack
    size = Name.parse(pack).size
    for offset, length in ((-1, 5), (0, -1), (0, 10**9), (10**9, 1), (size - 63, 64)):
        with pytest.raises(PackDamaged, match="is not inside its pack of"):
            store.read(Place(pack, offset, length))
    claims = f"{'a' * 32}-{10**14}"  # 100 TB, of which nothing is allocated
    overwrite(store, Name.parse(claims).key, b"x" * 100)
    for place in (Place(claims, 0, 10**14), Place(claims, 50, 2**40)):
        with pytest.raises(PackDamaged, match=r"cut off|shorter than"):
            store.read(place)
    other = "f" if pack[31] != "f" else "0"  # another shard's folder
    for key in (f"packs/{other}/{pack}.pack", "packs/0/notes.txt", "packs/0/.pack"):
        overwrite(store, key, b"x")
    assert [info.name for info in store.packs() if info.name != claims] == [pack]


def test_changed_and_missing_bytes_are_found_in_the_objects_that_they_are_in(rng, store):
    for trial in range(20 if store.url.startswith("/") else 3):
        objects = random_objects(rng, 8, 4000) + [rng.bytes(60_000 if trial % 2 else 10)] * 2
        places = store.put(objects)
        name = Name.parse(places[0].pack)
        at = int(rng.integers(name.size))
        key, begin, _ = next(iter(name.pieces(at, at + 1)))
        data = bytearray(stored(store, key))
        damaged = set()
        for how in ("flipped", "cut", "gone"):
            if how == "flipped":
                overwrite(store, key, bytes([*data[:begin], data[begin] ^ 4, *data[begin + 1 :]]))
            elif how == "cut":
                overwrite(store, key, bytes(data[:begin]))
            else:
                store._storage.delete(key)
            found = set()
            for i, (place, content) in enumerate(zip(places, objects)):
                try:
                    assert store.read(place, sha(content)).tobytes() == content
                except (PackDamaged, PackMissing):
                    found.add(i)
            inside = range(at, at + 1)
            if how != "flipped":  # the rest of the object with this key
                start = at - begin
                inside = range(start if how == "gone" else at, start + len(data))
            damaged = {
                i
                for i, place in enumerate(places)
                if place.offset < inside.stop and place.offset + place.length > inside.start
            }
            assert found == damaged, how


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


def test_a_put_that_took_so_long_that_it_may_have_been_swept_commits_nothing(
    rng, store, monkeypatch
):
    now = [1000.0]
    monkeypatch.setattr(payloads.time, "monotonic", lambda: now[0])

    def objects():
        yield b"first"
        now[0] += payloads.ABANDONED_S
        yield b"last"

    with pytest.raises(StorageFailed, match=r"took 86400 s: put fewer objects at once"):
        store.put(objects())
    assert keys(store) == []


STREAM = """
import sys
from mint_jax import host
from mint_jax.catalog.storage.payloads import PayloadStore
block = bytes(range(256)) * 32768  # 8 MiB
store = PayloadStore(sys.argv[1])
store.put([b"x"])
host.reset_peak_rss()
before = host.rss_bytes()
places = store.put(block for _ in range(int(sys.argv[2])))
print(host.peak_rss_bytes() - before, len(places))
"""


@pytest.mark.parametrize(
    ("kind", "count"), [("folder", 25), pytest.param("s3", 25, marks=pytest.mark.long)]
)
def test_a_stream_is_never_held_whole(url_of, kind, count):
    command = [sys.executable, "-c", STREAM, url_of(kind), str(count)]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr[-2000:]
    grown, written = map(int, done.stdout.split())
    assert written == count
    assert grown < 72 * MIB, "64 MiB and what the allocator keeps"


def machine() -> dict[str, str]:
    """Address and credentials, for a process that was forked before they were known."""
    return {name: value for name, value in os.environ.items() if name.startswith("AWS_")}


def put_for_ever(url: str, channel, environment: dict, part: int, seed: int):
    """Puts packs of random sizes; tells the places and digests of each that is acknowledged."""
    os.environ.update(environment)
    bucket.PART = part
    rng = np.random.default_rng(seed)
    store = PayloadStore(url)
    while True:
        objects = [rng.bytes(int(n)) for n in rng.integers(1, 400_000, int(rng.integers(1, 8)))]
        places = store.put(objects)
        channel.send([(sha(data), place) for data, place in zip(objects, places)])


@pytest.fixture
def as_nobody():
    """Rights are nothing to root: the test goes on as another user."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    yield
    os.seteuid(0)


@pytest.fixture
def open_folder():
    """A folder that any user can reach."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


def test_a_folder_that_may_only_be_read_is_read_and_says_so(open_folder, rng, request):
    store = PayloadStore(open_folder)
    objects = random_objects(rng, 3)
    places = store.put(objects)
    for path in [*open_folder.rglob("*"), open_folder]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    request.getfixturevalue("as_nobody")
    reader = PayloadStore(open_folder)
    assert [data.tobytes() for data in reader.read_many(places)] == objects
    assert [info.name for info in reader.packs()] == [places[0].pack]
    for call in (
        lambda: reader.put([b"x"]),
        lambda: reader.delete(places[0].pack),
        lambda: PayloadStore(open_folder / "new").put([b"x"]),
    ):
        with pytest.raises(
            StorageFailed,
            match=rf"cannot (write|delete) payloads in {open_folder}.*read-only for this user",
        ):
            call()


def test_a_folder_that_is_none_or_vanishes_is_explained(tmp_path, rng):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="is not a folder"):
        PayloadStore(tmp_path / "file")
    with pytest.raises(StorageFailed, match="missing or no folder"):
        PayloadStore(tmp_path / "file" / "below").put([b"x"])
    store = PayloadStore(tmp_path / "new" / "deep")
    assert list(store.packs()) == []
    assert store.sweep() == []
    store.put([b"x"])
    (tmp_path / "new" / "deep" / "staging").rmdir()
    with pytest.raises(StorageFailed, match="missing or no folder"):
        store.put([b"x"])
    assert store.put([b"x"]), "made again"


def fails(times, fault):
    """A fault for the first so many requests."""
    left = [times]

    def decide(method, path):
        left[0] -= 1
        return fault if left[0] >= 0 else None

    return decide


@pytest.mark.parametrize(
    "fault", ["cut", *(pytest.param(one, marks=pytest.mark.long) for one in (500, 503, "hang up"))]
)
def test_a_bucket_that_fails_a_few_times_is_asked_again(rng, url_of, s3, fault):
    store = PayloadStore(url_of("s3"), timeout=30.0)
    objects = random_objects(rng, 3)
    s3.fault = fails(2 if fault != "cut" else 0, fault)
    places = store.put(objects)
    s3.fault = fails(2, fault)
    assert [data.tobytes() for data in store.read_many(places)] == objects
    s3.fault = fails(2, fault)
    assert [info.name for info in store.packs()] == [places[0].pack]
    s3.fault = fails(2 if fault != "cut" else 0, fault)
    store.delete(places[0].pack)
    assert keys(store) == []


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (500, "no answer within|InternalError|told to fail"),
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


@pytest.mark.long
def test_an_answer_that_is_lost_leaves_no_half_pack(rng, url_of, s3, monkeypatch):
    """The last request arrives, its answer does not: the pack is whole, though nobody was told of
    it.
    """
    monkeypatch.setattr(bucket, "PART", 50_000)
    store = PayloadStore(url_of("s3"), timeout=2.0)
    data = rng.bytes(120_000)
    s3.fault = lambda method, path: "lost" if method == "PUT" and path.endswith(".pack") else None
    with pytest.raises(StorageFailed, match="no answer within"):
        store.put([data])
    s3.fault = lambda method, path: None
    (info,) = store.packs()
    assert store.read(Place(info.name, 0, 120_000), sha(data)).tobytes() == data
    assert store.sweep(older_s=-10) == []


def test_a_pack_is_one_request(rng, url_of, s3):
    store = PayloadStore(url_of("s3"))

    def requests() -> list[str]:  # without those that an earlier test gave up and that still arrive
        return [method for method, path in s3.requests if store.url.rpartition("/")[2] in path]

    places = store.put([rng.bytes(8000) for _ in range(100)])
    assert requests() == ["PUT"]
    store.read(places[50])
    assert requests() == ["PUT", "GET"]


def check_what_killed_writers_left(store, acknowledged):
    """All that was acknowledged is there, all that is listed is whole, the rest is swept."""
    listed = [info.name for info in store.packs()]
    assert {objects[0][1].pack for objects in acknowledged} <= set(listed)
    for pack in listed:  # one whose acknowledgement was lost is readable to its end
        store.read(Place(pack, 0, Name.parse(pack).size))
    for objects in acknowledged:
        for digest, place in objects:
            store.read(place, digest)
    swept = store.sweep(older_s=-10)
    assert {pack_format.stem_of(key) for key in keys(store)} == {
        Name.parse(info.name).stem for info in store.packs()
    }
    assert [info.name for info in store.packs()] == listed
    return len(listed), bool(swept)


@pytest.mark.parametrize(
    ("kind", "times"),
    [
        pytest.param("folder", 16, marks=pytest.mark.long),
        pytest.param("s3", 12, marks=pytest.mark.slow),
    ],
)
def test_a_kill_at_any_moment_loses_nothing_acknowledged_and_lists_nothing_half(
    rng, url_of, kind, times
):
    url, acknowledged, hits = url_of(kind), [], 0
    store = PayloadStore(url)
    for i in range(times):
        receiver, sender = SERVER.Pipe(duplex=False)
        arguments = (url, sender, machine(), 100_000, int(rng.integers(1 << 30)))
        process = SERVER.Process(target=put_for_ever, args=arguments)
        process.start()
        sender.close()
        try:
            for _ in range(int(rng.integers(1, 4))):
                acknowledged.append(receiver.recv())
            time.sleep(rng.uniform(0, 0.03))
            process.kill()
            while True:
                acknowledged.append(receiver.recv())
        except EOFError:
            process.join()
        assert process.exitcode == -9
        count, swept = check_what_killed_writers_left(store, acknowledged)
        hits += swept
        assert count <= len(acknowledged) + i + 1, "at most one not acknowledged, per kill"
    assert len(acknowledged) >= times
    assert hits > 0, "no kill hit a writer in the middle"


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


def test_a_long_pack_that_fails_in_the_middle_is_not_listed(rng, url_of, s3, monkeypatch):
    monkeypatch.setattr(bucket, "PART", 50_000)
    store = PayloadStore(url_of("s3"), timeout=1.5)
    s3.fault = lambda method, path: 500 if method == "PUT" and path.endswith(".pack") else None
    with pytest.raises(StorageFailed):
        store.put([rng.bytes(300_000)])
    assert list(store.packs()) == []
    assert len(store.sweep(older_s=-10)) == 5, "the parts, whose last may still have arrived"
