"""Reading config.json: fields and rotary frequencies equal transformers', and what is not supported is refused."""

import dataclasses
import json

import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from mint_jax.errors import UserError
from mint_jax.models.config import from_hf, read_config, rope_frequencies
from tests import oracles

GOOD = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}


def _message(call, *args) -> str:
    with pytest.raises(UserError) as error:
        call(*args)
    return str(error.value)


@pytest.mark.parametrize("name", oracles.TINY)
def test_fields_equal_those_transformers_reads(name, hf_dirs):
    cfg, hf = read_config(hf_dirs(name)), transformers.AutoConfig.from_pretrained(hf_dirs(name))
    ours = (cfg.vocab_size, cfg.d_model, cfg.num_layers, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim, cfg.d_ff)
    theirs = (hf.vocab_size, hf.hidden_size, hf.num_hidden_layers, hf.num_attention_heads, hf.num_key_value_heads)
    assert ours == (*theirs, getattr(hf, "qk_head_dim", hf.head_dim), hf.intermediate_size)
    assert cfg.rope_dim == hf.head_dim
    if cfg.latent is not None:
        ranks = (hf.q_lora_rank or 0, hf.kv_lora_rank, hf.qk_nope_head_dim, hf.qk_rope_head_dim, hf.v_head_dim)
        assert dataclasses.astuple(cfg.latent) == ranks
    if cfg.indexer is not None:
        types = getattr(hf, "indexer_types", ["full"] * 3)
        assert dataclasses.astuple(cfg.indexer)[:3] == (hf.index_n_heads, hf.index_head_dim, hf.index_topk)
        assert cfg.indexer.full == tuple(kind == "full" for kind in types)
    assert (cfg.norm_eps, cfg.context, cfg.tie_embeddings) == (hf.rms_norm_eps, hf.max_position_embeddings, hf.tie_word_embeddings)
    assert cfg.rope_theta == hf.rope_parameters["rope_theta"]
    modules = {key.split(".", 3)[-1] for key in oracles.torch_model(hf_dirs(name)).state_dict()}
    assert cfg.qkv_bias == ("self_attn.q_proj.bias" in modules)
    assert cfg.o_bias == ("self_attn.o_proj.bias" in modules)
    assert cfg.mlp_bias == ("mlp.up_proj.bias" in modules)
    assert cfg.qk_norm == ("self_attn.q_norm.weight" in modules)
    sparse = sum("mlp.gate.weight" in key for key in oracles.torch_model(hf_dirs(name)).state_dict())
    assert cfg.stacks == {kind: layers for kind, layers in (("dense", 3 - sparse), ("moe", sparse)) if layers}


def test_absent_fields_take_the_defaults_of_the_format():
    cfg = from_hf(GOOD)
    assert (cfg.num_kv_heads, cfg.head_dim, cfg.tie_embeddings, cfg.rope_theta, cfg.norm_eps) == (4, 12, False, 10000.0, 1e-6)
    assert cfg.rope_scaling is None
    assert from_hf(GOOD | {"head_dim": None, "num_key_value_heads": None}) == cfg  # released configs write null


def test_old_and_new_spelling_of_rope_scaling_give_the_same_config():
    scaling = {"factor": 8.0, "original_max_position_embeddings": 64, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    new = from_hf(GOOD | {"rope_parameters": scaling | {"rope_type": "llama3", "rope_theta": 5e5}})
    for key in ("rope_type", "type"):
        assert from_hf(GOOD | {"rope_theta": 5e5, "rope_scaling": scaling | {key: "llama3"}}) == new
    assert new.rope_theta == 5e5


_LONG = {"factor": 4.0, "original_max_position_embeddings": 64}
ROPES = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **_LONG},
    "llama3-narrow": {"rope_type": "llama3", "low_freq_factor": 2.0, "high_freq_factor": 2.5, **_LONG},
    "yarn": {"rope_type": "yarn", **_LONG},
    "yarn-betas": {"rope_type": "yarn", "beta_fast": 16.0, "beta_slow": 2.0, **_LONG},
    "yarn-attention-factor": {"rope_type": "yarn", "attention_factor": 1.7, **_LONG},
    "yarn-mscale": {"rope_type": "yarn", "mscale": 0.7, "mscale_all_dim": 1.3, **_LONG},
    "yarn-not-truncated": {"rope_type": "yarn", "truncate": False, **_LONG},
    "yarn-factor-from-lengths": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 64},
    "yarn-shrinking": {"rope_type": "yarn", "factor": 0.5, "original_max_position_embeddings": 64},
}


@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_rope_frequencies_equal_transformers(kind, head_dim, rng):
    theta = float(rng.choice([1e4, 5e5, 1e6]))
    raw = ROPES[kind] | {"rope_theta": theta}
    config = transformers.LlamaConfig(head_dim=head_dim, max_position_embeddings=256, rope_parameters=dict(raw))
    theirs, their_factor = ROPE_INIT_FUNCTIONS[raw["rope_type"]](config, torch.device("cpu"))
    cfg = from_hf(GOOD | {"head_dim": head_dim, "max_position_embeddings": 256, "rope_parameters": raw})
    ours, factor = rope_frequencies(cfg.head_dim, cfg.rope_theta, cfg.rope_scaling)
    np.testing.assert_allclose(ours, theirs.double().numpy(), rtol=1e-5)  # theirs is float32, with one power and one ramp
    assert factor == pytest.approx(their_factor, rel=1e-12)


@pytest.mark.parametrize("theta", [1e4, 1e6])
def test_plain_rope_frequencies_follow_the_paper(theta):
    inv, factor = rope_frequencies(32, theta, None)
    np.testing.assert_allclose(inv, [1 / theta ** (2 * i / 32) for i in range(16)], rtol=1e-12)  # float64 both
    assert factor == 1.0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["MambaForCausalLM"]}, ["MambaForCausalLM", "supported: LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM"]),
        ({"architectures": None}, ["(none)", "supported: LlamaForCausalLM"]),
        ({"hidden_act": "gelu"}, ["hidden_act is 'gelu'", "only silu"]),
        ({"use_sliding_window": True}, ["sliding-window", "use_sliding_window must be false"]),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ["sliding-window", "layer_types full_attention"]),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, ["'longrope'", "expected default, linear, llama3 or yarn"]),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, ["'dynamic'", "expected default, linear, llama3 or yarn"]),
    ],
)
def test_what_is_not_supported_is_refused(changes, words):
    message = _message(from_hf, GOOD | changes)
    assert all(word in message for word in words), message


@pytest.mark.parametrize("field", [name for name in GOOD if name != "architectures"])
def test_a_missing_field_is_named(field):
    message = _message(from_hf, {k: v for k, v in GOOD.items() if k != field})
    assert f"'{field}'" in message
    assert "LlamaForCausalLM" in message
    assert "take a complete checkpoint directory" in message


@pytest.mark.parametrize(("field", "value"), [("hidden_size", None), ("num_hidden_layers", "three"), ("intermediate_size", [80, 80])])
def test_a_field_that_is_no_number_is_named(field, value):
    message = _message(from_hf, GOOD | {field: value})
    assert field in message
    assert repr(value) in message


def test_heads_that_kv_heads_do_not_divide_are_refused():
    message = _message(from_hf, GOOD | {"num_key_value_heads": 3})
    assert "3" in message
    assert "4" in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, ["config.json does not exist", "a directory with config.json and *.safetensors"]),
        (json.dumps(GOOD)[:-30], ["config.json is not valid JSON", "fetch the checkpoint again"]),
        ("", ["config.json is not valid JSON", "fetch the checkpoint again"]),
        ("[1, 2]", ["config.json"]),
    ],
)
def test_a_broken_config_file_is_refused(text, words, tmp_path):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    message = _message(read_config, tmp_path)
    assert str(tmp_path) in message
    assert all(word in message for word in words), message
