"""Retention: the revisions that may be removed, and their removal from the database.

A revision is expendable if it is retired, or older than the last K live ones of a policy that keeps
K. It stays while it is pinned, named by an alias, leased, the parent of a branch, or the start of
an open session. The number of a removed revision is not given again; its evaluations and its audit
entries stay.
"""

import dataclasses
from collections.abc import Sequence

import sqlalchemy as sa

from mint_jax.catalog.records import audit
from mint_jax.catalog.records.audit import Author
from mint_jax.catalog.records.names import full_name
from mint_jax.catalog.records.tables import aliases, leases, policies, revisions, tags


@dataclasses.dataclass(frozen=True)
class Expendable:
    """A revision that may be removed."""

    id: int
    policy_id: int
    policy: str
    number: int
    digest: bytes


def candidates(connection: sa.Connection) -> list[int]:
    """Returns the ids of policies that may have expendable revisions."""
    kept = sa.select(policies.c.id).where(policies.c.last_number > policies.c.keep_last)
    retired = sa.select(revisions.c.policy_id).where(revisions.c.state == "retired")
    return sorted(connection.scalars(sa.union(kept, retired)))


def remove(
    connection: sa.Connection, author: Author, policy_ids: Sequence[int]
) -> list[Expendable]:
    """Locks these policies and removes their expendable revisions."""
    query = sa.select(policies).where(policies.c.id.in_(policy_ids)).order_by(policies.c.id)
    owners = {row.id: row for row in connection.execute(query.with_for_update())}
    protected = sa.or_(
        revisions.c.pinned,
        sa.exists().where(aliases.c.revision_id == revisions.c.id),
        sa.exists().where(policies.c.parent_revision == revisions.c.id),
        sa.exists().where(leases.c.digest == revisions.c.digest, leases.c.expires_at > author.now),
    )
    query = sa.select(revisions, protected.label("protected"))
    query = query.where(revisions.c.policy_id.in_(policy_ids))
    found = []
    newer = dict.fromkeys(owners, 0)  # live revisions counted so far, newest first
    for row in connection.execute(query.order_by(revisions.c.policy_id, revisions.c.number.desc())):
        owner = owners[row.policy_id]
        beyond = owner.keep_last is not None and newer[owner.id] >= owner.keep_last
        newer[owner.id] += row.state == "live"
        start = owner.session_owner is not None and owner.session_revision == row.number
        if (beyond or row.state == "retired") and not row.protected and not start:
            full = full_name(owner.tenant, owner.name)
            found.append(Expendable(row.id, owner.id, full, row.number, row.digest))
    by_policy: dict[int, list[Expendable]] = {}
    for one in found:
        by_policy.setdefault(one.policy_id, []).append(one)
    for policy_id, some in by_policy.items():
        numbers = [one.number for one in some]
        own = (tags.c.policy_id == policy_id, tags.c.number.in_(numbers))
        connection.execute(tags.delete().where(*own))
        connection.execute(revisions.delete().where(revisions.c.id.in_([one.id for one in some])))
        details = {"revisions": numbers, "digests": [one.digest.hex() for one in some]}
        audit.log(connection, author, "remove revisions", owners[policy_id], details)
    return found
