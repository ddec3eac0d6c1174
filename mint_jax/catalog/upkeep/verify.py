"""Verification: what is damaged, in payloads, packs and the database, and which revisions that
concerns.

Damage is named where it is: a flipped bit in one payload concerns the revisions with these bytes
and no others.

The audit log records every change of what a name stands for and of what retention may remove, so
each fact is in the database twice: what each policy, its revisions and its aliases must be is held
against what their rows say, and a row that was changed by anything but the catalog is found
whichever of the two it is.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any

import sqlalchemy as sa

from mint_jax.catalog.packed import schema_digest, unpack
from mint_jax.catalog.records.database import UNREADABLE, Database
from mint_jax.catalog.records.exports import is_finite
from mint_jax.catalog.records.lookup import Resolved
from mint_jax.catalog.records.names import full_name
from mint_jax.catalog.records.policies import DELETED
from mint_jax.catalog.records.tables import (
    alias_checksum,
    aliases,
    audit,
    packs,
    payloads,
    policies,
    policy_checksum,
    revision_checksum,
    revisions,
    rollouts,
    schemas,
    tags,
)
from mint_jax.catalog.storage.payloads import PayloadStore, Place
from mint_jax.catalog.upkeep.recovery import lost_commits
from mint_jax.errors import UserError

PAGE = 500  # packs at a time
POLICIES = 200  # at a time, with all entries of the audit log about them


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
        yield Finding(
            "payload",
            damage,
            found.digest,
            database.read(lambda c: _concerned(c, bytes.fromhex(found.digest))),
        )


def verify_all(
    database: Database, store: PayloadStore, progress: Callable[[int, int], None] | None = None
) -> Iterator[Finding]:
    """Checks the database's file, its rows against the audit log, every pack's index and every
    payload's bytes. Reads all of it once.

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
        yield Finding(
            "database", f"a row cannot be read: {type(error).__name__}: {str(error)[:200]}"
        )


def _verify_packs(
    database: Database, store: PayloadStore, progress: Callable[[int, int], None] | None
) -> Iterator[Finding]:
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
            yield Finding(
                "database",
                f"packs are not in the order of their ids behind id {last}: the table is damaged",
            )
            return
        last = some[-1].id


def _packs(connection: sa.Connection, after: int) -> list[sa.Row]:
    query = sa.select(packs).where(packs.c.state == "live", packs.c.id > after)
    return list(connection.execute(query.order_by(packs.c.id).limit(PAGE)))


def _verify_pack(
    database: Database, store: PayloadStore, pack: sa.Row, checked: Callable[[int], None]
) -> Iterator[Finding]:
    query = (
        sa.select(payloads, schemas.c.json)
        .outerjoin(schemas)
        .where(payloads.c.pack_id == pack.id)
        .order_by(payloads.c.offset)
    )
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
            yield Finding(
                "payload",
                damage,
                digest,
                database.read(lambda c, row=row: _concerned(c, row.digest)),
            )


def _still(connection: sa.Connection, row: sa.Row) -> bool:
    query = sa.select(payloads.c.digest).where(
        payloads.c.digest == row.digest, payloads.c.pack_id == row.pack_id
    )
    return connection.execute(query).first() is not None


def _payload_damage(
    store: PayloadStore, place: Place, digest: str, schema: str | None, finite: bool
) -> str | None:
    try:
        data = store.read(place, digest)
        if schema is not None and unpack(data)[1].to_json() != schema:
            return f"revision {digest[:12]} has another schema than the database says"
        if finite and schema is not None and not is_finite(data, schema):
            return (
                f"revision {digest[:12]} has NaN or infinite weights, and the database says that it"
                " has none"
            )
    except UserError as error:
        return str(error)
    return None


def _concerned(connection: sa.Connection, digest: bytes) -> tuple[str, ...]:
    query = sa.select(policies.c.tenant, policies.c.name, revisions.c.number)
    query = query.join_from(policies, revisions, revisions.c.policy_id == policies.c.id).where(
        revisions.c.digest == digest
    )
    return tuple(
        sorted(
            f"{full_name(row.tenant, row.name)}@{row.number}" for row in connection.execute(query)
        )
    )


def _file_damage(database: Database) -> Iterator[Finding]:
    for line in database.damage():
        yield Finding("database", f"{'SQLite' if database.sqlite else 'PostgreSQL'} says: {line}")
    if database.sqlite:
        for table, row_id, parent, _ in database.read(
            lambda c: c.exec_driver_sql("PRAGMA foreign_key_check").fetchall()
        ):
            yield Finding(
                "database", f"row {row_id} of {table} names a row of {parent} that is not there"
            )


def _lost_commits(database: Database) -> Iterator[Finding]:
    for what in database.read(lost_commits):
        yield Finding("database", what)


def _replay_log(database: Database) -> Iterator[Finding]:
    last = -1
    while True:
        found, after = database.snapshot(lambda c, last=last: _contradictions(c, last))
        for kind, name, what in found:
            yield Finding(kind, what, None, (name,) if kind == "revision" else ())
        if after is None:
            return
        if not isinstance(after, int) or after <= last:
            yield Finding(
                "database",
                f"policies are not in the order of their ids behind id {last}: the table is"
                " damaged",
            )
            return
        last = after


def _schema_damage(database: Database) -> Iterator[Finding]:
    for name, text, digest in database.read(_schemas):
        if schema_digest(text) != digest:
            yield Finding("database", f"schema {name} is not what its digest says")


def _schemas(connection: sa.Connection) -> list[tuple[int, str, bytes]]:
    return [
        tuple(row)
        for row in connection.execute(sa.select(schemas.c.id, schemas.c.json, schemas.c.digest))
    ]


def _unplaced(database: Database) -> Iterator[Finding]:
    """Revisions and rollouts whose bytes' place no record names."""
    place = sa.or_(packs.c.id.is_(None), packs.c.state != "live")
    whose = (policies.c.tenant, policies.c.name)
    query = sa.select(*whose, revisions.c.number, revisions.c.digest).join_from(
        policies, revisions, revisions.c.policy_id == policies.c.id
    )
    query = query.outerjoin(payloads, payloads.c.digest == revisions.c.digest).outerjoin(
        packs, packs.c.id == payloads.c.pack_id
    )
    query = query.outerjoin(schemas, schemas.c.id == payloads.c.schema_id).where(
        sa.or_(place, schemas.c.id.is_(None))
    )
    for row in database.read(lambda c: list(c.execute(query.order_by(revisions.c.id)))):
        name = f"{full_name(row.tenant, row.name)}@{row.number}"
        what = (
            f"revision {name} has lost its payload's or its schema's row, or the place of its bytes"
        )
        yield Finding("revision", what, row.digest.hex(), (name,))
    query = sa.select(*whose, rollouts.c.step, rollouts.c.digest).join_from(
        policies, rollouts, rollouts.c.policy_id == policies.c.id
    )
    query = (
        query.outerjoin(payloads, payloads.c.digest == rollouts.c.digest)
        .outerjoin(packs, packs.c.id == payloads.c.pack_id)
        .where(place)
    )
    for row in database.read(lambda c: list(c.execute(query.order_by(rollouts.c.id)))):
        what = (
            f"the rollout of {full_name(row.tenant, row.name)} at step {row.step} has lost its"
            " payload's row, or the place of its bytes"
        )
        yield Finding("payload", what, row.digest.hex())


Contradiction = tuple[str, str, str]


def _contradictions(
    connection: sa.Connection, after: int
) -> tuple[list[Contradiction], int | None]:
    """What does not agree in a page of policies, those with ids above ``after``. The connection
    must see one moment.

    Returns:
        Each as ``policy``, ``revision`` or ``alias``; which one by name; and in words. And where
        the next page begins.
    """
    query = (
        sa.select(policies, schemas.c.json)
        .outerjoin(schemas)
        .where(policies.c.id > after)
        .order_by(policies.c.id)
        .limit(POLICIES)
    )
    page = list(connection.execute(query))
    within = [row.id for row in page]
    log = _grouped(
        connection, sa.select(audit).where(audit.c.policy_id.in_(within)).order_by(audit.c.id)
    )
    query = sa.select(revisions, schemas.c.digest.label("schema_digest")).outerjoin(
        payloads, payloads.c.digest == revisions.c.digest
    )
    query = query.outerjoin(schemas, schemas.c.id == payloads.c.schema_id).where(
        revisions.c.policy_id.in_(within)
    )
    held = _grouped(connection, query.order_by(revisions.c.number))
    query = sa.select(
        aliases, revisions.c.number, revisions.c.digest, revisions.c.policy_id.label("owner")
    ).outerjoin(revisions)
    named = _grouped(
        connection, query.where(aliases.c.policy_id.in_(within)).order_by(aliases.c.name)
    )
    tagged = _grouped(
        connection,
        sa.select(tags).where(tags.c.policy_id.in_(within)).order_by(tags.c.number, tags.c.key),
    )
    found = []
    for policy in page:
        try:
            rows = (of.get(policy.id, []) for of in (log, held, named, tagged))
            found += list(_of_policy(policy, *rows))
        except (
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
        ) as error:  # a value that no writer makes, such as a null number
            what = (
                f"the rows of policy {policy.id} cannot be read against the audit log"
                f" ({type(error).__name__}: {str(error)[:80]})"
            )
            found.append(("policy", str(policy.name), what))
    return found, page[-1].id if page else None


def _grouped(connection: sa.Connection, query: sa.Select) -> dict[int, list[sa.Row]]:
    found: dict[int, list[sa.Row]] = {}
    for row in connection.execute(query):
        found.setdefault(row.policy_id, []).append(row)
    return found


def _of_policy(
    policy: sa.Row, log: list[sa.Row], held: list[sa.Row], named: list[sa.Row], tagged: list[sa.Row]
) -> Iterator[Contradiction]:
    name = full_name(policy.tenant, policy.name)
    try:
        logged, record, expected, moves, labels = _replay(log)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        yield (
            "policy",
            name,
            (
                f"the audit log of policy {name} is damaged ({type(error).__name__}:"
                f" {str(error)[:80]})"
            ),
        )
        return
    if logged not in (None, name):
        yield "policy", name, f"policy {name} was made as {logged}, says the audit log"
    if policy.checksum != policy_checksum(policy.id, policy.tenant, policy.name):
        yield "policy", name, f"policy {name} is not what its checksum says"
    for column, value in record.items():
        found = getattr(policy, column)
        if found != value:
            yield (
                "policy",
                name,
                (
                    f"policy {name} has {column} {str(found)[:80]!r}, the audit log says"
                    f" {str(value)[:80]!r}"
                ),
            )
    rows = {row.number: row for row in held}
    for number in sorted(expected.keys() | rows.keys()):
        named_so = f"{name}@{number}"
        row, wanted = rows.get(number), expected.get(number)
        if row is None or wanted is None:
            what = (
                "is not there, though the audit log has it"
                if row is None
                else "is not in the audit log"
            )
            yield "revision", named_so, f"revision {named_so} {what}"
            continue
        of_row = (row.policy_id, row.number, row.digest, row.schema_digest)
        if row.schema_digest is not None and row.checksum != revision_checksum(*of_row):
            yield "revision", named_so, f"revision {named_so} is not what its checksum says"
        found = {
            "digest": row.digest.hex(),
            "step": row.step,
            "pinned": row.pinned,
            "state": row.state,
        }
        for column, value in wanted.items():
            if found[column] != value:
                yield (
                    "revision",
                    named_so,
                    (
                        f"revision {named_so} has {column} {found[column]!r}, the audit log says"
                        f" {value!r}"
                    ),
                )
    there = {row.name: row for row in named}
    for alias in sorted(moves.keys() | there.keys()):
        row = there.get(alias)
        if row is None:
            yield (
                "alias",
                f"{name}@{alias}",
                f"alias {name}@{alias} is not there, though the audit log has it",
            )
        elif row.owner != policy.id:
            yield (
                "alias",
                f"{name}@{alias}",
                f"alias {name}@{alias} names no revision of its policy",
            )
        elif (row.number, row.version) != moves.get(alias):
            yield (
                "alias",
                f"{name}@{alias}",
                f"alias {name}@{alias} is not where the audit log says",
            )
        elif row.checksum != alias_checksum(
            row.policy_id, row.name, row.version, row.number, row.digest
        ):
            yield "alias", f"{name}@{alias}", f"alias {name}@{alias} is not what its checksum says"
    there = {(row.number, row.key): row.value for row in tagged}
    for number, key in sorted(labels.keys() | there.keys()):
        has, wanted = there.get((number, key)), labels.get((number, key))
        if has != wanted:
            whose = f"{name}@{number}" if number else name
            yield (
                "revision" if number else "policy",
                whose,
                f"{whose} has tag {key}={has!r}, the audit log says {wanted!r}",
            )


Replayed = tuple[
    str | None,
    dict[str, Any],
    dict[int, dict[str, Any]],
    dict[str, tuple[int, int]],
    dict[tuple[int, str], str],
]


def _replay(log: list[sa.Row]) -> Replayed:
    """The policy's name, its columns, its revisions by number, its aliases' number and version, and
    tags by number and key.
    """
    record: dict[str, Any] = {"state": "active", "last_number": 0, "session_number": 0}
    expected: dict[int, dict[str, Any]] = {}
    moves: dict[str, tuple[int, int]] = {}
    labels: dict[tuple[int, str], str] = {}
    logged: str | None = None
    for row in log:
        details = json.loads(row.details)
        if row.action == "create":
            record |= {"json": details["schema"], "keep_last": details["keep_last"]}
            logged = details.get("policy")  # not in logs of earlier versions
        elif row.action == "keep_last":
            record["keep_last"] = details["after"]
        elif row.action in ("retire", "restore"):
            record["state"] = "retired" if row.action == "retire" else "active"
        elif row.action == "open session":
            record["session_number"] = details["session"]
        elif row.action == "remove revisions":
            for number in details["revisions"]:
                del expected[number]
                labels = {key: value for key, value in labels.items() if key[0] != number}
        elif row.action == "rename":
            logged = details["after"]
        elif row.action == "delete":
            logged = f"{details['policy']}@{DELETED}-{row.policy_id}"
            record["state"], expected, moves, labels = DELETED, {}, {}, {}
        elif row.action == "tag":
            for key, value in details["tags"].items():
                labels.pop((row.before or 0, key), None)
                if value is not None:
                    labels[row.before or 0, key] = value
        elif row.action in ("retire revision", "restore revision"):
            expected[row.before]["state"] = "retired" if row.action == "retire revision" else "live"
        elif row.action in ("pin", "unpin"):
            expected[row.before]["pinned"] = row.action == "pin"
        elif row.action in ("export", "branch"):
            made = expected.setdefault(row.after, {"pinned": False, "state": "live"})
            made["digest"] = details["digest"]
            if "step" in details:
                made["step"] = details["step"]
            record["last_number"] = max(record["last_number"], row.after)
        if row.alias is not None:
            moves[row.alias] = (row.after, row.version)
            if expected[row.after]["digest"] != details["digest"]:
                raise ValueError(f"entry {row.id} gives revision {row.after} another digest")
    return logged, record, expected, moves, labels
