"""From a name to bytes: one plain join each, written once, cached in compiled form by SQLAlchemy.

The rows' checksums (``tables``) and the schema's digest are compared with what was found: without
them, one flipped bit in an index gives another policy's revision, and the bytes of that are whole.
Bytes need no checksum here: their digest is verified when they are read.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import sqlalchemy as sa

from mint_jax.catalog.packed import schema_digest
from mint_jax.catalog.records.database import chunks
from mint_jax.catalog.records.names import (
    RevisionName,
    digest_range,
    full_name,
    parse_policy,
    parse_revision,
)
from mint_jax.catalog.records.payload_rows import place_of
from mint_jax.catalog.records.policies import Policies, find
from mint_jax.catalog.records.tables import (
    alias_checksum,
    aliases,
    packs,
    payloads,
    policies,
    policy_checksum,
    revision_checksum,
    revisions,
    schemas,
)
from mint_jax.catalog.storage.payloads import PackDamaged, PackMissing, Place
from mint_jax.errors import UserError

_COLUMNS = (
    policies.c.tenant,
    policies.c.name,
    policies.c.state.label("policy_state"),
    policies.c.id.label("owner"),
    policies.c.checksum.label("policy_checksum"),
    revisions.c.id,
    revisions.c.policy_id,
    revisions.c.number,
    revisions.c.digest,
    revisions.c.state,
    revisions.c.checksum.label("revision_checksum"),
    packs.c.name.label("pack"),
    payloads.c.offset,
    payloads.c.length,
    payloads.c.finite,
    schemas.c.json,
    schemas.c.digest.label("schema_digest"),
)
_REVISIONS = (
    sa.join(policies, revisions, revisions.c.policy_id == policies.c.id)
    .join(payloads, revisions.c.digest == payloads.c.digest)
    .join(packs, payloads.c.pack_id == packs.c.id)
    .join(schemas, payloads.c.schema_id == schemas.c.id)
)
_ALIASED = _REVISIONS.join(aliases, aliases.c.revision_id == revisions.c.id)
_MOVED = (aliases.c.version, aliases.c.checksum.label("alias_checksum"))

_NAMED = sa.and_(
    policies.c.tenant == sa.bindparam("tenant"), policies.c.name == sa.bindparam("policy")
)
_BY_ALIAS = (
    sa.select(*_COLUMNS, *_MOVED)
    .select_from(_ALIASED)
    .where(_NAMED, aliases.c.policy_id == policies.c.id, aliases.c.name == sa.bindparam("alias"))
)
_BY_NUMBER = (
    sa.select(*_COLUMNS)
    .select_from(_REVISIONS)
    .where(_NAMED, revisions.c.number == sa.bindparam("number"))
)
_IN_RANGE = revisions.c.digest.between(sa.bindparam("low"), sa.bindparam("high"))
_OF_TENANT = sa.or_(
    sa.bindparam("tenant", type_=sa.String).is_(None),
    policies.c.tenant == sa.bindparam("tenant", type_=sa.String),
)
# The lowest and the highest digest of the range show whether it is unique; of several revisions
# with these bytes a live one comes first, then the newest.
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


@dataclasses.dataclass(frozen=True)
class Resolved:
    """What a name stands for now, and where its bytes are.

    Attributes:
        finite: all weights are, found when the bytes came in; False also where that was not
            checked.
    """

    policy: str
    number: int
    digest: str
    place: Place
    schema: str
    revision_id: int
    finite: bool


class Lookup(Policies):
    """From names to bytes."""

    def resolve(self, name: str, tenant: str | None = None) -> Resolved:
        """What a name stands for now.

        Args:
            tenant: whose names these are: plain names are this tenant's, others' are refused,
                digests among its own only.

        Raises:
            UserError: unknown, ambiguous or retired.
        """
        named = parse_revision(name, tenant)
        return self.database.read(lambda c: resolve(c, named, name))

    def resolve_many(self, texts: Sequence[str], tenant: str | None = None) -> list[Resolved]:
        """``resolve`` of many names, in their order: a statement per 500 names with an alias, one
        for each other name.
        """
        named = [parse_revision(text, tenant) for text in texts]
        return self.database.read(lambda c: _resolve_many(c, named, texts))

    def holds(self, pairs: Sequence[tuple[str, str]]) -> list[bool]:
        """For each (policy, digest): whether the policy has a revision of these very bytes, a
        retired one too.
        """
        keys = [(*parse_policy(policy), bytes.fromhex(digest)) for policy, digest in pairs]
        found = set()
        for chunk in chunks(sorted(set(keys)), 200):
            query = sa.select(policies.c.tenant, policies.c.name, revisions.c.digest)
            query = query.select_from(
                sa.join(policies, revisions, revisions.c.policy_id == policies.c.id)
            )
            query = query.where(
                sa.tuple_(policies.c.tenant, policies.c.name, revisions.c.digest).in_(chunk)
            )
            found |= {
                tuple(row)
                for row in self.database.read(lambda c, query=query: c.execute(query).all())
            }
        return [key in found for key in keys]

    def load(self, name: str, tenant: str | None = None) -> np.ndarray:
        """The packed object a name stands for, ``uint8``, read-only, its digest verified;
        memory-mapped from a folder.

        Raises:
            UserError: unknown name, or bytes that are not what the digest says.
        """
        found = self.resolve(name, tenant)
        return self._read(
            found.digest, lambda: self.resolve(found.digest, tenant).place, found.place
        )

    def _read(
        self,
        digest: str,
        where: Callable[[], Place],
        place: Place | None = None,
        verified: bool = True,
    ) -> np.ndarray:
        place, expected = where() if place is None else place, digest if verified else None
        try:
            return self.store.read(place, expected)
        except PackMissing:  # compaction may have moved it since
            moved = where()
            if moved == place:
                raise
            return self.store.read(moved, expected)
        except PackDamaged as error:
            raise UserError(
                f"payload {digest[:12]} is damaged: {error}; export it again, or roll back"
            ) from None

    def _payload(self, digest: str, verified: bool = True) -> np.ndarray:
        return self._read(
            digest, lambda: self.database.read(lambda c: place_of(c, digest)), verified=verified
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
        if (
            found is not None
            and low != high
            and connection.scalar(_HIGHEST, bounds) != found.digest
        ):
            raise UserError(f"revision {text[:80]!r} begins several digests: give more digits")
        if found is None:
            raise UserError(f"revision {text[:80]!r} is not in the catalog: no digest begins so")
    elif named.number is not None:
        found = connection.execute(
            _BY_NUMBER, {"tenant": named.tenant, "policy": named.policy, "number": named.number}
        ).first()
    else:
        found = connection.execute(
            _BY_ALIAS, {"tenant": named.tenant, "policy": named.policy, "alias": named.alias}
        ).first()
    if found is None:
        raise _unknown(connection, named)
    return _resolved(connection, found, named.alias)


def _resolve_many(
    connection: sa.Connection, named: list[RevisionName], texts: Sequence[str]
) -> list[Resolved]:
    keys = [(name.tenant, name.policy, name.alias) for name in named if name.alias is not None]
    found: dict[tuple, Resolved] = {}
    for chunk in chunks(sorted(set(keys))):
        key = sa.tuple_(policies.c.tenant, policies.c.name, aliases.c.name)
        query = sa.select(*_COLUMNS, *_MOVED, aliases.c.name.label("alias")).select_from(_ALIASED)
        for row in connection.execute(
            query.where(aliases.c.policy_id == policies.c.id, key.in_(chunk))
        ):
            if row.policy_state == row.state.replace("live", "active"):
                found[row.tenant, row.name, row.alias] = _resolved(connection, row, row.alias)
    return [
        # the latter also for its message
        found.get((name.tenant, name.policy, name.alias)) or resolve(connection, name, text)
        for name, text in zip(named, texts)
    ]


def _resolved(connection: sa.Connection, row: sa.Row, alias: str | None) -> Resolved:
    named = full_name(row.tenant, row.name)
    if row.policy_checksum != policy_checksum(row.owner, row.tenant, row.name):
        raise damaged(connection, f"policy {named} is not what its checksum says")
    expected = revision_checksum(row.policy_id, row.number, row.digest, row.schema_digest)
    if row.policy_id != row.owner or row.revision_checksum != expected:
        raise damaged(connection, f"revision {named}@{row.number} is not what its checksum says")
    if alias is not None and row.alias_checksum != alias_checksum(
        row.policy_id, alias, row.version, row.number, row.digest
    ):
        raise damaged(connection, f"alias {named}@{alias} is not what its checksum says")
    if schema_digest(row.json) != row.schema_digest:
        raise damaged(
            connection, f"the schema of revision {named}@{row.number} is not what its digest says"
        )
    if row.policy_state != "active":
        raise UserError(f"policy {named!r} is retired: restore it first")
    if row.state != "live":
        raise UserError(
            f"revision {named}@{row.number} is retired: restore it first, or choose another"
        )
    return Resolved(
        named,
        row.number,
        row.digest.hex(),
        Place(row.pack, row.offset, row.length),
        row.json,
        row.id,
        bool(row.finite),
    )


def damaged(connection: sa.Connection, what: str) -> UserError:
    """What a reader says of rows that contradict each other."""
    name = connection.engine.url.render_as_string(hide_password=True)
    return UserError(
        f"database {name} is damaged: {what}: run verify to see what else, and restore it from a"
        " backup"
    )


def _unknown(connection: sa.Connection, named: RevisionName) -> UserError:
    assert named.tenant is not None
    assert named.policy is not None
    policy = find(connection, named.tenant, named.policy)
    full = full_name(named.tenant, named.policy)
    if not policy.last_number:
        return UserError(f"policy {full!r} has no revision yet: export one first")
    if named.number is not None:
        here = sa.select(revisions.c.id).where(
            revisions.c.policy_id == policy.id, revisions.c.number == named.number
        )
        if connection.execute(here).first() is not None:
            return damaged(
                connection,
                f"revision {full}@{named.number} has lost its payload's or its schema's row",
            )
        if named.number <= policy.last_number:
            return UserError(
                f"revision {full}@{named.number} was removed by retention: list the policy's"
                " revisions"
            )
        return UserError(
            f"policy {full!r} has no revision {named.number}: its newest is {policy.last_number}"
        )
    if (
        connection.execute(
            sa.select(aliases.c.name).where(
                aliases.c.policy_id == policy.id, aliases.c.name == named.alias
            )
        ).first()
        is not None
    ):
        return damaged(
            connection,
            f"alias {full}@{named.alias} names a revision that is not there, or not whole",
        )
    return UserError(
        f"policy {full!r} has no alias {named.alias!r}: list its aliases, or promote a revision"
        " to it"
    )
