"""Weighted sums of adapters: a sum of low-rank deltas is a low-rank delta of all factors, stacked.

With deltas ``s_i A_i^T B_i`` (rank first, ``s_i`` the adapter's scale) and coefficients ``c_i``,

    sum_i c_i s_i A_i^T B_i = [A_1; A_2; ..]^T [c_1 s_1 B_1; c_2 s_2 B_2; ..]

of rank ``R = r_1 + r_2 + ..``, exactly; averages of A and of B give another adapter.
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
    """A sum of adapters of scale 1, ``{path: [L, R, D]}`` float32. ``error`` is the Frobenius norm
    of what a smaller rank omits over that of the sum, 0 if exact.
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
    """Returns the sum of the sources' deltas times their coefficients, filled up with rows of zeros
    if ``rank`` is beyond the sources' ranks. Raises ``UserError``: it exceeds float32.
    """
    flat = [dict(params_lib.leaves_with_path(tree)) for tree, _ in sources]
    scales = [c * config.scale for c, (_, config) in zip(coefficients, sources, strict=True)]
    fits = sum(config.rank for _, config in sources) <= rank
    factors, total, omitted = {}, 0.0, 0.0
    for path in sorted({leaf.rsplit("/", 1)[0] for leaves in flat for leaf in leaves}):
        present = [
            (leaves[f"{path}/a"], leaves[f"{path}/b"], scale)
            for leaves, scale in zip(flat, scales)
            if f"{path}/a" in leaves
        ]
        layers = []
        for layer in range(len(present[0][0])):  # one by one: float64 takes memory
            # float64 before the scale, which may exceed float32
            a = np.concatenate([np.float64(a[layer]) for a, _, _ in present], axis=-2)
            b = np.concatenate([c * np.float64(b[layer]) for _, b, c in present], axis=-2)
            if not fits:
                a, b, values = _nearest(a, b, rank)
                total += (values**2).sum()
                omitted += (values[..., rank:] ** 2).sum()
            layers.append((_padded(a, rank, path), _padded(b, rank, path)))
        factors[f"{path}/a"], factors[f"{path}/b"] = map(np.stack, zip(*layers))
    targets = tuple(dict.fromkeys(target for _, config in sources for target in config.targets))
    config = lora_tree.spelled_out(AdapterConfig(rank, float(rank), targets), specs)
    return Interpolated(config, factors, float(np.sqrt(omitted / total)) if total else 0.0)


def _nearest(a: np.ndarray, b: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns factors of the nearest ``a^T b`` of at most ``rank`` (Eckart and Young 1936), each
    with the root of the singular values, and all of these, ``[.., R]``.
    """
    # a^T = q_a r_a, so that the SVD is of a matrix of at most R rows
    (q_a, r_a), (q_b, r_b) = (np.linalg.qr(np.swapaxes(factor, -1, -2)) for factor in (a, b))
    u, values, v = np.linalg.svd(r_a @ np.swapaxes(r_b, -1, -2), full_matrices=False)
    roots = np.sqrt(values[..., :rank, None])
    new_a = roots * np.swapaxes(q_a @ u[..., :rank], -1, -2)
    new_b = roots * (v[..., :rank, :] @ np.swapaxes(q_b, -1, -2))
    return new_a, new_b, values


def _padded(factor: np.ndarray, rank: int, path: str) -> np.ndarray:
    """Returns a factor in float32 with rows of zeros up to a rank."""
    rows = [(0, 0)] * factor.ndim
    rows[-2] = (0, rank - factor.shape[-2])
    with np.errstate(over="ignore"):
        out = np.pad(factor, rows).astype(np.float32)
    if not np.isfinite(out).all():
        raise UserError(
            f"the sum has numbers beyond float32 at {path}: choose coefficients nearer to 1"
        )
    return out
