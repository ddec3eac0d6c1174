"""Reads ``ModelConfig`` from a Hugging Face ``config.json``, as transformers does.

A family is an entry of ``FAMILIES`` here, one of ``LAYER_NAMES`` in ``hf.py``, and its layer
functions.
"""

import dataclasses
import math
from pathlib import Path
from typing import Any

from mint_jax.errors import UserError
from mint_jax.files import read_object
from mint_jax.models import published
from mint_jax.models.config import (
    Delta,
    Experts,
    Indexer,
    Latent,
    LayerInputs,
    ModelConfig,
    RopeScaling,
    SharedKeys,
    Ssm,
    Windows,
)

_GROUPED = {"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016}
_GROUPED |= {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32}
_GROUPED |= {"head_dim": None, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6}
_GROUPED |= {"tie_word_embeddings": False, "rope_parameters": None}
_LLAMA = {"vocab_size": 32000, "intermediate_size": 11008, "num_key_value_heads": None}
_LLAMA |= {"max_position_embeddings": 2048, "attention_bias": False, "mlp_bias": False}
_QWEN3_MOE = {"hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768}
_QWEN3_MOE |= {"num_hidden_layers": 24, "num_key_value_heads": 4, "num_experts": 128}
_QWEN3_MOE |= {"num_experts_per_tok": 8, "norm_topk_prob": False, "attention_bias": False}
_LATENT = _GROUPED | {"vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432}
_LATENT |= {"moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128}
_LATENT |= {"num_key_value_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256}
_LATENT |= {"routed_scaling_factor": 2.5, "kv_lora_rank": 512, "q_lora_rank": 1536}
_LATENT |= {"qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128, "n_group": 8}
_LATENT |= {"topk_group": 4, "num_experts_per_tok": 8, "first_k_dense_replace": 3}
_LATENT |= {"norm_topk_prob": True, "max_position_embeddings": 4096}
_INDEXED = _LATENT | {"max_position_embeddings": 163840, "mlp_layer_types": None}
_INDEXED |= {"index_topk": 2048, "index_head_dim": 128, "index_n_heads": 64}
_GLM = {"vocab_size": 154880, "hidden_size": 6144, "intermediate_size": 12288}
_GLM |= {"num_hidden_layers": 78, "num_attention_heads": 64, "num_key_value_heads": 64}
_GLM |= {"q_lora_rank": 2048, "v_head_dim": 256, "qk_nope_head_dim": 192, "n_group": 1}
_GLM |= {"topk_group": 1, "max_position_embeddings": 202752, "rms_norm_eps": 1e-5}
_GLM |= {"index_n_heads": 32, "indexer_types": None}
_GLM4 = {"vocab_size": 151552, "intermediate_size": 10944, "moe_intermediate_size": 1408}
_GLM4 |= {"num_hidden_layers": 46, "num_attention_heads": 96, "num_key_value_heads": 8}
_GLM4 |= {"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "attention_bias": False}
_GLM4 |= {"num_experts_per_tok": 8, "n_shared_experts": 1, "n_routed_experts": 128}
_GLM4 |= {"routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1}
_GLM4 |= {"first_k_dense_replace": 1, "norm_topk_prob": True, "use_qk_norm": False}
_GLM4_LITE = {"vocab_size": 154880, "hidden_size": 2048, "intermediate_size": 10240}
_GLM4_LITE |= {"moe_intermediate_size": 1536, "num_hidden_layers": 47, "num_attention_heads": 20}
_GLM4_LITE |= {"num_key_value_heads": 20, "n_routed_experts": 64, "routed_scaling_factor": 1.8}
_GLM4_LITE |= {"q_lora_rank": 768, "v_head_dim": 256, "qk_nope_head_dim": 192, "n_group": 1}
_GLM4_LITE |= {"topk_group": 1, "num_experts_per_tok": 4, "max_position_embeddings": 202752}
_GLM4_LITE |= {"rms_norm_eps": 1e-5, "mlp_layer_types": None}
_QWEN3_5 = {"vocab_size": 248320, "hidden_size": 4096, "intermediate_size": 12288}
_QWEN3_5 |= {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256}
_QWEN3_5 |= {"attention_bias": False, "layer_types": None}
_QWEN3_5 |= {"linear_conv_kernel_dim": 4, "linear_key_head_dim": 128}
_QWEN3_5 |= {"linear_value_head_dim": 128, "linear_num_key_heads": 16}
_QWEN3_5 |= {"linear_num_value_heads": 32}
_MISTRAL = {"vocab_size": 32000, "intermediate_size": 14336, "num_key_value_heads": 8}
_MISTRAL |= {"max_position_embeddings": 131072, "sliding_window": 4096}
_SHARED = {"num_experts_per_tok": 8, "num_experts": 256, "moe_intermediate_size": 512}
_SHARED |= {"shared_expert_intermediate_size": 512, "hidden_size": 2048, "num_hidden_layers": 40}
_SHARED |= {"num_key_value_heads": 2}
_QWEN3_NEXT = _QWEN3_5 | _SHARED | {"vocab_size": 151936, "intermediate_size": 5632}
_QWEN3_NEXT |= {"num_hidden_layers": 48, "num_experts": 512, "num_experts_per_tok": 10}
_QWEN3_NEXT |= {"norm_topk_prob": True}
_MINISTRAL = _MISTRAL | {"vocab_size": 131072, "num_hidden_layers": 34, "head_dim": 128}
_MINISTRAL |= {"max_position_embeddings": 262144, "rms_norm_eps": 1e-5, "sliding_window": None}
_MINISTRAL_ROPE = {"rope_type": "yarn", "factor": 16.0, "llama_4_scaling_beta": 0.1, "mscale": 1.0}
_MINISTRAL_ROPE |= {"original_max_position_embeddings": 16384, "mscale_all_dim": 1.0}
_GEMMA3 = {"vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "head_dim": 256}
_GEMMA3 |= {"num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4}
_GEMMA3 |= {"max_position_embeddings": 131072, "tie_word_embeddings": True, "layer_types": None}
_GEMMA3 |= {"query_pre_attn_scalar": 256, "sliding_window": 4096, "attention_bias": False}
_GEMMA4 = {"vocab_size": 262144, "sliding_window": 512, "final_logit_softcapping": None}
_GEMMA4 |= {"num_hidden_layers": 30, "attention_k_eq_v": False, "num_kv_shared_layers": 0}
_GEMMA4 |= {"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144}
_GEMMA4 |= {"use_double_wide_mlp": False, "enable_moe_block": False, "num_experts": None}
_GEMMA4 |= {"top_k_experts": None, "moe_intermediate_size": None}
# arguments that its class turns into overrides of single layers
_GEMMA4 |= {"global_head_dim": 512, "num_global_key_value_heads": None, "per_layer_config": None}
_GPT_OSS = {"vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "head_dim": 64}
_GPT_OSS |= {"num_hidden_layers": 36, "num_attention_heads": 64, "num_key_value_heads": 8}
_GPT_OSS |= {"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "attention_bias": True}
_GPT_OSS |= {"num_local_experts": 128, "num_experts_per_tok": 4, "sliding_window": 128}
_GPT_OSS |= {"layer_types": None}
_GPT_OSS_ROPE = {"rope_type": "yarn", "factor": 32.0, "truncate": False}
_GPT_OSS_ROPE |= {"original_max_position_embeddings": 4096}
_NEMOTRON_H = {"vocab_size": 131072, "hidden_size": 4096, "intermediate_size": 21504}
_NEMOTRON_H |= {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
_NEMOTRON_H |= {"max_position_embeddings": 4096, "layers_block_type": None, "ssm_state_size": 128}
_NEMOTRON_H |= {"mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "conv_kernel": 4}
_NEMOTRON_H |= {"time_step_min": 0.001, "use_conv_bias": True, "use_bias": False}
_NEMOTRON_H |= {"mlp_bias": False, "n_routed_experts": 8, "num_experts_per_tok": 2}
_NEMOTRON_H |= {"moe_intermediate_size": 7688, "moe_shared_expert_intermediate_size": 7688}
_NEMOTRON_H |= {"moe_latent_size": None, "routed_scaling_factor": 1.0, "n_group": 1}
_NEMOTRON_H |= {"topk_group": 1, "norm_topk_prob": True, "layer_norm_epsilon": 1e-5}
_KIMI_LINEAR = {
    k: v for k, v in _LATENT.items() if k not in ("n_routed_experts", "rope_parameters")
}
_KIMI_LINEAR |= {"vocab_size": 163840, "hidden_size": 2304, "intermediate_size": 9216}
_KIMI_LINEAR |= {"moe_intermediate_size": 1024, "num_hidden_layers": 27, "num_local_experts": 256}
_KIMI_LINEAR |= {"num_attention_heads": 32, "num_key_value_heads": 32, "q_lora_rank": None}
_KIMI_LINEAR |= {"routed_scaling_factor": 2.446, "n_group": 1, "topk_group": 1}
_KIMI_LINEAR |= {"max_position_embeddings": 1048576, "rms_norm_eps": 1e-5}
_KIMI_LINEAR |= {"layer_types": None, "mlp_layer_types": None, "linear_head_dim": 128}
_KIMI_LINEAR |= {"linear_num_heads": 32, "linear_conv_kernel_dim": 4}
del _KIMI_LINEAR["first_k_dense_replace"]
# Name of a field in published files -> its name in the class
_KIMI_NAMES = {"model_max_length": "max_position_embeddings", "moe_renormalize": "norm_topk_prob"}
_KIMI_NAMES |= {"num_expert_group": "n_group", "num_shared_experts": "n_shared_experts"}
_KIMI_NAMES |= {"num_experts": "num_local_experts", "num_experts_per_token": "num_experts_per_tok"}
# Part of a layer by its letter in ``hybrid_override_pattern``, and in ``layers_block_type``
_LETTERS = {"M": "ssm", "*": "attn", "-": "mlp", "E": "moe"}
_BLOCKS = {"linear_attention": "ssm", "mamba": "ssm", "full_attention": "attn"}
_BLOCKS |= {"attention": "attn", "mlp": "mlp", "moe": "moe"}
_OFF, _ONE = (None, False), (None, 1)
# Fields that change the forward pass, in the transformers class or in the model's original code ->
# supported values. Other values are rejected. Fields in no table have no effect in the class.
ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "is_causal": (None, True),
    "per_layer_config": (None,),
    **dict.fromkeys(
        ("use_sliding_window", "alibi", "use_bidirectional_attention", "rope_interleaved"), _OFF
    ),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "logits_soft_cap"), _OFF),
    **dict.fromkeys(("attention_chunk_size", "query_pre_attn_scalar"), _OFF),
    **dict.fromkeys(("no_rope_layers", "no_rope_layer_interval"), (None, [], 0)),
    **dict.fromkeys(("embedding_multiplier", "attention_multiplier", "residual_multiplier"), _ONE),
    **dict.fromkeys(("logits_scaling", "logit_scale", "scale_emb", "scale_depth"), _ONE),
}
_ALL_SPARSE = {"mlp_only_layers": (None, []), "decoder_sparse_step": (None, 1)}
_LATENT_ONLY = dict.fromkeys(("attention_bias", "mlp_bias", "sliding_window"), _OFF)
_LATENT_ONLY |= {"moe_layer_freq": _ONE, "scoring_func": (None, "sigmoid")}
_LATENT_ONLY |= {"topk_method": (None, "noaux_tc")}
_KIMI_ONLY = _LATENT_ONLY | {"mla_use_nope": (None, True)}
_KIMI_ONLY["moe_router_activation_func"] = (None, "sigmoid")
# as Python writes it, as a tuple, and as transformers does
_UNLIMITED: tuple[Any, ...] = [0.0, math.inf], (0.0, math.inf), [0.0, {"__float__": "Infinity"}]
_NEMOTRON_ONLY: dict[str, tuple[Any, ...]] = {"time_step_limit": (None, *_UNLIMITED)}
_NEMOTRON_ONLY |= {"mlp_hidden_act": ("relu2",), "mamba_hidden_act": ("silu",)}
_NEMOTRON_ONLY |= dict.fromkeys(("attention_bias", "mamba_proj_bias", "sliding_window"), _OFF)
_NEMOTRON_ONLY |= {"tie_word_embeddings": _OFF, "n_shared_experts": (1,)}
# older names, which transformers reads before the new ones
_NEMOTRON_OLD = "n_groups", "d_conv", "conv_bias", "dt_min", "dt_limit"
_NEMOTRON_ONLY |= dict.fromkeys((f"mamba_{name}" for name in _NEMOTRON_OLD), (None,))


@dataclasses.dataclass(frozen=True)
class Family:
    """One class of transformers, and how its ``config.json`` is read."""

    model_type: str
    defaults: dict[str, Any]  # every field that is read -> default of the class
    only: dict[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)  # beyond ONLY
    # fields of ``ModelConfig`` that no file changes
    model: dict[str, Any] = dataclasses.field(default_factory=dict)
    qkv_bias: bool = False  # whatever ``attention_bias`` says
    o_bias: bool = True  # ``attention_bias`` is of the output projection too
    any_head_dim: bool = True  # latent attention: a ``head_dim`` must be the rotary width
    shared_indexers: bool = False  # some layers reuse the choice of the one before
    # share of a head's dimensions that rotate; 1: no other is supported; 0: no field changes it
    rotary: float = 1.0
    full_every: int = 0  # with windows: every n-th layer has none; 0: all have one
    joint_delta: bool = False  # see ``Delta.joint``
    theta: float = 10000.0  # this and rope: rotary base, and scaling of a file without fields of it
    rope: dict[str, Any] = dataclasses.field(default_factory=dict)
    near_theta: float = 0.0  # rotary base of layers with a window; 0: that of the others
    scaled_embedding: bool = False  # by the root of the width
    expert_bias: bool = False
    near_heads: bool = False  # layers with a window have heads of their own; the last has none


_GATES = {"attn_output_gate": (None, True), "output_gate_type": (None, "swish", "silu")}
_NORMED = {"qk_norm": True}
_HYBRID: dict[str, Any] = {"rotary": 0.25}
_HYBRID["model"] = _NORMED | {"gated_attention": True, "norm_offset": 1.0}
_GEMMA: dict[str, Any] = {"scaled_embedding": True, "full_every": 6, "theta": 1000000.0}
_GEMMA |= {"near_theta": 10000.0}
_GEMMA_MODEL = _NORMED | {"post_norms": True, "activation": "gelu_tanh"}
_GEMMA_ONLY: dict[str, tuple[Any, ...]] = {"hidden_activation": ("gelu_pytorch_tanh",)}
_GEMMA4_ONLY = _GEMMA_ONLY | {"use_bidirectional_attention": (None, "vision")}
# spellings of older families, without effect in this class
_GEMMA4_ONLY |= dict.fromkeys(("rope_theta", "rope_scaling", "rope_local_base_freq"), (None,))
_GEMMA4_ONLY["sliding_window_pattern"] = (None,)
FAMILIES = {  # `architectures` entry ->
    "LlamaForCausalLM": Family("llama", _GROUPED | _LLAMA, {"sliding_window": _OFF}),
    "Qwen2ForCausalLM": Family("qwen2", _GROUPED, qkv_bias=True),
    "Qwen3ForCausalLM": Family(
        "qwen3", _GROUPED | {"head_dim": 128, "attention_bias": False}, model=_NORMED
    ),
    "Qwen3MoeForCausalLM": Family(
        "qwen3_moe", _GROUPED | _QWEN3_MOE, _ALL_SPARSE | {"decoder_sparse_step": (1,)}, _NORMED
    ),
    "MistralForCausalLM": Family("mistral", _GROUPED | _MISTRAL),
    "Ministral3ForCausalLM": Family(
        "ministral3", _GROUPED | _MINISTRAL, theta=1000000.0, rope=_MINISTRAL_ROPE
    ),
    "Gemma3ForCausalLM": Family(
        *("gemma3_text", _GROUPED | _GEMMA3, _GEMMA_ONLY, _GEMMA_MODEL | {"norm_offset": 1.0}),
        **_GEMMA,
    ),
    "Gemma4ForCausalLM": Family(
        "gemma4_text",
        {k: v for k, v in (_GROUPED | _GEMMA3).items() if k != "query_pre_attn_scalar"} | _GEMMA4,
        _GEMMA4_ONLY,
        _GEMMA_MODEL | {"value_norm": True, "layer_scale": True, "score_scale": 1.0},
        near_heads=True,
        rope={"rope_type": "proportional", "partial_rotary_factor": 0.25},
        **_GEMMA,
    ),
    "GptOssForCausalLM": Family(
        "gpt_oss",
        _GROUPED | _GPT_OSS,
        {"swiglu_alpha": (None, 1.702), "swiglu_limit": (None, 7.0)},
        {"sinks": True, "activation": "clamped"},
        full_every=2,
        theta=150000.0,
        rope=_GPT_OSS_ROPE,
        expert_bias=True,
    ),
    "DeepseekV3ForCausalLM": Family(  # also Kimi-K2 and Moonlight
        "deepseek_v3", _LATENT, _LATENT_ONLY | {"rope_interleave": (True,)}, any_head_dim=False
    ),
    "DeepseekV32ForCausalLM": Family(
        "deepseek_v32", _INDEXED, _LATENT_ONLY | {"indexer_rope_interleave": _OFF}
    ),
    "GlmMoeDsaForCausalLM": Family(
        "glm_moe_dsa",
        _INDEXED | _GLM,
        _LATENT_ONLY | {"indexer_rope_interleave": (None, True)},
        shared_indexers=True,
    ),
    "Glm4MoeForCausalLM": Family(  # GLM-4.5 to 4.7
        "glm4_moe", _GROUPED | _GLM4, o_bias=False, rotary=0.5
    ),
    "Glm4MoeLiteForCausalLM": Family(  # GLM-4.7-Flash
        "glm4_moe_lite",
        {k: v for k, v in _LATENT.items() if k != "first_k_dense_replace"} | _GLM4_LITE,
        _LATENT_ONLY | {"rope_interleave": (True,)},
        any_head_dim=False,
    ),
    "Qwen3_5ForCausalLM": Family("qwen3_5_text", _GROUPED | _QWEN3_5, _GATES, **_HYBRID),
    "Qwen3_5MoeForCausalLM": Family(
        "qwen3_5_moe_text",
        {k: v for k, v in (_GROUPED | _QWEN3_5 | _SHARED).items() if k != "intermediate_size"},
        _ALL_SPARSE | _GATES | {"norm_topk_prob": (None, True)},
        **_HYBRID,
    ),
    "Qwen3NextForCausalLM": Family(
        "qwen3_next", _GROUPED | _QWEN3_NEXT, _ALL_SPARSE | _GATES, **_HYBRID, joint_delta=True
    ),
    "NemotronHForCausalLM": Family(
        "nemotron_h", _NEMOTRON_H, _NEMOTRON_ONLY, {"activation": "relu2"}, rotary=0.0
    ),
    "KimiLinearForCausalLM": Family("kimi_linear", _KIMI_LINEAR, _KIMI_ONLY, rotary=0.0),
}
# Classes of text and other media -> that of their ``text_config``
WRAPPERS = {
    "KimiK25ForConditionalGeneration": "DeepseekV3ForCausalLM",
    "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeForCausalLM",
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "Gemma4ForConditionalGeneration": "Gemma4ForCausalLM",
    "Mistral3ForConditionalGeneration": "",  # as its model_type says
}
# Classes that are refused -> what their layers need
LACKING = {
    "DeepseekV4ForCausalLM": "compressed attention, hyper-connections and experts chosen by a hash",
    **dict.fromkeys(
        ("InklingForConditionalGeneration", "InklingForCausalLM"),
        "scores of relative positions, short convolutions and a norm of the embedding",
    ),
}
_ROPE_NEEDS = {  # rope_type -> keys that its formula needs
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "proportional": (),
}


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise UserError(f"{message}: config.json is damaged or of another model")


MOST_LAYERS = 10_000  # a larger number is a damaged file


class _Fields(dict[str, Any]):
    """Fields of a ``config.json``, those that a class reads over its defaults."""

    def number(self, name: str, cast: type = int, default: Any = None) -> Any:
        """Returns a finite number, which must be integral for ``int``."""
        value = self.get(name, default)
        numeric = isinstance(value, int | float) and not isinstance(value, bool)
        wanted = "an integer" if cast is int else "a number"
        _require(
            numeric and math.isfinite(value) and cast(value) == value,
            f"{name} is {value!r}; expected {wanted}",
        )
        return cast(value)

    def positive(self, name: str, cast: type = int) -> Any:
        value = self.number(name, cast)
        _require(value > 0, f"{name} is {value}")
        return value

    def layers(self, default: Any = None) -> int:
        name = "num_hidden_layers"
        count = self.number(name, default=default)
        _require(0 < count <= MOST_LAYERS, f"{name} is {count}; expected 1 to {MOST_LAYERS}")
        return count

    def or_zero(self, name: str) -> int:
        return 0 if self.get(name) is None else self.number(name)

    def flag(self, name: str) -> bool:
        return bool(self.get(name))


def _rope(given: _Fields, context: int, family: Family) -> tuple[float, RopeScaling | None]:
    """Returns base and scaling of the rotary embedding, in any spelling that transformers reads."""
    if not family.rotary:
        return family.theta, None
    # ``rope_scaling`` (old) overrides ``rope_parameters`` (new). A ``rope_theta`` inside overrides
    # the top-level one; a top-level ``original_max_position_embeddings`` overrides the one inside.
    raw = given.get("rope_scaling") or given.get("rope_parameters") or family.rope
    _require(
        isinstance(raw, dict) and not any(isinstance(value, dict) for value in raw.values()),
        f"the rope parameters are {raw!r}; expected one object of numbers for all layers (rotary"
        " embeddings that differ by layer are not supported)",
    )
    length = "original_max_position_embeddings"
    rope = _Fields({"rope_theta": given.get("rope_theta", family.theta), length: context} | raw)
    theta, kind = rope.number("rope_theta", float), raw.get("rope_type", raw.get("type", "default"))
    if kind not in _ROPE_NEEDS:
        raise UserError(
            f"rope scaling {kind!r} is not supported; expected {', '.join(_ROPE_NEEDS)}: take a"
            " checkpoint of the model without it"
        )
    growth = "llama_4_scaling_beta"  # without effect in other classes
    lacking = [key for key in _ROPE_NEEDS[kind] if key not in raw]
    if growth in family.rope and (kind == "default" or raw.get(growth) is None):
        lacking.append(growth)
    _require(not lacking, f"rope scaling {kind!r} has no {', '.join(lacking)}")
    if kind == "default":
        return theta, None
    if kind == "proportional":
        share = rope.number("partial_rotary_factor", float, 1.0)
        _require(0 < share <= 1, f"partial_rotary_factor is {share}")
        factor = rope.number("factor", float, 1.0)
        return theta, RopeScaling(kind, factor, context, share=share)
    if length in given:
        rope[length] = given[length]
    original = rope.number(length)
    names = ["low_freq_factor", "high_freq_factor", "attention_factor", "mscale", "mscale_all_dim"]
    numbers = {key: rope.number(key, float) for key in names if raw.get(key) is not None}
    numbers |= {key: rope.number(key, float) for key in ("beta_fast", "beta_slow") if raw.get(key)}
    whole = kind == "yarn" and raw["factor"] is None  # then the context lengths define it
    factor = context / original if whole else rope.number("factor", float)
    truncate = bool(raw.get("truncate", True))
    beta = rope.number(growth, float) if growth in family.rope else None
    return theta, RopeScaling(kind, factor, original, truncate=truncate, growth=beta, **numbers)


def _ropes(
    given: _Fields, context: int, family: Family
) -> tuple[float, RopeScaling | None, float | None]:
    """Returns base and scaling of layers without a window, and the base of the others if it is
    another.
    """
    if not family.near_theta:
        return *_rope(given, context, family), None
    nested = given.get("rope_parameters") or {}
    near = {"rope_theta": given.get("rope_local_base_freq", family.near_theta)}
    near |= nested.get("sliding_attention") or {}
    full = (nested.get("full_attention") or {}) | (given.get("rope_scaling") or {})
    ropes = []
    for one in (near, full):
        share = one.get("partial_rotary_factor")
        _require(
            share in (None, 1) or one.get("rope_type") == "proportional",
            f"partial_rotary_factor is {share}; only rope_type 'proportional' supports it",
        )
        own = _Fields(given | {"rope_scaling": None, "rope_parameters": one})
        ropes.append(_rope(own, context, family))
    (theta, scaling), of_full = ropes
    _require(scaling is None, f"layers with a window have rope scaling {near!r}; expected none")
    return *of_full, theta


def _rotary(given: dict[str, Any], family: Family) -> float:
    """Returns the share of a head's dimensions that rotate."""
    if not family.rotary:
        return 0.0
    name = "partial_rotary_factor"
    places = given.get("rope_scaling"), given.get("rope_parameters"), given
    shares = [of[name] for of in places if of and of.get(name) is not None]
    share = _Fields({name: (*shares, family.rotary)[0]}).number(name, float)
    wanted = "1, since all dimensions of a head rotate" if family.rotary == 1 else "at most 1"
    _require(
        0 < share <= 1 and (family.rotary != 1 or share == 1),
        f"{name} is {share}; expected {wanted}",
    )
    return share


def _full_layers(types: Any, layers: int, other: str, every: int) -> tuple[bool, ...]:
    """Returns True for each layer with full attention; by default these are every n-th, or none."""
    if types is None:
        return tuple(every > 0 and (i + 1) % every == 0 for i in range(layers))
    _require(
        len(types) == layers and set(types) <= {"full_attention", other},
        f"layer_types is {types}; expected 'full_attention' or {other!r} for each of {layers}"
        " layers",
    )
    return tuple(one == "full_attention" for one in types)


def _windows(
    given: _Fields, fields: _Fields, layers: int, family: Family, theta: float | None
) -> Windows | None:
    """Returns the layers with a window; None if there are none."""
    every = family.full_every
    types = fields["layer_types"] if every else None  # Mistral's class has no types
    if family.near_theta:  # in older files of Gemma
        every = given.number("sliding_window_pattern", default=every)
    full = _full_layers(types, layers, "sliding_attention", every)
    if family.near_heads:
        full = (*full[:-1], True)
    if all(full) or (fields["sliding_window"] is None and not family.full_every):
        return None
    return Windows(fields.positive("sliding_window"), tuple(not one for one in full), theta)


def _heads(fields: _Fields, near: tuple[bool, ...]) -> list[tuple[int, int]]:
    """Returns the kv heads and head dim of layers without a window, and of those with one, for
    which ``near`` is True.
    """
    names = "num_key_value_heads", "head_dim"
    own = fields["per_layer_config"]  # layer -> its own values of the two
    if own is None:
        full = {"head_dim": fields["global_head_dim"]}
        if fields["attention_k_eq_v"] and fields["num_global_key_value_heads"] is not None:
            full["num_key_value_heads"] = fields["num_global_key_value_heads"]
        own = {str(i): full for i, is_near in enumerate(near) if not is_near}
    _require(
        isinstance(own, dict) and all(isinstance(one, dict) for one in own.values()),
        f"per_layer_config is {own!r}; expected an object of objects",
    )
    found: tuple[set[tuple[int, int]], ...] = (set(), set())
    for i, kind in enumerate(near):
        layer = _Fields({name: fields[name] for name in names} | own.get(str(i), {}))
        found[kind].add((layer.number(names[0]), layer.number(names[1])))
        _require(len(layer) == 2, f"per_layer_config of layer {i} is {own.get(str(i))}")
    _require(
        all(len(one) <= 1 for one in found),
        f"per_layer_config is {own}; expected equal heads in all layers with full_attention, and in"
        " all with sliding_attention",
    )
    return [one for kind in found for one in kind]


def _shared_keys(fields: _Fields, near: tuple[bool, ...]) -> SharedKeys | None:
    count, width = fields.or_zero("num_kv_shared_layers"), fields.number("intermediate_size")
    first = len(near) - count
    _require(
        0 <= count < len(near) and set(near[first:]) <= set(near[:first]),
        f"num_kv_shared_layers is {count}; expected an earlier layer with keys for each kind of"
        f" layer_types among {len(near)}",
    )
    wider = 2 if fields["use_double_wide_mlp"] else 1
    return SharedKeys(count, width * wider) if count else None


def _layer_inputs(fields: _Fields) -> LayerInputs | None:
    name, vocab_size = "vocab_size_per_layer_input", fields.number("vocab_size")
    if not (width := fields.or_zero("hidden_size_per_layer_input")):
        return None
    rows = fields.number(name)
    _require(rows >= vocab_size, f"{name} is {rows}; expected vocab_size {vocab_size}, or more")
    return LayerInputs(width, rows)


def _kimi_linear(given: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields under the names of the class, from its files' or from published ones."""
    out = _Fields(given)
    for theirs, name in _KIMI_NAMES.items():
        if theirs in given:
            out[name] = out.pop(theirs)
            _require(
                given.get(name, out[name]) == out[name],
                f"{theirs} is {out[name]!r}, and {name} is {given.get(name)!r}",
            )
    layers = out.layers(known["num_hidden_layers"])
    nested = out.pop("linear_attn_config", None) or {}
    _require(isinstance(nested, dict), f"linear_attn_config is {nested!r}; expected an object")
    inner = {"head_dim": "head_dim", "num_heads": "num_heads"}
    inner["short_conv_kernel_size"] = "conv_kernel_dim"
    out |= {f"linear_{name}": nested[key] for key, name in inner.items() if key in nested}
    if out.get("layer_types") is None:
        full = nested.get("full_attn_layers", range(5, layers + 1, 4))
        linear = nested.get("kda_layers", sorted({*range(1, layers + 1)} - {*full}))
        _require(
            sorted([*full, *linear]) == [*range(1, layers + 1)],
            f"full_attn_layers is {full!r} and kda_layers {linear!r}; expected each of {layers}"
            " layers once, from 1 on",
        )
        kinds = "linear_attention", "full_attention"
        out["layer_types"] = [kinds[i in full] for i in range(1, layers + 1)]
    if out.get("mlp_layer_types") is None:
        dense = out.number("first_k_dense_replace", default=1)
        out["mlp_layer_types"] = ["dense" if i < dense else "sparse" for i in range(layers)]
    return out


def _delta(given: _Fields, fields: _Fields, layers: int, joint: bool) -> Delta | None:
    """Returns gated delta nets, with a decay for each head or for each channel (Kimi's)."""
    if "linear_num_heads" in fields:
        names, every = ("num_heads", "head_dim", "conv_kernel_dim"), 0
    elif "linear_num_value_heads" in fields:
        names = "num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim"
        names, every = (*names, "conv_kernel_dim"), given.number("full_attention_interval", int, 4)
    else:
        return None
    full = _full_layers(fields["layer_types"], layers, "linear_attention", every)
    sizes = [fields.positive(f"linear_{name}") for name in names]
    if len(sizes) == 3:
        heads, width, taps = sizes
        return Delta(heads, heads, width, width, taps, full=full, latent=width)
    _divides(sizes[0], sizes[1], "linear_num_key_heads", "linear_num_value_heads")
    return Delta(*sizes, full=full, joint=joint)


def _divides(parts: int, whole: int, name: str, of: str) -> None:
    _require(
        parts > 0 and whole > 0 and whole % parts == 0,
        f"{of} is {whole}, which {name} {parts} does not divide",
    )


def _only_parts(given: dict[str, Any], fields: _Fields) -> tuple[str, ...]:
    """Returns the part of each layer; by default, as in the class, one layer of each."""
    blocks, letters = fields["layers_block_type"], given.get("hybrid_override_pattern")
    name = "layers_block_type" if blocks else "hybrid_override_pattern"
    known, found = _BLOCKS if blocks else _LETTERS, blocks or letters or "ME*-"
    _require(
        isinstance(found, str | list)
        and all(isinstance(one, str) and one in known for one in found),
        f"{name} is {found!r}; expected one of {', '.join(known)} for each layer",
    )
    layers = given.get("num_hidden_layers")
    _require(
        layers in (None, len(found)),
        f"{name} is {found!r}, of {len(found)} layers, and num_hidden_layers is {layers!r}",
    )
    return tuple(known[one] for one in found)


def _ssm(fields: _Fields) -> Ssm:
    names = "n_groups", "mamba_num_heads", "ssm_state_size", "mamba_head_dim", "conv_kernel"
    sizes = [fields.positive(name) for name in names]
    _divides(sizes[0], sizes[1], *names[:2])
    bias, projection_bias = (fields.flag(name) for name in ("use_conv_bias", "use_bias"))
    step_min = fields.number("time_step_min", float)
    return Ssm(*sizes, bias=bias, projection_bias=projection_bias, step_min=step_min)


def _experts(given: dict[str, Any], fields: _Fields, bias: bool) -> Experts:
    number = fields.number
    width = number(next(n for n in ("moe_intermediate_size", "intermediate_size") if n in fields))
    names = "n_routed_experts", "num_experts", "num_local_experts"
    counts = {name: given[name] for name in names if given.get(name) is not None}
    _require(
        len({*map(repr, counts.values())}) <= 1,
        f"one number has several names, and they differ: {counts}",
    )
    name = next(iter(counts or [name for name in names if name in fields]))
    count = _Fields(fields | counts).number(name)
    own, of_shared = "moe_shared_expert_intermediate_size", "shared_expert_intermediate_size"
    others: dict[str, Any] = {}
    if of_shared in fields:
        others = {"shared": fields.positive(of_shared), "shared_gate": True}
    if "topk_group" in fields:  # DeepSeek's
        shared = number(own) if own in fields else fields.or_zero("n_shared_experts") * width
        others = {"shared": shared, "latent": fields.or_zero("moe_latent_size")}
        others |= {"scores": "sigmoid", "scale": number("routed_scaling_factor", float)}
        others |= {"groups": number("n_group"), "groups_chosen": number("topk_group")}
    experts = Experts(
        *(count, number("num_experts_per_tok"), width),
        normalise=bool(fields.get("norm_topk_prob", True)),
        bias=bias,
        **others,
    )
    _require(
        1 <= experts.per_token <= count,
        f"num_experts_per_tok is {experts.per_token}, of {count} experts",
    )
    _require(
        count % experts.groups == 0 and 1 <= experts.groups_chosen <= experts.groups,
        f"{count} experts in {experts.groups} groups of which {experts.groups_chosen} are chosen;"
        " expected equal groups",
    )
    return experts


def _experts_with_mlp(fields: _Fields) -> Experts:
    names = "num_experts", "top_k_experts", "moe_intermediate_size"
    count, per_token, width = (fields.number(name) for name in names)
    _require(1 <= per_token <= count, f"top_k_experts is {per_token}, of {count} experts")
    return Experts(count, per_token, width, with_mlp=True)


def _dense_layers(fields: _Fields, layers: int) -> int:
    """Returns the number of layers without experts, which must be the first ones."""
    if not (types := fields.get("mlp_layer_types")):
        return min(fields.number("first_k_dense_replace", default=1), layers)
    dense = types.count("dense")
    _require(
        types == ["dense"] * dense + ["sparse"] * (layers - dense),
        f"mlp_layer_types is {types}; expected {layers} entries, 'dense' and then 'sparse'",
    )
    return dense


def _indexer(given: _Fields, fields: _Fields, layers: int, shared: bool) -> Indexer:
    types = ["full"] * layers
    if shared and fields["indexer_types"] is not None:
        types = fields["indexer_types"]
    elif shared and (pattern := given.get("index_topk_pattern")) is not None:
        types = [{"F": "full", "S": "shared"}.get(c, c) for c in pattern]
    elif shared:
        every = max(given.number("index_topk_freq", default=1), 1)
        offset = given.number("index_skip_topk_offset", default=2)
        types = ["shared" if max(i - offset + 1, 0) % every else "full" for i in range(layers)]
    _require(
        set(types) <= {"full", "shared"} and len(types) == layers and types[0] == "full",
        f"indexer_types is {types}; expected 'full' or 'shared' for each of {layers} layers, the"
        " first 'full'",
    )
    sizes = (fields.number(f"index_{name}") for name in ("n_heads", "head_dim", "topk"))
    return Indexer(*sizes, interleaved=shared, full=tuple(kind == "full" for kind in types))


def _latent(fields: _Fields, family: Family) -> Latent:
    widths = "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"
    latent = Latent(fields.or_zero("q_lora_rank"), *map(fields.number, widths))
    _require(
        family.any_head_dim or fields["head_dim"] in (None, latent.rope),
        f"head_dim is {fields['head_dim']}; expected none, or qk_rope_head_dim {latent.rope}",
    )
    return latent


def from_hf(given: dict[str, Any]) -> ModelConfig:
    """Returns the ``ModelConfig`` of the contents of a ``config.json``.

    A missing field has the default of its transformers class. A field that would change the forward
    pass in an unsupported way raises ``UserError``; others have no effect.
    """
    given = _text_of(given)
    family = _checked_family(given)
    known = family.defaults
    given = _Fields(_kimi_linear(given, known) if "linear_num_heads" in known else given)
    fields = _Fields({name: given.get(name, default) for name, default in known.items()})
    only = _only_parts(given, fields) if "layers_block_type" in known else None
    heads = fields.positive("num_attention_heads")
    layers = len(only) if only else fields.layers()
    if fields["num_key_value_heads"] is None:
        fields["num_key_value_heads"] = heads
    kv_heads = fields.number("num_key_value_heads")
    experts = latent = indexer = None
    if "num_experts_per_tok" in known and (only is None or "moe" in only):
        experts = _experts(given, fields, family.expert_bias)
    if fields.get("enable_moe_block"):
        experts = _experts_with_mlp(fields)
    if "kv_lora_rank" in known:
        latent = _latent(fields, family)
        fields["head_dim"] = latent.nope + latent.rope
    elif fields["head_dim"] is None:
        fields["head_dim"] = fields.number("hidden_size") // heads
    if "index_topk" in known:
        _require(latent is not None and latent.q_latent > 0, "the indexer needs q_lora_rank")
        indexer = _indexer(given, fields, layers, family.shared_indexers)
    theta, scaling, near_theta = _ropes(given, fields.number("max_position_embeddings"), family)
    windows = None
    if "sliding_window" in known:
        windows = _windows(given, fields, layers, family, near_theta)
    near = (False,) * layers if windows is None else windows.near
    if family.near_heads:
        (kv_heads, fields["head_dim"]), *of_near = _heads(fields, near)
        if windows is not None:
            windows = dataclasses.replace(windows, heads=of_near[0])
    own: dict[str, Any] = {}
    if known.keys() & {"first_k_dense_replace", "mlp_layer_types"}:
        own["dense_layers"] = _dense_layers(fields, layers)
    if "query_pre_attn_scalar" in known:
        own["score_scale"] = fields.number("query_pre_attn_scalar", float) ** -0.5
    if "num_kv_shared_layers" in known:
        own |= {"shared_keys": _shared_keys(fields, near), "layer_inputs": _layer_inputs(fields)}
    if fields.get("final_logit_softcapping") is not None:
        own["logit_cap"] = fields.positive("final_logit_softcapping", float)
    if fields.flag("use_qk_norm"):
        own["qk_norm"] = True
    if family.scaled_embedding:
        own["embed_scale"] = fields.number("hidden_size") ** 0.5
    cfg = ModelConfig(
        *(family.model_type, fields.number("vocab_size"), fields.number("hidden_size")),
        *(layers, heads, kv_heads, fields.number("head_dim")),
        fields.number("intermediate_size") if "intermediate_size" in known else 0,
        *(theta, scaling),
        fields.number("rms_norm_eps" if "rms_norm_eps" in known else "layer_norm_epsilon", float),
        qkv_bias=fields.flag("attention_bias") or family.qkv_bias,
        o_bias=fields.flag("attention_bias") and family.o_bias,
        mlp_bias=fields.flag("mlp_bias"),
        tie_embeddings=fields.flag("tie_word_embeddings"),
        context=fields.number("max_position_embeddings"),
        experts=experts,
        latent=latent,
        indexer=indexer,
        delta=_delta(given, fields, layers, family.joint_delta),
        ssm=_ssm(fields) if only and "ssm" in only else None,
        only=only,
        windows=windows,
        rotary=_rotary(given, family),
        value_is_key=fields.flag("attention_k_eq_v"),
        **family.model | own,
    )
    for kind in [cfg] if windows is None else [cfg, cfg.near]:
        _divides(kind.num_kv_heads, heads, "num_key_value_heads", "num_attention_heads")
        _require(
            kind.rope_dim % 2 == 0,
            f"{kind.rope_dim} dimensions of a head rotate; expected an even number",
        )
    return cfg


def _by_type() -> dict[str, str]:
    return {family.model_type: name for name, family in FAMILIES.items()}


def _text_of(given: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of the text model, which classes of several media nest."""
    named = given.get("architectures") or []
    _require(
        isinstance(named, list) and all(isinstance(one, str) for one in named),
        f"architectures is {named!r}; expected a list of names",
    )
    name = str((named or [None])[0])
    if name not in WRAPPERS:
        return given
    text: Any = given.get("text_config")
    _require(isinstance(text, dict), f"{name} has no text_config")
    kind = str(text.get("model_type"))
    inner = WRAPPERS[name] or _by_type().get(kind, kind)
    outer = ("tie_word_embeddings", "quantization_config")
    own = {key: given[key] for key in outer if key in given} | {"architectures": [inner]}
    own |= {"model_type": FAMILIES[inner].model_type} if inner in FAMILIES else {}
    return text | own


def _checked_family(given: dict[str, Any]) -> Family:
    """Returns the family; raises ``UserError`` for what no model here computes."""
    types, kind = _by_type(), given.get("model_type")
    names = given.get("architectures") or [types[one] for one in [kind] if one in types]
    if not names or names[0] not in FAMILIES:
        needs = LACKING.get(names[0], "") if names else ""
        raise UserError(
            f"architectures is {names or ['(none)']!r}{needs and f', which needs {needs}'};"
            f" supported: {', '.join(FAMILIES)}"
        )
    family = FAMILIES[names[0]]
    if kind in types.keys() - {family.model_type}:
        raise UserError(
            f"config.json: architectures is {names!r} but model_type is {kind!r}; transformers"
            " uses model_type: correct the wrong one"
        )
    published.scheme_of(given)
    for field, values in (ONLY | family.only).items():
        allowed = field in family.defaults or any(given.get(field) == value for value in values)
        if field in given and not allowed:
            raise UserError(
                f"config.json: {field} is {given[field]!r}; only {' or '.join(map(repr, values))}"
                f" is supported in {names[0]}: take another checkpoint, or remove the field if the"
                " model was trained without it"
            )
    of_layers = given.get("layer_types") or ()
    _require(
        "layer_types" in family.defaults
        or set(of_layers) <= {"full_attention", "indexed_attention"},
        f"layer_types is {of_layers!r}; only full_attention is supported in {names[0]}:"
        " sliding-window attention is not",
    )
    return family


def read_config(directory: str | Path) -> ModelConfig:
    """Returns the config of a checkpoint directory; raises ``UserError`` if it cannot be read."""
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise UserError(
            f"{path} does not exist: a base is a directory with config.json and *.safetensors"
        )
    return from_hf(read_object(path))
