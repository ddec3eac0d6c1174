"""Policies: made, found and listed; and what every kind of record stands on: a policy's row, found
or locked, and who changes it.
"""

import dataclasses
import getpass
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy import exc

from mint_jax.catalog.packed import Schema, schema_digest
from mint_jax.catalog.records import audit, names
from mint_jax.catalog.records.audit import Author
from mint_jax.catalog.records.database import Database, chunks, insert_new
from mint_jax.catalog.records.names import full_name
from mint_jax.catalog.records.tables import policies, policy_checksum, revisions, schemas, tags
from mint_jax.catalog.storage.payloads import PayloadStore
from mint_jax.errors import UserError

T = TypeVar("T")
DELETED = "deleted"
_SEAL = (
    policies.update()
    .where(policies.c.id == sa.bindparam("of"))
    .values(checksum=sa.bindparam("sum"))
)


@dataclasses.dataclass(frozen=True)
class PolicyRecord:
    """A trained behaviour over a base, by name.

    Attributes:
        base: fingerprint of the base.
        schema: JSON text of the schema its revisions have.
        parent: the revision it branched from, ``policy@number``.
        state: ``active``, ``retired`` or ``deleted``.
        keep_last: how many of the newest revisions retention keeps; None keeps all.
        revisions: revisions made so far, also those that retention removed: the last one's number.
        session_owner: who trains it now.
    """

    id: int
    tenant: str
    name: str
    base: str
    schema: str
    parent: str | None
    state: str
    keep_last: int | None
    created_at: float
    touched_at: float
    revisions: int
    session_number: int
    session_owner: str | None
    session_expires: float | None

    @property
    def policy(self) -> str:
        return full_name(self.tenant, self.name)


class Policies:
    """The part of ``Catalog`` that the files beside this one extend, one kind of record each.

    Args:
        database: opened already.
        store: the payloads.
        actor: who makes the changes, where a method's ``by`` says nothing.
        clock: seconds since 1970.
    """

    def __init__(
        self,
        database: Database,
        store: PayloadStore,
        actor: str | None = None,
        clock: Callable[[], float] = time.time,
    ):
        self.database, self.store = database, store
        self.actor = f"{_user()}@{socket.gethostname()}" if actor is None else actor
        self._clock = clock

    def _author(self, by: str | None = None, why: str = "") -> Author:
        return Author(self.actor if by is None else by, why, self._clock())

    def _look(self, policy: str, body: Callable[[Any, Any], T]) -> T:
        """``body(connection, its row)`` of a policy, in a transaction that reads."""
        key = names.parse_policy(policy)
        return self.database.read(lambda c: body(c, find(c, *key)))

    def _change(
        self,
        policy: str,
        body: Callable[[Any, Author, Any], T],
        by: str | None = None,
        why: str = "",
        active: bool = False,
    ) -> T:
        """``body(connection, author, its row)`` of a policy, in a transaction that writes; the row
        is locked.

        Args:
            active: refuse a retired policy.
        """
        key, author = names.parse_policy(policy), self._author(by, why)
        return self.database.write(lambda c: body(c, author, lock(c, *key, active=active)))

    def create_policy(
        self,
        name: str,
        schema: Schema,
        *,
        keep_last: int | None = None,
        by: str | None = None,
        why: str = "",
    ) -> PolicyRecord:
        """Makes a policy whose revisions will have ``schema``.

        Args:
            name: ``name`` or ``tenant/name``.
            keep_last: how many of the newest revisions ``gc`` keeps; None keeps all.

        Raises:
            UserError: the name is taken or not allowed.
        """
        key, author = names.parse_policy(name), self._author(by, why)

        def body(connection: sa.Connection) -> PolicyRecord:
            create(connection, author, *key, schema, keep_last)
            return record(connection, *key)

        return self.database.write(body)

    def policy(self, name: str) -> PolicyRecord:
        """A policy's record."""
        key = names.parse_policy(name)
        return self.database.read(lambda c: record(c, *key))

    def policies(
        self,
        tenant: str | None = None,
        after: str | None = None,
        limit: int = 100,
        state: str | None = None,
        match: str = "",
        tagged: Mapping[str, str] | None = None,
    ) -> list[PolicyRecord]:
        """A page of policies in the order of tenant and name; the next page begins ``after`` the
        last one's ``policy``.

        Args:
            state: only policies of this state; None: all but deleted ones.
            match: only policies whose name has this in it.
            tagged: only policies that have all these tags.
        """
        query = (
            sa.select(policies, schemas.c.json)
            .join(schemas)
            .order_by(policies.c.tenant, policies.c.name)
            .limit(limit)
        )
        if tenant is not None:
            query = query.where(policies.c.tenant == tenant)
        query = query.where(
            policies.c.state != DELETED if state is None else policies.c.state == state
        )
        if match:
            query = query.where(policies.c.name.contains(match, autoescape=True))
        for key, value in (tagged or {}).items():
            mine = (
                tags.c.policy_id == policies.c.id,
                tags.c.number == 0,
                tags.c.key == key,
                tags.c.value == value,
            )
            query = query.where(sa.exists().where(*mine))
        if after is not None:
            query = query.where(
                sa.tuple_(policies.c.tenant, policies.c.name)
                > sa.tuple_(*names.parse_policy(after))
            )
        return self.database.read(lambda c: _records(c, list(c.execute(query))))

    def branches(
        self, policy: str, tenant: str | None = None, limit: int = 100
    ) -> list[PolicyRecord]:
        """Policies that branched from a revision of this one, by name; those of one tenant, or of
        all.
        """

        def body(connection: sa.Connection, row: sa.Row) -> list[PolicyRecord]:
            mine = sa.select(revisions.c.id).where(revisions.c.policy_id == row.id)
            query = sa.select(policies, schemas.c.json).join(schemas)
            query = query.where(policies.c.parent_revision.in_(mine), policies.c.state != DELETED)
            if tenant is not None:
                query = query.where(policies.c.tenant == tenant)
            return _records(
                connection,
                list(
                    connection.execute(
                        query.order_by(policies.c.tenant, policies.c.name).limit(limit)
                    )
                ),
            )

        return self._look(policy, body)

    def rename(
        self, policy: str, name: str, *, by: str | None = None, why: str = ""
    ) -> PolicyRecord:
        """Gives a policy another name of the same tenant; the old one no longer resolves, and is
        free.

        Raises:
            UserError: the name is taken, or the policy is being trained: the job would not find it
                again.
        """
        tenant, key = names.parse_policy(policy)
        if "/" not in name:
            name = full_name(tenant, name)
        other, fresh = names.parse_policy(name)
        if other != tenant:
            raise UserError(
                f"policy {policy!r} is of tenant {tenant!r} and {name!r} of {other!r}: branch from"
                " it there instead"
            )

        def body(connection: sa.Connection, author: Author, row: sa.Row) -> PolicyRecord:
            refuse_trained(author, row)
            if fresh != key:
                taken = f"policy {full_name(tenant, fresh)!r} exists already: choose another name"
                if connection.execute(_by_name(tenant, fresh)).first() is not None:
                    raise UserError(taken)
                try:
                    with connection.begin_nested():
                        touch(connection, author, row, name=fresh)
                except exc.IntegrityError:  # made by another process in this moment
                    raise UserError(taken) from None
                details = {"before": full_name(tenant, key), "after": full_name(tenant, fresh)}
                audit.append(connection, audit.row(author, "rename", row, details))
            return record(connection, tenant, fresh)

        return self._change(policy, body, by, why)


def schema_ids(connection: sa.Connection, texts: set[str]) -> dict[str, int]:
    """Ids of schemas by their text; new ones are added."""
    digests = {schema_digest(text): text for text in sorted(texts)}
    query = sa.select(schemas.c.digest, schemas.c.id).where(schemas.c.digest.in_(list(digests)))
    found = {digests[digest]: number for digest, number in connection.execute(query)}
    if len(found) < len(texts):
        insert_new(
            connection,
            schemas,
            [
                {"digest": digest, "json": text}
                for digest, text in digests.items()
                if text not in found
            ],
        )
        found = {digests[digest]: number for digest, number in connection.execute(query)}
    return found


def new_row(
    author: Author,
    tenant: str,
    name: str,
    schema: Schema,
    schema_id: int,
    keep_last: int | None = None,
) -> dict[str, Any]:
    """The values of a policy that has no revision yet."""
    check_keep_last(keep_last)
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


def create(
    connection: sa.Connection,
    author: Author,
    tenant: str,
    name: str,
    schema: Schema,
    keep_last: int | None = None,
) -> sa.Row:
    """Makes a policy and returns its locked row.

    Raises:
        UserError: the name is taken.
    """
    schema_id = schema_ids(connection, {schema.to_json()})[schema.to_json()]
    if connection.execute(_by_name(tenant, name)).first() is not None:
        raise UserError(f"policy {full_name(tenant, name)!r} exists already: choose another name")
    try:
        with connection.begin_nested():
            values = new_row(author, tenant, name, schema, schema_id, keep_last)
            made_id = connection.execute(
                policies.insert().returning(policies.c.id), values
            ).scalar_one()
    except exc.IntegrityError:  # made by another process in this moment
        raise UserError(
            f"policy {full_name(tenant, name)!r} exists already: choose another name"
        ) from None
    seal(connection, [(made_id, tenant, name)])
    made = lock(connection, tenant, name)
    audit.append(connection, audit.row(author, "create", made, creation(made, keep_last)))
    return made


def seal(connection: sa.Connection, made: Sequence[tuple[int, str, str]]) -> None:
    """Enters the checksums of new policies: id, tenant and name of each."""
    if made:
        connection.execute(
            _SEAL,
            [
                {"of": number, "sum": policy_checksum(number, tenant, name)}
                for number, tenant, name in made
            ],
        )


def creation(policy: Any, keep_last: int | None) -> dict[str, Any]:
    """What the audit log says of a policy when it is made: all that could reveal a changed row."""
    return {
        "policy": full_name(policy.tenant, policy.name),
        "schema": policy.json,
        "keep_last": keep_last,
    }


def _by_name(tenant: str, name: str) -> sa.Select:
    return (
        sa.select(policies, schemas.c.json)
        .join(schemas)
        .where(policies.c.tenant == tenant, policies.c.name == name)
    )


def find(connection: sa.Connection, tenant: str, name: str) -> sa.Row:
    """A policy's row with its schema's text as ``json``.

    Raises:
        UserError: there is none.
    """
    found = connection.execute(_by_name(tenant, name)).first()
    if found is None:
        raise UserError(
            f"policy {full_name(tenant, name)!r} is not in the catalog: list the policies, or"
            " create it"
        )
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


def refuse_trained(author: Author, policy: Any) -> None:
    """Raises where a session is open on a locked policy. One that has expired is a job's that was
    killed; it is fenced off by name.
    """
    if policy.session_owner is not None and author.now < policy.session_expires:
        mine = full_name(policy.tenant, policy.name)
        raise UserError(
            f"policy {mine!r} is being trained by {policy.session_owner!r}: end that job, or close"
            " its session, first"
        )


def touch(connection: sa.Connection, author: Author, policy: Any, **changes: Any) -> None:
    """Changes columns of a locked policy and stamps it."""
    changes["touched_at"] = max(author.now, policy.touched_at)
    if "name" in changes:
        changes["checksum"] = policy_checksum(policy.id, policy.tenant, changes["name"])
    connection.execute(policies.update().where(policies.c.id == policy.id).values(**changes))


def record(connection: sa.Connection, tenant: str, name: str) -> PolicyRecord:
    """The policy of that name."""
    return _records(connection, [find(connection, tenant, name)])[0]


def _records(connection: sa.Connection, rows: list[sa.Row]) -> list[PolicyRecord]:
    parents: dict[int, str] = {}
    for chunk in chunks([row.parent_revision for row in rows if row.parent_revision is not None]):
        query = sa.select(revisions.c.id, revisions.c.number, policies.c.tenant, policies.c.name)
        query = query.join(policies, revisions.c.policy_id == policies.c.id).where(
            revisions.c.id.in_(chunk)
        )
        parents |= {
            row.id: f"{full_name(row.tenant, row.name)}@{row.number}"
            for row in connection.execute(query)
        }
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


def check_keep_last(keep_last: int | None) -> None:
    """Raises unless it is None or a positive number."""
    if keep_last is not None:
        names.whole("keep_last (None keeps all revisions)", keep_last, 1, 10**9)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return str(os.getuid())
