"""The audit log: each change with its author, reason and time. Append only, written in the
transaction of the change.

``id`` orders the entries, never the clock. Times of one policy do not go back: an entry is stamped
with the later of now and the policy's last change.
"""

import dataclasses
import json
from typing import Any, TypedDict

import sqlalchemy as sa

from mint_jax.catalog.records.database import WRITE
from mint_jax.catalog.records.names import note
from mint_jax.catalog.records.tables import as_record, audit, policies


@dataclasses.dataclass(frozen=True)
class Author:
    """The author of a change, the reason, and the time by the author's clock."""

    actor: str
    why: str
    now: float

    def __post_init__(self):
        note("by", self.actor, 400)
        note("why", self.why)


class Signed(TypedDict, total=False):
    """Author of a change, by default the catalog's ``actor``, and the reason."""

    by: str | None
    why: str


@dataclasses.dataclass(frozen=True)
class AuditEntry:
    """One change. ``before`` and ``after`` are revision numbers."""

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


_EMPTY = dict.fromkeys(("alias", "before", "after", "version", "rollback_to"))


def row(
    author: Author,
    action: str,
    policy: Any = None,
    details: dict[str, Any] | None = None,
    **fields: Any,
) -> dict[str, Any]:
    """Returns the values of one entry. ``policy`` has ``id`` and ``touched_at``."""
    return _EMPTY | {
        "at": author.now if policy is None else max(author.now, policy.touched_at),
        "actor": author.actor,
        "why": author.why,
        "action": action,
        "policy_id": None if policy is None else policy.id,
        "details": json.dumps(details or {}, sort_keys=True),
        **fields,
    }


def append(connection: sa.Connection, *rows: dict[str, Any]) -> None:
    """Adds entries made by ``row``."""
    if rows:
        write = connection.get_execution_options()[WRITE]
        connection.execute(audit.insert(), [{**values, "write": write} for values in rows])


def log(connection: sa.Connection, author: Author, *about: Any, **fields: Any) -> None:
    """Adds one entry; the arguments are those of ``row``."""
    append(connection, row(author, *about, **fields))


def entries(
    connection: sa.Connection, *conditions: Any, limit: int, newest: bool = False
) -> list[AuditEntry]:
    """Returns entries that meet all conditions, oldest first or ``newest`` first."""
    query = sa.select(audit, policies.c.tenant, policies.c.name).outerjoin(policies)
    query = query.where(*conditions).order_by(audit.c.id.desc() if newest else audit.c.id)
    return [
        as_record(AuditEntry, row, details=json.loads(row.details))
        for row in connection.execute(query.limit(limit))
    ]
