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

from mint_jax.errors import UserError


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
class ModelConfig:
    """Dimensions and switches of a decoder. Letters as in the style of this code base: D, F, N, K, H, V, L."""

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

    @property
    def stacks(self) -> dict[str, int]:
        """Layer kind -> number of layers, in the order they run."""
        return {"dense": self.num_layers}

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


FAMILIES = {  # `architectures` entry of config.json -> mapping
    "LlamaForCausalLM": _llama,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
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
    if hf.get("use_sliding_window") or (hf.get("layer_types") and set(hf["layer_types"]) != {"full_attention"}):
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
