"""Revisions of a policy: found, listed, retired, pinned; and tags, labels ``key=value`` of policies
and revisions.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import sqlalchemy as sa

from mint_jax.catalog.records import audit, names, policies
from mint_jax.catalog.records.audit import Author, Signed
from mint_jax.catalog.records.database import chunks
from mint_jax.catalog.records.handle import Handle, touch
from mint_jax.catalog.records.names import full_name
from mint_jax.catalog.records.policies import PolicyRecord
from mint_jax.catalog.records.tables import aliases, payloads, revisions
from mint_jax.catalog.records.tables import tags as tag_table
from mint_jax.errors import UserError

MAX_TAG = 400  # characters of a value


@dataclasses.dataclass(frozen=True)
class Revision:
    """An immutable export of a policy's adapter.

    Attributes:
        bytes: length of the packed object.
        state: ``live`` or ``retired``.
        sampling: sampling parameters of training rollouts, as ``rollout.request.Request`` names
            them; None where training drew no rollouts or they are unknown.
    """

    id: int
    policy: str
    number: int
    step: int
    digest: str
    bytes: int
    origin: str
    pinned: bool
    state: str
    created_at: float
    sampling: dict[str, Any] | None = None


def list_revisions(
    catalog: Handle, policy: str, after: int = 0, limit: int = 1000
) -> list[Revision]:
    """Returns a page of a policy's revisions by number."""

    def body(connection: sa.Connection, row: sa.Row) -> list[Revision]:
        query = _select(row).where(revisions.c.number > after).order_by(revisions.c.number)
        return [as_revision(row, found) for found in connection.execute(query.limit(limit))]

    return catalog.look(policy, body)


def revision(catalog: Handle, policy: str, which: int | str) -> Revision:
    """Returns one revision, retired ones too, by number, alias, digest or full name."""
    return catalog.look(policy, lambda c, row: as_revision(row, find_revision(c, row, which)))


def retire(
    catalog: Handle, policy: str, revision: int | str | None = None, **signed: Unpack[Signed]
) -> None:
    """Takes a policy, or one of its revisions, out of use: it no longer resolves, and ``gc`` may
    remove the revision.

    Raises:
        UserError: an alias points at the revision.
    """
    _set_state(catalog, policy, revision, True, signed)


def restore(
    catalog: Handle, policy: str, revision: int | str | None = None, **signed: Unpack[Signed]
) -> None:
    """Undoes ``retire``; for a revision, until ``gc`` has removed it."""
    _set_state(catalog, policy, revision, False, signed)


def _set_state(
    catalog: Handle, policy: str, revision: int | str | None, retired: bool, signed: Signed
) -> None:
    def body(connection: sa.Connection, author: Author, row: sa.Row) -> None:
        if revision is None:
            policies.set_state(connection, author, row, "retired" if retired else "active")
            return
        found = find_revision(connection, row, revision)
        if retired:
            _check_unnamed(connection, row, found)
        state = "retired" if retired else "live"
        action = f"{'retire' if retired else 'restore'} revision"
        _update(connection, author, row, found, action, state=state)

    catalog.change(policy, body, **signed)


def _check_unnamed(connection: sa.Connection, policy: sa.Row, found: sa.Row) -> None:
    query = sa.select(aliases.c.name).where(aliases.c.revision_id == found.id)
    if naming := list(connection.scalars(query.order_by(aliases.c.name))):
        raise UserError(
            f"revision {full_name(policy.tenant, policy.name)}@{found.number} is named by"
            f" {', '.join(naming)}: promote another or roll back first"
        )


def pin(catalog: Handle, policy: str, revision: int | str, **signed: Unpack[Signed]) -> None:
    """Keeps a revision regardless of retention."""
    _set_pinned(catalog, policy, revision, True, signed)


def unpin(catalog: Handle, policy: str, revision: int | str, **signed: Unpack[Signed]) -> None:
    """Undoes ``pin``."""
    _set_pinned(catalog, policy, revision, False, signed)


def _set_pinned(
    catalog: Handle, policy: str, revision: int | str, pinned: bool, signed: Signed
) -> None:
    def body(connection: sa.Connection, author: Author, row: sa.Row) -> None:
        found = find_revision(connection, row, revision)
        _update(connection, author, row, found, "pin" if pinned else "unpin", pinned=pinned)

    catalog.change(policy, body, **signed)


def _update(
    connection: sa.Connection,
    author: Author,
    policy: sa.Row,
    found: sa.Row,
    action: str,
    **change: Any,
) -> None:
    """Sets one column of a revision, with its audit entry, unless it has the value already."""
    [(column, value)] = change.items()
    if found._mapping[column] == value:
        return
    connection.execute(revisions.update().where(revisions.c.id == found.id).values(**change))
    touch(connection, author, policy)
    details = {"digest": found.digest.hex()}
    audit.log(connection, author, action, policy, details, before=found.number)


def tag(
    catalog: Handle, name: str, changes: Mapping[str, str | None], **signed: Unpack[Signed]
) -> dict[str, str]:
    """Sets tags of a policy (``policy``) or of a revision (``policy@…``), and returns all its tags.

    Args:
        changes: values by key; None removes a tag.

    Raises:
        UserError: an invalid key or value, or an unknown policy or revision.
    """
    wanted = {
        names.clean("tag", key): None if value is None else _check_value(key, value)
        for key, value in changes.items()
    }
    policy, at, which = name.partition("@")

    def body(connection: sa.Connection, author: Author, row: sa.Row) -> dict[str, str]:
        number = find_revision(connection, row, which).number if at else 0
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
        touch(connection, author, row)
        audit.log(connection, author, "tag", row, {"tags": changed}, before=number or None)
        return _tags(connection, row, number)

    return catalog.change(policy, body, **signed)


def tags(catalog: Handle, name: str) -> dict[str, str]:
    """Returns the tags of a policy or of a revision, by key."""
    policy, at, which = name.partition("@")

    def body(connection: sa.Connection, row: sa.Row) -> dict[str, str]:
        return _tags(connection, row, find_revision(connection, row, which).number if at else 0)

    return catalog.look(policy, body)


def tags_of(catalog: Handle, records: Sequence[PolicyRecord]) -> dict[str, dict[str, str]]:
    """Returns the tags of many policies, by their full names."""
    found: dict[int, dict[str, str]] = {one.id: {} for one in records}
    for some in chunks(list(found)):
        query = sa.select(tag_table).where(tag_table.c.policy_id.in_(some), tag_table.c.number == 0)
        query = query.order_by(tag_table.c.key)
        for row in catalog.database.read(lambda c, query=query: c.execute(query).all()):
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


def _select(policy: sa.Row) -> sa.Select:
    query = sa.select(revisions, payloads.c.length).join(payloads)
    return query.where(revisions.c.policy_id == policy.id)


def as_revision(policy: Any, row: Any) -> Revision:
    """Returns the record of a row of ``revisions`` with its payload's ``length``."""
    return Revision(
        id=row.id,
        policy=full_name(policy.tenant, policy.name),
        number=row.number,
        step=row.step,
        digest=row.digest.hex(),
        bytes=row.length,
        origin=row.origin,
        pinned=row.pinned,
        state=row.state,
        created_at=row.created_at,
        sampling=None if row.sampling is None else json.loads(row.sampling),
    )


def find_revision(
    connection: sa.Connection, policy: sa.Row, which: int | str, live: bool = False
) -> sa.Row:
    """Returns the row of a revision by number, alias, digest, prefix of a digest, or full name.

    Raises:
        UserError: unknown, ambiguous, or retired and must be ``live``.
    """
    full = full_name(policy.tenant, policy.name)
    named = _parse_within(policy, which)
    query = _select(policy)
    if named.number is not None:
        query = query.where(revisions.c.number == named.number)
    elif named.digest is not None:
        low, high = names.digest_range(named.digest)
        query = query.where(revisions.c.digest.between(low, high))
        query = query.order_by(revisions.c.number.desc())
    else:
        query = query.join(aliases, aliases.c.revision_id == revisions.c.id)
        query = query.where(aliases.c.policy_id == policy.id, aliases.c.name == named.alias)
    found = list(connection.execute(query))
    if not found:
        raise UserError(
            f"policy {full!r} has no revision {which if isinstance(which, int) else which[:80]}:"
            " list its revisions and aliases"
        )
    if len({row.digest for row in found}) > 1:
        raise UserError(
            f"{which!r} begins {len(found)} digests of policy {full!r}: give more digits"
        )
    if live and found[0].state != "live":
        raise UserError(
            f"revision {full}@{found[0].number} is retired: restore it first, or choose another"
        )
    return found[0]


def _parse_within(policy: sa.Row, which: int | str) -> names.RevisionName:
    if not isinstance(which, str):
        which = names.whole("revision number", which, 1, 10**9)
        return names.RevisionName(policy.tenant, policy.name, number=which)
    if not ("@" in which or "/" in which):
        return names.parse_revision(which if names.is_digest(which) else f"p@{which}")
    named = names.parse_revision(which)
    if named.digest is None and (named.tenant, named.policy) != (policy.tenant, policy.name):
        raise UserError(
            f"revision {which[:80]!r} is not of policy {full_name(policy.tenant, policy.name)!r}:"
            " branch from it instead"
        )
    return named
