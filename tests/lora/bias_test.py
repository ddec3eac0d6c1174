"""Adapters of biases alone: updates against torch in float64 in one batch with LoRA, sizes that are
true everywhere, the same revision in every form, and what has no bias refused by name.
"""

import dataclasses

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
from mint_jax.lora.tree import LINEAR_TARGETS, AdapterConfig
from mint_jax.models import names, transformer
from mint_jax.models.hf_config import from_hf
from mint_jax.residency.admission import Admission
from mint_jax.residency.slots import DeviceSlots
from mint_jax.train.batch import Group, TrainSequence
from mint_jax.train.state import OptimizerConfig
from mint_jax.train.trainer import LossConfig, PolicyConfig, Trainer
from tests import oracles
from tests.adapters import random_adapter
from tests.train.torch_lora import MODULES

BIAS = AdapterConfig(kind="bias")
RATE = 3e-3


class TorchBiases:
    """A float64 checkpoint whose linear layers get biases of their own, by AdamW."""

    def __init__(self, directory, adapter):
        self.model = oracles.torch_model(directory, torch.float64).requires_grad_(False)
        self.biases = {}
        for leaf, x in params_lib.leaves_with_path(adapter):
            for layer, own in enumerate(np.asarray(x, np.float64)[:, 0]):
                module = self.model.get_submodule(MODULES[leaf.rsplit("/", 1)[0]].format(layer))
                assert module.bias is None
                module.bias = torch.nn.Parameter(torch.tensor(own))
                self.biases[leaf, layer] = module.bias
        self.optimizer = torch.optim.AdamW(self.biases.values(), RATE, eps=1e-5, weight_decay=0.1)

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
        torch.nn.utils.clip_grad_norm_(self.biases.values(), 1.0)
        self.optimizer.step()
        return float(total.detach())


def texts(rng, vocab):
    def group(n):
        own = TrainSequence(rng.integers(3, vocab, n).tolist(), [1 / n] * n)
        return Group(rng.integers(3, vocab, 4).tolist(), [own])

    return [group(n) for n in (7, 4, 6)]


def test_five_updates_in_one_batch_with_lora_match_torch_in_float64(rng, tiny_base, hf_dirs):
    base = tiny_base("llama")
    optimizer = OptimizerConfig(RATE, eps=1e-5, weight_decay=0.1)
    how = optimizer, LossConfig("cross_entropy")
    policies = PolicyConfig("lora", AdapterConfig(3), *how), PolicyConfig("bias", BIAS, *how)
    trainer = Trainer(base, policies)
    # with biases of zero a key's gradient is rounding alone
    start = random_adapter(rng, base, BIAS)
    trainer.load_adapter("bias", start)
    oracle = TorchBiases(hf_dirs("llama"), start)
    for _ in range(5):
        data = {name: texts(rng, base.cfg.vocab_size) for name in ("lora", "bias")}
        ours, theirs = trainer.forward_backward(data)["bias"]["loss"], oracle.update(data["bias"])
        trainer.optim_step(list(data))
        assert abs(ours - theirs) <= 5e-5
    for leaf, x in params_lib.leaves_with_path(trainer.adapter("bias")):
        expected = np.stack([oracle.biases[leaf, i].detach() for i in range(len(x))])[:, None]
        np.testing.assert_allclose(x, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("name", "targets", "numbers"),
    [
        ("smollm2", LINEAR_TARGETS, 155_520),
        ("smollm2", ("gate", "up"), 92_160),
        ("qwen3-4b", ("o",), 92_160),
        ("qwen3-4b", LINEAR_TARGETS, 1_105_920),
    ],
)
def test_a_policy_has_one_number_an_output(name, targets, numbers):
    small = names._TINY | {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
    small |= {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}
    cfg = from_hf(small if name == "smollm2" else names.shape(f"random:{name}"))
    specs = transformer.abstract(cfg)
    assert tree.adapter_nbytes(specs, dataclasses.replace(BIAS, targets=targets)) == 4 * numbers


def test_neither_training_nor_slots_have_factors_of_a_bias(tiny_base, rng):
    """Not even where a neighbour adapts more."""
    base = tiny_base("llama_tied")
    specs, all_targets = transformer.abstract(base.cfg), (*LINEAR_TARGETS, "embed", "unembed")
    size, stacked = tree.adapter_nbytes(specs, BIAS), DeviceSlots(specs, {0: 3, 4: 1}, all_targets)
    assert stacked.slot_bytes(0) == size
    rooms = {bucket: stacked.targets(bucket) for bucket in stacked.stacks}
    admission, adapter = Admission("base", specs, rooms), random_adapter(rng, base, BIAS)
    assert admission.check("0" * 64, adapter, Schema("base", BIAS)) == 7 * base.cfg.num_layers
    with pytest.raises(UserError, match="has bias alone; there are slots for rank buckets 4"):
        Admission("base", specs, {4: rooms[4]}).check("0" * 64, adapter, Schema("base", BIAS))
    trainer = Trainer(base, [PolicyConfig("bias", BIAS), PolicyConfig("lora", AdapterConfig(4))])
    state = trainer.state[trainer.slots["bias"].bucket]
    trees = state.adapters.factors, state.mu, state.nu, state.grad_sum
    assert params_lib.nbytes(trees) == 4 * size


def test_one_revision_trains_on_and_is_sampled_beside_lora(mesh, tmp_path):
    """Through the Python interface: saved, loaded into a slot, and resumed with the same bits."""
    rows = [{"prompt": f"{i} + 1 =", "completion": f" {i + 1}"} for i in range(4)]
    how = {"temperature": 0.0, "max_tokens": 6}
    place = tmp_path / "c"
    with mint.load("tiny-random", mesh=mesh) as base, mint.open(place, create=True) as store:
        lora = base.policy("lora", rank=2, learning_rate=1e-2)
        bias = base.policy("bias", kind="bias", targets=["q", "o", "down"], learning_rate=0.1)
        assert "bias alone" in repr(bias)
        base.train_step({lora: rows, bias: rows})
        for policy in (lora, bias):
            policy.save(store)
        revisions = [None, store["lora@latest"], store["bias@latest"], store["bias@latest"]]
        mixed = base.completions(["2 + 1 ="] * 4, revisions, **how)
        for one, revision in zip(mixed, revisions):
            [alone] = base.completions(["2 + 1 ="], revision, **how)
            assert one[0].tokens == alone[0].tokens
            # programs of another number of rows: units of the last place
            np.testing.assert_allclose(one[0].logprobs, alone[0].logprobs, atol=1e-5)
        assert mixed[0][0].logprobs != mixed[2][0].logprobs
        file = bias.save_state(tmp_path / "bias.state")
        data = store.catalog.load(store["bias@latest"].digest)
        base.train_step({bias: rows})
        later = bias.adapter()
        base.remove(bias)
        base.resume(file).train_step(rows)
        chex.assert_trees_all_equal(base.policies["bias"].adapter(), later)
        again = base.policy("again", start=base.policies["bias"].export(tmp_path / "peft"))
        chex.assert_trees_all_equal(again.adapter(), later)
    adapter, schema = unpack(data)
    assert schema.config.kind == "bias"
    assert digest_of(pack(adapter, schema)) == digest_of(data)
    orbax_files.write(tmp_path / "orbax", data, {})
    assert digest_of(orbax_files.read(tmp_path / "orbax", 1 << 20)) == digest_of(data)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rank": 4}, "rank is 4, which an adapter of kind 'bias' does not have: leave it out"),
        ({"alpha": 8.0}, "alpha is 8.0, which"),
        ({"rslora": True}, "rslora is True, which"),
        ({"experts": "shared_outer"}, "experts is 'shared_outer', which"),
        ({"kind": "ia3"}, "kind is 'ia3'; expected one of lora, bias"),
    ],
)
def test_settings_that_a_bias_lacks_are_refused(fields, message):
    with pytest.raises(UserError, match=message):
        AdapterConfig(**{"kind": "bias"} | fields)


@pytest.mark.parametrize(
    ("family", "targets", "message"),
    [
        ("llama", ("q", "unembed"), "targets name unembed, which takes no bias: set targets to"),
        ("llama", ("embed",), "targets name embed"),
        ("qwen3_moe", LINEAR_TARGETS, "experts/gate, .* set targets to some of q, k, v, o$"),
        ("deepseek_v3", ("kv_b",), "attn/kv_b, which takes no bias"),
    ],
)
def test_targets_without_biases_are_refused(family, targets, message, tiny_base):
    specs = transformer.abstract(tiny_base(family).cfg)
    with pytest.raises(UserError, match=message):
        tree.adapter_specs(specs, AdapterConfig(kind="bias", targets=targets))


def test_what_has_no_place_for_a_bias_says_so(tiny_base):
    base = tiny_base("llama")
    policy = PolicyConfig("p", BIAS, dropout=0.1)
    with pytest.raises(UserError, match=r"dropout is 0\.1, but a bias has no inputs"):
        Trainer(base, [policy])
    schema = Schema("base", BIAS).to_json()
    for old, new in (('"rank": 0', '"rank": 2'), ("/bias", "")):
        with pytest.raises(UserError, match="rank is"):
            Schema.from_json(schema.replace(old, new))
