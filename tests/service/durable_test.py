"""Training requests: order within a policy, shared steps, fair turns, and a server that ends at any
moment and continues.
"""

import contextlib
import threading
import time
import types
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mint_jax.errors import UserError
from mint_jax.lora.tree import AdapterConfig
from mint_jax.service.durable import Durable
from mint_jax.service.futures import Conflict
from mint_jax.service.server_db import ServerDatabase
from mint_jax.service.snapshots import Snapshot, path_of
from mint_jax.service.training_calls import Create, ForwardBackward, Optim
from mint_jax.train import blocks
from mint_jax.train.blocks import BlockShape, Datum
from mint_jax.train.losses import NO_LOSS
from mint_jax.train.state import OptimizerConfig
from mint_jax.train.trainer import Step, Trainer
from tests.service.conftest import result_of
from tests.train.live_test import (
    CONFIGS,
    SHAPES,
    coefs,
    random_data,
    random_optimizer,
    random_state,
)

DEADLINE_S = 120


class FakeTrainer:
    """Policies whose steps take data as ``cut`` does and log them; a token takes a millisecond."""

    declared = (BlockShape(1, 1, 16), BlockShape(2, 1, 16))
    base = types.SimpleNamespace(cfg=types.SimpleNamespace(context=64, vocab_size=97))

    def __init__(self, policies):
        self.policies, self.log = set(policies), []
        self.can_start, self.can_move, self.brought = lambda work: True, lambda: True, dict
        self.can_update = lambda name, config: True

    def __contains__(self, name):
        return name in self.policies

    def step(self, works, bound_s=None):
        shape = self.declared[0] if bound_s is not None and bound_s < 0.02 else self.declared[1]
        made = blocks.cut([w for w in works if w.backward == works[0].backward], shape)
        _, places = blocks.fill(made, shape)
        for place in places:
            mark = float(place.work.data[place.datum].weights[0])
            self.log.append(("forward_backward", place.work.policy, mark))
        blocks.collect(places, np.zeros((*shape[:3], 1)), {"loss": np.ones(shape.blocks)})
        return Step(shape, made, shape.size * 1e-3)

    def read_state(self, name):
        raise UserError("the checkpoint does not exist")

    def optim(self, updates):
        rates = {name: numbers.learning_rate for name, numbers in updates.items()}
        self.log += [("optim", name, rate) for name, rate in rates.items()]
        return {name: {"learning_rate": rate} for name, rate in rates.items()}


def datum(n, mark=1.0):
    return Datum(np.full(n, 5, np.int32), np.full(n, 5, np.int32), np.full(n, mark, np.float32))


class Served:
    """Durable training over a folder; ``run`` turns in a thread until ``end``, at any moment."""

    def __init__(self, live, folder, **options):
        self.live, self.stopped, self.woken = live, False, threading.Event()
        self.database = ServerDatabase(folder / "server.db")
        self.durable = Durable(folder, live, self.database, wake=self.woken.set, **options)
        self.thread = threading.Thread(target=self._run)
        self._sent = {}

    def run(self):
        self.thread.start()
        return self

    def _run(self):
        while not self.stopped:
            if not self.durable.slice(1e-9):
                self.woken.wait(0.01)
                self.woken.clear()

    def end(self):
        if not self.stopped:
            self.stopped = True
            if self.thread.ident:
                self.thread.join()
            self.durable.close()
            self.database.close()

    def send(self, model, call):
        """Submits a policy's next call; returns its id."""
        self._sent[model] = self._sent.get(model, 0) + 1
        return self.durable.submit(model, self._sent[model], call).result()

    def train(self, model, *data, backward=True):
        return self.send(model, ForwardBackward(data, NO_LOSS, backward))

    def get(self, id):
        until = time.monotonic() + DEADLINE_S
        while (result := result_of(self.durable, id, 1.0)) is None:
            assert time.monotonic() < until, self.durable.failed
            assert self.durable.failed is None, self.durable.failed
        return result

    def state_of(self, name):
        """A policy's state after all its requests so far."""
        return self.durable.do(name, lambda live: live.read_state(name)).result(DEADLINE_S)

    @property
    def unfinished(self):
        return sum(self.durable.queued().values()) + len(self.durable._inbox)


@pytest.fixture
def fake(memory):
    """``fake("ab")``: two policies that nothing computes; the test takes the turns."""
    with contextlib.ExitStack() as opened:

        def make(policies, folder="fake"):
            served = Served(FakeTrainer(policies), memory / folder)
            opened.callback(served.end)
            return served

        yield make


@pytest.fixture
def server_of(tiny_base, tmp_path):
    """``server_of(folder)`` runs turns over a real trainer."""
    with contextlib.ExitStack() as opened:

        def make(folder="one", slots=2, **options):
            spilled = tmp_path / folder / "spilled"
            live = Trainer(
                tiny_base(), slots={8: slots}, shapes=SHAPES, host_bytes=20_000, folder=spilled
            )
            served = Served(live, tmp_path / folder, **options).run()
            opened.callback(served.end)
            return served

        yield make


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from("abcd"),
        st.sampled_from(["optim", "do", "forward"])
        | st.lists(st.integers(1, 16), min_size=1, max_size=6),
    ),
    max_size=30,
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(OPERATIONS, st.lists(st.integers(0, 4), max_size=40), st.booleans())
def test_nothing_overtakes_an_update_and_every_request_ends(fake, operations, pauses, bounded):
    """Requests arrive between turns; passes between two updates are computed between them."""
    served = fake("abcd", f"{time.monotonic_ns()}")
    ids, expected, mark, turns = [], {name: [] for name in "abcd"}, 0, iter(pauses)
    bound_s, log = (0.01 if bounded else None), served.live.log
    for policy, what in operations:
        group, mark = expected[policy], mark + 1
        if what == "optim":
            ids.append(served.send(policy, Optim(OptimizerConfig(float(mark)))))
            group.append(float(mark))
        elif what == "do":
            served.durable.do(policy, lambda _, p=policy, m=mark: log.append(("do", p, float(m))))
            group.append(float(mark))
        else:
            sizes = [3] if what == "forward" else what
            marks = [mark + i / 8 for i in range(len(sizes))]
            data = [datum(n, m) for n, m in zip(sizes, marks)]
            ids.append(served.train(policy, *data, backward=what != "forward"))
            if not group or not isinstance(group[-1], set):
                group.append(set())
            group[-1] |= set(marks)
        for _ in range(next(turns, 0)):
            served.durable.slice(bound_s)
    for _ in range(1000):
        if not served.durable.slice(bound_s):
            break
    assert served.unfinished == served.durable.waiting == 0
    assert None not in [result_of(served.durable, id, 30) for id in ids]
    for policy, groups in expected.items():
        found = [what for _, owner, what in log if owner == policy]
        for group in groups:
            if isinstance(group, set):
                assert set(found[: len(group)]) == group
                found = found[len(group) :]
            else:
                assert found.pop(0) == group
        assert not found


def test_policies_that_are_ready_together_share_a_step_and_end_separately(fake):
    served = fake("ab")
    long, short = served.train("a", *[datum(16)] * 3), served.train("b", datum(9))
    assert served.durable.slice()
    assert [owner for _, owner, _ in served.live.log] == ["a", "b"]
    assert served.get(short).loss == 1
    assert served.unfinished == 1
    assert served.durable.slice()
    assert served.get(long).loss == 3
    assert [x.shape for x in served.get(long).logprobs] == [(16,)] * 3
    assert not served.durable.slice()


def test_no_tenant_waits_for_another_that_floods(fake):
    """Each step of a tenant with one request at a time, next to one with 100, comes next or next
    but one.
    """
    served, turns = fake(["flood", "small"]), []
    for _ in range(100):
        served.train("flood", datum(16))
    for _ in range(10):
        id = served.train("small", datum(16))
        turns.append(0)
        while served.durable.queued().get("small") or not turns[-1]:
            served.durable.slice(0.01)
            turns[-1] += 1
        served.get(id)
    assert max(turns) <= 2
    seconds = served.durable.counters.seconds
    assert seconds["small"] == pytest.approx(seconds["flood"], rel=0.2)


def test_a_mistake_fails_only_its_own_request(rng, server_of):
    server = server_of()
    wrong = [
        (Create(AdapterConfig(64)), "rank 64; this server trains ranks up to 8"),
        (Optim(random_optimizer(rng)), "policy 'a' is not in training: create or load it first"),
        (ForwardBackward([datum(5)], NO_LOSS), "policy 'a' is not in training"),
        (ForwardBackward([datum(999)], NO_LOSS), "datum 0 has 999 tokens; this server trains on"),
    ]
    ids = [server.send("a", call) for call, _ in wrong]
    fine = server.send("a", Create(CONFIGS["a"], 1))
    full = server.durable.do("a", lambda live: Path("/nowhere/x").write_text(""))
    assert server.get(fine) == {}
    for id, (_, message) in zip(ids, wrong):
        with pytest.raises(UserError, match=message):
            server.get(id)
    with pytest.raises(FileNotFoundError):
        full.result(DEADLINE_S)
    with pytest.raises(Conflict):
        server.durable.submit("a", 5, Create(CONFIGS["a"], 2)).result()
    assert server.durable.submit("a", 5, Create(CONFIGS["a"], 1)).result() == fine
    with pytest.raises(UserError, match="every is 0"):
        Durable(server.durable.snapshots.states.parent, server.live, server.database, every=0)


def test_a_policy_whose_state_cannot_be_read_back_fails_alone(rng, server_of):
    """Other policies train, and so does this one with another state."""
    served = server_of(slots=1)
    states = {name: random_state(rng, served.live.base, CONFIGS[name]) for name in "ab"}
    for name, state in states.items():
        served.durable.do(name, lambda live, n=name, s=state: live.join(n, s)).result(DEADLINE_S)
    lost = served.live._members["a"].off_device.path
    data = bytearray(lost.read_bytes())
    data[-3] ^= 1
    lost.write_bytes(data)

    def send(name):
        loss = coefs("cross_entropy")
        calls = [ForwardBackward(random_data(rng, "cross_entropy"), loss) for _ in range(2)]
        return [served.send(name, call) for call in (*calls, Optim(random_optimizer(rng)))]

    failed, done = send("a"), send("b")
    for id in failed:
        with pytest.raises(UserError, match=r"state of policy 'a' cannot be read .*: load a"):
            served.get(id)
    assert served.get(done[-1])["skipped"] == 0
    served.durable.do("a", lambda live: live.replace("a", states["a"]))
    assert served.get(send("a")[-1])["skipped"] == 0


def plan_of(rng, config, rounds):
    """Returns the calls of one policy, with pending gradients at the end."""

    def data(kind, backward=True):
        return ForwardBackward(random_data(rng, kind), coefs(kind), backward)

    made = [Create(config, int(rng.integers(1 << 30)))]
    for _ in range(rounds):
        made += [data("cross_entropy") for _ in range(int(rng.integers(1, 3)))]
        made += [data("ppo", backward=False), Optim(random_optimizer(rng))]
    return [*made, data("cross_entropy")]


@pytest.mark.parametrize("every", [1, 3, 1000])
def test_a_server_that_ends_at_any_moment_continues_where_it_was(every, rng, server_of):
    """Requests sent while the server ends again and again give the results and states of an
    undisturbed server.
    """
    plans = {name: plan_of(rng, config, 3) for name, config in CONFIGS.items()}
    whole = server_of("whole", every=1000)
    ids = {name: [whole.send(name, call) for call in plan] for name, plan in plans.items()}
    expected = {name: [whole.get(id) for id in own] for name, own in ids.items()}
    server, ends = server_of(every=every), 0
    sent, got = {name: [] for name in plans}, {name: {} for name in plans}
    while any(len(got[name]) < len(plan) for name, plan in plans.items()):
        unsent = [name for name, plan in plans.items() if len(sent[name]) < len(plan)]
        name = str(rng.choice(unsent or list(plans)))
        if unsent:
            number = len(sent[name])
            sent[name].append(server.durable.submit(name, number + 1, plans[name][number]).result())
        for other, own in sent.items():
            wait_s = 0.0 if unsent else 0.05
            for i in set(range(len(own))) - got[other].keys():
                if (result := result_of(server.durable, own[i], wait_s)) is not None:
                    got[other][i] = result
        if rng.random() < 0.2 and ends < 6:
            server.end()
            server, ends = server_of(every=every), ends + 1
            for other, own in sent.items():  # a repeated request has the same id
                if own:
                    again = int(rng.integers(len(own)))
                    id = server.durable.submit(other, again + 1, plans[other][again]).result()
                    assert id == own[again]
    for name, plan in plans.items():
        for i, call in enumerate(plan):
            if isinstance(call, ForwardBackward):
                loss = pytest.approx(expected[name][i].loss, rel=1e-3, abs=5e-3)
                assert got[name][i].loss == loss
        state, alone = server.state_of(name), whole.state_of(name)
        assert (state.steps, state.skipped) == (3, 0)
        assert state.parts.keys() == alone.parts.keys()
        for part, leaves in state.parts.items():
            for path, leaf in leaves.items():
                # float32 sums in another order, and Adam divides by small numbers
                other = alone.parts[part][path]
                atol = 2e-2 * max(1e-2, np.abs(other).max()) + 1e-7
                np.testing.assert_allclose(leaf, other, atol=atol, err_msg=path)


def test_a_device_that_fails_loses_nothing_that_was_accepted(rng, server_of, monkeypatch):
    server = server_of()
    plan = plan_of(rng, CONFIGS["a"], 1)
    server.get(server.send("a", plan[0]))
    accepted = threading.Event()

    def broken(*args):
        accepted.wait(DEADLINE_S)
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(server.live, "step", broken)
    monkeypatch.setattr(threading, "excepthook", lambda told: None)
    ids = [server.send("a", call) for call in plan[1:]]
    waiting = server.durable.do("a", lambda live: None)
    accepted.set()
    server.thread.join(DEADLINE_S)
    with pytest.raises(RuntimeError, match="the device is lost"):
        waiting.result(0)
    with pytest.raises(UserError, match="this server takes no more requests: the device is lost"):
        server.durable.submit("a", 99, plan[-1]).result()
    server.end()
    monkeypatch.undo()
    server = server_of()
    assert np.isfinite(server.get(ids[-1]).loss)
    assert server.state_of("a").steps == 1


def test_a_damaged_snapshot_is_refused(rng, server_of, tmp_path):
    server = server_of(every=1)
    for call in plan_of(rng, CONFIGS["a"], 1):
        last = server.send("a", call)
    server.get(last)
    server.end()
    path = path_of(tmp_path / "one" / "states", "a")
    data = bytearray(path.read_bytes())
    assert Snapshot.read(path).model == "a"
    data[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
    path.write_bytes(data)
    with pytest.raises(UserError, match="is damaged: its digest is not"):
        server_of()
