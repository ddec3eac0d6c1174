"""Reading config.json: fields, spellings and rotary frequencies equal transformers'; what is not
supported is refused.
"""

import dataclasses
import json

import numpy as np
import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from mint_jax import params as params_lib
from mint_jax.errors import UserError
from mint_jax.models import config as model_config
from mint_jax.models import names, transformer
from mint_jax.models.config import rope_frequencies
from mint_jax.models.hf_config import FAMILIES, ONLY, from_hf, read_config
from tests import oracles

GOOD = {"architectures": ["LlamaForCausalLM"], "vocab_size": 97, "hidden_size": 48}
GOOD |= {"intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4}


def message(call, *args, **kwargs) -> str:
    """The message of the mistake that a call raises."""
    with pytest.raises(UserError) as error:
        call(*args, **kwargs)
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


MALFORMED = (3, "x", {}, [], [3], [{}], [[1]], None, -1, 0, 1.5, True, float("nan"), 10**30)


@pytest.mark.parametrize("name", names.SHAPES)
def test_a_malformed_field_is_read_or_refused_with_a_message(name):
    """Never a crash of another kind, nor a loop over 10^30 layers."""
    refused = 0
    for field in names.SHAPES[name]:
        for value in MALFORMED:
            try:
                from_hf(names.SHAPES[name] | {field: value})
            except UserError:
                refused += 1
    assert refused > 4 * len(names.SHAPES[name])


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
REFUSED = [(GOOD | changes, words) for changes, words in REFUSED]
TYPES = ("sliding_attention", "full_attention")
GPT_OSS = names.SHAPES["gpt-oss-20b"] | {
    "model_type": "gpt_oss",
    "experts_per_token": 4,
    "initial_context_length": 4096,
    "layer_types": TYPES * 12,
    "hidden_act": "silu",
    "swiglu_limit": 7.0,
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
}
GEMMA = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}
GEMMA4 = {"architectures": ["Gemma4ForCausalLM"], "num_hidden_layers": 3}
GEMMA4 |= {"layer_types": [TYPES[0], TYPES[1], TYPES[1]], "attention_k_eq_v": True}
GEMMA4_MOE = GEMMA4 | {"enable_moe_block": True, "num_experts": 8, "moe_intermediate_size": 8}
MINISTRAL = {"architectures": ["Ministral3ForCausalLM"]}
QWEN3_5 = {"architectures": ["Qwen3_5ForCausalLM"], "num_hidden_layers": 5}
NEMOTRON = {"architectures": ["NemotronHForCausalLM"]}
KIMI = {"architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear"}
KIMI |= {  # spellings of its files
    **{"num_experts": 16, "num_experts_per_token": 4, "model_max_length": 512},
    **{"moe_renormalize": False, "num_expert_group": 2, "num_shared_experts": 3},
    "linear_attn_config": {
        **{"head_dim": 6, "num_heads": 2, "short_conv_kernel_size": 3},
        **{"full_attn_layers": [3, 5], "kda_layers": [1, 2, 4]},
    },
    **{"first_k_dense_replace": 2, "num_hidden_layers": 5, "mla_use_nope": True},
}
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
REFUSED += [
    (GPT_OSS | {"swiglu_limit": 5.0}, "swiglu_limit is 5.0"),
    (GPT_OSS | {"sliding_window": None}, "sliding_window is None"),
    (GPT_OSS | {"sliding_window": 0}, "sliding_window is 0"),
    (GPT_OSS | {"layer_types": TYPES}, "for each of 24 layers"),
    (GPT_OSS | {"layer_types": ["chunked_attention"] * 24}, "expected 'full_attention' or"),
    (GPT_OSS | {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    (GEMMA | {"hidden_activation": "silu"}, "only 'gelu_pytorch_tanh'"),
    (GEMMA | {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
    (GEMMA | {"query_pre_attn_scalar": None}, "query_pre_attn_scalar is None"),
    (
        GEMMA | {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
        "layers with a window have rope scaling",
    ),
    (GEMMA4 | {"enable_moe_block": True, "num_experts": 8}, "top_k_experts is None"),
    (GEMMA4_MOE | {"top_k_experts": 9}, "top_k_experts is 9, of 8 experts"),
    (GEMMA4 | {"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'"),
    (GEMMA4 | {"num_kv_shared_layers": 3}, "num_kv_shared_layers is 3"),
    (GEMMA4 | {"num_kv_shared_layers": 2}, "num_kv_shared_layers is 2"),
    (GEMMA4 | {"vocab_size_per_layer_input": 9}, "vocab_size_per_layer_input is 9"),
    (GEMMA4 | {"final_logit_softcapping": -1.0}, "final_logit_softcapping is -1.0"),
    (GEMMA4 | {"per_layer_config": {"1": {"head_dim": 8}}}, "expected equal heads in all"),
    (GEMMA4 | {"per_layer_config": {"1": {"hidden_size": 8}}}, "per_layer_config of layer 1"),
    (GEMMA4 | {"num_global_key_value_heads": 3}, "num_key_value_heads 3 does not divide"),
    (GEMMA4 | {"rope_theta": 1e5}, "rope_theta is 100000.0"),
    (
        GEMMA4
        | {"rope_parameters": {"full_attention": {"factor": 2.0, "partial_rotary_factor": 0.5}}},
        "partial_rotary_factor is 0.5; only rope_type 'proportional'",
    ),
    (MINISTRAL | {"rope_parameters": YARN}, "has no llama_4_scaling_beta"),
    (MINISTRAL | {"rope_parameters": {"rope_type": "default"}}, "has no llama_4_scaling_beta"),
    ({"architectures": ["Qwen3_5ForConditionalGeneration"]}, "has no text_config"),
    (QWEN3_5 | {"layer_types": ["linear_attention"] * 4}, "for each of 5 layers"),
    (QWEN3_5 | {"layer_types": ["linear_attention"] * 4 + ["sliding_attention"]}, "sliding_att"),
    (QWEN3_5 | {"linear_num_value_heads": 5}, "linear_num_key_heads 16 does not divide"),
    (QWEN3_5 | {"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim is 0"),
    (QWEN3_5 | {"linear_key_head_dim": "8"}, "linear_key_head_dim is '8'"),
    (QWEN3_5 | {"rope_parameters": {"partial_rotary_factor": 1.5}}, "is 1.5"),
    (QWEN3_5 | {"attn_output_gate": False}, "attn_output_gate is False"),
    (
        NEMOTRON | {"layers_block_type": ["mamba", "mixer"]},
        "'mixer']; expected one of linear_attention",
    ),
    (NEMOTRON | {"hybrid_override_pattern": "MEX*"}, "is 'MEX*'; expected one of M, *, -, E for"),
    (
        NEMOTRON | {"hybrid_override_pattern": "ME*", "num_hidden_layers": 4},
        "of 3 layers, and num_hidden_layers is 4",
    ),
    (NEMOTRON | {"hybrid_override_pattern": 5}, "pattern is 5; expected one of M"),
    (NEMOTRON | {"mamba_num_heads": 5}, "mamba_num_heads is 5, which n_groups 8 does not divide"),
    (NEMOTRON | {"ssm_state_size": 0}, "ssm_state_size is 0"),
    (NEMOTRON | {"mlp_hidden_act": "silu"}, "mlp_hidden_act is 'silu'; only 'relu2'"),
    (NEMOTRON | {"time_step_limit": [0.0, 0.1]}, "time_step_limit is [0.0, 0.1]"),
    (NEMOTRON | {"mamba_d_conv": 4}, "mamba_d_conv is 4; only None"),
    (NEMOTRON | {"tie_word_embeddings": True}, "tie_word_embeddings is True"),
    (KIMI | {"linear_attn_config": {"full_attn_layers": [3, 6]}}, "full_attn_layers is [3, 6]"),
    (KIMI | {"linear_attn_config": {"kda_layers": [1, 2, 3]}}, "expected each of 5 layers once"),
    (KIMI | {"linear_attn_config": [1]}, "linear_attn_config is [1]"),
    (KIMI | {"linear_attn_config": {"num_heads": 0}}, "linear_num_heads is 0"),
    (KIMI | {"n_group": 4}, "num_expert_group is 2, and n_group is 4"),
    (KIMI | {"mla_use_nope": False}, "mla_use_nope is False"),
    (KIMI | {"moe_router_activation_func": "softmax"}, "is 'softmax'; only None or 'sigmoid'"),
]


@pytest.mark.parametrize(("fields", "words"), REFUSED, ids=range(len(REFUSED)))
def test_what_no_model_here_computes_is_refused_by_name(fields, words):
    assert words in message(from_hf, fields)


# of the classes of transformers 5.23, and the last three of their model cards
BILLIONS = {"gpt-oss-20b": 20.91, "gpt-oss-120b": 116.83, "qwen3-next-80b-a3b": 79.67}
BILLIONS |= {"glm-4.5": 352.80, "gemma-4-31b": 30.7, "gemma-4-26b-a4b": 25.2}
BILLIONS |= {"nemotron-3-nano-30b-a3b": 31.6}


@pytest.mark.parametrize("name", BILLIONS)
def test_published_bases_have_their_number_of_parameters(name):
    count = params_lib.count(transformer.abstract(from_hf(names.SHAPES[name])))
    assert count / 1e9 == pytest.approx(BILLIONS[name], rel=0.002)


def test_gemma_is_read_in_its_older_spelling_too():
    """As in the file of gemma-3-4b-it: a pattern, two bases, and scaling of the layers without a
    window.
    """
    old = {"sliding_window_pattern": 3, "rope_theta": 2e6, "rope_local_base_freq": 3e4}
    old |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "num_hidden_layers": 7}
    full = {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6}
    near = {"rope_type": "default", "rope_theta": 3e4}
    new = {"rope_parameters": {"full_attention": full, "sliding_attention": near}}
    new |= {"num_hidden_layers": 7, "layer_types": [TYPES[i in (2, 5)] for i in range(7)]}
    assert from_hf(GEMMA | old) == from_hf(GEMMA | new)
    assert from_hf(GEMMA | new).windows.theta == 3e4


def test_heads_of_gemma_4_are_read_in_both_spellings():
    """As in published files, and as transformers 5.23 saves them."""
    published = {"global_head_dim": 64, "num_global_key_value_heads": 2}
    saved = {"per_layer_config": {i: {"head_dim": 64, "num_key_value_heads": 2} for i in "12"}}
    cfg = from_hf(GEMMA4 | published)
    assert cfg == from_hf(GEMMA4 | saved)
    assert (cfg.num_kv_heads, cfg.head_dim, cfg.windows.heads) == (2, 64, (4, 256))
    # the number counts only with attention_k_eq_v
    assert from_hf(GEMMA4 | published | {"attention_k_eq_v": False}).num_kv_heads == 4
    # the last layer has no window, whatever the file says
    assert from_hf(GEMMA4 | {"layer_types": [TYPES[0]] * 3}).windows.near == (True, True, False)


def test_published_spellings_are_those_of_the_class():
    cfg = from_hf(KIMI)
    theirs = transformers.KimiLinearConfig.from_dict(json.loads(json.dumps(KIMI)))
    assert from_hf(KIMI | theirs.to_dict()) == cfg
    assert list(cfg.delta.full) == [kind == "full_attention" for kind in theirs.layer_types]
    assert cfg.dense_layers == theirs.mlp_layer_types.count("dense") == 2
    assert (cfg.delta.heads, cfg.delta.key, cfg.delta.taps, cfg.delta.latent) == (2, 6, 3, 6)
    assert (cfg.experts.count, cfg.experts.per_token, cfg.experts.groups) == (16, 4, 2)
    assert (cfg.context, cfg.experts.normalise) == (512, False)
    assert cfg.experts.shared == 3 * cfg.experts.width
    assert cfg.rope_dim == 0


def test_a_pattern_of_letters_is_a_list_of_types(hf_dirs):
    config = json.loads((hf_dirs("nemotron_h") / "config.json").read_text())
    cfg = from_hf(config)
    del config["layers_block_type"]
    assert from_hf(config | {"hybrid_override_pattern": "MEME*E"}) == cfg
    dense = from_hf(config | {"hybrid_override_pattern": "M-*M"})
    assert dense.experts is None
    assert dense.only == ("ssm", "mlp", "attn", "ssm")


def test_layers_are_grouped_by_their_pattern():
    def groups(kinds):
        found = model_config._groups(tuple(kinds))
        return [{n: list(r) for n, r in group.items()} for group in found]

    assert groups("aaa") == [{"a": [0, 1, 2]}]
    assert groups("aabbb") == [{"a": [0, 1]}, {"b": [2, 3, 4]}]
    assert groups("aabaabaab") == [{"a": [0, 3, 6], "a1": [1, 4, 7], "b": [2, 5, 8]}]
    assert groups("ababa") == [{"a": [0, 2], "b": [1, 3]}, {"a1": [4]}]


DEFAULTS = {family.model_type: family.defaults for family in FAMILIES.values()}
FAMILY_ONLY = {family.model_type: family.only for family in FAMILIES.values()}
CLASSES = {family: transformers.CONFIG_MAPPING[family] for family in DEFAULTS}
# Arguments that Gemma 4's class turns into overrides of single layers; its logits compare them.
NO_FIELDS = ("global_head_dim", "num_global_key_value_heads", "per_layer_config")
TINY = {"glm4_moe": "glm4", "glm4_moe_lite": "glm4_lite", "glm_moe_dsa": "glm"}  # of oracles.TINY
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
    _, sizes = oracles.TINY[TINY.get(family, family.removesuffix("_text"))]
    architecture = next(name for name, one in FAMILIES.items() if one.model_type == family)
    return {"architectures": [architecture], "model_type": family} | oracles._COMMON | sizes


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
    sizes = {name: x for name, x in _given(family).items() if name != "rope_parameters"}
    assert rope["rope_theta"] == from_hf(sizes).rope_theta


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
        assert f"{field} is 'other'" in message(from_hf, given | {field: "other"})


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
    assert words in message(read_config, tmp_path)
