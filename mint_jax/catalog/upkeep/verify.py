"""Verification: what is damaged, in payloads, packs and the database, and which revisions that concerns.

Damage is named where it is: a flipped bit in one payload concerns the revisions with these bytes and no others.
"""

import dataclasses
from collections.abc import Callable, Iterator

import sqlalchemy as sa

from mint_jax.catalog.packed import schema_digest, unpack
from mint_jax.catalog.records.database import UNREADABLE, Database
from mint_jax.catalog.records.exports import is_finite
from mint_jax.catalog.records.lookup import Resolved
from mint_jax.catalog.records.names import full_name
from mint_jax.catalog.records.tables import packs, payloads, policies, revisions, rollouts, schemas
from mint_jax.catalog.storage.payloads import PayloadStore, Place
from mint_jax.catalog.upkeep import audit_check, lost_commits
from mint_jax.errors import UserError

PAGE = 500


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something damaged.

    Attributes:
        kind: ``payload``, ``pack``, ``alias``, ``revision``, ``policy`` or ``database``.
        what: the damage, in words.
        digest: of the damaged payload.
        revisions: ``policy@number`` of every revision it concerns.
    """

    kind: str
    what: str
    digest: str | None = None
    revisions: tuple[str, ...] = ()


def verify_one(database: Database, store: PayloadStore, found: Resolved) -> Iterator[Finding]:
    """Checks the bytes of one revision."""
    damage = _payload_damage(store, found.place, found.digest, found.schema, found.finite)
    if damage is not None:
        yield Finding("payload", damage, found.digest, database.read(lambda c: _concerned(c, bytes.fromhex(found.digest))))


def verify_all(database: Database, store: PayloadStore, progress: Callable[[int, int], None] | None = None) -> Iterator[Finding]:
    """Checks the database's file, its rows against the audit log, every pack's index and every payload's bytes. Reads all of it once.

    Args:
        progress: called with payloads and bytes checked so far.
    """
    for check in (_file_damage, _lost_commits, _replay_log, _schema_damage, _unplaced):
        yield from _told(check(database))
    yield from _told(_verify_packs(database, store, progress))


def _told(findings: Iterator[Finding]) -> Iterator[Finding]:
    """Where rows cannot even be read, that is a finding too, and the next check goes on."""
    try:
        yield from findings
    except UserError as error:
        yield Finding("database", str(error))
    except UNREADABLE as error:  # a value of a kind that no writer makes
        yield Finding("database", f"a row cannot be read: {type(error).__name__}: {str(error)[:200]}")


def _verify_packs(database: Database, store: PayloadStore, progress: Callable[[int, int], None] | None) -> Iterator[Finding]:
    last = count = size = 0

    def checked(length: int) -> None:
        nonlocal count, size
        count, size = count + 1, size + length
        if progress is not None:
            progress(count, size)

    while some := database.read(lambda c, last=last: _packs(c, last)):
        for pack in some:
            yield from _told(_verify_pack(database, store, pack, checked))
        if not isinstance(some[-1].id, int) or some[-1].id <= last:
            yield Finding("database", f"packs are not in the order of their ids behind id {last}: the table is damaged")
            return
        last = some[-1].id


def _packs(connection: sa.Connection, after: int) -> list[sa.Row]:
    query = sa.select(packs).where(packs.c.state == "live", packs.c.id > after)
    return list(connection.execute(query.order_by(packs.c.id).limit(PAGE)))


def _verify_pack(database: Database, store: PayloadStore, pack: sa.Row, checked: Callable[[int], None]) -> Iterator[Finding]:
    query = sa.select(payloads, schemas.c.json).outerjoin(schemas).where(payloads.c.pack_id == pack.id).order_by(payloads.c.offset)
    rows = database.read(lambda c: list(c.execute(query)))
    if not rows:
        return
    try:
        index = dict(store.index(pack.name))
    except UserError as error:
        yield Finding("pack", f"the index of pack {pack.name} cannot be read: {error}")
        index = None
    for row in rows:
        place, digest = Place(pack.name, row.offset, row.length), row.digest.hex()
        damage = _payload_damage(store, place, digest, row.json, bool(row.finite))
        checked(row.length)
        if damage is None and index is not None and index.get(digest) != place:
            damage = f"pack {pack.name} has it at {index.get(digest)}, the database at {place}"
        # It may have been moved or removed since the rows were read.
        if damage is not None and database.read(lambda c, row=row: _still(c, row)):
            yield Finding("payload", damage, digest, database.read(lambda c, row=row: _concerned(c, row.digest)))


def _still(connection: sa.Connection, row: sa.Row) -> bool:
    query = sa.select(payloads.c.digest).where(payloads.c.digest == row.digest, payloads.c.pack_id == row.pack_id)
    return connection.execute(query).first() is not None


def _payload_damage(store: PayloadStore, place: Place, digest: str, schema: str | None, finite: bool) -> str | None:
    try:
        data = store.read(place, digest)
        if schema is not None and unpack(data)[1].to_json() != schema:
            return f"revision {digest[:12]} has another schema than the database says"
        if finite and schema is not None and not is_finite(data, schema):
            return f"revision {digest[:12]} has NaN or infinite weights, and the database says that it has none"
    except UserError as error:
        return str(error)
    return None


def _concerned(connection: sa.Connection, digest: bytes) -> tuple[str, ...]:
    query = sa.select(policies.c.tenant, policies.c.name, revisions.c.number)
    query = query.join_from(policies, revisions, revisions.c.policy_id == policies.c.id).where(revisions.c.digest == digest)
    return tuple(sorted(f"{full_name(row.tenant, row.name)}@{row.number}" for row in connection.execute(query)))


def _file_damage(database: Database) -> Iterator[Finding]:
    for line in database.damage():
        yield Finding("database", f"{'SQLite' if database.sqlite else 'PostgreSQL'} says: {line}")
    if database.sqlite:
        for table, row_id, parent, _ in database.read(lambda c: c.exec_driver_sql("PRAGMA foreign_key_check").fetchall()):
            yield Finding("database", f"row {row_id} of {table} names a row of {parent} that is not there")


def _lost_commits(database: Database) -> Iterator[Finding]:
    for what in database.read(lost_commits.report):
        yield Finding("database", what)


def _replay_log(database: Database) -> Iterator[Finding]:
    last = -1
    while True:
        found, after = database.snapshot(lambda c, last=last: audit_check.contradictions(c, last))
        for kind, name, what in found:
            yield Finding(kind, what, None, (name,) if kind == "revision" else ())
        if after is None:
            return
        if not isinstance(after, int) or after <= last:
            yield Finding("database", f"policies are not in the order of their ids behind id {last}: the table is damaged")
            return
        last = after


def _schema_damage(database: Database) -> Iterator[Finding]:
    for name, text, digest in database.read(_schemas):
        if schema_digest(text) != digest:
            yield Finding("database", f"schema {name} is not what its digest says")


def _schemas(connection: sa.Connection) -> list[tuple[int, str, bytes]]:
    return [tuple(row) for row in connection.execute(sa.select(schemas.c.id, schemas.c.json, schemas.c.digest))]


def _unplaced(database: Database) -> Iterator[Finding]:
    """Revisions and rollouts whose bytes' place no record names."""
    place = sa.or_(packs.c.id.is_(None), packs.c.state != "live")
    whose = (policies.c.tenant, policies.c.name)
    query = sa.select(*whose, revisions.c.number, revisions.c.digest).join_from(policies, revisions, revisions.c.policy_id == policies.c.id)
    query = query.outerjoin(payloads, payloads.c.digest == revisions.c.digest).outerjoin(packs, packs.c.id == payloads.c.pack_id)
    query = query.outerjoin(schemas, schemas.c.id == payloads.c.schema_id).where(sa.or_(place, schemas.c.id.is_(None)))
    for row in database.read(lambda c: list(c.execute(query.order_by(revisions.c.id)))):
        name = f"{full_name(row.tenant, row.name)}@{row.number}"
        what = f"revision {name} has lost its payload's or its schema's row, or the place of its bytes"
        yield Finding("revision", what, row.digest.hex(), (name,))
    query = sa.select(*whose, rollouts.c.step, rollouts.c.digest).join_from(policies, rollouts, rollouts.c.policy_id == policies.c.id)
    query = (
        query.outerjoin(payloads, payloads.c.digest == rollouts.c.digest).outerjoin(packs, packs.c.id == payloads.c.pack_id).where(place)
    )
    for row in database.read(lambda c: list(c.execute(query.order_by(rollouts.c.id)))):
        what = f"the rollout of {full_name(row.tenant, row.name)} at step {row.step} has lost its payload's row, or the place of its bytes"
        yield Finding("payload", what, row.digest.hex())
