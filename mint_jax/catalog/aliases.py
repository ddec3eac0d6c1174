"""Aliases: movable names of revisions. Promotion and rollback are moves; no payload is touched.

The moves of one alias are numbered 1, 2, …; each remembers which move lies ``under`` it. A promotion lies on the move
before it; a rollback to an older move lies on what that one lay on. Going back twice therefore goes further back, and a
promotion of the bad revision undoes a rollback. The whole history stays in the audit log.
"""

from collections.abc import Sequence

import sqlalchemy as sa

from mint_jax.catalog import audit, policies
from mint_jax.catalog.audit import Author
from mint_jax.catalog.database import chunks
from mint_jax.catalog.records import Alias, full_name
from mint_jax.catalog.tables import aliases, revisions
from mint_jax.catalog.tables import audit as log
from mint_jax.errors import UserError


def current(connection: sa.Connection, policy: sa.Row, alias: str) -> sa.Row | None:
    """An alias with the number, digest and state of its revision."""
    return connection.execute(_of(policy).where(aliases.c.name == alias)).first()


def _of(policy: sa.Row) -> sa.Select:
    query = sa.select(aliases, revisions.c.number, revisions.c.digest).join(revisions, aliases.c.revision_id == revisions.c.id)
    return query.where(aliases.c.policy_id == policy.id).order_by(aliases.c.name)


def listing(connection: sa.Connection, policy: sa.Row) -> list[Alias]:
    """All aliases of a policy."""
    mine = full_name(policy.tenant, policy.name)
    return [Alias(mine, row.name, row.number, row.digest.hex(), row.version, row.updated_at) for row in connection.execute(_of(policy))]


def of_many(connection: sa.Connection, ids: Sequence[int]) -> dict[int, list[str]]:
    """``name@number`` of every alias of these policies, by policy and in order of names."""
    out: dict[int, list[str]] = {}
    for some in chunks(ids):
        query = sa.select(aliases.c.policy_id, aliases.c.name, revisions.c.number).join(revisions, aliases.c.revision_id == revisions.c.id)
        for policy_id, name, number in connection.execute(query.where(aliases.c.policy_id.in_(some)).order_by(aliases.c.name)).tuples():
            out.setdefault(policy_id, []).append(f"{name}@{number}")
    return out


def promote(connection: sa.Connection, author: Author, policy: sa.Row, target: sa.Row, alias: str) -> Alias:
    """Points an alias at a live revision; a new alias is made. Already there: nothing changes."""
    now = current(connection, policy, alias)
    if now is not None and now.revision_id == target.id:
        return Alias(full_name(policy.tenant, policy.name), alias, now.number, now.digest.hex(), now.version, now.updated_at)
    return _move(connection, author, policy, now, target, alias, "promote", under=0 if now is None else now.version)


def rollback(connection: sa.Connection, author: Author, policy: sa.Row, alias: str, to: sa.Row | None) -> Alias:
    """Points an alias back: at the revision under the present one, or at ``to``, which must lie further down.

    Raises:
        UserError: nothing lies there, or retention has removed it.
    """
    now = current(connection, policy, alias)
    named = f"{full_name(policy.tenant, policy.name)}@{alias}"
    if now is None:
        raise UserError(f"alias {named} does not exist: promote a revision first")
    move = _entry(connection, policy, alias, now.version)
    while move.under:
        move = _entry(connection, policy, alias, move.under)
        if to is None or move.after == to.number:
            target = policies.revision(connection, policy, move.after, live=True) if to is None else to
            return _move(connection, author, policy, now, target, alias, "rollback", under=move.under)
    if to is None:
        raise UserError(f"alias {named} has no revision before {now.number}: promote another one instead")
    raise UserError(f"alias {named} did not point at revision {to.number} before: promote it instead, or choose from its history")


def _entry(connection: sa.Connection, policy: sa.Row, alias: str, version: int) -> sa.Row:
    query = sa.select(log).where(log.c.policy_id == policy.id, log.c.alias == alias, log.c.version == version)
    return connection.execute(query).one()


def _move(
    connection: sa.Connection, author: Author, policy: sa.Row, now: sa.Row | None, target: sa.Row, alias: str, action: str, under: int
) -> Alias:
    at = max(author.now, policy.touched_at)
    version = 1 if now is None else now.version + 1
    values = {"revision_id": target.id, "version": version, "updated_at": at}
    if now is None:
        connection.execute(aliases.insert(), {"policy_id": policy.id, "name": alias, **values})
    else:
        connection.execute(aliases.update().where(aliases.c.policy_id == policy.id, aliases.c.name == alias).values(**values))
    policies.touch(connection, author, policy)
    fields = {"alias": alias, "before": None if now is None else now.number, "after": target.number, "version": version, "under": under}
    audit.append(connection, audit.row(author, action, policy, {"digest": target.digest.hex()}, **fields))
    return Alias(full_name(policy.tenant, policy.name), alias, target.number, target.digest.hex(), version, at)


def at_time(connection: sa.Connection, policy: sa.Row, alias: str, time: float) -> Alias | None:
    """What an alias was at that time, None before its first move. Read from the log, so removed revisions are included."""
    query = sa.select(log).where(log.c.policy_id == policy.id, log.c.alias == alias, log.c.at <= time)
    found = connection.execute(query.order_by(log.c.version.desc()).limit(1)).first()
    if found is None:
        return None
    digest = audit.details(found)["digest"]
    return Alias(full_name(policy.tenant, policy.name), alias, found.after, digest, found.version, found.at)
