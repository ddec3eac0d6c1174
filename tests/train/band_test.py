"""IcePop's band over a sparse-attention base: a trainer whose indexer chooses other keys than the
sampler's did.

DeepSeek-V3.2's choice of keys is discrete, so that a small difference between two engines can move
a probability far. Experts are replayed (R3), so here the indexer alone makes the gap. Ring-1T: a
token whose probability ratio leaves the band is masked.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mint_jax import multihost
from mint_jax import params as params_lib
from mint_jax.lora import tree
from mint_jax.lora.tree import ALL_LINEAR, AdapterConfig
from mint_jax.models import transformer
from mint_jax.rollout.engine import Engine
from mint_jax.rollout.request import Request
from mint_jax.train.batch import Group, TrainSequence
from mint_jax.train.config import LossConfig, PolicyConfig
from mint_jax.train.losses import Targets, policy_loss, stack_coefs
from mint_jax.train.trainer import Trainer
from tests.views import view_of_one

ADAPTER = AdapterConfig(3, 6.0, (ALL_LINEAR,))
LOW, HIGH = 0.85, 1.2
BAND = LossConfig("importance_sampling", band_low=LOW, band_high=HIGH)
OPEN = LossConfig("importance_sampling")
PROMPT, NEW = 13, 9  # every new token chooses 8 of its keys


def other_indexer(base, rng):
    """The same base with noise on its indexers' queries."""
    params = dict(base.params)
    for kind in base.cfg.stacks:
        attn = params[kind]["attn"]
        q = attn["indexer"]["q"]
        noisy = q + jnp.asarray(rng.normal(0, float(jnp.std(q)), q.shape), q.dtype)
        params[kind] = params[kind] | {"attn": attn | {"indexer": attn["indexer"] | {"q": noisy}}}
    return dataclasses.replace(base, params=params)


@functools.partial(jax.jit, static_argnames="cfg")
def _logits(params, adapter, tokens_BT, replay, cfg):
    bound = view_of_one(adapter, ADAPTER.scale)
    positions = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
    return transformer.logits(
        params,
        bound,
        transformer.hidden_states(
            params, bound, transformer.DecoderInputs(tokens_BT, positions, replay=replay), cfg
        )[0],
    )


def logprobs(base, adapter, groups):
    """Float64 ``[sequences, NEW]`` under a base with its own indexer and the sampler's experts."""
    tokens = np.array([[*g.prefix, *s.tokens] for g in groups for s in g.sequences], np.int32)
    replay = np.stack(
        [np.concatenate([g.routes, s.routes]) for g in groups for s in g.sequences]
    ).transpose(2, 0, 1, 3)
    logits = np.asarray(
        _logits(base.params, adapter, tokens[:, :-1], replay, base.cfg), np.float64
    )[:, PROMPT - 1 :]
    logits -= logits.max(-1, keepdims=True)
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return np.take_along_axis(logp, tokens[:, PROMPT:, None], axis=-1)[..., 0]


@pytest.fixture
def case(rng, tiny_base):
    """A trainer of two policies with the same weights, one with a band, on rollouts of a sampler
    with another indexer.
    """
    sampler = tiny_base("deepseek_v32")
    base = other_indexer(sampler, rng)
    policies = [PolicyConfig("band", ADAPTER, loss=BAND), PolicyConfig("open", ADAPTER, loss=OPEN)]
    trainer = Trainer(base, policies)
    draw = lambda spec: rng.normal(0, 0.3 * spec.shape[-1] ** -0.5, spec.shape).astype(np.float32)  # noqa: E731
    adapter = jax.tree.map(draw, tree.adapter_specs(transformer.abstract(base.cfg), ADAPTER))
    for policy in policies:
        trainer.load_adapter(policy.name, adapter)
    engine = Engine(sampler, keep_routes=True)
    for _ in range(20):
        prompt = tuple(int(t) for t in rng.integers(3, 97, PROMPT))
        request = Request(
            prompt, trainer.slots["band"], n=4, max_tokens=NEW, seed=int(rng.integers(1 << 30))
        )
        (completions,) = engine.generate([request], trainer.stacks)
        sequences = [
            TrainSequence(
                c.tokens, [0.1] * NEW, rng.normal(size=NEW).tolist(), c.logprobs, routes=c.routes
            )
            for c in completions
        ]
        groups = [Group(list(prompt), sequences, routes=completions[0].prompt_routes)]
        ratio = np.exp(
            logprobs(base, adapter, groups) - np.array([s.old_logp for s in sequences], np.float64)
        )
        inside = (ratio >= LOW) & (ratio <= HIGH)
        # where float32 could fall on the other side
        off_edges = np.abs(ratio[..., None] - [LOW, HIGH]).min() > 1e-3
        if off_edges and (ratio < LOW).any() and (ratio > HIGH).any() and inside.any():
            same = np.abs(logprobs(sampler, adapter, groups) - [s.old_logp for s in sequences])
            assert same.max() < 1e-4, "with the sampler's indexer there is no gap"
            return trainer, adapter, groups, ratio, inside
    raise AssertionError(
        "no draw has ratios on all sides of the band: does the indexer choose nothing?"
    )


def only(groups, mask):
    """The groups with weight on the tokens of ``mask [sequences, NEW]`` alone."""
    sequences = [
        dataclasses.replace(s, weights=(np.array(s.weights) * m).tolist())
        for s, m in zip(groups[0].sequences, mask, strict=True)
    ]
    return [dataclasses.replace(groups[0], sequences=sequences)]


def gradients(trainer, name):
    """One policy's gradient sum by path."""
    slot, wanted = trainer.slots[name], tree.adapter_specs(trainer.specs, ADAPTER)
    stack = trainer.state[slot.bucket]
    sums = dataclasses.replace(stack.adapters, factors=stack.grad_sum)
    return dict(
        params_lib.leaves_with_path(
            multihost.to_host(tree.read_slot(sums, slot.index, ADAPTER.rank, wanted))
        )
    )


def cleared(trainer):
    for bucket, stack in trainer.state.items():
        trainer.state[bucket] = dataclasses.replace(
            stack, grad_sum=jax.tree.map(jnp.zeros_like, stack.grad_sum)
        )


@pytest.mark.long
def test_tokens_that_an_indexer_moved_out_of_the_band_have_no_gradient_and_are_counted(case):
    trainer, adapter, groups, ratio, inside = case
    advantages, weights = (
        np.array([getattr(s, f) for s in groups[0].sequences]) for f in ("advantages", "weights")
    )
    token_loss = -weights * advantages * ratio

    totals = trainer.forward_backward({"band": groups, "open": groups})
    whole = {name: gradients(trainer, name) for name in totals}
    # float32 log-probabilities of a 3-layer model are 1e-5 off, and a ratio by as much of itself
    close = {"rel": 1e-4, "abs": 1e-4 * np.abs(token_loss).sum()}
    assert totals["band"]["loss"] == pytest.approx(np.where(inside, token_loss, 0.0).sum(), **close)
    assert totals["open"]["loss"] == pytest.approx(token_loss.sum(), **close)
    assert totals["band"]["masked_sum"] == (~inside).sum()
    assert "masked_sum" not in totals["open"], "it has no band"
    for name in totals:
        assert totals[name]["tokens"] == inside.size
        assert totals[name]["gap_sum"] == pytest.approx(np.abs(np.log(ratio)).sum(), rel=1e-3)
        assert totals[name]["max_gap"] == pytest.approx(np.abs(np.log(ratio)).max(), rel=1e-3)

    parts = {}
    for part, mask in (("inside", inside), ("outside", ~inside)):
        cleared(trainer)
        sums = trainer.forward_backward({name: only(groups, mask) for name in totals})
        assert sums["band"]["masked_sum"] == (0 if part == "inside" else mask.sum())
        parts[part] = {name: gradients(trainer, name) for name in totals}
    for path, all_open in whole["open"].items():
        scale = np.abs(all_open).max()
        assert scale > 0
        assert not np.any(parts["outside"]["band"][path]), (
            f"{path}: exactly nothing comes from outside the band"
        )
        outside, inner = (parts[part]["open"][path] for part in ("outside", "inside"))
        assert np.abs(outside).max() > 1e-3 * scale, (
            f"{path}: without the band these tokens do contribute"
        )
        # gradients are sums over tokens: float32, added in another order
        np.testing.assert_allclose(
            outside + inner,
            all_open,
            rtol=0,
            atol=1e-4 * max(scale, np.abs(outside).max()),
            err_msg=path,
        )
        for ours in (whole["band"], parts["inside"]["band"]):
            np.testing.assert_allclose(
                ours[path], inner, rtol=0, atol=1e-4 * max(scale, np.abs(inner).max()), err_msg=path
            )

    # All that is summed now is of tokens outside: the policy with a band stands still.
    metrics = trainer.optim_step(["band", "open"])
    assert metrics["band"]["grad_norm"] == 0.0
    assert metrics["open"]["grad_norm"] > 0.0
    after = {name: dict(params_lib.leaves_with_path(trainer.adapter(name))) for name in metrics}
    for path, leaf in params_lib.leaves_with_path(adapter):
        np.testing.assert_array_equal(after["band"][path], leaf)
        assert (after["open"][path] != leaf).any()


@pytest.mark.long
def test_the_loss_of_each_token_and_its_gradient_are_those_of_float64(case):
    _, _, groups, ratio, inside = case
    advantages, old, weights = (
        np.array([getattr(s, f) for s in groups[0].sequences])
        for f in ("advantages", "old_logp", "weights")
    )
    logp = np.float32(old + np.log(ratio))
    targets = Targets(
        *(np.float32(x) for x in (weights, advantages, old, old)),
        np.zeros(old.shape, np.int32),
        np.zeros(0, np.float32),
    )
    for loss, kept in ((BAND, inside), (OPEN, np.ones_like(inside))):
        coefs = jax.tree.map(lambda x: x[0], stack_coefs([loss]))
        (value, metrics), grad = jax.value_and_grad(policy_loss, has_aux=True)(logp, targets, coefs)
        # also its own derivative: d ratio / d logp = ratio
        want = np.where(kept, -weights * advantages * ratio, 0.0)
        # float32 of logp - old
        np.testing.assert_allclose(value, want.sum(), rtol=0, atol=1e-5 * np.abs(want).sum())
        np.testing.assert_allclose(grad, want, rtol=2e-5, atol=0)
        np.testing.assert_array_equal(np.asarray(grad)[~kept], 0.0)
        assert metrics["masked_sum"] == (~kept).sum()
