"""Payloads: immutable objects by place, many in one pack, in a folder or a bucket. Knows bytes and
digests, no names.

A pack (see ``pack_format``) is there whole or not at all: in a folder it is written aside, synced
and renamed; in a bucket it exists with its last object. What a killed writer leaves is never listed
as a pack and is removed by ``sweep``.

Why packs are not Orbax checkpoints, which training checkpoints are, and which ``export
--format=orbax`` writes: ``configs/bench/revision_stores.py`` measures both, and TensorStore's zarr3
and OCDBT, in a folder and on S3. TensorStore's file driver commits in a folder as fast as
``folder`` does (both 8 ms, two syncs), but wants the whole value in one piece and copies it: 100
MiB more for 100 MiB.
"""

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

import numpy as np

from mint_jax.catalog.packed import Buffer, as_bytes, digest_of
from mint_jax.catalog.storage import pack_format
from mint_jax.catalog.storage.folder import Folder
from mint_jax.catalog.storage.interface import PackMissing, Piece, Storage, StorageFailed
from mint_jax.catalog.storage.pack_format import Name, PackDamaged, Place
from mint_jax.errors import UserError

__all__ = ["PackDamaged", "PackInfo", "PackMissing", "PayloadStore", "Place", "StorageFailed"]

# leftovers so old have no writer: ``put`` commits nothing that took half as long
ABANDONED_S = 24 * 3600.0
TAIL = 64 << 10  # bytes read at once from a pack's end: the trailer of 1,300 objects


class PackInfo(NamedTuple):
    """A pack as listed.

    Attributes:
        name: unique for ever.
        bytes: of the whole pack.
        mtime: seconds since 1970 when it was written; from a bucket when its writing began, by the
            writer's clock.
    """

    name: str
    bytes: int
    mtime: float


class PayloadStore:
    """Packs of objects at a URL. May be used by several threads and processes at once.

    Args:
        url: a folder's path, ``file:///path``, ``s3://bucket/path``, ``gs://bucket/path`` or
            ``memory://name``.
        timeout: seconds after which one request to a bucket, with all its retries, is an error.
    """

    def __init__(self, url: str | os.PathLike[str], timeout: float = 60.0):
        self._storage = _open_storage(os.fspath(url), timeout)
        self.url = self._storage.url

    def put(self, objects: Iterable[Buffer], digests: Iterable[str] | None = None) -> list[Place]:
        """Stores objects in one new pack; all are durable when it returns, or none is there.

        Args:
            objects: bytes-like, taken one by one: a generator need not hold them all.
            digests: theirs, where the caller has just computed it; trusted.

        Returns:
            One place each, in order.

        Raises:
            UserError: the storage is full, refuses or does not answer.
        """
        pairs = (
            ((data, None) for data in objects)
            if digests is None
            else zip(objects, digests, strict=True)
        )
        writer, entries, position, start = None, [], 0, time.monotonic()
        try:
            for data, known in pairs:
                view = as_bytes(data)
                digest = bytes.fromhex(known or digest_of(view))
                writer = writer or self._storage.writer(pack_format.new_stem())
                pad = pack_format.padding(position, view.size)
                writer.write(bytes(pad))
                writer.write(view.data)
                entries.append((digest, position + pad, view.size))
                position += pad + view.size
            if writer is None:
                return []
            pad = pack_format.padding(position, 0)
            trailer = pack_format.trailer(entries, position + pad)
            writer.write(bytes(pad) + trailer)
            if time.monotonic() - start > ABANDONED_S / 2:
                raise StorageFailed(
                    f"writing a pack in {self.url} took {time.monotonic() - start:.0f} s: put fewer"
                    " objects at once"
                )
            name = str(writer.commit(position + pad + len(trailer)))
        except BaseException:
            if writer is not None:
                writer.abort()
            raise
        return [Place(name, offset, length) for _, offset, length in entries]

    def copy(self, places: Sequence[Place], digests: Sequence[str] | None = None) -> list[Place]:
        """Copies objects into one new pack and returns their new places; for compaction. The old
        ones stay.

        Args:
            places: of any packs, in the order wanted.
            digests: what they must be; by default what their packs' trailers say.

        Raises:
            PackDamaged: an object is not what its digest says; nothing is copied then.
        """
        if digests is None:
            known = {
                place: digest
                for pack in dict.fromkeys(p.pack for p in places)
                for digest, place in self.index(pack)
            }
            if lost := [place for place in places if place not in known]:
                raise PackDamaged(f"{lost[0]} is not in the trailer of its pack")
            digests = [known[place] for place in places]
        found = self.read_many(places)
        return self.put(
            (
                _verified(data, digest, place)
                for data, digest, place in zip(found, digests, places, strict=True)
            ),
            digests,
        )

    def read(self, place: Place, digest: str | None = None) -> np.ndarray:
        """An object's bytes, read-only uint8; from a folder a memory map where it has 1 MiB or
        more.

        Args:
            digest: verified when given; reads every byte.

        Raises:
            PackMissing: no such pack.
            PackDamaged: it is too short, or the bytes are not what the digest says.
            UserError: the storage refuses or does not answer.
        """
        data = next(self.read_many([place]))
        return data if digest is None else _verified(data, digest, place)

    def read_many(self, places: Iterable[Place]) -> Iterator[np.ndarray]:
        """The objects in the order of ``places``; from a bucket several requests are under way at
        once.
        """
        places = list(places)
        pieces = [list(self._pieces(place)) for place in places]
        found = self._storage.read(piece for of_one in pieces for piece in of_one)
        for place, of_one in zip(places, pieces, strict=True):
            yield _join([next(found) for _ in of_one], place.length)

    def _pieces(self, place: Place) -> Iterator[Piece]:
        if not (
            isinstance(place.pack, str)
            and isinstance(place.offset, int)
            and isinstance(place.length, int)
        ):
            raise PackDamaged(
                f"{place} is not a place in a pack: the database that says so is damaged"
            )
        name = Name.parse(place.pack)
        if place.offset < 0 or place.length < 0 or place.offset + place.length > name.size:
            raise PackDamaged(
                f"{place} is not inside its pack of {name.size} bytes: the database that says so is"
                " damaged"
            )
        return name.pieces(place.offset, place.offset + place.length)

    def delete(self, pack: str) -> None:
        """Removes a pack; one that is gone already is fine. Who holds an object read from it keeps
        it.
        """
        name = Name.parse(pack)
        for key in [name.key, *name.parts]:  # first the object that makes it a pack
            self._storage.delete(key)

    def exists(self, pack: str) -> bool:
        """Whether the pack is there; says nothing of its bytes."""
        return self._storage.has(Name.parse(pack).key)

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
        size = (
            pack_format.table_size(tail[-pack_format.FOOTER.size :], name) + pack_format.FOOTER.size
        )
        if size > len(tail):
            tail = self.read(Place(pack, name.size - size, size)).tobytes()
        return pack_format.read_trailer(tail[-size:], name)

    def sweep(self, older_s: float = ABANDONED_S, dry_run: bool = False) -> list[str]:
        """Removes what killed writers left: files in writing, and parts of packs that were never
        committed.

        Args:
            older_s: leaves alone what was written to within this many seconds. Less than the
                default only while no process writes.
            dry_run: removes nothing.

        Returns:
            Keys of what was (or would be) removed.
        """
        found = list(self._storage.list("staging/"))
        for digit in "0123456789abcdef":
            parts = list(self._storage.list(f"parts/{digit}"))
            whole = (
                {pack_format.stem_of(key) for key in self._storage.list(f"packs/{digit}")}
                if parts
                else set()
            )
            # listed first: not committed since
            found += [key for key in parts if pack_format.stem_of(key) not in whole]
        limit = time.time() - older_s
        left = [key for key in found if (self._storage.modified(key) or limit + 1) <= limit]
        for key in [] if dry_run else left:
            self._storage.delete(key)
        return left


def _open_storage(url: str, timeout: float) -> Storage:
    """A folder's path, ``file://``, ``s3://bucket/path``, ``gs://bucket/path`` or
    ``memory://name``.

    Raises:
        UserError: a URL of another kind.
    """
    if "://" not in url:
        return Folder(Path(url))
    parts = urlsplit(url)
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost") or not parts.path:
            raise UserError(f"{url} is not the URL of a folder here; write file:///absolute/path")
        return Folder(Path(unquote(parts.path)))
    if parts.scheme not in ("s3", "gs", "memory") or not parts.netloc:
        raise UserError(
            f"{url} is no place for payloads; write a folder's path, s3://bucket/path,"
            " gs://bucket/path or memory://name"
        )
    # TensorStore takes a third of a second to import, and a folder does without
    from mint_jax.catalog.storage.bucket import Bucket

    return Bucket(url, parts.scheme, parts.netloc, parts.path.strip("/"), timeout)


def _verified(data: np.ndarray, digest: str, place: Place) -> np.ndarray:
    found = digest_of(data)
    if found != digest:
        raise PackDamaged(
            f"revision {digest[:12]} is damaged: {place.length} bytes at {place.offset} of pack"
            f" {place.pack} have digest {found[:12]}; export or import it again"
        )
    return data


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
