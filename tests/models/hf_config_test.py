"""Reading config.json: fields and rotary frequencies equal transformers', and what is not supported
is refused.
"""

import dataclasses
import json

import numpy as np
import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from mint_jax.errors import UserError
from mint_jax.models.config import rope_frequencies
from mint_jax.models.hf_config import FAMILIES, ONLY, from_hf, read_config

GOOD = {"architectures": ["LlamaForCausalLM"], "vocab_size": 97, "hidden_size": 48}
GOOD |= {"intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4}


def _message(call, *args) -> str:
    with pytest.raises(UserError) as error:
        call(*args)
    return str(error.value)


_SCALED = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LENGTH = {"original_max_position_embeddings": 64}
_YARN = {"type": "yarn", "factor": 4.0} | _LENGTH
_LLAMA3 = {"rope_type": "llama3"} | _SCALED | _LENGTH


def _yarn(**fields):
    return {"rope_theta": 5e5, "rope_scaling": _YARN | fields}


SPELLINGS = [
    {},
    {"rope_theta": 3e5},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 3e5}},
    {"rope_parameters": {"rope_type": "default"}, "rope_theta": 7e5},
    _yarn(),
    {"rope_theta": 5e5, "rope_scaling": _LLAMA3},
    {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0, "rope_theta": 3e5}},
    # the old key goes first, whole
    {"rope_scaling": _YARN, "rope_parameters": {"rope_type": "default", "rope_theta": 3e5}},
    {"rope_scaling": {}, "rope_parameters": _LLAMA3 | {"rope_theta": 3e5}},
    {"rope_scaling": {"type": "yarn", "factor": 4.0}},  # of max_position_embeddings
    # the length at the top goes before the one inside
    {"rope_scaling": _YARN, "original_max_position_embeddings": 32},
    {
        "rope_parameters": {"rope_type": "llama3", **_SCALED, "rope_theta": 1e4},
        "original_max_position_embeddings": 32,
    },
    {
        "rope_parameters": {"rope_type": "yarn", "factor": None, "rope_theta": 1e4},
        "original_max_position_embeddings": 32,
    },
    _yarn(beta_fast=None, beta_slow=0, mscale=None, finetuned=True, truncate=None),
    _yarn(beta_fast=16.0, beta_slow=2.0, attention_factor=1.7),
    _yarn(mscale=0.7, mscale_all_dim=1.3, truncate=False),
    _yarn(factor=0.5),
    {"rope_scaling": _LLAMA3 | {"low_freq_factor": 2.0, "high_freq_factor": 2.5}},
]


@pytest.mark.parametrize("spelling", SPELLINGS, ids=range(len(SPELLINGS)))
def test_rotary_frequencies_are_those_of_transformers_in_every_spelling(spelling):
    fields = GOOD | {"model_type": "llama", "head_dim": 32, "max_position_embeddings": 256}
    fields |= spelling
    theirs = transformers.LlamaConfig.from_dict(json.loads(json.dumps(fields)))
    theirs = LlamaRotaryEmbedding(theirs)
    cfg = from_hf(fields)
    ours, factor = rope_frequencies(cfg.head_dim, cfg.rope_theta, cfg.rope_scaling)
    # theirs is float32
    np.testing.assert_allclose(ours, theirs.inv_freq.double().numpy(), rtol=1e-5)
    assert factor == pytest.approx(theirs.attention_scaling, rel=1e-12)


_PER_LAYER = {"full_attention": {"rope_type": "linear", "factor": 2.0}}
_PARTIAL = {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}
REFUSED = [  # fields, words of the message
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope scaling 'dynamic' is not supp"),
    ({"rope_parameters": {"rope_type": "longrope"}}, "expected default, linear, llama3, yarn"),
    ({"rope_parameters": _PER_LAYER}, "differ by layer are not supported"),
    ({"rope_parameters": [1.0]}, "the rope parameters are [1.0]"),
    ({"rope_parameters": {"rope_theta": None}}, "rope_theta is None"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ({"rope_parameters": _PARTIAL}, "partial_rotary_factor is 0.5"),
    ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "'llama3' has no low_freq_factor"),
    ({"rope_scaling": {"type": "linear", "factor": "8"}}, "factor is '8'"),
    ({"architectures": ["MambaForCausalLM"]}, "supported: LlamaForCausalLM, Qwen2ForCausalLM"),
    ({"architectures": None}, "(none)"),
    ({"quantization_config": {"quant_method": "hqq"}}, "quantised (quant_method 'hqq')"),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; only 'silu' or 'swish'"),
    ({"layer_types": ["sliding_attention"]}, "sliding-window attention is not"),
    ({"head_dim": 7}, "7 dimensions of a head rotate; expected an even"),
    ({"model_type": "qwen3"}, "model_type is 'qwen3'; transformers uses model_type: correct"),
    (
        {"architectures": ["DeepseekV3ForCausalLM"], "num_key_value_heads": 4, "head_dim": 6},
        "head_dim is 6; expected none, or qk_rope_head_dim 64",
    ),
    (
        {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "num_local_experts": 16},
        "they differ: {'num_experts': 8, 'num_local_experts': 16}",
    ),
    ({"hidden_size": None}, "hidden_size is None"),
    ({"num_hidden_layers": "three"}, "num_hidden_layers is 'three'"),
    ({"num_hidden_layers": 2.5}, "num_hidden_layers is 2.5"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED, ids=range(len(REFUSED)))
def test_what_no_model_here_computes_is_refused_by_name(changes, words):
    assert words in _message(from_hf, GOOD | changes)


DEFAULTS = {family.model_type: family.defaults for family in FAMILIES.values()}
FAMILY_ONLY = {family.model_type: family.only for family in FAMILIES.values()}
CLASSES = {family: transformers.CONFIG_MAPPING[family] for family in DEFAULTS}
SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8}
SMALL_EXPERTS = {"num_experts_per_tok": 3, "moe_intermediate_size": 12}
SMALL_LATENT = SMALL_EXPERTS | {"q_lora_rank": 24, "kv_lora_rank": 20, "qk_nope_head_dim": 12}
SMALL_LATENT |= {"qk_rope_head_dim": 8, "v_head_dim": 10, "n_routed_experts": 8, "n_group": 2}
SMALL_LATENT |= {"topk_group": 1, "first_k_dense_replace": 1}
SMALL_STATES = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
SMALL_STATES |= {"linear_value_head_dim": 6, "num_hidden_layers": 4}
SMALL_SHARED = SMALL_EXPERTS | {"num_experts": 8, "shared_expert_intermediate_size": 20}
SMALL_CHANNELS = SMALL_LATENT | {"n_group": 1, "linear_head_dim": 8, "linear_num_heads": 2}
SMALL_CHANNELS |= {"num_local_experts": SMALL_CHANNELS.pop("n_routed_experts")}
SMALL_SSM = {"ssm_state_size": 6, "mamba_num_heads": 4, "mamba_head_dim": 5, "n_groups": 2}
SMALL_SSM |= {"n_routed_experts": 8, "moe_shared_expert_intermediate_size": 20}
SMALL_INDEXER = {"index_topk": 4, "index_head_dim": 16, "index_n_heads": 2}
SMALL_INPUTS = {"hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": 64}
# Arguments that Gemma 4's class turns into overrides of single layers; its logits compare them.
NO_FIELDS = ("global_head_dim", "num_global_key_value_heads", "per_layer_config")
TINY = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "mistral", "ministral3"), SMALL),
    "gemma3_text": SMALL | {"sliding_window": 4},
    "gemma4_text": SMALL | SMALL_INPUTS | {"sliding_window": 4},
    "gpt_oss": SMALL | {"num_experts_per_tok": 3, "num_local_experts": 8, "sliding_window": 4},
    "qwen3_moe": SMALL | SMALL_EXPERTS | {"num_experts": 8},
    "qwen3_5_text": SMALL | SMALL_STATES,
    **dict.fromkeys(("qwen3_5_moe_text", "qwen3_next"), SMALL | SMALL_STATES | SMALL_SHARED),
    "nemotron_h": SMALL | SMALL_EXPERTS | SMALL_SSM | {"num_hidden_layers": 4},
    "kimi_linear": SMALL | SMALL_CHANNELS | {"num_hidden_layers": 6},
    "deepseek_v3": SMALL | SMALL_LATENT,
    "glm4_moe": SMALL | SMALL_EXPERTS | {"n_routed_experts": 8},
    "glm4_moe_lite": SMALL | SMALL_LATENT | {"n_group": 1},
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), SMALL | SMALL_LATENT | SMALL_INDEXER),
}
# Field that the forward pass does not depend on -> a value that is no default.
NO_EFFECT = {"transformers_version": "4.0.0", "output_hidden_states": True, "use_cache": False}
NO_EFFECT |= {"output_router_logits": True, "chunk_size_feed_forward": 4}
NO_EFFECT |= dict.fromkeys(("output_attentions", "return_dict", "dtype", "problem_type"))
NO_EFFECT |= dict.fromkeys(("id2label", "label2id")) | {"is_encoder_decoder": True}
NO_EFFECT |= {"pad_token_id": 3, "bos_token_id": 3, "eos_token_id": 3, "initializer_range": 0.5}
NO_EFFECT |= {"attention_dropout": 0.5, "router_aux_loss_coef": 0.5, "max_window_layers": 1}
NO_EFFECT["pretraining_tp"] = 2  # only in training, and not in transformers 5
NO_EFFECT["sliding_window"] = 4  # disabled by use_sliding_window
NO_EFFECT["num_mtp_layers"] = 3  # layers after the last one, for speculative decoding
NO_EFFECT["head_dim"] = 6  # replaced by qk_rope_head_dim
NO_EFFECT |= {"num_logits_to_keep": 2, "use_mamba_kernels": False, "expand": 3, "chunk_size": 64}
NO_EFFECT |= {"time_step_max": 0.5, "time_step_floor": 0.5, "residual_in_fp32": True}
NO_EFFECT |= {"mamba_ssm_cache_dtype": "bfloat16", "moe_shared_expert_overlap": False}
NO_EFFECT |= {"mtp_layers_block_type": ["moe"], "hidden_dropout": 0.5}
NO_EFFECT |= {"rescale_prenorm_residual": False}
# In published files, but not in a class.
NO_EFFECT |= {"auto_map": {"AutoConfig": "x.Y"}, "ep_size": 4, "aux_loss_alpha": 0.1}
NO_EFFECT |= {"seq_aux": True, "num_nextn_predict_layers": 3, "qk_head_dim": 7}
NO_EFFECT["unsloth_version"] = "1"
PUBLISHED = list(NO_EFFECT)[-7:]


def _given(family):
    architecture = next(name for name, one in FAMILIES.items() if one.model_type == family)
    return {"architectures": [architecture], "model_type": family} | TINY[family]


def _torch_logits(family, **changes):
    """Logits of the class with those fields; weights depend on their names only."""
    none = dict.fromkeys(f"{name}_token_id" for name in ("bos", "eos", "pad"))
    fields = _given(family) | none | changes
    config = CLASSES[family].from_dict(json.loads(json.dumps(fields)))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model = model.float().eval()
    with torch.no_grad():
        for name, p in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" not in name and p.ndim:
                seed = int.from_bytes(name.encode()[-6:], "little")
                drawn = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed))
                p.copy_(drawn * p.shape[-1] ** -0.5)
        return model(torch.arange(12)[None] * 5 % 64).logits


@pytest.mark.parametrize("family", DEFAULTS)
def test_defaults_are_those_of_the_classes_of_transformers(family):
    """So a file of sizes alone has the same model here as in transformers."""
    cls, ours = CLASSES[family], dict(DEFAULTS[family])
    theirs = {field.name: field.default for field in dataclasses.fields(cls)}
    latent = "qk_rope_head_dim" in ours
    if latent or "head_dim" not in theirs:  # it follows from other fields
        ours.pop("head_dim")
    for name in NO_FIELDS:
        ours.pop(name, None)
    assert ours == {name: theirs[name] for name in ours}
    refused = {
        name: values
        for name, values in (ONLY | FAMILY_ONLY[family]).items()
        if name in theirs.keys() - ours
    }
    assert all(theirs[name] in values for name, values in refused.items()), (
        "what a file leaves out is never refused"
    )
    if family in ("nemotron_h", "kimi_linear"):  # no positions
        return
    rope = cls().rope_parameters
    rope = rope.get("full_attention", rope)
    assert rope["rope_theta"] == from_hf(_given(family)).rope_theta


@pytest.mark.parametrize("family", DEFAULTS)
def test_every_field_is_read_or_refused_or_has_no_effect(family):
    """A field of a new release of transformers fails here until it is decided on."""
    given, refused = _given(family), ONLY | FAMILY_ONLY[family]
    names = {field.name for field in dataclasses.fields(CLASSES[family])}
    latent = "qk_rope_head_dim" in DEFAULTS[family]
    read = set(DEFAULTS[family]) - ({"head_dim"} if latent else set())
    others = names - read - set(refused) - {"architectures", "layer_types"}
    assert others <= set(NO_EFFECT)
    changes = {
        name: NO_EFFECT[name] for name in [*others, *PUBLISHED] if NO_EFFECT[name] is not None
    }
    assert from_hf(given | changes) == from_hf(given)
    assert torch.equal(_torch_logits(family, **changes), _torch_logits(family))
    for field in refused:
        assert f"{field} is 'other'" in _message(from_hf, given | {field: "other"})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "config.json does not exist: a base is a directory with config.json and"),
        (json.dumps(GOOD)[:-30], "config.json is not valid JSON"),
        ("[1, 2]", "config.json holds a list"),
    ],
)
def test_a_broken_config_file_is_refused(text, words, tmp_path):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    assert words in _message(read_config, tmp_path)
