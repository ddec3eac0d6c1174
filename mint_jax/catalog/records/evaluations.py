"""Evaluations: scores of a revision's bytes on one base.

A score is computed twice, with the revision loaded alone and in a batch with other revisions, as
serving does. If the two differ, the score says nothing about what is served, and is refused.
"""

import dataclasses
import json
import math
from typing import Any, Unpack

import sqlalchemy as sa

from mint_jax.catalog.records import lookup, names
from mint_jax.catalog.records.audit import Author, Signed
from mint_jax.catalog.records.handle import Handle, record
from mint_jax.catalog.records.lookup import find_in
from mint_jax.catalog.records.names import full_name, note, whole
from mint_jax.catalog.records.tables import evaluations, policies, revisions
from mint_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """A score and everything that produced it.

    Attributes:
        policy, number: the revision; None once retention removed it.
    """

    id: int
    policy: str | None
    number: int | None
    digest: str
    base: str
    renderer: str
    scorer: str
    dataset: str
    seed: int
    metrics: dict[str, Any]
    isolated: float
    shared: float
    created_at: float


def record_evaluation(
    catalog: Handle,
    revision: str,
    *,
    renderer: str,
    scorer: str,
    dataset: str,
    seed: int,
    metrics: dict[str, Any],
    isolated: float,
    shared: float,
    tolerance: float = 0.0,
    **signed: Unpack[Signed],
) -> Evaluation:
    """Records a score of a revision.

    Args:
        dataset: digest of the data.
        isolated, shared: the score with the revision loaded alone, and in a batch with others.
        tolerance: allowed difference of the two.

    Raises:
        UserError: they are not finite or differ by more, or ``metrics`` is not JSON.
    """
    found = lookup.resolve(catalog, revision)
    named = f"{found.policy}@{found.number}"
    isolated, shared = float(isolated), float(shared)
    finite = math.isfinite(isolated) and math.isfinite(shared)
    if not (finite and abs(isolated - shared) <= tolerance):
        raise UserError(
            f"score of {named} is {isolated} loaded alone and {shared} in a shared batch; they may"
            f" differ by {tolerance}: find which of the two serves other bytes before recording it"
        )
    try:
        text = json.dumps(metrics, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"metrics of {named} are not JSON ({error}): give finite numbers and text"
        ) from None
    values = {
        "renderer": note("renderer", renderer),
        "scorer": note("scorer", scorer),
        "dataset": note("dataset", dataset),
        "seed": whole("seed", seed, -(2**62)),
        "metrics": text,
        "isolated": isolated,
        "shared": shared,
    }

    def body(connection: sa.Connection, author: Author, row: sa.Row) -> Evaluation:
        scored = find_in(connection, row, found.number)
        subject = {
            "revision_id": scored.id,
            "digest": scored.digest,
            "base": row.base,
            "created_at": max(author.now, row.touched_at),
        }
        insert = evaluations.insert().returning(evaluations.c.id)
        number = connection.scalar(insert, {**values, **subject})
        details = {"digest": scored.digest.hex(), "evaluation": number, "scorer": scorer}
        details["score"] = isolated
        record(connection, author, row, "evaluate", details, before=scored.number)
        return _select(connection, evaluations.c.id == number, 1)[0]

    return catalog.change(found.policy, body, **signed)


def list_evaluations(catalog: Handle, name: str, limit: int = 1000) -> list[Evaluation]:
    """Returns the scores of a policy (``policy``), or of the bytes of one revision (``policy@…`` or
    a digest), whichever policy they were recorded for.
    """
    if not ("@" in name or names.is_digest(name)):
        return catalog.look(name, lambda c, row: _select(c, revisions.c.policy_id == row.id, limit))
    policy, at, which = name.partition("@")
    if at:
        digest = lookup.revision(catalog, policy, which).digest
    else:
        digest = name if len(name) == 64 else lookup.resolve(catalog, name).digest
    scored = evaluations.c.digest == bytes.fromhex(digest)
    return catalog.database.read(lambda c: _select(c, scored, limit))


def _select(
    connection: sa.Connection, condition: sa.ColumnElement[bool], limit: int
) -> list[Evaluation]:
    query = sa.select(evaluations, revisions.c.number, policies.c.tenant, policies.c.name)
    query = query.outerjoin(revisions, evaluations.c.revision_id == revisions.c.id)
    query = query.outerjoin(policies, revisions.c.policy_id == policies.c.id)
    query = query.where(condition).order_by(evaluations.c.id).limit(limit)
    return [_evaluation(**row._mapping) for row in connection.execute(query)]


def _evaluation(
    revision_id: int | None, tenant: str | None, name: str, digest: bytes, metrics: str, **same: Any
) -> Evaluation:
    policy = None if tenant is None else full_name(tenant, name)
    return Evaluation(policy=policy, digest=digest.hex(), metrics=json.loads(metrics), **same)
