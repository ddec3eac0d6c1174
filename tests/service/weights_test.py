"""Names of models: what they stand for, for whom, for how long; and folders that are read only
where that is allowed.
"""

import os

import numpy as np
import pytest

from mint_jax.catalog.packed import Schema, digest_of, pack, unpack
from mint_jax.errors import UserError
from mint_jax.lora.peft import write_peft
from mint_jax.models.outline import peft_tables
from mint_jax.service.monitoring import adapters
from mint_jax.service.weights import Model, NotFound, Taken, Weights
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
        return adapters(world.residency, weights.names_of).samples[0].labels

    expected = {"running_lora_adapters": "", "waiting_lora_adapters": "", "max_lora": "3"}
    assert labels() == expected
    weights.load("mine", "chat@1", "default")
    waiting = world.residency.acquire(world.digests["chat@1"])
    assert labels() == expected | {"waiting_lora_adapters": "mine"}
    while not waiting.done():
        world.residency.wait_ready([waiting])
        world.residency.commit_ready()
    assert labels() == expected | {"running_lora_adapters": "mine"}
    waiting.result().release()
