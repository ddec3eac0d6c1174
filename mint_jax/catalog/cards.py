"""Revision cards: what the catalog knows of a revision against its parent, and what it does not.

The score is paired: the same prompts, samples and seeds of two recorded evaluations, with an
interval that holds at every look. The norm of the change compares the adapters' deltas.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import sqlalchemy as sa

from mint_jax import nested
from mint_jax.catalog.evidence import interval
from mint_jax.catalog.packed import unpack
from mint_jax.catalog.records import lookup, training_records
from mint_jax.catalog.records.handle import Handle
from mint_jax.catalog.records.lookup import Revision
from mint_jax.catalog.records.tables import revisions
from mint_jax.catalog.records.training_records import Evaluation
from mint_jax.errors import UserError
from mint_jax.lora.config import BIAS

ALPHA = 0.05  # of the score's interval
# an evaluation of both is of the same prompts and seeds if these are equal
_SAME = ("base", "renderer", "scorer", "dataset", "seed")
_PAIRED = ("score", "change")
_MOST = 10_000  # records that are read


@dataclasses.dataclass(frozen=True)
class PairedScore:
    """Mean rewards of a revision and its parent on the same prompts, and their difference with
    bounds that hold at every look with probability 0.95.
    """

    scorer: str
    dataset: str
    prompts: int
    reward: float
    parent_reward: float
    difference: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class ChangeNorm:
    """Frobenius norm of the difference of the deltas ``scale B A``, over all projections; ``share``
    is relative to the norm of the parent's own delta, None where that is zero.
    """

    norm: float
    share: float | None
    largest: str  # the projection that changed most
    largest_norm: float


@dataclasses.dataclass(frozen=True)
class RevisionCard:
    """A revision against its parent. What is not known is None, and ``absent`` says why."""

    revision: Revision
    parent: Revision | None
    score: PairedScore | None
    change: ChangeNorm | None
    training: dict[str, float] | None  # see ``Revision``
    absent: dict[str, str]


def card(
    catalog: Handle, policy: str, revision: int | str, parent: int | str | None = None
) -> RevisionCard:
    """Returns the card of a revision of a policy. Raises ``UserError``: unknown names, or damaged
    bytes. ``parent``: by default the newest live revision with a smaller number.
    """
    own, score = lookup.revision(catalog, policy, revision), None
    other = _before(catalog, own) if parent is None else lookup.revision(catalog, policy, parent)
    absent: dict[str, str] = {}
    if own.training is None:
        absent["training"] = "the export came without metrics of training"
    if other is None:
        absent |= dict.fromkeys(_PAIRED, "it has no parent in the catalog")
        return RevisionCard(own, None, None, None, own.training, absent)
    try:
        score = _score(
            training_records.list_evaluations(catalog, own.digest, _MOST),
            training_records.list_evaluations(catalog, other.digest, _MOST),
        )
    except UserError as error:
        absent["score"] = str(error)
    return RevisionCard(own, other, score, _change(catalog, own, other), own.training, absent)


def _before(catalog: Handle, own: Revision) -> Revision | None:
    """Returns the newest live revision with a smaller number."""
    query = sa.select(sa.func.max(revisions.c.number)).where(revisions.c.state == "live")
    query = query.where(revisions.c.number < own.number)
    number = catalog.look(
        own.policy, lambda c, row: c.scalar(query.where(revisions.c.policy_id == row.id))
    )
    return None if number is None else lookup.revision(catalog, own.policy, number)


def _score(own: Sequence[Evaluation], other: Sequence[Evaluation]) -> PairedScore:
    """Returns the score of the newest pair of evaluations. Raises ``UserError`` without a pair."""
    pairs = [
        (one, two)
        for one in reversed(own)
        for two in reversed(other)
        if all(getattr(one, name) == getattr(two, name) for name in _SAME)
        and one.metrics.get("samples") == two.metrics.get("samples")
        and "rewards" in one.metrics
        and "rewards" in two.metrics
    ]
    if not pairs:
        raise UserError("no evaluation of both has rewards on the same prompts and seeds")
    one, two = pairs[0]
    means = [(_mean(a), _mean(b)) for a, b in zip(one.metrics["rewards"], two.metrics["rewards"])]
    both = np.array([pair for pair in means if None not in pair], np.float64)
    if not both.size:
        raise UserError("all rewards of one of the two evaluations were given up")
    if both.min() < 0 or both.max() > 1:
        raise UserError(f"rewards are from {both.min():g} to {both.max():g}, not from 0 to 1")
    differences = both[:, 0] - both[:, 1]
    low, high = (2 * bound - 1 for bound in interval((differences + 1) / 2, ALPHA))
    reward, parent = both.mean(0).tolist()
    about = one.scorer, one.dataset, len(both), reward, parent
    return PairedScore(*about, float(differences.mean()), low, high)


def _mean(rewards: Sequence[float | None]) -> float | None:
    known = [reward for reward in rewards if reward is not None]
    return sum(known) / len(known) if known else None


def _change(catalog: Handle, own: Revision, other: Revision) -> ChangeNorm:
    sides = []
    for sign, one in ((1, own), (-1, other)):
        adapter, schema = unpack(lookup.load_payload(catalog, one.digest))
        sides.append((sign * schema.config.scale, dict(nested.leaves_with_path(adapter))))
    squares, before = {}, 0.0
    for path in sorted({path.rpartition("/")[0] for _, factors in sides for path in factors}):
        pairs = [(s, f[f"{path}/a"], f.get(f"{path}/b")) for s, f in sides if f"{path}/a" in f]
        factors = [(s, a, _basis_like(a) if b is None else b) for s, a, b in pairs]
        added = [(s, f[f"{path}/{BIAS}"]) for s, f in sides if f"{path}/{BIAS}" in f]
        biases = [(s, np.ones((*b.shape[:-1], 1)), b) for s, b in added]  # of an input of 1
        squares[path] = squared_norm(factors) + squared_norm(biases)
        before += squared_norm([one for one in factors if one[0] < 0])
        before += squared_norm([one for one in biases if one[0] < 0])
    largest = max(squares, key=lambda path: squares[path])
    norm = math.sqrt(sum(squares.values()))
    share = norm / math.sqrt(before) if before else None
    return ChangeNorm(norm, share, largest, math.sqrt(squares[largest]))


def _basis_like(a: np.ndarray) -> np.ndarray:
    """Returns B of the same norms as an output basis, whose rows are of length 1 and nearly at
    right angles, whatever its width.
    """
    R = a.shape[-2]
    return np.broadcast_to(np.eye(R), (*a.shape[:-1], R))


def squared_norm(deltas: Sequence[tuple[float, Any, Any]]) -> float:
    """Returns the squared Frobenius norm of a sum of deltas ``scale B^T A``, in float64, without
    forming a delta: with B = Q_b R_b and A = Q_a R_a (both transposed, ranks side by side) it is
    that of R_b R_a^T. ``deltas``: scale, A `[..., R, D]` and B `[..., R, F]`; a factor that
    experts share lacks their axis.
    """
    rows: list[list[np.ndarray]] = [[], []]
    for scale, *factors in deltas:
        a, b = (np.asarray(factor, np.float64) for factor in factors)
        a, b = (x[:, None] if x.ndim < max(a.ndim, b.ndim) else x for x in (a, b))
        stack = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        for kept, x in zip(rows, (a, scale * b)):
            kept.append(np.broadcast_to(x, (*stack, *x.shape[-2:])))
    if not rows[0]:
        return 0.0
    r_a, r_b = (
        np.linalg.qr(np.swapaxes(np.concatenate(kept, -2), -1, -2), mode="r") for kept in rows
    )
    return float(np.sum((r_b @ np.swapaxes(r_a, -1, -2)) ** 2))
