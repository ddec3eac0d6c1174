"""Adapters of routed experts in PEFT's fused layout (also vLLM's 3-D one) -> factors of each
expert.

transformers keeps the experts of a layer as two 3-D parameters, ``gate_up_proj [E, 2F, D]`` (gate's
rows first) and ``down_proj [E, D, F]``. PEFT wraps the module that holds them once for each, and
has one pair of matrices for all experts:

- ``A [E * R, in]`` is expert-major: row ``e * R + j`` is row j of expert e;
- ``B [out, R * E]`` is rank-major: column ``j * E + e`` is column j of expert e.

With both parameters adapted, gate_up is the inner wrapper (``<experts>.base_layer``) and down the
outer one (``<experts>``); one alone is the outer one, and its shape says which it is. gate and up
come apart in one of two ways:

- a shared A, trained as one parameter: both get all of A, and their own rows of B;
- the block form, converted from separate gate and up of rank R / 2: ``A = [A_gate; A_up]`` and B
  block-diagonal. Where B still is, each gets its half, exactly; after further training the blocks
  mix, and both keep rank R.

PEFT before 0.19.1 had in and out the other way round: its ``A [E * R, out]`` is our B and its ``B
[in, R * E]`` our A. The any pair of the file that is not square shows which it is. GPT-OSS
interleaves gate's and up's rows: not this layout.

Axes: L layers, E experts, R rank, D in, F out; in the formulas above D is the model's width and F
that of one expert.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from mint_jax.errors import UserError
from mint_jax.lora.patterns import Patterns
from mint_jax.lora.tree import Projection

# fused parameter -> projections whose rows it stacks
PARAMETERS = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}
PLAIN_SINCE = (0, 19, 1, True)  # PEFT's version, see _numbers


class Pair(NamedTuple):
    """The factors of one module as PEFT has them.

    Attributes:
        a, b: ``[R, D]`` and ``[F, R]``.
        scale: what ``b @ a`` is multiplied by.
    """

    a: np.ndarray
    b: np.ndarray
    scale: float


Found = dict[str, dict[int, Pair]]  # projection path -> index among its modules -> factors
# takes a module's A and B out of the file, if there
Take = Callable[[str], tuple[np.ndarray, np.ndarray] | None]


class Fused(NamedTuple):
    """One fused parameter of one layer.

    Attributes:
        experts: name of the module that holds it, ``model.layers.0.mlp.experts``.
        name: full name, ``model.layers.0.mlp.experts.down_proj``.
        paths: projections whose rows it stacks, ``("moe/moe/experts/down",)``.
        first: index of the layer's first expert in the module list of each path.
        count: E.
        d_in, d_out: D, and F of all its projections together.
    """

    experts: str
    name: str
    paths: tuple[str, ...]
    first: int
    count: int
    d_in: int
    d_out: int

    @property
    def need(self) -> str:
        return (
            f"({self.count}·r, {self.d_in}) and ({self.d_out}, r·{self.count}) for"
            f" {self.name.rsplit('.', 1)[-1]}"
        )


def fused_parameters(
    names: Mapping[str, Sequence[str]], projections: Mapping[str, Projection]
) -> dict[str, dict[str, Fused]]:
    """The fused parameters of a base: name of the module that holds them -> ``gate_up_proj``,
    ``down_proj`` -> what they are.

    Args:
        names: projection path -> module name per layer and expert.
        projections: those projections.
    """
    found: dict[str, dict[str, Fused]] = {}
    parents = dict.fromkeys(
        path.rsplit("/", 1)[0]
        for path, projection in projections.items()
        if len(projection.stack) == 2
    )
    for parent in parents:
        for parameter, parts in PARAMETERS.items():
            paths = tuple(f"{parent}/{part}" for part in parts)
            if any(path not in names for path in paths):
                continue
            (layers, count), d_in = projections[paths[0]].stack, projections[paths[0]].d_in
            d_out = sum(projections[path].d_out for path in paths)
            for layer in range(layers):
                # without the expert and the projection
                experts = names[paths[0]][layer * count].rsplit(".", 2)[0]
                fused = Fused(
                    experts, f"{experts}.{parameter}", paths, layer * count, count, d_in, d_out
                )
                found.setdefault(experts, {})[parameter] = fused
    return found


def is_targeted(name: str, targets: Iterable[str]) -> bool:
    """Whether ``target_parameters`` names a parameter, as PEFT matches them: by the end of its
    name.
    """
    return any(f".{name}".endswith(f".{target}") for target in targets)


class _Read(NamedTuple):
    """A pair of the file, the parameter it can be, and which ways round it fits: ``False`` plain,
    ``True`` swapped.
    """

    fused: Fused
    a: np.ndarray
    b: np.ndarray
    ways: set[bool]


def read_fused(
    take: Take,
    fused: Mapping[str, Mapping[str, Fused]],
    patterns: Patterns,
    version: str | None,
    where: str,
) -> Found:
    """Takes the fused pairs out of a file and splits them by projection and expert.

    Args:
        fused: see ``fused_parameters``.
        version: the PEFT version that wrote the file, where known.
        where: the file, for errors.

    Raises:
        UserError: shapes that fit neither parameter, another number of experts or rank, or square
            pairs of unknown orientation.
    """
    read = []
    for experts, parameters in fused.items():
        inner, outer = take(f"{experts}.base_layer"), take(experts)
        if inner is not None and outer is None:
            raise UserError(
                f"{where}: {experts} has gate_up_proj's factors (base_layer) but not down_proj's:"
                " the file is incomplete"
            )
        if inner is not None:
            read.append(
                _identify(
                    experts,
                    inner,
                    [p for name, p in parameters.items() if name == "gate_up_proj"],
                    where,
                )
            )
        if outer is not None:
            # the inner one is gate_up, so that the outer one is down; alone it can be either
            read.append(
                _identify(
                    experts,
                    outer,
                    [p for name, p in parameters.items() if inner is None or name == "down_proj"],
                    where,
                )
            )
    if not read:
        return {}
    swapped = _orientation(read, version, where)
    found: Found = {}
    for one in read:
        for path, pairs in _split(one, swapped, patterns, where).items():
            found.setdefault(path, {}).update(
                {one.fused.first + e: pair for e, pair in enumerate(pairs)}
            )
    return found


def _identify(
    experts: str, pair: tuple[np.ndarray, np.ndarray], candidates: Sequence[Fused], where: str
) -> _Read:
    a, b = pair
    if a.ndim == b.ndim == 2:
        ends = (a.shape[1], b.shape[0])
        for fused in candidates:
            ways = {
                swapped
                for swapped, need in enumerate(
                    [(fused.d_in, fused.d_out), (fused.d_out, fused.d_in)]
                )
                if ends == need
            }
            if ways:
                return _Read(fused, a, b, {bool(way) for way in ways})
    need = ", or ".join(fused.need for fused in candidates)
    raise UserError(
        f"{where}: {experts} has lora_A {a.shape} and lora_B {b.shape}; this base needs {need}: it"
        " was trained on another model"
    )


def _orientation(read: Sequence[_Read], version: str | None, where: str) -> bool:
    """Whether in and out are swapped; one program wrote the file, so any pair that is not square
    decides for all.
    """
    known = {next(iter(one.ways)) for one in read if len(one.ways) == 1}
    if len(known) == 1:
        return known.pop()
    fused = read[0].fused
    if known:
        raise UserError(
            f"{where}: some experts have in and out swapped as PEFT before 0.19.1 wrote them,"
            " others not: save the adapter anew"
        )
    if version is not None and _numbers(str(version)) >= PLAIN_SINCE:
        return False
    raise UserError(
        f"{where}: {fused.name} is adapted from {fused.d_in} to {fused.d_out}, and peft_version is"
        f" {version!r}: PEFT before 0.19.1 wrote A and B of experts the other way round, which"
        " square shapes do not show. If 0.19.1 or later trained it, set peft_version in"
        " adapter_config.json to that; otherwise export the factors expert by expert"
    )


def _numbers(version: str) -> tuple[int, int, int, bool]:
    """``"0.19.1.dev0"`` -> ``(0, 19, 1, False)``; True for a release, 0 for what is missing or no
    number.
    """
    major, minor, patch = (
        int(part) if part.isdigit() else 0 for part in (version.split(".") + ["0"] * 3)[:3]
    )
    return major, minor, patch, "dev" not in version


def _split(one: _Read, swapped: bool, patterns: Patterns, where: str) -> dict[str, list[Pair]]:
    """Projection path -> the factors of each expert."""
    fused, E = one.fused, one.fused.count
    rank = patterns.rank(fused.name) or one.a.shape[0] // E
    if one.a.shape[0] != E * rank or one.b.shape[1] != E * rank or not rank:
        raise UserError(
            f"{where}: {fused.name} has lora_A {one.a.shape} and lora_B {one.b.shape}; {E} experts"
            f" of rank {rank}, as this base and adapter_config.json say, need {E * rank} rows and"
            " columns: an expert is missing, or it was trained on another model"
        )
    a_ERD = one.a.reshape(E, rank, -1)
    b_EFR = one.b.reshape(-1, rank, E).transpose(2, 0, 1)
    if swapped:
        a_ERD, b_EFR = b_EFR.transpose(0, 2, 1), a_ERD.transpose(0, 2, 1)
    scale = patterns.scale(fused.name, rank)
    parts = len(fused.paths)
    b_parts = np.split(b_EFR, parts, axis=1)  # rows of gate, then of up
    a_parts = [a_ERD] * parts
    if parts > 1 and rank == parts * patterns.rank_default and _is_block_diagonal(b_parts):
        a_parts = np.split(a_ERD, parts, axis=1)
        b_parts = [np.split(b, parts, axis=2)[i] for i, b in enumerate(b_parts)]
    return {
        path: [Pair(a[e], b[e], scale) for e in range(E)]
        for path, a, b in zip(fused.paths, a_parts, b_parts)
    }


def _is_block_diagonal(b_parts: Sequence[np.ndarray]) -> bool:
    """Whether each part of B uses only its own share of the rank, bit for bit."""
    shares = [np.split(b, len(b_parts), axis=2) for b in b_parts]
    return not any(
        share.any() for i, row in enumerate(shares) for j, share in enumerate(row) if i != j
    )


def target_fields(
    fused: Iterable[Fused], rank: int, alpha: float, rslora: bool
) -> dict[str, dict[str, float]]:
    """``rank_pattern`` and ``alpha_pattern`` with which PEFT fuses unpacked factors of one rank
    without changing their scale.

    Parameters that stack n projections get rank n R, so alpha grows by n, or by sqrt(n) under
    rslora.
    """
    ranks, alphas = {}, {}
    for one in fused:
        if (parts := len(one.paths)) > 1:
            key = rf".*\.{one.name.rsplit('.', 1)[-1]}"
            ranks[key], alphas[key] = parts * rank, alpha * (math.sqrt(parts) if rslora else parts)
    return {"rank_pattern": ranks, "alpha_pattern": alphas}
