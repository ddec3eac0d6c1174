"""Verification: damage in payloads and in the database, and the revisions that it concerns.

Payloads are compared with their digests. The database checks itself: SQLite by ``PRAGMA
integrity_check``, PostgreSQL by the checksums of its pages.
"""

import dataclasses
from collections.abc import Callable, Iterator

import sqlalchemy as sa

from mint_jax.catalog.records import lookup
from mint_jax.catalog.records.database import DatabaseFailed
from mint_jax.catalog.records.handle import Handle
from mint_jax.catalog.records.names import full_name
from mint_jax.catalog.records.tables import packs, payloads, policies, revisions
from mint_jax.catalog.storage.payloads import Place
from mint_jax.errors import UserError

PAGE = 500  # payloads


@dataclasses.dataclass(frozen=True)
class Finding:
    """One damaged thing."""

    kind: str  # ``payload`` or ``database``
    what: str
    digest: str | None = None
    revisions: tuple[str, ...] = ()  # ``policy@number`` of every revision it concerns


def verify(
    catalog: Handle, name: str | None = None, progress: Callable[[int, int], None] | None = None
) -> Iterator[Finding]:
    """Finds damage in one revision's bytes, or anywhere; reads all of it once and changes nothing.
    ``progress``: called with payloads and bytes checked so far.
    """
    if name is not None:
        found = lookup.resolve(catalog, name)
        yield from _check(catalog, found.digest, found.place)
        return
    for line in catalog.database.damage():
        yield Finding("database", line)
    count = size = 0
    try:
        for digest, place in _all_payloads(catalog):
            yield from _check(catalog, digest, place)
            count, size = count + 1, size + place.length
            if progress is not None:
                progress(count, size)
    except DatabaseFailed as error:
        yield Finding("database", str(error))


def _all_payloads(catalog: Handle) -> Iterator[tuple[str, Place]]:
    """All payloads, in the order in which they lie in their packs."""
    order = (payloads.c.pack_id, payloads.c.offset)
    query = sa.select(payloads, packs.c.name).join(packs).order_by(*order).limit(PAGE)
    last = (0, 0)
    while some := catalog.database.rows(query.where(sa.tuple_(*order) >= sa.tuple_(*last))):
        for row in some:
            yield row.digest.hex(), Place(row.name, row.offset, row.length)
        last = (some[-1].pack_id, some[-1].offset + 1)


def _check(catalog: Handle, digest: str, place: Place) -> Iterator[Finding]:
    try:
        catalog.store.read(place, digest)
    except UserError as error:
        raw = bytes.fromhex(digest)
        # it may have been moved or removed since its row was read
        query = sa.select(packs.c.name, payloads.c.offset).join_from(payloads, packs)
        now = catalog.database.rows(query.where(payloads.c.digest == raw))
        if [tuple(row) for row in now] == [place[:2]]:
            yield Finding("payload", str(error), digest, _revisions_of(catalog, raw))


def _revisions_of(catalog: Handle, digest: bytes) -> tuple[str, ...]:
    query = sa.select(policies.c.tenant, policies.c.name, revisions.c.number)
    query = query.join_from(policies, revisions, revisions.c.policy_id == policies.c.id)
    found = catalog.database.rows(query.where(revisions.c.digest == digest))
    return tuple(
        sorted(f"{full_name(tenant, name)}@{number}" for tenant, name, number in map(tuple, found))
    )
