"""Packs in a folder, in memory and in a bucket: exact, whole or not there, damage named, failures
explained.
"""

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
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
from tests.disks import LIMITS, run_limited

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
KINDS = ["folder", "memory", "s3"]
SERVER = multiprocessing.get_context("forkserver")  # imports once, forks for every writer
SERVER.set_forkserver_preload(["mint_jax.catalog.storage.payloads", "pytest"])


@pytest.fixture(scope="module")
def proxy():
    with buckets.s3_server() as found:
        yield found


@pytest.fixture
def s3(proxy, monkeypatch):
    """The environment and the proxy of a server that works, until told otherwise."""
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


@pytest.fixture(params=KINDS)
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


def tamper(store, key, change):
    """Rewrites a stored object behind the store's back."""
    if isinstance(store._storage, bucket.Bucket):
        store._storage._store.write(
            key, change(store._storage._store.read(key).result().value)
        ).result()
    else:
        path = Path(store.url) / key
        path.write_bytes(change(path.read_bytes()))


def test_what_is_put_can_be_read(rng, store):
    for _ in range(2):
        objects = [b"", *random_objects(rng, 20), rng.bytes(int(rng.integers(1, 200_000))), b""]
        places = store.put(objects)
        assert len({place.pack for place in places}) == 1
        reopened = PayloadStore(store.url, timeout=20.0)
        assert [reopened.read(place).tobytes() for place in places] == objects
        order = rng.permutation(len(places))
        assert [data.tobytes() for data in store.read_many(places[i] for i in order)] == [
            objects[i] for i in order
        ]
        for data, place in zip(objects, places):
            assert not store.read(place, sha(data)).flags.writeable


def test_any_buffer_can_be_put(rng, store):
    data = rng.bytes(1000)
    array = np.frombuffer(data, np.uint8)
    places = store.put(
        iter([data, bytearray(data), memoryview(data), array, array.view(np.float64)])
    )
    assert {store.read(place).tobytes() for place in places} == {data}
    assert store.put([]) == store.put(iter([])) == []
    assert len(list(store.packs())) == 1


@pytest.mark.parametrize("part", [1000, 4096, 10_000, 1 << 20])
@pytest.mark.parametrize("kind", ["memory", "s3"])
def test_parts_of_any_size_are_one_pack(rng, url_of, monkeypatch, kind, part):
    monkeypatch.setattr(bucket, "PART", part)
    store = PayloadStore(url_of(kind))
    for total in (1, part - 1, part, part + 1, 2 * part, 2 * part + 1):
        objects = (
            [rng.bytes(total)]
            if total % 2
            else [rng.bytes(total // 2), rng.bytes(total - total // 2)]
        )
        places = store.put(objects)
        assert [data.tobytes() for data in store.read_many(places)] == objects
        name = Name.parse(places[0].pack)
        found = [key for key in keys(store) if pack_format.stem_of(key) == name.stem]
        assert found == [name.key, *name.parts]
        assert len(found) == -(-name.size // part)
        store.delete(str(name))
    assert keys(store) == []


def test_objects_are_aligned(rng, store):
    sizes = [1, 63, 64, 65, MIB - 1, 5, MIB, 3, MIB + 1, 7]
    for place in store.put([rng.bytes(n) for n in sizes]):
        assert place.offset % (4096 if place.length >= MIB else 64) == 0


def test_large_objects_in_a_folder_are_mapped(rng, url_of):
    """Without an open file each: many maps are held under a limit of few files."""
    store = PayloadStore(url_of("folder"))
    objects = [rng.bytes(MIB + i) for i in range(5)]
    places = store.put(objects)
    before = len(os.listdir("/proc/self/fd"))
    held = [store.read(place) for _ in range(50) for place in places]
    assert len(os.listdir("/proc/self/fd")) == before
    assert all(data.ctypes.data % 4096 == 0 for data in held)
    maps = Path("/proc/self/maps").read_text()
    assert maps.count(places[0].pack) == len(held)
    assert [data.tobytes() for data in held[:5]] == objects
    store.delete(places[0].pack)
    assert [data.tobytes() for data in held[-5:]] == objects, (
        "deleting takes nothing from who has read"
    )
    with pytest.raises(PackMissing):
        store.read(places[0])
    view = held[0][5:10]
    del held
    assert Path("/proc/self/maps").read_text().count(places[0].pack) == 1, (
        "a view keeps its map, and only its own"
    )
    assert view.tobytes() == objects[0][5:10]


def test_deleting_takes_a_pack_and_nothing_else(rng, store):
    first, second = (store.put(random_objects(rng, 5)) for _ in range(2))
    data = [store.read(place) for place in first]
    copies = [d.tobytes() for d in data]
    store.delete(first[0].pack)
    store.delete(first[0].pack)
    assert [d.tobytes() for d in data] == copies
    assert [info.name for info in store.packs()] == [second[0].pack]
    with pytest.raises(PackMissing, match=r"is not in .*resolve the revision again"):
        store.read(first[0])
    assert len(list(store.read_many(second))) == 5


def test_packs_are_listed_with_size_and_time(rng, store):
    assert list(store.packs()) == []
    start = time.time()
    names = {store.put(random_objects(rng, 3))[0].pack: None for _ in range(20)}
    found = list(store.packs())
    assert sorted(info.name for info in found) == sorted(names)
    for info in found:
        assert info.bytes == Name.parse(info.name).size
        assert start - 2 <= info.mtime <= time.time() + 2
        name = Name.parse(info.name)
        assert (
            sum(len(data) for data in store._storage.read(name.pieces(0, name.size))) == info.bytes
        )


def test_strange_objects_are_no_packs(rng, store):
    place = store.put([b"data"])[0]
    name = Name.parse(place.pack)
    tamper(store, name.key, lambda data: data)
    for key in (
        f"packs/{'f' if name.stem[-1] != 'f' else '0'}/{name}.pack",
        "packs/0/notes.txt",
        "packs/0/.pack",
        f"packs/0/{'0' * 32}-0.pack",
    ):
        if isinstance(store._storage, bucket.Bucket):
            store._storage._store.write(key, b"x").result()
        else:
            path = Path(store.url, key)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(b"x")
    assert [info.name for info in store.packs()] == [place.pack]


HOSTILE = [
    "",
    "..",
    "../../etc/passwd",
    "a" * 32,
    f"{'a' * 32}-0",
    f"{'a' * 32}-05",
    f"{'A' * 32}-5",
    f"{'a' * 32}-5/",
    f"{'a' * 32}-5\n",
]
HOSTILE += [
    f"{'a' * 32}-{10**15}",
    f"{'a' * 32}-{10**14}-1",
    f"{'a' * 32}--5",
    f"{'a' * 32}-5-0",
    "x" * 100_000,
]


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_a_name_that_is_none_is_refused(store, name):
    for call in (
        store.delete,
        lambda pack: store.read(Place(pack, 0, 1)),
    ):
        with pytest.raises(UserError, match=r"is not the name of a pack") as caught:
            call(name)
        assert len(str(caught.value)) < 300


def test_a_name_that_promises_much_takes_no_memory(store):
    pack = f"{'a' * 32}-{10**14}"
    key = Name.parse(pack).key
    if isinstance(store._storage, bucket.Bucket):
        store._storage._store.write(key, b"x" * 100).result()
    else:
        Path(store.url, key).parent.mkdir(parents=True)
        Path(store.url, key).write_bytes(b"x" * 100)
    for call in (
        lambda: store.read(Place(pack, 0, 10**14)),
        lambda: store.read(Place(pack, 50, 2**40)),
    ):
        with pytest.raises(PackDamaged, match=r"cut off|shorter than"):
            call()


@pytest.mark.parametrize(("offset", "length"), [(-1, 5), (0, -1), (0, 10**9), (10**9, 1), (90, 64)])
def test_a_place_outside_its_pack_is_refused(store, offset, length):
    pack = store.put([b"data"])[0].pack
    with pytest.raises(PackDamaged, match="is not inside its pack of"):
        store.read(Place(pack, offset if offset != 90 else Name.parse(pack).size - 63, length))


def hits(places, flipped):
    """Which objects a changed byte lies in."""
    return {
        i for i, place in enumerate(places) if place.offset <= flipped < place.offset + place.length
    }


def damaged(store, places, digests):
    """Which objects do not read as what they are."""
    found = set()
    for i, (place, digest) in enumerate(zip(places, digests)):
        try:
            store.read(place, digest)
        except PackDamaged:
            found.add(i)
    return found


def trials(store) -> int:
    return 40 if store.url.startswith("/") else 6  # the server in Python takes its time


def place_in_storage(store, name, at):
    return next(iter(name.pieces(at, at + 1)))[:2]


def test_a_flipped_bit_is_found_and_hits_only_what_it_is_in(rng, store):
    for trial in range(trials(store)):
        objects = random_objects(rng, 8, 4000 if trial % 2 else 100)
        places, digests = store.put(objects), list(map(sha, objects))
        name = Name.parse(places[0].pack)
        body = max(place.offset + place.length for place in places)
        assert body == name.size
        at = int(rng.integers(body))
        key, begin = place_in_storage(store, name, at)
        bit = 1 << int(rng.integers(8))
        tamper(
            store,
            key,
            lambda data: data[:begin] + bytes([data[begin] ^ bit]) + data[begin + 1 :],  # noqa: B023
        )
        assert damaged(store, places, digests) == hits(places, at)


def test_a_cut_pack_is_found_and_what_lies_before_the_cut_is_read(rng, store):
    for _ in range(trials(store)):
        objects = random_objects(rng, 8, 1000)
        places, digests = store.put(objects), list(map(sha, objects))
        name = Name.parse(places[0].pack)
        at = int(rng.integers(name.size))
        key, begin = place_in_storage(store, name, at)
        assert key == name.key
        tamper(store, key, lambda data: data[:begin])  # noqa: B023 - called here
        assert damaged(store, places, digests) == {
            i for i, place in enumerate(places) if place.offset + place.length > at
        }


@pytest.mark.parametrize("store", [kind for kind in KINDS if kind != "folder"], indirect=True)
def test_a_lost_part_is_missing(rng, store):
    assert isinstance(store._storage, bucket.Bucket)
    objects = [rng.bytes(10_000) for _ in range(20)]
    places, digests = store.put(objects), list(map(sha, objects))
    name = Name.parse(places[0].pack)
    store._storage.delete(name.parts[1])
    lost = {i for i, p in enumerate(places) if p.offset < 100_000 and p.offset + p.length > 50_000}
    assert len(lost) >= 5
    for i, place in enumerate(places):
        if i in lost:
            with pytest.raises(PackMissing, match=name.stem):
                store.read(place)
        else:
            store.read(place, digests[i])


def test_two_packs_swapped_are_found(rng, store):
    first, second = store.put([b"one object."])[0], store.put([b"another one"])[0]
    a, b = Name.parse(first.pack), Name.parse(second.pack)
    assert a.size == b.size
    contents = []
    tamper(store, a.key, lambda data: contents.append(data) or data)
    tamper(store, b.key, lambda data: contents[0])
    with pytest.raises(PackDamaged, match="have digest"):
        store.read(second, sha(b"another one"))


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


def test_memory_is_one_place_for_all_who_name_it(rng):
    url = f"memory://{uuid.uuid4().hex}/deep"
    place = PayloadStore(url).put([b"x"])[0]
    assert PayloadStore(url).read(place).tobytes() == b"x"
    assert list(PayloadStore(f"{url}er").packs()) == []


@pytest.mark.parametrize(
    "url",
    [
        "http://host/x",
        "s3://",
        "gs:///path",
        "file://host/path",
        "file://",
        "memory://",
        "ftp://x/y",
    ],
)
def test_a_url_of_another_kind_is_refused(url):
    with pytest.raises(UserError, match=r"write "):
        PayloadStore(url)


def test_a_folder_has_several_spellings(tmp_path, monkeypatch):
    place = PayloadStore(tmp_path / "my folder").put([b"x"])[0]
    monkeypatch.chdir(tmp_path)
    for url in (
        "my folder",
        f"file://{tmp_path}/my%20folder",
        f"file://localhost{tmp_path}/my folder",
        str(tmp_path / "my folder/"),
    ):
        assert PayloadStore(url).read(place).tobytes() == b"x"


def test_a_bucket_of_google_is_the_same_code():
    store = PayloadStore("gs://bucket/path")
    assert store._storage._store.spec().to_json()["driver"] == "gcs"


@pytest.mark.parametrize("kind", ["folder", "s3"])
def test_ten_thousand_small_objects_are_one_file(rng, url_of, kind):
    data = rng.bytes(10_000 * 4096)
    store = PayloadStore(url_of(kind))
    places = store.put(data[i : i + 4096] for i in range(0, len(data), 4096))
    assert [info.bytes for info in store.packs()] == [Name.parse(places[0].pack).size]
    assert Name.parse(places[0].pack).size <= 1.02 * len(data)
    assert len(keys(store)) == (1 if kind == "folder" else -(-len(data) // bucket.PART))
    if kind == "folder":
        on_disk = sum(p.stat().st_blocks * 512 for p in Path(store.url).rglob("*"))
        assert on_disk <= 1.02 * len(data)
    for i in rng.integers(10_000, size=50):
        assert store.read(places[i]).tobytes() == data[i * 4096 : (i + 1) * 4096]


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


@pytest.mark.parametrize(("kind", "count"), [("folder", 50), ("s3", 25)])
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


def check_what_killed_writers_left(store, said, read_before=()):
    """All that was acknowledged is there, all that is listed is whole, the rest is swept."""
    listed = [info.name for info in store.packs()]
    told = {objects[0][1].pack: objects for objects in said}
    assert told.keys() <= set(listed)
    for pack in sorted(set(listed) - set(read_before)):
        # a pack whose acknowledgement was lost is readable to its end
        store.read(Place(pack, 0, Name.parse(pack).size))
        for digest, place in told.get(pack, ()):
            store.read(place, digest)
    left = store.sweep(older_s=-10)
    assert [info.name for info in store.packs()] == listed
    assert {pack_format.stem_of(key) for key in keys(store)} == {
        Name.parse(pack).stem for pack in listed
    }
    return listed, left


def kill_writers(rng, url, times, part=bucket.PART):
    store, said, listed, swept = PayloadStore(url), [], [], 0
    for i in range(times):
        receiver, sender = SERVER.Pipe(duplex=False)
        process = SERVER.Process(
            target=put_for_ever, args=(url, sender, machine(), part, int(rng.integers(1 << 30)))
        )
        process.start()
        sender.close()
        told = []
        try:
            for _ in range(int(rng.integers(1, 4))):
                told.append(receiver.recv())
            time.sleep(rng.uniform(0, 0.03))
            process.kill()
            while True:
                told.append(receiver.recv())
        except EOFError:
            process.join()
        assert process.exitcode == -9
        listed, left = check_what_killed_writers_left(store, told, listed)
        said += told
        swept += bool(left)
        assert len(listed) <= len(said) + i + 1, (
            "at most one that was committed and not yet acknowledged, per kill"
        )
    assert len(said) >= times
    check_what_killed_writers_left(store, said)
    return swept


@pytest.mark.long
def test_killed_at_any_moment_in_a_folder_nothing_acknowledged_is_lost_and_nothing_half_is_listed(
    rng, url_of
):
    assert kill_writers(rng, url_of("folder"), 16) > 0, "no kill hit a writer in the middle"


@pytest.mark.slow
def test_killed_at_any_moment_in_a_bucket_nothing_acknowledged_is_lost_and_nothing_half_is_listed(
    rng, url_of
):
    assert kill_writers(rng, url_of("s3"), 12, part=100_000) > 0, (
        "no kill hit a writer in the middle"
    )


def put_some(url: str, channel, environment: dict, seed: int):
    os.environ.update(environment)
    rng = np.random.default_rng(seed)
    store = PayloadStore(url)
    for _ in range(15):
        objects = random_objects(rng, 5)
        channel.send([(sha(data), place) for data, place in zip(objects, store.put(objects))])
    channel.close()


@pytest.mark.parametrize("kind", ["folder", pytest.param("s3", marks=pytest.mark.long)])
def test_two_processes_and_threads_put_at_once(rng, url_of, kind):
    url = url_of(kind)
    pipes = [SERVER.Pipe(duplex=False) for _ in range(2)]
    writers = [
        SERVER.Process(target=put_some, args=(url, sender, machine(), int(rng.integers(1 << 30))))
        for _, sender in pipes
    ]
    for writer, (_, sender) in zip(writers, pipes):
        writer.start()
        sender.close()
    store, said = PayloadStore(url), []

    def put_here():
        mine = np.random.default_rng()
        for _ in range(10):
            objects = random_objects(mine, 5)
            said.append([(sha(data), place) for data, place in zip(objects, store.put(objects))])

    threads = [threading.Thread(target=put_here) for _ in range(3)]
    for thread in threads:
        thread.start()
    for receiver, _ in pipes:
        said += [receiver.recv() for _ in range(15)]
    for worker in [*threads, *writers]:
        worker.join()
    listed, left = check_what_killed_writers_left(store, said)
    assert len(listed) == len(said) == 60
    assert left == []


def fill_the_disk(directory: str):
    """Puts a small, a large and a small pack; prints what came of it. Run by ``run_limited``."""
    rng, store, report = np.random.default_rng(), PayloadStore(directory), []
    for size in (100, 9_000_000, 100):
        data = rng.bytes(size)
        try:
            report.append(["put", store.put([data])[0].pack])
        except Exception as error:
            report.append([type(error).__name__, str(error)])
    listed = [info.name for info in store.packs()]
    for info in store.packs():
        store.read(Place(info.name, 0, info.bytes))
    print(
        json.dumps(
            {"report": report, "listed": listed, "left": list(store._storage.list("staging/"))}
        )
    )


@pytest.mark.parametrize(
    ("limit", "reason"), zip(LIMITS, ["No space left", "File too large"]), ids=LIMITS
)
def test_a_full_disk_is_an_error_of_one_line_and_leaves_nothing(tmp_path, limit, reason):
    """9 MB where there is room for 1."""
    result = json.loads(run_limited(limit, 1, "tests.catalog.payloads_test", tmp_path))
    (first, small), (failed, message), (last, other) = result["report"]
    assert (first, last) == ("put", "put"), "room for a small one must remain"
    assert sorted(result["listed"]) == sorted([small, other])
    assert result["left"] == []
    assert failed == "StorageFailed"
    assert reason in message
    assert "\n" not in message


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


@pytest.mark.parametrize("fault", [500, 503, "hang up", "cut"])
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


def test_a_long_pack_that_fails_in_the_middle_is_not_listed(rng, url_of, s3, monkeypatch):
    monkeypatch.setattr(bucket, "PART", 50_000)
    store = PayloadStore(url_of("s3"), timeout=2.0)
    s3.fault = lambda method, path: 500 if method == "PUT" and path.endswith("000003") else None
    with pytest.raises(StorageFailed):
        store.put([rng.bytes(300_000)])
    assert keys(store) == []
    s3.fault = lambda method, path: 500 if method == "PUT" and path.endswith(".pack") else None
    with pytest.raises(StorageFailed):
        store.put([rng.bytes(300_000)])
    assert list(store.packs()) == []
    assert len(store.sweep(older_s=-10)) == 5, "the parts, whose last may still have arrived"


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


def test_a_bucket_that_is_not_there_is_explained(url_of, s3, monkeypatch):
    store = PayloadStore("s3://no-such-bucket/path", timeout=3.0)
    for call in (lambda: store.put([b"x"]), lambda: list(store.packs())):
        with pytest.raises(
            StorageFailed,
            match=r"s3://no-such-bucket/path.*NoSuchBucket.*create the bucket, or correct the URL",
        ):
            call()
    with pytest.raises(StorageFailed, match="Invalid S3 bucket name"):
        PayloadStore("s3://No_Bucket!/path")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(
        StorageFailed,
        match=r"127.0.0.1:9.*Could not connect.*check the network and AWS_ENDPOINT_URL",
    ):
        PayloadStore(f"s3://{buckets.BUCKET}", timeout=3.0).put([b"x"])


def test_a_pack_is_one_request(rng, url_of, s3):
    store = PayloadStore(url_of("s3"))

    def requests() -> list[str]:  # without those that an earlier test gave up and that still arrive
        return [method for method, path in s3.requests if store.url.rpartition("/")[2] in path]

    places = store.put([rng.bytes(8000) for _ in range(100)])
    assert requests() == ["PUT"]
    store.read(places[50])
    assert requests() == ["PUT", "GET"]
