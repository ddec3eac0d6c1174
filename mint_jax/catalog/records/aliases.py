"""Aliases: movable names of revisions. Promotion and rollback move an alias; no payload changes.

The moves of an alias are numbered 1, 2, …; each records in ``rollback_to`` the move that a rollback
restores. For a promotion this is the move before it; for a rollback to an older move it is that
move's own ``rollback_to``. So rolling back twice goes further back, and promoting the bad revision
undoes a rollback. The whole history stays in the audit log.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Unpack

import sqlalchemy as sa

from mint_jax.catalog.records import audit, names
from mint_jax.catalog.records.audit import AuditEntry, Author, Signed
from mint_jax.catalog.records.database import chunks
from mint_jax.catalog.records.handle import Handle, touch
from mint_jax.catalog.records.names import full_name
from mint_jax.catalog.records.policies import PolicyRecord
from mint_jax.catalog.records.revisions import find_revision
from mint_jax.catalog.records.tables import aliases, revisions
from mint_jax.catalog.records.tables import audit as log
from mint_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Alias:
    """A movable name of one revision of a policy. ``version`` counts its moves."""

    policy: str
    name: str
    number: int
    digest: str
    version: int
    updated_at: float


def promote(
    catalog: Handle,
    policy: str,
    revision: int | str,
    alias: str = "serving",
    **signed: Unpack[Signed],
) -> Alias:
    """Points an alias at a live revision of the policy, creating the alias if needed.

    Nothing changes if it points there already.
    """
    alias = names.clean_alias(alias)

    def body(connection: sa.Connection, author: Author, row: sa.Row) -> Alias:
        target = find_revision(connection, row, revision, live=True)
        now = current(connection, row, alias)
        if now is not None and now.revision_id == target.id:
            return _as_alias(row, now)
        rollback_to = 0 if now is None else now.version
        return _move(connection, author, row, now, target, alias, "promote", rollback_to)

    return catalog.change(policy, body, **signed, active=True)


def rollback(
    catalog: Handle,
    policy: str,
    alias: str = "serving",
    *,
    to: int | str | None = None,
    **signed: Unpack[Signed],
) -> Alias:
    """Points an alias back at the revision before, or at the earlier revision ``to``.

    Raises:
        UserError: the alias has no such earlier revision, or retention has removed it.
    """
    alias = names.clean_alias(alias)

    def body(connection: sa.Connection, author: Author, row: sa.Row) -> Alias:
        target = None if to is None else find_revision(connection, row, to, live=True)
        now = current(connection, row, alias)
        full = f"{full_name(row.tenant, row.name)}@{alias}"
        if now is None:
            raise UserError(f"alias {full} does not exist: promote a revision first")
        move = _entry(connection, row, alias, now.version)
        while move.rollback_to:
            move = _entry(connection, row, alias, move.rollback_to)
            if target is None or move.after == target.number:
                target = target or find_revision(connection, row, move.after, live=True)
                before = move.rollback_to
                return _move(connection, author, row, now, target, alias, "rollback", before)
        if target is None:
            raise UserError(
                f"alias {full} has no revision before {now.number}: promote another one instead"
            )
        raise UserError(
            f"alias {full} did not point at revision {target.number} before: promote it instead,"
            " or choose from its history"
        )

    return catalog.change(policy, body, **signed, active=True)


def list_aliases(catalog: Handle, policy: str) -> list[Alias]:
    """Returns all aliases of a policy by name."""
    return catalog.look(
        policy, lambda c, row: [_as_alias(row, found) for found in c.execute(_select(row))]
    )


def aliases_of(catalog: Handle, records: Sequence[PolicyRecord]) -> dict[str, list[str]]:
    """Returns ``alias@number`` of all aliases of these policies, by their full names."""
    found: dict[int, list[str]] = {}
    columns = (aliases.c.policy_id, aliases.c.name, revisions.c.number)
    for some in chunks([one.id for one in records]):
        query = sa.select(*columns).join(revisions, aliases.c.revision_id == revisions.c.id)
        query = query.where(aliases.c.policy_id.in_(some)).order_by(aliases.c.name)
        rows = catalog.database.read(lambda c, query=query: c.execute(query).tuples().all())
        for policy_id, name, number in rows:
            found.setdefault(policy_id, []).append(f"{name}@{number}")
    return {one.policy: found.get(one.id, []) for one in records}


def history(
    catalog: Handle, policy: str, alias: str = "serving", *, after: int = 0, limit: int = 1000
) -> list[AuditEntry]:
    """Returns the moves of an alias, oldest first; the next page starts ``after`` the last id."""
    alias = names.clean_alias(alias)

    def body(connection: sa.Connection, row: sa.Row) -> list[AuditEntry]:
        own = (log.c.policy_id == row.id, log.c.alias == alias)
        return audit.entries(connection, *own, log.c.id > after, limit=limit)

    return catalog.look(policy, body)


def list_audit(
    catalog: Handle, policy: str | None = None, *, after: int = 0, limit: int = 1000
) -> list[AuditEntry]:
    """Returns the audit log of one policy or of all, oldest first; the next page starts ``after``
    the last id.
    """
    later = log.c.id > after
    if policy is None:
        return catalog.database.read(lambda c: audit.entries(c, later, limit=limit))
    return catalog.look(
        policy, lambda c, row: audit.entries(c, log.c.policy_id == row.id, later, limit=limit)
    )


def recent(
    catalog: Handle,
    policy: str,
    *,
    before: int | None = None,
    limit: int = 1000,
    without: Sequence[str] = (),
) -> list[AuditEntry]:
    """Returns a policy's audit log, newest first, without some actions; the next page is ``before``
    the last id.
    """
    chosen: list[sa.ColumnElement[bool]] = [log.c.action.not_in(list(without))]
    if before is not None:
        chosen.append(log.c.id < before)

    def body(connection: sa.Connection, row: sa.Row) -> list[AuditEntry]:
        own = log.c.policy_id == row.id
        return audit.entries(connection, own, *chosen, limit=limit, newest=True)

    return catalog.look(policy, body)


def current(connection: sa.Connection, policy: sa.Row, alias: str) -> sa.Row | None:
    """Returns an alias with the number and digest of its revision."""
    return connection.execute(_select(policy).where(aliases.c.name == alias)).first()


def _select(policy: sa.Row) -> sa.Select:
    query = sa.select(aliases, revisions.c.number, revisions.c.digest)
    query = query.join(revisions, aliases.c.revision_id == revisions.c.id)
    return query.where(aliases.c.policy_id == policy.id).order_by(aliases.c.name)


def _as_alias(policy: sa.Row, row: Any) -> Alias:
    full, digest = full_name(policy.tenant, policy.name), row.digest.hex()
    return Alias(full, row.name, row.number, digest, row.version, row.updated_at)


def _entry(connection: sa.Connection, policy: sa.Row, alias: str, version: int) -> sa.Row:
    query = sa.select(log).where(log.c.policy_id == policy.id, log.c.alias == alias)
    return connection.execute(query.where(log.c.version == version)).one()


def _move(
    connection: sa.Connection,
    author: Author,
    policy: sa.Row,
    now: sa.Row | None,
    target: sa.Row,
    alias: str,
    action: str,
    rollback_to: int,
) -> Alias:
    at = max(author.now, policy.touched_at)
    version = 1 if now is None else now.version + 1
    values = {"revision_id": target.id, "version": version, "updated_at": at}
    if now is None:
        connection.execute(aliases.insert(), {"policy_id": policy.id, "name": alias, **values})
    else:
        own = (aliases.c.policy_id == policy.id, aliases.c.name == alias)
        connection.execute(aliases.update().where(*own).values(**values))
    touch(connection, author, policy)
    fields = {
        "alias": alias,
        "before": None if now is None else now.number,
        "after": target.number,
        "version": version,
        "rollback_to": rollback_to,
    }
    digest = target.digest.hex()
    audit.log(connection, author, action, policy, {"digest": digest}, **fields)
    full = full_name(policy.tenant, policy.name)
    return Alias(full, alias, target.number, digest, version, at)
