"""Adapter trees: what can be adapted, fresh adapters against PEFT's, slots of a stack, and
admission.
"""

import numpy as np
import peft
import pytest
import scipy.stats
import torch

from mint_jax import params as params_lib
from mint_jax.errors import UserError
from mint_jax.lora import tree
from mint_jax.lora.tree import AdapterConfig
from mint_jax.models import transformer
from tests import oracles
from tests.adapters import random_adapter


@pytest.fixture
def specs(tiny_base):
    return transformer.abstract(tiny_base("llama").cfg)


def test_fresh_adapters_are_distributed_as_those_of_peft(rng, specs, hf_dirs):
    targets = ("q", "down", "embed", "unembed")
    torch.manual_seed(int(rng.integers(2**31)))
    lora = peft.LoraConfig(r=32, target_modules=["q_proj", "down_proj", "embed_tokens", "lm_head"])
    model = peft.get_peft_model(oracles.torch_model(hf_dirs("llama")), lora)
    theirs: dict[str, list] = {}
    for name, p in model.named_parameters():
        if "lora_" in name:
            path = next(
                t
                for t, m in zip(targets, ("q_proj", "down_proj", "embed_tokens", "lm_head"))
                if m in name
            )
            theirs.setdefault(f"{path}/{'a' if '_A' in name else 'b'}", []).append(
                p.detach().numpy().ravel()
            )
    ours = tree.init_adapter(specs, AdapterConfig(32, targets=targets), int(rng.integers(2**31)))
    for path, leaf in params_lib.leaves_with_path(ours):
        mine = np.asarray(leaf).ravel()
        other = np.concatenate(theirs[path.removeprefix("dense/attn/").removeprefix("dense/mlp/")])
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


def test_a_seed_gives_the_same_factors_with_any_other_targets(rng, specs):
    seed = int(rng.integers(2**31))
    few = tree.init_adapter(specs, AdapterConfig(5, targets=("down", "embed")), seed)
    many = tree.init_adapter(specs, AdapterConfig(5, 99.0, ("q", "k", "v", "down", "embed")), seed)
    flat = dict(params_lib.leaves_with_path(many))
    for path, leaf in params_lib.leaves_with_path(few):
        np.testing.assert_array_equal(leaf, flat[path])
    other = tree.init_adapter(specs, AdapterConfig(5, targets=("down",)), seed + 1)
    assert not np.any(
        np.asarray(other["dense"]["mlp"]["down"]["a"])
        == np.asarray(few["dense"]["mlp"]["down"]["a"])
    )
    attn = many["dense"]["attn"]
    # same shape: they must not share their randomness
    drawn = [np.asarray(attn[name]["a"]) for name in ("q", "k", "v")]
    assert not any(np.array_equal(x, y) for i, x in enumerate(drawn) for y in drawn[:i])
    assert not any(np.array_equal(x[0], x[1]) for x in drawn)


QA, QB = "dense/attn/q/a", "dense/attn/q/b"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda t: t.clear(), "it: no module binds; the adapter is empty"),
        (lambda t: t.update({"dense/attn/k/a": t[QA]}), "dense/attn/k/a is not among the targets"),
        (lambda t: t.pop(QB), "it: dense/attn/q/b is missing, though its config targets it"),
        (lambda t: t.update({QA: t[QA][:2]}), r"q/a has shape \(2, 3, 48\); .* need \(3, 3, 48\)"),
        (
            lambda t: t.update({QB: t[QB][:, :2]}),
            r"q/b has shape \(3, 2, 64\); .* need \(3, 3, 64\)",
        ),
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
