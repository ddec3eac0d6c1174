"""Leases: payloads that a request or an engine uses and that must not be removed.

Leases come and go with requests and change no name, so the audit log does not record them. A
read-only catalog records no lease; there gc's grace period protects a reader.
"""

import dataclasses
from collections.abc import Sequence

import sqlalchemy as sa

from mint_jax.catalog.records import lookup
from mint_jax.catalog.records.audit import Author
from mint_jax.catalog.records.handle import Handle
from mint_jax.catalog.records.names import duration, note, parse_revision
from mint_jax.catalog.records.payload_rows import known
from mint_jax.catalog.records.tables import leases
from mint_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Lease:
    """Keeps a payload until released or expired."""

    id: int
    digest: str
    owner: str
    expires_at: float


def lease(catalog: Handle, names: Sequence[str], owner: str, seconds: float = 60.0) -> list[Lease]:
    """Keeps the bytes that names or digests resolve to now, until released or expired: all of them
    or none.
    """
    note("owner", owner, 400)
    expires = catalog.clock() + duration("length of a lease", seconds)
    parsed = [(parse_revision(name), name) for name in names]

    def body(connection: sa.Connection) -> list[Lease]:
        made = []
        for named, name in parsed:
            digest = lookup.resolved(lookup.find(connection, named, name)).digest
            if not known(connection, [bytes.fromhex(digest)]):
                raise UserError(f"revision {name!r} was removed meanwhile: resolve it again")
            number = 0
            if not catalog.database.read_only:
                values = {"digest": bytes.fromhex(digest), "owner": owner, "expires_at": expires}
                number = connection.scalar(leases.insert().returning(leases.c.id), values) or 0
            made.append(Lease(number, digest, owner, expires))
        return made

    database = catalog.database
    return database.read(body) if database.read_only else database.write(body)


def renew_lease(catalog: Handle, lease: Lease, seconds: float = 60.0) -> Lease:
    """Postpones a lease's expiry. Raises ``UserError``: it expired and was removed."""
    expires = catalog.clock() + duration("length of a lease", seconds)
    if not catalog.database.read_only:
        update = leases.update().where(leases.c.id == lease.id).values(expires_at=expires)
        if not catalog.database.write(lambda c: c.execute(update).rowcount):
            raise UserError(
                f"the lease of {lease.owner!r} on revision {lease.digest[:12]} expired: take a"
                " new one"
            )
    return dataclasses.replace(lease, expires_at=expires)


def release(catalog: Handle, *leased: Lease) -> None:
    """Ends leases in one transaction; leases that have ended are ignored."""
    if leased and not catalog.database.read_only:
        ended = leases.delete().where(leases.c.id.in_([lease.id for lease in leased]))
        catalog.database.write(lambda c: c.execute(ended))


def remove_expired(connection: sa.Connection, author: Author) -> int:
    """Removes expired leases; returns their number."""
    return connection.execute(leases.delete().where(leases.c.expires_at <= author.now)).rowcount
