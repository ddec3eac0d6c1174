"""Descriptions of policies for routing: the mean vector of prompts that a policy is for, made by
its own base (``mint_jax.rollout.embed``).
"""

import dataclasses
from typing import Unpack

import numpy as np
import sqlalchemy as sa

from mint_jax.catalog.records.audit import Signed
from mint_jax.catalog.records.handle import Change, Handle
from mint_jax.catalog.records.names import full_name, whole
from mint_jax.catalog.records.tables import descriptions as table
from mint_jax.catalog.records.tables import policies
from mint_jax.errors import UserError

MAX_DIMS = 1 << 16


@dataclasses.dataclass(frozen=True, eq=False)
class Description:
    """A policy's description.

    Attributes:
        policy: its full name.
        base: fingerprint of its base.
        vector: ``[dims]`` float16; empty: the description was removed.
        examples: number of prompts that it is the mean of.
    """

    policy: str
    base: str
    vector: np.ndarray
    examples: int
    updated_at: float


def describe(
    catalog: Handle,
    policy: str,
    vector: np.ndarray | None,
    examples: int = 0,
    **signed: Unpack[Signed],
) -> None:
    """Sets a policy's description; None removes it. Raises ``UserError``: the vector is not a
    finite one, or the policy does not exist or is retired.
    """
    data = b""
    if vector is not None:
        whole("examples", examples, 1)
        if vector.ndim != 1 or not 0 < vector.size <= MAX_DIMS or not np.isfinite(vector).all():
            raise UserError(
                f"a description's vector has shape {vector.shape}; expected one axis of at most"
                f" {MAX_DIMS} finite numbers"
            )
        data = vector.astype("<f2").tobytes()

    def body(change: Change) -> None:
        connection, row = change.connection, change.policy
        values = {"vector": data, "examples": examples if data else 0, "updated_at": change.now}
        connection.execute(table.delete().where(table.c.policy_id == row.id))
        connection.execute(table.insert().values(policy_id=row.id, **values))
        change.record("describe", {"examples": values["examples"]})

    catalog.change(policy, body, **signed, active=True)


def list_descriptions(
    catalog: Handle,
    tenant: str | None = None,
    *,
    since: tuple[float, int] = (0.0, 0),
    limit: int = 1000,
) -> tuple[list[Description], tuple[float, int]]:
    """Returns descriptions in the order of their last change, behind the place ``since``, and the
    place behind them: the next page, or later changes.
    """
    at, id = table.c.updated_at, table.c.policy_id
    query = sa.select(table, policies.c.tenant, policies.c.name, policies.c.base).join(policies)
    query = query.where(sa.tuple_(at, id) > sa.tuple_(*since), policies.c.state == "active")
    if tenant is not None:
        query = query.where(policies.c.tenant == tenant)
    rows = catalog.database.read(
        lambda c: c.execute(query.order_by(at, id).limit(whole("limit", limit, 1))).all()
    )
    found = [
        Description(
            full_name(row.tenant, row.name),
            row.base,
            np.frombuffer(row.vector, "<f2"),
            row.examples,
            row.updated_at,
        )
        for row in rows
    ]
    return found, (rows[-1].updated_at, rows[-1].policy_id) if rows else since
