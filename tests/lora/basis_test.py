"""Adapters over an output basis that all policies share: its numbers, gradients, sizes, sums and
PEFT's files.
"""

import dataclasses

import blake3
import numpy as np
import pytest

from mint_jax import params as params_lib
from mint_jax.catalog.packed import Schema, digest_of
from mint_jax.errors import UserError
from mint_jax.lora import tree
from mint_jax.lora.basis import basis, with_basis
from mint_jax.lora.merge import MergeConfig, merge
from mint_jax.lora.peft import write_peft
from mint_jax.lora.tree import LINEAR_TARGETS, AdapterConfig
from mint_jax.models import hf, names, transformer
from mint_jax.models.hf_config import from_hf
from mint_jax.train.state import OptimizerConfig
from mint_jax.train.trainer import LossConfig, PolicyConfig, Trainer
from tests import oracles
from tests.adapters import random_adapter
from tests.exchange import (
    assert_same_logits,
    decided_tokens,
    looser,
    our_logits,
    peft_model,
    tables,
)
from tests.groups import random_groups

CONFIG = AdapterConfig(3, 6.0, kind="basis")
RATE = 3e-3


def rows_of_basis(path, layer, L, R, F):
    """``[R, F]``, bit by bit, as the module's docstring has it."""
    data = blake3.blake3(f"mint_jax output basis {path}".encode()).digest(L * R * F // 8 + 1)
    at = [(r * L + layer) * F + f for r in range(R) for f in range(F)]
    bits = np.array([data[i // 8] >> (7 - i % 8) & 1 for i in at])
    return np.float32(2 * bits - 1).reshape(R, F) * np.float32(F**-0.5)


def test_the_numbers_are_those_of_blake3(rng):
    L, R, F = 3, 5, 51  # no multiple of 8
    whole = basis("dense/attn/q", (L, R, F))
    for layer in range(L):
        np.testing.assert_array_equal(whole[layer], rows_of_basis("dense/attn/q", layer, L, R, F))
    np.testing.assert_array_equal(basis("dense/attn/q", (L, 2, F)), whole[:, :2])
    # a change of these numbers changes every revision that was trained on them
    assert digest_of(basis("dense/attn/q", (3, 5, 64)).tobytes()).startswith("2da9aace8de689c9")
    wide = basis("dense/mlp/down", (2, 8, 4096))
    gram = wide @ wide.swapaxes(1, 2)
    # an entry off the diagonal is a mean of 4,096 signs: 6 times its standard deviation
    np.testing.assert_allclose(gram, np.broadcast_to(np.eye(8), gram.shape), atol=6 / 64)
    assert abs(wide.sum()) / wide.size**0.5 < 6 / 64


@pytest.mark.parametrize("optimizer", ["adamw", "dimuon"])
def test_a_gradient_of_the_basis_that_is_not_finite_skips_nothing(optimizer, rng, tiny_base):
    base, how = tiny_base("llama"), OptimizerConfig(3e-3, eps=1e-5, kind=optimizer)
    trainer = Trainer(base, [PolicyConfig("p", CONFIG, how, LossConfig("cross_entropy"))])
    trainer.forward_backward({"p": random_groups(rng, base.cfg.vocab_size)})
    before = trainer.adapter("p")
    [(bucket, stack)] = trainer.state.items()
    spoilt = params_lib.map_with_path(
        lambda path, x: x * np.nan if path.endswith("/b") else x, stack.grad_sum
    )
    trainer.state = {bucket: dataclasses.replace(stack, grad_sum=spoilt)}
    found = trainer.optim_step(["p"])["p"]
    assert (found["skipped"], found["grad_norm"] > 0) == (0, True)
    after = trainer.adapter("p")
    assert all(np.isfinite(x).all() for x in _arrays(after))
    assert any(np.any(x != y) for x, y in zip(_arrays(before), _arrays(after)))
    [new] = trainer.state.values()
    for path, x in params_lib.leaves_with_path(new.adapters.factors):
        if path.endswith("/b"):
            own = np.asarray(x[:, 0, :3])
            np.testing.assert_array_equal(own, basis(path[:-2], own.shape))


def _arrays(adapter):
    return [np.asarray(x) for _, x in params_lib.leaves_with_path(adapter)]


@pytest.mark.parametrize(
    ("name", "targets", "rank", "numbers"),
    [
        ("smollm2", ("o",), 1, 17_280),
        ("smollm2", ("gate", "up"), 2, 69_120),
        ("smollm2", LINEAR_TARGETS, 8, 1_198_080),
        ("qwen3-4b", ("o",), 1, 147_456),
    ],
)
def test_a_policy_has_one_number_an_input_and_row(name, targets, rank, numbers):
    small = names._TINY | {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
    small |= {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}
    cfg = from_hf(small if name == "smollm2" else names.shape(f"random:{name}"))
    config = AdapterConfig(rank, targets=targets, kind="basis")
    assert tree.adapter_nbytes(transformer.abstract(cfg), config) == 4 * numbers


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt_oss", "qwen3_5"])
def test_peft_loads_what_we_write(family, rng, tiny_base, hf_dirs, tmp_path):
    base = tiny_base(family)
    config = AdapterConfig(3, 6.0, (tree.ALL_LINEAR, "embed", "unembed"), kind="basis")
    adapter, names = random_adapter(rng, base, config), tables(base)[0]
    is_moe = hf.is_moe_type(base.cfg)
    write_peft(tmp_path / "out", adapter, config, names, str(hf_dirs(family)), is_moe)
    model = peft_model(hf_dirs(family), tmp_path / "out")
    tokens_BT = decided_tokens(model, base.cfg, rng)
    stacks, slots = tree.stack_adapters(transformer.abstract(base.cfg), {"p": (config, adapter)})
    whole = tree.read_slot(stacks[slots["p"].bucket], slots["p"].index, 3)
    ours = our_logits(base, whole, config, tokens_BT)
    bare = oracles.torch_logits(oracles.torch_model(hf_dirs(family)), tokens_BT)
    assert_same_logits(ours, oracles.torch_logits(model, tokens_BT), bare, looser(base.cfg))


def test_a_sum_is_that_of_the_deltas(rng, tiny_base):
    base = tiny_base("llama")
    specs = transformer.abstract(base.cfg)
    configs = [
        dataclasses.replace(CONFIG, rank=r, targets=t) for r, t in ((3, ("q",)), (2, ("q", "o")))
    ]
    members = [(random_adapter(rng, base, config), config) for config in configs]
    weights = [0.7, -1.5]
    made = merge(members, weights, MergeConfig())
    assert (made.config.kind, made.config.rank, made.config.scale) == ("basis", 3, 1.0)
    tree.check_fits(made.adapter, made.config, specs, "the sum")

    def deltas(adapter, scale):
        flat = dict(params_lib.leaves_with_path(adapter))
        widths = {path: p.d_out for path, p in tree.projections(specs, ("q", "o")).items()}
        whole = {k: np.float64(v) for k, v in with_basis(flat, widths).items()}
        return {
            p[:-2]: scale * a.swapaxes(1, 2) @ whole[p[:-2] + "/b"]
            for p, a in whole.items()
            if p[-1] == "a"
        }

    found = deltas(made.adapter, 1.0)
    parts = [deltas(adapter, w * c.scale) for (adapter, c), w in zip(members, weights)]
    for path, delta in found.items():
        np.testing.assert_allclose(delta, sum(p.get(path, 0.0) for p in parts), atol=1e-6)
    for how in (MergeConfig("ties", 0.5), MergeConfig(rank=2)):
        with pytest.raises(UserError, match="are only summed, without a cut"):
            merge(members, weights, how)
    lora = AdapterConfig(2, targets=("q",))
    with pytest.raises(UserError, match="kinds basis and lora: merge those of one kind"):
        merge([members[0], (random_adapter(rng, base, lora), lora)], weights, MergeConfig())
    large = [(adapter, dataclasses.replace(c, alpha=1e38)) for adapter, c in members]
    with pytest.raises(UserError, match="beyond float32"):
        merge(large, [1e3, 1e3], MergeConfig())


def test_what_does_not_fit_is_refused(rng, tiny_base):
    base = tiny_base("llama")
    specs = transformer.abstract(base.cfg)
    with pytest.raises(UserError, match="experts is 'shared_outer', which an adapter of kind 'bas"):
        AdapterConfig(3, experts="shared_outer", kind="basis")
    with pytest.raises(UserError, match="rank is 0"):
        AdapterConfig(kind="basis")
    lora = random_adapter(rng, base, dataclasses.replace(CONFIG, kind="lora"))
    with pytest.raises(UserError, match="dense/attn/k/b is not among the targets"):
        tree.check_fits(lora, CONFIG, specs, "p")
    own = random_adapter(rng, base, CONFIG)
    with pytest.raises(UserError, match="dense/attn/k/b is missing"):
        tree.check_fits(own, dataclasses.replace(CONFIG, kind="lora"), specs, "p")
    schema = Schema("base", CONFIG)
    assert Schema.from_json(schema.to_json()) == schema
    other = schema.to_json().replace("/basis", "")
    assert Schema.from_json(other).config.kind == "lora"
    with pytest.raises(UserError, match="layout is"):
        Schema.from_json(schema.to_json().replace("/basis", "/bases"))
