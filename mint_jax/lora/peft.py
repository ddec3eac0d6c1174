"""Exact conversion between PEFT adapter directories and adapter trees. Module names are an
argument.

``lora_A`` is our ``a``, ``lora_B`` our ``b`` transposed; embeddings use ``lora_embedding_A`` and
``lora_embedding_B``. A tree has one rank and one scale: others are padded to the largest rank, and
their scales folded into B. Routed experts are written one by one, which every program reads, and
read in that form or fused (``fused.py``). A bias is that of ``lora_B`` (PEFT's ``lora_bias``) with
matrices of zeros: PEFT's ``bias`` saves those of modules alone that have one in the base.
"""

import dataclasses
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from mint_jax import params as params_lib
from mint_jax.errors import UserError
from mint_jax.files import new_directory, read_object
from mint_jax.lora.basis import with_basis
from mint_jax.lora.fused import (
    DEFAULT_RANK,
    PLAIN_SINCE,
    STACKED,
    Found,
    Fused,
    Pair,
    Patterns,
    fused_factors,
    fused_parameters,
    is_targeted,
    read_fused,
    read_stacked,
    stacked_factors,
    target_fields,
)
from mint_jax.lora.tree import (
    BASIS,
    BIAS,
    SHARED_OUTER,
    AdapterConfig,
    Projection,
    check_finite,
    expanded,
    shared_outer,
)

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
# How classes of several media name their text model -> the name in the class of text
_TEXT = {"model.language_model.": "model.", "language_model.": ""}
# Names that PEFT takes for projections of experts in model types with experts.
_MLP = {"gate_proj", "up_proj", "down_proj"}
# Every field of ``peft.LoraConfig`` is in READ, ONLY or NO_EFFECT.
READ = {"peft_type", "peft_version", "r", "lora_alpha", "use_rslora", "rank_pattern"}
READ |= {"alpha_pattern", "target_modules", "exclude_modules", "layers_to_transform"}
READ |= {"target_parameters", "modules_to_save", "lora_bias"}
# Fields that change the computation -> supported values.
ONLY: dict[str, tuple[Any, ...]] = {
    "use_dora": (False, None),
    "bias": ("none", None),
    "trainable_token_indices": (None, [], {}),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None, []),
    "megatron_config": (None, {}),
    "ensure_weight_tying": (False, None),  # factors of the embedding that also adapt the head
    # other initialisations change the base's weights
    "init_lora_weights": (None, True, False, "gaussian", "eva", "orthogonal", "mica"),
    **dict.fromkeys(
        ("use_qalora", "use_bdlora", "kasa_config", "monteclora_config"), (None, False, {})
    ),
    **dict.fromkeys(("velora_config", "arrow_config"), (None, False, {})),
}
# Names of classes, modules and the base; storage; training; fields used with an unsupported one.
NO_EFFECT = {"task_type", "auto_mapping", "base_model_name_or_path", "revision", "layers_pattern"}
NO_EFFECT |= {"megatron_core", "fan_in_fan_out", "inference_mode", "lora_dropout", "loftq_config"}
NO_EFFECT |= {"eva_config", "corda_config", "lora_ga_config", "qalora_group_size", "runtime_config"}

# Projection path -> module name per layer, or per layer and expert.
Names = Mapping[str, Sequence[str]]


class BaseNames(dict[str, list[str]]):
    """``Names`` of a base that can also compare base weights, which some adapter files contain.

    Args:
        alternate: its experts have the layout of ``fused.Fused.alternate``.
        fused: PEFT reads factors of its experts in the fused layout only.

    Attributes:
        widths, outputs: width of each projection's inputs, and of its outputs, by path.
    """

    def __init__(
        self,
        holds: Callable[[str, np.ndarray], bool | None],
        alternate: bool = False,
        fused: bool = False,
    ):
        super().__init__()
        self.holds, self.alternate, self.fused = holds, alternate, fused
        self.widths: dict[str, int] = {}
        self.outputs: dict[str, int] = {}


def _alternate(names: Names) -> bool:
    return getattr(names, "alternate", False)


def _tensor_names(path: str, module: str) -> tuple[str, str]:
    if path == "embed":
        return f"{_PREFIX}{module}.lora_embedding_A", f"{_PREFIX}{module}.lora_embedding_B"
    return f"{_PREFIX}{module}.lora_A.weight", f"{_PREFIX}{module}.lora_B.weight"


def is_peft(directory: str | Path) -> bool:
    """Returns True if a path looks like a PEFT adapter directory."""
    return (Path(directory) / CONFIG).is_file()


def write_peft(
    directory: str | Path,
    adapter: Any,
    config: AdapterConfig,
    names: Names,
    base_name: str = "",
    moe_type: bool = False,
    layout: str = "peft",
) -> None:
    """Writes an adapter so that PEFT loads it with the same outputs; the directory is created
    atomically.

    PEFT has no factors that experts share, so each expert gets a copy of a shared-outer adapter's,
    but in other layouts.
    PEFT cannot load an adapter of only gate or only up of routed experts, and raises. For gpt-oss
    the other one is written as zeros.

    Args:
        base_name: name by which other programs open the base.
        moe_type: the base's transformers class has routed experts, even if all its layers are
            dense.
        layout: ``sglang`` or ``miles``: experts have that layout, see ``fused.py``, which PEFT does
            not read, with factors that experts share as they are.
    """
    directory = Path(directory)
    if directory.is_file():
        raise UserError(f"output {directory} is a file: choose a new directory")
    if directory.exists() and any(directory.iterdir()):
        raise UserError(f"output {directory} is not empty: choose a new directory, or remove it")
    if config.kind == BASIS:
        assert isinstance(names, BaseNames)
        own = dict(params_lib.leaves_with_path(adapter))
        adapter = params_lib.nest(with_basis(own, names.outputs))
    flat = dict(params_lib.leaves_with_path(expanded(adapter)))
    tensors: dict[str, np.ndarray] = {}
    targets: dict[str, Any] = {}
    if is_bias := config.kind == BIAS:
        if moe_type or layout != "peft":
            raise UserError(
                f"format {layout} has no biases for {'this base' if moe_type else 'LoRA'}: choose"
                " --format=orbax or --packed FILE"
            )
        tensors, config = _take_biases(flat, names), AdapterConfig(1, 1.0, config.targets)
    if layout != "peft":
        last = {_last(module) for path in _owners(flat) for module in names[path]}
        targets = {"target_modules": sorted(last), "use_rslora": False}
        targets["lora_alpha"] = config.scale * config.rank
        tensors = _take_stacked(flat, adapter, names, layout)
    fused = _add_lacking(flat, names) if getattr(names, "fused", False) else {}
    for experts, parameters in fused_parameters(names, fused, _alternate(names)).items():
        for module, a, b in fused_factors(experts, parameters, flat):
            tensors |= dict(zip(_tensor_names("", module), (a, b)))
    for path in [path for path in _owners(flat) if path not in fused]:
        factors = (np.asarray(flat[f"{path}/{f}"]) for f in "ab")
        # from `[L, R, D]` or `[L, E, R, D]` to `[modules, R, D]`
        a, b = (factor.reshape(-1, *factor.shape[-2:]) for factor in factors)
        for i, module in enumerate(names[path]):
            pair = np.ascontiguousarray(a[i]), np.ascontiguousarray(b[i].T)
            tensors |= dict(zip(_tensor_names(path, module), pair))
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "use_rslora": config.rslora,
        **(targets or _targets(flat, config, names, moe_type)),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        **({"lora_bias": True} if is_bias else {}),
    }
    if fused:  # the layout of experts that PEFT writes since this version
        fields["peft_version"] = ".".join(map(str, PLAIN_SINCE))
    with new_directory(directory) as staging:
        save_file(tensors, staging / WEIGHTS, metadata={"format": "pt"})
        (staging / CONFIG).write_text(json.dumps(fields, indent=2))
        # safetensors makes files readable by their owner only
        (staging / WEIGHTS).chmod((staging / CONFIG).stat().st_mode)


def _owners(flat: Mapping[str, Any]) -> list[str]:
    """Returns the paths of the projections that have factors."""
    return sorted({leaf.rsplit("/", 1)[0] for leaf in flat})


def _last(name: str, separator: str = ".") -> str:
    return name.rsplit(separator, 1)[-1]


def _take_biases(flat: dict[str, Any], names: Names) -> dict[str, np.ndarray]:
    """Replaces biases by factors of zeros; returns their tensors."""
    assert isinstance(names, BaseNames)
    tensors = {}
    for leaf, bias in list(flat.items()):
        path = leaf.removesuffix(f"/{BIAS}")
        for module, b_1F in zip(names[path], np.asarray(flat.pop(leaf))):
            tensors[f"{_PREFIX}{module}.lora_B.bias"] = b_1F[0]
        flat[f"{path}/a"] = np.zeros((*bias.shape[:-1], names.widths[path]), np.float32)
        flat[f"{path}/b"] = np.zeros(bias.shape, np.float32)
    return tensors


def _read_biases(
    tensors: dict[str, np.ndarray],
    found: Found,
    names: Names,
    projections: Mapping[str, Projection],
    directory: Path,
) -> tuple[Any, AdapterConfig]:
    """Removes the biases of found modules, which have no other factors, from a file's tensors."""
    targets, paths = _targeted(names, found)
    flat = {}
    for path in paths:
        modules, F = names[path], projections[path].d_out
        flat[f"{path}/{BIAS}"] = out = np.zeros((len(modules), 1, F), np.float32)
        for i, (a, b, scale) in found.get(path, {}).items():
            own = tensors.pop(f"{_PREFIX}{modules[i]}.lora_B.bias", None)
            if own is None or own.shape != (F,) or (a.any() and b.any()):
                raise UserError(
                    f"{directory}: lora_bias is true, and {modules[i]} has factors that are not"
                    f" zero, or no bias ({F},): biases are imported alone; train without lora_bias"
                )
            out[i] = own.astype(np.float32) * np.float32(scale)
    return params_lib.nest(flat), AdapterConfig(targets=targets, kind=BIAS)


def _targeted(names: Names, found: Found) -> tuple[tuple[str, ...], list[str]]:
    """Returns the targets of found factors, and the paths of all that these name."""
    # In the base's order, as of tree.spelled_out: an adapter's digest depends on it.
    targets = tuple(dict.fromkeys(_last(path, "/") for path in names if path in found))
    return targets, [path for path in names if _last(path, "/") in targets]


def _targets(
    flat: Mapping[str, Any], config: AdapterConfig, names: Names, moe_type: bool
) -> dict[str, Any]:
    """Returns the config fields that name the adapted modules."""
    # By default the last names of modules, which every program reads. For routed experts PEFT
    # converts them to parameters that stack gate and up at twice the rank, by the model type, even
    # if no layer has experts. That fails in two ways: the same names no longer adapt dense layers
    # and shared experts, whose factors PEFT drops silently, and with rslora the scale of gate and
    # up grows by sqrt(2). In these cases the parameters are named explicitly. So are routers: PEFT
    # adapts one as a parameter, whose name it derives for some types of models only.
    modules = {path: set(map(_last, names[path])) for path in _owners(flat)}
    stacks = _stacks(flat)
    of_experts = set().union(*(modules[path] for path in stacks), _MLP if moe_type else ())
    others = [path for path in modules if path not in stacks]
    colliding = [p for p in others if modules[p] & of_experts or p.endswith("/router")]
    if not colliding and not (stacks and (config.rslora or getattr(names, "fused", False))):
        return {"target_modules": sorted(set().union(*modules.values()))}
    by_module = fused_parameters(names, stacks, False)
    fused = [parameter for of_layer in by_module.values() for parameter in of_layer.values()]
    parameters = [one.name for one in fused]
    parameters += [f"{module}.weight" for path in colliding for module in names[path]]
    plain = [modules[path] for path in others if path not in colliding]
    return {
        "target_modules": sorted(set().union(*plain)),
        "target_parameters": sorted(parameters),
        **target_fields(fused, config.rank, config.alpha, config.rslora),
    }


def _stacks(flat: Mapping[str, Any]) -> dict[str, Projection]:
    """Returns the projections of routed experts among an adapter's factors."""
    out = {}
    for path in _owners(flat):
        (*stack, _, d_in), (*_, d_out) = (np.shape(flat[f"{path}/{f}"]) for f in "ab")
        if len(stack) == 2:
            out[path] = Projection(tuple(stack), d_in, d_out, ())
    return out


def _take_stacked(
    flat: dict[str, Any], adapter: Any, names: Names, layout: str
) -> dict[str, np.ndarray]:
    """Removes routed experts from the factors; returns their tensors in another layout."""
    if _alternate(names):
        raise UserError(f"format {layout} is not known for experts of this base: choose peft")
    tensors, own = {}, dict(params_lib.leaves_with_path(adapter))
    stacked = {f"{part}_proj": name for name, part in STACKED.items()}
    for path in _stacks(flat):
        parent, _, name = path.rpartition("/")
        kept = path if f"{path}/a" in own else f"{parent}/{SHARED_OUTER}/{name}"
        pairs = stacked_factors(names[path], *(np.asarray(own[f"{kept}/{f}"]) for f in "ab"))
        for (experts, projection, *pair), f in itertools.product(pairs, (0, 1)):
            if layout == "sglang":
                modules = {f"{experts}.{stacked[projection]}": pair[f]}
            elif len(pair[f]) == 1:
                modules = {f"{experts}.{projection}": pair[f]}
            else:
                modules = {f"{experts}.{e}.{projection}": x for e, x in enumerate(pair[f])}
            for module, x in modules.items():
                tensors[_tensor_names("", module)[f]] = np.ascontiguousarray(x)
        del flat[f"{path}/a"], flat[f"{path}/b"]
    return tensors


def _add_lacking(flat: dict[str, Any], names: Names) -> dict[str, Projection]:
    """Adds zeros for gate where only up is adapted, and the reverse; returns all experts'."""
    for path in _stacks(flat):
        owner, _, last = path.rpartition("/")
        other = {"gate": "up", "up": "gate"}.get(last)
        if f"{owner}/{other}" in names and f"{owner}/{other}/a" not in flat:
            flat |= {f"{owner}/{other}/{f}": np.zeros_like(flat[f"{path}/{f}"]) for f in "ab"}
    return _stacks(flat)


def read_peft(
    directory: str | Path,
    names: Names,
    projections: Mapping[str, Projection],
    finite: bool = True,
) -> tuple[Any, AdapterConfig]:
    """Reads the factors, float32, and the config of a PEFT adapter.

    Layers that the directory omits are zero, as are dense layers and shared experts with the names
    of targeted routed ones.

    Args:
        names: modules of every projection. With ``BaseNames``, base weights in the file are
            compared with the base's; otherwise they are rejected.
        finite: reject NaN and infinite weights.

    Raises:
        UserError: not a PEFT LoRA directory, an unsupported feature, or tensors that do not fit.
    """
    directory = Path(directory)
    config = _read_config(directory)
    try:
        tensors = load_file(directory / WEIGHTS)
    except (FileNotFoundError, SafetensorError) as error:
        hint = (
            " (adapter_model.bin is a pickle, which is not read: save with safe_serialization=True)"
            if (directory / "adapter_model.bin").exists()
            else ""
        )
        raise UserError(f"{directory / WEIGHTS} cannot be read ({error}){hint}") from None

    tensors = {_of_text(name): x for name, x in tensors.items()}
    _join_shared(tensors, fused_parameters(names, projections, _alternate(names)))

    def take(module: str, path: str = "") -> tuple[np.ndarray, np.ndarray] | None:
        name_a, name_b = _tensor_names(path, module)
        if (name_a in tensors) != (name_b in tensors):
            raise UserError(
                f"{directory}: {module} has only one of lora_A and lora_B; the file is incomplete"
            )
        return (tensors.pop(name_a), tensors.pop(name_b)) if name_a in tensors else None

    found, shares = _find(take, config, names, projections, directory)
    biases = None
    if config.get("lora_bias"):
        biases = _read_biases(tensors, found, names, projections, directory)
    if isinstance(names, BaseNames):
        _take_base_weights(tensors, names, directory)
    if tensors:
        raise UserError(
            f"{directory}: tensor {next(iter(tensors))!r} is not a LoRA factor of this base: the"
            " adapter was trained on another model, or the file has weights that the base lacks"
        )
    if not found:
        raise UserError(
            f"{directory}: no module of the adapter binds to this base: the adapter was trained on"
            " another model"
        )
    if biases:
        if finite:
            check_finite(biases[0], str(directory))
        return biases

    rank = max(pair.a.shape[0] for pairs in found.values() for pair in pairs.values())
    alpha = float(Patterns(config).alpha_default)
    targets, paths = _targeted(names, found)
    result = AdapterConfig(rank, alpha, targets, bool(config.get("use_rslora", False)))
    flat = {}
    for path in paths:
        stack, D, F, *_ = projections[path]
        a_all, b_all = (np.zeros((len(names[path]), rank, end), np.float32) for end in (D, F))
        for i, (a, b, scale) in found.get(path, {}).items():
            a_all[i, : a.shape[0]] = a
            b_all[i, : a.shape[0]] = b.T.astype(np.float32) * np.float32(scale / result.scale)
        flat[f"{path}/a"] = a_all.reshape(*stack, rank, D)
        flat[f"{path}/b"] = b_all.reshape(*stack, rank, F)
    adapter = params_lib.nest(flat)
    if shares:
        adapter = shared_outer(adapter, str(directory))
        result = dataclasses.replace(result, experts=SHARED_OUTER)
    if finite:
        check_finite(adapter, str(directory))
    return adapter, result


def _of_text(name: str) -> str:
    """Returns a tensor's name below the class of text, in place of one of several media."""
    for theirs, ours in _TEXT.items():
        if name.startswith(_PREFIX + theirs):
            return _PREFIX + ours + name.removeprefix(_PREFIX + theirs)
    return name


def _take_base_weights(tensors: dict[str, np.ndarray], base: BaseNames, directory: Path) -> None:
    """Removes base weights from a file's tensors; raises ``UserError`` if they differ."""
    for name in list(tensors):
        plain = re.sub(r"\.(base_layer|modules_to_save)\.", ".", name.removeprefix(_PREFIX))
        if ".lora_" in name or (same := base.holds(plain, tensors[name])) is None:
            continue
        if not same:
            raise UserError(
                f"{directory}: {name!r} differs from the base's {plain}: the adapter was trained on"
                " other weights, or trained them too, which is not supported; use a base with these"
                " weights, or train without modules_to_save and without changing the embedding"
            )
        del tensors[name]


def _join_shared(tensors: dict[str, np.ndarray], fused: Mapping[str, Mapping[str, Fused]]) -> None:
    """Replaces factors of experts in Miles' layout by those in SGLang's."""
    for (experts, parameters), (name, part) in itertools.product(fused.items(), STACKED.items()):
        shared, joined = (_tensor_names("", f"{experts}.{m}") for m in (f"{part}_proj", name))
        for f in [f for f in (0, 1) if shared[f] in tensors]:
            count = next(iter(parameters.values())).count
            modules = [f"{experts}.{e}.{part}_proj" for e in range(count)]
            others = [_tensor_names("", module)[1 - f] for module in modules]
            if tensors.keys() >= set(others):
                tensors[joined[f]] = tensors.pop(shared[f])
                tensors[joined[1 - f]] = np.stack([tensors.pop(one) for one in others])


def _check_targeted(module: str, config: Mapping[str, Any], directory: Path) -> None:
    """Raises unless the config's lists target a module that has factors: PEFT would drop them."""

    def named(field: str) -> bool | None:
        # Regular expressions come from untrusted files and are not evaluated.
        value = config.get(field)
        return is_targeted(module, value) if isinstance(value, list) else None

    layers = config.get("layers_to_transform")
    layers = [layers] if isinstance(layers, int) else layers
    number = next((int(part) for part in module.split(".") if part.isdigit()), None)
    excluded = {
        "target_modules": named("target_modules") is False,
        "exclude_modules": named("exclude_modules"),
        "modules_to_save": named("modules_to_save"),
        "layers_to_transform": (
            layers and isinstance(config.get("target_modules"), list) and number not in layers
        ),
    }
    if field := next((field for field, wrong in excluded.items() if wrong), None):
        raise UserError(
            f"{directory}: the file has factors of {module}, but {field} in {CONFIG} is"
            f" {str(config[field])[:200]}, which excludes it: config and weights do not match"
        )


def _find(
    take: Callable[..., tuple[np.ndarray, np.ndarray] | None],
    config: Mapping[str, Any],
    names: Names,
    projections: Mapping[str, Projection],
    directory: Path,
) -> tuple[Found, bool]:
    """Removes the factors of all known modules from a file's tensors and returns them, and True if
    its experts share factors.
    """
    targets = config.get("target_parameters") or ()
    patterns = Patterns(config)
    fused = fused_parameters(names, projections, _alternate(names))
    parameters = [parameter for of_layer in fused.values() for parameter in of_layer.values()]
    known = [parameter.name for parameter in parameters]
    known += [f"{m}.weight" for path, ms in names.items() if path != "embed" for m in ms]
    for target in targets:
        if not any(is_targeted(name, [target]) for name in known):
            raise UserError(
                f"{directory / CONFIG}: target_parameters is {sorted(targets)!r}, of which"
                f" {target!r} is not adaptable in this base, unlike {known[0]!r}: the adapter was"
                " trained on another model"
            )
    found = read_fused(take, fused, patterns, config.get("peft_version"), str(directory))
    stacked, shares = read_stacked(take, fused, patterns, str(directory))
    found |= stacked
    for path, modules in names.items():
        for i, module in enumerate(modules):
            if (pair := take(module, path)) is None:
                continue
            if i in found.get(path, {}):
                raise UserError(
                    f"{directory}: {module} has its own factors and the fused ones of all experts:"
                    " keep one of the two"
                )
            # Patterns name a matrix in target_parameters by its parameter name.
            key = f"{module}.weight" if is_targeted(f"{module}.weight", targets) else module
            if key == module and not (targets and len(projections[path].stack) == 2):
                _check_targeted(module, config, directory)
            rank = _check_pair(*pair, module, projections[path], patterns.rank(key), directory)
            found.setdefault(path, {})[i] = Pair(*pair, patterns.scale(key, rank))
    for path, pairs in found.items():
        if len(projections[path].stack) == 2:
            _check_experts(pairs, names[path], projections[path].stack[1], directory)
    for parameter in parameters:
        if is_targeted(parameter.name, targets) and (
            lacking := [p for p in parameter.paths if parameter.first not in found.get(p, {})]
        ):
            raise UserError(
                f"{directory}: target_parameters names {parameter.name}, but the file has no"
                f" factors of {lacking[0]} for it"
            )
    return found, shares


def _check_pair(
    a: np.ndarray, b: np.ndarray, module: str, projection: Projection, rank: int, directory: Path
) -> int:
    D, F = projection.d_in, projection.d_out
    r = a.shape[0] if a.ndim else 0
    if not r or a.shape != (r, D) or b.shape != (F, r):
        raise UserError(
            f"{directory}: {module} has lora_A {a.shape} and lora_B {b.shape}; this base needs"
            f" ({r}, {D}) and ({F}, {r}): the adapter was trained on another model"
        )
    if rank != r:
        raise UserError(
            f"{module} has rank {r}, but {CONFIG} says {rank} (default {DEFAULT_RANK}): config and"
            " weights do not match"
        )
    return r


def _check_experts(
    pairs: Mapping[int, Pair], modules: Sequence[str], experts: int, directory: Path
) -> None:
    """Raises unless a layer has factors of all its experts or of none."""
    for first in sorted({i // experts * experts for i in pairs}):
        if lacking := [i for i in range(first, first + experts) if i not in pairs]:
            raise UserError(
                f"{directory}: {modules[lacking[0]]} is missing, but {experts - len(lacking)} of"
                f" the {experts} experts of its layer are present: write all of them, with zeros"
                " for experts that are not adapted"
            )


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / CONFIG
    if not path.is_file():
        raise UserError(
            f"{path} does not exist: a PEFT adapter is a directory with {CONFIG} and {WEIGHTS}"
        )
    config = read_object(path, "export the adapter again")
    if config.get("peft_type") != "LORA":
        raise UserError(
            f"{path}: peft_type is {config.get('peft_type')!r}; only LORA adapters can be imported"
        )
    for field, value in config.items():
        if field in ONLY and value not in ONLY[field]:
            raise UserError(
                f"{path}: {field} is {value!r}, which is not supported; train or merge it without"
            )
        # New features of PEFT are enabled by true or by an object; numbers and names are their
        # parameters.
        if field not in READ | ONLY.keys() | NO_EFFECT and (
            value is True or (isinstance(value, dict | list) and value)
        ):
            raise UserError(
                f"{path}: {field} is {str(value)[:200]}, which is unknown: remove the field if the"
                " outputs of the adapter do not depend on it"
            )
    return config
