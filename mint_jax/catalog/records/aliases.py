"""Aliases: movable names of revisions. Promotion and rollback move an alias; no payload changes.

The moves of an alias are numbered 1, 2, …; each records in ``rollback_to`` the move that a rollback
restores. For a promotion this is the move before it; for a rollback to an older move it is that
move's own ``rollback_to``. So rolling back twice goes further back, and promoting the bad revision
undoes a rollback. The whole history stays in the audit log.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, Unpack

import sqlalchemy as sa

from mint_jax.catalog.records import audit, names
from mint_jax.catalog.records.audit import AuditEntry, Author, Signed
from mint_jax.catalog.records.database import chunks, dialect_insert
from mint_jax.catalog.records.handle import Change, Handle
from mint_jax.catalog.records.lookup import find_in
from mint_jax.catalog.records.names import full_name
from mint_jax.catalog.records.policies import PolicyRecord
from mint_jax.catalog.records.tables import aliases, as_record, canaries, revisions
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


class Move(NamedTuple):
    """A move of an alias."""

    policy: Any  # locked row of the policy
    alias: str
    target: Any  # row of the revision that the alias points at afterwards
    before: int | None  # number of the revision before; None for a new alias
    version: int  # number of the move
    rollback_to: int


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

    def body(change: Change) -> Alias:
        target = find_in(change.connection, change.policy, revision, live=True)
        return promote_in(change, target, alias)

    return catalog.change(policy, body, **signed, active=True)


def promote_in(change: Change, target: Any, alias: str, **about: Any) -> Alias:
    """``promote`` to the row of a live revision; ``about``: further details."""
    now = current(change.connection, change.policy, alias)
    if now is not None and now.revision_id == target.id:
        return _as_alias(change.policy, now)
    before, version = (None, 0) if now is None else (now.number, now.version)
    move = Move(change.policy, alias, target, before, version + 1, version)
    return _move(change, move, "promote", **about)


def rollback(
    catalog: Handle,
    policy: str,
    alias: str = "serving",
    *,
    to: int | str | None = None,
    **signed: Unpack[Signed],
) -> Alias:
    """Points an alias back at the revision before, or at the earlier revision ``to``. Raises
    ``UserError``: the alias has no such earlier revision, or retention has removed it.
    """
    alias = names.clean_alias(alias)

    def body(change: Change) -> Alias:
        connection, row, full = change.connection, change.policy, f"{change.full}@{alias}"
        target = None if to is None else find_in(connection, row, to, live=True)
        if (now := current(connection, row, alias)) is None:
            raise UserError(f"alias {full} does not exist: promote a revision first")
        moves = sa.select(log).where(log.c.policy_id == row.id, log.c.alias == alias)

        def made(version: int) -> sa.Row:
            return connection.execute(moves.where(log.c.version == version)).one()

        earlier = made(now.version)
        while earlier.rollback_to:
            earlier = made(earlier.rollback_to)
            if target is None or earlier.after == target.number:
                target = target or find_in(connection, row, earlier.after, live=True)
                version = now.version + 1
                move = Move(row, alias, target, now.number, version, earlier.rollback_to)
                return _move(change, move, "rollback")
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
    found: dict[int, list[str]] = {one.id: [] for one in records}
    for some in chunks(list(found)):
        query = _ALIASES.where(aliases.c.policy_id.in_(some)).order_by(aliases.c.name)
        for row in catalog.database.rows(query):
            found[row.policy_id].append(f"{row.name}@{row.number}")
    return {one.policy: found[one.id] for one in records}


def list_audit(
    catalog: Handle,
    policy: str | None = None,
    *,
    alias: str | None = None,
    after: int = 0,
    before: int | None = None,
    without: Sequence[str] = (),
    newest: bool = False,
    limit: int = 1000,
) -> list[AuditEntry]:
    """Returns the audit log of all policies, or of one, oldest first; the next page starts
    ``after`` the last id.

    Args:
        alias: only the moves of this alias of the policy.
        before: only entries with smaller ids.
        without: actions to leave out.
        newest: newest first; the next page is ``before`` the last id.
    """
    chosen: list[sa.ColumnElement[bool]] = [log.c.id > after, log.c.action.not_in(list(without))]
    if alias is not None:
        chosen.append(log.c.alias == names.clean_alias(alias))
    if before is not None:
        chosen.append(log.c.id < before)

    def body(connection: sa.Connection, row: sa.Row | None = None) -> list[AuditEntry]:
        own = [] if row is None else [log.c.policy_id == row.id]
        return audit.entries(connection, *own, *chosen, limit=limit, newest=newest)

    return catalog.database.read(body) if policy is None else catalog.look(policy, body)


def current(connection: sa.Connection, policy: sa.Row, alias: str) -> sa.Row | None:
    """Returns an alias with the number and digest of its revision."""
    return connection.execute(_select(policy).where(aliases.c.name == alias)).first()


def write_moves(
    connection: sa.Connection,
    author: Author,
    moves: Sequence[Move],
    action: str,
    **details: Sequence[Any],
) -> None:
    """Moves aliases, with one audit entry for each move; of several moves of one alias the last
    stays. ``details``: values of further details, one for each move.
    """
    entries, rows = [], {}
    for i, (policy, alias, target, before, version, rollback_to) in enumerate(moves):
        about = {name: values[i] for name, values in details.items()}
        about |= {"digest": target.digest.hex()}
        fields = {"before": before, "after": target.number, "rollback_to": rollback_to}
        fields |= {"alias": alias, "version": version}
        entries.append(audit.row(author, action, policy, about, **fields))
        rows[policy.id, alias] = {
            "policy_id": policy.id,
            "name": alias,
            "revision_id": target.id,
            "version": version,
            "updated_at": max(author.now, policy.touched_at),
            "canary_id": None,
        }
    insert = dialect_insert(connection, aliases)
    columns = ("revision_id", "version", "updated_at", "canary_id")
    moved = {name: insert.excluded[name] for name in columns}
    insert = insert.on_conflict_do_update(index_elements=["policy_id", "name"], set_=moved)
    connection.execute(insert, list(rows.values()))
    audit.append(connection, *entries)


def _move(change: Change, move: Move, action: str, **about: Any) -> Alias:
    """Moves an alias; its open canary, which compares with the revision before, is superseded."""
    connection, author, policy = change
    write_moves(connection, author, [move], action, **{name: [one] for name, one in about.items()})
    own = (canaries.c.policy_id == policy.id, canaries.c.alias == move.alias)
    update = canaries.update().where(*own, canaries.c.state == "open")
    connection.execute(update.values(state="superseded", updated_at=author.now))
    change.touch()
    return _as_alias(policy, current(connection, policy, move.alias))


_ALIASES = sa.select(aliases, revisions.c.number, revisions.c.digest).join(
    revisions, aliases.c.revision_id == revisions.c.id
)


def _select(policy: sa.Row) -> sa.Select:
    return _ALIASES.where(aliases.c.policy_id == policy.id).order_by(aliases.c.name)


def _as_alias(policy: sa.Row, row: Any) -> Alias:
    return as_record(Alias, row, policy=full_name(policy.tenant, policy.name))
