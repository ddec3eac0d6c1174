"""Policy gradients at a temperature: the mean over every possible completion is the gradient of the
expected reward itself.

The base has six tokens, so that all completions of three tokens can be listed, with the end of
sequence or without. Each is put into the update with its probability as a factor of its reward; the
oracle differentiates sum p(y) r(y) in torch, float64.
"""

import itertools

import numpy as np
import pytest
import torch

from mint_jax import params as params_lib
from mint_jax.harness.options import GrpoSampling
from mint_jax.lora.tree import AdapterConfig
from mint_jax.recipes.grpo import rollout_groups
from mint_jax.recipes.rollouts import Rollout
from mint_jax.rollout.engine import Engine
from mint_jax.rollout.request import Completion, Request
from mint_jax.train.trainer import LossConfig, PolicyConfig, Trainer
from tests import oracles
from tests.adapters import random_adapter
from tests.train.torch_lora import TorchPolicy

VOCAB, END, LENGTH = 6, 2, 3
PROMPT = [1, 4, 3]
ADAPTER = AdapterConfig(2, 3.0, ("q", "down"))


def completions():
    """Every sequence that can be drawn: up to LENGTH tokens, none after the end."""
    out = [list(y) for n in range(1, LENGTH + 1) for y in itertools.product(range(VOCAB), repeat=n)]
    return [y for y in out if END not in y[:-1] and (len(y) == LENGTH or y[-1] == END)]


def logprobs(oracle, rows, temperature):
    """``[rows, LENGTH]``, of tokens after the prompt, with gradients; rows are padded."""
    tokens = torch.tensor([PROMPT + y + [0] * (LENGTH - len(y)) for y in rows])
    logp = torch.log_softmax(oracle.logits(tokens)[:, len(PROMPT) - 1 : -1] / temperature, -1)
    logp = logp.gather(-1, tokens[:, len(PROMPT) :, None])[..., 0]
    return logp * torch.tensor([[i < len(y) for i in range(LENGTH)] for y in rows])


@pytest.fixture
def case(monkeypatch, rng, tiny_base, hf_dirs):
    """A base of six tokens, a random adapter, and the oracle of both."""
    name, changes = oracles.TINY["llama"]
    changes = changes | {"vocab_size": VOCAB, "num_hidden_layers": 2}
    monkeypatch.setitem(oracles.TINY, "six_tokens", (name, changes))
    base = tiny_base("six_tokens")
    adapter = random_adapter(rng, base, ADAPTER, 0.7)
    model = oracles.torch_model(hf_dirs("six_tokens"), torch.float64).requires_grad_(False)
    return base, adapter, TorchPolicy(model, params_lib.leaves_with_path(adapter), ADAPTER.scale)


def cosine(a, b):
    a, b = (np.concatenate([np.float64(x[path]).ravel() for path in sorted(x)]) for x in (a, b))
    return a @ b / np.sqrt((a @ a) * (b @ b)), np.sqrt((a @ a) / (b @ b))


@pytest.mark.parametrize("baseline", [False, True], ids=["no baseline", "baseline"])
@pytest.mark.parametrize("temperature", [0.3, 0.6, 1.0])
def test_the_mean_gradient_is_that_of_the_expected_reward(temperature, baseline, case, rng):
    base, adapter, oracle = case
    rows = completions()
    rewards = torch.tensor(rng.normal(1.0, 1.0, len(rows)))
    logp = logprobs(oracle, rows, temperature)
    p = torch.exp(logp.sum(-1))
    assert float(p.detach().sum()) == pytest.approx(1.0, abs=1e-6), "these are all completions"
    expected = (p * rewards).sum()
    expected.backward()
    truth = {path: x.grad.numpy() for path, x in oracle.factors.items()}

    drawn, chance = logp.detach().numpy(), p.detach().numpy()
    made = [
        Completion(y, [0.0] * len(y), drawn[i, : len(y)].tolist(), "stop", None)
        for i, y in enumerate(rows)
    ]
    weighted = chance * (rewards.numpy() - (float(expected.detach()) if baseline else 0.0))
    drawn = {"group_size": len(rows), "max_tokens": LENGTH, "temperature": temperature}
    sampling = GrpoSampling(**drawn, baseline="none", normalisation="sum")
    groups = rollout_groups(sampling, Rollout([], [PROMPT], [made], []), weighted[None])
    for kind in ("ppo", "reinforce", "importance_sampling", "cispo", "gspo"):
        trainer = Trainer(base, [PolicyConfig("p", ADAPTER, loss=LossConfig(kind))])
        trainer.load_adapter("p", adapter)
        totals = trainer.forward_backward({"p": groups})["p"]
        found = dict(params_lib.leaves_with_path(trainer.gradient("p")))
        alike, size = cosine(found, {path: -g for path, g in truth.items()})
        assert alike >= 0.9999, kind
        assert size == pytest.approx(1.0, abs=2e-3), kind  # float32 through two layers
        # float32 against float64; at another temperature it would be about 1
        assert totals["max_gap"] < 1e-4


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_the_trainer_sees_what_the_engine_drew(temperature, case, rng):
    base, adapter, _ = case
    trainer = Trainer(base, [PolicyConfig("p", ADAPTER, loss=LossConfig("ppo"))])
    trainer.load_adapter("p", adapter)
    how = {"max_tokens": 6, "temperature": temperature, "seed": int(rng.integers(1 << 30))}
    request = Request(tuple(PROMPT), trainer.slots["p"], n=8, **how)
    (made,) = Engine(base).generate([request], trainer.stacks)
    sampling = GrpoSampling(group_size=8, max_tokens=6, temperature=temperature)
    groups = rollout_groups(sampling, Rollout([], [PROMPT], [made], []), rng.normal(size=(1, 8)))
    # float32, prefill and decode against one pass
    assert trainer.update({"p": groups})["p"]["max_gap"] < 1e-4
