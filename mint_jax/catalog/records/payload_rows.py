"""Payloads in the database: digests, packs and places.

New bytes are made durable first; then one transaction adds the rows that refer to them. Bytes that
the catalog has already are not stored again.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TypeVar

import sqlalchemy as sa

from mint_jax.catalog.packed import Buffer
from mint_jax.catalog.records.audit import Author
from mint_jax.catalog.records.database import Database, chunks, insert_new
from mint_jax.catalog.records.tables import packs, payloads
from mint_jax.catalog.storage.pack_format import Name
from mint_jax.catalog.storage.payloads import PayloadStore, Place
from mint_jax.errors import UserError

T = TypeVar("T")
ATTEMPTS = 5


class Vanished(Exception):
    """Payloads that a commit relied on were removed meanwhile; store them again."""

    def __init__(self, digests: Iterable[bytes]):
        self.digests = set(digests)


def store_and_commit(
    database: Database,
    store: PayloadStore,
    objects: dict[bytes, Buffer],
    commit: Callable[[sa.Connection, dict[bytes, Place]], T],
) -> T:
    """Makes ``objects`` durable, then runs ``commit(connection, places)``; repeats both if garbage
    collection removed a payload in between.

    Args:
        objects: bytes by digest.
        commit: writes rows; raises ``Vanished`` for payloads that are neither in the database nor
            in ``places``.
    """
    stored = set(database.read(lambda c: known(c, list(objects))))
    places: dict[bytes, Place] = {}
    for _ in range(ATTEMPTS):
        if missing := [digest for digest in objects if digest not in stored]:
            places.update(zip(missing, store.put([objects[digest] for digest in missing])))
            stored.update(missing)
        try:
            return database.write(lambda c: commit(c, places))
        except Vanished as gone:
            stored -= gone.digests
            for digest in gone.digests:
                places.pop(digest, None)
    raise UserError(
        f"payloads of {len(objects)} exports were removed {ATTEMPTS} times while they were written:"
        " lengthen gc's grace period"
    )


def known(connection: sa.Connection, digests: list[bytes]) -> dict[bytes, int | None]:
    """Returns schema ids of the payloads that the catalog holds; on PostgreSQL they stay until the
    transaction ends.
    """
    found: dict[bytes, int | None] = {}
    for chunk in chunks(sorted(digests)):
        query = sa.select(payloads.c.digest, payloads.c.schema_id)
        query = query.where(payloads.c.digest.in_(chunk)).order_by(payloads.c.digest)
        query = query.with_for_update(read=True, key_share=True)
        found |= dict(connection.execute(query).tuples().all())
    return found


def add_payloads(
    connection: sa.Connection,
    author: Author,
    needed: dict[bytes, int | None],
    places: dict[bytes, Place],
    finite: Mapping[bytes, bool] = MappingProxyType({}),
) -> None:
    """Adds payload rows. Raises ``Vanished``: payloads that are neither in the database nor in
    ``places``.

    Args:
        needed: schema ids by digest; None for a payload that is not an adapter.
        places: places of new payloads, whose packs are entered too. A pack of ours that no payload
            is in, because all came from other writers meanwhile, is marked dead, for ``gc``.
        finite: True for payloads whose weights are all finite.
    """
    new = {digest: places[digest] for digest in sorted(needed) if digest in places}
    if new:
        ids = enter_packs(connection, author, list(new.values()))
        if swept := {digest for digest, place in new.items() if place.pack not in ids}:
            raise Vanished(swept)
        rows = [
            {
                "digest": digest,
                "schema_id": needed[digest],
                "pack_id": ids[place.pack],
                "offset": place.offset,
                "length": place.length,
                "created_at": author.now,
                "finite": finite.get(digest),
            }
            for digest, place in new.items()
        ]
        insert_new(connection, payloads, rows)
        empty = ~sa.exists().where(payloads.c.pack_id == packs.c.id)
        unused = packs.update().where(packs.c.id.in_(set(ids.values())), empty)
        connection.execute(unused.values(state="dead", changed_at=author.now))
    found = known(connection, list(needed))
    for digest in sorted(found):
        if found[digest] is None and needed[digest] is not None:  # stored as a rollout before
            update = payloads.update().where(payloads.c.digest == digest)
            values = {"schema_id": needed[digest], "finite": finite.get(digest)}
            connection.execute(update.values(**values))
    if missing := needed.keys() - found.keys():
        raise Vanished(missing)


def enter_packs(
    connection: sa.Connection, author: Author, places: Sequence[Place]
) -> dict[str, int]:
    """Adds rows of new packs; returns ids by name, without packs swept as abandoned meanwhile."""
    about = {"state": "live", "changed_at": author.now}
    names = sorted({place.pack for place in places})
    rows = [{"name": name, "bytes": Name.parse(name).size, **about} for name in names]
    insert_new(connection, packs, rows)
    query = sa.select(packs).where(packs.c.name.in_(names))
    found = connection.execute(query.with_for_update(read=True))
    return {pack.name: pack.id for pack in found if pack.state == "live"}


def place_of(connection: sa.Connection, digest: str) -> Place:
    """Returns the place of any payload, of a revision or not. Raises ``UserError``: the catalog
    does not hold it.
    """
    query = sa.select(packs.c.name, payloads.c.offset, payloads.c.length).join_from(payloads, packs)
    found = connection.execute(query.where(payloads.c.digest == bytes.fromhex(digest))).first()
    if found is None:
        raise UserError(f"payload {digest[:12]} is not in the catalog, or was removed")
    return Place(*found)
