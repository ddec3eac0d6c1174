"""Laws 5, 6 and 9: a revision is its bytes, is there whole or not at all, never changes, and is refused where it does not fit."""

import dataclasses
import os
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from blake3 import blake3

from mint_jax.catalog.revisions import FILE, RevisionStore, Schema, pack
from mint_jax.errors import UserError
from mint_jax.jobs.adapters import read_adapter
from mint_jax.lora import tree as lora_tree
from mint_jax.lora.tree import AdapterConfig
from mint_jax.models import transformer
from mint_jax.rollout.engine import DenseEngine, Request
from mint_jax.train.batch import Group, Sequence
from mint_jax.train.state import OptimizerConfig
from mint_jax.train.trainer import LossConfig, PolicyConfig, Trainer

CONFIG = AdapterConfig(3)


def random_adapter(base, config, rng):
    specs = lora_tree.adapter_specs(transformer.abstract(base.cfg), config)
    return jax.tree.map(lambda s: rng.normal(size=s.shape).astype(np.float32), specs)


def random_groups(rng, vocab, lengths=(6, 4)):
    def sequence(n):
        return Sequence(rng.integers(3, vocab, n).tolist(), [0.1] * n, rng.normal(size=n).tolist(), (-rng.exponential(size=n)).tolist())

    return [Group(rng.integers(3, vocab, 4).tolist(), [sequence(n) for n in lengths]) for _ in range(2)]


def test_digest_covers_payload_schema_and_base(tiny_base, rng, tmp_path):
    adapter = random_adapter(tiny_base("llama"), CONFIG, rng)
    schema = Schema("base one", CONFIG)
    store = RevisionStore(tmp_path)
    digest = store.put(pack(adapter, schema))
    assert digest == blake3((tmp_path / digest / FILE).read_bytes()).hexdigest()
    before = (tmp_path / digest / FILE).stat()
    assert RevisionStore(tmp_path).put(pack(jax.tree.map(np.array, adapter), Schema("base one", AdapterConfig(3)))) == digest
    assert (tmp_path / digest / FILE).stat() == before, "the same bytes are not written again"
    one_bit = jax.tree.map(np.array, adapter)
    one_bit["dense"]["attn"]["q"]["a"].view(np.int32)[0, 0, 0] ^= 1
    others = [pack(one_bit, schema), pack(adapter, Schema("base two", CONFIG))]
    others += [pack(adapter, Schema("base one", dataclasses.replace(CONFIG, **change))) for change in ({"alpha": 17.0}, {"rslora": True})]
    assert len({digest, *map(store.put, others)}) == 5
    assert set(store) == {digest, *map(store.put, others)}
    loaded, found = store.get(digest)
    jax.tree.map(np.testing.assert_array_equal, loaded, adapter)
    assert found == schema


@pytest.mark.parametrize("damage", ["bit", "cut", "longer", "swapped"])
def test_loading_verifies_the_bytes(tiny_base, rng, tmp_path, damage):
    adapter = random_adapter(tiny_base("llama"), CONFIG, rng)
    store = RevisionStore(tmp_path)
    digest = store.put(pack(adapter, Schema("base", CONFIG)))
    other = store.put(pack(jax.tree.map(np.negative, adapter), Schema("base", CONFIG)))
    path = tmp_path / digest / FILE
    data = bytearray(path.read_bytes())
    at = int(rng.integers(len(data)))
    data[at] ^= 1 << int(rng.integers(8))
    path.write_bytes(
        {"bit": data, "cut": data[:at], "longer": path.read_bytes() + b"\0", "swapped": (tmp_path / other / FILE).read_bytes()}[damage]
    )
    with pytest.raises(UserError, match=rf"{digest[:12]} .* is corrupt"):
        store.get(digest)


def test_a_revision_samples_the_same_tokens_while_its_policy_trains_on(tiny_base, rng, tmp_path):
    base = tiny_base("llama")
    usual = PolicyConfig("a", CONFIG, OptimizerConfig(learning_rate=0.1), LossConfig("importance_sampling"))
    trainer = Trainer(base, [usual, dataclasses.replace(usual, name="b", seed=1), PolicyConfig("c", AdapterConfig(1))])
    trainer.load_adapter("a", random_adapter(base, CONFIG, rng))
    store, engine = RevisionStore(tmp_path), DenseEngine(base)
    prompt = tuple(rng.integers(3, base.cfg.vocab_size, 7).tolist())

    def sample(slot, stacks):
        requests = [Request(prompt, slot, n=2, max_tokens=12, seed=5), Request(prompt[:4], slot, n=2, max_tokens=8, temperature=0.0)]
        return engine.generate(requests, stacks)

    def load(digest):
        adapter, schema = store.get(digest)
        assert lora_tree.check_fits(adapter, schema.config, trainer.specs, digest) == 7 * base.cfg.num_layers
        stacks, slots = lora_tree.stack_adapters(trainer.specs, {"r": (schema.config, adapter)})
        return slots["r"], stacks

    digest = store.put(pack(trainer.adapter("a"), Schema(base.fingerprint, CONFIG)))
    resident = load(digest)
    first = sample(*resident)
    assert first == sample(trainer.slots["a"], trainer.stacks), "by file as by the trainer's own slot"
    for _ in range(2):
        trainer.update({name: random_groups(rng, base.cfg.vocab_size) for name in "abc"})
        trainer.forward_backward({"a": random_groups(rng, base.cfg.vocab_size)})
        training = jax.tree.map(np.array, trainer.state)
        assert sample(*resident) == first
        assert sample(*load(digest)) == first
        jax.tree.map(np.testing.assert_array_equal, trainer.state, training)
    assert sample(trainer.slots["a"], trainer.stacks) != first, "the policy did not move"
    assert store.put(pack(trainer.adapter("a"), Schema(base.fingerprint, CONFIG))) != digest


WRITER = """
import sys
import numpy as np
from mint_jax.catalog.revisions import RevisionStore, Schema, pack
from mint_jax.lora.tree import AdapterConfig
store = RevisionStore(sys.argv[1])
for i in range(int(sys.argv[2]), 10**6):
    adapter = {"dense": {"q": {"a": np.full((1, 1, 50_000), i, np.float32)}}}
    print(i, store.put(pack(adapter, Schema("base", AdapterConfig(1)))), flush=True)
"""


def test_killed_at_any_moment_every_acknowledged_revision_loads(rng, tmp_path):
    acknowledged: dict[int, str] = {}
    for _ in range(5):
        first = len(acknowledged)
        command = [sys.executable, "-c", WRITER, str(tmp_path), str(first)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            lines = [writer.stdout.readline() for _ in range(rng.integers(1, 6))]
            time.sleep(rng.uniform(0, 0.05))  # anywhere in the writing of one of the next revisions
            writer.send_signal(signal.SIGKILL)
            lines += [line for line in writer.stdout if line.endswith("\n")]
        for i, digest in (line.split() for line in lines):
            acknowledged[int(i)] = digest
        store = RevisionStore(tmp_path)
        for i, digest in acknowledged.items():
            adapter, _ = store.get(digest)
            assert (adapter["dense"]["q"]["a"] == i).all()
        visible = list(store)
        assert set(visible) >= set(acknowledged.values())
        assert len(visible) <= len(acknowledged) + 5, "at most the one that was renamed but not yet acknowledged, per kill"
        for digest in visible:
            store.get(digest)


def test_what_a_killed_writer_left_is_swept(tmp_path, rng):
    store = RevisionStore(tmp_path)
    kept = store.put(pack({"q": rng.normal(size=3)}, Schema("base", AdapterConfig(1))))
    leftover = tmp_path / f"{'ab' * 32}.orbax-checkpoint-tmp"  # as SIGKILL leaves it
    leftover.mkdir()
    (leftover / FILE).write_bytes(b"half")
    long_ago = time.time() - 7 * 24 * 3600  # no writer is still at it
    os.utime(leftover, (long_ago, long_ago))
    reopened = RevisionStore(tmp_path)
    assert list(reopened) == [kept]
    reopened.put(pack({"q": rng.normal(size=3)}, Schema("base", AdapterConfig(1))))
    assert not leftover.exists()
    assert set(reopened) > {kept}


GOOD = {"rank": 3, "targets": ("q", "down")}


def spoil(adapter, how):
    q = adapter["dense"]["attn"]["q"]
    if how == "rank":
        q["a"] = q["a"][:, :2]
    elif how == "width":
        q["b"] = q["b"][..., :-1]
    elif how == "layers":
        q["a"] = q["a"][:-1]
    elif how == "transposed":
        q["a"] = q["a"].swapaxes(1, 2)
    elif how == "lacking":
        del adapter["dense"]["mlp"]
    elif how == "half":
        del q["b"]
    elif how == "strange":
        adapter["dense"]["attn"]["k"] = q
    elif how == "empty":
        adapter.clear()
    else:
        q["b"][0, 0, 0] = {"nan": np.nan, "infinite": np.inf}[how]
    return adapter


REASONS = {
    "rank": r"attn/q/a has shape \(3, 2, 48\); this base and rank 3 need \(3, 3, 48\)",
    "width": r"attn/q/b has shape \(3, 3, 63\)",
    "layers": r"attn/q/a has shape \(2, 3, 48\)",
    "transposed": r"attn/q/a has shape \(3, 48, 3\)",
    "lacking": r"mlp/down/a is missing",
    "half": r"attn/q/b is missing",
    "strange": r"attn/k/a is not among the targets q, down",
    "empty": r"no module binds",
    "nan": r"attn/q/b has NaN or infinite",
    "infinite": r"attn/q/b has NaN or infinite",
}


@pytest.mark.parametrize("how", REASONS)
def test_an_adapter_that_does_not_fit_is_refused_with_the_reason(tiny_base, rng, tmp_path, how):
    base = tiny_base("llama")
    config = AdapterConfig(**GOOD)
    adapter = random_adapter(base, config, rng)
    assert lora_tree.check_fits(adapter, config, transformer.abstract(base.cfg), "it") == 2 * base.cfg.num_layers
    digest = RevisionStore(tmp_path).put(pack(spoil(adapter, how), Schema(base.fingerprint, config)))
    with pytest.raises(UserError, match=REASONS[how]):
        read_adapter(tmp_path / digest, base)


def test_an_adapter_of_another_base_is_refused(tiny_base, rng, tmp_path):
    mine, other = tiny_base("llama"), tiny_base("llama_tied")
    adapter = random_adapter(mine, CONFIG, rng)
    digest = RevisionStore(tmp_path).put(pack(adapter, Schema(mine.fingerprint, CONFIG)))
    jax.tree.map(np.testing.assert_array_equal, read_adapter(tmp_path / digest, mine)[0], adapter)
    with pytest.raises(UserError, match=f"was trained on base {mine.fingerprint[:12]}, this is {other.fingerprint[:12]}"):
        read_adapter(tmp_path / digest, other)  # every shape would fit


def test_a_target_the_base_lacks_is_refused(tiny_base):
    with pytest.raises(UserError, match="'router' is not a projection of this base"):
        lora_tree.check_fits(
            {"x": np.zeros(1)}, AdapterConfig(2, targets=("q", "router")), transformer.abstract(tiny_base("llama").cfg), "it"
        )
