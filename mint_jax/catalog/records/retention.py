"""Retention: which revisions may go, and their removal from the database.

A revision goes when it is retired, or when its policy keeps the last K live ones and it is older.
It stays while it is pinned, named by an alias, leased, the parent of a branch, or what an open
session began from. A removed revision's number is not given again, its evaluations and its lines in
the audit log stay.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import sqlalchemy as sa

from mint_jax.catalog.records import audit, names
from mint_jax.catalog.records.audit import Author
from mint_jax.catalog.records.names import full_name
from mint_jax.catalog.records.policies import (
    DELETED,
    Policies,
    check_keep_last,
    find,
    refuse_trained,
    touch,
)
from mint_jax.catalog.records.tables import (
    aliases,
    checkpoints,
    leases,
    policies,
    revisions,
    rollouts,
    tags,
)
from mint_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Expendable:
    """A revision that may go."""

    id: int
    policy: str
    number: int
    digest: bytes


@dataclasses.dataclass(frozen=True)
class Kept:
    """A revision beyond the last K that stays, and why."""

    number: int
    because: list[str]


class Retention(Policies):
    """How many revisions a policy keeps."""

    def keep_last(
        self, policy: str, keep_last: int | None, *, by: str | None = None, why: str = ""
    ) -> list[Kept]:
        """Changes how many of the newest revisions ``gc`` keeps; returns the older ones that it
        keeps all the same, with the reasons.
        """
        key = names.parse_policy(policy)

        def body(connection: sa.Connection, author: Author, row: sa.Row) -> list[Kept]:
            check_keep_last(keep_last)
            touch(connection, author, row, keep_last=keep_last)
            audit.append(
                connection,
                audit.row(author, "keep_last", row, {"before": row.keep_last, "after": keep_last}),
            )
            return _kept_beyond(connection, author, find(connection, *key))

        return self._change(policy, body, by, why)

    def delete(self, policy: str, *, by: str | None = None, why: str = "") -> None:
        """Removes a retired policy: its revisions, aliases, tags, and the records of its
        checkpoints and rollouts.

        ``gc`` then frees the bytes that nothing else names. The name is free again; the audit log
        keeps what there was, and evaluations stay with their digests.

        Raises:
            UserError: it is not retired, is being trained, or one of its revisions is leased or
                another policy's parent.
        """

        def body(connection: sa.Connection, author: Author, row: sa.Row) -> None:
            mine = full_name(row.tenant, row.name)
            if row.state != "retired":
                raise UserError(
                    f"policy {mine!r} is {row.state}: retire it first, and delete it once nothing"
                    " has missed it"
                )
            refuse_trained(author, row)
            if held := _holders(connection, author, row):
                number = min(held)
                raise UserError(
                    f"revision {mine}@{number} is {', '.join(held[number])}: policy {mine!r} cannot"
                    " be deleted yet"
                )
            its = (
                sa.select(revisions.c.number, revisions.c.digest)
                .where(revisions.c.policy_id == row.id)
                .order_by(revisions.c.number)
            )
            found = connection.execute(its).all()
            touch(
                connection,
                author,
                row,
                state=DELETED,
                name=f"{row.name}@{DELETED}-{row.id}",
                parent_revision=None,
            )
            for table in (aliases, tags, checkpoints, rollouts, revisions):
                connection.execute(table.delete().where(table.c.policy_id == row.id))
            gone = {
                "revisions": [one.number for one in found],
                "digests": [one.digest.hex() for one in found],
            }
            audit.append(connection, audit.row(author, "delete", row, {"policy": mine, **gone}))

        self._change(policy, body, by, why)


def _holders(connection: sa.Connection, author: Author, policy: sa.Row) -> dict[int, list[str]]:
    """Revisions of a policy, by number, that leases keep or other policies began from, and by
    what.
    """
    found: dict[int, list[str]] = {}
    leased = sa.select(revisions.c.number, leases.c.owner).join_from(
        revisions, leases, leases.c.digest == revisions.c.digest
    )
    leased = leased.where(revisions.c.policy_id == policy.id, leases.c.expires_at > author.now)
    for number, owner in connection.execute(leased).tuples():
        found.setdefault(number, []).append(f"leased by {owner!r}")
    children = sa.select(revisions.c.number, policies.c.tenant, policies.c.name)
    children = children.join_from(policies, revisions, policies.c.parent_revision == revisions.c.id)
    for number, tenant, name in connection.execute(
        children.where(revisions.c.policy_id == policy.id)
    ).tuples():
        found.setdefault(number, []).append(f"the parent of {full_name(tenant, name)!r}")
    return found


def _kept_beyond(connection: sa.Connection, author: Author, policy: sa.Row) -> list[Kept]:
    """Live revisions of a policy that are older than its last ``keep_last`` and stay, oldest
    first.
    """
    if policy.keep_last is None:
        return []
    live = sa.select(revisions.c.id, revisions.c.number, revisions.c.pinned, revisions.c.digest)
    live = live.where(revisions.c.policy_id == policy.id, revisions.c.state == "live").order_by(
        revisions.c.number.desc()
    )
    rows = connection.execute(live.offset(policy.keep_last)).all()
    reasons: dict[int, list[str]] = {row.id: ["pinned"] if row.pinned else [] for row in rows}
    named = (
        sa.select(aliases.c.revision_id, aliases.c.name)
        .where(aliases.c.policy_id == policy.id)
        .order_by(aliases.c.name)
    )
    for revision, name in connection.execute(named).tuples():
        if revision in reasons:
            reasons[revision].append(f"alias {name}")
    leased = sa.select(leases.c.digest).where(leases.c.expires_at > author.now)
    held = set(
        connection.scalars(
            leased.join(revisions, revisions.c.digest == leases.c.digest).where(
                revisions.c.policy_id == policy.id
            )
        )
    )
    children = sa.select(policies.c.parent_revision, policies.c.tenant, policies.c.name).join_from(
        policies, revisions, policies.c.parent_revision == revisions.c.id
    )
    children = children.where(revisions.c.policy_id == policy.id).order_by(
        policies.c.tenant, policies.c.name
    )
    for parent, tenant, name in connection.execute(children).tuples():
        if parent in reasons:
            reasons[parent].append(f"parent of {full_name(tenant, name)}")
    for row in rows:
        reasons[row.id] += ["leased"] if row.digest in held else []
        if policy.session_owner is not None and policy.session_revision == row.number:
            reasons[row.id].append("an open session began there")
    return [Kept(row.number, reasons[row.id]) for row in reversed(rows) if reasons[row.id]]


def candidates(connection: sa.Connection) -> list[int]:
    """Policies of which something may go."""
    kept = sa.select(policies.c.id).where(
        policies.c.keep_last.is_not(None), policies.c.last_number > policies.c.keep_last
    )
    retired = sa.select(revisions.c.policy_id).where(revisions.c.state == "retired")
    return sorted(connection.scalars(sa.union(kept, retired)))


def expendable(
    connection: sa.Connection, author: Author, policy_ids: Sequence[int]
) -> Iterator[tuple[sa.Row, list[Expendable]]]:
    """Per policy that has some: its locked row and the revisions that may go."""
    query = (
        sa.select(policies)
        .where(policies.c.id.in_(policy_ids))
        .order_by(policies.c.id)
        .with_for_update()
    )
    owners = {row.id: row for row in connection.execute(query)}
    protected = sa.or_(
        revisions.c.pinned,
        sa.exists().where(aliases.c.revision_id == revisions.c.id),
        sa.exists().where(policies.c.parent_revision == revisions.c.id),
        sa.exists().where(leases.c.digest == revisions.c.digest, leases.c.expires_at > author.now),
    )
    columns = (
        revisions.c.id,
        revisions.c.policy_id,
        revisions.c.number,
        revisions.c.digest,
        revisions.c.state,
    )
    query = sa.select(*columns, protected.label("protected")).where(
        revisions.c.policy_id.in_(policy_ids)
    )
    found: dict[int, list[Expendable]] = {}
    newer: dict[int, int] = dict.fromkeys(owners, 0)
    for row in connection.execute(query.order_by(revisions.c.policy_id, revisions.c.number.desc())):
        owner = owners[row.policy_id]
        beyond = row.state == "retired" or (
            owner.keep_last is not None and newer[owner.id] >= owner.keep_last
        )
        newer[owner.id] += row.state == "live"
        began = owner.session_owner is not None and owner.session_revision == row.number
        if beyond and not row.protected and not began:
            found.setdefault(owner.id, []).append(
                Expendable(row.id, full_name(owner.tenant, owner.name), row.number, row.digest)
            )
    for number, some in found.items():
        yield owners[number], some


def remove(
    connection: sa.Connection, author: Author, policy_ids: Sequence[int]
) -> list[Expendable]:
    """Removes what may go of these policies."""
    gone = []
    for owner, some in list(expendable(connection, author, policy_ids)):
        connection.execute(
            tags.delete().where(
                tags.c.policy_id == owner.id, tags.c.number.in_([one.number for one in some])
            )
        )
        connection.execute(revisions.delete().where(revisions.c.id.in_([one.id for one in some])))
        details = {
            "revisions": [one.number for one in some],
            "digests": [one.digest.hex() for one in some],
        }
        audit.append(connection, audit.row(author, "remove revisions", owner, details))
        gone += some
    return gone
