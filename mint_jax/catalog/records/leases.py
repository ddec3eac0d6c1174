"""Leases: payloads that a request or an engine uses and that must not be removed.

Leases come and go with requests and change no name, so the audit log does not record them. A
read-only catalog records no lease; there gc's grace period protects a reader.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
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


def lease(
    catalog: Handle, name: str, owner: str, seconds: float = 60.0, tenant: str | None = None
) -> Lease:
    """Keeps the bytes that a name resolves to now, until released or expired."""
    if catalog.database.read_only:
        return lease_many(catalog, [lookup.resolve(catalog, name, tenant).digest], owner, seconds)[
            0
        ]
    named, author = parse_revision(name, tenant), catalog.author()
    return catalog.database.write(
        lambda c: _add(c, author, lookup.find(c, named, name).digest, owner, seconds)
    )


def lease_many(
    catalog: Handle, digests: Sequence[str], owner: str, seconds: float = 60.0
) -> list[Lease]:
    """Takes leases on payloads in one transaction: all of them or none.

    Raises:
        UserError: a payload was removed.
    """
    author = catalog.author()
    if catalog.database.read_only:
        return [Lease(0, digest, owner, author.now + seconds) for digest in digests]
    return catalog.database.write(
        lambda c: [_add(c, author, digest, owner, seconds) for digest in digests]
    )


def renew_lease(catalog: Handle, lease: Lease, seconds: float = 60.0) -> Lease:
    """Postpones a lease's expiry.

    Raises:
        UserError: it expired and was removed.
    """
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


def read_leased(catalog: Handle, lease: Lease, verified: bool = True) -> np.ndarray:
    """Loads the packed object that a lease keeps, also after its revision was retired.

    Args:
        verified: compare the bytes with the digest; False for a caller that does so itself, such
            as residency.
    """
    return lookup.load_payload(catalog, lease.digest, verified)


def _add(
    connection: sa.Connection, author: Author, digest: str, owner: str, seconds: float
) -> Lease:
    note("owner", owner, 400)
    duration("length of a lease", seconds)
    raw = bytes.fromhex(digest)
    if not known(connection, [raw]):
        raise UserError(
            f"revision {digest[:12]} was removed from the catalog: resolve the name again"
        )
    values = {"digest": raw, "owner": owner, "expires_at": author.now + seconds}
    number = connection.scalar(leases.insert().returning(leases.c.id), values)
    return Lease(number or 0, digest, owner, values["expires_at"])


def remove_expired(connection: sa.Connection, author: Author) -> int:
    """Removes expired leases; returns their number."""
    return connection.execute(leases.delete().where(leases.c.expires_at <= author.now)).rowcount
