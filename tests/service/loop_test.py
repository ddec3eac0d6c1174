"""Sampling and training in one thread: neither changes what the other gives, and no tenant waits
for another who floods.
"""

import contextlib
import itertools
import threading

import numpy as np
import pytest

from mint_jax.errors import UserError
from mint_jax.rollout.engine import Engine
from mint_jax.rollout.request import Request
from mint_jax.service.durable import Durable
from mint_jax.service.server_db import ServerDatabase
from mint_jax.service.training_calls import ForwardBackward, Optim
from mint_jax.train.state import OptimizerConfig
from mint_jax.train.trainer import Trainer
from tests.rollout.serving_test import contended
from tests.service.conftest import result_of
from tests.train.live_test import CONFIGS, SHAPES, coefs, random_data, random_state


@pytest.fixture
def world(rng, tiny_base):
    with contended(rng, tiny_base("llama")) as w:
        yield w


class Loop:
    """An engine and training over one base."""

    def __init__(self, world, database, folder, **options):
        self.world, self.engine = world, Engine(world.base, rows=(8,), steps=2)
        live = Trainer(world.base, slots={8: 2}, shapes=SHAPES)
        self.training = Durable(folder, live, database, wake=self.engine.wake, **options)

    def running(self):
        parts = {"residency": self.world.residency, "coscheduled": self.training}
        return self.engine.serving(commit_bytes=4000, **parts)


@pytest.fixture
def loop_of(world, tmp_path):
    with contextlib.ExitStack() as opened:
        database = opened.enter_context(ServerDatabase(tmp_path / "server.db"))

        def make(**options):
            loop = Loop(world, database, tmp_path, **options)
            opened.callback(loop.training.close)
            return loop

        yield make


def update(rng, rate=None):
    loss = coefs("cross_entropy")
    found = [ForwardBackward(random_data(rng, "cross_entropy"), loss) for _ in range(2)]
    return found if rate is None else [*found, Optim(OptimizerConfig(rate, max_grad_norm=0.0))]


def prompts(rng, count):
    return [tuple(rng.integers(3, 97, int(rng.integers(2, 40))).tolist()) for _ in range(count)]


@pytest.mark.long
@pytest.mark.bits
def test_a_revision_is_sampled_with_the_same_bits_while_policies_train(rng, world, loop_of):
    """Revisions of one slot each come and go, two policies train, one of which diverges; then the
    same alone.
    """
    loop = loop_of(gap_s=1e-6)
    names = [*world.digests, None] * 3
    options = {"temperature": 1.0, "max_tokens": 24}
    requests = [
        Request(p, revision=name and world.digests[name], seed=i, tenant=f"t{i % 3}", **options)
        for i, (p, name) in enumerate(zip(prompts(rng, len(names)), names))
    ]
    states = {name: random_state(rng, world.base, CONFIGS[name]) for name in "ab"}
    ended, sampled = threading.Event(), []

    def train(name):
        numbers, rate = itertools.count(1), 1e30 if name == "b" else 1e-3
        while not ended.is_set():
            calls = update(np.random.default_rng(len(sampled)), rate)
            ids = [loop.training.submit(name, next(numbers), call).result() for call in calls]
            assert None not in [result_of(loop.training, id, 600) for id in ids]
            sampled.append(name)

    with loop.running():
        for name, state in states.items():
            join = loop.training.do(name, lambda live, n=name, s=state: live.join(n, s), name)
            join.result(600)
        threads = [threading.Thread(target=train, args=(name,)) for name in states]
        for thread in threads:
            thread.start()
        beside = loop.engine.generate(requests)
        ended.set()
        for thread in threads:
            thread.join()
    assert {"a", "b"} <= set(sampled)
    assert loop.training.gaps, "slices between dispatches of rows"
    assert loop.training.live.counts["steps"] >= 4
    engine = Engine(world.base, rows=(8,), steps=2)
    with engine.serving(residency=world.residency):
        alone = engine.generate(requests)
    for xs, ys in zip(beside, alone, strict=True):
        for x, y in zip(xs, ys, strict=True):
            for name in ("tokens", "logprobs", "drawn_logprobs", "revision"):
                assert getattr(x, name) == getattr(y, name)
    assert sum(loop.training.counters.seconds.values()) > 0
    assert {"a", "b", "t0", "t1", "t2"} <= set(loop.training.counters.seconds)


def test_slices_are_small_while_rows_decode(rng, world, loop_of, monkeypatch):
    loop, bounds, ids = loop_of(gap_s=0.25, idle_gap_s=4.0), [], []
    loop.training.live.join("a", random_state(rng, world.base, CONFIGS["a"]))
    step = loop.training.live.step

    def logged(works, bound):
        bounds.append((bound, bool(loop.engine.active.schedule.running)))
        return step(works, bound)

    monkeypatch.setattr(loop.training.live, "step", logged)
    with loop.running():
        stream = loop.engine.submit(Request((1, 2, 3), max_tokens=64, temperature=1.0, stop_ids=()))
        for call in update(rng):
            ids.append(loop.training.submit("a", len(ids) + 1, call).result())
        assert None not in [result_of(loop.training, id, 600) for id in ids]
        stream.result(600)
        last = loop.training.submit("a", len(ids) + 1, update(rng)[0]).result()
        assert result_of(loop.training, last, 600) is not None
    assert all(bound == (0.25 if decoding else 4.0) for bound, decoding in bounds)
    assert bounds[-1] == (4.0, False)


def test_a_tenant_is_sampled_for_beside_one_who_floods(rng, loop_of):
    """200 requests of one tenant wait when five of another come: these are among the first to
    end.
    """
    loop, order, released = loop_of(), [], threading.Event()
    with loop.running():
        # all are there before the first is looked at
        loop.training.do("", lambda live: released.wait(60))
        tenants = ["flood"] * 200 + ["small"] * 5
        streams = []
        for i, (tenant, p) in enumerate(zip(tenants, prompts(rng, len(tenants)))):
            request = Request(p, temperature=1.0, seed=i, max_tokens=8, stop_ids=(), tenant=tenant)
            streams.append(loop.engine.submit(request))
            streams[-1].when_done(lambda _, t=tenant: order.append(t))
        released.set()
        for stream in streams:
            stream.result(120)
    # The eight rows may have been the other's once, and those that followed them: never more.
    assert max(i for i, tenant in enumerate(order) if tenant == "small") < 24, order


def test_a_failure_of_training_ends_samples_too(rng, loop_of, monkeypatch):
    loop = loop_of()
    loop.training.live.join("a", random_state(rng, loop.engine.base, CONFIGS["a"]))

    def broken(*args):
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(loop.training.live, "step", broken)
    released = threading.Event()
    with loop.running():
        # both are there before either is looked at
        loop.training.do("", lambda live: released.wait(60))
        stream = loop.engine.submit(Request((1, 2, 3), max_tokens=200, stop_ids=()))
        id = loop.training.submit("a", 1, update(rng)[0]).result()
        released.set()
        with pytest.raises(RuntimeError, match="the device is lost"):
            stream.result(600)
        assert result_of(loop.training, id) is None, "a restart runs it"
        assert str(loop.training.failed) == "the device is lost"
        with pytest.raises(UserError, match="the engine is stopping"):
            loop.engine.submit(Request((1, 2, 3)))
