"""Retention: which revisions may go, and their removal from the database.

A revision goes when it is retired, or when its policy keeps the last K live ones and it is older. It stays while it is
pinned, named by an alias, leased, the parent of a branch, or what an open session began from. A removed revision's number is
not given again, its evaluations and its lines in the audit log stay.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import sqlalchemy as sa

from mint_jax.catalog import audit
from mint_jax.catalog.audit import Author
from mint_jax.catalog.records import full_name
from mint_jax.catalog.tables import aliases, leases, policies, revisions


@dataclasses.dataclass(frozen=True)
class Expendable:
    """A revision that may go."""

    id: int
    policy: str
    number: int
    digest: bytes


def candidates(connection: sa.Connection) -> list[int]:
    """Policies of which something may go."""
    kept = sa.select(policies.c.id).where(policies.c.keep_last.is_not(None), policies.c.last_number > policies.c.keep_last)
    retired = sa.select(revisions.c.policy_id).where(revisions.c.state == "retired")
    return sorted(connection.scalars(sa.union(kept, retired)))


def expendable(connection: sa.Connection, author: Author, policy_ids: Sequence[int]) -> Iterator[tuple[sa.Row, list[Expendable]]]:
    """Per policy that has some: its locked row and the revisions that may go."""
    query = sa.select(policies).where(policies.c.id.in_(policy_ids)).order_by(policies.c.id).with_for_update()
    owners = {row.id: row for row in connection.execute(query)}
    protected = sa.or_(
        revisions.c.pinned,
        sa.exists().where(aliases.c.revision_id == revisions.c.id),
        sa.exists().where(policies.c.parent_revision == revisions.c.id),
        sa.exists().where(leases.c.digest == revisions.c.digest, leases.c.expires_at > author.now),
    )
    columns = (revisions.c.id, revisions.c.policy_id, revisions.c.number, revisions.c.digest, revisions.c.state)
    query = sa.select(*columns, protected.label("protected")).where(revisions.c.policy_id.in_(policy_ids))
    found: dict[int, list[Expendable]] = {}
    newer: dict[int, int] = dict.fromkeys(owners, 0)
    for row in connection.execute(query.order_by(revisions.c.policy_id, revisions.c.number.desc())):
        owner = owners[row.policy_id]
        beyond = row.state == "retired" or (owner.keep_last is not None and newer[owner.id] >= owner.keep_last)
        newer[owner.id] += row.state == "live"
        began = owner.session_owner is not None and owner.session_revision == row.number
        if beyond and not row.protected and not began:
            found.setdefault(owner.id, []).append(Expendable(row.id, full_name(owner.tenant, owner.name), row.number, row.digest))
    for number, some in found.items():
        yield owners[number], some


def remove(connection: sa.Connection, author: Author, policy_ids: Sequence[int]) -> list[Expendable]:
    """Removes what may go of these policies."""
    gone = []
    for owner, some in list(expendable(connection, author, policy_ids)):
        connection.execute(revisions.delete().where(revisions.c.id.in_([one.id for one in some])))
        details = {"revisions": [one.number for one in some], "digests": [one.digest.hex() for one in some]}
        audit.append(connection, audit.row(author, "remove revisions", owner, details))
        gone += some
    return gone
