"""Leases: a request or an engine keeps the bytes it uses from being removed, for a bounded time.

They come and go with requests and change what no name stands for, so the audit log does not record them.
"""

import sqlalchemy as sa

from mint_jax.catalog.audit import Author
from mint_jax.catalog.exports import known
from mint_jax.catalog.names import duration, note
from mint_jax.catalog.records import Lease
from mint_jax.catalog.tables import leases
from mint_jax.errors import UserError


def add(connection: sa.Connection, author: Author, digest: str, owner: str, seconds: float) -> Lease:
    """Keeps a payload for some seconds.

    Raises:
        UserError: the payload was removed.
    """
    note("owner", owner, 400)
    duration("length of a lease", seconds)
    raw = bytes.fromhex(digest)
    if not known(connection, [raw]):
        raise UserError(f"revision {digest[:12]} was removed from the catalog: resolve the name again")
    values = {"digest": raw, "owner": owner, "expires_at": author.now + seconds}
    number = connection.scalar(leases.insert().returning(leases.c.id), values)
    return Lease(number or 0, digest, owner, values["expires_at"])


def renew(connection: sa.Connection, author: Author, lease: Lease, seconds: float) -> Lease:
    """Keeps it longer.

    Raises:
        UserError: it expired and was removed.
    """
    expires = author.now + duration("length of a lease", seconds)
    if not connection.execute(leases.update().where(leases.c.id == lease.id).values(expires_at=expires)).rowcount:
        raise UserError(f"the lease of {lease.owner!r} on revision {lease.digest[:12]} expired: take a new one")
    return Lease(lease.id, lease.digest, lease.owner, expires)


def release(connection: sa.Connection, lease: Lease) -> None:
    """Ends a lease; one that ended already is fine."""
    connection.execute(leases.delete().where(leases.c.id == lease.id))


def remove_expired(connection: sa.Connection, author: Author) -> int:
    """Forgets expired leases."""
    return connection.execute(leases.delete().where(leases.c.expires_at <= author.now)).rowcount
