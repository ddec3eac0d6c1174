"""One adapter of several: their sum, TIES or DARE, of a given rank. Imports no jax.

A sum of low-rank deltas is a low-rank delta of all factors, stacked: with deltas ``s_i A_i^T B_i``
(rank first, ``s_i`` the adapter's scale) and weights ``w_i``,

    sum_i w_i s_i A_i^T B_i = [A_1; A_2; ..]^T [w_1 s_1 B_1; w_2 s_2 B_2; ..]

has rank ``R = r_1 + r_2 + ..``, exactly. Averages of A and of B would be another adapter. TIES
(Yadav et al. 2023, arXiv 2306.01708) and DARE (Yu et al. 2023, arXiv 2311.03099) choose among the
entries of deltas, so theirs are formed, one projection of one layer at a time. What exceeds the
rank is cut to the nearest delta of that rank (Eckart and Young 1936). Members that share an output
basis keep it, and the largest of their ranks: their sum is that of A.
"""

import dataclasses
import functools
import math
import zlib
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, NamedTuple

import numpy as np

from mint_jax import nested
from mint_jax.errors import UserError
from mint_jax.fields import Natural, Settings, setting
from mint_jax.lora.config import BASIS, BIAS, MAX_RANK, SHARED_OUTER, AdapterConfig
from mint_jax.lora.finite import all_finite

METHODS = ("sum", "ties", "dare", "dare_ties")
MOST = 64  # members


@dataclasses.dataclass(frozen=True, repr=False)
class MergeConfig(Settings):
    """Settings of a merge."""

    method: Annotated[str, METHODS] = setting(
        "sum: weights times deltas; ties: of each delta's largest entries those whose sign wins,"
        " averaged; dare: a random part of the entries, divided by density; dare_ties: both",
        "sum",
    )
    density: float = setting("share of a delta's entries that ties and dare keep", 1.0)
    rank: Natural = setting(
        f"of the merge; 0: the sum of its members' ranks, at most {MAX_RANK}", 0
    )
    seed: Natural = setting("of what dare keeps", 0)

    def __post_init__(self):
        super().__post_init__()
        if not 0 < self.density <= 1 or (self.method == "sum" and self.density != 1):
            raise UserError(
                f"density is {self.density:g}, method {self.method!r}; expected a share above 0, up"
                " to 1, and 1 for a sum"
            )
        if self.rank > MAX_RANK:
            raise UserError(f"rank is {self.rank}; expected at most {MAX_RANK}")


class Merged(NamedTuple):
    """A merge of scale 1, float32. ``error``: the Frobenius norm of what the rank omits over that
    of the whole; 0 if nothing is omitted.
    """

    adapter: Any
    config: AdapterConfig
    error: float


def merge(
    members: Sequence[tuple[Any, AdapterConfig]], weights: Sequence[float], how: MergeConfig
) -> Merged:
    """Merges adapters of one base; ``weights`` has a factor for each one's delta. TIES divides the
    sum at each entry by the number of members that it keeps there, as PEFT does.

    Raises ``UserError``: biases and factors among the members, NaN or infinite numbers, a merge
    beyond float32, or experts that would no longer share a factor.
    """
    if not 1 <= len(members) == len(weights) <= MOST:
        raise UserError(
            f"there are {len(members)} members and {len(weights)} weights; expected 1 to {MOST} of"
            " both"
        )
    if strange := [w for w in weights if not math.isfinite(w)]:
        raise UserError(f"a weight is {strange[0]}; expected finite numbers")
    configs = [config for _, config in members]
    whole = sum(config.rank for config in configs)
    if len(kinds := {config.kind for config in configs}) > 1:
        found = " and ".join(sorted(kinds))
        raise UserError(f"members are of kinds {found}: merge those of one kind")
    if not whole and how.rank:
        raise UserError(f"rank is {how.rank}, but biases have no rank: leave it out")
    rank = 0 if not whole else how.rank or min(whole, MAX_RANK)
    flat = [dict(nested.leaves_with_path(adapter)) for adapter, _ in members]
    for i, leaves in enumerate(flat, 1):
        if wrong := [path for path, leaf in leaves.items() if not all_finite(leaf)]:
            raise UserError(f"{wrong[0]} of member {i} has NaN or infinite values: leave it out")
    targets = tuple(dict.fromkeys(target for config in configs for target in config.targets))
    if kinds == {BASIS}:
        return _sum_over_basis(flat, configs, weights, how, targets)
    paths = sorted({leaf.rpartition("/")[0] for leaves in flat for leaf in leaves})
    is_shared = any(f"/{SHARED_OUTER}/" in path for path in paths)
    each = any("/experts/" in path and SHARED_OUTER not in path for path in paths)
    if is_shared and (each or whole > rank or how.method != "sum"):
        raise UserError(
            f"a member's experts share factors (experts {SHARED_OUTER!r}), which only a sum keeps,"
            f" if all do and its rank, {rank}, is at least the sum of theirs, {whole}"
        )
    factors: dict[str, np.ndarray] = {}
    total = omitted = 0.0
    for path in paths:
        parts = [
            _Part(i, w, config.scale, *(leaves.get(f"{path}/{x}") for x in ("a", "b", BIAS)))
            for i, (leaves, config, w) in enumerate(zip(flat, configs, weights))
            if not leaves.keys().isdisjoint({f"{path}/b", f"{path}/{BIAS}"})
        ]
        made = _projection(path, parts, how, rank, how.method == "sum" and whole <= rank)
        for name, array in made.arrays.items():
            factors[f"{path}/{name}"] = _checked(array, path)
        total, omitted = total + made.total, omitted + made.omitted
    if kinds == {BIAS}:
        config = AdapterConfig(targets=targets, kind=BIAS)
    else:
        form = SHARED_OUTER if is_shared else "each"
        config = AdapterConfig(rank, float(rank), targets, experts=form)
    error = float(np.sqrt(omitted / total)) if total else 0.0
    return Merged(nested.nest(factors), config, error)


def _sum_over_basis(
    flat: Sequence[dict[str, Any]],
    configs: Sequence[AdapterConfig],
    weights: Sequence[float],
    how: MergeConfig,
    targets: tuple[str, ...],
) -> Merged:
    """Returns the sum of members that have A alone."""
    rank = how.rank or max(config.rank for config in configs)
    if how.method != "sum" or any(config.rank > rank for config in configs):
        raise UserError(
            f"method is {how.method!r} and rank {how.rank}, but members of kind {BASIS!r} are only"
            " summed, without a cut: leave both out"
        )
    sums: dict[str, Any] = {}
    for leaves, config, weight in zip(flat, configs, weights):
        for path, a in leaves.items():
            own = weight * config.scale * np.asarray(a, np.float64)
            sums[path] = sums.get(path, 0.0) + _padded(own, rank)
    factors = {path: _checked(_float32(a), path) for path, a in sums.items()}
    return Merged(nested.nest(factors), AdapterConfig(rank, float(rank), targets, kind=BASIS), 0.0)


def _checked(array: np.ndarray, path: str) -> np.ndarray:
    if not np.isfinite(array).all():
        raise UserError(
            f"the merge has numbers beyond float32 at {path}: choose weights nearer to 1"
        )
    return array


class _Part(NamedTuple):
    """A member at a projection, where its delta is ``scale A^T B``, or a bias."""

    member: int
    weight: float
    scale: float
    a: Any
    b: Any
    bias: Any

    def delta(self, at: tuple[int, ...]) -> np.ndarray:
        """Returns the delta of one layer and expert, ``[D, F]``, or a bias's, float64."""
        if self.bias is not None:
            return np.asarray(self.bias[at], np.float64)
        a, b = (np.asarray(factor[at], np.float64) for factor in (self.a, self.b))
        return self.scale * a.T @ b


class _Made(NamedTuple):
    """Arrays of a projection, the squared norm of its delta and of what its rank omits."""

    arrays: dict[str, np.ndarray]
    total: float = 0.0
    omitted: float = 0.0


def _projection(
    path: str, parts: Sequence[_Part], how: MergeConfig, rank: int, fits: bool
) -> _Made:
    first = parts[0]
    shape = (first.b if first.bias is None else first.bias).shape[:-2]
    if first.bias is not None:
        biases = [_combined(parts, at, how, path) for at in np.ndindex(shape)]
        return _Made({BIAS: _float32(np.stack(biases))})
    if fits:
        a = np.concatenate([_float32(part.a) for part in parts], -2)
        # float64 before the weight, which may exceed float32
        scaled = [part.weight * part.scale * np.float64(part.b) for part in parts]
        b = _float32(np.concatenate(scaled, -2))
        return _Made({"a": _padded(a, rank), "b": _padded(b, rank)})
    rows: list[tuple[np.ndarray, np.ndarray]] = []
    total = omitted = 0.0
    for at in np.ndindex(shape):  # one by one: float64 and whole deltas take memory
        if how.method == "sum":
            a, b, whole, lost = _nearest(
                np.concatenate([np.float64(part.a[at]) for part in parts]),
                np.concatenate(
                    [part.weight * part.scale * np.float64(part.b[at]) for part in parts]
                ),
                rank,
            )
        else:
            a, b, whole, lost = _nearest_dense(_combined(parts, at, how, path), rank)
        total, omitted = total + whole, omitted + lost
        rows.append((_padded(_float32(a), rank), _padded(_float32(b), rank)))
    arrays = {
        name: np.stack(some).reshape(*shape, *some[0].shape) for name, some in zip("ab", zip(*rows))
    }
    return _Made(arrays, total, omitted)


def _combined(
    parts: Sequence[_Part], at: tuple[int, ...], how: MergeConfig, path: str
) -> np.ndarray:
    """Returns the merge of the members' deltas of one layer and expert. Each delta is formed where
    it is needed, because all at once may not fit in memory.
    """

    def kept() -> Iterator[tuple[float, np.ndarray]]:
        for part in parts:
            seed = [how.seed, zlib.crc32(path.encode()), *at, part.member]
            yield part.weight, _kept(part.delta(at), how, seed)

    if "ties" not in how.method:
        return functools.reduce(np.add, (weight * delta for weight, delta in kept()))
    # The signs of unweighted deltas count, as in PEFT.
    sign = np.where(sum(delta for _, delta in kept()) >= 0, 1, -1)
    total, count = 0.0, 0
    for weight, delta in kept():
        agrees = np.sign(delta) == sign
        total, count = total + weight * delta * agrees, count + agrees
    return total / np.maximum(count, 1)


def _kept(delta: np.ndarray, how: MergeConfig, seed: list[int]) -> np.ndarray:
    """Returns a delta of which ``how.density`` is kept: the largest entries, or random ones."""
    if how.density == 1:
        return delta
    if how.method == "ties":
        lost = delta.size - int(how.density * delta.size)
        order = np.argpartition(np.abs(delta), min(lost, delta.size - 1), axis=None)
        np.put(delta, order[:lost], 0)
        return delta
    return delta * (np.random.default_rng(seed).random(delta.shape) < how.density) / how.density


class _Nearest(NamedTuple):
    """Factors of the nearest delta of a rank, each with the root of the singular values; the
    squared norm of the whole delta and of what is omitted.
    """

    a: np.ndarray
    b: np.ndarray
    whole: float
    omitted: float


def _nearest(a: np.ndarray, b: np.ndarray, rank: int) -> _Nearest:
    """Returns the nearest to ``a^T b``."""
    # a^T = q_a r_a, so that the SVD is of a matrix of at most R rows
    (q_a, r_a), (q_b, r_b) = (np.linalg.qr(factor.T) for factor in (a, b))
    u, values, v = np.linalg.svd(r_a @ r_b.T, full_matrices=False)
    roots, squares = np.sqrt(values[:rank, None]), values**2
    factors = roots * (q_a @ u[:, :rank]).T, roots * (v[:rank] @ q_b.T)
    return _Nearest(*factors, squares.sum(), squares[rank:].sum())


def _nearest_dense(delta: np.ndarray, rank: int) -> _Nearest:
    """Returns the nearest to a delta of full rank, from eigenvectors of the smaller Gram matrix. An
    SVD takes 6 times as long where a projection of SmolLM2 is 576 x 1536.
    """
    if delta.shape[0] > delta.shape[1]:
        b, a, *rest = _nearest_dense(delta.T, rank)
        return _Nearest(a, b, *rest)
    squares, u = np.linalg.eigh(delta @ delta.T)
    u = u[:, ::-1][:, :rank].T
    rows = u @ delta
    # lengths of these rows: the squares of small values are rounding alone
    roots = np.sqrt(np.linalg.norm(rows, axis=1, keepdims=True))
    b = np.divide(rows, roots, out=np.zeros_like(rows), where=roots > 0)
    omitted = squares[: max(0, len(squares) - rank)].clip(0).sum()
    return _Nearest(roots * u, b, squares.clip(0).sum(), omitted)


def _float32(array: Any) -> np.ndarray:
    with np.errstate(over="ignore"):  # infinite numbers are refused afterwards
        return np.asarray(array, np.float32)


def _padded(factor: np.ndarray, rank: int) -> np.ndarray:
    """Returns a factor with rows of zeros up to a rank."""
    rows = [(0, 0)] * factor.ndim
    rows[-2] = (0, rank - factor.shape[-2])
    return np.pad(factor, rows)
