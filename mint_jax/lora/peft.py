"""PEFT adapter directories <-> adapter trees, exactly. Module names come in as a table; none is known here.

``lora_A`` is our ``a`` as it is, ``lora_B`` is our ``b`` transposed; embeddings spell theirs ``lora_embedding_A`` and
``lora_embedding_B``. One rank and one scale hold for a tree: a directory with ``rank_pattern`` or ``alpha_pattern`` is
brought to its largest rank, and differing scales are folded into B.
"""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from mint_jax import params as params_lib
from mint_jax.errors import UserError
from mint_jax.lora.tree import AdapterConfig, Projection, check_finite

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_UNSUPPORTED = {  # config field -> values that mean "not used"
    "use_dora": (False, None),
    "bias": ("none", None),
    "lora_bias": (False, None),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, []),
    "target_parameters": (None, []),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None, []),
    "init_lora_weights": (None, True, False, "gaussian", "eva", "orthogonal"),  # the others change the base's own weights
    **dict.fromkeys(("use_qalora", "use_bdlora", "kasa_config", "monteclora_config", "velora_config", "arrow_config"), (None, False)),
}

Names = Mapping[str, Sequence[str]]  # projection path -> module name per layer, or per layer and expert


def _tensor_names(path: str, module: str) -> tuple[str, str]:
    if path == "embed":
        return f"{_PREFIX}{module}.lora_embedding_A", f"{_PREFIX}{module}.lora_embedding_B"
    return f"{_PREFIX}{module}.lora_A.weight", f"{_PREFIX}{module}.lora_B.weight"


def is_peft(directory: str | Path) -> bool:
    """Whether a path looks like a PEFT adapter directory."""
    return (Path(directory) / CONFIG).is_file()


def write_peft(directory: str | Path, adapter: Any, config: AdapterConfig, names: Names, base_name: str = "") -> None:
    """Writes an adapter so that PEFT loads it with the same outputs; the directory appears whole or not at all.

    Raises:
        UserError: the directory exists and is not empty.
    """
    directory = Path(directory)
    if directory.is_file():
        raise UserError(f"output {directory} is a file: choose a new directory")
    if directory.exists() and any(directory.iterdir()):
        raise UserError(f"output {directory} is not empty: choose a new directory, or remove it")
    flat = dict(params_lib.leaves_with_path(adapter))
    tensors: dict[str, np.ndarray] = {}
    modules: set[str] = set()
    for path in sorted({leaf.rsplit("/", 1)[0] for leaf in flat}):
        a, b = (_per_module(flat[f"{path}/{factor}"]) for factor in ("a", "b"))
        for i, module in enumerate(names[path]):
            name_a, name_b = _tensor_names(path, module)
            tensors[name_a] = np.ascontiguousarray(a[i])
            tensors[name_b] = np.ascontiguousarray(b[i].T)
            modules.add(module.rsplit(".", 1)[-1])
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "use_rslora": config.rslora,
        "target_modules": sorted(modules),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    directory.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(dir=directory.parent, prefix=f".{directory.name}-"))
    try:
        save_file(tensors, staging / WEIGHTS, metadata={"format": "pt"})
        (staging / CONFIG).write_text(json.dumps(fields, indent=2))
        if directory.exists():
            directory.rmdir()
        os.replace(staging, directory)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _per_module(factor: Any) -> np.ndarray:
    """``[L, R, D]`` or ``[L, E, R, D]`` -> ``[modules, R, D]``."""
    factor = np.asarray(factor)
    return factor.reshape(-1, *factor.shape[-2:])


def read_peft(directory: str | Path, names: Names, projections: Mapping[str, Projection]) -> tuple[Any, AdapterConfig]:
    """Reads a PEFT adapter.

    Args:
        names: modules of every projection of the base that could be adapted.
        projections: those projections.

    Returns:
        The factors, float32, with layers and experts that the directory leaves out at zero, and their config.

    Raises:
        UserError: not a PEFT LoRA directory, a feature this does not cover, a tensor of no known projection, a wrong
            shape, NaN weights, or nothing that binds.
    """
    directory = Path(directory)
    config = _read_config(directory)
    try:
        tensors = load_file(directory / WEIGHTS)
    except (FileNotFoundError, SafetensorError) as error:
        hint = (
            " (a pickle, adapter_model.bin, is not read: save it with safe_serialization=True)"
            if (directory / "adapter_model.bin").exists()
            else ""
        )
        raise UserError(f"{directory / WEIGHTS} cannot be read ({error}){hint}") from None

    for name in [n for n in tensors if n.endswith((".embed_tokens.base_layer.weight", ".lm_head.base_layer.weight"))]:
        del tensors[name]  # PEFT saves the frozen weights of an adapted embedding beside its adapter
    scale = _Scale(config)
    found: dict[str, dict[int, tuple[str, np.ndarray, np.ndarray]]] = {}
    for path, modules in names.items():
        for i, module in enumerate(modules):
            name_a, name_b = _tensor_names(path, module)
            if (name_a in tensors) != (name_b in tensors):
                raise UserError(f"{directory}: {module} has only one of lora_A and lora_B; the file is incomplete")
            if name_a in tensors:
                found.setdefault(path, {})[i] = (module, tensors.pop(name_a), tensors.pop(name_b))
    if tensors:
        raise UserError(
            f"{directory}: tensor {next(iter(tensors))!r} is no LoRA factor of this base: the adapter was trained on another model"
        )
    if not found:
        raise UserError(f"{directory}: no module of the adapter binds to this base: the adapter was trained on another model")

    for module, a, b in (entry for layers in found.values() for entry in layers.values()):
        if a.ndim != 2 or b.ndim != 2 or not a.shape[0]:
            raise UserError(f"{directory}: {module} has lora_A {a.shape} and lora_B {b.shape}; expected two matrices of rank 1 or more")
    rank = max(a.shape[0] for layers in found.values() for _, a, _ in layers.values())
    alpha = float(config.get("lora_alpha", rank))
    targets = tuple(dict.fromkeys(path.rsplit("/", 1)[-1] for path in found))
    mine = AdapterConfig(rank, alpha, targets, bool(config.get("use_rslora", False)))
    flat = {}
    for path, layers in found.items():
        stack, D, F, _ = projections[path]
        count = len(names[path])
        a_all, b_all = np.zeros((count, rank, D), np.float32), np.zeros((count, rank, F), np.float32)
        for i, (module, a, b) in layers.items():
            r = a.shape[0]
            if a.shape != (r, D) or b.shape != (F, r):
                raise UserError(
                    f"{directory}: {module} has lora_A {a.shape} and lora_B {b.shape}; this base needs ({r}, {D}) and ({F}, {r})"
                )
            scale.check_rank(module, r)
            a_all[i, :r] = a
            b_all[i, :r] = b.T.astype(np.float32) * np.float32(scale.of(module, r) / mine.scale)
        flat |= {f"{path}/a": a_all.reshape(*stack, rank, D), f"{path}/b": b_all.reshape(*stack, rank, F)}
    adapter = params_lib.nest(flat)
    check_finite(adapter, str(directory))
    return adapter, mine


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / CONFIG
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: a PEFT adapter is a directory with {CONFIG} and {WEIGHTS}") from None
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error})") from None
    if not isinstance(config, dict):
        raise UserError(f"{path} holds a {type(config).__name__}; expected an object with peft_type, r and lora_alpha")
    if config.get("peft_type") != "LORA":
        raise UserError(f"{path}: peft_type is {config.get('peft_type')!r}; only LORA adapters can be imported")
    for field, unused in _UNSUPPORTED.items():
        if config.get(field) not in unused:
            raise UserError(f"{path}: {field} is {config[field]!r}, which is not supported; train or merge it without")
    return config


class _Scale:
    """The scale and rank that PEFT gives each module, with its patterns."""

    def __init__(self, config: dict[str, Any]):
        self.config = config
        self.ranks: dict[str, int] = config.get("rank_pattern") or {}
        self.alphas: dict[str, float] = config.get("alpha_pattern") or {}

    @staticmethod
    def _lookup(patterns: dict[str, Any], module: str, default: Any) -> Any:
        for pattern, value in patterns.items():  # as PEFT matches them: a whole suffix of the module's name
            if re.match(rf"(.*\.)?({pattern})$", module):
                return value
        return default

    def check_rank(self, module: str, rank: int) -> None:
        expected = self._lookup(self.ranks, module, self.config.get("r", rank))
        if expected != rank:
            raise UserError(f"{module} has rank {rank} but {CONFIG} says {expected}: config and weights do not belong together")

    def of(self, module: str, rank: int) -> float:
        alpha = float(self._lookup(self.alphas, module, self.config.get("lora_alpha", rank)))
        return alpha / (rank**0.5 if self.config.get("use_rslora") else rank)
