"""Laws 5, 6 and 9: a revision is its bytes, is there whole or not at all, never changes, and is
refused where it does not fit.
"""

import dataclasses
from pathlib import Path

import chex
import jax
import numpy as np
import pytest

from mint_jax.catalog.lifecycle import Catalog
from mint_jax.catalog.packed import Schema, digest_of, pack, unpack
from mint_jax.errors import UserError
from mint_jax.harness.adapters import JobCatalog, read_adapter
from mint_jax.lora import tree as lora_tree
from mint_jax.lora.tree import AdapterConfig
from mint_jax.rollout.engine import Engine
from mint_jax.rollout.request import Request
from mint_jax.train.state import OptimizerConfig
from mint_jax.train.trainer import LossConfig, PolicyConfig, Trainer
from tests.adapters import random_adapter
from tests.groups import random_groups

pytestmark = pytest.mark.bits

CONFIG = AdapterConfig(3)


@pytest.fixture
def catalog(tmp_path):
    with Catalog.open(tmp_path / "catalog") as opened:
        yield opened


def files(catalog) -> dict[str, tuple]:
    """Inode and time of every payload file."""
    found = {str(path): path.stat() for path in Path(catalog.store.url).rglob("*.pack")}
    return {path: (f.st_ino, f.st_mtime_ns, f.st_size) for path, f in found.items()}


def test_digest_covers_payload_schema_and_base(tiny_base, rng, catalog):
    adapter = random_adapter(rng, tiny_base("llama"), CONFIG)
    schema = Schema("base one", CONFIG)
    data = pack(adapter, schema)
    made = catalog.export("p", data, 1, create=True)
    assert made.digest == digest_of(data) == digest_of(catalog.load("p"))
    before = files(catalog)
    assert len(before) == 1
    # neither memory layout nor who holds the array matters
    backwards = jax.tree.map(np.asfortranarray, adapter)
    other = pack(backwards, Schema("base one", AdapterConfig(3)))
    again = catalog.export("other", other, 7, create=True)
    assert again.digest == made.digest
    assert files(catalog) == before, "the same bytes are not written again"
    one_bit = jax.tree.map(np.array, adapter)
    one_bit["dense"]["attn"]["q"]["a"].view(np.int32)[0, 0, 0] ^= 1
    schemas = [Schema("base two", CONFIG)]
    for change in ({"alpha": 17.0}, {"rslora": True}):
        schemas.append(Schema("base one", dataclasses.replace(CONFIG, **change)))
    others = [pack(one_bit, schema), *(pack(adapter, one) for one in schemas)]
    revisions = [catalog.export(f"p{i}", x, 1, create=True) for i, x in enumerate(others)]
    assert len({made.digest, *(one.digest for one in revisions)}) == 5
    loaded, found = unpack(catalog.load(made.digest))
    chex.assert_trees_all_equal(loaded, adapter)
    assert found == schema


@pytest.mark.long
def test_a_revision_samples_the_same_tokens_while_its_policy_trains_on(tiny_base, rng, catalog):
    base = tiny_base("llama")
    how = OptimizerConfig(learning_rate=0.1), LossConfig("importance_sampling")
    policies = [PolicyConfig(name, CONFIG, *how, seed) for seed, name in enumerate("ab")]
    trainer = Trainer(base, [*policies, PolicyConfig("c", AdapterConfig(1))])
    trainer.load_adapter("a", random_adapter(rng, base, CONFIG))
    engine = Engine(base)
    prompt = tuple(rng.integers(3, base.cfg.vocab_size, 7).tolist())

    def sample(slot, stacks):
        requests = [
            Request(prompt, slot, n=2, max_tokens=12, seed=5),
            Request(prompt[:4], slot, n=2, max_tokens=8, temperature=0.0),
        ]
        return engine.generate(requests, stacks)

    def load(digest):
        adapter, schema = unpack(catalog.load(digest))
        bound = lora_tree.check_fits(adapter, schema.config, trainer.specs, digest)
        assert bound == 7 * base.cfg.num_layers
        stacks, slots = lora_tree.stack_adapters(trainer.specs, {"r": (schema.config, adapter)})
        return slots["r"], stacks

    def export(step):
        data = pack(trainer.adapter("a"), Schema(base.fingerprint, CONFIG))
        return catalog.export("a", data, step, create=not step).digest

    digest = export(0)
    resident = load(digest)
    first = sample(*resident)
    own = sample(trainer.slots["a"], trainer.stacks)
    assert first == own, "by file as by the trainer's own slot"
    for _ in range(2):
        trainer.update({name: random_groups(rng, base.cfg.vocab_size) for name in "abc"})
        trainer.forward_backward({"a": random_groups(rng, base.cfg.vocab_size)})
        training = jax.tree.map(np.array, trainer.state)
        assert sample(*resident) == first
        assert sample(*load(digest)) == first
        chex.assert_trees_all_equal(trainer.state, training)
    assert sample(trainer.slots["a"], trainer.stacks) != first, "the policy did not move"
    export(2)
    assert catalog.resolve("a").digest != digest == catalog.resolve("a@1").digest


def test_a_snapshot_is_not_touched_by_later_updates(tiny_base, rng):
    """Also where it is a whole stack: one slot, a rank that fills its bucket."""
    base = tiny_base("llama")
    how = OptimizerConfig(learning_rate=0.1), LossConfig("importance_sampling")
    trainer = Trainer(base, [PolicyConfig("a", AdapterConfig(4), *how)])
    before, taken = trainer.adapter("a"), trainer.snapshot("a")
    for _ in range(2):
        trainer.update({"a": random_groups(rng, base.cfg.vocab_size)})
    chex.assert_trees_all_equal(jax.device_get(taken), before)
    pairs = zip(jax.tree.leaves(trainer.adapter("a")), jax.tree.leaves(before))
    assert any(np.any(x != y) for x, y in pairs)


def test_an_adapter_that_does_not_fit_is_refused_with_the_reason(tiny_base, rng, tmp_path):
    """The reasons one by one are in ``lora/tree_test.py``."""
    base, config = tiny_base("llama"), AdapterConfig(3, targets=("q", "down"))
    adapter = random_adapter(rng, base, config)
    adapter["dense"]["attn"]["q"]["a"] = adapter["dense"]["attn"]["q"]["a"][:, :2]
    jobs = JobCatalog(tmp_path, create=True)
    jobs.main.export("p", pack(adapter, Schema(base.fingerprint, config)), 1, create=True)
    reason = r"attn/q/a has shape \(3, 2, 48\); this base and rank 3 need \(3, 3, 48\)"
    with pytest.raises(UserError, match=reason):
        read_adapter("p@1", base, jobs)


def test_an_adapter_of_another_base_is_refused(tiny_base, rng, tmp_path):
    mine, other = tiny_base("llama"), tiny_base("llama_tied")
    adapter = random_adapter(rng, mine, CONFIG)
    jobs = JobCatalog(tmp_path, create=True)
    made = jobs.main.export("p", pack(adapter, Schema(mine.fingerprint, CONFIG)), 1, create=True)
    for name in ("p@1", "p@latest", "default/p@1", made.digest, made.digest[:10], "p"):
        loaded = read_adapter(name, mine, jobs)
        chex.assert_trees_all_equal(loaded.adapter, adapter)
        assert (loaded.digest, str(loaded.revision)) == (made.digest, "p@1")
    says = f"was trained on base {mine.fingerprint[:12]}, this is {other.fingerprint[:12]}"
    with pytest.raises(UserError, match=says):
        read_adapter(made.digest, other, jobs)  # every shape would fit
