"""Adapters over an output basis that all policies share: its numbers, updates against torch in
float64 in one batch with LoRA, sizes, the same revision in every form, and sums.
"""

import dataclasses

import blake3
import chex
import numpy as np
import pytest
import torch

import mint_jax as mint
from mint_jax import params as params_lib
from mint_jax.catalog import orbax_files
from mint_jax.catalog.packed import Schema, digest_of, pack, unpack
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
from tests.lora.bias_test import texts
from tests.train.torch_lora import MODULES

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


class TorchFactors:
    """A float64 checkpoint whose linear layers get A of their own over a fixed B, by AdamW."""

    def __init__(self, directory, adapter, scale):
        self.model = oracles.torch_model(directory, torch.float64).requires_grad_(False)
        self.factors = {}
        for leaf, x in params_lib.leaves_with_path(adapter):
            path = leaf.removesuffix("/a")
            for layer, own in enumerate(np.asarray(x, np.float64)):
                module = self.model.get_submodule(MODULES[path].format(layer))
                size = len(x), x.shape[1], module.out_features
                b = torch.tensor(rows_of_basis(path, layer, *size), dtype=torch.float64)
                a = self.factors[leaf, layer] = torch.nn.Parameter(torch.tensor(own))
                module.register_forward_hook(lambda _, x, y, a=a, b=b: y + scale * x[0] @ a.T @ b)
        self.optimizer = torch.optim.AdamW(self.factors.values(), RATE, eps=1e-5, weight_decay=0.1)

    def update(self, groups) -> float:
        total = torch.zeros((), dtype=torch.float64)
        for group in groups:
            for s in group.sequences:
                row, n = [*group.prefix, *s.tokens], len(s.tokens)
                logp = torch.log_softmax(self.model(torch.tensor([row])).logits[0], -1)
                picked = logp[range(len(row) - n - 1, len(row) - 1), s.tokens]
                total = total - (torch.tensor(s.weights) * picked).sum()
        self.optimizer.zero_grad()
        total.backward()
        torch.nn.utils.clip_grad_norm_(self.factors.values(), 1.0)
        self.optimizer.step()
        return float(total.detach())


def test_five_updates_in_one_batch_with_lora_match_torch_in_float64(rng, tiny_base, hf_dirs):
    """B keeps its bits, and its gradient does not count in the norm that is clipped."""
    base = tiny_base("llama")
    optimizer = OptimizerConfig(RATE, eps=1e-5, weight_decay=0.1)
    how = optimizer, LossConfig("cross_entropy")
    policies = PolicyConfig("lora", AdapterConfig(3), *how), PolicyConfig("basis", CONFIG, *how)
    trainer = Trainer(base, policies)
    start = random_adapter(rng, base, CONFIG)
    trainer.load_adapter("basis", start)
    oracle = TorchFactors(hf_dirs("llama"), start, CONFIG.scale)
    for _ in range(5):
        data = {name: texts(rng, base.cfg.vocab_size) for name in ("lora", "basis")}
        ours, theirs = trainer.forward_backward(data)["basis"]["loss"], oracle.update(data["basis"])
        trainer.optim_step(list(data))
        assert abs(ours - theirs) <= 5e-5
    slot = trainer.slots["basis"]
    for leaf, x in params_lib.leaves_with_path(trainer.adapter("basis")):
        expected = np.stack([oracle.factors[leaf, i].detach() for i in range(len(x))])
        np.testing.assert_allclose(x, expected, rtol=0, atol=1e-4 * np.abs(expected).max())
    for path, x in params_lib.leaves_with_path(trainer.state[slot.bucket].adapters.factors):
        if path.endswith("/b"):
            own = np.asarray(x[:, slot.index, :3])
            np.testing.assert_array_equal(own, basis(path[:-2], own.shape))


def test_a_gradient_of_the_basis_that_is_not_finite_skips_nothing(rng, tiny_base):
    base = tiny_base("llama")
    trainer = Trainer(
        base, [PolicyConfig("p", CONFIG, OptimizerConfig(RATE), LossConfig("cross_entropy"))]
    )
    trainer.forward_backward({"p": texts(rng, base.cfg.vocab_size)})
    before = trainer.adapter("p")
    [(bucket, stack)] = trainer.state.items()
    spoilt = params_lib.map_with_path(
        lambda path, x: x * np.nan if path.endswith("/b") else x, stack.grad_sum
    )
    trainer.state = {bucket: dataclasses.replace(stack, grad_sum=spoilt)}
    found = trainer.optim_step(["p"])["p"]
    assert (found["skipped"], found["grad_norm"] > 0) == (0, True)
    after = _arrays(trainer.adapter("p"))
    assert all(np.isfinite(x).all() for x in after)
    assert any(np.any(x != y) for x, y in zip(_arrays(before), after))


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


def test_one_revision_trains_on_and_is_sampled_beside_lora(mesh, tmp_path):
    """Through the Python interface: saved, loaded into a slot, and resumed with the same bits."""
    rows = [{"prompt": f"{i} + 1 =", "completion": f" {i + 1}"} for i in range(4)]
    how = {"temperature": 0.0, "max_tokens": 6}
    place = tmp_path / "c"
    with mint.load("tiny-random", mesh=mesh) as base, mint.open(place, create=True) as store:
        lora = base.policy("lora", rank=2, learning_rate=1e-2)
        own = base.policy("own", 3, kind="basis", targets=["q", "o", "down"], learning_rate=0.1)
        base.train_step({lora: rows, own: rows})
        for policy in (lora, own):
            policy.save(store)
        revisions = [None, store["lora@latest"], store["own@latest"], store["own@latest"]]
        mixed = base.completions(["2 + 1 ="] * 4, revisions, **how)
        for one, revision in zip(mixed, revisions):
            [alone] = base.completions(["2 + 1 ="], revision, **how)
            assert one[0].tokens == alone[0].tokens
            # programs of another number of rows: units of the last place
            np.testing.assert_allclose(one[0].logprobs, alone[0].logprobs, atol=1e-5)
        assert mixed[0][0].logprobs != mixed[2][0].logprobs
        file = own.save_state(tmp_path / "own.state")
        data = store.catalog.load(store["own@latest"].digest)
        base.train_step({own: rows})
        later = own.adapter()
        base.remove(own)
        base.resume(file).train_step(rows)
        chex.assert_trees_all_equal(base.policies["own"].adapter(), later)
        again = base.policy("again", start=store["own@latest"])
        assert again.config.adapter.kind == "basis"
        chex.assert_trees_all_equal(again.adapter(), unpack(data)[0])
    adapter, schema = unpack(data)
    assert {path[-1] for path, _ in params_lib.leaves_with_path(adapter)} == {"a"}
    assert digest_of(pack(adapter, schema)) == digest_of(data)
    orbax_files.write(tmp_path / "orbax", data, {})
    assert digest_of(orbax_files.read(tmp_path / "orbax", 1 << 20)) == digest_of(data)


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
