"""Law 8: the sampler's log-probabilities are those of the scorer and of the trainer, for adapters
of mixed rank in one batch.
"""

import jax
import numpy as np
import pytest

from mint_jax.lora import tree as lora_tree
from mint_jax.lora.tree import AdapterConfig
from mint_jax.models import transformer
from mint_jax.rollout.engine import Engine
from mint_jax.rollout.request import Request
from mint_jax.rollout.score import Scorer
from mint_jax.train.batch import Group, TrainSequence
from mint_jax.train.trainer import LossConfig, PolicyConfig, Trainer
from tests.marks import first

# Float32: decoding adds up the same products as the full forward, in another order. A logit is a
# sum of up to D = 576 terms behind 30 layers, each with a relative rounding error of 6e-8; the
# largest gaps seen are 4e-6 (tiny) and 6e-5 (SmolLM2).
GAP = 1e-4
RANKS = {"one": 1, "three": 3, "basis": 3, "bias": 0}
SAMPLING = [  # the base and each policy meet each of these
    {"temperature": 1.0},
    {"temperature": 0.0},
    {"temperature": 1.3, "top_k": 20, "top_p": 0.9},
    {"temperature": 0.7, "min_p": 0.05},
]


def adapter_of(base, name: str) -> AdapterConfig:
    if rank := RANKS[name]:
        return AdapterConfig(rank, 2.0 * rank, kind="basis" if name == "basis" else "lora")
    # routed experts take no bias
    return AdapterConfig(kind="bias", **({"targets": ("q", "v", "o")} if base.cfg.routed else {}))


def trainer_with_random_adapters(base, rng) -> Trainer:
    specs = transformer.abstract(base.cfg)
    policies = [
        PolicyConfig(name, adapter_of(base, name), loss=LossConfig("ppo")) for name in RANKS
    ]
    trainer = Trainer(base, policies)
    # about as large as after a long run: h B with h of order 1 then adds about 0.05 to every
    # projection
    draw = lambda s: (rng.normal(size=s.shape) * 0.03).astype(np.float32)  # noqa: E731
    for p in policies:
        trainer.load_adapter(p.name, jax.tree.map(draw, lora_tree.adapter_specs(specs, p.adapter)))
    return trainer


def prompt_of(base, rng, length) -> tuple[int, ...]:
    """Text where there is a tokenizer, for a model that knows text; else random ids."""
    if base.tokenizer is None:
        return tuple(rng.integers(3, base.cfg.vocab_size, length).tolist())
    sums = " ".join(f"{a} + {b} = {a + b}," for a, b in rng.integers(0, 10, (4, 2)))
    return tuple(base.tokenizer.encode(f"Sums of digits: {sums}")[:length])


@pytest.mark.parametrize(
    "model", first(1, ["qwen3", "qwen3_moe", "gemma3", "gemma4_shared", "smollm2"])
)
def test_sampler_scorer_and_trainer_agree(model, tiny_base, rng, request):
    base = request.getfixturevalue("smollm2") if model == "smollm2" else tiny_base(model)
    trainer = trainer_with_random_adapters(base, rng)
    owners = [*RANKS, None]
    requests = []
    for k, owner in enumerate(owners):
        slot = trainer.slots[owner] if owner else None
        for i, how in enumerate(SAMPLING):
            prompt = prompt_of(base, rng, (11, 3, 8, 6)[(i + k) % 4])
            requests.append(Request(prompt, slot, n=2, max_tokens=10 - i, seed=17 * i + k, **how))
    results = Engine(base).generate(requests, trainer.stacks)

    pairs = [(r, c) for r, completions in zip(requests, results) for c in completions]
    texts = [[*r.prompt, *c.tokens] for r, c in pairs]
    slots = [r.adapter for r in requests for _ in range(2)]
    sampled = [np.array(c.logprobs) for completions in results for c in completions]
    for x, y in zip(sampled, Scorer(base).logprobs(texts, slots, trainer.stacks)):
        np.testing.assert_allclose(x, y[-len(x) :], rtol=0, atol=GAP)

    groups = {name: [] for name in RANKS}
    for k, name in enumerate(RANKS):
        for r, completions in zip(requests[4 * k : 4 * k + 4], results[4 * k : 4 * k + 4]):
            rows = [(c.tokens, len(c.tokens), c.logprobs) for c in completions]
            sequences = [TrainSequence(t, [1.0] * n, [0.0] * n, logp) for t, n, logp in rows]
            groups[name].append(Group(list(r.prompt), sequences))
    # prompts packed with their rollouts, policies in one batch
    rows = trainer.forward_backward(groups)
    for k, name in enumerate(RANKS):
        assert rows[name]["tokens"] == sum(map(len, sampled[8 * k : 8 * k + 8]))
        assert rows[name]["max_gap"] <= GAP

    bare = [s[-len(x) :] for s, x in zip(Scorer(base).logprobs(texts), sampled)]
    gaps = [np.abs(x - y).max() for x, y in zip(sampled, bare)]
    moved = [max(gaps[8 * k : 8 * k + 8]) for k in range(len(owners))]
    assert min(moved[:-1]) > 100 * GAP, "the adapters change too little to tell them from the base"
    assert moved[-1] <= GAP
