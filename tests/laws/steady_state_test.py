"""Law 11: once the buckets of shapes are warm, training, sampling, scoring and exporting compile
nothing, whatever the lengths.
"""

import chex
import jax
import numpy as np
import pytest

from mint_jax.catalog.packed import Schema, pack
from mint_jax.compiling import compilations
from mint_jax.lora.tree import AdapterConfig
from mint_jax.rollout import device, score
from mint_jax.rollout.engine import Engine
from mint_jax.rollout.request import Request
from mint_jax.rollout.score import Scorer
from mint_jax.train import host_state, step
from mint_jax.train.batch import Group, TrainSequence
from mint_jax.train.blocks import Datum, TrainRequest
from mint_jax.train.config import BlockShape, OptimizerConfig
from mint_jax.train.programs import warm
from mint_jax.train.trainer import LossConfig, PolicyConfig, Trainer
from tests.groups import random_groups
from tests.train.live_test import coefs

RANKS = {"a": 3, "b": 3, "c": 1}


def trainer_of(tiny_base, loss=LossConfig(), drops=""):
    base = tiny_base("llama")
    policies = [
        PolicyConfig(n, AdapterConfig(r), loss=loss, seed=i, dropout=0.2 * (n == drops))
        for i, (n, r) in enumerate(RANKS.items())
    ]
    return base, Trainer(base, policies)


def grpo_step(trainer, engine, scorer, rng, lengths) -> None:
    """Each policy samples two prompts, two rollouts each; all is scored and updated; then all are
    exported.

    Args:
        lengths: draws the tokens of a prompt and how many are sampled.
    """
    vocab = trainer.base.cfg.vocab_size
    requests, owners = [], []
    for name in 2 * list(RANKS):
        # one of a policy's two has full length, so the buckets stay
        prompt, new = lengths() if name in owners else (12, 10)
        how = {"seed": int(rng.integers(2**31)), "temperature": float(rng.uniform(0.5, 1.5))}
        text = tuple(rng.integers(3, vocab, prompt).tolist())
        requests.append(Request(text, trainer.slots[name], n=2, max_tokens=new, **how))
        owners.append(name)
    groups = {name: [] for name in RANKS}
    sampled = engine.generate(requests, trainer.stacks)
    for name, request, completions in zip(owners, requests, sampled):
        sizes = [(c, len(c.tokens)) for c in completions]
        sequences = [
            TrainSequence(c.tokens, [0.1] * n, [rng.normal()] * n, c.logprobs) for c, n in sizes
        ]
        groups[name].append(Group(list(request.prompt), sequences))
    scorer.logprobs([r.prompt for r in requests], [r.adapter for r in requests], trainer.stacks)
    trainer.update(groups)
    for name in RANKS:
        schema = Schema(trainer.base.fingerprint, trainer.policies[name].adapter)
        pack(trainer.adapter(name), schema)


# What the model's programs are traced through -> how often: by training and the base's score; by
# decoding at each of two numbers of rows, and by the scores of prompts; by scoring.
ONCE_A_PROGRAM = {(step, "batch_logprobs"): 2, (device, "sample"): 3}
ONCE_A_PROGRAM[score, "logprobs_and_entropy"] = 1


@pytest.fixture
def traced_once(monkeypatch):
    """A program that is traced a second time is an error, with what of it was traced."""
    chex.clear_trace_counter()
    jax.clear_caches()
    for (module, name), times in ONCE_A_PROGRAM.items():
        monkeypatch.setattr(module, name, chex.assert_max_traces(getattr(module, name), times))


@pytest.mark.usefixtures("traced_once")
def test_steady_state_compiles_nothing(tiny_base, rng):
    # the base's logprobs are needed, too
    base, trainer = trainer_of(tiny_base, loss=LossConfig(kl_kind="k3", kl=0.1))
    engine = Engine(base, rows=(8, 32))
    engine.warm(trainer.stacks)
    parts = trainer, engine, Scorer(base), rng
    with compilations() as seen:
        grpo_step(*parts, lambda: (12, 10))
        assert len(seen) > 5, "the listener hears compilations"
        warm = len(seen)
        for _ in range(6):
            grpo_step(*parts, lambda: (int(rng.integers(2, 13)), int(rng.integers(1, 11))))
        assert seen[warm:] == []


@pytest.mark.long
def test_a_changing_subset_of_policies_compiles_each_subset_once(tiny_base, rng):
    base, trainer = trainer_of(tiny_base, drops="b")

    def update(names):
        trainer.update({n: random_groups(rng, base.cfg.vocab_size, 2, (6,)) for n in names})

    update(["a"])
    update(["a", "c"])
    with compilations() as seen:
        # another slot of the same bucket is the same program
        for names in (["b"], ["c", "b"], ["a"], ["b", "c"], ["c", "a"]):
            update(names)
    assert seen == []
    assert np.array_equal(trainer.state[4].steps, [4, 3])


@pytest.mark.long
def test_sampling_with_routes_and_training_that_replays_them_compile_nothing(tiny_base, rng):
    base = tiny_base("qwen3_moe")
    engine = Engine(base, rows=(8,), keep_routes=True, cache_bytes=1 << 20)
    live = Trainer(base, slots={4: 1}, shapes=[BlockShape(1, 1, 32)])
    engine.warm()
    warm(live)
    live.join("a", host_state.fresh(live.specs, AdapterConfig(3, 6.0, ("q", "v")), 0))
    with compilations() as seen:
        [[drawn]] = engine.generate([Request(tuple(rng.integers(3, 97, 9).tolist()), max_tokens=8)])
        routes = np.concatenate([drawn.prompt_routes, drawn.routes])
        tokens, ones = rng.integers(3, 97, len(routes)).astype(np.int32), np.ones(len(routes))
        data = [Datum(tokens, tokens, np.float32(ones), routes=routes.astype(np.int16))]
        for backward in (True, False):
            work = TrainRequest("a", data, coefs("cross_entropy"), backward)
            live.step([work])
            assert not work.left
        live.optim({"a": OptimizerConfig(1e-3)})
    assert seen == []
