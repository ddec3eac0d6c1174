"""Adapter revisions: exact bytes, digests, damage, many writers at once, writers killed in the middle, a full disk."""

import dataclasses
import json
import multiprocessing
import os
import shutil
import threading
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from blake3 import blake3

from mint_jax import params as params_lib
from mint_jax.catalog.revisions import FILE, RevisionStore, Schema, digest_of, pack, unpack
from mint_jax.errors import UserError
from mint_jax.lora.tree import AdapterConfig
from tests.disks import LIMITS, run_limited

SERVER = multiprocessing.get_context("forkserver")  # imports once, forks for every writer
SERVER.set_forkserver_preload(["mint_jax.launch", "mint_jax.checkpoint", "mint_jax.catalog.revisions", "pytest"])
SCHEMA = Schema("ab" * 32, AdapterConfig(3, 6.0, ("q", "down")))


def adapter(rng, width=40) -> dict:
    shapes = {
        "dense/attn/q/a": (2, 3, width),
        "dense/attn/q/b": (2, 3, 8),
        "dense/mlp/down/a": (2, 3, 5),
        "dense/mlp/down/b": (2, 3, width),
    }
    return params_lib.nest({path: rng.normal(size=shape).astype(np.float32) for path, shape in shapes.items()})


def flat(tree) -> dict:
    return dict(params_lib.leaves_with_path(tree))


@pytest.fixture
def store(tmp_path) -> RevisionStore:
    return RevisionStore(tmp_path / "revisions")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_packing_is_exact(rng, dtype):
    schema = dataclasses.replace(SCHEMA, config=AdapterConfig(3, 0.1, ("q", "down"), rslora=True), dtype=dtype)
    tree = adapter(rng)
    tree["dense"]["attn"]["q"]["a"].flat[:5] = [-0.0, 1e-40, 6e4, np.inf, -1e-8]
    found, read = unpack(pack(tree, schema))
    assert read == schema
    assert flat(found).keys() == flat(tree).keys()
    for path, leaf in flat(tree).items():
        wanted = leaf.astype(jnp.dtype(dtype))
        assert flat(found)[path].dtype == wanted.dtype
        assert flat(found)[path].tobytes() == wanted.tobytes()


def test_a_packed_object_is_a_safetensors_file(rng):
    tree = adapter(rng)
    tensors = safetensors.numpy.load(pack(tree, SCHEMA))
    assert tensors.keys() == flat(tree).keys()
    for path, leaf in flat(tree).items():
        np.testing.assert_array_equal(tensors[path], leaf)


def test_packing_depends_on_values_alone(rng):
    """Neither on the order of a dict, nor on memory layout, nor on who holds the array."""
    tree = adapter(rng)
    data = pack(tree, SCHEMA)
    leaves = flat(tree)
    backwards = params_lib.nest({path: leaves[path] for path in reversed(leaves)})
    strided = params_lib.nest({path: np.asfortranarray(leaf) for path, leaf in leaves.items()})
    device = params_lib.nest({path: jnp.asarray(leaf) for path, leaf in leaves.items()})
    assert {pack(t, SCHEMA) for t in (tree, backwards, strided, device)} == {data}


def test_the_digest_covers_base_config_and_every_value(rng):
    tree = adapter(rng)
    other = adapter(rng)
    path, leaf = list(flat(tree).items())[rng.integers(4)]
    changed = params_lib.nest({**flat(tree), path: leaf.copy()})
    flat(changed)[path].view(np.uint32).reshape(-1)[rng.integers(leaf.size)] ^= 1  # the last bit of one value
    config = SCHEMA.config
    schemas = [
        SCHEMA,
        dataclasses.replace(SCHEMA, base="cd" * 32),
        *(
            dataclasses.replace(SCHEMA, config=dataclasses.replace(config, **change))
            for change in ({"rank": 4}, {"alpha": 6.5}, {"targets": ("q", "up")}, {"rslora": True})
        ),
    ]
    digests = [digest_of(pack(tree, schema)) for schema in schemas] + [digest_of(pack(t, SCHEMA)) for t in (changed, other)]
    assert len(set(digests)) == len(digests)
    assert digests[0] == blake3(pack(tree, SCHEMA)).hexdigest()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no safetensors file",
        safetensors.numpy.save({"a": np.zeros(3, np.float32)}),
        safetensors.numpy.save({"a": np.zeros(3, np.float32)}, metadata={"schema": "{"}),
        safetensors.numpy.save({"a": np.zeros(3, np.float32)}, metadata={"schema": '{"format": "mint-adapter/99"}'}),
        safetensors.numpy.save({"a": np.zeros(3, np.float32)}, metadata={"schema": "[]"}),
    ],
    ids=["empty", "text", "no schema", "bad schema", "newer format", "list"],
)
def test_other_bytes_are_refused(data):
    with pytest.raises(UserError, match=r"not a packed adapter|this version reads"):
        unpack(data)


def test_what_is_put_can_be_got(rng, store):
    objects = {store.put(data): data for data in (pack(adapter(rng), SCHEMA) for _ in range(3))}
    assert list(store) == sorted(objects)
    assert list(RevisionStore(store.root)) == sorted(objects)
    for digest, data in objects.items():
        assert digest == blake3(data).hexdigest()
        assert pack(*store.get(digest)) == data
        assert (store.root / digest / FILE).read_bytes() == data


def test_putting_the_same_again_changes_nothing(rng, store):
    data = pack(adapter(rng), SCHEMA)
    digest = store.put(data)
    before = [(p.name, p.stat().st_ino, p.stat().st_mtime_ns) for p in sorted(store.root.rglob("*"))]
    assert store.put(data) == RevisionStore(store.root).put(data) == digest
    assert [(p.name, p.stat().st_ino, p.stat().st_mtime_ns) for p in sorted(store.root.rglob("*"))] == before


@pytest.mark.parametrize("digest", ["0" * 64, "", "..", "nothing"])
def test_unknown_digests_are_refused(rng, store, digest):
    store.put(pack(adapter(rng), SCHEMA))
    with pytest.raises(UserError, match="is not in"):
        store.get(digest)


def test_strange_entries_are_not_listed(rng, store):
    digest = store.put(pack(adapter(rng), SCHEMA))
    (store.root / ("f" * 64)).mkdir()  # no object inside
    (store.root / ("e" * 64)).write_text("a file")
    shutil.copytree(store.root / digest, store.root / f"{digest}.orbax-checkpoint-tmp")
    (store.root / "notes").mkdir()
    assert list(store) == [digest]


def damage(rng, path: Path, how: str):
    data = bytearray(path.read_bytes())
    if how == "bit":
        data[rng.integers(len(data))] ^= 1 << rng.integers(8)
    elif how == "truncated":
        del data[rng.integers(len(data)) :]
    else:
        data += b"\0"
    path.write_bytes(data)


@pytest.mark.parametrize("how", ["bit", "truncated", "longer"])
def test_damage_is_detected_wherever_it_is(rng, store, how):
    data = pack(adapter(rng), SCHEMA)
    digest = store.put(data)
    for _ in range(40):
        damage(rng, store.root / digest / FILE, how)
        with pytest.raises(UserError, match="is corrupt"):
            store.get(digest)
        (store.root / digest / FILE).write_bytes(data)
    assert pack(*store.get(digest)) == data


def test_a_damaged_revision_is_mended_by_putting_it_again(rng, store):
    """The remedy that the error names: export or import it again."""
    data = pack(adapter(rng), SCHEMA)
    digest = store.put(data)
    damage(rng, store.root / digest / FILE, "bit")
    assert store.put(data) == digest
    assert pack(*store.get(digest)) == data


def test_many_threads_may_put_the_same_bytes(rng, store):
    """Every writer gets the digest, and at no moment does the list name a revision that does not load."""
    errors = []

    def write(data, barrier):
        barrier.wait()
        try:
            digest = store.put(data)
            assert pack(*store.get(digest)) == data
            for listed in RevisionStore(store.root):
                store.get(listed)
        except BaseException as error:
            errors.append(error)

    for _ in range(10):
        data, barrier = pack(adapter(rng, width=20_000), SCHEMA), threading.Barrier(6)
        threads = [threading.Thread(target=write, args=(data, barrier)) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors, errors[0]
    assert len(list(store)) == 10
    assert len(list(store.root.iterdir())) == 10, "nothing else is left behind"


def write_until_killed(root, seed, connection):
    """Puts the adapters of ``seed`` one after another, each 1 MB, and says so after each."""
    store = RevisionStore(root)
    for n in range(10_000):
        connection.send(store.put(pack(adapter(np.random.default_rng([seed, n]), width=20_000), SCHEMA)))


def test_a_killed_writer_leaves_whole_revisions_only(rng, tmp_path):
    """24 writers are killed at random moments; writers of the same seed find what the ones before left half done."""
    said = set()
    for kill in range(24):
        receiver, sender = SERVER.Pipe(duplex=False)
        process = SERVER.Process(target=write_until_killed, args=(tmp_path, kill % 3, sender))
        process.start()
        sender.close()
        before = len(said)
        try:
            while len(said) == before:  # until it writes something new
                said.add(receiver.recv())
            time.sleep(rng.uniform(0, 0.03))
            process.kill()
            while True:
                said.add(receiver.recv())
        except EOFError:
            process.join()
        assert process.exitcode == -9
        store = RevisionStore(tmp_path)
        found = list(store)
        assert said <= set(found)
        for digest in found:
            assert digest_of(pack(*store.get(digest))) == digest
    assert len(said) >= 24


ROOT = Path(__file__).parents[2]


def fill_the_disk(directory: str):
    """Puts a small, a large and a small revision; prints what came of it."""
    rng, store, report = np.random.default_rng(), RevisionStore(directory), []
    for width in (100, 200_000, 100):
        data = pack(adapter(rng, width), SCHEMA)
        try:
            report.append(["put", store.put(data)])
        except Exception as error:
            report.append([type(error).__name__, str(error)])
    loaded = [digest_of(pack(*store.get(digest))) for digest in store]
    print(json.dumps({"report": report, "loaded": loaded, "entries": sorted(os.listdir(directory))}))


@pytest.mark.parametrize(("limit", "reason"), zip(LIMITS, ["No space left", "File too large"]), ids=LIMITS)
def test_a_full_disk_is_an_error_of_one_line_and_leaves_nothing(tmp_path, limit, reason):
    """9 MB where there is room for 1."""
    result = json.loads(run_limited(limit, 1, "tests.catalog.revisions_test", tmp_path))
    (first, small), (failed, message), (last, other) = result["report"]
    assert (first, last) == ("put", "put"), "room for a small one must remain"
    assert sorted(result["loaded"]) == result["entries"] == sorted([small, other])
    assert failed == "UserError"
    assert reason in message
    assert "\n" not in message
