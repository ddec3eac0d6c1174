"""Adapters of biases alone: sizes that are true everywhere, and what has no bias is refused."""

import dataclasses

import pytest

from mint_jax import params as params_lib
from mint_jax.catalog.packed import Schema
from mint_jax.errors import UserError
from mint_jax.lora import tree
from mint_jax.lora.tree import LINEAR_TARGETS, AdapterConfig
from mint_jax.models import names, transformer
from mint_jax.models.hf_config import from_hf
from mint_jax.residency.admission import Admission
from mint_jax.residency.slots import DeviceSlots
from mint_jax.train.trainer import PolicyConfig, Trainer
from tests.adapters import random_adapter

BIAS = AdapterConfig(kind="bias")
RATE = 3e-3


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
