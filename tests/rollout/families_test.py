"""Every family through the engine against transformers: mixed adapters, with samples that share a
prompt, lose their pages, and find prompts in the cache.

Axes: L layers, E experts, R rank, D in, F out.
"""

import re

import numpy as np
import pytest
import torch

from mint_jax import params as params_lib
from mint_jax.lora import tree as lora_tree
from mint_jax.lora.tree import AdapterConfig
from mint_jax.models import hf, transformer
from mint_jax.rollout import device
from mint_jax.rollout.engine import Engine
from mint_jax.rollout.request import Request
from tests import oracles
from tests.rollout.engine_test import assert_greedy, torch_greedy
from tests.rollout.score_test import torch_logprobs

ALL = (lora_tree.ALL_LINEAR,)
CONFIGS = {
    "one": AdapterConfig(1, 2.0, ALL),
    "eight": AdapterConfig(8, 16.0, ALL),
    "other": AdapterConfig(7, 7.0, ALL),
}
NEW = 40  # two pages of own tokens
PAGES = 14  # of cache: not for all rows at once
FAST = ("qwen3_moe",)


def random_adapters(rng, cfg) -> dict:
    def draw(_, spec):
        return (rng.normal(size=spec.shape) * 0.3 * spec.shape[-1] ** -0.5).astype(np.float32)

    specs = transformer.abstract(cfg)
    return {
        name: (c, params_lib.map_with_path(draw, lora_tree.adapter_specs(specs, c)))
        for name, c in CONFIGS.items()
    }


def dtype_of(cfg):
    """float64, but where there are experts: torch's product of those has no such form."""
    return torch.float64 if cfg.experts is None else torch.float32


def merged(directory, cfg, config, factors):
    """The checkpoint in torch with ``W + scale * B^T A``, routed experts in transformers' stacked
    parameters too.
    """
    model = oracles.torch_model(directory, dtype_of(cfg))
    weights = model.state_dict()  # shares memory with the model
    flat = dict(params_lib.leaves_with_path(factors))
    changed = 0
    for path, names in hf.module_names(cfg, sorted({p.rsplit("/", 1)[0] for p in flat})).items():
        a, b = (
            torch.from_numpy(flat[f"{path}/{f}"]).to(dtype_of(cfg)).flatten(0, -3) for f in "ab"
        )
        for name, a_RD, b_RF in zip(names, a, b, strict=True):
            delta_FD = config.scale * b_RF.T @ a_RD
            if f"{name}.weight" in weights:
                weights[f"{name}.weight"] += delta_FD
            else:
                experts, e, kind = re.fullmatch(
                    r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj", name
                ).groups()
                whole = weights[f"{experts}.{'down' if kind == 'down' else 'gate_up'}_proj"][int(e)]
                F = len(delta_FD)
                (whole[F:] if kind == "up" else whole[:F]).add_(delta_FD)  # gate's rows first
            changed += 1
    assert changed == sum(np.prod(x.shape[:-2]) for p, x in flat.items() if p.endswith("/a"))
    return model


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=() if f in FAST else pytest.mark.long) for f in oracles.TINY]
)
def test_mixed_adapters_of_every_family_are_transformers(rng, tiny_base, hf_dirs, family):
    base = tiny_base(family)
    adapters = random_adapters(rng, base.cfg)
    models = {n: merged(hf_dirs(family), base.cfg, *adapters[n]) for n in adapters} | {
        None: oracles.torch_model(hf_dirs(family), dtype_of(base.cfg))
    }
    stacks, slots = lora_tree.stack_adapters(transformer.abstract(base.cfg), adapters)
    asked = [
        (
            name,
            Request(
                tuple(rng.integers(3, 96, n).tolist()),
                slots.get(name),
                k,
                NEW,
                t,
                seed=i,
                revision=name,
            ),
        )
        for i, (name, n, k, t) in enumerate(
            (
                ("one", 70, 1, 0),
                ("eight", 5, 3, 1.0),
                (None, 33, 2, 1.0),
                ("other", 1, 1, 0),
                ("eight", 40, 1, 0),
            )
        )
    ]
    engine = Engine(
        base, rows=(8,), steps=7, cache_bytes=PAGES * device.page_bytes(base.cfg, base.dtype, False)
    )
    results = engine.generate([request for _, request in asked], stacks)
    assert engine.counts["preempted"] > 0
    engine.generate([asked[0][1]], stacks)  # the others may have needed its prompt's pages
    (again,) = engine.generate([asked[0][1]], stacks)
    assert again[0].reused == 64, "two whole pages of its prompt were there"
    assert (again[0].tokens, again[0].logprobs) == (results[0][0].tokens, results[0][0].logprobs)
    compared = 0
    for (name, request), completions in zip(asked, results, strict=True):
        for c in completions:
            tokens = [*request.prompt, *c.tokens]
            n = min(max(oracles.decided(models[name], tokens) + 1 - len(request.prompt), 0), NEW)
            compared += n
            wanted = torch_logprobs(models[name], tokens)[-NEW:]
            # float32 through 3 layers; logits are of size 5
            np.testing.assert_allclose(c.logprobs[:n], wanted[:n], atol=1e-4)
            bare = torch_logprobs(models[None], tokens)[-NEW:]
            assert name is None or np.abs(wanted - bare).max() > 1e-2, "the adapter must matter"
        if request.temperature == 0:
            greedy = torch_greedy(models[name], request.prompt, NEW)
            assert_greedy(completions[0].tokens[:n], greedy[:n], models[name], request.prompt)
    assert compared >= NEW * 8 / 2, "most places are decided: 8 rows"
