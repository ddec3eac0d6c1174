"""The multi-policy step against torch: full GRPO steps in float64, and learning rates."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from mint_jax import params as params_lib
from mint_jax.lora import tree
from mint_jax.lora.dropout import Dropout, numbers
from mint_jax.lora.tree import AdapterConfig
from mint_jax.models import transformer
from mint_jax.train import state as state_lib
from mint_jax.train.advantages import group_advantages, token_weights
from mint_jax.train.batch import Group, TrainSequence, data_of
from mint_jax.train.state import OptimizerConfig
from mint_jax.train.step import scheduled_rate
from mint_jax.train.trainer import LossConfig, PolicyConfig, Trainer
from tests import oracles
from tests.adapters import random_adapter
from tests.train.torch_lora import TorchPolicy, token_losses

# prompt, rollouts: fixed, so that few programs are compiled
LENGTHS = [(4, (5, 3, 6)), (6, (4, 7, 2))]


class Reference(TorchPolicy):
    """One policy in torch float64: the loss by hand, clip_grad_norm_, torch.optim.AdamW or dimuon
    by singular values.

    transformers does norms and softmax in float32 even then: about 1e-7 of noise.
    """

    def __init__(self, model, policy, adapter):
        super().__init__(model, params_lib.leaves_with_path(adapter), policy.adapter.scale)
        self.loss, self.opt = policy.loss, policy.optimizer
        self.masks = {}  # of adapters' inputs, by sequence
        self.first = {}  # log-probabilities before the first update, by sequence
        opt, of = policy.optimizer, self.factors.items()
        groups = [{"params": [x for path, x in of if path[-1] == f]} for f in "ab"]
        how = {"betas": (opt.b1, opt.b2), "eps": opt.eps, "weight_decay": opt.weight_decay}
        self.adamw = torch.optim.AdamW(groups, opt.learning_rate, **how)

    def step(self, rollouts):
        """One update; returns the loss, the norm before clipping, the gradients, and how near a
        ratio came to an edge.
        """
        c, total, nearest = self.loss, torch.zeros((), dtype=torch.float64), math.inf
        for prompt, s in rollouts:
            logp = self.logp(prompt, s.tokens, masks=self.masks.get(id(s)))
            old = torch.tensor(s.old_logp, dtype=torch.float64)
            ref = self.logp(prompt, s.tokens, bare=True).detach()
            advantage, weight = (
                torch.tensor(x, dtype=torch.float64) for x in (s.advantages, s.weights)
            )
            first = self.first.setdefault(id(s), logp.detach())
            ratio, gap = torch.exp(logp - first), torch.exp(first - old)
            clip, band = (1 - c.low, 1 + c.clip_high), (c.band_low, c.band_high)
            if c.kl_kind == "k1":
                advantage = advantage - c.kl * (logp - ref).detach()
            loss = token_losses(logp, first, old, advantage, *clip)[c.kind]
            if c.kl_kind == "k3":
                loss = loss + c.kl * (torch.exp(ref - logp) - (ref - logp) - 1)
            outside = (gap < c.band_low) | (gap > c.band_high)
            total = total + (weight * torch.where(outside, 0.0, loss)).sum()
            for value, edges in ((ratio, clip), (gap, band)):
                off = (value.detach()[:, None] - torch.tensor(edges)).abs().min()
                nearest = min(nearest, float(off))
        self.adamw.zero_grad()
        total.backward()
        grads = {path: x.grad.numpy().copy() for path, x in self.factors.items()}
        clip = self.opt.max_grad_norm or math.inf
        norm = torch.nn.utils.clip_grad_norm_(self.factors.values(), clip)
        self.adamw.step() if self.opt.kind == "adamw" else self.dimuon()
        return float(total.detach()), float(norm), grads, nearest

    def dimuon(self):
        for group in self.adamw.param_groups:
            for x in group["params"]:
                m = self.first.setdefault(x, torch.zeros_like(x))
                m.mul_(self.opt.b1).add_(x.grad, alpha=1 - self.opt.b1)
                sums = [m.square().sum(i, keepdim=True) for i in (-1, -2)]
                one, two = (y / y.amax((-1, -2), keepdim=True) + self.opt.eps for y in sums)
                u, _, v = torch.linalg.svd(m * (one * two) ** -0.25, full_matrices=False)
                x.data -= group["lr"] * (u @ v + self.opt.weight_decay * x.data)


def masks_of(policy, groups, update):
    """Factors of adapters' inputs by sequence, whose row has the prefix's numbers and its own."""

    def mask(dropout, path, layer, D):
        stack, *names = path.split("/")
        dropout = dropout.below(stack).fold(layer)
        for name in names:
            dropout = dropout.below(name)
        return torch.tensor(np.array(dropout.keeps(D))[0, 0] / (1 - policy.dropout))

    out = {}
    for i, datum in enumerate(data_of(groups)):
        drawn, own = numbers(policy.seed, i, datum.tokens), datum.layout.own
        for k, s in enumerate(groups[i].sequences):
            row = np.concatenate([drawn[own == 1], drawn[own == 2 + k]])
            dropout = Dropout(np.float32([policy.dropout]), row[None, None]).fold(update)
            out[id(s)] = functools.partial(mask, dropout)
    return out


def random_groups(rng, reference, normalisation):
    """Random rollouts with group advantages, drawn by a sampler whose log-probabilities are about
    0.3 off.
    """
    lengths = [n for _, lengths in LENGTHS for n in lengths]
    groups, weights = [], token_weights(lengths, normalisation, max_tokens=7)
    for prompt_length, lengths in LENGTHS:
        prompt = rng.integers(3, 97, prompt_length).tolist()
        advantages = group_advantages(rng.normal(size=(1, 3)))[0]
        made = []
        for n, advantage in zip(lengths, advantages):
            tokens = rng.integers(3, 97, n).tolist()
            with torch.no_grad():
                old_logp = reference.logp(prompt, tokens).numpy() + rng.normal(0, 0.3, n)
            columns = [weights.pop(0)] * n, [float(advantage)] * n, np.float32(old_logp).tolist()
            made.append(TrainSequence(tokens, *columns))
        groups.append(Group(prompt, made))
    return groups


# of AdamW: well above float32 noise in gradients, so that an entry near zero does not turn noise
# into a whole step
EPS = 1e-5
FIRST = PolicyConfig(
    "first",
    AdapterConfig(3, 6.0, tree.LINEAR_TARGETS),
    OptimizerConfig(5e-3, eps=EPS, weight_decay=0.1, max_grad_norm=0.05, warmup_steps=2),
    LossConfig("ppo", clip_low=0.2, clip_high=0.28, kl_kind="k3", kl=0.2, reference="base"),
)
SECOND = PolicyConfig(
    "second",
    AdapterConfig(8, 8.0, ("q", "down", "embed", "unembed"), rslora=True),
    OptimizerConfig(1e-3, b1=0.8, b2=0.95, eps=EPS, max_grad_norm=0.0, b_ratio=2.0),
    LossConfig(
        "cispo", 0.3, 0.5, kl_kind="k1", kl=0.1, band_low=0.6, band_high=1.6, reference="base"
    ),
)
OTHER_LOSSES = (
    LossConfig("importance_sampling", kl_kind="k1", kl=0.3, reference="base"),
    LossConfig("reinforce", kl_kind="k3", kl=0.1, band_low=0.5, reference="base"),
)


DIMUON = OptimizerConfig(1e-2, 0.7, eps=1e-3, kind="dimuon", weight_decay=0.1, b_ratio=2.0)
MUON_TWO = dataclasses.replace(FIRST, optimizer=DIMUON), SECOND
DROPPED_TWO = dataclasses.replace(FIRST, dropout=0.3, seed=1 << 40), SECOND
OTHER_TWO = tuple(
    dataclasses.replace(p, loss=loss) for p, loss in zip((FIRST, SECOND), OTHER_LOSSES)
)


@pytest.mark.parametrize(
    "policies",
    [
        pytest.param((FIRST, SECOND), id="ppo_k3_and_cispo_k1_band"),
        pytest.param(MUON_TWO, id="dimuon", marks=pytest.mark.long),
        pytest.param(DROPPED_TWO, id="dropout", marks=pytest.mark.long),
        pytest.param(OTHER_TWO, id="importance_sampling_k1_and_reinforce_k3"),
    ],
)
def test_three_grpo_steps_of_two_policies_match_torch_in_float64(policies, rng, tiny_base, hf_dirs):
    base = tiny_base("llama_bias")
    model = oracles.torch_model(hf_dirs("llama_bias"), torch.float64).requires_grad_(False)
    specs = transformer.abstract(base.cfg)
    adapters = {p.name: random_adapter(rng, specs, p.adapter) for p in policies}
    groups, expected = {}, {}
    for p, normalisation in zip(policies, ("sequence", "token")):
        nearest = 0.0
        # a ratio this near to an edge could fall on its other side in float32: draw again
        while nearest < 1e-5:
            reference = Reference(model, p, adapters[p.name])
            groups[p.name] = random_groups(rng, reference, normalisation)
            rollouts = [(g.prefix, s) for g in groups[p.name] for s in g.sequences]
            expected[p.name], nearest = [], math.inf
            for step in range(3):
                warm = min(1.0, (step + 1) / max(1, p.optimizer.warmup_steps))
                for group, ratio in zip(reference.adamw.param_groups, (1, p.optimizer.b_ratio)):
                    group["lr"] = p.optimizer.learning_rate * warm * ratio
                reference.masks = masks_of(p, groups[p.name], step) if p.dropout else {}
                loss, norm, grads, gap = reference.step(rollouts)
                after = {path: x.detach().numpy().copy() for path, x in reference.factors.items()}
                expected[p.name].append((loss, norm, grads, after))
                nearest = min(nearest, gap)

    # not in the order of their slots
    trainer, names = Trainer(base, policies), [p.name for p in policies[::-1]]
    for name, adapter in adapters.items():
        trainer.load_adapter(name, adapter)
    for step in range(3):
        totals = trainer.forward_backward({name: groups[name] for name in names})
        sums = {n: dict(params_lib.leaves_with_path(trainer.gradient(n))) for n in names}
        metrics = trainer.optim_step(names)
        for p in policies:
            loss, norm, grads, after = expected[p.name][step]
            # Tolerances: float32 against float64 through 3 layers; losses are sums of 27 terms up
            # to about 5 of either sign.
            np.testing.assert_allclose(totals[p.name]["loss"], loss, rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(metrics[p.name]["grad_norm"], norm, rtol=2e-5)
            for path, grad in grads.items():
                np.testing.assert_allclose(
                    sums[p.name][path], grad, rtol=0, atol=1e-4 * np.abs(grad).max(), err_msg=path
                )
            ours = dict(params_lib.leaves_with_path(trainer.adapter(p.name)))
            # A gradient error e moves an AdamW step by at most lr e / eps, with e about 1e-8 after
            # clipping: 2 % of lr is ample.
            moved = [np.abs(ours[path] - x).max() for path, x in after.items()]
            assert max(moved) < 0.02 * p.optimizer.learning_rate, f"{p.name} step {step}"
    for p in policies:  # the rank padding of first's bucket is still zero
        room = trainer.state[p.adapter.bucket]
        for leaf in jax.tree.leaves((room.adapters.factors, room.mu, room.nu, room.grad_sum)):
            assert leaf.ndim < 3 or not np.any(leaf[:, :, p.adapter.rank :])


def expected_rate(opt, updates):
    """transformers' schedule; its warm-up begins one update earlier with a rate of zero, ours with
    the first step up.
    """
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=opt.learning_rate)
    # theirs rises again after the end
    at = updates + 1 if updates < opt.warmup_steps else min(updates, opt.total_steps)
    steps = (opt.warmup_steps, opt.total_steps)[: 1 if opt.schedule == "constant" else 2]
    make = getattr(transformers, f"get_{opt.schedule}_schedule_with_warmup")
    fraction = make(optimizer, *steps).lr_lambdas[0](at)
    falls = opt.schedule != "constant" and updates >= opt.warmup_steps
    floor = opt.final_fraction if falls else 0.0
    return opt.learning_rate * (floor + (1 - floor) * fraction)


@pytest.mark.parametrize("final_fraction", [0.0, 0.25])
@pytest.mark.parametrize("warmup_steps", [0, 1, 4])
@pytest.mark.parametrize("schedule", state_lib.SCHEDULES)
def test_learning_rates_are_those_of_transformers(schedule, warmup_steps, final_fraction):
    how = {"warmup_steps": warmup_steps, "total_steps": 13, "final_fraction": final_fraction}
    opt = OptimizerConfig(3e-3, schedule=schedule, **how)
    steps = jnp.arange(20, dtype=jnp.int32)
    hyper = state_lib.stack_hyper([opt] * 20, 20)
    expected = [expected_rate(opt, step) for step in range(20)]
    # float32, a cosine near zero
    np.testing.assert_allclose(scheduled_rate(hyper, steps), expected, rtol=2e-6, atol=1e-9)
    assert max(expected) == 3e-3
