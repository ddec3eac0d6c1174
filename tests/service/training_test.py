"""The queues of training: order within a policy, company in a step, whose turn it is, and whose
mistake.
"""

import threading
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mint_jax.errors import UserError
from mint_jax.service.fairness import Counters
from mint_jax.service.training import Training
from mint_jax.train import blocks
from mint_jax.train.blocks import BlockShape, Datum
from mint_jax.train.losses import NO_LOSS
from mint_jax.train.state import OptimizerConfig
from mint_jax.train.trainer import Step, Trainer
from tests import oracles
from tests.train.live_test import (
    CONFIGS,
    SHAPES,
    Tenant,
    coefs,
    random_data,
    random_optimizer,
    random_state,
)


class Pretended:
    """Policies whose steps take data as ``cut`` does and remember them; a token takes a
    millisecond.
    """

    declared = (BlockShape(1, 1, 16), BlockShape(2, 1, 16))
    base = types.SimpleNamespace(cfg=types.SimpleNamespace(context=64, vocab_size=97))

    def __init__(self, policies):
        self.policies, self.log, self.seconds = set(policies), [], 0.0

    def __contains__(self, name):
        return name in self.policies

    def can_start(self, work):
        return True

    def can_move(self):
        return True

    def step(self, works, bound_s=None):
        shape = self.declared[0] if bound_s is not None and bound_s < 0.02 else self.declared[1]
        made = blocks.cut([w for w in works if w.backward == works[0].backward], shape)
        _, places = blocks.fill(made, shape)
        for place in places:
            self.log.append(("forward_backward", place.work.policy, place.work.data[place.datum]))
        blocks.collect(places, np.zeros((*shape[:3], 1)), {"loss": np.ones(shape.blocks)})
        self.seconds += shape.size * 1e-3
        return Step(shape, made, shape.size * 1e-3)

    def brought(self):
        return {}

    def optim(self, updates):
        for name, numbers in updates.items():
            self.log.append(("optim", name, numbers))
        return {name: {"learning_rate": numbers.learning_rate} for name, numbers in updates.items()}


def datum(n):
    return Datum(np.full(n, 5, np.int32), np.full(n, 5, np.int32), np.ones(n, np.float32))


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from("abcd"),
        st.sampled_from(["optim", "do", "forward"])
        | st.lists(st.integers(1, 16), min_size=1, max_size=6),
    ),
    max_size=30,
)


@settings(max_examples=150)
@given(OPERATIONS, st.lists(st.integers(0, 4), max_size=40), st.booleans())
def test_nothing_overtakes_an_update_and_every_request_ends(operations, pauses, bounded):
    """Requests arrive between turns; what stands between two updates of a policy is between them
    when it is computed.
    """
    live = Pretended("abcd")
    training, asked, expected = Training(live, Counters()), [], {name: [] for name in "abcd"}
    turns = iter(pauses)
    for policy, what in operations:
        group = expected[policy]
        if what == "optim":
            numbers = OptimizerConfig(float(len(asked) + 1))
            asked.append(training.optim(policy, numbers, tenant=policy))
            group.append(numbers)
        elif what == "do":
            mark = len(asked)
            asked.append(
                training.do(
                    policy,
                    lambda live, p=policy, m=mark: live.log.append(("do", p, m)),
                    tenant=policy,
                )
            )
            group.append(mark)
        else:
            data = [datum(3)] if what == "forward" else [datum(n) for n in what]
            asked.append(
                training.forward_backward(
                    policy, data, NO_LOSS, tenant=policy, backward=what != "forward"
                )
            )
            if not group or not isinstance(group[-1], set):
                group.append(set())
            group[-1] |= set(map(id, data))
            asked[-1].data = data
        for _ in range(next(turns, 0)):
            training.turn(0.01 if bounded else None)
    assert training.waiting == sum(not future.done() for future in asked)
    turns = 0
    while training.turn(0.01 if bounded else None):
        turns += 1
        assert turns < 1000
    assert all(future.done() for future in asked)
    assert training.waiting == 0
    for policy, groups in expected.items():
        mine = [what for _, owner, what in live.log if owner == policy]
        for group in groups:
            if isinstance(group, set):
                assert {id(what) for what in mine[: len(group)]} == group
                mine = mine[len(group) :]
            else:
                assert mine.pop(0) == group
        assert not mine


def test_policies_that_are_ready_together_share_a_step_and_end_by_themselves():
    live = Pretended("ab")
    training = Training(live, Counters())
    long, short = (
        training.forward_backward("a", [datum(16)] * 3, NO_LOSS),
        training.forward_backward("b", [datum(9)], NO_LOSS),
    )
    assert training.turn()
    assert [owner for _, owner, _ in live.log] == ["a", "b"]
    assert short.done()
    assert not long.done()
    assert training.turn()
    assert long.result().loss == 3
    assert [x.shape for x in long.result().logprobs] == [(16,)] * 3
    assert not training.turn()


def test_no_tenant_waits_for_another_who_floods():
    """A tenant with one request at a time beside one with 100: each of its steps comes next or next
    but one.
    """
    live, counters = Pretended(["flood", "small"]), Counters()
    training = Training(live, counters)
    flood = [
        training.forward_backward("flood", [datum(16)], NO_LOSS, tenant="flood") for _ in range(100)
    ]
    served = []
    for _ in range(10):
        mine, turns = training.forward_backward("small", [datum(16)], NO_LOSS, tenant="small"), 0
        while not mine.done():
            training.turn(0.01)
            turns += 1
        served.append(turns)
    assert max(served) <= 2
    assert sum(f.done() for f in flood) >= 8
    assert counters.seconds["small"] == pytest.approx(counters.seconds["flood"], rel=0.2)


def test_policies_of_one_tenant_take_turns():
    live = Pretended("ab")
    training = Training(live, Counters())
    for _ in range(5):
        for policy in "aab":
            training.forward_backward(policy, [datum(16)], NO_LOSS)
    for _ in range(4):
        training.turn(0.01)
    assert [owner for _, owner, _ in live.log] == ["a", "b", "a", "b"]


def test_a_mistake_is_its_caller_s_alone():
    live = Pretended("ab")
    training = Training(live, Counters())
    bad = training.forward_backward("a", [datum(17)], NO_LOSS)
    with pytest.raises(UserError, match="datum 0 has 17 tokens; this server trains on at most 16"):
        bad.result(0)
    unknown, unknown_update = (
        training.forward_backward("x", [datum(3)], NO_LOSS),
        training.optim("y", OptimizerConfig()),
    )
    fine = training.forward_backward("b", [datum(3)], NO_LOSS)
    full = training.do("a", lambda live: Path("/nowhere/x").write_text(""))
    while training.turn():
        pass
    assert fine.result(0).loss == 1
    for future, name in ((unknown, "x"), (unknown_update, "y")):
        with pytest.raises(
            UserError, match=f"policy '{name}' is not in training: create or load it first"
        ):
            future.result(0)
    with pytest.raises(FileNotFoundError):
        full.result(0)
    assert not fine.cancel(), "what was asked for is done"


def test_a_failure_of_the_device_ends_all_requests_and_is_raised():
    live = Pretended("ab")
    training = Training(live, Counters())
    asked = [
        training.forward_backward("a", [datum(3)], NO_LOSS),
        training.optim("b", OptimizerConfig()),
    ]

    def broken(*args):
        raise RuntimeError("the device is lost")

    live.step = live.optim = broken
    with pytest.raises(RuntimeError, match="the device is lost"):
        training.turn()
    asked.append(training.optim("a", OptimizerConfig()))
    for future in asked:
        with pytest.raises(RuntimeError, match="the device is lost"):
            future.result(0)


def test_tenants_in_threads_of_their_own_train_as_torch_does(rng, tiny_base, hf_dirs, tmp_path):
    """Four threads ask without waiting, update, forward and backward, update among it; one thread
    computes.
    """
    live = Trainer(tiny_base(), slots={8: 2}, shapes=SHAPES, host_bytes=20_000, folder=tmp_path)
    training, woken = Training(live, Counters(), threading.Event().set), threading.Event()
    model = oracles.torch_model(hf_dirs("llama"), torch.float64)
    states = {name: random_state(rng, live.base, config) for name, config in CONFIGS.items()}
    plans = {name: [] for name in CONFIGS}
    for plan in plans.values():
        for _ in range(4):
            plan += [random_data(rng, "cross_entropy") for _ in range(int(rng.integers(0, 3)))]
            plan.append(random_optimizer(rng))
    told = {}

    def client(name):
        futures = [training.do(name, lambda live: live.join(name, states[name]), tenant=name)]
        for what in plans[name]:
            if isinstance(what, OptimizerConfig):
                futures.append(training.optim(name, what, tenant=name))
            else:
                futures.append(
                    training.forward_backward(name, what, coefs("cross_entropy"), tenant=name)
                )
        told[name] = [future.result(120) for future in futures][1:]

    threads = [threading.Thread(target=client, args=(name,)) for name in CONFIGS]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        if not training.turn(float(rng.choice([1e-9, 1.0]))):
            woken.wait(0.002)
    for name, state in states.items():
        alone = Tenant(model, state)
        for what, result in zip(plans[name], told[name], strict=True):
            if isinstance(what, OptimizerConfig):
                assert result["grad_norm"] == pytest.approx(alone.optim(what), rel=1e-4, abs=1e-6)
                continue
            loss, logprobs = alone.forward_backward(what, "cross_entropy")
            assert result.loss == pytest.approx(loss, rel=1e-4, abs=2e-3)  # as in live_test
            for got, want in zip(result.logprobs, logprobs):
                np.testing.assert_allclose(got, want, atol=3e-5)
        for path, factor in alone.factors.items():
            moved = np.abs(factor.detach().numpy() - state.parts["factors"][path]).max()
            np.testing.assert_allclose(
                live.read_state(name).parts["factors"][path],
                factor.detach(),
                atol=2e-2 * moved + 1e-6,
            )


@pytest.mark.parametrize("what", ["damaged", "gone"])
def test_a_policy_whose_state_cannot_be_read_back_fails_alone(rng, tiny_base, tmp_path, what):
    """Its requests say so; other policies train on, and with another state it does too."""
    live = Trainer(tiny_base(), slots={8: 1}, shapes=SHAPES, host_bytes=0, folder=tmp_path)
    states = {
        name: random_state(rng, live.base, config) for name, config in list(CONFIGS.items())[:2]
    }
    for name, state in states.items():
        live.join(name, state)
    lost, other = states
    assert live.places() == {"disk": 2}
    path = live._members[lost].off_device.path
    if what == "gone":
        path.unlink()
    else:
        data = bytearray(path.read_bytes())
        data[-3] ^= 1
        path.write_bytes(data)
    training = Training(live, Counters())

    def ask(name):
        asked = [
            training.forward_backward(
                name, random_data(rng, "cross_entropy"), coefs("cross_entropy"), name
            )
            for _ in range(2)
        ]
        return [*asked, training.optim(name, random_optimizer(rng), name)]

    failed, done = ask(lost), ask(other)
    while training.turn():
        pass
    for future in failed:
        with pytest.raises(
            UserError,
            match=rf"state of policy '{lost}' cannot be read .*: load a checkpoint into it",
        ):
            future.result(0)
    assert done[-1].result(0)["skipped"] == 0
    training.do(lost, lambda live: live.replace(lost, states[lost]))
    again = ask(lost)
    while training.turn():
        pass
    assert again[-1].result(0)["skipped"] == 0
