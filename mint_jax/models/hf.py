"""Hugging Face checkpoints: loads safetensors into sharded parameters, and writes them.

Each process reads only its shards, leaf by leaf, so host memory peaks at one leaf's shard. Names of
tensors are defined here only: an entry of ``LAYER_NAMES`` per family.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from mint_jax import params as params_lib
from mint_jax import sharding as sharding_lib
from mint_jax.errors import UserError
from mint_jax.lora.peft import BaseNames
from mint_jax.models import published, quantised, stored, transformer
from mint_jax.models.config import ModelConfig
from mint_jax.models.hf_config import read_config
from mint_jax.models.lazy import Computed
from mint_jax.params import ParamSpec
from mint_jax.safetensors_header import read_header

_log = logging.getLogger(__name__)

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def _matrices(path: str, below: str, *names: str, **renamed: str) -> dict[str, str]:
    modules = {name: f"{name}_proj" for name in names} | renamed
    return {
        f"{path}/{name}/{kind[0]}": f"{below}.{theirs}.{kind}"
        for name, theirs in modules.items()
        for kind in ("weight", "bias")
    }


_MLP = ("gate", "up", "down")
_DENSE = {  # path below one layer -> name below model.layers.{i}
    "attn/norm": "input_layernorm.weight",
    "mlp/norm": "post_attention_layernorm.weight",
    **_matrices("attn", "self_attn", "o"),
    **_matrices("mlp", "mlp", *_MLP),
}
_DECODER = {
    **_DENSE,
    **_matrices("attn", "self_attn", "q", "k", "v"),
    "attn/q_norm": "self_attn.q_norm.weight",
    "attn/k_norm": "self_attn.k_norm.weight",
}
_LATENT = {
    **_DENSE,
    **_matrices("attn", "self_attn", "q", "q_a", "q_b", "kv_b", kv_a="kv_a_proj_with_mqa"),
    "attn/q_a_norm": "self_attn.q_a_layernorm.weight",
    "attn/kv_a_norm": "self_attn.kv_a_layernorm.weight",
}
_SPARSE = _LATENT | {
    "attn/indexer/q": "self_attn.indexer.wq_b.weight",
    "attn/indexer/k": "self_attn.indexer.wk.weight",
    "attn/indexer/k_norm/scale": "self_attn.indexer.k_norm.weight",
    "attn/indexer/k_norm/bias": "self_attn.indexer.k_norm.bias",
    "attn/indexer/weights": "self_attn.indexer.weights_proj.weight",
}
_MOE = {  # {e} is the expert
    "moe/norm": "post_attention_layernorm.weight",
    "moe/router/w": "mlp.gate.weight",
    "moe/router/choice_bias": "mlp.gate.e_score_correction_bias",
    **_matrices("moe/experts", "mlp.experts.{e}", *_MLP),
    **_matrices("moe/shared", "mlp.shared_experts", *_MLP),
}
_GEMMA3 = _DECODER | {
    "attn/post_norm": "post_attention_layernorm.weight",
    "mlp/norm": "pre_feedforward_layernorm.weight",
    "mlp/post_norm": "post_feedforward_layernorm.weight",
}
_GEMMA4 = _GEMMA3 | {
    "inputs/input_gate/w": "per_layer_input_gate.weight",
    "inputs/input_out/w": "per_layer_projection.weight",
    "inputs/norm": "post_per_layer_input_norm.weight",
    "scale": "layer_scalar",
    # in layers with an MLP and experts
    "moe/norm": "pre_feedforward_layernorm_2.weight",
    "moe/mlp_norm": "post_feedforward_layernorm_1.weight",
    "moe/post_norm": "post_feedforward_layernorm_2.weight",
    "moe/router/w": "router.proj.weight",
    "moe/router_norm": "router.scale",
    "moe/expert_scale": "router.per_expert_scale",
    **_matrices("moe/experts", "experts.{e}", *_MLP),
}
_GPT_OSS = _DECODER | _MOE | _matrices("moe", "mlp", router="router")
_GPT_OSS |= {"attn/sinks": "self_attn.sinks"}
_IN = {name: f"in_proj_{name}" for name in ("qkv", "z", "qkvz", "ba")}
_DELTA = _DECODER | {
    "delta/norm": "input_layernorm.weight",
    **_matrices("delta", "linear_attn", "out", beta="in_proj_b", decay="in_proj_a", **_IN),
    "delta/convolution": "linear_attn.conv1d.weight",
    "delta/log_rate": "linear_attn.A_log",
    "delta/bias": "linear_attn.dt_bias",
    "delta/out_norm": "linear_attn.norm.weight",
}
_SHARED = {name: theirs.replace("shared_experts", "shared_expert") for name, theirs in _MOE.items()}
_SHARED |= {"moe/shared_gate/w": "mlp.shared_expert_gate.weight"}
_NEMOTRON_H = {  # a layer has one part, and its only norm before that
    **{f"{part}/norm": "norm.weight" for part in ("ssm", "attn", "mlp", "moe")},
    **_matrices("ssm", "mixer", "in", "out"),
    "ssm/convolution": "mixer.conv1d.weight",
    "ssm/convolution_bias": "mixer.conv1d.bias",
    "ssm/log_rate": "mixer.A_log",
    "ssm/bias": "mixer.dt_bias",
    "ssm/skip": "mixer.D",
    "ssm/out_norm": "mixer.norm.weight",
    **_matrices("attn", "mixer", "q", "k", "v", "o"),
    **_matrices("mlp", "mixer", "up", "down"),
    **_matrices("moe", "mixer", router="gate"),
    "moe/router/choice_bias": "mixer.gate.e_score_correction_bias",
    **_matrices("moe", "mixer", latent_in="fc1_latent_proj", latent_out="fc2_latent_proj"),
    **_matrices("moe/experts", "mixer.experts.{e}", "up", "down"),
    **_matrices("moe/shared", "mixer.shared_experts", "up", "down"),
}
_KIMI_LINEAR = _LATENT | _MOE
_KIMI_LINEAR |= _matrices("delta", "self_attn", *"qkvo", z_a="g_a_proj", z_b="g_b_proj")
_KIMI_LINEAR |= _matrices("delta", "self_attn.forget_gate", decay_a="f_a_proj", decay_b="f_b_proj")
_KIMI_LINEAR |= {
    "delta/norm": "input_layernorm.weight",
    "delta/beta/w": "self_attn.b_proj.weight",
    "delta/convolution": "self_attn.conv1d.weight",
    "delta/log_rate": "self_attn.forget_gate.A_log",
    "delta/bias": "self_attn.forget_gate.dt_bias",
    "delta/out_norm": "self_attn.o_norm.weight",
}
LAYER_NAMES: dict[str, dict[str, str]] = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "mistral", "ministral3"), _DECODER),
    "qwen3_moe": _DECODER | _MOE,
    "gpt_oss": _GPT_OSS,
    "gemma3_text": _GEMMA3,
    "gemma4_text": _GEMMA4,
    "qwen3_5_text": _DELTA,
    **dict.fromkeys(("qwen3_5_moe_text", "qwen3_next"), _DELTA | _SHARED),
    "glm4_moe": _DECODER | _MOE,
    **dict.fromkeys(("deepseek_v3", "glm4_moe_lite"), _LATENT | _MOE),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), _SPARSE | _MOE),
    "nemotron_h": _NEMOTRON_H,
    "kimi_linear": _KIMI_LINEAR,
}
# Prefixes of tensors of other media and of multi-token prediction, which text does not pass through
_PICTURES = "vision_tower.", "multi_modal_projector."
_PICTURES += tuple(f"model.{prefix}" for prefix in _PICTURES)
_SOUNDS = tuple(f"model.{part}." for part in ("audio_tower", "embed_audio", "embed_vision"))
OTHER_PARTS = {
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), ("mtp.", "model.visual.")),
    **dict.fromkeys(("qwen3_next", "nemotron_h"), ("mtp.",)),
    "deepseek_v3": ("vision_tower.", "mm_projector."),
    **dict.fromkeys(("gemma3_text", "mistral", "ministral3"), _PICTURES),
    "gemma4_text": _PICTURES + _SOUNDS,
}
# A layer's experts in one tensor ``[E, F, D]`` -> the projections whose rows it stacks
FUSED = {".experts.gate_up_proj": ("gate_proj", "up_proj"), ".experts.down_proj": ("down_proj",)}
FUSED[".experts.up_proj"] = ("up_proj",)  # experts without a gate
# Names in published files (Kimi-Linear) -> those of the class in transformers
_NUMBERED = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
RENAMED = {r"\.block_sparse_moe\.": ".mlp."}
RENAMED |= {rf"(\.mlp\.experts\.\d+)\.{w}\.": rf"\1.{name}." for w, name in _NUMBERED.items()}
RENAMED[r"\.self_attn\.(f_[ab]_proj\.|A_log|dt_bias)"] = r".self_attn.forget_gate.\1"
# Tensor of the class -> the ones of a published file, which it stacks
STACKED = {"conv1d.weight": tuple(f"{name}_conv1d.weight" for name in "qkv")}
FLOATS = ("F64", "F32", "F16", "BF16")  # supported dtypes, as named by safetensors
PREFIXES = {  # prefix of the decoder's names in a file -> prefix of the head's
    "model.": "",
    "": "",  # a decoder saved alone
    "language_model.model.": "language_model.",  # the text part of an image and text model
    "model.language_model.": "",
    "backbone.": "",
}
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
GLOBAL_NAMES = {"embed/w": EMBED, "unembed/w": HEAD, "final_norm": "model.norm.weight"}
GLOBAL_NAMES |= {
    "layer_inputs/table": "model.embed_tokens_per_layer.weight",
    "layer_inputs/projection": "model.per_layer_model_projection.weight",
    "layer_inputs/norm": "model.per_layer_projection_norm.weight",
}
OTHER_NAMES = {  # of families that name them otherwise
    "nemotron_h": {"embed/w": "model.embeddings.weight", "final_norm": "model.norm_f.weight"}
}


@dataclasses.dataclass(frozen=True)
class LeafSource:
    """Tensors of one leaf, and their layout on disk."""

    names: tuple[str, ...]  # one tensor, or one per index of the leaf's leading axes, row-major
    stack: tuple[int, ...]  # sizes of those axes: layers, or layers and experts
    transposed: bool  # the file stores `[out, in]`


def source_of(path: str, spec: ParamSpec, cfg: ModelConfig) -> LeafSource:
    """Returns the tensors of the leaf at ``path``."""
    if path in GLOBAL_NAMES:
        own = GLOBAL_NAMES | OTHER_NAMES.get(cfg.family, {})
        return LeafSource((own[path],), (), False)
    kind, rest = path.split("/", 1)
    name = LAYER_NAMES[cfg.family][rest]
    layers: Iterable[int] = cfg.layers_of(kind)
    if rest.startswith("attn/indexer/"):
        assert cfg.indexer is not None
        layers = (layer for layer in layers if cfg.indexer.full[layer])
    depth = 2 if "{e}" in name else 1
    experts = range(spec.shape[1]) if depth == 2 else (0,)
    names = tuple(
        f"model.layers.{layer}.{name.replace('{e}', str(e))}" for layer in layers for e in experts
    )
    # Matrices are transposed, vectors are not.
    return LeafSource(names, spec.shape[:depth], len(spec.shape) > depth + 1)


def is_moe_type(cfg: ModelConfig) -> bool:
    """Returns True if the base's transformers class has routed experts in place of MLPs; PEFT takes
    the names of its MLPs for those of experts.
    """
    return {"moe/router/w", "moe/mlp_norm"} & LAYER_NAMES[cfg.family].keys() == {"moe/router/w"}


def module_names(cfg: ModelConfig, paths: Iterable[str]) -> BaseNames:
    """Returns PEFT's module names of each projection path, per layer, or per layer and expert."""
    specs = dict(params_lib.leaves_with_path(transformer.abstract(cfg)))
    alternate = cfg.experts is not None and cfg.experts.bias
    # PEFT converts Kimi-Linear's experts one by one for the names in published files only.
    fused = not cfg.gated or cfg.family == "kimi_linear"
    fused = fused or (cfg.experts is not None and cfg.experts.fused)
    out = BaseNames(functools.partial(_holds, cfg), alternate, fused)
    for path in paths:
        leaf = f"{path}/w"
        # A tied head has no tensor.
        names = (HEAD,) if path == "unembed" else source_of(leaf, specs[leaf], cfg).names
        out[path] = [name.removesuffix(".weight") for name in names]
        shape = specs["embed/w"].shape[::-1] if path == "unembed" else specs[leaf].shape
        out.widths[path], out.outputs[path] = shape[-2:]
    return out


class Checkpoint:
    """Lazily opened tensors of a checkpoint directory, by their names in transformers.

    Reads ``model.safetensors`` if it exists, else the files of ``model.safetensors.index.json``,
    else all ``*.safetensors``. ``tied``: either of embedding and head stands for both.

    Raises:
        UserError: no weights, a damaged file, an index that contradicts its files, a name in two
            files.
    """

    def __init__(self, directory: str | Path, tied: bool = False):
        self.directory = Path(directory)
        # Opening a file parses its header: for each tensor, 60 layers of 384 experts take an hour.
        # Few stay open, so that their pages are released.
        self._open = functools.lru_cache(2)(functools.partial(_open, self.directory))
        index, claimed, files = self.directory / INDEX, {}, {SINGLE}
        if not (self.directory / SINGLE).is_file():
            claimed = _weight_map(index) if index.is_file() else {}
            found = {path.name for path in self.directory.glob("*.safetensors")}
            files = set(claimed.values()) or found - {"adapter_model.safetensors"}
        if not files:
            raise UserError(
                f"{self.directory} has no *.safetensors: convert the checkpoint with"
                " save_pretrained(safe_serialization=True)"
            )
        self.stored: dict[str, str] = {}  # name in the file -> file
        for file in sorted(files):
            for name in self._open(file).keys():  # noqa: SIM118 (not a dict)
                if name in self.stored:
                    raise UserError(
                        f"{self.directory / self.stored[name]} and {file} both hold {name!r}:"
                        " remove the file that is not part of the checkpoint"
                    )
                self.stored[name] = file
        for name, file in claimed.items():
            if self.stored.get(name) != file:
                raise UserError(
                    f"{index} says that {file} holds {name!r}, which it does not: fetch the"
                    " checkpoint again"
                )
        norms = [f"layers.0.{norm}.weight" for norm in ("input_layernorm", "norm")]
        found = (p for p in PREFIXES if any(p + norm in self.stored for norm in norms))
        prefix = next(found, "model.")
        self._names = {_plain_name(name, prefix): name for name in self.stored}
        self._scheme = published.read_scheme(self.directory)
        self._quantised: dict[str, tuple[str, ...]] = {}  # weight -> its stored parts
        if self._scheme is not None:
            for module in published.quantised_modules(self._scheme, self._names):
                parts = [self._names.pop(f"{module}{part}") for part in self._scheme.parts]
                self._names[f"{module}{self._scheme.whole}"] = parts[0]
                self._quantised[f"{module}{self._scheme.whole}"] = tuple(parts)
        # Name -> makes the lazy slice of a tensor that is a part, or a stack, of stored ones.
        self._views: dict[str, Callable[[], Any]] = {}
        self._split_experts()
        self._join_parts()
        if tied and EMBED not in self._names and HEAD in self._names:
            self._names[EMBED] = self._names.pop(HEAD)
        self.files = {name: self.stored[stored] for name, stored in self._names.items()}

    def _split_experts(self) -> None:
        """Replaces the names of fused tensors by one for each expert's matrix and bias."""
        biases = {f"{suffix}_bias" for suffix in FUSED}
        fused = [name for name in self._names if name.endswith((*FUSED, *biases))]
        # gpt-oss alone has biases. It stores the transpose, and rows of gate and up alternate.
        alternate = {name for name in fused if name.endswith(tuple(biases))}
        alternate |= {name.removesuffix("_bias") for name in alternate}
        for name in fused:
            whole, stored = self._whole(name), self._names.pop(name)
            if name in alternate and not name.endswith("_bias") and name not in self._quantised:
                whole = published.Transposed(whole)
            leaf = "bias" if name.endswith("_bias") else "weight"
            owner, projection = name.removesuffix("_bias").rsplit(".", 1)
            parts, shape = FUSED[f".experts.{projection}"], whole.get_shape()
            if len(shape) != {"weight": 3, "bias": 2}[leaf] or shape[1] % len(parts):
                raise UserError(
                    f"tensor {name!r} has shape {tuple(shape)}; expected experts, rows of"
                    f" {' and '.join(parts)}, and columns: the checkpoint is of another model"
                )
            n, F = len(parts), shape[1] // len(parts)
            for e, (i, part) in itertools.product(range(shape[0]), enumerate(parts)):
                if (one := f"{owner}.{e}.{part}.{leaf}") in self._names:
                    raise UserError(
                        f"{self.directory} has both {name!r} and {one!r}: remove the one that is"
                        " not part of the checkpoint"
                    )
                self._names[one] = stored
                rows = slice(i, None, n) if name in alternate else slice(i * F, (i + 1) * F)
                self._views[one] = functools.partial(_Expert, whole, e, rows)

    def _join_parts(self) -> None:
        """Replaces the names of tensors that the class stacks by its own."""
        for whole, parts in STACKED.items():
            for first in [name for name in self._names if name.endswith(f".{parts[0]}")]:
                owner = first.removesuffix(parts[0])
                names = [owner + part for part in parts]
                if all(name in self._names for name in names):
                    stacked = [self._whole(name) for name in names]
                    self._views[owner + whole] = functools.partial(_Stacked, stacked)
                    self._names[owner + whole], *_ = map(self._names.pop, names)

    def tensor(self, name: str) -> Any:
        """Returns a lazy slice with ``get_shape()``; raises ``UserError`` if there is none."""
        if name not in self.files:
            near = [n for n in self.files if n.split(".")[-2:] == name.split(".")[-2:]][:2]
            hint = f" (it has {', '.join(near)})" if near else ""
            raise UserError(
                f"{self.directory} has no tensor {name!r}{hint}: config.json and weights do not"
                " match"
            )
        return self._views[name]() if name in self._views else self._whole(name)

    def _whole(self, name: str) -> Any:
        if self._scheme is None or name not in self._quantised:
            return self._slice(self._names[name])
        parts = [self._slice(part) for part in self._quantised[name]]
        return self._scheme.matrix(name, parts)

    def _slice(self, stored_name: str) -> Any:
        file = self.stored[stored_name]
        part = self._open(file).get_slice(stored_name)
        if published.is_float8(part.get_dtype()):
            return published.Float8(self.directory / file, stored_name)
        return part


def _open(directory: Path, file: str) -> Any:
    path = directory / file
    if not path.is_file():
        raise UserError(
            f"{path} is named by {INDEX} but does not exist: fetch the checkpoint again"
        )
    try:
        return safe_open(path, framework="numpy")
    except SafetensorError as error:
        raise UserError(
            f"{path} is not a readable safetensors file ({error}): fetch the checkpoint again"
        ) from None


class _Expert(Computed):
    """One expert's matrix ``[out, in]`` of a fused tensor, as lazily read as that."""

    def __init__(self, fused: Any, expert: int, rows: slice):
        _, all_rows, *columns = fused.get_shape()
        self._fused, self._expert, self._rows = fused, expert, range(*rows.indices(all_rows))
        super().__init__([len(self._rows), *columns], fused.get_dtype())

    def _part(self, spans: list[slice]) -> np.ndarray:
        rows, *columns = spans
        picked, own = self._rows[rows], slice(self._expert, self._expert + 1)
        span = slice(picked.start, picked[-1] + 1) if picked else slice(0, 0)
        # Files are read without steps.
        return np.asarray(self._fused[(own, span, *columns)])[0, :: picked.step]


class _Stacked(Computed):
    """Tensors one after another, lazily read as one."""

    def __init__(self, parts: list[Any]):
        sizes, *rest = zip(*(part.get_shape() for part in parts))
        super().__init__([sum(sizes), *(of[0] for of in rest)], parts[0].get_dtype())
        self._parts = parts

    def _part(self, spans: list[slice]) -> np.ndarray:
        rows, *others = spans
        return np.concatenate([part[(slice(None), *others)] for part in self._parts])[rows]


def _weight_map(index: Path) -> dict[str, str]:
    try:
        found = json.loads(index.read_text())["weight_map"]
        if not found or any(not file or Path(file).name != file for file in found.values()):
            raise ValueError("weight_map names no files in the same directory")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{index} is not a safetensors index ({error!r}): fetch the checkpoint again"
        ) from None
    return found


def _plain_name(stored: str, prefix: str) -> str:
    """Returns a tensor's name in its class, given the decoder's ``prefix`` in the file."""
    if stored == PREFIXES[prefix] + HEAD:
        return HEAD
    name = f"model.{stored.removeprefix(prefix)}" if stored.startswith(prefix) else stored
    for pattern, theirs in RENAMED.items():
        name = re.sub(pattern, theirs, name)
    return name


def same_values(one: Any, other: Any) -> bool:
    """Returns True if two tensors, lazy or not, are equal in the coarser of their dtypes."""
    shapes = [tuple(x.get_shape() if hasattr(x, "get_shape") else x.shape) for x in (one, other)]
    if shapes[0] != shapes[1]:
        return False
    # Read in pieces, because an embedding can be gigabytes.
    rows = max(1, (8 << 20) // max(1, math.prod(shapes[0][1:])))
    starts = range(0, shapes[0][0], rows) if shapes[0] else ()
    for part in [slice(at, min(at + rows, shapes[0][0])) for at in starts] or [()]:
        a, b = np.asarray(one[part]), np.asarray(other[part])
        coarse = min((a.dtype, b.dtype), key=lambda dtype: dtype.itemsize)
        if not np.array_equal(*(x.astype(coarse) for x in (a, b)), equal_nan=True):
            return False
    return True


def read_model(directory: str | Path) -> ModelConfig:
    """Reads the config; a head that differs from a tied embedding is used, as in transformers."""
    cfg = read_config(directory).replace(directory=str(directory))
    if not cfg.tie_embeddings or not any(Path(directory).glob("*.safetensors")):
        return cfg
    ckpt = Checkpoint(directory)
    if not {EMBED, HEAD} <= ckpt.files.keys() or same_values(ckpt.tensor(EMBED), ckpt.tensor(HEAD)):
        return cfg
    _log.warning(
        "%s: tie_word_embeddings is true, but %s differs from the embedding and is used",
        directory,
        HEAD,
    )
    return cfg.replace(tie_embeddings=False)


def _read(ckpt: Checkpoint, source: LeafSource, index: tuple[slice, ...], dtype: Any) -> np.ndarray:
    """Returns the part ``index`` of a leaf, in the leaf's orientation."""

    def one(name: str, index: tuple[slice, ...]) -> np.ndarray:
        part = ckpt.tensor(name)
        if source.transposed:
            return np.ascontiguousarray(part[index[::-1]].T).astype(dtype, copy=False)
        return np.asarray(part[index]).astype(dtype, copy=False)

    return _stack(source, index, one)


def _stack(
    source: LeafSource,
    index: tuple[slice, ...],
    one: Callable[[str, tuple[slice, ...]], np.ndarray],
) -> np.ndarray:
    """Returns a part of a stacked leaf, with one tensor at a time in memory."""
    if not source.stack:
        return one(source.names[0], index)
    depth = len(source.stack)
    picked = np.arange(len(source.names)).reshape(source.stack)[index[:depth]]
    out = None
    for i, number in enumerate(picked.reshape(-1)):
        part = one(source.names[number], index[depth:])
        if out is None:
            out = _aligned((picked.size, *part.shape), part.dtype)
        out[i] = part
    assert out is not None
    return out.reshape(*picked.shape, *out.shape[1:])


def _aligned(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Returns an empty array aligned to 64 bytes, which the CPU device uses without a copy."""
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    buffer = np.empty(nbytes + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    return buffer[start : start + nbytes].view(dtype).reshape(shape)


def _read_quantised(
    ckpt: Checkpoint, source: LeafSource, kind: str, leaf: str, index: tuple[slice, ...]
) -> np.ndarray:
    """Returns a part of a quantised projection's ``w`` or ``scale``."""

    def one(name: str, index: tuple[slice, ...]) -> np.ndarray:
        # A channel's scale needs the whole channel.
        rows, channels = index if leaf == "w" else (slice(None), index[0])
        single = LeafSource((name,), (), source.transposed)
        values, scale = quantised.quantise(
            _read(ckpt, single, (slice(None), channels), np.float32), kind
        )
        return values[rows] if leaf == "w" else scale

    return _stack(source, index, one)


def _check_tensors(ckpt: Checkpoint, specs: Any, cfg: ModelConfig) -> None:
    """Raises unless every tensor is present and has its shape, and all others are harmless."""
    wanted = set()
    for path, spec in params_lib.leaves_with_path(specs):
        source = source_of(path, spec, cfg)
        expected = spec.shape[len(source.stack) :]
        if source.transposed:
            expected = expected[::-1]
        for name in source.names:
            part = ckpt.tensor(name)
            if (found := tuple(part.get_shape())) != expected:
                raise UserError(
                    f"tensor {name!r} has shape {found} but config.json needs {expected}: the two"
                    " do not match"
                )
            if (dtype := part.get_dtype()) not in FLOATS:
                raise UserError(
                    f"tensor {name!r} is stored as {dtype}; expected one of {', '.join(FLOATS)}:"
                    " take the unquantised checkpoint"
                )
        wanted.update(source.names)
    others = OTHER_PARTS.get(cfg.family, ())
    skipped = [name for name in ckpt.files if name.startswith(others)] if others else []
    if skipped:
        _log.info("%s: %d tensors of other parts are not read", ckpt.directory, len(skipped))
    wanted.update(skipped)
    unread = [name for name in ckpt.files if name not in wanted and not _harmless(name, ckpt, cfg)]
    if unread:
        raise UserError(
            f"{ckpt.directory}: this model does not read {len(unread)} of the tensors, the first is"
            f" {min(unread)!r}: config.json and weights do not match, or the checkpoint has an"
            " unsupported part; remove the tensors if the model runs without them"
        )


def _harmless(name: str, ckpt: Checkpoint, cfg: ModelConfig) -> bool:
    """Returns True if logits do not depend on a tensor."""
    # Frequencies are derived from config.json. The value head of TRL's PPO returns no logits.
    if name.endswith(".rotary_emb.inv_freq") or name.startswith("v_head."):
        return True
    if name.endswith(".bias") and f"{name.removesuffix('bias')}weight" in ckpt.files:
        return not np.any(ckpt.tensor(name)[:])  # GPTQ's programs write zeros for all projections
    if name == HEAD and cfg.tie_embeddings:
        return same_values(ckpt.tensor(name), ckpt.tensor(EMBED))
    found = re.match(r"(model\.layers\.(\d+)\.)(self_attn\.indexer\.)?", name)
    if found is None:
        return False
    layer = int(found[2])
    if layer >= cfg.num_layers:  # a multi-token prediction layer, for speculative decoding
        return f"{found[1]}eh_proj.weight" in ckpt.files
    if cfg.shared_keys is not None and layer >= cfg.num_layers - cfg.shared_keys.layers:
        # Files have keys of layers that attend to another layer's.
        return name.removeprefix(f"{found[1]}self_attn.").startswith(("k_", "v_"))
    # A layer may reuse the choice of an earlier one's indexer.
    return found[3] is not None and cfg.indexer is not None and not cfg.indexer.full[layer]


Read = Callable[[tuple[slice, ...]], np.ndarray]


def reader(
    directory: str | Path,
    cfg: ModelConfig,
    dtype: Any,
    quantise: str = "",
    as_stored: bool = False,
) -> tuple[Any, Callable[[str, ParamSpec], Read]]:
    """Returns the specs of a base in memory, and a function that returns the reader of one
    parameter's parts. Arguments and errors are those of ``load``.
    """
    ckpt, in_full = Checkpoint(directory, cfg.tie_embeddings), transformer.abstract(cfg, dtype)
    _check_tensors(ckpt, in_full, cfg)
    specs, block_file = resident_specs(directory, cfg, dtype, quantise, as_stored)
    plain = dict(params_lib.leaves_with_path(in_full))
    if (index := ckpt.directory / INDEX).is_file() and set(ckpt.files.values()) == {SINGLE}:
        _log.warning("%s is read; the files of %s are not", ckpt.directory / SINGLE, index.name)

    def of(path: str, spec: ParamSpec) -> Read:
        owner, _, part = path.rpartition("/")
        in_bits = quantise and (path not in plain or plain[path].dtype != spec.dtype)
        matrix = f"{owner}/w" if in_bits else path
        source = source_of(matrix, plain[matrix], cfg)
        if in_bits:
            return functools.partial(_read_quantised, ckpt, source, quantise, part)
        if block_file is not None and spec.dtype == np.uint8:  # one device has all of it
            blocks = block_file.tensor
            return lambda index: _stack(source, index, lambda name, part: blocks(name)[part])
        return lambda index: _read(ckpt, source, index, spec.dtype)

    return specs, of


def load(
    directory: str | Path,
    cfg: ModelConfig,
    mesh: Mesh,
    dtype: Any = jnp.float32,
    progress: Callable[[int, int], None] | None = None,
    quantise: str = "",
    as_stored: bool = False,
) -> Any:
    """Reads a checkpoint into sharded device arrays.

    Args:
        quantise: a key of ``quantised.KINDS`` for 8-bit matrices in the layers.
        as_stored: keep weights as they are stored, see ``stored.py``; float32 on one CPU.
        progress: called with (bytes done, total bytes) after each leaf.

    Raises:
        UserError: a tensor that is missing, unused, or of a wrong shape or dtype; before any is
            loaded.
    """
    specs, read_leaf = reader(directory, cfg, dtype, quantise, as_stored)

    def leaf(path: str, spec: ParamSpec) -> jax.Array:
        read, where = read_leaf(path, spec), sharding_lib.sharding_of(spec, mesh)
        return jax.make_array_from_callback(spec.shape, where, lambda index: read(index or ()))

    return one_by_one(leaf, specs, progress)


def one_by_one(
    make: Callable[[str, ParamSpec], jax.Array],
    specs: Any,
    progress: Callable[[int, int], None] | None,
) -> Any:
    """Makes a tree with one leaf's host copy at a time; ``progress`` is as in ``load``."""
    total, done = params_lib.nbytes(specs), 0

    def leaf(path: str, spec: ParamSpec) -> jax.Array:
        nonlocal done
        array = make(path, spec).block_until_ready()
        done += spec.nbytes
        if progress is not None:
            progress(done, total)
        return array

    return params_lib.map_with_path(leaf, specs)


def resident_specs(
    directory: str | Path, cfg: ModelConfig, dtype: Any, quantise: str, as_stored: bool
) -> tuple[Any, stored.BlockFile | None]:
    """Returns the specs of a base in memory, and the checkpoint's blocks if it stays in these."""
    directory, specs = Path(directory), transformer.abstract(cfg, dtype, quantise)
    if not as_stored:
        return specs, None
    in_blocks = (directory / stored.FILE).is_file()
    block_file = stored.BlockFile(directory, fingerprint(directory)) if in_blocks else None
    ckpt = Checkpoint(directory, cfg.tie_embeddings)

    def kinds(path: str, spec: ParamSpec) -> set[str]:
        names = source_of(path, spec, cfg).names
        if block_file is not None:
            return {block_file.kinds.get(name, "") for name in names}
        return {ckpt.tensor(name).get_dtype() for name in names}

    return stored.specs(specs, kinds), block_file


def tensors(params: Any, cfg: ModelConfig) -> Iterator[tuple[str, np.ndarray]]:
    """Yields a tree's tensors with Hugging Face names and orientation, one layer at a time."""
    flat = dict(params_lib.leaves_with_path(params))
    for path, array in flat.items():
        source = source_of(path, ParamSpec(array.shape, (None,) * array.ndim), cfg)
        if cfg.experts is not None and cfg.experts.fused and "/experts/" in path:
            if "/experts/up/" not in path:
                yield from _fused(path, flat, source.names, cfg.experts.bias)
            continue
        for i, name in enumerate(source.names):
            value = np.asarray(array[np.unravel_index(i, source.stack)] if source.stack else array)
            yield name, np.ascontiguousarray(value.T) if source.transposed else value


def _fused(
    path: str, flat: dict[str, Any], names: tuple[str, ...], alternate: bool
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields a projection of all experts, one tensor a layer; as gpt-oss stores it if alternate."""
    leaf, of, stack = "_bias" if path.endswith("/b") else "", "down_proj", np.asarray(flat[path])
    if "/gate/" in path:
        of, parts = "gate_up_proj", [stack, np.asarray(flat[path.replace("/gate/", "/up/")])]
        of_pairs = np.stack(parts, axis=-1).reshape(*stack.shape[:-1], -1)
        stack = of_pairs if alternate else np.concatenate(parts, axis=-1)
    for name, value in zip(names[:: stack.shape[1]], stack, strict=True):
        value = value if alternate else np.ascontiguousarray(value.swapaxes(1, 2))
        yield f"{name.split('.experts.')[0]}.experts.{of}{leaf}", value


def _holds(cfg: ModelConfig, name: str, value: np.ndarray) -> bool | None:
    """Returns True if the base's tensor has these values; None if its files have no such tensor."""
    if cfg.directory is None or not any(Path(cfg.directory).glob("*.safetensors")):
        return None
    ckpt = Checkpoint(cfg.directory, cfg.tie_embeddings)
    if cfg.tie_embeddings and name == HEAD:
        name = EMBED
    return same_values(ckpt.tensor(name), value) if name in ckpt.files else None


def save(params: Any, cfg: ModelConfig, directory: str | Path) -> None:
    """Writes ``model.safetensors``, for tools and tests: training never saves a base."""
    Path(directory).mkdir(parents=True, exist_ok=True)
    out = dict(tensors(params, cfg))
    if cfg.family == "kimi_linear":  # its class reads experts under their published names only
        theirs = {name: number for number, name in _NUMBERED.items()}
        pattern = re.compile(r"\.mlp(\.experts\.\d+\.)(\w+)")
        out = {
            pattern.sub(lambda m: f".block_sparse_moe{m[1]}{theirs[m[2]]}", name): value
            for name, value in out.items()
        }
    save_file(out, Path(directory) / SINGLE, metadata={"format": "pt"})


def fingerprint(directory: str | Path) -> str:
    """Returns a hex digest of a base: config, tensor names, shapes, dtypes and samples of their
    bytes.

    It reads 12 KiB of each tensor, so that a terabyte takes seconds. It detects a wrong base, not
    an attack.
    """
    directory = Path(directory)
    config = json.loads((directory / "config.json").read_text())
    for volatile in ("transformers_version", "_name_or_path", "torch_dtype", "dtype"):
        config.pop(volatile, None)
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    stored_in = Checkpoint(directory).stored
    headers = {file: read_header(directory / file) for file in set(stored_in.values())}
    for name, in_file in sorted(stored_in.items()):
        header, data = headers[in_file]
        digest.update(f"{name} {header[name]['dtype']} {header[name]['shape']}".encode())
        start, stop = (data + at for at in header[name]["data_offsets"])
        with open(directory / in_file, "rb") as file:
            for at in (start, (start + stop) // 2, max(start, stop - 4096)):
                file.seek(at)
                digest.update(file.read(min(4096, stop - at)))
    return digest.hexdigest()
