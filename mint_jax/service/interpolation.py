"""Weighted sums of adapters: the sum of low-rank deltas is itself one, whose factors are those of
all, stacked.

With deltas ``s_i A_i^T B_i`` (rank first, ``s_i`` the adapter's scale) and coefficients ``c_i``,

    sum_i c_i s_i A_i^T B_i = [A_1; A_2; ..]^T [c_1 s_1 B_1; c_2 s_2 B_2; ..]

of rank ``R = r_1 + r_2 + ..``: exact, while averages of A and of B apart are another adapter. Where
a smaller rank is wanted, each projection has the nearest delta of that rank instead (Eckart and
Young 1936): the first singular values of the sum, which two QR decompositions bring down to a
matrix of R rows at most.

Axes: L layers, E experts where a projection has them, R rank, D in, F out.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mint_jax import params as params_lib
from mint_jax.errors import UserError
from mint_jax.lora import tree as lora_tree
from mint_jax.lora.tree import AdapterConfig


class Interpolated(NamedTuple):
    """A sum of adapters.

    Attributes:
        config: scale 1; targets are all that a source has.
        factors: ``{path: [L, R, D]}`` float32.
        error: Frobenius norm of what a smaller rank left out, over that of the whole sum; 0 where
            the sum is exact.
    """

    config: AdapterConfig
    factors: dict[str, np.ndarray]
    error: float


def interpolate(
    sources: Sequence[tuple[Any, AdapterConfig]],
    coefficients: Sequence[float],
    specs: Any,
    rank: int,
) -> Interpolated:
    """The sum of the sources' deltas, each times its coefficient.

    Args:
        sources: adapters of one base, as trees, and what they are.
        specs: the base's.
        rank: the sum's; rows of zeros fill up what is more than its sources have together.

    Raises:
        UserError: a sum beyond float32.
    """
    flat = [dict(params_lib.leaves_with_path(tree)) for tree, _ in sources]
    scales = [c * config.scale for c, (_, config) in zip(coefficients, sources, strict=True)]
    fits = sum(config.rank for _, config in sources) <= rank
    factors, whole, left_out = {}, 0.0, 0.0
    for path in sorted({leaf.rsplit("/", 1)[0] for one in flat for leaf in one}):
        having = [
            (one[f"{path}/a"], one[f"{path}/b"], scale)
            for one, scale in zip(flat, scales)
            if f"{path}/a" in one
        ]
        layers = []
        for of_layer in zip(*(zip(a, b) for a, b, _ in having)):  # one by one: float64 takes room
            a = np.concatenate([np.asarray(a, np.float64) for a, _ in of_layer], axis=-2)
            b = np.concatenate(
                [
                    scale * np.asarray(b, np.float64)
                    for (_, b), (*_, scale) in zip(of_layer, having)
                ],
                axis=-2,
            )
            if not fits:
                a, b, kept, lost = _nearest(a, b, rank)
                whole, left_out = whole + kept + lost, left_out + lost
            layers.append((_finished(a, rank, path), _finished(b, rank, path)))
        factors[f"{path}/a"], factors[f"{path}/b"] = (np.stack(factor) for factor in zip(*layers))
    targets = tuple(dict.fromkeys(target for _, config in sources for target in config.targets))
    config = lora_tree.spelled_out(AdapterConfig(rank, float(rank), targets), specs)
    return Interpolated(config, factors, float(np.sqrt(left_out / whole)) if whole else 0.0)


def _nearest(
    a: np.ndarray, b: np.ndarray, rank: int
) -> tuple[np.ndarray, np.ndarray, float, float]:
    """Factors of ``rank`` at most, and the squares of the singular values that they have and have
    not, summed over all modules.

    Each singular value's root goes to either factor.
    """
    # a^T = q_a r_a
    (q_a, r_a), (q_b, r_b) = (np.linalg.qr(np.swapaxes(factor, -1, -2)) for factor in (a, b))
    u, values, v = np.linalg.svd(r_a @ np.swapaxes(r_b, -1, -2), full_matrices=False)
    roots = np.sqrt(values[..., :rank, None])
    new_a = roots * np.swapaxes(q_a @ u[..., :rank], -1, -2)
    new_b = roots * (v[..., :rank, :] @ np.swapaxes(q_b, -1, -2))
    return (
        new_a,
        new_b,
        float((values[..., :rank] ** 2).sum()),
        float((values[..., rank:] ** 2).sum()),
    )


def _finished(factor: np.ndarray, rank: int, path: str) -> np.ndarray:
    """In float32, with rows of zeros up to a rank."""
    rows = [(0, 0)] * factor.ndim
    rows[-2] = (0, rank - factor.shape[-2])
    with np.errstate(over="ignore"):
        out = np.pad(factor, rows).astype(np.float32)
    if not np.isfinite(out).all():
        raise UserError(
            f"the sum has numbers beyond float32 at {path}: choose coefficients nearer to 1"
        )
    return out
