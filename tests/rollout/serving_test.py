"""Serving while revisions come: equal to direct loading, undisturbed by commits, honest about
revisions, and nothing left when it fails.
"""

import contextlib
import dataclasses
import time

import pytest

from mint_jax.errors import UserError
from mint_jax.lora import tree as lora_tree
from mint_jax.models import transformer
from mint_jax.rollout.engine import Engine
from mint_jax.rollout.request import Request
from tests.residency.residency_test import World
from tests.rollout.invariants import check_schedule, is_idle, pieces
from tests.rollout.score_test import CONFIGS, random_adapters

pytestmark = pytest.mark.bits

NAMES = ("eight", None, "one", "eight", "tables", None)


@contextlib.contextmanager
def contended(rng, base):
    """One slot of rank 1 and one of rank 8: ``eight`` and ``tables`` want the same."""
    targets = (lora_tree.ALL_LINEAR, "embed", "unembed")
    w = World(rng, base, capacities={1: 1, 8: 1}, targets=targets, piece_bytes=4000)
    w.adapters = random_adapters(rng, w.base.cfg)
    w.digests = {
        name: w.storage.add(adapter, config, w.base.fingerprint)
        for name, (config, adapter) in w.adapters.items()
    }
    yield w
    w.storage.gate.set()
    w.residency.close()


@pytest.fixture
def world(rng, tiny_base):
    with contended(rng, tiny_base("llama")) as w:
        yield w


@pytest.fixture
def prompts(rng):
    return [tuple(rng.integers(0, 97, n).tolist()) for n in (4, 16, 8, 1, 11, 8)]


def idle(w) -> bool:
    return all(s["leases"] == s["filling"] == 0 for s in w.residency.state()["slots"].values())


def asked(world, prompts, names, **fields):
    return [
        Request(p, revision=name and world.digests[name], **fields)
        for p, name in zip(prompts, names)
    ]


def engine_of(world, **settings) -> Engine:
    return Engine(world.base, rows=(8,), **settings)


def test_tokens_equal_direct_loading_and_each_completion_names_its_revision(world, prompts):
    engine = engine_of(world)
    with engine.serving(residency=world.residency, commit_bytes=4000):
        mine = engine.generate(asked(world, prompts, NAMES, temperature=0, max_tokens=24, n=2))
    stacks, slots = lora_tree.stack_adapters(transformer.abstract(world.base.cfg), world.adapters)
    placed = [
        Request(p, slots.get(name), temperature=0, max_tokens=24, n=2)
        for p, name in zip(prompts, NAMES)
    ]
    for name, xs, ys in zip(NAMES, mine, engine_of(world).generate(placed, stacks), strict=True):
        for x, y in zip(xs, ys, strict=True):
            revision = None if name is None else world.digests[name]
            assert x == dataclasses.replace(y, revision=revision)
            assert y.revision is None, "nobody said what is in the slot"
    # one load each, though two want one slot
    assert sorted(world.storage.reads) == sorted(world.digests.values())
    assert idle(world)


def test_a_commit_between_steps_changes_no_bit_of_the_rows_that_run(world, prompts, monkeypatch):
    [lease] = world.residency.wait_for([world.digests["eight"]])
    requests = [
        Request(p, a, temperature=1.0, seed=7, max_tokens=24)
        for p, a in zip(prompts, [lease.slot, None] * 3)
    ]
    engine = engine_of(world, steps=3)
    alone = engine.generate(requests, world.residency.stacks)
    committed = []

    def other_loads():
        """Writes the only slot of rank 1 again and again, with another adapter each time."""
        [other] = world.residency.wait_for([world.new(rank=1, targets=CONFIGS["one"].targets)])
        assert world.holds(other)
        committed.append(other.digest)
        other.release()

    turn = engine.active.turn
    monkeypatch.setattr(engine.active, "turn", lambda: (other_loads(), turn())[1])
    assert engine.generate(requests, world.residency.stacks) == alone
    assert len(set(committed)) >= 24 // 3
    assert world.holds(lease)


def test_resident_rows_do_not_wait_for_a_cold_load(world, prompts):
    world.residency.wait_for([world.digests["one"]])[0].release()
    world.storage.gate.clear()
    engine = engine_of(world)
    with engine.serving(residency=world.residency):
        cold, warm, bare = (
            engine.submit(r) for r in asked(world, prompts, ("eight", "one", None), max_tokens=8)
        )
        assert [len(c.tokens) for stream in (warm, bare) for c in stream.result(60)] == [8, 8]
        assert not cold.done
        world.storage.gate.set()
        assert [c.revision for c in cold.result(60)] == [world.digests["eight"]]


@pytest.mark.parametrize("how", ["cancel", "while its adapter is loading"])
def test_what_is_cancelled_ends_at_the_next_turn_and_its_pages_are_free(world, prompts, how):
    engine = engine_of(world, steps=1)
    with engine.serving(residency=world.residency):
        if how == "while its adapter is loading":
            world.storage.gate.clear()
        [request] = asked(world, prompts[:1], ("eight",), max_tokens=200, n=2)
        stream = engine.submit(request)
        if how == "cancel":
            next(pieces(stream))
        stream.cancel()
        found = stream.result(60)
        assert {c.finish for c in found} == {"cancelled"}
        assert all(len(c.tokens) == len(c.logprobs) < 200 for c in found)
        world.storage.gate.set()
        [[other]] = engine.generate(asked(world, prompts[1:2], (None,), max_tokens=4))
        assert len(other.tokens) == 4, "others go on"
    check_schedule(engine.active.schedule)
    assert is_idle(engine.active.schedule)
    settle(world)


def settle(world):
    for _ in range(60_000):
        world.residency.commit_ready()
        if idle(world) and not world.residency.state()["loads"]["unfinished"]:
            return
        time.sleep(0.001)
    raise AssertionError("a lease or a load is left")


@pytest.mark.parametrize("kind", ["unknown", "corrupt", "refused"])
def test_a_failure_is_reported_and_leaves_no_lease(world, prompts, kind):
    engine = engine_of(world)
    requests = asked(world, prompts[:3], ("one", "eight", None), max_tokens=8)
    expected = {"unknown": "no revision 0000", "corrupt": "is corrupt"}.get(kind, "max_tokens is 0")
    if kind == "unknown":
        requests[1] = Request(prompts[1], revision="0" * 64, max_tokens=8)
    elif kind == "corrupt":
        digest = world.digests["eight"]
        world.storage.objects[digest] = world.storage.objects[digest][:-1] + b"?"
    else:
        requests[1] = Request(prompts[1], revision=world.digests["eight"], max_tokens=0)
    with engine.serving(residency=world.residency):
        with pytest.raises(UserError, match=expected):
            engine.generate(requests)
        assert kind != "refused" or not world.storage.reads, "checked before anything is loaded"
        [[c]] = engine.generate(asked(world, prompts[:1], ("one",), max_tokens=8))
        assert c.revision == world.digests["one"], "the next request is served"
    settle(world)


def test_an_engine_that_stops_says_so_to_those_who_wait(world, prompts):
    engine = engine_of(world)
    world.storage.gate.clear()
    with engine.serving(residency=world.residency):
        stream = engine.submit(asked(world, prompts[:1], ("eight",), max_tokens=8)[0])
    with pytest.raises(UserError, match="stopped before this request ended"):
        stream.result(60)
    with pytest.raises(UserError, match="does not serve"):
        engine.submit(Request(prompts[0]))
    world.storage.gate.set()
    settle(world)


def test_a_failure_of_the_loop_reaches_everybody(world, prompts, monkeypatch):
    engine = engine_of(world)

    def fail(*_):
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(engine.active, "_decode", fail)
    with engine.serving(residency=world.residency):
        stream = engine.submit(Request(prompts[0], max_tokens=8))
        with pytest.raises(RuntimeError, match="the device is lost"):
            stream.result(60)
        with pytest.raises(UserError, match="is stopping"):
            engine.submit(Request(prompts[0], max_tokens=8))
