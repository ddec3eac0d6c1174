"""From a name to bytes: one indexed statement each, written once, cached in compiled form by SQLAlchemy."""

import sqlalchemy as sa

from mint_jax.catalog import policies as policy_records
from mint_jax.catalog.database import chunks
from mint_jax.catalog.names import RevisionName, digest_range
from mint_jax.catalog.payloads import Place
from mint_jax.catalog.records import Resolved, full_name
from mint_jax.catalog.tables import aliases, packs, payloads, policies, revisions, schemas
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
    schemas.c.json,
)
_REVISIONS = (
    sa.join(policies, revisions, revisions.c.policy_id == policies.c.id)
    .join(payloads, revisions.c.digest == payloads.c.digest)
    .join(packs, payloads.c.pack_id == packs.c.id)
    .join(schemas, payloads.c.schema_id == schemas.c.id)
)
_ALIASED = _REVISIONS.join(aliases, aliases.c.revision_id == revisions.c.id)

_NAMED = sa.and_(policies.c.tenant == sa.bindparam("tenant"), policies.c.name == sa.bindparam("policy"))
_BY_ALIAS = (
    sa.select(*_COLUMNS).select_from(_ALIASED).where(_NAMED, aliases.c.policy_id == policies.c.id, aliases.c.name == sa.bindparam("alias"))
)
_BY_NUMBER = sa.select(*_COLUMNS).select_from(_REVISIONS).where(_NAMED, revisions.c.number == sa.bindparam("number"))
_IN_RANGE = revisions.c.digest.between(sa.bindparam("low"), sa.bindparam("high"))
_OF_TENANT = sa.or_(sa.bindparam("tenant", type_=sa.String).is_(None), policies.c.tenant == sa.bindparam("tenant", type_=sa.String))
# The lowest and the highest digest of the range tell whether it is unique; of several revisions with these bytes a live one
# comes first, then the newest.
_BY_DIGEST = (
    sa.select(*_COLUMNS)
    .select_from(_REVISIONS)
    .where(_IN_RANGE, _OF_TENANT)
    .order_by(revisions.c.digest, policies.c.state, revisions.c.state, revisions.c.id.desc())
    .limit(1)
)
_HIGHEST = (
    sa.select(revisions.c.digest)
    .select_from(sa.join(policies, revisions, revisions.c.policy_id == policies.c.id))
    .where(_IN_RANGE, _OF_TENANT)
    .order_by(revisions.c.digest.desc())
    .limit(1)
)


def resolve(connection: sa.Connection, named: RevisionName, text: str) -> Resolved:
    """What ``named`` stands for. ``text`` is how it was written, for messages.

    Raises:
        UserError: unknown, ambiguous, or retired.
    """
    if named.digest is not None:
        low, high = digest_range(named.digest)
        bounds = {"low": low, "high": high, "tenant": named.tenant}
        found = connection.execute(_BY_DIGEST, bounds).first()
        if found is not None and low != high and connection.scalar(_HIGHEST, bounds) != found.digest:
            raise UserError(f"revision {text[:80]!r} begins several digests: give more digits")
        if found is None:
            raise UserError(f"revision {text[:80]!r} is not in the catalog: no digest begins so")
    elif named.number is not None:
        found = connection.execute(_BY_NUMBER, {"tenant": named.tenant, "policy": named.policy, "number": named.number}).first()
    else:
        found = connection.execute(_BY_ALIAS, {"tenant": named.tenant, "policy": named.policy, "alias": named.alias}).first()
    if found is None:
        raise _unknown(connection, named)
    return _resolved(found)


def resolve_many(connection: sa.Connection, named: list[RevisionName], texts: list[str]) -> list[Resolved]:
    """``resolve`` for many: a statement per 500 names with an alias, one for each other name."""
    keys = [(name.tenant, name.policy, name.alias) for name in named if name.alias is not None]
    found: dict[tuple, Resolved] = {}
    for chunk in chunks(sorted(set(keys))):  # type: ignore[type-var]
        key = sa.tuple_(policies.c.tenant, policies.c.name, aliases.c.name)
        query = sa.select(*_COLUMNS, aliases.c.name.label("alias")).select_from(_ALIASED)
        for row in connection.execute(query.where(aliases.c.policy_id == policies.c.id, key.in_(chunk))):
            if row.policy_state == row.state.replace("live", "active"):
                found[row.tenant, row.name, row.alias] = _resolved(row)
    return [
        found.get((name.tenant, name.policy, name.alias)) or resolve(connection, name, text)  # the latter also for its message
        for name, text in zip(named, texts)
    ]


def _resolved(row: sa.Row) -> Resolved:
    named = full_name(row.tenant, row.name)
    if row.policy_state != "active":
        raise UserError(f"policy {named!r} is retired: restore it first")
    if row.state != "live":
        raise UserError(f"revision {named}@{row.number} is retired: restore it first, or choose another")
    return Resolved(named, row.number, row.digest.hex(), Place(row.pack, row.offset, row.length), row.json, row.id)


def _unknown(connection: sa.Connection, named: RevisionName) -> UserError:
    assert named.tenant is not None
    assert named.policy is not None
    policy = policy_records.find(connection, named.tenant, named.policy)
    full = full_name(named.tenant, named.policy)
    if not policy.last_number:
        return UserError(f"policy {full!r} has no revision yet: export one first")
    if named.number is not None:
        if named.number <= policy.last_number:
            return UserError(f"revision {full}@{named.number} was removed by retention: list the policy's revisions")
        return UserError(f"policy {full!r} has no revision {named.number}: its newest is {policy.last_number}")
    return UserError(f"policy {full!r} has no alias {named.alias!r}: list its aliases, or promote a revision to it")


def place_of(connection: sa.Connection, digest: str) -> Place:
    """Where any payload lies, of a revision or not.

    Raises:
        UserError: the catalog does not hold it.
    """
    query = sa.select(packs.c.name, payloads.c.offset, payloads.c.length).join_from(payloads, packs)
    found = connection.execute(query.where(payloads.c.digest == bytes.fromhex(digest))).first()
    if found is None:
        raise UserError(f"payload {digest[:12]} is not in the catalog, or was removed")
    return Place(*found)


def held(connection: sa.Connection, keys: set[tuple[str, str, bytes]]) -> set[tuple[str, str, bytes]]:
    """Those of (tenant, policy, digest) where the policy has a revision of these bytes, retired ones too."""
    found = set()
    for chunk in chunks(sorted(keys), 200):
        query = sa.select(policies.c.tenant, policies.c.name, revisions.c.digest)
        query = query.select_from(sa.join(policies, revisions, revisions.c.policy_id == policies.c.id))
        query = query.where(sa.tuple_(policies.c.tenant, policies.c.name, revisions.c.digest).in_(chunk))
        found |= {(row.tenant, row.name, row.digest) for row in connection.execute(query)}
    return found
