"""Names of models: what they stand for, for whom, for how long; and folders that are read only
where that is allowed.
"""

import hashlib
import os
import shutil

import numpy as np
import pytest
from huggingface_hub import constants

from mint_jax.catalog.cli.sources import WEIGHTS
from mint_jax.catalog.packed import Schema, digest_of, pack, unpack
from mint_jax.catalog.storage.payloads import bucket_at
from mint_jax.errors import UserError
from mint_jax.lora.peft import write_peft
from mint_jax.models.outline import peft_tables
from mint_jax.service.adapter_uris import AdapterUris
from mint_jax.service.monitoring import adapters
from mint_jax.service.weights import Model, NotFound, Taken, Weights
from tests.catalog import buckets
from tests.service.openai_world import CONFIG, export, opened, random_adapter


@pytest.fixture(scope="module")
def world(mesh, tmp_path_factory):
    with opened(mesh, tmp_path_factory.mktemp("world")) as w:
        yield w


def no_path(tenant, path):
    raise NotFound(path)


@pytest.fixture
def weights(world, tmp_path):
    return Weights(world.base, world.catalog, no_path, folder=tmp_path / "adapters")


def peft_folder(world, rng, path):
    adapter = random_adapter(rng, world.base)
    write_peft(path, adapter, CONFIG, peft_tables(world.base.cfg)[0])
    return adapter


def test_a_name_stands_for_the_base_or_a_revision(world, weights):
    digests = world.digests
    assert weights.resolve("tiny-random", "anyone") == Model("tiny-random")
    serving = Model("chat@serving", digests["chat@1"], "chat", 1)
    assert weights.resolve("chat@serving", "default") == serving
    assert weights.resolve("chat", "default").number == 2
    assert weights.resolve("mine", "a") == Model("mine", digests["a/mine@1"], "a/mine", 1)
    assert weights.resolve(digests["a/mine@1"][:12], "a").digest == digests["a/mine@1"]
    unknown = {"a/mine": "default", "mine": "b", digests["a/mine@1"]: "b"}
    for name, tenant in (unknown | {"tinker://x/sampler_weights/y": "a"}).items():
        with pytest.raises(NotFound):
            weights.resolve(name, tenant)


def test_a_loaded_name_is_its_tenants_and_stays_what_it_was(world, weights):
    loaded = weights.load("mine", "chat@serving", "default")
    assert (loaded.name, loaded.digest) == ("mine", world.digests["chat@1"])
    assert weights.names_of(loaded.digest) == ["mine"]
    world.catalog.promote("chat", 2, "serving")
    assert weights.resolve("mine", "default").digest == world.digests["chat@1"]
    world.catalog.rollback("chat", "serving")
    with pytest.raises(NotFound):
        weights.resolve("mine", "b")
    for taken in ("mine", "tiny-random", "chat"):
        with pytest.raises(Taken, match="is taken"):
            weights.load(taken, "chat@2", "default")
    with pytest.raises(Taken):
        weights.load("chat", "chat@2", "default", inplace=True)
    assert weights.load("mine", "chat@2", "default", inplace=True).digest == world.digests["chat@2"]
    with pytest.raises(NotFound):
        weights.unload("mine", "b")
    weights.unload("mine", "default")
    with pytest.raises(NotFound):
        weights.resolve("mine", "default")
    for path in ("b/secret", "tiny-random"):
        with pytest.raises(NotFound):
            weights.load("x", path, "default")
    for name in ("a/b", "", "x@1"):
        with pytest.raises(UserError, match="lora_name"):
            weights.load(name, "chat", "default")


def test_a_peft_folder_becomes_a_revision_until_it_is_unloaded(rng, world, weights, tmp_path):
    adapter = peft_folder(world, rng, tmp_path / "adapters" / "one")
    for path in ("one", str(tmp_path / "adapters" / "one")):
        loaded = weights.load("first", path, "default", inplace=path != "one")
        _, schema = unpack(weights.fetch(loaded.digest))
        assert schema.base == world.base.fingerprint
        assert digest_of(pack(adapter, schema)) == loaded.digest
    second = weights.load("second", "one", "b")
    assert second.digest == loaded.digest
    weights.unload("first", "default")
    assert weights.fetch(loaded.digest) is not None, "another tenant has it"
    weights.unload("second", "b")
    with pytest.raises(UserError):
        weights.fetch(loaded.digest)
    stored = world.digests["chat@1"]
    assert np.array_equal(weights.fetch(stored), world.catalog.load(stored))


def test_nothing_beside_the_folder_is_read(rng, world, weights, tmp_path):
    peft_folder(world, rng, tmp_path / "outside")
    (tmp_path / "adapters").mkdir()
    os.symlink(tmp_path / "outside", tmp_path / "adapters" / "link")
    (tmp_path / "adapters" / "files").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        os.symlink(tmp_path / "outside" / name, tmp_path / "adapters" / "files" / name)
    for path in ("../outside", str(tmp_path / "outside"), "link", "", ".", "none", "a\0b", "~"):
        with pytest.raises(NotFound):
            weights.load("x", path, "default")
    with pytest.raises(UserError, match="symbolic link out of the folder"):
        weights.load("x", "files", "default")
    closed = Weights(world.base, world.catalog, no_path)
    with pytest.raises(NotFound):
        closed.load("x", str(tmp_path / "outside"), "default")


def hub_of(folder, monkeypatch):
    """Returns the snapshot's folder of ``org/name`` in a hub's cache, without a network."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    cached = folder / "models--org--name"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("a" * 40)
    return cached / "snapshots" / ("a" * 40)


def test_a_uri_names_an_adapter_of_the_server_s_places(rng, world, tmp_path, monkeypatch):
    uris = AdapterUris((f"file:{tmp_path}/adapters", "hf:org"))
    weights = Weights(world.base, world.catalog, no_path, uris=uris)
    ours = tmp_path / "adapters" / "one"
    for path, uri in ((ours, f"file:{ours}"), (hub_of(tmp_path, monkeypatch), "hf:org/name")):
        for _ in range(2):  # another adapter in the same folder is another revision
            shutil.rmtree(path, ignore_errors=True)
            adapter = peft_folder(world, rng, path)
            digest = hashlib.sha256((path / "adapter_model.safetensors").read_bytes()).hexdigest()
            name = f"tiny-random|{uri}#sha256={digest}"
            found = weights.resolve(name, "anyone")
            assert found.name == name
            assert found.digest is not None
            assert weights.resolve(f"tiny-random|{uri}", "b").digest == found.digest
            _, schema = unpack(weights.fetch(found.digest))
            assert digest_of(pack(adapter, schema)) == found.digest
    with pytest.raises(UserError, match="sha256"):  # its file has changed since
        weights.resolve(f"tiny-random|file:{ours}#sha256={digest}", "anyone")


def test_a_uri_names_an_adapter_of_a_bucket(rng, world, tmp_path, monkeypatch):
    with buckets.s3_server() as server:
        for name, value in buckets.environment(server.url).items():
            monkeypatch.setenv(name, value)
        place = f"s3://{buckets.BUCKET}/team"
        store = bucket_at(place, 30.0)
        uris = AdapterUris((place,), tmp_path / "fetched")
        weights = Weights(world.base, world.catalog, no_path, uris=uris)
        digests, uri = [], f"tiny-random|{place}/one"
        for _ in range(2):  # another adapter at the same place is another revision
            adapter = peft_folder(world, rng, tmp_path / "one")
            for path in (tmp_path / "one").iterdir():
                store.start(f"one/{path.name}", path.read_bytes()).result()
            shutil.rmtree(tmp_path / "one")
            digests.append(weights.resolve(uri, "anyone").digest)
            _, schema = unpack(weights.fetch(digests[-1]))
            assert digest_of(pack(adapter, schema)) == digests[-1]
        assert digests[0] != digests[1]
        assert weights.resolve(uri, "b").digest == digests[1]
        for bad, words in (
            (f"{place}/two", "not a PEFT adapter"),
            (f"{place}/../team/one", "without"),
            (f"{place}2/one", "outside this server's places"),
            (f"{place}/one#sha256={'0' * 64}", "sha256"),
        ):
            with pytest.raises(UserError, match=words):
                weights.resolve(f"tiny-random|{bad}", "anyone")
        copy = next(iter(uris.sources(digests[1])))
        weights_hash = hashlib.sha256(copy.file(WEIGHTS, 1 << 20).read_bytes()).hexdigest()
        hashed = f"{uri}#sha256={weights_hash}"
        assert weights.resolve(hashed, "anyone").digest == digests[1]
    # the bucket is gone: a hash names what was read, a name without one asks again
    assert weights.resolve(hashed, "anyone").digest == digests[1]
    with pytest.raises(UserError, match="check the network"):
        weights.resolve(uri, "anyone")


def test_a_bad_uri_is_refused(rng, world, tmp_path, monkeypatch):
    root = tmp_path / "adapters"
    for path in (tmp_path / "outside", tmp_path / "adapters2", root / "one", root / "other"):
        peft_folder(world, rng, path)
    hub_of(tmp_path, monkeypatch)
    os.symlink(tmp_path / "outside", root / "link")
    (root / "files").mkdir()
    os.symlink(tmp_path / "outside" / "adapter_config.json", root / "files" / "adapter_config.json")
    os.symlink(root / "one" / "adapter_model.safetensors", root / "files" / "x")
    config = root / "other" / "adapter_config.json"
    config.write_text(config.read_text().replace('"q_proj"', '"c_attn"'))
    uris = AdapterUris((f"file:{root}/", "hf:org"))
    weights = Weights(world.base, world.catalog, no_path, uris=uris)
    outside, none = "outside this server's places", "not a PEFT adapter"
    bad = {
        f"file:{tmp_path}/outside": outside,
        f"file:{tmp_path}/adapters2": outside,  # begins as the folder's name
        f"file:/{root}/one": outside,
        f"FILE:{root}/one": outside,
        f"{root}/one": outside,
        f"file:{root}/one\0": outside,
        f"http://x/{root}": outside,
        "s3://bucket/one": outside,
        "hf:organisation/name": outside,
        "": outside,
        f"file:{root}/../outside": none,
        f"file:{root}/link": none,
        f"file:{root}": none,
        f"file:{root}/none": none,
        f"file:{root}/one/adapter_config.json": none,
        f"file:{root}/files": "symbolic link out of the folder",
        f"file:{root}/one#sha256={'0' * 64}": "sha256",
        f"file:{root}/one#md5=x": "md5",
        f"file:{root}/other": "c_attn",
        "hf:org/missing": "hub did not return",
        "hf:org/../name": "hub did not return",
    }
    for uri, words in bad.items():
        with pytest.raises(UserError, match=words):
            weights.resolve(f"tiny-random|{uri}", "anyone")
    with pytest.raises(UserError, match="another base"):
        weights.resolve(f"llama|file:{root}/one", "anyone")
    with pytest.raises(UserError, match="none"):
        Weights(world.base, world.catalog, no_path).resolve(f"tiny-random|file:{root}/one", "a")
    assert weights.resolve(f"tiny-random|file:{root}/one", "anyone").digest


def test_pages_are_the_whole_list_in_any_size(world):
    weights = Weights(world.base, world.catalog, no_path, also=("Other",))
    for n in range(5):
        world.catalog.create_policy(f"c/p{n}", Schema(world.base.fingerprint, CONFIG))
        if n != 2:  # this one has nothing to sample
            export(world.catalog, world.rng, world.base, f"c/p{n}", 1)
    weights.load("zed", "p0", "c")
    wanted = ["tiny-random", "Other", "zed", "p0", "p1", "p3", "p4"]
    for limit in (1, 3, 100):
        found, after, more = [], None, True
        while more:
            page = weights.page("c", after, limit)
            assert 0 < len(page.cards) <= limit
            found += page.cards
            after, more = page.cards[-1]["id"], page.more
        assert [card["id"] for card in found] == wanted
    assert [card["parent"] for card in found] == [None, None] + ["tiny-random"] * 5
    assert (found[2]["root"], found[3]["root"]) == ("p0", "c/p0@1")
    assert weights.card("zed", "c")["mint_revision"] == weights.resolve("p0", "c").digest
    with pytest.raises(UserError):
        weights.page("c", "no\x00name")


def test_routers_read_which_adapters_are_where(world, weights):
    def labels():
        return next(adapters(world.residency, weights.names_of)).samples[0].labels

    def loaded():
        families = adapters(world.residency, weights.names_of)
        samples = [sample for family in families for sample in family.samples][1:]
        return [(one.labels.get("adapter_name"), one.value) for one in samples]

    expected = {"running_lora_adapters": "", "waiting_lora_adapters": "", "max_lora": "3"}
    assert labels() == expected
    weights.load("mine", "chat@1", "default")
    waiting = world.residency.acquire(world.digests["chat@1"])
    assert labels() == expected | {"waiting_lora_adapters": "mine"}
    while not waiting.done():
        world.residency.wait_ready([waiting])
        world.residency.commit_ready()
    assert labels() == expected | {"running_lora_adapters": "mine"}
    assert loaded() == [("mine", 1), (None, 1), (None, 1)]
    waiting.result().release()
