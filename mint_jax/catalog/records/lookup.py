"""Name resolution: from a name to the place of its bytes, with one join per kind of name.

SQLAlchemy caches the compiled statements. The bytes' digest is verified when they are read.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import sqlalchemy as sa

from mint_jax.catalog.records import handle
from mint_jax.catalog.records.database import chunks
from mint_jax.catalog.records.handle import Handle
from mint_jax.catalog.records.names import (
    RevisionName,
    digest_range,
    full_name,
    parse_policy,
    parse_revision,
)
from mint_jax.catalog.records.payload_rows import place_of
from mint_jax.catalog.records.tables import (
    aliases,
    packs,
    payloads,
    policies,
    revisions,
    schemas,
)
from mint_jax.catalog.storage.payloads import PackDamaged, PackMissing, Place
from mint_jax.errors import UserError

_COLUMNS = (
    policies.c.tenant,
    policies.c.name,
    policies.c.state.label("policy_state"),
    revisions.c.id,
    revisions.c.number,
    revisions.c.digest,
    revisions.c.state,
    packs.c.name.label("pack"),
    payloads.c.offset,
    payloads.c.length,
    payloads.c.finite,
    schemas.c.json,
)
_POLICIES = sa.join(policies, revisions, revisions.c.policy_id == policies.c.id)
_REVISIONS = (
    _POLICIES.join(payloads, revisions.c.digest == payloads.c.digest)
    .join(packs, payloads.c.pack_id == packs.c.id)
    .join(schemas, payloads.c.schema_id == schemas.c.id)
)
_ALIASED = _REVISIONS.join(
    aliases, sa.and_(aliases.c.revision_id == revisions.c.id, aliases.c.policy_id == policies.c.id)
)

_NAMED = sa.and_(
    policies.c.tenant == sa.bindparam("tenant"), policies.c.name == sa.bindparam("policy")
)
_BY_ALIAS = (
    sa.select(*_COLUMNS)
    .select_from(_ALIASED)
    .where(_NAMED, aliases.c.name == sa.bindparam("alias"))
)
_BY_NUMBER = (
    sa.select(*_COLUMNS)
    .select_from(_REVISIONS)
    .where(_NAMED, revisions.c.number == sa.bindparam("number"))
)
_IN_RANGE = sa.and_(
    revisions.c.digest.between(sa.bindparam("low"), sa.bindparam("high")),
    sa.or_(
        sa.bindparam("tenant", type_=sa.String).is_(None),
        policies.c.tenant == sa.bindparam("tenant", type_=sa.String),
    ),
)
# The lowest and the highest digest of the range differ if the prefix is ambiguous. Of several
# revisions with the same bytes a live one comes first, then the newest.
_BY_DIGEST = (
    sa.select(*_COLUMNS)
    .select_from(_REVISIONS)
    .where(_IN_RANGE)
    .order_by(revisions.c.digest, policies.c.state, revisions.c.state, revisions.c.id.desc())
    .limit(1)
)
_HIGHEST = (
    sa.select(revisions.c.digest)
    .select_from(_POLICIES)
    .where(_IN_RANGE)
    .order_by(revisions.c.digest.desc())
    .limit(1)
)


@dataclasses.dataclass(frozen=True)
class Resolved:
    """A revision that a name resolved to, and the place of its bytes.

    Attributes:
        finite: all weights are finite, as checked on export.
    """

    policy: str
    number: int
    digest: str
    place: Place
    schema: str
    revision_id: int
    finite: bool


def resolve(catalog: Handle, name: str, tenant: str | None = None) -> Resolved:
    """Resolves a name.

    Args:
        tenant: tenant of plain names; other tenants' names are refused, and digests are looked up
            among this tenant's revisions only.

    Raises:
        UserError: unknown, ambiguous or retired.
    """
    named = parse_revision(name, tenant)
    return catalog.database.read(lambda c: find(c, named, name))


def resolve_many(
    catalog: Handle, texts: Sequence[str], tenant: str | None = None
) -> list[Resolved]:
    """Resolves many names in order: one statement per 500 names with an alias, one for each other
    name.
    """
    named = [parse_revision(text, tenant) for text in texts]
    return catalog.database.read(lambda c: _find_many(c, named, texts))


def holds(catalog: Handle, pairs: Sequence[tuple[str, str]]) -> list[bool]:
    """For each (policy, digest): True if the policy has a revision, maybe retired, of these
    bytes.
    """
    keys = [(*parse_policy(policy), bytes.fromhex(digest)) for policy, digest in pairs]
    found = set()
    columns = (policies.c.tenant, policies.c.name, revisions.c.digest)
    for chunk in chunks(sorted(set(keys)), 200):
        query = sa.select(*columns).select_from(_POLICIES).where(sa.tuple_(*columns).in_(chunk))
        found |= set(catalog.database.read(lambda c, query=query: c.execute(query).tuples().all()))
    return [key in found for key in keys]


def load(catalog: Handle, name: str, tenant: str | None = None) -> np.ndarray:
    """Loads a revision's packed object: ``uint8``, read-only, digest verified; memory-mapped from a
    folder.

    Raises:
        UserError: unknown name, or the bytes do not match the digest.
    """
    found = resolve(catalog, name, tenant)
    return _read(
        catalog, found.digest, lambda: resolve(catalog, found.digest, tenant).place, found.place
    )


def load_payload(catalog: Handle, digest: str, verified: bool = True) -> np.ndarray:
    """Loads any payload by its digest, as ``load`` does.

    Args:
        verified: compare the bytes with the digest; False for a caller that does so itself.
    """

    def find_place() -> Place:
        return catalog.database.read(lambda c: place_of(c, digest))

    return _read(catalog, digest, find_place, find_place(), verified)


def _read(
    catalog: Handle,
    digest: str,
    find_place: Callable[[], Place],
    place: Place,
    verified: bool = True,
) -> np.ndarray:
    expected = digest if verified else None
    try:
        return catalog.store.read(place, expected)
    except PackMissing:  # compaction may have moved it since
        moved = find_place()
        if moved == place:
            raise
        return catalog.store.read(moved, expected)
    except PackDamaged as error:
        raise UserError(
            f"payload {digest[:12]} is damaged: {error}; export it again, or roll back"
        ) from None


def find(connection: sa.Connection, named: RevisionName, text: str) -> Resolved:
    """Resolves a parsed name; ``text`` is the name as written, for messages.

    Raises:
        UserError: unknown, ambiguous, or retired.
    """
    if named.digest is not None:
        low, high = digest_range(named.digest)
        bounds = {"low": low, "high": high, "tenant": named.tenant}
        found = connection.execute(_BY_DIGEST, bounds).first()
        if found is None:
            raise UserError(f"revision {text[:80]!r} is not in the catalog: no digest begins so")
        if low != high and connection.scalar(_HIGHEST, bounds) != found.digest:
            raise UserError(f"revision {text[:80]!r} begins several digests: give more digits")
        return _resolved(found)
    key = {"tenant": named.tenant, "policy": named.policy}
    if named.number is not None:
        found = connection.execute(_BY_NUMBER, key | {"number": named.number}).first()
    else:
        found = connection.execute(_BY_ALIAS, key | {"alias": named.alias}).first()
    if found is None:
        raise _unknown(connection, named)
    return _resolved(found)


def _find_many(
    connection: sa.Connection, named: list[RevisionName], texts: Sequence[str]
) -> list[Resolved]:
    keys = [(name.tenant, name.policy, name.alias) for name in named if name.alias is not None]
    found: dict[tuple, Resolved] = {}
    key = sa.tuple_(policies.c.tenant, policies.c.name, aliases.c.name)
    query = sa.select(*_COLUMNS, aliases.c.name.label("alias")).select_from(_ALIASED)
    for chunk in chunks(sorted(set(keys))):
        for row in connection.execute(query.where(key.in_(chunk))):
            if (row.policy_state, row.state) == ("active", "live"):
                found[row.tenant, row.name, row.alias] = _resolved(row)
    return [
        # ``find`` also raises for an unknown alias
        found.get((name.tenant, name.policy, name.alias)) or find(connection, name, text)
        for name, text in zip(named, texts)
    ]


def _resolved(row: sa.Row) -> Resolved:
    full = full_name(row.tenant, row.name)
    if row.policy_state != "active":
        raise UserError(f"policy {full!r} is retired: restore it first")
    if row.state != "live":
        raise UserError(
            f"revision {full}@{row.number} is retired: restore it first, or choose another"
        )
    place = Place(row.pack, row.offset, row.length)
    return Resolved(full, row.number, row.digest.hex(), place, row.json, row.id, bool(row.finite))


def _unknown(connection: sa.Connection, named: RevisionName) -> UserError:
    assert named.tenant is not None
    assert named.policy is not None
    policy = handle.find(connection, named.tenant, named.policy)
    full = full_name(named.tenant, named.policy)
    if not policy.last_number:
        return UserError(f"policy {full!r} has no revision yet: export one first")
    if named.number is None:
        return UserError(
            f"policy {full!r} has no alias {named.alias!r}: list its aliases, or promote a"
            " revision to it"
        )
    if named.number <= policy.last_number:
        return UserError(
            f"revision {full}@{named.number} was removed by retention: list the policy's revisions"
        )
    return UserError(
        f"policy {full!r} has no revision {named.number}: its newest is {policy.last_number}"
    )
