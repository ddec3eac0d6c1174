"""Revisions found: by name, by digest and in pages; and the bytes that a name resolves to.

All finds are one join with one condition for each kind of name; SQLAlchemy caches the compiled
statements. The bytes' digest is verified when they are read.
"""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import sqlalchemy as sa

from mint_jax.catalog.records import handle, names
from mint_jax.catalog.records.database import chunks
from mint_jax.catalog.records.handle import Handle
from mint_jax.catalog.records.names import RevisionName, full_name, parse_policy, parse_revision
from mint_jax.catalog.records.payload_rows import place_of
from mint_jax.catalog.records.tables import (
    aliases,
    as_record,
    packs,
    payloads,
    policies,
    revisions,
    schemas,
)
from mint_jax.catalog.storage.payloads import PackDamaged, PackMissing, Place
from mint_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Revision:
    """An immutable export of a policy's adapter."""

    id: int
    policy: str
    number: int
    step: int
    digest: str
    bytes: int  # of the packed object
    origin: str
    pinned: bool
    state: str  # ``live`` or ``retired``
    created_at: float
    sampling: dict[str, Any] | None = None  # of training rollouts, by the fields of ``Request``
    # since the export before: ``updates``, target ``tokens``, and means of the updates' metrics
    training: dict[str, float] | None = None
    # how it was merged, its ``members`` and their weights; None: it was trained or imported
    merge: dict[str, Any] | None = None


@dataclasses.dataclass(frozen=True)
class Resolved:
    """A revision that a name resolved to, and the place of its bytes."""

    policy: str
    number: int
    digest: str
    place: Place
    schema: str
    revision_id: int
    finite: bool  # all weights are finite, as checked on export
    canary: int | None = None  # id of the alias's open canary
    stand_in: str | None = None  # digest that answers while this one is loaded


_POLICIES = sa.join(policies, revisions, revisions.c.policy_id == policies.c.id)
_REVISIONS = (
    _POLICIES.join(payloads, revisions.c.digest == payloads.c.digest)
    .join(packs, payloads.c.pack_id == packs.c.id)
    .join(schemas, payloads.c.schema_id == schemas.c.id)
)
_ALIASED = _REVISIONS.join(
    aliases, sa.and_(aliases.c.revision_id == revisions.c.id, aliases.c.policy_id == policies.c.id)
)
_SELECT = sa.select(
    revisions,
    policies.c.tenant,
    policies.c.name,
    policies.c.state.label("policy_state"),
    policies.c.stand_in,
    packs.c.name.label("pack"),
    payloads.c.offset,
    payloads.c.length,
    payloads.c.finite,
    schemas.c.json,
)
_TENANT = sa.bindparam("tenant", type_=sa.String)
_POLICY = sa.bindparam("policy", type_=sa.String)
_NAMED = sa.and_(policies.c.tenant == _TENANT, policies.c.name == _POLICY)
_SELECT_ALIASED = _SELECT.add_columns(aliases.c.canary_id).select_from(_ALIASED)
_BY_ALIAS = _SELECT_ALIASED.where(_NAMED, aliases.c.name == sa.bindparam("alias"))
_BY_NUMBER = _SELECT.select_from(_REVISIONS).where(
    _NAMED, revisions.c.number == sa.bindparam("number")
)
_IN_RANGE = sa.and_(
    revisions.c.digest.between(sa.bindparam("low"), sa.bindparam("high")),
    sa.or_(_TENANT.is_(None), policies.c.tenant == _TENANT),
    sa.or_(_POLICY.is_(None), policies.c.name == _POLICY),
)
# The lowest and the highest digest of the range differ if the prefix is ambiguous. Of several
# revisions with the same bytes a live one comes first, then the newest.
_BY_DIGEST = (
    _SELECT.select_from(_REVISIONS)
    .where(_IN_RANGE)
    .order_by(revisions.c.digest, policies.c.state, revisions.c.state, revisions.c.id.desc())
    .limit(1)
)
_HIGHEST = _BY_DIGEST.order_by(None).order_by(revisions.c.digest.desc())


def revision(catalog: Handle, policy: str, which: int | str) -> Revision:
    """Returns one revision, retired ones too, by number, alias, digest or full name."""
    return catalog.look(policy, lambda c, row: as_revision(find_in(c, row, which)))


def list_revisions(
    catalog: Handle, policy: str, after: int = 0, limit: int = 1000
) -> list[Revision]:
    """Returns a page of a policy's revisions by number."""

    def body(connection: sa.Connection, row: sa.Row) -> list[Revision]:
        query = _SELECT.select_from(_REVISIONS).where(revisions.c.policy_id == row.id)
        query = query.where(revisions.c.number > after).order_by(revisions.c.number).limit(limit)
        return [as_revision(found) for found in connection.execute(query)]

    return catalog.look(policy, body)


def as_revision(row: Any, policy: Any = None) -> Revision:
    """Returns the record of a row with its payload's ``length`` and its policy's names, or with the
    names of ``policy``.
    """
    owner = row if policy is None else policy
    full = full_name(owner.tenant, owner.name)
    texts = {name: getattr(row, name) for name in ("sampling", "training", "merge")}
    read = {name: None if text is None else json.loads(text) for name, text in texts.items()}
    return as_record(Revision, row, policy=full, bytes=row.length, **read)


def resolve(catalog: Handle, name: str, tenant: str | None = None) -> Resolved:
    """Resolves a name. Raises ``UserError``: unknown, ambiguous or retired. ``tenant``: tenant of
    plain names; other tenants' names are refused, and digests are looked up among this tenant's
    revisions only.
    """
    named = parse_revision(name, tenant)
    return catalog.database.read(lambda c: resolved(find(c, named, name)))


def resolve_many(
    catalog: Handle, texts: Sequence[str], tenant: str | None = None
) -> list[Resolved]:
    """Resolves many names in order: one statement per 500 names with an alias, one for each other
    name.
    """
    named = [parse_revision(text, tenant) for text in texts]
    keys = {(name.tenant, name.policy, name.alias) for name in named if name.alias is not None}
    key = sa.tuple_(policies.c.tenant, policies.c.name, aliases.c.name)
    query = _SELECT_ALIASED.add_columns(aliases.c.name.label("alias"))

    def body(connection: sa.Connection) -> list[Resolved]:
        found: dict[tuple, sa.Row] = {}
        for chunk in chunks(sorted(keys)):
            for row in connection.execute(query.where(key.in_(chunk))):
                found[row.tenant, row.name, row.alias] = row
        return [
            # ``find`` also raises for an unknown alias
            resolved(found.get((one.tenant, one.policy, one.alias)) or find(connection, one, text))
            for one, text in zip(named, texts)
        ]

    return catalog.database.read(body)


def holds(catalog: Handle, pairs: Sequence[tuple[str, str]]) -> list[bool]:
    """For each (policy, digest): True if the policy has a revision, maybe retired, of these
    bytes.
    """
    keys = [(*parse_policy(policy), bytes.fromhex(digest)) for policy, digest in pairs]
    found = set()
    columns = (policies.c.tenant, policies.c.name, revisions.c.digest)
    for chunk in chunks(sorted(set(keys)), 200):
        query = sa.select(*columns).select_from(_POLICIES).where(sa.tuple_(*columns).in_(chunk))
        found.update(map(tuple, catalog.database.rows(query)))
    return [key in found for key in keys]


def load(catalog: Handle, name: str, tenant: str | None = None) -> np.ndarray:
    """Loads a revision's packed object: ``uint8``, read-only, digest verified; memory-mapped from a
    folder. Raises ``UserError``: unknown name, or the bytes do not match the digest.
    """
    return load_payload(catalog, resolve(catalog, name, tenant).digest)


def load_payload(catalog: Handle, digest: str, verified: bool = True) -> np.ndarray:
    """Loads any payload by its digest, as ``load`` does. ``verified``: compare the bytes with the
    digest; False for a caller that does so itself.
    """
    places: list[Place] = []
    while True:
        places.append(catalog.database.read(lambda c: place_of(c, digest)))
        try:
            return catalog.store.read(places[-1], digest if verified else None)
        except PackMissing:
            if places[-1] in places[:-1]:  # else compaction may have moved it since
                raise
        except PackDamaged as error:
            raise UserError(
                f"payload {digest[:12]} is damaged: {error}; export it again, or roll back"
            ) from None


def find(connection: sa.Connection, named: RevisionName, text: str) -> sa.Row:
    """Returns the row of a revision, retired ones too. ``text`` is the name as written, for errors.
    Raises ``UserError``: unknown or ambiguous.
    """
    key: dict[str, Any] = {"tenant": named.tenant, "policy": named.policy}
    if named.digest is not None:
        low, high = names.digest_range(named.digest)
        key |= {"low": low, "high": high}
        found = connection.execute(_BY_DIGEST, key).first()
        if found is None:
            raise UserError(f"revision {text[:80]!r} is not in the catalog: no digest begins so")
        if low != high and connection.execute(_HIGHEST, key).one().digest != found.digest:
            raise UserError(f"revision {text[:80]!r} begins several digests: give more digits")
        return found
    if named.number is not None:
        found = connection.execute(_BY_NUMBER, key | {"number": named.number}).first()
    else:
        found = connection.execute(_BY_ALIAS, key | {"alias": named.alias}).first()
    if found is None:
        raise _unknown(connection, named)
    return found


def find_in(
    connection: sa.Connection, policy: sa.Row, which: int | str, live: bool = False
) -> sa.Row:
    """Returns the row of a policy's revision by number, alias, digest, prefix of a digest, or full
    name. Raises ``UserError``: unknown, ambiguous, of another policy, or retired and must be
    ``live``.
    """
    text = str(which)
    if not isinstance(which, str):
        number = names.whole("revision number", which, 1, 10**9)
        named = RevisionName(None, None, number=number)
    elif "@" in which or "/" in which:
        named = parse_revision(which)
        if (named.tenant, named.policy) != (policy.tenant, policy.name):
            full = full_name(policy.tenant, policy.name)
            raise UserError(
                f"revision {which[:80]!r} is not of policy {full!r}: name one of its own"
            )
    else:
        is_digest = names.is_digest(which) and not names.is_number(which)
        named = parse_revision(which if is_digest else f"p@{which}")
    named = dataclasses.replace(named, tenant=policy.tenant, policy=policy.name)
    found = find(connection, named, text)
    if live:
        check_live(found)
    return found


def check_live(row: sa.Row) -> None:
    """Raises ``UserError`` for a retired revision."""
    if row.state != "live":
        raise UserError(
            f"revision {full_name(row.tenant, row.name)}@{row.number} is retired: restore it first,"
            " or choose another"
        )


def resolved(row: sa.Row) -> Resolved:
    """Returns the record of a live revision's row. Raises ``UserError`` for a retired one."""
    full = full_name(row.tenant, row.name)
    if row.policy_state != "active":
        raise UserError(f"policy {full!r} is retired: restore it first")
    check_live(row)
    place = Place(row.pack, row.offset, row.length)
    canary = getattr(row, "canary_id", None)  # rows found otherwise than by an alias have none
    stand_in = None if row.stand_in is None else row.stand_in.hex()
    about = (row.json, row.id, bool(row.finite), canary, stand_in)
    return Resolved(full, row.number, row.digest.hex(), place, *about)


def _unknown(connection: sa.Connection, named: RevisionName) -> UserError:
    policy = handle.find(connection, str(named.tenant), str(named.policy))
    full = full_name(policy.tenant, policy.name)
    if not policy.last_number:
        text = "has no revision yet: export one first"
    elif named.number is None:
        text = f"has no alias {named.alias!r}: list its aliases, or promote a revision to it"
    elif named.number <= policy.last_number:
        text = f"has lost revision {named.number}, removed by retention: list its revisions"
    else:
        text = f"has no revision {named.number}: its newest is {policy.last_number}"
    return UserError(f"policy {full!r} {text}")
