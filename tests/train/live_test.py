"""Live training against torch: tenants that come, go and are moved about, each as if it were alone,
and nothing compiled for them.
"""

import time

import chex
import jax
import numpy as np
import pytest
import torch

from mint_jax import compiling
from mint_jax import params as params_lib
from mint_jax.compiling import compilations
from mint_jax.errors import UserError
from mint_jax.lora import tree
from mint_jax.lora.tree import AdapterConfig
from mint_jax.mesh import make_mesh
from mint_jax.models import base as base_lib
from mint_jax.train import host_state
from mint_jax.train import slots as slots_lib
from mint_jax.train.blocks import BlockShape, Datum, TrainRequest
from mint_jax.train.host_state import HostState, SpilledState
from mint_jax.train.losses import KINDS, LossCoefs
from mint_jax.train.programs import warm
from mint_jax.train.state import OptimizerConfig
from mint_jax.train.trainer import Trainer
from tests import oracles
from tests.adapters import random_adapter
from tests.train.torch_lora import TorchPolicy, token_losses

SHAPES = (BlockShape(1, 1, 12), BlockShape(3, 2, 12), BlockShape(1, 1, 24), BlockShape(2, 1, 12, 4))
CONFIGS = {
    "a": AdapterConfig(3, 6.0, tree.LINEAR_TARGETS),
    "b": AdapterConfig(8, 8.0, ("q", "down", "unembed"), rslora=True),
    "c": AdapterConfig(1, 2.0, ("v",)),
    "d": AdapterConfig(2, 4.0, ("unembed",)),
}
LOSSES = {  # as a client of Tinker states them: absolute bounds, and beta or kl_coeff
    "cross_entropy": (0.0, np.inf, 0.0),
    "importance_sampling": (0.0, np.inf, 0.0),
    "ppo": (0.8, 1.2, 0.0),
    "cispo": (0.5, 4.0, 0.0),
    "gspo": (0.9, 1.3, 0.0),
    "dro": (0.0, np.inf, 0.3),
    "stable_reinforce": (0.0, 1.0, 0.4),  # kl_coeff
}
FAMILIES = [
    "llama",
    pytest.param("qwen3_moe", marks=pytest.mark.long),
    pytest.param("deepseek_v3", marks=pytest.mark.long),
]
# Of AdamW: well above float32 noise in gradients, whose norms reach 400, so that an entry near zero
# does not turn noise into a whole step. At 1e-5 one test in about 60 had such an entry, and
# log-probabilities were 1e-3 off behind it; here 1.4e-5 was the most of 120 tests.
EPS = 1e-2


def coefs(kind):
    low, high, beta = LOSSES[kind]
    if kind == "stable_reinforce":
        return LossCoefs(KINDS.index("cispo"), low, high, 1, beta, 0.0, np.inf, 0.0)
    return LossCoefs(KINDS.index(kind), low, high, 0, 0.0, 0.0, np.inf, beta)


class Tenant(TorchPolicy):
    """One policy in torch float64, alone: losses by hand, torch's AdamW."""

    def __init__(self, model, held):
        super().__init__(model, held.parts["factors"].items(), held.config.scale)
        self.adamw = torch.optim.AdamW(self.factors.values(), 1.0)

    def logprobs(self, datum):
        logits = self.logits(datum.tokens[None])[0]
        targets = torch.tensor(datum.targets.reshape(len(datum.tokens), -1), dtype=torch.long)
        return torch.log_softmax(logits, -1).gather(-1, targets).reshape(datum.targets.shape)

    def forward_backward(self, data, kind):
        """Adds gradients; returns the loss and the log-probabilities."""
        low, high, beta = LOSSES[kind]
        total, told = torch.zeros((), dtype=torch.float64), []
        for datum in data:
            lp = self.logprobs(datum)
            told.append(lp.detach().numpy())
            w, A, q = (
                None if x is None else torch.tensor(np.float64(x))
                for x in (datum.weights, datum.advantages, datum.old_logp)
            )
            if kind == "cross_entropy":
                total = total - (w * lp).sum()
                continue
            live = w != 0
            lp, A, q = lp[live], A[live], q[live]
            whole = torch.exp((lp - q).mean().detach() + lp - lp.detach())
            if kind == "stable_reinforce":
                A = A - beta * (lp - q).detach()
            each = token_losses(lp, q, q, A, low, high, beta, whole=whole)
            total = total + each[kind.replace("stable_reinforce", "cispo")].sum()
        total.backward()
        return float(total.detach()), told

    def optim(self, c):
        how = {"lr": c.learning_rate, "betas": (c.b1, c.b2), "eps": c.eps}
        for group in self.adamw.param_groups:
            group |= how | {"weight_decay": c.weight_decay}
        # without a forward and backward the gradient is zero, and moments go on
        for factor in self.factors.values():
            factor.grad = torch.zeros_like(factor) if factor.grad is None else factor.grad
        norm = torch.nn.utils.clip_grad_norm_(
            self.factors.values(), c.max_grad_norm or float("inf")
        )
        self.adamw.step()
        self.adamw.zero_grad()
        return float(norm)


def random_data(rng, kind, longest=12):
    data = []
    for n in rng.integers(2, longest + 1, rng.integers(1, 6)).tolist():
        shape = (n, int(rng.integers(2, 5))) if kind == "soft" else (n,)
        tokens, targets = (rng.integers(3, 97, x).astype(np.int32) for x in (n, shape))
        weights, fields = rng.normal(size=shape).astype(np.float32), {}
        if kind != "soft":
            weights[rng.random(n) < 0.3] = 0.0
            weights[0] = 1.0  # a sequence's mean ratio needs a token
        if kind not in ("soft", "cross_entropy"):
            weights = np.float32(weights != 0)
            fields = {
                "advantages": rng.normal(size=n).astype(np.float32),
                "old_logp": (-np.minimum(rng.exponential(1, n), 2) - 4).astype(np.float32),
            }
            fields |= {"ref_logp": fields["old_logp"]} if kind == "stable_reinforce" else {}
        data.append(Datum(tokens, targets, weights, **fields))
    return data


def away_from_edges(tenant, data, kind):
    """Whether every ratio is well inside or outside its bounds: float32 could fall on the other
    side of one that is not.
    """
    low, high, _ = LOSSES[kind]
    for datum in data:
        gap = tenant.logprobs(datum).detach().numpy() - datum.old_logp
        gap = gap[datum.weights != 0]
        ratios = np.exp(np.append(gap, gap.mean()))
        if any(np.abs(ratios - edge).min() < 1e-3 for edge in (low, high)):
            return False
    return True


def random_optimizer(rng):
    rates = rng.uniform(1e-3, 1e-2), rng.uniform(0.5, 0.95), rng.uniform(0.8, 0.999)
    return OptimizerConfig(
        *map(float, rates), EPS, float(rng.uniform(0, 0.1)), float(rng.choice([0.0, 0.5, 1e9]))
    )


def random_state(rng, base, config):
    factors = dict(params_lib.leaves_with_path(random_adapter(rng, base, config)))
    return HostState(config, {"factors": factors})


def run(live, works, bound_s=None):
    """Steps until nothing is left, the order turning as a loop's would."""
    steps = []
    while waiting := [w for w in works if w.left]:
        steps.append(live.step(waiting, bound_s))
        works = works[1:] + works[:1]
    return steps


@pytest.fixture
def live_of(tiny_base, tmp_path):
    def make(**settings):
        usual = {"slots": {8: 2}, "shapes": SHAPES, "host_bytes": 20_000}
        return Trainer(tiny_base(), **usual | {"folder": tmp_path / "spilled"} | settings)

    return make


@pytest.mark.long
def test_tenants_that_are_moved_about_train_as_if_alone(rng, live_of, hf_dirs):
    """Four tenants over two slots; those not at work lie in memory or in files. Each round they
    send requests of several losses, which are computed together in any order, and then update by
    numbers of their own.
    """
    live, model = live_of(), oracles.torch_model(hf_dirs("llama"), torch.float64)
    states = {name: random_state(rng, live.base, config) for name, config in CONFIGS.items()}
    alone = {name: Tenant(model, state) for name, state in states.items()}
    for name, state in states.items():
        live.join(name, state)
    kinds = [*LOSSES, "soft"]
    seen = set()
    for turn in range(4):
        works, expected = [], []
        for i, name in enumerate(CONFIGS):
            kind = kinds[(i + 2 * turn) % len(kinds)]
            data = random_data(rng, kind, 24 if turn == 1 else 12)
            while kind in ("ppo", "cispo", "gspo") and not away_from_edges(alone[name], data, kind):
                data = random_data(rng, kind)
            kind = "cross_entropy" if kind == "soft" else kind
            works.append(TrainRequest(name, data, coefs(kind)))
            expected.append(alone[name].forward_backward(data, kind))
            seen |= {live.where(each) for each in CONFIGS}
        run(live, works)
        for work, (loss, logprobs) in zip(works, expected):
            # float32 through two layers, at log-probabilities of about 5; a loss sums up to 120 of
            # them
            for got, want in zip(work.logprobs, logprobs):
                np.testing.assert_allclose(got, want, atol=3e-5)
            assert work.loss == pytest.approx(loss, rel=1e-4, abs=2e-3)
        updates = {name: random_optimizer(rng) for name in CONFIGS}
        told = live.optim(updates)
        for name, numbers in updates.items():
            assert told[name]["grad_norm"] == pytest.approx(alone[name].optim(numbers), rel=1e-4)
            assert told[name]["skipped"] == 0
    assert seen == {"slot", "host", "disk"}, "else the test says nothing of where a state lies"
    assert live.counts["spills_read"] > 0
    for name, tenant in alone.items():
        held = live.read_state(name)
        assert (held.steps, held.skipped) == (4, 0)
        for path, factor in tenant.factors.items():
            moved = np.abs(factor.detach().numpy() - states[name].parts["factors"][path]).max()
            assert moved > 1e-3
            np.testing.assert_allclose(
                held.parts["factors"][path], factor.detach(), atol=2e-3 * moved
            )


@pytest.mark.long
def test_what_is_warm_compiles_nothing_for_any_tenant(rng, live_of):
    live = live_of(slots={4: 2, 8: 2})
    warm(live)
    with compilations() as compiled:
        for turn in range(3):
            names = []
            for rank in rng.choice(np.arange(1, 9), 5, replace=False).tolist():
                some = rng.choice(["q", "v", "up", "unembed"], rng.integers(1, 4), replace=False)
                config = AdapterConfig(rank, 2.0 * rank, tuple(some.tolist()))
                names.append(f"{turn} {rank}")
                live.join(names[-1], host_state.fresh(live.specs, config, seed=turn))
            kinds = rng.choice([*LOSSES, "soft"], (len(names), 2)).tolist()
            works = [
                TrainRequest(n, random_data(rng, k), coefs(k if k in LOSSES else "cross_entropy"))
                for n, pair in zip(names, kinds)
                for k in pair
            ]
            forward = [TrainRequest(n, random_data(rng, "ppo"), coefs("ppo"), False) for n in names]
            run(live, works, bound_s=float(rng.choice([1e-9, 1e9])))
            run(live, forward)
            live.optim({n: random_optimizer(rng) for n in names if rng.random() < 0.8})
            live.leave(names[0])
            live.replace(names[1], live.read_state(names[1]).fresh())
    assert compiled == []


def assert_close(found, expected):
    """Float32 sums in another order, relative to the largest."""
    assert set(found) == set(expected)
    for path, leaf in expected.items():
        most = 1e-4 * max(np.abs(leaf).max(), 1e-3)
        np.testing.assert_allclose(found[path], leaf, atol=most, err_msg=path)


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_a_mesh_of_eight_devices_gives_the_same(family, rng, hf_dirs, tiny_base):
    """Shapes with fewer rows than the mesh splits them into get more blocks, and states come and go
    over all devices.
    """
    mesh = make_mesh({"data": 2, "fsdp": 2, "expert": 2})
    lives = [
        Trainer(base, slots={8: 2}, shapes=SHAPES)
        for base in (tiny_base(family), base_lib.load(str(hf_dirs(family)), mesh))
    ]
    assert {*lives[1].declared} == {(8, 1, 12, 1), (4, 2, 12, 1), (8, 1, 24, 1), (8, 1, 12, 4)}
    config = AdapterConfig(3, 6.0, ("o", "down"))
    states = {name: random_state(rng, lives[0].base, config) for name in "abc"}
    data = {name: random_data(rng, "ppo") for name in "abc"}
    found = []
    for live in lives:
        for name, state in states.items():
            live.join(name, state)
        works = [TrainRequest(name, data[name], coefs("importance_sampling")) for name in "abc"]
        run(live, works)
        grads = {name: live.read_state(name).parts["grad"] for name in "abc"}
        found.append((grads, [work.logprobs for work in works]))
    # float32 sums over parts
    chex.assert_trees_all_close(found[1][1], found[0][1], rtol=0, atol=4e-5)
    for name in "abc":
        assert_close(found[1][0][name], found[0][0][name])


def fives(n):
    """A datum of n equal tokens."""
    return Datum(np.full(n, 5, np.int32), np.full(n, 5, np.int32), np.ones(n, np.float32))


def test_a_bound_takes_the_largest_step_below_it(rng, live_of):
    live = live_of()
    live.join("a", random_state(rng, live.base, CONFIGS["a"]))
    work = TrainRequest("a", [fives(12)] * 8, coefs("cross_entropy"))
    for shape, seconds in zip(SHAPES, (12e-3, 60e-3, 23e-3)):
        live.times.add(shape, True, seconds)
    assert live.choose([work], None)[0] == SHAPES[1], "the most tokens a second"
    assert live.choose([work], 30e-3)[0] == SHAPES[2]
    assert live.choose([work], 15e-3)[0] == SHAPES[0]
    assert live.choose([work], 1e-9)[0] == SHAPES[0], "the cheapest, where none is cheap enough"
    long = TrainRequest("a", [fives(20)], coefs("cross_entropy"))
    assert live.choose([long], 1e-9)[0] == SHAPES[2]


def test_a_first_step_is_timed_without_its_compilation(rng, live_of, monkeypatch):
    """Otherwise the shape of the first step would look slow, and two policies that fill two of its
    three blocks would use smaller steps.
    """
    single, three = BlockShape(1, 1, 13), BlockShape(3, 2, 13)  # shapes of no other test
    live = live_of(slots={8: 3}, shapes=(single, three))
    for name in "abc":
        live.join(name, random_state(rng, live.base, CONFIGS["a"]))
    data = [fives(13)] * 2
    live.times.add(single, True, 100.0)  # of any machine's steps
    late, now = [0.0], time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: now() + late[0])

    def is_slow(event, duration_secs, **about):
        if event == compiling.EVENT:
            late[0] += 1000.0

    def works(names):
        return [TrainRequest(name, data, coefs("cross_entropy")) for name in names]

    jax.monitoring.register_event_duration_secs_listener(is_slow)
    try:
        assert live.step(works("abc")).shape == three
    finally:
        jax.monitoring.unregister_event_duration_listener(is_slow)
    assert late[0]
    assert live.step(works("ab")).shape == three


@pytest.mark.parametrize("updates", [0, 2])
def test_a_state_survives_the_host_and_a_file_bit_by_bit(updates, rng, live_of, tmp_path):
    live = live_of()
    live.join("b", random_state(rng, live.base, CONFIGS["b"]))
    for _ in range(updates):
        run(live, [TrainRequest("b", random_data(rng, "cross_entropy"), coefs("cross_entropy"))])
        live.optim({"b": random_optimizer(rng)})
    run(live, [TrainRequest("b", random_data(rng, "cross_entropy"), coefs("cross_entropy"))])
    held = live.read_state("b")
    assert set(held.parts) == {"factors", "grad"} | ({"mu", "nu"} if updates else set())
    again = HostState.from_bytes(held.to_bytes(), "it")
    live.replace("b", again)
    live.load(["b"])
    for other in (again, live.read_state("b")):
        assert (other.config, other.steps, other.skipped) == (held.config, updates, 0)
        jax.tree.map(np.testing.assert_array_equal, dict(other.parts), dict(held.parts))
    spilled = SpilledState.write(held, tmp_path / "one")
    data = bytearray(spilled.path.read_bytes())
    data[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
    spilled.path.write_bytes(data)
    with pytest.raises(UserError, match="is damaged: its digest is not"):
        spilled.read()
    with pytest.raises(UserError, match="it is not a training state of mint_jax"):
        HostState.from_bytes(b"12345678{}", "it")


def fresh(live, rank=2, targets=("q",)):
    return host_state.fresh(live.specs, AdapterConfig(rank, targets=targets), 0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda live: live.join("a", fresh(live)), "policy 'a' is in training already"),
        (lambda live: live.leave("x"), "policy 'x' is not in training; policies are a"),
        (lambda live: live.join("x", fresh(live, 9)), "rank 9; this server trains ranks up to 8"),
        (lambda live: live.join("x", fresh(live, 2, ("embed",))), "adapts 'embed'; this"),
        (lambda live: Trainer(live.base, slots={3: 1}), r"slots is \{3: 1\}; expected numbers"),
        (
            lambda live: Trainer(live.base, slots={4: 1}, shapes=SHAPES[3:]),
            "one of them for plain targets",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(call, message, live_of):
    live = live_of()
    live.join("a", fresh(live))
    with pytest.raises(UserError, match=message):
        call(live)


def test_states_stay_in_memory_while_the_disk_refuses_them(rng, live_of, monkeypatch):
    """A full disk fails no step and no policy that joins; once there is space again, states are
    written as before.
    """
    live, states = live_of(host_bytes=0), {}
    with monkeypatch.context() as patch:
        patch.setattr(
            SpilledState,
            "write",
            lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")),
        )
        for name, config in CONFIGS.items():
            states[name] = random_state(rng, live.base, config)
            live.join(name, states[name])
        for name in CONFIGS:
            live.load([name])
        assert live.places() == {"slot": 2, "host": len(CONFIGS) - 2}
        for name, state in states.items():
            assert live.read_state(name).to_bytes() == state.to_bytes()
    live.load(list(CONFIGS)[:1])
    assert live.counts["spills_written"] == 0, "it is not tried at every step"
    monkeypatch.setattr(slots_lib, "SPILL_RETRY_S", 0.0)
    live._spills_from = 0.0
    live.load(list(CONFIGS)[1:2])
    assert live.places() == {"slot": 2, "disk": len(CONFIGS) - 2}
    for name, state in states.items():
        assert live.read_state(name).to_bytes() == state.to_bytes()
