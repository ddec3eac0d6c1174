"""Training that survives: whatever moment a server ends at, the one that opens its folder goes on
as if nothing had been.
"""

import threading
import time

import numpy as np
import pytest

from mint_jax.errors import UserError
from mint_jax.lora.tree import AdapterConfig
from mint_jax.service.calls import Create, ForwardBackward, Optim
from mint_jax.service.durable import Durable, Snapshot, path_of
from mint_jax.service.fairness import Counters
from mint_jax.service.futures import Conflict, Gone
from mint_jax.service.server_db import ServerDatabase
from mint_jax.service.training import Training
from mint_jax.train.trainer import Trainer
from tests.train.live_test import CONFIGS, SHAPES, coefs, random_data, random_optimizer

DEADLINE_S = 120


class Server:
    """A process's training over a folder: a thread turns until it is stopped, at any moment."""

    def __init__(self, base, folder, **settings):
        self.live = Trainer(
            base, slots={8: 2}, shapes=SHAPES, host_bytes=20_000, folder=folder / "spilled"
        )
        self.woken, self.stopped = threading.Event(), False
        self.training = Training(self.live, Counters(), self.woken.set)
        self.database = ServerDatabase(folder / "server.db")
        self.durable = Durable(folder, self.training, self.database, **settings)
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self):
        while not self.stopped:
            if not self.training.turn(1e-9):
                self.woken.wait(0.01)
                self.woken.clear()

    def end(self):
        """Ends between two slices, whatever is queued."""
        self.stopped = True
        self.thread.join()
        self.durable.close()
        self.database.close()

    def get(self, id):
        until = time.monotonic() + DEADLINE_S
        while (result := self.durable.result(id, 1.0)) is None:
            assert time.monotonic() < until, self.durable.failed
            assert self.durable.failed is None, self.durable.failed
        return result


@pytest.fixture
def server_of(tiny_base, tmp_path):
    made = []

    def make(folder="one", **settings):
        made.append(Server(tiny_base(), tmp_path / folder, **settings))
        return made[-1]

    yield make
    for server in made:
        if not server.stopped:
            server.end()


def plan_of(rng, config, rounds):
    """Numbered calls of one policy."""
    made = [Create(config, int(rng.integers(1 << 30)))]
    for _ in range(rounds):
        made += [
            ForwardBackward(random_data(rng, "cross_entropy"), coefs("cross_entropy"))
            for _ in range(int(rng.integers(1, 3)))
        ]
        made.append(ForwardBackward(random_data(rng, "ppo"), coefs("ppo"), backward=False))
        made.append(Optim(random_optimizer(rng)))
    # pending at the end
    made.append(ForwardBackward(random_data(rng, "cross_entropy"), coefs("cross_entropy")))
    return made


def held_of(server, name):
    """A policy's state behind all that it was asked, which a server that was opened again may still
    be doing again.
    """
    return server.training.do(name, lambda live: live.read_state(name)).result(DEADLINE_S)


def parts(held):
    return {
        f"{part}/{path}": leaf
        for part, leaves in held.parts.items()
        for path, leaf in leaves.items()
    }


def assert_close(one, two, moved):
    """Float32 sums in another order: the data of a step may be others, and Adam divides by small
    numbers.
    """
    assert set(one) == set(two)
    for name, leaf in one.items():
        np.testing.assert_allclose(
            leaf, two[name], atol=2e-2 * max(moved, np.abs(two[name]).max()) + 1e-7, err_msg=name
        )


@pytest.mark.parametrize("every", [1, 3, 1000])
def test_a_server_that_ends_at_any_moment_goes_on_where_it_was(every, rng, server_of):
    """Every policy's calls, sent while the server ends again and again, give what an undisturbed
    server gives: results and states.
    """
    plans = {name: plan_of(rng, config, 3) for name, config in CONFIGS.items()}
    whole = server_of("whole", every=1000)
    ids = {
        name: [whole.durable.submit(name, i, call) for i, call in enumerate(plan, 1)]
        for name, plan in plans.items()
    }
    expected = {name: [whole.get(id) for id in mine] for name, mine in ids.items()}
    server, sent, got = (
        server_of(every=every),
        {name: [] for name in plans},
        {name: {} for name in plans},
    )
    ends = 0
    while any(len(got[name]) < len(plan) for name, plan in plans.items()):
        name = str(
            rng.choice([n for n, plan in plans.items() if len(sent[n]) < len(plan)] or list(plans))
        )
        if len(sent[name]) < len(plans[name]):
            sent[name].append(
                server.durable.submit(name, len(sent[name]) + 1, plans[name][len(sent[name])])
            )
        for other, mine in sent.items():
            for i, id in enumerate(mine):
                wait_s = 0.05 if len(mine) == len(plans[other]) else 0.0
                if (
                    i not in got[other]
                    and (result := server.durable.result(id, wait_s)) is not None
                ):
                    got[other][i] = result
        if rng.random() < 0.2 and ends < 6:
            server.end()
            server = server_of(every=every)
            ends += 1
            # the same again has the same id, and does not run twice
            for other, mine in sent.items():
                again = int(rng.integers(len(mine))) if mine else None
                if again is not None:
                    assert (
                        server.durable.submit(other, again + 1, plans[other][again]) == mine[again]
                    )
    for name, plan in plans.items():
        for i, call in enumerate(plan):
            if isinstance(call, ForwardBackward):
                assert got[name][i].loss == pytest.approx(
                    expected[name][i].loss, rel=1e-3, abs=5e-3
                )
        held, alone = held_of(server, name), held_of(whole, name)
        assert (
            (held.steps, held.count, held.skipped)
            == (alone.steps, alone.count, alone.skipped)
            == (3, 3, 0)
        )
        assert_close(parts(held), parts(alone), 1e-2)


def test_a_policy_that_was_forgotten_does_not_come_back(rng, server_of):
    server, last = server_of(every=1), {}
    for name in "ab":
        for i, call in enumerate(plan_of(rng, CONFIGS[name], 1), 1):
            last[name] = server.durable.submit(name, i, call)
        server.get(last[name])
    last_of_a = last["a"]
    server.durable.forget("a")
    with pytest.raises(Gone):
        server.durable.result(last_of_a)
    server.end()
    server = server_of(every=1)
    again = server.durable.submit("b", 99, Optim(random_optimizer(rng)))
    assert server.durable.result(again, 0.3) is None, "98 others come before it"
    assert "b" in server.live
    assert "a" not in server.live
    assert not path_of(server.durable.states, "a").exists()


def test_a_caller_s_mistake_ends_its_own_request(rng, server_of):
    server = server_of()
    wrong = [Create(AdapterConfig(64)), Optim(random_optimizer(rng)), Create(CONFIGS["a"], 1)]
    ids = [server.durable.submit("a", i, call) for i, call in enumerate(wrong, 1)]
    assert server.get(ids[2]) == {}
    for id, message in (
        (ids[0], "rank 64; this server trains ranks up to 8"),
        (ids[1], "policy 'a' is not in training"),
    ):
        with pytest.raises(UserError, match=message):
            server.get(id)
    with pytest.raises(Conflict):
        server.durable.submit("a", 3, Create(CONFIGS["a"], 2))
    assert server.durable.submit("a", 3, Create(CONFIGS["a"], 1)) == ids[2]
    with pytest.raises(UserError, match="every is 0"):
        Durable(server.durable.states.parent, server.training, server.database, every=0)


def test_a_device_that_fails_loses_nothing_that_was_accepted(rng, server_of, monkeypatch):
    server = server_of()
    plan = plan_of(rng, CONFIGS["a"], 1)
    first = server.durable.submit("a", 1, plan[0])
    server.get(first)

    accepted = threading.Event()

    def broken(*args):
        accepted.wait(DEADLINE_S)
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(server.live, "step", broken)
    monkeypatch.setattr(threading, "excepthook", lambda told: None)
    ids = [server.durable.submit("a", i, call) for i, call in enumerate(plan[1:], 2)]
    accepted.set()
    server.thread.join(DEADLINE_S)
    until = time.monotonic() + DEADLINE_S
    while server.durable.failed is None:
        assert time.monotonic() < until
        time.sleep(0.01)
    with pytest.raises(UserError, match="this server takes no more requests: the device is lost"):
        server.durable.submit("a", 99, plan[-1])
    server.end()
    monkeypatch.undo()
    server = server_of()
    assert np.isfinite(server.get(ids[-1]).loss)
    assert held_of(server, "a").steps == 1


def test_a_damaged_snapshot_is_told(rng, server_of, tmp_path):
    server = server_of(every=1)
    for i, call in enumerate(plan_of(rng, CONFIGS["a"], 1), 1):
        last = server.durable.submit("a", i, call)
    server.get(last)
    path, give_up = path_of(tmp_path / "one" / "states", "a"), time.monotonic() + 60
    while not path.exists() and time.monotonic() < give_up:  # it is written behind the answer
        time.sleep(0.02)
    server.end()
    data = bytearray(path.read_bytes())
    assert Snapshot.read(path).model == "a"
    data[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
    path.write_bytes(data)
    with pytest.raises(UserError, match="is damaged: its digest is not"):
        server_of()
