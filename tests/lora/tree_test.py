"""Adapter trees: what can be adapted, fresh adapters against PEFT's, slots of a stack, and
admission.
"""

import dataclasses

import chex
import jax
import numpy as np
import peft
import pytest
import scipy.stats
import torch

from mint_jax import params as params_lib
from mint_jax.errors import UserError
from mint_jax.lora import tree
from mint_jax.lora.tree import AdapterConfig
from mint_jax.models import names, transformer
from mint_jax.models.hf_config import from_hf
from mint_jax.residency.admission import modules_of
from tests import oracles
from tests.adapters import random_adapter


@pytest.fixture
def specs(tiny_base):
    return transformer.abstract(tiny_base("llama").cfg)


def test_fresh_adapters_are_distributed_as_those_of_peft(rng, specs, hf_dirs):
    modules = {"q": "q_proj", "down": "down_proj", "embed": "embed_tokens", "unembed": "lm_head"}
    torch.manual_seed(int(rng.integers(2**31)))
    lora = peft.LoraConfig(r=32, target_modules=list(modules.values()))
    model = peft.get_peft_model(oracles.torch_model(hf_dirs("llama")), lora)
    drawn = [(n, p.detach().numpy().ravel()) for n, p in model.named_parameters() if "lora_" in n]
    config = AdapterConfig(32, targets=tuple(modules))
    ours = tree.init_adapter(specs, config, int(rng.integers(2**31)))
    for path, leaf in params_lib.leaves_with_path(ours):
        mine, (*_, target, factor) = np.asarray(leaf).ravel(), path.split("/")
        parts = modules[target], f"_{factor.upper()}"
        other = np.concatenate([x for n, x in drawn if all(part in n for part in parts)])
        assert mine.size == other.size
        if not np.any(other):
            assert not np.any(mine), path
            continue
        # Kolmogorov-Smirnov at 1e-6: a false alarm once in a million runs, while 10% off in width
        # fails (1536 and more draws).
        assert scipy.stats.ks_2samp(mine, other).pvalue > 1e-6, path
        if not path.startswith("embed"):
            bound = leaf.shape[-1] ** -0.5
            assert bound * 0.99 < np.abs(mine).max() <= bound, path


def test_orthonormal_rows_or_columns(rng, specs):
    for rank in (5, 200):  # the second is above the widths
        config = AdapterConfig(rank, targets=("q", "down"))
        made = tree.init_adapter(specs, config, int(rng.integers(2**31)), "orthonormal")
        for path, leaf in params_lib.leaves_with_path(made):
            if path.endswith("/b"):
                assert not leaf.any()
                continue
            rows = np.float64(leaf if rank < leaf.shape[-1] else np.swapaxes(leaf, -1, -2))
            product = rows @ np.swapaxes(rows, -1, -2)
            # float32 rounding of entries of at most 1, summed over a row
            wanted = np.eye(len(product[0]))[None] + 0 * product
            np.testing.assert_allclose(product, wanted, atol=1e-6)


def test_a_seed_gives_the_same_factors_with_any_other_targets(rng, specs, tiny_base):
    seed = int(rng.integers(2**31))
    experts = transformer.abstract(tiny_base("qwen3_moe").cfg)
    one, two = (
        tree.init_adapter(experts, AdapterConfig(3, targets=t, experts="shared_outer"), seed)
        for t in (("gate",), ("q", "gate"))
    )
    chex.assert_trees_all_equal(one["moe"]["moe"], two["moe"]["moe"])
    few = tree.init_adapter(specs, AdapterConfig(5, targets=("down", "embed")), seed)
    many = tree.init_adapter(specs, AdapterConfig(5, 99.0, ("q", "k", "v", "down", "embed")), seed)
    flat = dict(params_lib.leaves_with_path(many))
    for path, leaf in params_lib.leaves_with_path(few):
        np.testing.assert_array_equal(leaf, flat[path])
    other = tree.init_adapter(specs, AdapterConfig(5, targets=("down",)), seed + 1)
    assert not np.any(other["dense"]["mlp"]["down"]["a"] == few["dense"]["mlp"]["down"]["a"])
    # same shape: they must not share their randomness
    drawn = [many["dense"]["attn"][name]["a"] for name in ("q", "k", "v")]
    assert not any(np.array_equal(x, y) for i, x in enumerate(drawn) for y in drawn[:i])
    assert not any(np.array_equal(x[0], x[1]) for x in drawn)


def test_a_rank_of_shared_factors_is_less_than_a_third_on_qwen3_30b_a3b():
    cfg = from_hf(names.shape("random:qwen3-30b-a3b"))
    base, layers = transformer.abstract(cfg), cfg.stacks["moe"]
    D, E, F = cfg.d_model, 128, 768
    wanted = {"each": 3 * E * (D + F), "shared_outer": 3 * (D + E * F)}  # A and B of gate, up, down
    assert {n: layers * count for n, count in wanted.items()} == {
        "each": 51_904_512,
        "shared_outer": 14_450_688,
    }
    bound = set()
    for form, count in wanted.items():
        config = AdapterConfig(1, targets=("gate", "up", "down"), experts=form)
        specs = tree.adapter_specs(base, config)
        assert params_lib.count(specs) == layers * count
        assert tree.adapter_nbytes(base, config) == 4 * layers * count
        empty = jax.tree.map(lambda s: np.broadcast_to(np.float32(0), s.shape), specs)
        bound.add(tree.check_fits(empty, config, base, "it", finite=False))
        assert modules_of(empty) == 3 * layers * E
    assert bound == {3 * layers * E}, "every expert is adapted"
    assert wanted["shared_outer"] <= 0.3 * wanted["each"]


def test_experts_with_shared_factors_compute_what_equal_factors_do(rng, tiny_base):
    base = tiny_base("qwen3_moe")
    config = AdapterConfig(3, targets=("gate", "down"), experts="shared_outer")
    specs = transformer.abstract(base.cfg)
    adapter = random_adapter(rng, base, config)
    each = tree.expanded(adapter)
    tree.check_fits(each, dataclasses.replace(config, experts="each"), specs, "it")
    mine, equal = adapter["moe"]["moe"]["experts"]["shared_outer"], each["moe"]["moe"]["experts"]
    for name, shared, own in (("gate", "a", "b"), ("down", "b", "a")):
        assert not np.ptp(equal[name][shared], axis=1).any()
        np.testing.assert_array_equal(equal[name][shared][:, 0], mine[name][shared])
        np.testing.assert_array_equal(equal[name][own], mine[name][own])
    chex.assert_trees_all_equal(tree.shared_outer(each, "it"), adapter)
    mine["down"]["a"][0, 1] += 1  # each expert's own
    chex.assert_trees_all_equal(tree.shared_outer(tree.expanded(adapter), "it"), adapter)
    each["moe"]["moe"]["experts"]["down"]["b"] = rng.normal(size=equal["down"]["b"].shape)
    with pytest.raises(UserError, match="it: the experts of a layer differ in moe/moe/experts/do"):
        tree.shared_outer(each, "it")


def test_shared_factors_need_experts(specs, tiny_base):
    experts = transformer.abstract(tiny_base("qwen3_moe").cfg)
    for base, targets in ((specs, ("gate",)), (experts, ("q",))):
        with pytest.raises(UserError, match="experts is 'shared_outer', but no target is a proj"):
            tree.adapter_specs(base, AdapterConfig(2, targets=targets, experts="shared_outer"))
    with pytest.raises(UserError, match="experts is 'shared'; expected one of each, shared_outer"):
        AdapterConfig(2, experts="shared")


QA, QB = "dense/attn/q/a", "dense/attn/q/b"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda t: t.clear(), "it: no module binds; the adapter is empty"),
        (lambda t: t.update({"dense/attn/k/a": t[QA]}), "dense/attn/k/a is not among the targets"),
        (lambda t: t.pop(QB), "it: dense/attn/q/b is missing, though its config targets it"),
        (lambda t: t.update({QA: t[QA][:2]}), r"q/a has shape \(2, 3, 48\); .* need \(3, 3, 48\)"),
        (lambda t: t.update({QB: t[QB][:, :2]}), r"q/b has shape \(3, 2, 64\); .* \(3, 3, 64\)"),
        (lambda t: t[QB].__setitem__((1, 2, 3), np.nan), "q/b has NaN or infinite values"),
        (lambda t: t[QA].__setitem__((0, 0, 0), -np.inf), "q/a has NaN or infinite values"),
    ],
    ids=["empty", "untargeted", "missing", "layers", "rank", "nan", "inf"],
)
def test_an_adapter_that_does_not_fit_is_refused_by_name(spoil, message, rng, specs):
    config = AdapterConfig(3, targets=("q", "down"))
    flat = dict(params_lib.leaves_with_path(random_adapter(rng, specs, config)))
    spoil(flat)
    with pytest.raises(UserError, match=message):
        tree.check_fits(params_lib.nest(flat), config, specs, "it")
