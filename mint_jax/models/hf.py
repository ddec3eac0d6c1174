"""Hugging Face checkpoints: safetensors -> sharded parameters, and back.

Each process reads only what its shards need, leaf by leaf: host memory peaks at one leaf's shard,
never a second copy of the model. Names of tensors live here and nowhere else; a new family is one
table below and one mapping in ``models/config.py``.
"""

import dataclasses
import functools
import hashlib
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
from mint_jax.models import quantised, stored, transformer
from mint_jax.models.config import ModelConfig, read_config
from mint_jax.params import ParamSpec
from mint_jax.safetensors_header import header_size, parse_object

_log = logging.getLogger(__name__)

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_HEADER = 100_000_000  # bytes, the limit of the format's own package
_DENSE = {  # path below one layer -> name below model.layers.{i}
    "attn/norm": "input_layernorm.weight",
    "attn/o/w": "self_attn.o_proj.weight",
    "attn/o/b": "self_attn.o_proj.bias",
    "mlp/norm": "post_attention_layernorm.weight",
    "mlp/gate/w": "mlp.gate_proj.weight",
    "mlp/gate/b": "mlp.gate_proj.bias",
    "mlp/up/w": "mlp.up_proj.weight",
    "mlp/up/b": "mlp.up_proj.bias",
    "mlp/down/w": "mlp.down_proj.weight",
    "mlp/down/b": "mlp.down_proj.bias",
}
_DECODER = _DENSE | {
    "attn/q/w": "self_attn.q_proj.weight",
    "attn/q/b": "self_attn.q_proj.bias",
    "attn/k/w": "self_attn.k_proj.weight",
    "attn/k/b": "self_attn.k_proj.bias",
    "attn/v/w": "self_attn.v_proj.weight",
    "attn/v/b": "self_attn.v_proj.bias",
    "attn/q_norm": "self_attn.q_norm.weight",
    "attn/k_norm": "self_attn.k_norm.weight",
}
_LATENT = _DENSE | {
    "attn/q/w": "self_attn.q_proj.weight",
    "attn/q_a/w": "self_attn.q_a_proj.weight",
    "attn/q_a_norm": "self_attn.q_a_layernorm.weight",
    "attn/q_b/w": "self_attn.q_b_proj.weight",
    "attn/kv_a/w": "self_attn.kv_a_proj_with_mqa.weight",
    "attn/kv_a_norm": "self_attn.kv_a_layernorm.weight",
    "attn/kv_b/w": "self_attn.kv_b_proj.weight",
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
    **{
        f"moe/experts/{name}/w": f"mlp.experts.{{e}}.{name}_proj.weight"
        for name in ("gate", "up", "down")
    },
    **{
        f"moe/shared/{name}/w": f"mlp.shared_experts.{name}_proj.weight"
        for name in ("gate", "up", "down")
    },
}
LAYER_NAMES: dict[str, dict[str, str]] = {
    **dict.fromkeys(("llama", "qwen2", "qwen3"), _DECODER),
    "qwen3_moe": _DECODER | _MOE,
    "deepseek_v3": _LATENT | _MOE,
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), _SPARSE | _MOE),
}
FLOATS = ("F64", "F32", "F16", "BF16")  # dtypes that are read, as safetensors calls them
PREFIXES = {  # what stands before the decoder's names in a file -> before the head's
    "model.": "",
    "": "",  # of the decoder saved alone
    "language_model.model.": "language_model.",  # of the text part of models of images and text
    "model.language_model.": "",
}
GLOBAL_NAMES = {
    "embed/w": "model.embed_tokens.weight",
    "unembed/w": "lm_head.weight",
    "final_norm": "model.norm.weight",
}


@dataclasses.dataclass(frozen=True)
class Source:
    """Where one leaf comes from: its tensors, and how they are laid out on disk.

    Attributes:
        names: one tensor, or one per index of the leaf's leading axes, row-major.
        stack: the sizes of those axes: layers, or layers and experts.
        transposed: the file holds ``[out, in]``.
    """

    names: tuple[str, ...]
    stack: tuple[int, ...]
    transposed: bool


def source_of(path: str, spec: ParamSpec, cfg: ModelConfig) -> Source:
    """The tensors behind the leaf at ``path``."""
    if path in GLOBAL_NAMES:
        return Source((GLOBAL_NAMES[path],), (), False)
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
    # matrices are transposed, vectors are as they are
    return Source(names, spec.shape[:depth], len(spec.shape) > depth + 1)


def is_moe_type(cfg: ModelConfig) -> bool:
    """Whether transformers' class of this base knows routed experts, though all of its layers may
    be dense.
    """
    return _MOE.items() <= LAYER_NAMES[cfg.family].items()


def module_names(cfg: ModelConfig, paths: Iterable[str]) -> BaseNames:
    """Projection path -> its Hugging Face module names, one per layer, or per layer and expert
    (PEFT names adapters by them).
    """
    specs = dict(params_lib.leaves_with_path(transformer.abstract(cfg)))
    out = BaseNames(functools.partial(_holds, cfg))
    for path in paths:
        if path == "unembed":  # also where the head is tied and has no tensor of its own
            names: tuple[str, ...] = (GLOBAL_NAMES["unembed/w"],)
        else:
            names = source_of(f"{path}/w", specs[f"{path}/w"], cfg).names
        out[path] = [name.removesuffix(".weight") for name in names]
    return out


class Checkpoint:
    """The tensors of a checkpoint directory, opened lazily, under the names that transformers gives
    them.

    ``model.safetensors`` is read where it exists; else the files of
    ``model.safetensors.index.json``; else all ``*.safetensors``. The first two are transformers'
    order.

    Args:
        tied: the head is the embedding, so either of them stands for both.

    Raises:
        UserError: no weights, a file that is missing or damaged, an index that contradicts its
            files, or two files with different tensors of one name.
    """

    def __init__(self, directory: str | Path, tied: bool = False):
        self.directory = Path(directory)
        single, index = self.directory / SINGLE, self.directory / INDEX
        claimed: dict[str, str] = {}
        if single.is_file():
            paths = [single]
        elif index.is_file():
            claimed = _weight_map(index)
            paths = [self.directory / file for file in sorted(set(claimed.values()))]
        else:
            paths = [
                p
                for p in sorted(self.directory.glob("*.safetensors"))
                if p.name != "adapter_model.safetensors"
            ]
        if not paths:
            pickles = sorted(p.name for p in self.directory.glob("*.bin"))[:1]
            raise UserError(
                f"{self.directory} has no"
                f" *.safetensors{f', only {pickles[0]}, which is not read' if pickles else ''}:"
                " convert the checkpoint with save_pretrained(safe_serialization=True)"
            )
        self.stored: dict[str, str] = {}  # name in the file -> file
        for path in paths:
            for name in self._open(path.name).keys():  # noqa: SIM118 (not a dict)
                if name in self.stored:
                    self._check_same(name, self.stored[name], path.name)
                self.stored.setdefault(name, path.name)
        for name, file in claimed.items():
            if name not in self._open(file).keys():  # noqa: SIM118
                found = f"; it is in {self.stored[name]}" if name in self.stored else ""
                raise UserError(
                    f"{index} says that {file} holds {name!r}, which it does not{found}: fetch the"
                    " checkpoint again"
                )
        prefix = next(
            (p for p in PREFIXES if f"{p}layers.0.input_layernorm.weight" in self.stored), "model."
        )
        self._names = {_plain_name(name, prefix): name for name in self.stored}
        embed, head = GLOBAL_NAMES["embed/w"], GLOBAL_NAMES["unembed/w"]
        if tied and embed not in self._names and head in self._names:
            self._names[embed] = self._names.pop(head)
        self.files = {name: self.stored[stored] for name, stored in self._names.items()}

    def _open(self, file: str) -> Any:
        path = self.directory / file
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

    def _check_same(self, name: str, one: str, other: str) -> None:
        if not same_values(*(self._open(file).get_slice(name) for file in (one, other))):
            raise UserError(
                f"{self.directory / one} and {other} both hold {name!r}, and the two differ: remove"
                " the file that does not belong to the checkpoint"
            )

    def tensor(self, name: str) -> Any:
        """A lazy slice object with ``get_shape()`` and indexing.

        Raises:
            UserError: the checkpoint has no tensor of this name.
        """
        if name not in self.files:
            near = [n for n in self.files if n.split(".")[-2:] == name.split(".")[-2:]][:2]
            hint = f" (it has {', '.join(near)})" if near else ""
            raise UserError(
                f"{self.directory} has no tensor {name!r}{hint}: config.json and weights do not"
                " belong together"
            )
        return self._open(self.files[name]).get_slice(self._names[name])


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> file, as an index says."""
    try:
        found = json.loads(index.read_text())["weight_map"]
        if not found or any(not file or Path(file).name != file for file in found.values()):
            raise ValueError("weight_map names no files beside it")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{index} is not a safetensors index ({error!r}): fetch the checkpoint again"
        ) from None
    return found


def _plain_name(stored: str, prefix: str) -> str:
    """The name in transformers of a tensor whose decoder lies below ``prefix`` in the file."""
    if stored == PREFIXES[prefix] + GLOBAL_NAMES["unembed/w"]:
        return GLOBAL_NAMES["unembed/w"]
    return f"model.{stored.removeprefix(prefix)}" if stored.startswith(prefix) else stored


def same_values(one: Any, other: Any) -> bool:
    """Whether two tensors, lazy or not, are equal in shape and numbers; of different dtypes in the
    coarser of the two.
    """
    shapes = [tuple(x.get_shape() if hasattr(x, "get_shape") else x.shape) for x in (one, other)]
    if shapes[0] != shapes[1]:
        return False
    # read in pieces: an embedding is gigabytes
    rows = max(1, (8 << 20) // max(1, math.prod(shapes[0][1:])))
    count = shapes[0][0] if shapes[0] else 0
    parts = (
        [slice(at, min(at + rows, count)) for at in range(0, count, rows)] if shapes[0] else [()]
    )
    for part in parts:
        a, b = np.asarray(one[part]), np.asarray(other[part])
        coarse = min((a.dtype, b.dtype), key=lambda dtype: dtype.itemsize)
        if not np.array_equal(*(x.astype(coarse) for x in (a, b)), equal_nan=True):
            return False
    return True


def read_model(directory: str | Path) -> ModelConfig:
    """``config.read_config``, and a head that differs from the embedding is used, as transformers
    does, tied or not.

    Raises:
        UserError: see ``read_config`` and ``Checkpoint``.
    """
    cfg = read_config(directory).replace(directory=str(directory))
    if not cfg.tie_embeddings or not any(Path(directory).glob("*.safetensors")):
        return cfg
    ckpt = Checkpoint(directory)
    embed, head = GLOBAL_NAMES["embed/w"], GLOBAL_NAMES["unembed/w"]
    if not {embed, head} <= ckpt.files.keys() or same_values(ckpt.tensor(embed), ckpt.tensor(head)):
        return cfg
    _log.warning(
        "%s: tie_word_embeddings is true, but %s differs from the embedding and is used",
        directory,
        head,
    )
    return cfg.replace(tie_embeddings=False)


def _read(ckpt: Checkpoint, source: Source, index: tuple[slice, ...], dtype: Any) -> np.ndarray:
    """The part ``index`` of a leaf, in the leaf's own orientation."""

    def one(name: str, index: tuple[slice, ...]) -> np.ndarray:
        part = ckpt.tensor(name)
        if source.transposed:
            return np.ascontiguousarray(part[index[::-1]].T).astype(dtype, copy=False)
        return np.asarray(part[index]).astype(dtype, copy=False)

    return _stack(source, index, one)


def _stack(
    source: Source, index: tuple[slice, ...], one: Callable[[str, tuple[slice, ...]], np.ndarray]
) -> np.ndarray:
    """The part ``index`` of a stacked leaf, from ``one(name, index of a single tensor)``, held once
    and one tensor at a time.
    """
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
    """An empty array that begins at a multiple of 64 bytes: on CPU it becomes the device's own,
    without a second copy.
    """
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    buffer = np.empty(nbytes + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    return buffer[start : start + nbytes].view(dtype).reshape(shape)


def _read_quantised(
    ckpt: Checkpoint, source: Source, kind: str, leaf: str, index: tuple[slice, ...]
) -> np.ndarray:
    """The part ``index`` of a quantised projection's ``w`` or ``scale``; a channel's scale needs
    all of the channel.
    """

    def one(name: str, index: tuple[slice, ...]) -> np.ndarray:
        rows, channels = index if leaf == "w" else (slice(None), index[0])
        single = Source((name,), (), source.transposed)
        values, scale = quantised.quantise(
            _read(ckpt, single, (slice(None), channels), np.float32), kind
        )
        return values[rows] if leaf == "w" else scale

    return _stack(source, index, one)


def _read_held(held: stored.BlockFile, source: Source, index: tuple[slice, ...]) -> np.ndarray:
    """The blocks of a leaf; one device has all of it."""
    return _stack(source, index, lambda name, index: held.tensor(name)[index])


def _check_tensors(ckpt: Checkpoint, specs: Any, cfg: ModelConfig) -> None:
    """Every tensor that the model needs is there, in its shape and in a dtype that is read; and
    every other is harmless.
    """
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
                    f"tensor {name!r} has shape {found} but config.json asks for {expected}: the"
                    " two do not belong together"
                )
            if (dtype := part.get_dtype()) not in FLOATS:
                raise UserError(
                    f"tensor {name!r} is stored as {dtype}; expected one of {', '.join(FLOATS)}:"
                    " take the unquantised checkpoint"
                )
        wanted.update(source.names)
    unread = [name for name in ckpt.files if name not in wanted and not _harmless(name, ckpt, cfg)]
    if unread:
        raise UserError(
            f"{ckpt.directory}: this model does not read {len(unread)} of the tensors, the first is"
            f" {min(unread)!r}: config.json and weights do not belong together, or the checkpoint"
            " has a part that is not supported; remove the tensors if the model runs without them"
        )
    if beyond := sum(_layer_beyond(name, ckpt, cfg) for name in ckpt.files):
        _log.warning(
            "%s: %d tensors of layers after the last (multi-token prediction) are not read",
            ckpt.directory,
            beyond,
        )


def _layer_beyond(name: str, ckpt: Checkpoint, cfg: ModelConfig) -> bool:
    """Whether a tensor belongs to a layer of multi-token prediction, which speculative decoding
    alone uses.
    """
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    return (
        layer is not None
        and int(layer[1]) >= cfg.num_layers
        and f"{layer[0]}eh_proj.weight" in ckpt.files
    )


def _harmless(name: str, ckpt: Checkpoint, cfg: ModelConfig) -> bool:
    """Whether logits are the same without a tensor."""
    # follows from config.json; old releases of transformers saved it
    if name.endswith(".rotary_emb.inv_freq"):
        return True
    # a value head of TRL's PPO: reads the last hidden state, returns no logits
    if name.startswith("v_head."):
        return True
    if name == GLOBAL_NAMES["unembed/w"] and cfg.tie_embeddings:
        return same_values(ckpt.tensor(name), ckpt.tensor(GLOBAL_NAMES["embed/w"]))
    if cfg.indexer is not None and (
        found := re.match(r"model\.layers\.(\d+)\.self_attn\.indexer\.", name)
    ):
        layer = int(found[1])  # a layer that takes over the choice of the one before
        return layer >= cfg.num_layers or not cfg.indexer.full[layer]
    return _layer_beyond(name, ckpt, cfg)


def load(
    directory: str | Path,
    cfg: ModelConfig,
    mesh: Mesh,
    dtype: Any = jnp.float32,
    progress: Callable[[int, int], None] | None = None,
    quantise: str = "",
    as_stored: bool = False,
) -> Any:
    """Reads a checkpoint straight into sharded device arrays.

    Args:
        dtype: dtype of the resident base.
        quantise: a key of ``quantised.KINDS``: the layers' matrices in 8 bits.
        as_stored: whether weights stay as they are stored, see ``stored.py``; of float32 on one
            CPU.
        progress: called with (bytes done, bytes in all) after each leaf.

    Raises:
        UserError: a tensor that is missing, of a wrong shape or dtype, or read by nothing; found
            before anything is loaded.
    """
    ckpt, in_full = Checkpoint(directory, cfg.tie_embeddings), transformer.abstract(cfg, dtype)
    _check_tensors(ckpt, in_full, cfg)
    specs, held = resident_specs(directory, cfg, dtype, quantise, as_stored)
    plain = dict(params_lib.leaves_with_path(in_full))
    if (index := ckpt.directory / INDEX).is_file() and set(ckpt.files.values()) == {SINGLE}:
        _log.warning(
            "%s is read; the files of %s beside it are not", ckpt.directory / SINGLE, index.name
        )
    total, done = params_lib.nbytes(specs), 0

    def leaf(path: str, spec: ParamSpec) -> jax.Array:
        nonlocal done
        target = sharding_lib.sharding_of(spec, mesh)
        if held is not None and spec.dtype == np.uint8:
            read = functools.partial(_read_held, held, source_of(path, plain[path], cfg))
        elif path in plain and (plain[path].dtype == spec.dtype or not quantise):
            read = functools.partial(_read, ckpt, source_of(path, spec, cfg), dtype=spec.dtype)
        else:
            owner, _, part = path.rpartition("/")
            source = source_of(f"{owner}/w", plain[f"{owner}/w"], cfg)
            read = functools.partial(_read_quantised, ckpt, source, quantise, part)
        array = jax.make_array_from_callback(
            spec.shape, target, lambda index, read=read: read(index=index or ())
        )
        array.block_until_ready()  # one leaf's host copy at a time
        done += spec.nbytes
        if progress is not None:
            progress(done, total)
        return array

    return params_lib.map_with_path(leaf, specs)


def resident_specs(
    directory: str | Path, cfg: ModelConfig, dtype: Any, quantise: str, as_stored: bool
) -> tuple[Any, stored.BlockFile | None]:
    """The specs of a base as it is held; and the checkpoint's blocks, if it stays in these.

    Raises:
        UserError: a missing tensor, see ``Checkpoint``, or blocks of other weights, see
            ``stored.BlockFile``.
    """
    directory, specs = Path(directory), transformer.abstract(cfg, dtype, quantise)
    if not as_stored:
        return specs, None
    if (directory / stored.FILE).is_file():
        held = stored.BlockFile(directory, fingerprint(directory))
        return (
            stored.specs_in_blocks(
                specs,
                lambda path, spec: {
                    held.kinds.get(n, "") for n in source_of(path, spec, cfg).names
                },
            ),
            held,
        )
    ckpt = Checkpoint(directory, cfg.tie_embeddings)
    return (
        stored.specs(
            specs,
            lambda path, spec: {
                ckpt.tensor(name).get_dtype() for name in source_of(path, spec, cfg).names
            },
        ),
        None,
    )


def tensors(params: Any, cfg: ModelConfig) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of a tree under their Hugging Face names and orientation, one layer at a time."""
    for path, array in params_lib.leaves_with_path(params):
        source = source_of(path, ParamSpec(array.shape, (None,) * array.ndim), cfg)
        for i, name in enumerate(source.names):
            value = np.asarray(array[np.unravel_index(i, source.stack)] if source.stack else array)
            yield name, np.ascontiguousarray(value.T) if source.transposed else value


def _holds(cfg: ModelConfig, name: str, value: np.ndarray) -> bool | None:
    """Whether the base's tensor of this name has these values; None where its files, if any, have
    no such tensor.
    """
    if cfg.directory is None or not any(Path(cfg.directory).glob("*.safetensors")):
        return None
    ckpt = Checkpoint(cfg.directory, cfg.tie_embeddings)
    if cfg.tie_embeddings and name == GLOBAL_NAMES["unembed/w"]:
        name = GLOBAL_NAMES["embed/w"]
    return same_values(ckpt.tensor(name), value) if name in ckpt.files else None


def save(params: Any, cfg: ModelConfig, directory: str | Path) -> None:
    """Writes ``model.safetensors`` under the family's names. For tools and tests: training never
    saves a base.
    """
    Path(directory).mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors(params, cfg)), Path(directory) / SINGLE, metadata={"format": "pt"})


def fingerprint(directory: str | Path) -> str:
    """A hex digest that identifies a base: config fields, tensor names, shapes, dtypes and samples
    of every tensor's bytes.

    It reads 12 KiB of each tensor instead of all of it, so that a terabyte base takes seconds: made
    to catch a wrong base, not an attacker.
    """
    directory = Path(directory)
    config = json.loads((directory / "config.json").read_text())
    for volatile in ("transformers_version", "_name_or_path", "torch_dtype", "dtype"):
        config.pop(volatile, None)
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for name, header, data in sorted(_spans(directory), key=lambda span: span[0]):
        digest.update(f"{name} {header['dtype']} {header['shape']}".encode())
        path, start, stop = data
        with open(path, "rb") as file:
            for at in (start, (start + stop) // 2, max(start, stop - 4096)):
                file.seek(at)
                digest.update(file.read(min(4096, stop - at)))
    return digest.hexdigest()


def _spans(directory: Path) -> Iterator[tuple[str, dict[str, Any], tuple[Path, int, int]]]:
    """Name, header and byte range of every tensor (safetensors format: u64 header size, JSON
    header, data).
    """
    stored_in = Checkpoint(directory).stored
    for path in sorted({directory / file for file in stored_in.values()}):
        with open(path, "rb") as file:
            size = header_size(
                file.read(8), path.stat().st_size, MAX_HEADER, f"the header of {path}"
            )
            header = parse_object(file.read(size), f"the header of {path}")
        for name, entry in header.items():
            if name != "__metadata__" and stored_in[name] == path.name:
                start, stop = entry["data_offsets"]
                yield name, entry, (path, 8 + size + start, 8 + size + stop)
