"""``ModelConfig``: what the model functions need to know, read from a Hugging Face ``config.json``.

A model is described by these fields, never by testing its name; families differ only in the mapping below and in the
name table of ``models/hf.py``.
"""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from mint_jax.errors import UserError, choice
from pallas_kernels import draw, grouped_matmul, latent_attention, layer_matmul, packed_lora, packed_matmul, paged_attention


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Frequency scaling of rotary embeddings beyond the trained context.

    ``llama3``: Llama 3.1 report (arXiv 2407.21783) section 3.4.2 and its released code; ``yarn``: arXiv 2309.00071,
    sections 3.1 to 3.3; ``linear``: positions divided by ``factor``.
    """

    kind: str
    factor: float
    original_context: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclasses.dataclass(frozen=True)
class Experts:
    """Routed experts in place of an MLP (Shazeer et al. 2017, arXiv 1701.06538).

    Attributes:
        count: E routed experts of a layer.
        per_token: X experts that each token visits.
        width: F of one expert.
        shared: experts that every token visits, kept as one MLP of ``shared * width``.
        scores: ``softmax`` over all experts, or ``sigmoid`` of each with a bias that only the choice sees (DeepSeek-V3,
            arXiv 2412.19437, section 2.1.2).
        normalise: the chosen weights are divided by their sum.
        scale: factor on the weights after that.
        groups, groups_chosen: experts come from the best ``groups_chosen`` of ``groups`` equal groups.
    """

    count: int
    per_token: int
    width: int
    shared: int = 0
    scores: str = "softmax"
    normalise: bool = True
    scale: float = 1.0
    groups: int = 1
    groups_chosen: int = 1


@dataclasses.dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    Attributes:
        q_latent: width of the query's bottleneck; 0 where queries come straight from the residual stream.
        kv_latent: C, width of the latent from which keys and values are expanded.
        nope, rope: dimensions of a head's key without and with rotary position; the rotary part is shared by the heads.
        value: dimensions of a head's value.
    """

    q_latent: int
    kv_latent: int
    nope: int
    rope: int
    value: int


@dataclasses.dataclass(frozen=True)
class Indexer:
    """The lightning indexer of sparse attention (DeepSeek-V3.2, section 2.1).

    Attributes:
        heads, width: I heads of this many dimensions.
        topk: keys that a query attends to.
        interleaved: rotary pairs are neighbours; otherwise the halves of the head.
        full: per layer, whether it has an indexer; the others reuse the choice of the last layer that has one.
    """

    heads: int
    width: int
    topk: int
    interleaved: bool
    full: tuple[bool, ...]


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Which implementation each op of ``pallas_kernels`` has: auto, or one that is named. Those of Pallas run in an
    interpreter on a CPU.

    Attributes:
        packed_lora: adapters of experts: auto, xla, pallas_tpu or pallas_gpu.
        grouped_matmul: experts' own matrices: auto, xla or pallas_gpu.
        slot_lora: adapters of other projections where rows name slots, in sampling: auto, xla, pallas_tpu, pallas_gpu or
            cpu.
        packed_attention: attention in training and scoring: auto, xla, pallas_tpu or pallas_gpu; where an indexer chooses keys it is xla.
        paged_attention: grouped-query attention to the cache of samplers: auto, xla, pallas_tpu, pallas_gpu or cpu.
        latent_attention: the same of multi-head latent attention; where an indexer chooses keys it is xla.
        packed_matmul: experts' matrices and adapters in one pass, forward: auto, xla (one after the other) or pallas_tpu. It is
            xla where one of packed_lora and grouped_matmul is not auto, unless it is named itself.
        layer_matmul: the frozen projections of a sampler's layers, and of few rows the unembedding: auto, xla, pallas_gpu or cpu.
        draw: a sampler's choice of the next token: auto, xla or cpu.
    """

    packed_lora: str = "auto"
    grouped_matmul: str = "auto"
    slot_lora: str = "auto"
    packed_attention: str = "auto"
    paged_attention: str = "auto"
    latent_attention: str = "auto"
    packed_matmul: str = "auto"
    layer_matmul: str = "auto"
    draw: str = "auto"

    def __post_init__(self) -> None:
        tables = {
            "packed_lora": packed_lora.ADD,
            "grouped_matmul": grouped_matmul.table(False),
            "packed_matmul": packed_matmul.MATMUL,
            "paged_attention": paged_attention.ATTEND,
            "latent_attention": latent_attention.ATTEND,
            "layer_matmul": layer_matmul.table(False),
            "draw": draw.DRAW,
        }
        known = {"packed_attention": ("pallas_tpu", "pallas_gpu", "xla"), "slot_lora": ("pallas_tpu", "pallas_gpu", "cpu", "xla")}
        known |= {op: tuple(one.name for one in table) for op, table in tables.items()}
        for op, names in known.items():
            if getattr(self, op) not in ("auto", *names):
                raise choice(f"kernels.{op}", getattr(self, op), ("auto", *names))


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Dimensions and switches of a decoder. Letters as in the style of this code base: D, F, N, K, H, V, L.

    ``latent`` replaces grouped-query attention, ``experts`` the MLP of all but the first ``dense_layers`` layers.
    """

    family: str
    vocab_size: int
    d_model: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    d_ff: int
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    tie_embeddings: bool = False
    context: int = 8192
    experts: Experts | None = None
    dense_layers: int = 0
    latent: Latent | None = None
    indexer: Indexer | None = None
    kernels: Kernels = Kernels()

    @property
    def stacks(self) -> dict[str, int]:
        """Layer kind -> number of layers, in the order they run."""
        dense = self.num_layers if self.experts is None else self.dense_layers
        return {kind: layers for kind, layers in (("dense", dense), ("moe", self.num_layers - dense)) if layers}

    @property
    def routed(self) -> bool:
        """Whether any layer has experts: one with a prefix of dense layers may have nothing behind it."""
        return "moe" in self.stacks

    def layers_of(self, kind: str) -> range:
        """The layers of one stack, numbered through the model."""
        first = 0 if kind == "dense" or "dense" not in self.stacks else self.stacks["dense"]
        return range(first, first + self.stacks[kind])

    @property
    def rope_dim(self) -> int:
        """Dimensions of a head that carry rotary position."""
        return self.latent.rope if self.latent is not None else self.head_dim

    def replace(self, **changes: Any) -> "ModelConfig":
        return dataclasses.replace(self, **changes)


def _rope_scaling(hf: dict[str, Any], context: int) -> RopeScaling | None:
    raw = hf.get("rope_parameters") or hf.get("rope_scaling")
    if not raw:
        return None
    kind = raw.get("rope_type", raw.get("type", "default"))
    if kind == "default":
        return None
    if kind not in ("llama3", "yarn", "linear"):
        raise UserError(f"rope scaling {kind!r} is not supported; expected default, linear, llama3 or yarn")
    original = int(raw.get("original_max_position_embeddings") or context)
    factor = raw.get("factor")
    if factor is None and kind != "yarn":
        raise UserError(f"rope scaling {kind!r} has no factor: config.json is damaged")
    optional = {k: raw[k] for k in ("attention_factor", "mscale", "mscale_all_dim") if raw.get(k) is not None}
    return RopeScaling(
        kind=kind,
        factor=float(factor) if factor is not None else context / original,
        original_context=original,
        low_freq_factor=float(raw.get("low_freq_factor", 1.0)),
        high_freq_factor=float(raw.get("high_freq_factor", 4.0)),
        beta_fast=float(raw.get("beta_fast") or 32.0),
        beta_slow=float(raw.get("beta_slow") or 1.0),
        truncate=bool(raw.get("truncate", True)),
        **optional,
    )


def _number(cast: type, fields: dict[str, Any], name: str, default: Any = None) -> Any:
    """A numeric field; absent ones take the default, or are missing where there is none."""
    value = fields[name] if default is None else fields.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UserError(f"config.json: {name} is {value!r}; expected a number: take a complete checkpoint directory")
    return cast(value)


def _decoder_fields(hf: dict[str, Any]) -> dict[str, Any]:
    """The fields that every supported family spells the same way."""
    context = _number(int, hf, "max_position_embeddings", 8192)
    width, heads = _number(int, hf, "hidden_size"), _number(int, hf, "num_attention_heads")
    kv_heads = _number(int, {"num_key_value_heads": heads} | _present(hf), "num_key_value_heads")
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise UserError(f"num_attention_heads is {heads}, which num_key_value_heads {kv_heads} does not divide: config.json is damaged")
    rope = hf.get("rope_parameters") or {}
    return {
        "vocab_size": _number(int, hf, "vocab_size"),
        "d_model": width,
        "num_layers": _number(int, hf, "num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": _number(int, {"head_dim": width // heads} | _present(hf), "head_dim"),
        "d_ff": _number(int, hf, "intermediate_size"),
        "rope_theta": _number(float, {"rope_theta": 10000.0} | _present(hf) | rope, "rope_theta"),
        "rope_scaling": _rope_scaling(hf, context),
        "norm_eps": _number(float, hf, "rms_norm_eps", 1e-6),
        "tie_embeddings": bool(hf.get("tie_word_embeddings", False)),
        "context": context,
    }


def _present(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields that are not null."""
    return {name: value for name, value in fields.items() if value is not None}


def _llama(hf: dict[str, Any]) -> ModelConfig:
    bias = bool(hf.get("attention_bias", False))
    return ModelConfig("llama", **_decoder_fields(hf), qkv_bias=bias, o_bias=bias, mlp_bias=bool(hf.get("mlp_bias", False)))


def _qwen2(hf: dict[str, Any]) -> ModelConfig:
    return ModelConfig("qwen2", **_decoder_fields(hf), qkv_bias=True)


def _qwen3(hf: dict[str, Any]) -> ModelConfig:
    bias = bool(hf.get("attention_bias", False))
    return ModelConfig("qwen3", **_decoder_fields(hf), qkv_bias=bias, o_bias=bias, qk_norm=True)


def _qwen3_moe(hf: dict[str, Any]) -> ModelConfig:
    if hf.get("mlp_only_layers") or hf.get("decoder_sparse_step", 1) != 1:
        raise UserError("Qwen3-MoE with mlp_only_layers or decoder_sparse_step != 1 is not supported: every layer needs experts")
    bias = bool(hf.get("attention_bias", False))
    experts = Experts(
        count=_number(int, {"num_experts": hf.get("num_local_experts")} | _present(hf), "num_experts"),
        per_token=_number(int, hf, "num_experts_per_tok"),
        width=_number(int, hf, "moe_intermediate_size"),
        normalise=bool(hf.get("norm_topk_prob", False)),
    )
    return ModelConfig("qwen3_moe", **_decoder_fields(hf), qkv_bias=bias, o_bias=bias, qk_norm=True, experts=_checked(experts))


def _checked(experts: Experts) -> Experts:
    if not 1 <= experts.per_token <= experts.count:
        raise UserError(f"num_experts_per_tok is {experts.per_token}, of {experts.count} experts: config.json is damaged")
    if experts.count % experts.groups or not 1 <= experts.groups_chosen <= experts.groups:
        raise UserError(
            f"{experts.count} experts in {experts.groups} groups of which {experts.groups_chosen} are chosen: the groups must be equal, "
            "config.json is damaged"
        )
    return experts


def _deepseek(family: str, hf: dict[str, Any]) -> ModelConfig:
    """DeepSeek-V3 and its kin (Kimi-K2, Moonlight): latent attention, sigmoid routing, shared experts, dense first layers."""
    fields = _decoder_fields({**hf, "head_dim": None})
    if hf.get("moe_layer_freq", 1) != 1:
        raise UserError(f"moe_layer_freq is {hf['moe_layer_freq']}; only 1 is supported: every layer after the dense prefix has experts")
    if not hf.get("rope_interleave", True):
        raise UserError("rope_interleave is false, which is not supported: rotary pairs must be neighbours")
    if hf.get("attention_bias"):
        raise UserError("attention_bias is true, which latent attention does not support here")
    experts = Experts(
        count=_number(int, {"n_routed_experts": hf.get("num_local_experts")} | _present(hf), "n_routed_experts"),
        per_token=_number(int, hf, "num_experts_per_tok"),
        width=_number(int, hf, "moe_intermediate_size"),
        shared=_number(int, {"n_shared_experts": 0} | _present(hf), "n_shared_experts"),
        scores="sigmoid",
        normalise=bool(hf.get("norm_topk_prob", True)),
        scale=_number(float, hf, "routed_scaling_factor", 1.0),
        groups=_number(int, {"n_group": 1} | _present(hf), "n_group"),
        groups_chosen=_number(int, {"topk_group": 1} | _present(hf), "topk_group"),
    )
    latent = Latent(
        q_latent=_number(int, {"q_lora_rank": 0} | _present(hf), "q_lora_rank"),
        kv_latent=_number(int, hf, "kv_lora_rank"),
        nope=_number(int, hf, "qk_nope_head_dim"),
        rope=_number(int, hf, "qk_rope_head_dim"),
        value=_number(int, hf, "v_head_dim"),
    )
    fields["head_dim"] = latent.nope + latent.rope
    types = hf.get("mlp_layer_types")
    dense = types.count("dense") if types else _number(int, hf, "first_k_dense_replace", 0)
    if types and types != ["dense"] * dense + ["sparse"] * (len(types) - dense):
        raise UserError("mlp_layer_types mixes dense and sparse layers; only a dense prefix is supported")
    return ModelConfig(family, **fields, experts=_checked(experts), dense_layers=min(dense, fields["num_layers"]), latent=latent)


def _deepseek_v3(hf: dict[str, Any]) -> ModelConfig:
    return _deepseek("deepseek_v3", hf)


def _with_indexer(cfg: ModelConfig, hf: dict[str, Any], interleaved: bool, full: tuple[bool, ...]) -> ModelConfig:
    if not cfg.latent or not cfg.latent.q_latent:
        raise UserError("q_lora_rank is null: the indexer reads the query's latent, which this checkpoint does not have")
    if len(full) != cfg.num_layers or not full[0]:
        raise UserError(f"indexer_types has {len(full)} entries for {cfg.num_layers} layers, of which the first must be 'full'")
    width = _number(int, hf, "index_head_dim")
    return cfg.replace(indexer=Indexer(_number(int, hf, "index_n_heads"), width, _number(int, hf, "index_topk"), interleaved, full))


def _deepseek_v32(hf: dict[str, Any]) -> ModelConfig:
    cfg = _deepseek("deepseek_v32", hf)
    return _with_indexer(cfg, hf, False, (True,) * cfg.num_layers)


def _glm_moe_dsa(hf: dict[str, Any]) -> ModelConfig:
    cfg = _deepseek("glm_moe_dsa", hf)
    types = hf.get("indexer_types")
    if types is None and (pattern := hf.get("index_topk_pattern")) is not None:
        types = [{"F": "full", "S": "shared"}.get(c, c) for c in pattern]
    if types is None:
        every, offset = max(hf.get("index_topk_freq", 1), 1), hf.get("index_skip_topk_offset", 2)
        types = ["full" if max(i - offset + 1, 0) % every == 0 else "shared" for i in range(cfg.num_layers)]
    return _with_indexer(cfg, hf, True, tuple(kind == "full" for kind in types))


FAMILIES = {  # `architectures` entry of config.json -> mapping
    "LlamaForCausalLM": _llama,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "DeepseekV3ForCausalLM": _deepseek_v3,  # also Kimi-K2 and Moonlight
    "DeepseekV32ForCausalLM": _deepseek_v32,
    "GlmMoeDsaForCausalLM": _glm_moe_dsa,
}


def from_hf(hf: dict[str, Any]) -> ModelConfig:
    """``ModelConfig`` from the contents of a ``config.json``.

    Raises:
        UserError: an architecture, activation or attention option that is not implemented, or a missing field.
    """
    names = hf.get("architectures") or ["(none)"]
    if names[0] not in FAMILIES:
        raise UserError(f"architectures is {names!r}; supported: {', '.join(FAMILIES)}")
    if quantised := hf.get("quantization_config"):
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        raise UserError(f"the checkpoint is quantised (quant_method {method!r}), which is not read: take the unquantised checkpoint")
    if hf.get("hidden_act", "silu") not in ("silu", "swish"):
        raise UserError(f"hidden_act is {hf['hidden_act']!r}; only silu is supported")
    if hf.get("use_sliding_window") or not set(hf.get("layer_types") or ()) <= {"full_attention", "indexed_attention"}:
        raise UserError("sliding-window attention is not supported: use_sliding_window must be false and all layer_types full_attention")
    try:
        return FAMILIES[names[0]](hf)
    except KeyError as missing:
        raise UserError(f"config.json of {names[0]} lacks the field {missing}: take a complete checkpoint directory") from None


def read_config(directory: str | Path) -> ModelConfig:
    """``ModelConfig`` of a checkpoint directory.

    Raises:
        UserError: no readable ``config.json`` there.
    """
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise UserError(f"{path} does not exist: a base is a directory with config.json and *.safetensors")
    try:
        fields = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}): fetch the checkpoint again") from None
    if not isinstance(fields, dict):
        raise UserError(f"{path} holds a {type(fields).__name__}; expected an object: fetch the checkpoint again")
    return from_hf(fields)


def rope_frequencies(dim: int, theta: float, scaling: RopeScaling | None) -> tuple[np.ndarray, float]:
    """Inverse frequencies ``[dim / 2]`` (float64) and the factor by which cos and sin are multiplied."""
    exponent = np.arange(0, dim, 2, dtype=np.float64) / dim
    inv = theta**-exponent
    if scaling is None:
        return inv, 1.0
    if scaling.kind == "linear":
        return inv / scaling.factor, 1.0
    if scaling.kind == "llama3":
        wavelength = 2 * math.pi / inv
        smooth = (scaling.original_context / wavelength - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        smooth = np.clip(smooth, 0.0, 1.0)
        return (1 - smooth) * inv / scaling.factor + smooth * inv, 1.0

    def turns_at(rotations: float) -> float:  # the dimension that makes this many turns over the original context
        return dim * math.log(scaling.original_context / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = turns_at(scaling.beta_fast), turns_at(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = np.clip((np.arange(dim // 2, dtype=np.float64) - low) / max(high - low, 1e-3), 0.0, 1.0)
    inv = inv / scaling.factor * ramp + inv * (1 - ramp)
    if scaling.attention_factor is not None:
        return inv, scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return inv, yarn_mscale(scaling.factor, scaling.mscale) / yarn_mscale(scaling.factor, scaling.mscale_all_dim)
    return inv, yarn_mscale(scaling.factor, 1.0)


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's attention temperature, ``0.1 * mscale * ln(factor) + 1`` (section 3.3)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
