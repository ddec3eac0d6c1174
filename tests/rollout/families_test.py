"""Every family through the engine against transformers: mixed adapters, with samples that share a
prompt, lose their pages, and find prompts in the cache.

Axes: L layers, E experts, R rank, D in, F out.
"""

import dataclasses

import numpy as np
import pytest

from mint_jax.lora import tree as lora_tree
from mint_jax.lora.tree import AdapterConfig
from mint_jax.rollout import device
from mint_jax.rollout.engine import Engine
from mint_jax.rollout.request import Request
from tests import oracles
from tests.exchange import looser
from tests.rollout.engine_test import assert_greedy, torch_greedy
from tests.rollout.score_test import merged_models, stacked_adapters, torch_logprobs

ALL = (lora_tree.ALL_LINEAR,)
CONFIGS = {
    "one": AdapterConfig(1, 2.0, ALL),
    "eight": AdapterConfig(8, 16.0, ALL),
    "other": AdapterConfig(7, 7.0, ALL),
}
NEW = 40  # two pages of own tokens
PAGES = 14  # of cache: not for all rows at once
FAST = ("llama", "qwen3_moe")


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=() if f in FAST else pytest.mark.long) for f in oracles.TINY]
)
def test_mixed_adapters_of_every_family_are_transformers(rng, tiny_base, hf_dirs, family):
    base = tiny_base(family)
    configs = CONFIGS
    if base.cfg.routed:  # a neighbour of "eight" in their stack
        configs = CONFIGS | {"other": dataclasses.replace(CONFIGS["other"], experts="shared_outer")}
    adapters, stacks, slots = stacked_adapters(rng, base.cfg, configs, 0.3)
    models = merged_models(hf_dirs(family), base.cfg, adapters)

    def request(name, length, n, temperature) -> Request:
        prompt, how = tuple(rng.integers(3, 96, length).tolist()), {"seed": length}
        return Request(prompt, slots.get(name), n, NEW, temperature, revision=name, **how)

    asked = [request("one", 70, 1, 0), request("eight", 5, 3, 1.0), request(None, 33, 2, 1.0)]
    asked += [request("other", 1, 1, 0), request("eight", 40, 1, 0)]
    nbytes = PAGES * device.page_bytes(base.cfg, base.dtype, False)
    engine = Engine(base, rows=(8,), steps=7, cache_bytes=nbytes)
    results = engine.generate(asked, stacks)
    assert engine.counts["preempted"] > 0
    engine.generate(asked[:1], stacks)  # the others may have needed its prompt's pages
    (again,) = engine.generate(asked[:1], stacks)
    assert again[0].reused == 64, "two whole pages of its prompt were there"
    assert (again[0].tokens, again[0].logprobs) == (results[0][0].tokens, results[0][0].logprobs)
    compared = 0
    for request, completions in zip(asked, results, strict=True):
        name = request.revision
        for c in completions:
            tokens = [*request.prompt, *c.tokens]
            n = min(max(oracles.decided(models[name], tokens) + 1 - len(request.prompt), 0), NEW)
            compared += n
            wanted = torch_logprobs(models[name], tokens)[-NEW:]
            # float32 through 3 layers; logits are of size 5
            atol = 1e-4 * looser(base.cfg, 5.0)
            np.testing.assert_allclose(c.logprobs[:n], wanted[:n], atol=atol)
            bare = torch_logprobs(models[None], tokens)[-NEW:]
            moved = np.abs(wanted - bare).max()
            assert name is None or moved > 4 * atol, "the comparison would not show the adapter"
        if request.temperature == 0:
            greedy = torch_greedy(models[name], request.prompt, NEW)
            assert_greedy(completions[0].tokens[:n], greedy[:n], models[name], request.prompt, atol)
    assert compared >= NEW * 8 / 2, "most places are decided: 8 rows"
