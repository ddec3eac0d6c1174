"""The audit log: who changed what, why and when. Append only; written in the transaction of the
change itself.

The order of events is the order of ``id``, never of the clock. Times of one policy do not go back:
an entry is stamped with the later of now and the policy's last change.
"""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from mint_jax.catalog.records.database import WRITE
from mint_jax.catalog.records.names import full_name, note
from mint_jax.catalog.records.tables import audit, policies
from mint_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Author:
    """Who makes a change, why, and what their clock says."""

    actor: str
    why: str
    now: float

    def __post_init__(self):
        note("by", self.actor, 400)
        note("why", self.why)


@dataclasses.dataclass(frozen=True)
class AuditEntry:
    """One state change. ``id`` orders all of them, whatever the clocks said; ``before`` and
    ``after`` are revision numbers.
    """

    id: int
    at: float
    actor: str
    why: str
    action: str
    policy: str | None
    alias: str | None
    before: int | None
    after: int | None
    version: int | None
    details: dict[str, Any]


def row(
    author: Author,
    action: str,
    policy: Any = None,
    details: dict[str, Any] | None = None,
    **fields: Any,
) -> dict[str, Any]:
    """The values of one entry. ``policy``: a row or mapping with ``id`` and ``touched_at``."""
    return {
        "at": author.now if policy is None else max(author.now, policy.touched_at),
        "actor": author.actor,
        "why": author.why,
        "action": action,
        "policy_id": None if policy is None else policy.id,
        "alias": None,
        "before": None,
        "after": None,
        "version": None,
        "under": None,
        "details": json.dumps(details or {}, sort_keys=True),
        **fields,
    }


def append(connection: sa.Connection, *rows: dict[str, Any]) -> None:
    """Adds entries made by ``row``."""
    if rows:
        write = connection.get_execution_options()[WRITE]
        connection.execute(audit.insert(), [{**values, "write": write} for values in rows])


def entries(
    connection: sa.Connection,
    policy_id: int | None = None,
    alias: str | None = None,
    after: int = 0,
    limit: int = 1000,
) -> list[AuditEntry]:
    """Entries in order, those with an id above ``after``."""
    query = (
        sa.select(audit, policies.c.tenant, policies.c.name)
        .outerjoin(policies)
        .where(audit.c.id > after)
        .order_by(audit.c.id)
        .limit(limit)
    )
    if policy_id is not None:
        query = query.where(audit.c.policy_id == policy_id)
    if alias is not None:
        query = query.where(audit.c.alias == alias)
    return [_entry(found) for found in connection.execute(query)]


def newest(
    connection: sa.Connection,
    policy_id: int,
    before: int | None,
    limit: int,
    without: Sequence[str] = (),
) -> list[AuditEntry]:
    """The last entries of a policy, the newest first: those with an id below ``before``, without
    some actions.
    """
    query = sa.select(audit, policies.c.tenant, policies.c.name).join(policies)
    query = query.where(audit.c.policy_id == policy_id, audit.c.action.not_in(list(without)))
    if before is not None:
        query = query.where(audit.c.id < before)
    return [
        _entry(found)
        for found in connection.execute(query.order_by(audit.c.id.desc()).limit(limit))
    ]


def _entry(found: sa.Row) -> AuditEntry:
    return AuditEntry(
        found.id,
        found.at,
        found.actor,
        found.why,
        found.action,
        None if found.policy_id is None else full_name(found.tenant, found.name),
        found.alias,
        found.before,
        found.after,
        found.version,
        details(found),
    )


def details(found: sa.Row) -> dict[str, Any]:
    """The details of a row of the log."""
    try:
        return json.loads(found.details)
    except ValueError:
        raise UserError(
            f"entry {found.id} of the audit log is damaged: run verify, restore the database from a"
            " backup"
        ) from None
