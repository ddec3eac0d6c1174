"""Policy records and their revisions: made, found, listed, branched, retired, pinned."""

import json
from typing import Any

import sqlalchemy as sa
from sqlalchemy import exc

from mint_jax.catalog import audit, names
from mint_jax.catalog.audit import Author
from mint_jax.catalog.database import chunks, insert_new
from mint_jax.catalog.packed import Schema, schema_digest
from mint_jax.catalog.records import PolicyRecord, Revision, full_name
from mint_jax.catalog.tables import aliases, payloads, policies, revisions, schemas
from mint_jax.errors import UserError


def schema_ids(connection: sa.Connection, texts: set[str]) -> dict[str, int]:
    """Ids of schemas by their text; new ones are added."""
    digests = {schema_digest(text): text for text in sorted(texts)}
    query = sa.select(schemas.c.digest, schemas.c.id).where(schemas.c.digest.in_(list(digests)))
    found = {digests[digest]: number for digest, number in connection.execute(query)}
    if len(found) < len(texts):
        insert_new(connection, schemas, [{"digest": digest, "json": text} for digest, text in digests.items() if text not in found])
        found = {digests[digest]: number for digest, number in connection.execute(query)}
    return found


def new_row(author: Author, tenant: str, name: str, schema: Schema, schema_id: int, keep_last: int | None = None) -> dict[str, Any]:
    """The values of a policy that has no revision yet."""
    _check_keep_last(keep_last)
    return {
        "tenant": tenant,
        "name": name,
        "base": schema.base,
        "schema_id": schema_id,
        "parent_revision": None,
        "state": "active",
        "keep_last": keep_last,
        "created_at": author.now,
        "touched_at": author.now,
        "last_number": 0,
        "session_number": 0,
        "session_owner": None,
        "session_expires": None,
        "session_seconds": None,
        "session_revision": None,
    }


def create(connection: sa.Connection, author: Author, tenant: str, name: str, schema: Schema, keep_last: int | None = None) -> sa.Row:
    """Makes a policy and returns its locked row.

    Raises:
        UserError: the name is taken.
    """
    schema_id = schema_ids(connection, {schema.to_json()})[schema.to_json()]
    if connection.execute(_by_name(tenant, name)).first() is not None:
        raise UserError(f"policy {full_name(tenant, name)!r} exists already: choose another name")
    try:
        with connection.begin_nested():
            connection.execute(policies.insert(), new_row(author, tenant, name, schema, schema_id, keep_last))
    except exc.IntegrityError:  # made by another process in this moment
        raise UserError(f"policy {full_name(tenant, name)!r} exists already: choose another name") from None
    made = lock(connection, tenant, name)
    audit.append(connection, audit.row(author, "create", made, creation(made, keep_last)))
    return made


def creation(policy: Any, keep_last: int | None) -> dict[str, Any]:
    """What the audit log says of a policy when it is made: all that could reveal a changed row."""
    return {"policy": full_name(policy.tenant, policy.name), "schema": policy.json, "keep_last": keep_last}


def _by_name(tenant: str, name: str) -> sa.Select:
    return sa.select(policies, schemas.c.json).join(schemas).where(policies.c.tenant == tenant, policies.c.name == name)


def find(connection: sa.Connection, tenant: str, name: str) -> sa.Row:
    """A policy's row with its schema's text as ``json``.

    Raises:
        UserError: there is none.
    """
    found = connection.execute(_by_name(tenant, name)).first()
    if found is None:
        raise UserError(f"policy {full_name(tenant, name)!r} is not in the catalog: list the policies, or create it")
    return found


def lock(connection: sa.Connection, tenant: str, name: str, active: bool = False) -> sa.Row:
    """``find``, and no other transaction changes this policy until the transaction ends.

    Raises:
        UserError: there is none, or it is retired and must be ``active``.
    """
    found = connection.execute(_by_name(tenant, name).with_for_update(of=policies)).first()
    if found is None:
        return find(connection, tenant, name)  # for its message
    if active and found.state != "active":
        raise UserError(f"policy {full_name(tenant, name)!r} is retired: restore it first")
    return found


def touch(connection: sa.Connection, author: Author, policy: Any, **changes: Any) -> None:
    """Changes columns of a locked policy and stamps it."""
    changes["touched_at"] = max(author.now, policy.touched_at)
    connection.execute(policies.update().where(policies.c.id == policy.id).values(**changes))


def record(connection: sa.Connection, tenant: str, name: str) -> PolicyRecord:
    """The policy of that name."""
    return _records(connection, [find(connection, tenant, name)])[0]


def page(
    connection: sa.Connection, tenant: str | None, after: tuple[str, str] | None, limit: int, state: str | None, match: str = ""
) -> list[PolicyRecord]:
    """Policies ordered by tenant and name, those behind ``after``, whose name has ``match`` in it."""
    query = sa.select(policies, schemas.c.json).join(schemas).order_by(policies.c.tenant, policies.c.name).limit(limit)
    if tenant is not None:
        query = query.where(policies.c.tenant == tenant)
    if state is not None:
        query = query.where(policies.c.state == state)
    if match:
        query = query.where(policies.c.name.contains(match, autoescape=True))
    if after is not None:
        query = query.where(sa.tuple_(policies.c.tenant, policies.c.name) > sa.tuple_(*after))
    return _records(connection, list(connection.execute(query)))


def _records(connection: sa.Connection, rows: list[sa.Row]) -> list[PolicyRecord]:
    parents: dict[int, str] = {}
    for chunk in chunks([row.parent_revision for row in rows if row.parent_revision is not None]):
        query = sa.select(revisions.c.id, revisions.c.number, policies.c.tenant, policies.c.name)
        query = query.join(policies, revisions.c.policy_id == policies.c.id).where(revisions.c.id.in_(chunk))
        parents |= {row.id: f"{full_name(row.tenant, row.name)}@{row.number}" for row in connection.execute(query)}
    return [
        PolicyRecord(
            row.id,
            row.tenant,
            row.name,
            row.base,
            row.json,
            parents.get(row.parent_revision),
            row.state,
            row.keep_last,
            row.created_at,
            row.touched_at,
            row.last_number,
            row.session_number,
            row.session_owner,
            row.session_expires,
        )
        for row in rows
    ]


def _revisions(policy: sa.Row) -> sa.Select:
    return sa.select(revisions, payloads.c.length).join(payloads).where(revisions.c.policy_id == policy.id)


def as_revision(policy: Any, row: Any) -> Revision:
    """The record of a row of ``revisions`` with its payload's ``length``."""
    return Revision(
        row.id,
        full_name(policy.tenant, policy.name),
        row.number,
        row.step,
        row.digest.hex(),
        row.length,
        row.origin,
        row.pinned,
        row.state,
        row.created_at,
        None if row.sampling is None else json.loads(row.sampling),
    )


def revision_page(connection: sa.Connection, policy: sa.Row, after: int, limit: int) -> list[Revision]:
    """A policy's revisions by number, those above ``after``."""
    query = _revisions(policy).where(revisions.c.number > after).order_by(revisions.c.number).limit(limit)
    return [as_revision(policy, row) for row in connection.execute(query)]


def revision(connection: sa.Connection, policy: sa.Row, which: int | str, live: bool = False) -> sa.Row:
    """A revision of a policy: its number, an alias, a digest or a prefix of one, or a full name of this policy.

    Raises:
        UserError: there is none, several, or it is retired and must be ``live``.
    """
    mine = full_name(policy.tenant, policy.name)
    named = _within(policy, which)
    query = _revisions(policy)
    if named.number is not None:
        query = query.where(revisions.c.number == named.number)
    elif named.digest is not None:
        low, high = names.digest_range(named.digest)
        query = query.where(revisions.c.digest.between(low, high)).order_by(revisions.c.number.desc())
    else:
        query = query.join(aliases, aliases.c.revision_id == revisions.c.id)
        query = query.where(aliases.c.policy_id == policy.id, aliases.c.name == named.alias)
    found = list(connection.execute(query))
    if not found:
        raise UserError(
            f"policy {mine!r} has no revision {which if isinstance(which, int) else which[:80]}: list its revisions and aliases"
        )
    if len({row.digest for row in found}) > 1:
        raise UserError(f"{which!r} begins {len(found)} digests of policy {mine!r}: give more digits")
    if live and found[0].state != "live":
        raise UserError(f"revision {mine}@{found[0].number} is retired: restore it first, or choose another")
    return found[0]


def _within(policy: sa.Row, which: int | str) -> names.RevisionName:
    if not isinstance(which, str):
        which = names.whole("revision number", which, 1, 10**9)
        return names.RevisionName(policy.tenant, policy.name, number=which)
    if not ("@" in which or "/" in which):
        return names.parse_revision(which if names.is_digest(which) else f"p@{which}")
    named = names.parse_revision(which)
    if named.digest is None and (named.tenant, named.policy) != (policy.tenant, policy.name):
        raise UserError(f"revision {which[:80]!r} is not of policy {full_name(policy.tenant, policy.name)!r}: branch from it instead")
    return named


def set_state(connection: sa.Connection, author: Author, policy: sa.Row, state: str) -> None:
    """Retires or restores a policy."""
    if policy.state == state:
        return
    touch(connection, author, policy, state=state)
    audit.append(connection, audit.row(author, "retire" if state == "retired" else "restore", policy))


def set_revision_state(connection: sa.Connection, author: Author, policy: sa.Row, row: sa.Row, state: str) -> None:
    """Retires or restores a revision.

    Raises:
        UserError: an alias names the revision that is to retire.
    """
    if row.state == state:
        return
    if state == "retired":
        held = list(connection.scalars(sa.select(aliases.c.name).where(aliases.c.revision_id == row.id).order_by(aliases.c.name)))
        if held:
            mine = f"{full_name(policy.tenant, policy.name)}@{row.number}"
            raise UserError(f"revision {mine} is named by {', '.join(held)}: promote another or roll back first")
    connection.execute(revisions.update().where(revisions.c.id == row.id).values(state=state))
    touch(connection, author, policy)
    action = "retire revision" if state == "retired" else "restore revision"
    audit.append(connection, audit.row(author, action, policy, {"digest": row.digest.hex()}, before=row.number))


def set_pinned(connection: sa.Connection, author: Author, policy: sa.Row, row: sa.Row, pinned: bool) -> None:
    """Keeps a revision whatever retention says, or no longer."""
    if row.pinned == pinned:
        return
    connection.execute(revisions.update().where(revisions.c.id == row.id).values(pinned=pinned))
    touch(connection, author, policy)
    audit.append(connection, audit.row(author, "pin" if pinned else "unpin", policy, {"digest": row.digest.hex()}, before=row.number))


def set_keep_last(connection: sa.Connection, author: Author, policy: sa.Row, keep_last: int | None) -> None:
    """Changes a policy's retention."""
    _check_keep_last(keep_last)
    touch(connection, author, policy, keep_last=keep_last)
    audit.append(connection, audit.row(author, "keep_last", policy, {"before": policy.keep_last, "after": keep_last}))


def _check_keep_last(keep_last: int | None) -> None:
    if keep_last is not None:
        names.whole("keep_last (None keeps all revisions)", keep_last, 1, 10**9)
