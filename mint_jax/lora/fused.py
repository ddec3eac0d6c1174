"""Routed experts' adapters in PEFT's fused layout (also vLLM's 3-D layout).

transformers stores the experts of a layer as two 3-D parameters, ``gate_up_proj [E, 2F, D]`` (gate
rows first) and ``down_proj [E, D, F]``; PEFT wraps their module once for each, with one pair of
matrices for all experts. In gpt-oss, which has no other layout, rows of gate and up alternate.
Without a gate the first is ``up_proj [E, F, D]``.

SGLang's layout has a pair of 3-D tensors for each projection of a layer's experts, ``w1``, ``w2``
and ``w3``: A ``[E, R, D]`` and B ``[E, F, R]``, with 1 in place of E for a factor that the experts
share. Miles (Megatron-Bridge) names such a factor without an expert, ``experts.gate_proj``, and the
other one by expert, ``experts.0.gate_proj``.

Axes: L layers, E experts, R rank, D in, F out.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mint_jax.errors import UserError
from mint_jax.lora.tree import Projection

# Fused parameter -> projections whose rows it stacks.
PARAMETERS = {"gate_up_proj": ("gate", "up"), "up_proj": ("up",), "down_proj": ("down",)}
STACKED = {"w1": "gate", "w3": "up", "w2": "down"}  # SGLang's names of projections
PLAIN_SINCE = (0, 19, 1)  # first PEFT version without the swap


DEFAULT_RANK, DEFAULT_ALPHA = 8, 8  # defaults of ``peft.LoraConfig`` for omitted fields


class Patterns:
    """Ranks and scales of one ``adapter_config.json``, with PEFT's defaults."""

    def __init__(self, config: Mapping[str, Any]):
        self.rank_default: int = DEFAULT_RANK if config.get("r") is None else config["r"]
        self.alpha_default: float = (
            DEFAULT_ALPHA if config.get("lora_alpha") is None else config["lora_alpha"]
        )
        self.rslora = bool(config.get("use_rslora", False))
        self._ranks: Mapping[str, int] = config.get("rank_pattern") or {}
        self._alphas: Mapping[str, float] = config.get("alpha_pattern") or {}

    @staticmethod
    def _lookup(patterns: Mapping[str, Any], name: str, default: Any) -> Any:
        for pattern, value in patterns.items():  # PEFT matches a whole suffix of the name
            if re.match(rf"(.*\.)?({pattern})$", name):
                return value
        return default

    def rank(self, name: str) -> int:
        return self._lookup(self._ranks, name, self.rank_default)

    def scale(self, name: str, rank: int) -> float:
        alpha = self._lookup(self._alphas, name, self.alpha_default)
        return float(alpha) / (rank**0.5 if self.rslora else rank)


class Pair(NamedTuple):
    """The factors of one module in PEFT's layout."""

    a: np.ndarray  # this and b: `[R, D]` and `[F, R]`
    b: np.ndarray
    scale: float  # factor of `b @ a`


Found = dict[str, dict[int, Pair]]  # projection path -> index among its modules -> factors
# Removes a module's A and B from the file and returns them; None if absent.
Take = Callable[[str], tuple[np.ndarray, np.ndarray] | None]


class Fused(NamedTuple):
    """One fused parameter of one layer."""

    name: str  # full name, `model.layers.0.mlp.experts.down_proj`
    paths: tuple[str, ...]  # projections whose rows it stacks, `("moe/moe/experts/down",)`
    first: int  # index of the layer's first expert in the module list of each path
    count: int  # E
    d_in: int  # this and d_out: D, and F of all its projections together
    d_out: int
    alternate: bool = False  # rows of its projections alternate, instead of one after the other

    def rows(self, i: int) -> slice:
        """Returns the rows of its i-th projection."""
        n = len(self.paths)
        size = self.d_out // n
        return slice(i, None, n) if self.alternate else slice(i * size, (i + 1) * size)

    def fits(self, a: np.ndarray, b: np.ndarray) -> bool:
        return a.ndim == b.ndim == 2 and (a.shape[1], b.shape[0]) == (self.d_in, self.d_out)

    @property
    def need(self) -> str:
        return (
            f"({self.count}·r, {self.d_in}) and ({self.d_out}, r·{self.count}) for"
            f" {self.name.rsplit('.', 1)[-1]}"
        )


def fused_parameters(
    names: Mapping[str, Sequence[str]], projections: Mapping[str, Projection], alternate: bool
) -> dict[str, dict[str, Fused]]:
    """Returns the fused parameters of these projections, by module name and then by ``PARAMETERS``.
    ``names`` has all of the base's; ``alternate`` is as in ``Fused``.
    """
    found: dict[str, dict[str, Fused]] = {}
    packed = (path for path, projection in projections.items() if len(projection.stack) == 2)
    parents = dict.fromkeys(path.rsplit("/", 1)[0] for path in packed)
    for parent in parents:
        for parameter, parts in PARAMETERS.items():
            paths = tuple(f"{parent}/{part}" for part in parts)
            without = "up_proj" if f"{parent}/gate" in names else "gate_up_proj"
            if parameter == without or any(path not in projections for path in paths):
                continue
            (layers, count), d_in = projections[paths[0]].stack, projections[paths[0]].d_in
            d_out = sum(projections[path].d_out for path in paths)
            for layer in range(layers):
                # Strip the expert's number and the projection.
                experts = names[paths[0]][layer * count].rsplit(".", 2)[0]
                name = f"{experts}.{parameter}"
                fused = Fused(name, paths, layer * count, count, d_in, d_out, alternate)
                found.setdefault(experts, {})[parameter] = fused
    return found


def is_targeted(name: str, targets: Iterable[str]) -> bool:
    """Returns True if a target names this parameter; PEFT matches the end of its name."""
    return any(f".{name}".endswith(f".{target}") for target in targets)


def read_fused(
    take: Take,
    fused: Mapping[str, Mapping[str, Fused]],
    patterns: Patterns,
    version: str | None,
    where: str,
) -> Found:
    """Takes the fused pairs out of a file, named ``where``, and splits them by projection and
    expert.

    Raises:
        UserError: shapes that fit neither parameter, other experts or rank, or an old PEFT version.
    """
    found: Found = {}
    for experts, parameters in fused.items():
        inner, outer = take(f"{experts}.base_layer"), take(experts)
        if inner is None and outer is None:
            continue
        numbers = tuple(map(int, re.findall(r"\d+", str(version))[:3]))
        # gpt-oss stores the transpose, whose ends no version has swapped.
        if numbers < PLAIN_SINCE and not any(one.alternate for one in parameters.values()):
            raise UserError(
                f"{where}: {experts} is adapted as a whole, and peft_version is {version!r}: PEFT"
                " before 0.19.1 swapped A and B of experts. If 0.19.1 or later trained it, set"
                " peft_version in adapter_config.json; otherwise export the factors expert by"
                " expert"
            )
        if outer is None:
            raise UserError(
                f"{where}: {experts} has {next(iter(parameters))}'s factors (base_layer) but not"
                " down_proj's: the file is incomplete"
            )
        # The inner wrapper is of gate and up, and then the outer one of down; alone it can be
        # either.
        read = [(inner, list(parameters)[:1]), (outer, ["down_proj"])]
        for (a, b), own in read if inner is not None else [(outer, list(parameters))]:
            candidates = [parameters[name] for name in own if name in parameters]
            parameter = next((p for p in candidates if p.fits(a, b)), None)
            if parameter is None:
                raise UserError(
                    f"{where}: {experts} has lora_A {a.shape} and lora_B {b.shape}; this base needs"
                    f" {', or '.join(p.need for p in candidates)}: it was trained on another model"
                )
            for path, pairs in _split(parameter, a, b, patterns, where).items():
                numbered = {parameter.first + e: pair for e, pair in enumerate(pairs)}
                found.setdefault(path, {}).update(numbered)
    return found


def read_stacked(
    take: Take, fused: Mapping[str, Mapping[str, Fused]], patterns: Patterns, where: str
) -> tuple[Found, bool]:
    """Takes the pairs in SGLang's layout out of a file, and returns them by projection and expert,
    and True if all of their factors on the hidden side are shared.

    Raises:
        UserError: shapes that do not fit.
    """
    found: Found = {}
    shared = []
    for experts, parameters in fused.items():
        if any(one.alternate for one in parameters.values()):  # gpt-oss has other names
            continue
        by_part = {
            path.rsplit("/", 1)[1]: (one, path) for one in parameters.values() for path in one.paths
        }
        for name, part in STACKED.items():
            if part not in by_part or (pair := take(f"{experts}.{name}")) is None:
                continue
            (one, path), (a, b) = by_part[part], pair
            R, (D, F) = patterns.rank(f"{experts}.{name}"), (one.d_in, one.d_out // len(one.paths))
            shapes = [{(n, R, D) for n in (1, one.count)}, {(n, F, R) for n in (1, one.count)}]
            if a.shape not in shapes[0] or b.shape not in shapes[1]:
                raise UserError(
                    f"{where}: {experts}.{name} has lora_A {a.shape} and lora_B {b.shape}; this"
                    f" base and rank {R} need one of {sorted(shapes[0])} and of"
                    f" {sorted(shapes[1])}: it was trained on another model"
                )
            shared.append(len(b if part == "down" else a) == 1)
            scale = patterns.scale(f"{experts}.{name}", R)
            found.setdefault(path, {}).update(
                (one.first + e, Pair(a[e % len(a)], b[e % len(b)], scale)) for e in range(one.count)
            )
    return found, bool(shared) and all(shared)


def stacked_factors(
    modules: Sequence[str], a: np.ndarray, b: np.ndarray
) -> Iterator[tuple[str, str, np.ndarray, np.ndarray]]:
    """Yields one projection's pairs in SGLang's layout, layer by layer, with the names of the
    experts' module and of the projection.

    Args:
        modules: names of its experts in all layers.
        a, b: ``[L, E, R, D]`` and ``[L, E, R, F]``, without E if the experts share the factor.
    """
    each = len(modules) // len(a)
    for layer, (a_ERD, b_ERF) in enumerate(zip(a, b)):
        experts, _, projection = modules[layer * each].rsplit(".", 2)
        a_ERD, b_ERF = (x if x.ndim == 3 else x[None] for x in (a_ERD, b_ERF))
        yield experts, projection, a_ERD, b_ERF.swapaxes(1, 2)


def _split(
    fused: Fused, a: np.ndarray, b: np.ndarray, patterns: Patterns, where: str
) -> dict[str, list[Pair]]:
    """Returns the factors of each expert by projection path."""
    # A [E R, in] is expert-major: row e R + j is row j of expert e. B [out, R E] is rank-major:
    # column j E + e is column j of expert e. A shared A, trained as one parameter, is all of gate's
    # and of up's, with their own rows of B. In the block form, converted from separate gate and up
    # of rank R / 2, A = [A_gate; A_up] and B is block-diagonal, and each gets exactly its half;
    # further training mixes the blocks, and then both keep rank R.
    E = fused.count
    rank = patterns.rank(fused.name) or a.shape[0] // E
    if a.shape[0] != E * rank or b.shape[1] != E * rank or not rank:
        raise UserError(
            f"{where}: {fused.name} has lora_A {a.shape} and lora_B {b.shape}; {E} experts of rank"
            f" {rank}, per this base and adapter_config.json, need {E * rank} rows and columns: an"
            " expert is missing, or it was trained on another model"
        )
    a_ERD = a.reshape(E, rank, -1)
    b_EFR = b.reshape(-1, rank, E).transpose(2, 0, 1)
    scale = patterns.scale(fused.name, rank)
    parts = len(fused.paths)
    b_parts = [b_EFR[:, fused.rows(i)] for i in range(parts)]
    a_parts = [a_ERD] * parts
    if parts > 1 and rank == parts * patterns.rank_default and _is_block_diagonal(b_parts):
        a_parts = np.split(a_ERD, parts, axis=1)
        b_parts = [np.split(b, parts, axis=2)[i] for i, b in enumerate(b_parts)]
    return {
        path: [Pair(a[e], b[e], scale) for e in range(E)]
        for path, a, b in zip(fused.paths, a_parts, b_parts)
    }


def _is_block_diagonal(b_parts: Sequence[np.ndarray]) -> bool:
    """Returns True if each part of B uses only its own share of the rank, bit for bit."""
    shares = [np.split(b, len(b_parts), axis=2) for b in b_parts]
    return not any(
        share.any() for i, row in enumerate(shares) for j, share in enumerate(row) if i != j
    )


def fused_factors(
    experts: str, parameters: Mapping[str, Fused], flat: Mapping[str, np.ndarray]
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yields the fused pairs of one module in the block form of ``_split``, with their names.
    ``flat`` has factors of layers, ``[L, E, R, D]`` and ``[L, E, R, F]``.
    """
    for parameter, one in parameters.items():
        layer = one.first // one.count
        a, b = ([flat[f"{path}/{f}"][layer] for path in one.paths] for f in "ab")
        R = a[0].shape[1]
        b_FRE = np.zeros((one.d_out, len(a) * R, one.count), np.float32)
        for i, own_ERF in enumerate(b):
            b_FRE[one.rows(i), i * R : (i + 1) * R] = own_ERF.transpose(2, 1, 0)
        is_inner = parameter != "down_proj" and len(parameters) > 1
        name = f"{experts}.base_layer" if is_inner else experts
        whole = np.concatenate(a, axis=1)
        yield name, whole.reshape(-1, one.d_in), b_FRE.reshape(one.d_out, -1)


def target_fields(
    fused: Iterable[Fused], rank: int, alpha: float, rslora: bool
) -> dict[str, dict[str, float]]:
    """Returns rank and alpha patterns with which PEFT fuses factors of one rank unchanged."""
    # Parameters that stack n projections get rank n R, so alpha grows by n, or by sqrt(n).
    ranks, alphas = {}, {}
    for one in fused:
        if (parts := len(one.paths)) > 1:
            key = rf".*\.{one.name.rsplit('.', 1)[-1]}"
            ranks[key], alphas[key] = parts * rank, alpha * (math.sqrt(parts) if rslora else parts)
    return {"rank_pattern": ranks, "alpha_pattern": alphas}
