"""Aliases: movable names of revisions. Promotion and rollback are moves; no payload is touched.

The moves of one alias are numbered 1, 2, …; each remembers which move lies ``under`` it. A
promotion lies on the move before it; a rollback to an older move lies on what that one lay on.
Going back twice therefore goes further back, and a promotion of the bad revision undoes a rollback.
The whole history stays in the audit log.
"""

import dataclasses
from collections.abc import Sequence

import sqlalchemy as sa

from mint_jax.catalog.records import audit, names
from mint_jax.catalog.records.audit import AuditEntry, Author
from mint_jax.catalog.records.database import chunks
from mint_jax.catalog.records.names import full_name
from mint_jax.catalog.records.policies import Policies, PolicyRecord, touch
from mint_jax.catalog.records.revisions import find_revision
from mint_jax.catalog.records.tables import alias_checksum, aliases, revisions
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


class Aliases(Policies):
    """Moves aliases, and reads where they were."""

    def promote(
        self,
        policy: str,
        revision: int | str,
        alias: str = "serving",
        *,
        by: str | None = None,
        why: str = "",
    ) -> Alias:
        """Points an alias at a live revision of the policy; a new alias is made. Already there:
        nothing changes.
        """
        alias = names.clean_alias(alias)

        def body(connection: sa.Connection, author: Author, row: sa.Row) -> Alias:
            target, now = (
                find_revision(connection, row, revision, live=True),
                current(connection, row, alias),
            )
            if now is not None and now.revision_id == target.id:
                return Alias(
                    full_name(row.tenant, row.name),
                    alias,
                    now.number,
                    now.digest.hex(),
                    now.version,
                    now.updated_at,
                )
            return _move(
                connection,
                author,
                row,
                now,
                target,
                alias,
                "promote",
                under=0 if now is None else now.version,
            )

        return self._change(policy, body, by, why, active=True)

    def rollback(
        self,
        policy: str,
        alias: str = "serving",
        *,
        to: int | str | None = None,
        by: str | None = None,
        why: str = "",
    ) -> Alias:
        """Points an alias back: at the revision under the present one, or at ``to``, which must lie
        further down.

        Raises:
            UserError: nothing lies there, or retention has removed it.
        """
        alias = names.clean_alias(alias)

        def body(connection: sa.Connection, author: Author, row: sa.Row) -> Alias:
            target = None if to is None else find_revision(connection, row, to, live=True)
            return _rollback(connection, author, row, alias, target)

        return self._change(policy, body, by, why, active=True)

    def aliases(self, policy: str) -> list[Alias]:
        """All aliases of a policy by name."""

        def body(connection: sa.Connection, row: sa.Row) -> list[Alias]:
            mine, found = full_name(row.tenant, row.name), connection.execute(_of(row))
            return [
                Alias(mine, one.name, one.number, one.digest.hex(), one.version, one.updated_at)
                for one in found
            ]

        return self._look(policy, body)

    def aliases_of(self, records: Sequence[PolicyRecord]) -> dict[str, list[str]]:
        """``alias@number`` of all aliases of these policies, by their full names and in order of
        aliases.
        """
        found: dict[int, list[str]] = {}
        columns = (aliases.c.policy_id, aliases.c.name, revisions.c.number)
        for some in chunks([one.id for one in records]):
            query = sa.select(*columns).join(revisions, aliases.c.revision_id == revisions.c.id)
            query = query.where(aliases.c.policy_id.in_(some)).order_by(aliases.c.name)
            for policy_id, name, number in self.database.read(
                lambda c, query=query: c.execute(query).tuples().all()
            ):
                found.setdefault(policy_id, []).append(f"{name}@{number}")
        return {one.policy: found.get(one.id, []) for one in records}

    def history(
        self, policy: str, alias: str = "serving", *, after: int = 0, limit: int = 1000
    ) -> list[AuditEntry]:
        """The moves of an alias, oldest first; the next page begins ``after`` the last one's id."""
        alias = names.clean_alias(alias)
        return self._look(policy, lambda c, row: audit.entries(c, row.id, alias, after, limit))

    def alias_at(self, policy: str, alias: str, time: float) -> Alias | None:
        """What an alias was at a time, None before its first move. Read from the log, so removed
        revisions are included.
        """
        alias = names.clean_alias(alias)

        def body(connection: sa.Connection, row: sa.Row) -> Alias | None:
            query = sa.select(log).where(
                log.c.policy_id == row.id, log.c.alias == alias, log.c.at <= time
            )
            found = connection.execute(query.order_by(log.c.version.desc()).limit(1)).first()
            if found is None:
                return None
            digest = audit.details(found)["digest"]
            return Alias(
                full_name(row.tenant, row.name), alias, found.after, digest, found.version, found.at
            )

        return self._look(policy, body)

    def audit(
        self, policy: str | None = None, *, after: int = 0, limit: int = 1000
    ) -> list[AuditEntry]:
        """The audit log in order, of one policy or of all; the next page begins ``after`` the last
        one's id.
        """
        if policy is None:
            return self.database.read(lambda c: audit.entries(c, None, None, after, limit))
        return self._look(policy, lambda c, row: audit.entries(c, row.id, None, after, limit))

    def recent(
        self,
        policy: str,
        *,
        before: int | None = None,
        limit: int = 1000,
        without: Sequence[str] = (),
    ) -> list[AuditEntry]:
        """A policy's audit log backwards, the newest entry first; the next page is ``before`` the
        last one's id.

        Args:
            without: actions that are left out.
        """
        return self._look(policy, lambda c, row: audit.newest(c, row.id, before, limit, without))


def current(connection: sa.Connection, policy: sa.Row, alias: str) -> sa.Row | None:
    """An alias with the number, digest and state of its revision."""
    return connection.execute(_of(policy).where(aliases.c.name == alias)).first()


def _of(policy: sa.Row) -> sa.Select:
    query = sa.select(aliases, revisions.c.number, revisions.c.digest).join(
        revisions, aliases.c.revision_id == revisions.c.id
    )
    return query.where(aliases.c.policy_id == policy.id).order_by(aliases.c.name)


def _rollback(
    connection: sa.Connection, author: Author, policy: sa.Row, alias: str, to: sa.Row | None
) -> Alias:
    now = current(connection, policy, alias)
    named = f"{full_name(policy.tenant, policy.name)}@{alias}"
    if now is None:
        raise UserError(f"alias {named} does not exist: promote a revision first")
    move = _entry(connection, policy, alias, now.version)
    while move.under:
        move = _entry(connection, policy, alias, move.under)
        if to is None or move.after == to.number:
            target = find_revision(connection, policy, move.after, live=True) if to is None else to
            return _move(
                connection, author, policy, now, target, alias, "rollback", under=move.under
            )
    if to is None:
        raise UserError(
            f"alias {named} has no revision before {now.number}: promote another one instead"
        )
    raise UserError(
        f"alias {named} did not point at revision {to.number} before: promote it instead, or choose"
        " from its history"
    )


def _entry(connection: sa.Connection, policy: sa.Row, alias: str, version: int) -> sa.Row:
    query = sa.select(log).where(
        log.c.policy_id == policy.id, log.c.alias == alias, log.c.version == version
    )
    return connection.execute(query).one()


def _move(
    connection: sa.Connection,
    author: Author,
    policy: sa.Row,
    now: sa.Row | None,
    target: sa.Row,
    alias: str,
    action: str,
    under: int,
) -> Alias:
    at = max(author.now, policy.touched_at)
    version = 1 if now is None else now.version + 1
    checksum = alias_checksum(policy.id, alias, version, target.number, target.digest)
    values = {"revision_id": target.id, "version": version, "updated_at": at, "checksum": checksum}
    if now is None:
        connection.execute(aliases.insert(), {"policy_id": policy.id, "name": alias, **values})
    else:
        connection.execute(
            aliases.update()
            .where(aliases.c.policy_id == policy.id, aliases.c.name == alias)
            .values(**values)
        )
    touch(connection, author, policy)
    fields = {
        "alias": alias,
        "before": None if now is None else now.number,
        "after": target.number,
        "version": version,
        "under": under,
    }
    audit.append(
        connection, audit.row(author, action, policy, {"digest": target.digest.hex()}, **fields)
    )
    return Alias(
        full_name(policy.tenant, policy.name),
        alias,
        target.number,
        target.digest.hex(),
        version,
        at,
    )
