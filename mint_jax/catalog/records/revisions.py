"""Changes of a policy's revisions: retired, pinned; and tags, labels ``key=value`` of policies and
revisions.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import sqlalchemy as sa

from mint_jax.catalog.records import names
from mint_jax.catalog.records.audit import Signed
from mint_jax.catalog.records.database import chunks
from mint_jax.catalog.records.handle import Change, Handle
from mint_jax.catalog.records.lookup import find_in
from mint_jax.catalog.records.policies import PolicyRecord
from mint_jax.catalog.records.tables import aliases, canaries, revisions
from mint_jax.catalog.records.tables import tags as tag_table
from mint_jax.errors import UserError

MAX_TAG = 400  # characters of a value


def retire(
    catalog: Handle, policy: str, revision: int | str | None = None, **signed: Unpack[Signed]
) -> None:
    """Takes a policy, or one of its revisions, out of use: it no longer resolves, and ``gc`` may
    remove the revision. Raises ``UserError``: an alias points at the revision, or it is the
    candidate of an open canary.
    """

    def body(change: Change) -> None:
        if revision is None:
            return _set_state(change, "retired", "retire")
        connection, found = change.connection, find_in(change.connection, change.policy, revision)
        query = sa.select(aliases.c.name).where(aliases.c.revision_id == found.id)
        if naming := list(connection.scalars(query.order_by(aliases.c.name))):
            raise UserError(
                f"revision {change.full}@{found.number} is named by {', '.join(naming)}: promote"
                " another or roll back first"
            )
        tried = sa.select(canaries.c.alias).where(canaries.c.policy_id == change.policy.id)
        tried = tried.where(canaries.c.candidate == found.number, canaries.c.state == "open")
        if alias := connection.scalar(tried):
            raise UserError(
                f"revision {change.full}@{found.number} is the candidate of a canary on {alias!r}:"
                " end the canary first"
            )
        return _update(change, found.number, "retire revision", state="retired")

    catalog.change(policy, body, **signed)


def restore(
    catalog: Handle, policy: str, revision: int | str | None = None, **signed: Unpack[Signed]
) -> None:
    """Undoes ``retire``; for a revision, until ``gc`` has removed it."""

    def body(change: Change) -> None:
        if revision is None:
            return _set_state(change, "active", "restore")
        return _update(change, revision, "restore revision", state="live")

    catalog.change(policy, body, **signed)


def pin(catalog: Handle, policy: str, revision: int | str, **signed: Unpack[Signed]) -> None:
    """Keeps a revision regardless of retention."""
    catalog.change(policy, lambda c: _update(c, revision, "pin", pinned=True), **signed)


def unpin(catalog: Handle, policy: str, revision: int | str, **signed: Unpack[Signed]) -> None:
    """Undoes ``pin``."""
    catalog.change(policy, lambda c: _update(c, revision, "unpin", pinned=False), **signed)


def _set_state(change: Change, state: str, action: str) -> None:
    if change.policy.state != state:
        change.record(action, state=state)


def _update(change: Change, which: int | str, action: str, **column: Any) -> None:
    """Sets one column of a revision, with its audit entry, unless it has the value already."""
    found, [(name, value)] = find_in(change.connection, change.policy, which), column.items()
    if found._mapping[name] != value:
        update = revisions.update().where(revisions.c.id == found.id)
        change.connection.execute(update.values(**column))
        change.record(action, {"digest": found.digest.hex()}, before=found.number)


def tag(
    catalog: Handle, name: str, changes: Mapping[str, str | None], **signed: Unpack[Signed]
) -> dict[str, str]:
    """Sets tags of a policy (``policy``) or of a revision (``policy@…``), and returns all its tags.
    Raises ``UserError``: an invalid key or value, or an unknown policy or revision. ``changes``:
    values by key; None removes a tag.
    """
    wanted = {
        names.clean("tag", key): None if value is None else _check_value(key, value)
        for key, value in changes.items()
    }
    policy, at, which = name.partition("@")

    def body(change: Change) -> dict[str, str]:
        connection, row = change.connection, change.policy
        number = find_in(connection, row, which).number if at else 0
        before = _tags(connection, row, number)
        changed = {key: value for key, value in sorted(wanted.items()) if before.get(key) != value}
        if not changed:
            return before
        own = (tag_table.c.policy_id == row.id, tag_table.c.number == number)
        connection.execute(tag_table.delete().where(*own, tag_table.c.key.in_(list(changed))))
        rows = [
            {"policy_id": row.id, "number": number, "key": key, "value": value}
            for key, value in changed.items()
            if value is not None
        ]
        if rows:
            connection.execute(tag_table.insert(), rows)
        change.record("tag", {"tags": changed}, before=number or None)
        return _tags(connection, row, number)

    return catalog.change(policy, body, **signed)


def tags(catalog: Handle, name: str) -> dict[str, str]:
    """Returns the tags of a policy or of a revision, by key."""
    policy, at, which = name.partition("@")

    def body(connection: sa.Connection, row: sa.Row) -> dict[str, str]:
        return _tags(connection, row, find_in(connection, row, which).number if at else 0)

    return catalog.look(policy, body)


def tags_of(catalog: Handle, records: Sequence[PolicyRecord]) -> dict[str, dict[str, str]]:
    """Returns the tags of many policies, by their full names."""
    found: dict[int, dict[str, str]] = {one.id: {} for one in records}
    for some in chunks(list(found)):
        query = sa.select(tag_table).where(tag_table.c.policy_id.in_(some), tag_table.c.number == 0)
        query = query.order_by(tag_table.c.key)
        for row in catalog.database.rows(query):
            found[row.policy_id][row.key] = row.value
    return {one.policy: found[one.id] for one in records}


def _tags(connection: sa.Connection, policy: sa.Row, number: int) -> dict[str, str]:
    query = sa.select(tag_table.c.key, tag_table.c.value).order_by(tag_table.c.key)
    query = query.where(tag_table.c.policy_id == policy.id, tag_table.c.number == number)
    return dict(connection.execute(query).tuples().all())


def _check_value(key: str, value: str) -> str:
    names.note(f"value of tag {key[:40]!r}", value, MAX_TAG)
    if not value:
        raise UserError(f"the value of tag {key[:40]!r} is empty: give a text, or remove the tag")
    return value
