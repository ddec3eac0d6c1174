"""Sampling by name: equal to direct loading, undisturbed by commits, honest about revisions, and nothing left when it fails."""

import threading

import numpy as np
import pytest

from mint_jax.errors import UserError
from mint_jax.lora import tree as lora_tree
from mint_jax.lora.tree import Slot
from mint_jax.models import transformer
from mint_jax.rollout import engine as engine_lib
from mint_jax.rollout.engine import DenseEngine, Request
from mint_jax.rollout.resident import NamedSampler
from tests.residency.residency_test import World
from tests.rollout.score_test import CONFIGS, random_adapters

pytestmark = pytest.mark.bits

NAMES = ("eight", None, "one", "eight", "tables", None)


@pytest.fixture
def world(rng, tiny_base):
    """One slot of rank 1 and one of rank 8: ``eight`` and ``tables`` want the same."""
    w = World(rng, tiny_base("llama"), capacities={1: 1, 8: 1}, targets=(lora_tree.ALL_LINEAR, "embed", "unembed"), piece_bytes=4000)
    w.adapters = random_adapters(rng, w.base.cfg)
    w.digests = {name: w.storage.add(adapter, config, w.base.fingerprint) for name, (config, adapter) in w.adapters.items()}
    yield w
    w.storage.gate.set()
    w.residency.close()


@pytest.fixture
def prompts(rng):
    return [tuple(rng.integers(0, 97, n).tolist()) for n in (4, 16, 8, 1, 11, 8)]


def idle(w) -> bool:
    return all(s["leases"] == s["filling"] == 0 for s in w.residency.state()["slots"].values())


def test_tokens_equal_direct_loading_and_each_completion_names_its_revision(world, prompts):
    requests = [Request(p, temperature=0, max_tokens=24, n=2) for p in prompts]
    sampler = NamedSampler(DenseEngine(world.base), world.residency, world.digests.__getitem__, commit_bytes=4000)
    mine = sampler.generate(requests, NAMES)
    stacks, slots = lora_tree.stack_adapters(transformer.abstract(world.base.cfg), world.adapters)
    placed = [Request(p, slots.get(name), temperature=0, max_tokens=24, n=2) for p, name in zip(prompts, NAMES)]
    for name, xs, ys in zip(NAMES, mine, DenseEngine(world.base).generate(placed, stacks), strict=True):
        for x, y in zip(xs, ys, strict=True):
            assert x.tokens == y.tokens
            np.testing.assert_allclose(x.logprobs, y.logprobs, atol=1e-5)  # batches of other rows: sums differ in the last bits
            assert x.revision == (None if name is None else world.digests[name])
            assert y.revision is None, "nobody said what is in the slot"
    assert sorted(world.storage.reads) == sorted(world.digests.values()), "one load each"
    assert idle(world)


def test_a_commit_between_steps_changes_no_bit_of_the_rows_that_run(world, prompts, monkeypatch):
    monkeypatch.setattr(engine_lib, "CHECK_EVERY", 3)
    [lease] = world.residency.wait_for([world.digests["eight"]])
    requests = [Request(p, a, temperature=1.0, seed=7, max_tokens=24) for p, a in zip(prompts, [lease.slot, None] * 3)]
    engine = DenseEngine(world.base)
    alone = engine.generate(requests, world.residency.stacks)
    committed = []

    def other_loads():
        """Writes the only slot of rank 1 again and again, with another adapter each time."""
        [other] = world.residency.wait_for([world.new(rank=1, targets=CONFIGS["one"].targets)])
        assert world.holds(other)
        committed.append(other.digest)
        other.release()

    assert engine.generate(requests, world.residency.stacks, between_steps=other_loads) == alone
    assert len(set(committed)) >= 24 // 3
    assert engine.generate(requests, world.residency.stacks, between_steps=lambda: None) == alone
    assert world.holds(lease)


def test_resident_rows_do_not_wait_for_a_cold_load(world, prompts, monkeypatch):
    monkeypatch.setattr(engine_lib, "CHECK_EVERY", 3)
    world.residency.wait_for([world.digests["one"]])[0].release()
    world.storage.gate.clear()
    engine, batches = DenseEngine(world.base), []
    generate = engine.generate

    def watched(requests, *args, **kwargs):
        batches.append([r.revision for r in requests])
        out = generate(requests, *args, **kwargs)
        world.storage.gate.set()  # the cold one may come only now
        return out

    monkeypatch.setattr(engine, "generate", watched)
    names = ["eight", "one", None]
    found = NamedSampler(engine, world.residency, world.digests.get).generate([Request(p, max_tokens=8) for p in prompts[:3]], names)
    assert batches == [[world.digests["one"], None], [world.digests["eight"]]]
    assert [c.revision for [c] in found] == [world.digests.get(name) for name in names]


def test_a_name_is_resolved_once_and_an_alias_that_moves_meanwhile_changes_nothing(world, prompts):
    meant = iter(["one", "eight"])
    sampler = NamedSampler(DenseEngine(world.base), world.residency, lambda alias: world.digests[next(meant)])
    found = sampler.generate([Request(p, max_tokens=8) for p in prompts[:3]], ["serving"] * 3)
    assert {c.revision for [c] in found} == {world.digests["one"]}
    [[c]] = sampler.generate([Request(prompts[0], max_tokens=8)], ["serving"])
    assert c.revision == world.digests["eight"]


@pytest.mark.parametrize("kind", ["unknown", "corrupt", "refused", "engine"])
def test_a_failure_is_told_and_leaves_no_lease(world, prompts, kind, monkeypatch):
    engine, names = DenseEngine(world.base), ["one", "eight", None]
    requests = [Request(p, max_tokens=8) for p in prompts[:3]]
    digests, expected = dict(world.digests), {"unknown": "no revision 0000", "corrupt": "is corrupt"}.get(kind, "max_tokens is 0")
    if kind == "unknown":
        digests["eight"] = "0" * 64
    elif kind == "corrupt":
        world.storage.objects[digests["eight"]] = world.storage.objects[digests["eight"]][:-1] + b"?"
    elif kind == "refused":
        requests[1] = Request(prompts[1], max_tokens=0)
    else:
        monkeypatch.setattr(engine, "generate", lambda *_, **__: (_ for _ in ()).throw(UserError("max_tokens is 0")))
    with pytest.raises(UserError, match=expected):
        NamedSampler(engine, world.residency, digests.get).generate(requests, names)
    assert kind != "refused" or not world.storage.reads, "checked before anything is loaded"
    for _ in range(60_000):
        world.residency.commit_ready()
        if idle(world) and not world.residency.state()["loads"]["unfinished"]:
            break
        threading.Event().wait(0.001)
    assert idle(world)


def test_the_slot_of_a_request_is_the_samplers_to_choose(world, prompts):
    request = Request(prompts[0], Slot(64, 9), max_tokens=8, revision="f" * 64)
    [[c]] = NamedSampler(DenseEngine(world.base), world.residency).generate([request], [world.digests["one"]])
    assert c.revision == world.digests["one"]


def test_several_processes_are_refused(world, monkeypatch):
    monkeypatch.setattr("mint_jax.multihost.count", lambda: 2)
    with pytest.raises(UserError, match="one process, here are 2"):
        NamedSampler(DenseEngine(world.base), world.residency)
