"""Snapshots: what a client samples from is the policy of that moment, for good, and no other."""

import numpy as np
import pytest

from mint_jax.catalog.packed import unpack
from mint_jax.errors import UserError
from mint_jax.lora import tree as lora_tree
from mint_jax.lora.tree import AdapterConfig
from mint_jax.models import transformer
from mint_jax.residency.admission import Admission
from mint_jax.residency.residency import Residency
from mint_jax.residency.slots import DeviceSlots
from mint_jax.rollout.engine import Engine
from mint_jax.rollout.request import Request
from mint_jax.service.loop import Loop
from mint_jax.service.snapshots import Snapshots
from mint_jax.train.live import Live
from mint_jax.train.state import OptimizerConfig
from tests.train.live_test import SHAPES, coefs, random_data, random_state

TARGETS = (lora_tree.ALL_LINEAR, "unembed")


class Server:
    """Training and sampling over one base, with snapshots between them; one slot for each rank of those that are sampled."""

    def __init__(self, base):
        self.base, specs = base, transformer.abstract(base.cfg)
        slots = DeviceSlots(specs, {2: 1, 8: 1}, TARGETS)
        admission = Admission(base.fingerprint, specs, {b: slots.targets(b) for b in slots.stacks})
        self.residency = Residency(lambda digest: self.snapshots.fetch(digest), unpack, admission, slots, 1 << 24)
        self.loop = Loop(Engine(base, rows=(8,), steps=2), Live(base, {2: 1, 8: 1}, shapes=SHAPES), self.residency)
        self.snapshots = Snapshots(self.loop.training)

    def close(self):
        self.snapshots.close()
        self.residency.close()


@pytest.fixture
def server(tiny_base):
    made = Server(tiny_base("llama"))
    yield made
    made.close()


def test_an_old_snapshot_is_sampled_while_its_policy_trains(rng, server):
    """Of each of three versions of two policies: greedy tokens and log-probabilities are those of exactly these weights, asked again
    after all updates and with one slot between them."""
    training, snapshots = server.loop.training, server.snapshots
    states = {
        "a": random_state(rng, server.base, AdapterConfig(2, 4.0, ("q", "down"))),
        "b": random_state(rng, server.base, AdapterConfig(5, 9.0, ("v", "unembed"))),
    }
    prompt, taken, kept = tuple(rng.integers(3, 97, 9).tolist()), [], []

    def ask(digest):
        [answer] = server.loop.engine.submit(Request(prompt, revision=digest, temperature=0.0, max_tokens=6, stop_ids=())).result(60)
        assert answer.revision == digest
        return answer.tokens, answer.logprobs

    with server.loop.running():
        for name, state in states.items():
            training.do(name, lambda live, n=name, s=state: live.join(n, s))
        for _ in range(3):
            for name in states:
                digest = snapshots.take(name).result(60)
                kept.append((training.live.config(name), training.do(name, lambda live, n=name: live.held(n)).result(60)))
                taken.append((digest, ask(digest)))
                training.forward_backward(name, random_data(rng, "cross_entropy"), coefs("cross_entropy"))
                training.optim(name, OptimizerConfig(0.05))
        again = [ask(digest) for digest, _ in taken]
    assert len({digest for digest, _ in taken}) == 6
    adapters = {str(i): (config, held.adapter()) for i, (config, held) in enumerate(kept)}
    engine = Engine(server.base, rows=(8,), steps=2)
    stacks, slots = lora_tree.stack_adapters(transformer.abstract(server.base.cfg), adapters)
    for i, (_, (tokens, logprobs)) in enumerate(taken):
        [[direct]] = engine.generate([Request(prompt, slots[str(i)], temperature=0.0, max_tokens=6, stop_ids=())], stacks)
        assert (tokens, logprobs) == again[i], "the same bits after all updates"
        assert tokens == direct.tokens
        np.testing.assert_allclose(logprobs, direct.logprobs, atol=1e-5)  # stacks of other sizes: another program
    assert len({tuple(logprobs) for _, (_, logprobs) in taken}) == 6, "versions differ, else this says nothing"


def test_a_snapshot_is_there_as_long_as_it_is_held(rng, server):
    training, snapshots = server.loop.training, server.snapshots
    with server.loop.running():
        state = random_state(rng, server.base, AdapterConfig(2, 4.0, ("q",)))
        training.do("a", lambda live: live.join("a", state))
        one, same = snapshots.take("a").result(60), snapshots.take("a").result(60)
        assert one == same
        assert snapshots.nbytes == snapshots.fetch(one).nbytes
        snapshots.drop(one)
        snapshots.fetch(one)
        snapshots.drop(one)
        assert snapshots.nbytes == 0
        with pytest.raises(UserError, match="is no snapshot that is held here"):
            server.loop.engine.submit(Request((1, 2), revision=one)).result(60)
        with pytest.raises(UserError, match="policy 'x' is not in training"):
            snapshots.take("x").result(60)
    elsewhere = Snapshots(training, below=lambda digest: np.frombuffer(digest.encode(), np.uint8))
    assert elsewhere.fetch("abc").tobytes() == b"abc"
    elsewhere.close()
