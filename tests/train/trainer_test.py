"""The trainer: names to slots, accumulation over passes, reference log-probabilities, metrics, and
errors by name.
"""

import dataclasses
from collections import defaultdict

import chex
import jax
import numpy as np
import pytest
import torch

from mint_jax.errors import UserError
from mint_jax.lora.tree import AdapterConfig
from mint_jax.train import host_state
from mint_jax.train import step as step_lib
from mint_jax.train.batch import Group, TrainSequence
from mint_jax.train.state import OptimizerConfig
from mint_jax.train.trainer import LossConfig, PolicyConfig, Trainer
from tests import oracles
from tests.adapters import random_adapter
from tests.rollout.score_test import merged, torch_logprobs

torch.set_num_threads(1)  # tiny matrices: more threads only wait for each other

A = PolicyConfig("a", AdapterConfig(3, 6.0, ("q", "down")), loss=LossConfig("ppo"))
B = PolicyConfig("b", AdapterConfig(2, 2.0, ("q",)), loss=LossConfig("cross_entropy"))


def random_group(rng, prompt, lengths, **fields):
    def sequence(n):
        columns = rng.uniform(0.1, 1, n), rng.normal(size=n), -rng.exponential(4, n)
        return TrainSequence(rng.integers(3, 97, n).tolist(), *(x.tolist() for x in columns))

    return Group(rng.integers(3, 97, prompt).tolist(), [sequence(n) for n in lengths], **fields)


def torch_logp(model, prompt, tokens):
    return torch_logprobs(model, [*prompt, *tokens])[len(prompt) - 1 :]


@pytest.fixture
def passes(monkeypatch):
    """The shapes (P, B, T, M) of the batches that reach the device."""
    seen, real = [], step_lib.forward_backward

    def watched(params, state, batch, *args, **kwargs):
        seen.append(batch.shape)
        return real(params, state, batch, *args, **kwargs)

    watched.lower = real.lower
    monkeypatch.setattr(step_lib, "forward_backward", watched)
    return seen


@pytest.mark.long
def test_several_small_passes_add_up_to_one_large_one(rng, tiny_base, passes):
    """``a`` has twice the groups of the others. Two policies a pass, one, and parts of one."""
    base = tiny_base()
    policies = [A, B, dataclasses.replace(A, name="c")]
    adapters = {p.name: random_adapter(rng, base, p.adapter, 1.0) for p in policies}
    groups = {
        name: [random_group(rng, 5, (6, 6)) for _ in range(n)]
        for name, n in {"a": 4, "b": 2, "c": 2}.items()
    }
    results, shapes = {}, {}
    for max_tokens in (16384, 128, 64, 32):
        trainer = Trainer(base, policies, max_tokens)
        for name, adapter in adapters.items():
            trainer.load_adapter(name, adapter)
        totals = trainer.forward_backward(groups)
        sums = jax.tree.map(np.array, {b: s.grad_sum for b, s in trainer.state.items()})
        results[max_tokens] = totals, sums
        shapes[max_tokens] = [shape[:3] for shape in passes]
        passes.clear()
    assert shapes == {
        16384: [(3, 4, 16)],
        128: [(2, 4, 16), (1, 2, 16)],  # b is of a smaller rank, and comes first
        64: [(1, 2, 16), (1, 4, 16), (1, 2, 16)],
        32: [(1, 2, 16)] * 4,
    }
    one, one_sum = results.pop(16384)

    def assert_sums(x, y):  # float32 sums in another order
        assert np.abs(y).max() > 1e-4
        np.testing.assert_allclose(x, y, rtol=0, atol=5e-5 * np.abs(y).max())

    for several, sums in results.values():
        jax.tree.map(assert_sums, sums, one_sum)
        for name in groups:
            assert several[name].keys() == one[name].keys()
            for key, value in one[name].items():  # sums of 48 numbers of size 5
                np.testing.assert_allclose(several[name][key], value, rtol=1e-5, atol=1e-4)


def test_one_seed_gives_one_adapter_by_whichever_door(tiny_base):
    """As a recipe's policy, as one that joins later, and as the service starts one."""
    base, policy = tiny_base(), dataclasses.replace(A, seed=(7 << 40) + 3)
    job, api, service = Trainer(base, [B, policy]), Trainer(base), Trainer(base, slots={8: 1})
    api.add(policy)
    service.join("a", host_state.fresh(service.specs, policy.adapter, policy.seed))
    for trainer in (api, service):
        chex.assert_trees_all_equal(trainer.adapter("a"), job.adapter("a"))
    other = Trainer(base, [dataclasses.replace(policy, seed=8)]).adapter("a")
    assert np.any(other["dense"]["attn"]["q"]["a"] != job.adapter("a")["dense"]["attn"]["q"]["a"])


@pytest.mark.parametrize("reference", ["start", "sft@7"])
def test_dpo_and_kl_compare_with_the_adapter_that_their_reference_names(
    reference, rng, tiny_base, hf_dirs
):
    """Oracle: transformers with the adapters merged. Three policies in one pass, one of them with
    the bare base.
    """
    base, only_q = tiny_base(), AdapterConfig(4, 2.0, ("q",))
    losses = {
        "dpo": LossConfig("dpo", dpo_beta=0.7, reference=reference),
        "kl": LossConfig("ppo", kl_kind="k3", kl=0.1, reference=reference),
        "bare": LossConfig("ppo", kl_kind="k3", kl=0.1, reference="base"),
    }
    how = only_q, OptimizerConfig(1e-2)
    policies = [PolicyConfig(n, *how, one, i) for i, (n, one) in enumerate(losses.items())]
    trainer = Trainer(base, policies)
    started = {name: random_adapter(rng, base, only_q, 1.0) for name in losses}
    for name, adapter in started.items():
        trainer.load_adapter(name, adapter)
    configs = {"dpo": AdapterConfig(3, 6.0, ("q",)), "kl": AdapterConfig(9, 4.0, ("q",))}
    named = {n: (config, random_adapter(rng, base, config, 1.0)) for n, config in configs.items()}
    if reference == "start":
        named = {name: (only_q, started[name]) for name in named}
    else:
        says = "policy 'dpo': its loss refers to 'sft@7', whose adapter was not given"
        with pytest.raises(UserError, match=says):
            trainer.update({"dpo": [random_group(rng, 4, (5, 3), pair_weight=1.0)]})
        for name, (config, adapter) in named.items():
            trainer.refer(name, config, adapter)
    on = hf_dirs("llama"), base.cfg
    models = {name: merged(*on, *adapter) for name, adapter in named.items()}
    models["bare"] = oracles.torch_model(hf_dirs("llama"))
    for step in range(2):  # the reference stands still while the policy moves
        weights = {"dpo": 0.5}
        groups = {
            n: [random_group(rng, 4, (5, 3), pair_weight=weights.get(n, 0.0)) for _ in range(2)]
            for n in losses
        }
        policies = {n: merged(*on, only_q, trainer.adapter(n)) for n in losses}
        got, gains = trainer.update(groups), defaultdict(list)
        for name, model in models.items():
            for prefix, s in ((g.prefix, s) for g in groups[name] for s in g.sequences):
                expected = torch_logp(model, prefix, s.tokens)
                # float32 log-softmax over 97 logits, 3 layers
                np.testing.assert_allclose(s.ref_logp, expected, rtol=0, atol=3e-5)
                gains[name].append(torch_logp(policies[name], prefix, s.tokens) - expected)
        for name in ("kl", "bare"):
            gain = np.concatenate(gains[name])
            k3 = np.mean(np.exp(-gain) + gain - 1)  # of differences of 1e-5
            np.testing.assert_allclose(got[name]["kl"], k3, rtol=1e-3, atol=1e-6)
        sums = [x.sum() for x in gains["dpo"]]
        margins = [0.7 * (sums[2 * i] - sums[2 * i + 1]) for i in range(2)]
        # float32 sums of up to 8 logprobs of about 5
        np.testing.assert_allclose(got["dpo"]["margin"], np.mean(margins), rtol=0, atol=2e-4)
        if reference == "start" and step == 0:
            assert got["kl"]["kl"] < 1e-8
            assert got["bare"]["kl"] > 1e-3
        elif step == 0:
            assert min(abs(m) for m in margins) > 1e-3


@pytest.mark.parametrize(
    ("loss", "lacking", "says"),
    [
        (
            LossConfig("ppo"),
            "advantages",
            "loss 'ppo' needs advantages and old_logp.*sequence 0 has no advantages.*cross_entropy",
        ),
        (LossConfig("reinforce", band_high=2.0), "old_logp", "sequence 0 has no old_logp"),
        (LossConfig("dpo"), "pair_weight", "loss 'dpo' needs pairs of a chosen and a rejected"),
        (LossConfig("cross_entropy"), "", "does not use the pairs"),
    ],
)
def test_data_that_would_train_nothing_is_refused(loss, lacking, says, rng, tiny_base):
    trainer = Trainer(tiny_base(), [dataclasses.replace(B, loss=loss)])
    group = random_group(rng, 3, (3, 3))
    group.pair_weight = (
        0.0 if lacking == "pair_weight" else float(loss.kind in ("dpo", "cross_entropy"))
    )
    if lacking in ("advantages", "old_logp"):
        setattr(group.sequences[0], lacking, None)
    with pytest.raises(UserError, match=says):
        trainer.forward_backward({"b": [group]})


DROPS = dataclasses.replace(A, adapter=AdapterConfig(4, targets=("unembed",)), dropout=0.1)


@pytest.mark.parametrize(
    ("policies", "how", "message"),
    [
        ([A, B, A], {}, r"policy names \['a', 'b', 'a'\] are not distinct: rename one"),
        ([A], {"remat": "some"}, "remat is 'some'; choose one of: none, names, full"),
        ([DROPS], {}, "dropout is 0.1, and targets name unembed; .* drop 'unembed' from targets"),
    ],
    ids=["names", "remat", "target without dropout"],
)
def test_what_cannot_be_trained_is_refused_by_name(policies, how, message, tiny_base):
    with pytest.raises(UserError, match=message):
        Trainer(tiny_base(), policies, **how)
    with pytest.raises(UserError, match=r"dropout is 1\.0; expected 0 or more, and less than 1"):
        dataclasses.replace(A, dropout=1.0)
