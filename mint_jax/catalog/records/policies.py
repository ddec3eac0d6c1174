"""Policies: created, listed, retired, deleted, and how many revisions they keep."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Unpack

import sqlalchemy as sa

from mint_jax.catalog.packed import Schema, schema_digest
from mint_jax.catalog.records import audit, lookup, names
from mint_jax.catalog.records.audit import Author, Signed
from mint_jax.catalog.records.database import dialect_insert, insert_new
from mint_jax.catalog.records.handle import POLICIES, Change, Handle, lock
from mint_jax.catalog.records.names import full_name
from mint_jax.catalog.records.tables import (
    aliases,
    as_record,
    canaries,
    checkpoints,
    descriptions,
    leases,
    policies,
    revisions,
    rollouts,
    schemas,
    tags,
)
from mint_jax.errors import UserError

DELETED = "deleted"


@dataclasses.dataclass(frozen=True)
class PolicyRecord:
    """A named sequence of adapter revisions over one base."""

    id: int
    tenant: str
    name: str
    base: str  # fingerprint of the base
    schema: str  # JSON text of the revisions' schema
    state: str  # ``active``, ``retired`` or ``deleted``
    keep_last: int | None  # number of newest revisions that retention keeps; None keeps all
    created_at: float
    touched_at: float
    revisions: int  # number of the last revision, removed ones included
    session_number: int
    session_owner: str | None  # owner of the open training session
    session_expires: float | None
    stand_in: str | None  # digest of the revision that answers while another one is loaded

    @property
    def policy(self) -> str:
        """The full name."""
        return full_name(self.tenant, self.name)


def create_policy(
    catalog: Handle,
    name: str,
    schema: Schema,
    *,
    keep_last: int | None = None,
    **signed: Unpack[Signed],
) -> PolicyRecord:
    """Creates a policy whose revisions have ``schema``. Raises ``UserError``: the name is taken or
    not allowed.

    Args:
        name: ``name`` or ``tenant/name``.
        keep_last: number of newest revisions that ``gc`` keeps; None keeps all.
    """
    key, author = names.parse_policy(name), catalog.author(**signed)

    def body(connection: sa.Connection) -> PolicyRecord:
        if not insert(connection, author, {key: schema.to_json()}, keep_last):
            raise UserError(f"policy {full_name(*key)!r} exists already: choose another name")
        return record_of(lock(connection, *key))

    return catalog.database.write(body)


def policy(catalog: Handle, name: str) -> PolicyRecord:
    """Returns a policy's record."""
    return catalog.look(name, lambda _, row: record_of(row))


def list_policies(
    catalog: Handle,
    tenant: str | None = None,
    after: str | None = None,
    limit: int = 100,
    state: str | None = None,
    match: str = "",
    tagged: Mapping[str, str] | None = None,
) -> list[PolicyRecord]:
    """Returns a page of policies by tenant and name; the next page starts ``after`` the last one's
    ``policy``.

    Args:
        state: only policies of this state; None: all but deleted ones.
        match: only policies whose name contains this text.
        tagged: only policies with all these tags.
    """
    query = POLICIES.order_by(policies.c.tenant, policies.c.name).limit(limit)
    query = query.where(policies.c.state != DELETED if state is None else policies.c.state == state)
    if tenant is not None:
        query = query.where(policies.c.tenant == tenant)
    if match:
        query = query.where(policies.c.name.contains(match, autoescape=True))
    for key, value in (tagged or {}).items():
        found = (tags.c.policy_id == policies.c.id, tags.c.number == 0, tags.c.key == key)
        query = query.where(sa.exists().where(*found, tags.c.value == value))
    if after is not None:
        last = sa.tuple_(*names.parse_policy(after))
        query = query.where(sa.tuple_(policies.c.tenant, policies.c.name) > last)
    return catalog.database.read(lambda c: [record_of(row) for row in c.execute(query)])


def keep_last(
    catalog: Handle, policy: str, keep_last: int | None, **signed: Unpack[Signed]
) -> None:
    """Sets the number of newest revisions that ``gc`` keeps; None keeps all."""
    _check_keep_last(keep_last)

    def body(change: Change) -> None:
        details = {"before": change.policy.keep_last, "after": keep_last}
        change.record("keep_last", details, keep_last=keep_last)

    catalog.change(policy, body, **signed)


def delete(catalog: Handle, policy: str, **signed: Unpack[Signed]) -> None:
    """Removes a retired policy: its revisions, aliases, tags, checkpoints' and rollouts' records.
    ``gc`` then frees the bytes that nothing else refers to. The name is free again; the audit log
    and the evaluations stay. Raises ``UserError``: the policy is not retired, is being trained, or
    one of its revisions is leased.
    """

    def body(change: Change) -> None:
        (connection, author, row), full = change, change.full
        if row.state != "retired":
            raise UserError(f"policy {full!r} is {row.state}: retire it first")
        if row.session_owner is not None and author.now < row.session_expires:
            raise UserError(
                f"policy {full!r} is being trained by {row.session_owner!r}: end that job, or"
                " close its session, first"
            )
        own = revisions.c.policy_id == row.id
        query = sa.select(revisions.c.number, leases.c.owner).order_by(revisions.c.number)
        query = query.join(leases, leases.c.digest == revisions.c.digest)
        leased = connection.execute(query.where(own, leases.c.expires_at > author.now)).first()
        if leased is not None:
            raise UserError(
                f"revision {full}@{leased.number} is leased by {leased.owner!r}: policy {full!r}"
                " cannot be deleted yet"
            )
        query = sa.select(revisions.c.number, revisions.c.digest).where(own)
        found = connection.execute(query.order_by(revisions.c.number)).all()
        for table in (aliases, canaries, descriptions, tags, checkpoints, rollouts, revisions):
            connection.execute(table.delete().where(table.c.policy_id == row.id))
        details: dict[str, Any] = {"policy": full, "revisions": [one.number for one in found]}
        details["digests"] = [one.digest.hex() for one in found]
        free = f"{row.name}@{DELETED}-{row.id}"
        change.record("delete", details, state=DELETED, name=free)

    catalog.change(policy, body, **signed)


def schema_ids(connection: sa.Connection, texts: set[str]) -> dict[str, int]:
    """Returns the ids of schemas by their text, adding new ones."""
    digests = {schema_digest(text): text for text in sorted(texts)}
    query = sa.select(schemas.c.digest, schemas.c.id).where(schemas.c.digest.in_(list(digests)))
    found = {digests[digest]: number for digest, number in connection.execute(query)}
    if len(found) < len(texts):
        new = [{"digest": d, "json": text} for d, text in digests.items() if text not in found]
        insert_new(connection, schemas, new)
        found = {digests[digest]: number for digest, number in connection.execute(query)}
    return found


def insert(
    connection: sa.Connection,
    author: Author,
    wanted: Mapping[tuple[str, str], str],
    keep_last: int | None = None,
) -> set[tuple[str, str]]:
    """Creates policies with their audit entries; returns those that did not exist. ``wanted``: text
    of the schema, by tenant and name.
    """
    _check_keep_last(keep_last)
    ids = schema_ids(connection, set(wanted.values()))
    new = {"state": "active", "keep_last": keep_last, "last_number": 0, "session_number": 0}
    new |= {"created_at": author.now, "touched_at": author.now}
    rows = []
    for (tenant, name), text in wanted.items():
        about = {"base": read_schema(text).base, "schema_id": ids[text]}
        rows.append({"tenant": tenant, "name": name, **about, **new})
    statement = dialect_insert(connection, policies).on_conflict_do_nothing()
    columns = (policies.c.id, policies.c.tenant, policies.c.name, policies.c.touched_at)
    made, entries = set(), []
    for row in connection.execute(statement.returning(*columns), rows):
        key = (row.tenant, row.name)
        about = {"policy": full_name(*key), "schema": wanted[key], "keep_last": keep_last}
        entries.append(audit.row(author, "create", row, about))
        made.add(key)
    audit.append(connection, *entries)
    return made


@functools.lru_cache(1024)
def read_schema(text: str) -> Schema:
    """Parses a schema."""
    return Schema.from_json(text)


def record_of(row: sa.Row) -> PolicyRecord:
    """Returns the record of a row selected with its schema's ``json``."""
    return as_record(PolicyRecord, row, schema=row.json, revisions=row.last_number)


def stand_in(
    catalog: Handle, policy: str, revision: str | None, **signed: Unpack[Signed]
) -> str | None:
    """Names the revision, of any policy of the same tenant and base, that answers requests for a
    revision of the policy while that is loaded; returns its digest. None: requests wait.

    Raises ``UserError``: there is no such live revision, or it is of another tenant or base.
    """
    tenant, _ = names.parse_policy(policy)
    found = None if revision is None else lookup.resolve(catalog, revision, tenant)
    digest = None if found is None else found.digest

    def body(change: Change) -> None:
        if (
            found is not None
            and (base := Schema.from_json(found.schema).base) != change.policy.base
        ):
            raise UserError(
                f"revision {revision!r} is of base {base[:12]}, and {change.full!r} of"
                f" {change.policy.base[:12]}: choose a revision of the same base"
            )
        details = {"stand_in": digest, "named": revision}
        column = None if digest is None else bytes.fromhex(digest)
        change.record("stand in", details, stand_in=column)

    catalog.change(policy, body, **signed, active=True)
    return digest


def _check_keep_last(keep_last: int | None) -> None:
    """Raises ``UserError`` unless it is None or a positive number."""
    if keep_last is not None:
        names.whole("keep_last (None keeps all revisions)", keep_last, 1, 10**9)
