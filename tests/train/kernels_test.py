"""The model on its kernels, interpreted: logits, updates and samples as by XLA, whatever a
neighbour does.
"""

import dataclasses

import jax
import numpy as np
import pytest

from mint_jax.lora.tree import ALL_LINEAR, AdapterConfig
from mint_jax.models.config import Kernels
from mint_jax.rollout.engine import Engine
from mint_jax.rollout.request import Request
from mint_jax.rollout.score import Scorer
from mint_jax.train.state import OptimizerConfig
from mint_jax.train.trainer import LossConfig, PolicyConfig, Trainer
from pallas_kernels import grouped_matmul, packed_lora, packed_matmul
from tests.groups import random_groups
from tests.laws.isolation_test import EXTREMES, PAIR, Company

FAMILIES = ("qwen3_moe_wide", "deepseek_v3_wide")
EXPERTS = ("gate", "up", "down")
OPS = tuple(field.name for field in dataclasses.fields(Kernels))

FORMS = {
    "xla": Kernels(**dict.fromkeys(OPS, "xla")),
    "pallas_tpu": Kernels("pallas_tpu", "xla", packed_attention="pallas_tpu"),
    "pallas_gpu": Kernels("pallas_gpu", "pallas_gpu", packed_attention="pallas_gpu"),
    "one pass": Kernels("xla", "xla", packed_attention="xla", packed_matmul="pallas_tpu"),
}
CALLS = {
    "xla": set(),
    "pallas_tpu": {("pallas_tpu", "ADD"), ("pallas_tpu", "BACKWARD")},
    "pallas_gpu": {("pallas_gpu", "ADD"), ("pallas_gpu", "BACKWARD"), ("pallas_gpu", "GROUPED")},
    "one pass": {("pallas_tpu", "MATMUL")},
}


def on(base, form: str):
    kernels = FORMS[form]
    # a tiny latent's heads have widths that it does not serve
    if base.cfg.latent is not None and form == "pallas_tpu":
        kernels = dataclasses.replace(kernels, packed_attention="xla")
    return dataclasses.replace(base, cfg=base.cfg.replace(kernels=kernels))


@pytest.fixture
def calls(monkeypatch):
    """Which kernels were asked for, ``{(name, of what)}``."""
    taken = set()

    def counted(what, table):
        def one_of(one):
            def call(*args, **how):
                taken.add((one.name, what))
                return one.call(*args, **how)

            return one._replace(call=call) if one.platform else one

        return tuple(one_of(one) for one in table)

    tables = [(packed_lora, "ADD"), (packed_lora, "BACKWARD"), (packed_matmul, "MATMUL")]
    for op, table in (*tables, (grouped_matmul, "GROUPED")):
        monkeypatch.setattr(op, table, counted(table, getattr(op, table)))
    jax.clear_caches()
    yield taken
    jax.clear_caches()


CASES = [(family, form) for form in ("pallas_tpu", "one pass", "pallas_gpu") for family in FAMILIES]


@pytest.mark.long
@pytest.mark.parametrize(("family", "kernels"), CASES)
def test_updates_and_scores_are_those_of_xla(family, kernels, tiny_base, rng, calls):
    """SFT and GRPO, two ranks in a batch, an adapter on the experts alone and one everywhere."""
    base = tiny_base(family)
    rate, kl = OptimizerConfig(1e-2), LossConfig("ppo", kl_kind="k3", kl=0.1)
    sampling = LossConfig("importance_sampling")
    policies = [
        PolicyConfig("sft", AdapterConfig(2, targets=EXPERTS), rate, LossConfig("cross_entropy")),
        PolicyConfig("grpo", AdapterConfig(2, targets=(ALL_LINEAR,)), rate, kl),
        PolicyConfig("wide", AdapterConfig(8, targets=EXPERTS), rate, sampling),
    ]
    groups = {p.name: random_groups(rng, base.cfg.vocab_size, prompts=1) for p in policies}
    texts = rng.integers(3, base.cfg.vocab_size, (len(policies), 13)).tolist()
    made, start = {}, None
    for form in ("xla", kernels):
        calls.clear()
        trainer = Trainer(on(base, form), policies)
        state = jax.tree.map(np.array, trainer.state)
        if start is None:  # B is zero at first, and its product would tell nothing
            factors = {b: one.adapters.factors for b, one in state.items()}
            moved = lambda x: x + 0.05 * rng.normal(size=x.shape).astype(x.dtype)  # noqa: E731
            start = jax.tree.map(moved, factors)
        new = {
            b: s.replace(adapters=s.adapters.replace(factors=start[b])) for b, s in state.items()
        }
        trainer.state = dict(jax.device_put(new, jax.tree.map(lambda x: x.sharding, trainer.state)))
        metrics = trainer.forward_backward(groups)
        # before Adam, whose first step divides each gradient by its own size
        sums = jax.tree.map(np.array, trainer.state)
        trainer.optim_step(list(groups))
        scores = Scorer(trainer.base).logprobs(texts, list(trainer.slots.values()), trainer.stacks)
        made[form] = jax.tree.map(np.array, (metrics, sums, [np.array(s) for s in scores]))
        assert calls == CALLS[form]
    # float32 and other orders of sums; the scores are of after a step.
    for x, y in zip(jax.tree.leaves(made["xla"]), jax.tree.leaves(made[kernels]), strict=True):
        if np.issubdtype(np.asarray(x).dtype, np.number):
            np.testing.assert_allclose(y, x, atol=2e-4, rtol=2e-3)


SAMPLED = {
    ("qwen3_moe_wide", "pallas_gpu"): (EXPERTS, FORMS["pallas_gpu"]),
    ("qwen3_wide", "pallas_tpu"): (("q", "down"), {"slot_lora": "pallas_tpu"}),
    ("qwen3_wide", "pallas_gpu"): (("q", "down"), {"slot_lora": "pallas_gpu"}),
}


@pytest.mark.long
@pytest.mark.parametrize("case", SAMPLED, ids=" ".join)
def test_the_engine_draws_the_same_tokens(case, tiny_base, rng):
    base, (targets, kernels) = tiny_base(case[0]), SAMPLED[case]
    if isinstance(kernels, dict):
        kernels = dataclasses.replace(FORMS["xla"], **kernels)
    ranks = {"a": 4, "b": 4, "c": 8}.items()
    trainer = Trainer(base, [PolicyConfig(n, AdapterConfig(r, targets=targets)) for n, r in ranks])
    moved = lambda x: x + 0.3 * rng.normal(size=x.shape).astype(x.dtype) if x.ndim > 3 else x  # noqa: E731
    stacks = jax.tree.map(moved, trainer.stacks)
    prompts = [tuple(rng.integers(3, base.cfg.vocab_size, n).tolist()) for n in (3, 40)]
    requests = [
        Request(prompt, slot, max_tokens=5, temperature=0.0)
        for prompt in prompts
        for slot in (*trainer.slots.values(), None)
    ]
    drawn = []
    for one in (FORMS["xla"], kernels):
        on_kernels = dataclasses.replace(base, cfg=base.cfg.replace(kernels=one))
        drawn.append([c for [c] in Engine(on_kernels, max_rows=8).generate(requests, stacks)])
    for mine, theirs in zip(*drawn, strict=True):
        assert mine.tokens == theirs.tokens
        # float32, other orders of sums
        np.testing.assert_allclose(mine.logprobs, theirs.logprobs, atol=1e-4)
    assert drawn[0][0].tokens != drawn[0][3].tokens or drawn[0][4].tokens != drawn[0][7].tokens, (
        "the adapter says something"
    )


@pytest.mark.long
@pytest.mark.bits
def test_whatever_a_policy_does_its_neighbours_in_a_gpus_kernels_keep_their_bits(tiny_base, rng):
    """Tiles begin where groups begin: it does not matter where a neighbour's routes lead."""
    Company(on(tiny_base("qwen3_moe"), "pallas_gpu"), rng, PAIR).check(EXTREMES)
