"""Leases: payloads that a request or an engine uses and that must not be removed.

Leases come and go with requests and change no name, so the audit log does not record them. A
read-only catalog records no lease; there gc's grace period protects a reader.
"""

import dataclasses
from collections.abc import Callable, Sequence

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
    named = parse_revision(name, tenant)

    def find(connection: sa.Connection) -> list[str]:
        return [lookup.resolved(lookup.find(connection, named, name)).digest]

    return _take(catalog, find, owner, seconds)[0]


def lease_many(
    catalog: Handle, digests: Sequence[str], owner: str, seconds: float = 60.0
) -> list[Lease]:
    """Takes leases on payloads in one transaction: all of them or none. Raises ``UserError``: a
    payload was removed.
    """
    return _take(catalog, lambda _: digests, owner, seconds)


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


def read_leased(catalog: Handle, lease: Lease, verified: bool = True) -> np.ndarray:
    """Loads the packed object that a lease keeps, also after its revision was retired.
    ``verified``: compare the bytes with the digest; False for a caller that does so itself, such as
    residency.
    """
    return lookup.load_payload(catalog, lease.digest, verified)


def _take(
    catalog: Handle, find: Callable[[sa.Connection], Sequence[str]], owner: str, seconds: float
) -> list[Lease]:
    """Leases the payloads whose digests ``find`` returns, in one transaction."""
    note("owner", owner, 400)
    expires = catalog.clock() + duration("length of a lease", seconds)

    def body(connection: sa.Connection) -> list[Lease]:
        made = []
        for digest in find(connection):
            if not known(connection, [bytes.fromhex(digest)]):
                raise UserError(
                    f"revision {digest[:12]} was removed from the catalog: resolve the name again"
                )
            number = 0
            if not catalog.database.read_only:
                values = {"digest": bytes.fromhex(digest), "owner": owner, "expires_at": expires}
                number = connection.scalar(leases.insert().returning(leases.c.id), values) or 0
            made.append(Lease(number, digest, owner, expires))
        return made

    database = catalog.database
    return database.read(body) if database.read_only else database.write(body)


def remove_expired(connection: sa.Connection, author: Author) -> int:
    """Removes expired leases; returns their number."""
    return connection.execute(leases.delete().where(leases.c.expires_at <= author.now)).rowcount
