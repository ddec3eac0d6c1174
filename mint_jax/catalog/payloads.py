"""Payloads: immutable objects by place, many in one pack, in a folder or a bucket. Knows bytes and digests, no names."""

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mint_jax.catalog import pack_format, storage
from mint_jax.catalog.pack_format import Name, PackDamaged, Place
from mint_jax.catalog.packed import Buffer, as_bytes
from mint_jax.catalog.storage import PackMissing, StorageFailed

__all__ = ["PackDamaged", "PackInfo", "PackMissing", "PayloadStore", "Place", "StorageFailed"]

TAIL = 64 << 10  # bytes read at once from a pack's end: the trailer of 1,300 objects


class PackInfo(NamedTuple):
    """A pack as listed.

    Attributes:
        name: unique for ever.
        bytes: of the whole pack.
        mtime: seconds since 1970 when it was written; from a bucket when its writing began, by the writer's clock.
    """

    name: str
    bytes: int
    mtime: float


class PayloadStore:
    """Packs of objects at a URL. May be used by several threads and processes at once.

    Args:
        url: a folder's path, ``file:///path``, ``s3://bucket/path``, ``gs://bucket/path`` or ``memory://name``.
        timeout: seconds after which one request to a bucket, with all its retries, is an error.
    """

    def __init__(self, url: str | os.PathLike[str], timeout: float = 60.0):
        self._storage = storage.open_storage(os.fspath(url), timeout)
        self.url = self._storage.url

    def put(self, objects: Iterable[Buffer]) -> list[Place]:
        """Stores objects in one new pack; all are durable when it returns, or none is there.

        Args:
            objects: bytes-like, read one by one: a generator need not hold them all.

        Raises:
            UserError: the storage is full, refuses or does not answer.
        """
        writer, entries, position = None, [], 0
        try:
            for data in objects:
                view = as_bytes(data).data
                writer = writer or self._storage.writer(pack_format.new_stem())
                pad = pack_format.padding(position, len(view))
                writer.write(bytes(pad))
                writer.write(view)
                entries.append((hashlib.sha256(view).digest(), position + pad, len(view)))
                position += pad + len(view)
            if writer is None:
                return []
            pad = pack_format.padding(position, 0)
            trailer = pack_format.trailer(entries, position + pad)
            writer.write(bytes(pad) + trailer)
            name = str(writer.commit(position + pad + len(trailer)))
        except BaseException:
            if writer is not None:
                writer.abort()
            raise
        return [Place(name, offset, length) for _, offset, length in entries]

    def read(self, place: Place) -> np.ndarray:
        """An object's bytes, read-only uint8; from a folder a memory map where it is 1 MiB or more.

        Raises:
            PackMissing: no such pack.
            PackDamaged: it is too short.
            UserError: the storage refuses or does not answer.
        """
        return next(self.read_many([place]))

    def read_many(self, places: Iterable[Place]) -> Iterator[np.ndarray]:
        """The objects in the order of ``places``; from a bucket several requests are under way at once."""
        places = list(places)
        pieces = [list(self._pieces(place)) for place in places]
        found = self._storage.read(piece for of_one in pieces for piece in of_one)
        for place, of_one in zip(places, pieces, strict=True):
            yield _join([next(found) for _ in of_one], place.length)

    def _pieces(self, place: Place) -> Iterator[storage.Piece]:
        name = Name.parse(place.pack)
        if place.offset < 0 or place.length < 0 or place.offset + place.length > name.size:
            raise PackDamaged(f"{place} is not inside its pack of {name.size} bytes: the database that says so is damaged")
        return name.pieces(place.offset, place.offset + place.length)

    def delete(self, pack: str) -> None:
        """Removes a pack; one that is gone already is fine. Who holds an object read from it keeps it."""
        name = Name.parse(pack)
        for key in [name.key, *name.parts]:  # first the object that makes it a pack
            self._storage.delete(key)

    def packs(self) -> Iterator[PackInfo]:
        """All packs, whole ones only."""
        for digit in "0123456789abcdef":
            for key in self._storage.list(f"packs/{digit}"):
                name = _name_in(key)
                modified = None if name is None else self._storage.modified(key)
                if name is not None and modified is not None:
                    yield PackInfo(str(name), name.size, modified)

    def index(self, pack: str) -> list[tuple[str, Place]]:
        """Digest and place of each object of a pack, from its trailer.

        Raises:
            PackMissing: no such pack.
            PackDamaged: the trailer or the length is not as written.
        """
        name = Name.parse(pack)
        tail = self.read(Place(pack, max(0, name.size - TAIL), min(name.size, TAIL))).tobytes()
        size = pack_format.table_size(tail[-pack_format.FOOTER.size :], name) + pack_format.FOOTER.size
        if size > len(tail):
            tail = self.read(Place(pack, name.size - size, size)).tobytes()
        return pack_format.read_trailer(tail[-size:], name)


def _name_in(key: str) -> Name | None:
    tail = Path(key).name
    try:
        name = Name.parse(tail.removesuffix(".pack"))
    except ValueError:
        return None
    return name if key == name.key else None


def _join(pieces: Sequence[np.ndarray], length: int) -> np.ndarray:
    if len(pieces) == 1:
        return pieces[0]
    data = np.empty(length, np.uint8)
    at = 0
    for piece in pieces:
        data[at : at + piece.size] = piece
        at += piece.size
    data.flags.writeable = False
    return data
