"""Evaluations: a score, and everything that produced it.

A score is of one revision's bytes on one base. It was computed twice, with the revision loaded alone and in a batch with
other revisions, as serving does; where the two differ the score says nothing about what is served, and is refused.
"""

import json
import math
from typing import Any

import sqlalchemy as sa

from mint_jax.catalog import audit, policies
from mint_jax.catalog.audit import Author
from mint_jax.catalog.names import note, whole
from mint_jax.catalog.records import Evaluation, full_name
from mint_jax.catalog.tables import evaluations, revisions
from mint_jax.catalog.tables import policies as policy_table
from mint_jax.errors import UserError


def add(
    connection: sa.Connection, author: Author, policy: sa.Row, revision: sa.Row, values: dict[str, Any], tolerance: float
) -> Evaluation:
    """Notes a score of a revision of a locked policy. ``values``: the columns from ``renderer`` to ``shared``.

    Raises:
        UserError: the two scores are not finite or differ by more than ``tolerance``, or ``metrics`` is not JSON.
    """
    named = f"{full_name(policy.tenant, policy.name)}@{revision.number}"
    isolated, shared = float(values["isolated"]), float(values["shared"])
    if not (math.isfinite(isolated) and math.isfinite(shared) and abs(isolated - shared) <= tolerance):
        raise UserError(
            f"score of {named} is {isolated} loaded alone and {shared} in a shared batch; they may differ by {tolerance}: "
            "find which of the two serves other bytes before recording it"
        )
    for field in ("renderer", "scorer", "dataset"):
        note(field, values[field])
    try:
        metrics = json.dumps(values["metrics"], sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UserError(f"metrics of {named} are not JSON ({error}): give finite numbers and text") from None
    row = {
        **values,
        "seed": whole("seed", values["seed"], -(2**62)),
        "isolated": isolated,
        "shared": shared,
        "metrics": metrics,
        "revision_id": revision.id,
        "digest": revision.digest,
        "base": policy.base,
        "created_at": max(author.now, policy.touched_at),
    }
    number = connection.scalar(evaluations.insert().returning(evaluations.c.id), row)
    policies.touch(connection, author, policy)
    details = {"digest": revision.digest.hex(), "evaluation": number, "scorer": values["scorer"], "score": isolated}
    audit.append(connection, audit.row(author, "evaluate", policy, details, before=revision.number))
    return listing(connection, evaluations.c.id == number, 1)[0]


def listing(connection: sa.Connection, condition: sa.ColumnElement[bool], limit: int) -> list[Evaluation]:
    """Evaluations that meet a condition, in order."""
    query = sa.select(evaluations, revisions.c.number, policy_table.c.tenant, policy_table.c.name)
    query = query.outerjoin(revisions, evaluations.c.revision_id == revisions.c.id)
    query = query.outerjoin(policy_table, revisions.c.policy_id == policy_table.c.id)
    return [
        Evaluation(
            row.id,
            None if row.tenant is None else full_name(row.tenant, row.name),
            row.number,
            row.digest.hex(),
            row.base,
            row.renderer,
            row.scorer,
            row.dataset,
            row.seed,
            json.loads(row.metrics),
            row.isolated,
            row.shared,
            row.created_at,
        )
        for row in connection.execute(query.where(condition).order_by(evaluations.c.id).limit(limit))
    ]


def of_revision(connection: sa.Connection, digest: str, limit: int) -> list[Evaluation]:
    """Scores of these very bytes, whichever policy they were recorded for."""
    return listing(connection, evaluations.c.digest == bytes.fromhex(digest), limit)


def of_policy(connection: sa.Connection, policy: sa.Row, limit: int) -> list[Evaluation]:
    """Scores of a policy's revisions."""
    return listing(connection, revisions.c.policy_id == policy.id, limit)
