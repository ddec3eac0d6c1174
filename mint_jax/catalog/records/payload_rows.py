"""Payloads as the database knows them: their digests, packs and places; and how bytes come in
before the rows that name them.

The bytes are durable first, then one transaction makes what names them visible. Bytes that the
catalog holds already are not stored again.
"""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import sqlalchemy as sa

from mint_jax.catalog.packed import Buffer
from mint_jax.catalog.records.audit import Author
from mint_jax.catalog.records.database import Database, chunks, insert_new
from mint_jax.catalog.records.tables import packs, payloads
from mint_jax.catalog.storage.pack_format import Name
from mint_jax.catalog.storage.payloads import Place
from mint_jax.errors import UserError

ATTEMPTS = 5


class Store(Protocol):
    """What exports need of a payload store."""

    def put(
        self, objects: Iterable[Buffer], digests: Iterable[str] | None = None
    ) -> list[Place]: ...
    def delete(self, pack: str) -> None: ...


class Vanished(Exception):
    """Payloads that were counted on have been removed meanwhile: put them again."""

    def __init__(self, digests: Iterable[bytes]):
        super().__init__()
        self.digests = set(digests)


def store_and_commit(database: Database, store: Store, objects: dict[bytes, Buffer], commit) -> Any:
    """Makes ``objects`` durable, then runs ``commit(connection, places)``; again where garbage
    collection was in between.

    Args:
        objects: bytes by digest.
        commit: writes rows; raises ``Vanished`` for payloads that are neither in the database nor
            in ``places``.
    """
    held = database.read(lambda c: known(c, list(objects)))
    places: dict[bytes, Place] = {}
    for _ in range(ATTEMPTS):
        missing = [digest for digest in objects if digest not in held and digest not in places]
        if missing:
            stored = store.put(
                [objects[digest] for digest in missing], [digest.hex() for digest in missing]
            )
            places.update(zip(missing, stored))
        try:
            result = database.write(lambda c: commit(c, places))
            _delete_unused(database, store, {place.pack for place in places.values()})
            return result
        except Vanished as gone:
            for digest in gone.digests:
                held.pop(digest, None)
                places.pop(digest, None)
    raise UserError(
        f"payloads of {len(objects)} exports were removed {ATTEMPTS} times while they were written:"
        " lengthen gc's grace period"
    )


def _delete_unused(database: Database, store: Store, names: set[str]) -> None:
    """Removes those of our packs whose bytes another writer committed first: no payload was ever in
    them. Killed before, gc does it.
    """

    def unused(connection: sa.Connection) -> list[str]:
        used = sa.exists().where(payloads.c.pack_id == packs.c.id)
        return list(
            connection.scalars(
                sa.select(packs.c.name).where(
                    packs.c.name.in_(names), packs.c.state == "dead", ~used
                )
            )
        )

    if names and (lost := database.read(unused)):
        for name in lost:
            store.delete(name)
        database.write(
            lambda c: c.execute(
                packs.delete().where(packs.c.name.in_(lost), packs.c.state == "dead")
            )
        )


def known(connection: sa.Connection, digests: list[bytes]) -> dict[bytes, int | None]:
    """Schema ids of those payloads that the catalog holds; they stay until the transaction ends."""
    found: dict[bytes, int | None] = {}
    for chunk in chunks(sorted(digests)):
        query = (
            sa.select(payloads.c.digest, payloads.c.schema_id)
            .where(payloads.c.digest.in_(chunk))
            .order_by(payloads.c.digest)
        )
        for row in connection.execute(query.with_for_update(read=True, key_share=True)):
            found[row.digest] = row.schema_id
    return found


def add_payloads(
    connection: sa.Connection,
    author: Author,
    needed: dict[bytes, int | None],
    places: dict[bytes, Place],
    finite: Mapping[bytes, bool] = MappingProxyType({}),
) -> None:
    """Payload rows, by digest with their schema's id.

    Args:
        finite: of adapters, whether all their weights are: the loads that follow go by it.

    Raises:
        Vanished: a payload is neither in the database nor in ``places``, or its pack was swept as
            abandoned.
    """
    new = {digest: places[digest] for digest in sorted(needed) if digest in places}
    if new:
        ids = enter_packs(connection, author, list(new.values()))
        if dead := {digest for digest, place in new.items() if place.pack not in ids}:
            raise Vanished(dead)
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
        unused = sa.and_(
            packs.c.id.in_(set(ids.values())), ~sa.exists().where(payloads.c.pack_id == packs.c.id)
        )
        connection.execute(packs.update().where(unused).values(state="dead", changed_at=author.now))
    found = known(connection, list(needed))
    without_schema = {
        digest for digest, schema in found.items() if schema is None and needed[digest] is not None
    }
    for digest in sorted(without_schema):  # stored as something else before, such as a rollout
        values = {"schema_id": needed[digest], "finite": finite.get(digest)}
        connection.execute(payloads.update().where(payloads.c.digest == digest).values(**values))
    if missing := needed.keys() - found.keys():
        raise Vanished(missing)


def enter_packs(
    connection: sa.Connection, author: Author, places: Sequence[Place]
) -> dict[str, int]:
    """Rows of new packs; their ids by name, without packs that were swept as abandoned
    meanwhile.
    """
    sizes: dict[str, int] = {}
    for place in places:
        sizes[place.pack] = Name.parse(place.pack).size
    rows = [
        {"name": name, "bytes": sizes[name], "state": "live", "changed_at": author.now}
        for name in sorted(sizes)
    ]
    insert_new(connection, packs, rows)
    query = sa.select(packs).where(packs.c.name.in_(list(sizes))).with_for_update(read=True)
    return {pack.name: pack.id for pack in connection.execute(query) if pack.state == "live"}


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
