"""Payloads: immutable objects by place, many in one pack, in a folder or a bucket.

A pack (see ``pack_format``) exists whole or not at all: in a folder it is staged, synced and
renamed; in a bucket its last object commits it. Leftovers of a killed writer are never listed as a
pack, and ``sweep`` removes them. ``configs/bench/revision_stores.py`` compares packs with Orbax and
TensorStore; its file driver copies the whole value, which costs 100 MiB more for 100 MiB.
"""

import itertools
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote, urlsplit

import numpy as np

from mint_jax.catalog.packed import Buffer, as_bytes, digest_of
from mint_jax.catalog.storage import pack_format
from mint_jax.catalog.storage.folder import Folder
from mint_jax.catalog.storage.pack_format import (
    Name,
    PackDamaged,
    PackMissing,
    Piece,
    Place,
    StorageFailed,
)
from mint_jax.errors import UserError

if TYPE_CHECKING:
    from mint_jax.catalog.storage.bucket import Bucket

__all__ = ["PackDamaged", "PackInfo", "PackMissing", "PayloadStore", "Place", "StorageFailed"]

# older leftovers have no writer: ``put`` commits nothing that took half as long
ABANDONED_S = 24 * 3600.0


class PackInfo(NamedTuple):
    """A pack as listed."""

    name: str
    bytes: int
    started_at: float  # when its writing started, in seconds since 1970 by the writer's clock


class PayloadStore:
    """Packs of objects at a URL, for several threads and processes at once.

    Args:
        url: a folder's path, ``file:///path``, ``s3://bucket/path``, ``gs://bucket/path`` or
            ``memory://name``.
        timeout: seconds until one request to a bucket, with all its retries, fails.
    """

    def __init__(self, url: str | os.PathLike[str], timeout: float = 60.0):
        self._storage = _open_storage(os.fspath(url), timeout)
        self.url = self._storage.url

    def put(self, objects: Iterable[Buffer]) -> list[Place]:
        """Stores objects, read one by one, in one new pack; returns their places. All are durable
        on return, none is stored after an error. Raises ``UserError``: the storage is full, refuses
        or does not answer.
        """
        objects, places, position, start = iter(objects), [], 0, time.monotonic()
        if (first := next(objects, None)) is None:
            return []
        writer = self._storage.writer(pack_format.new_stem())
        try:
            for data in itertools.chain([first], objects):
                view = as_bytes(data)
                pad = pack_format.padding(position, view.size)
                writer.write(bytes(pad))
                writer.write(view.data)
                places.append((position + pad, view.size))
                position += pad + view.size
            if not position:  # only empty objects: a pack has at least one byte
                writer.write(b"\0")
            if time.monotonic() - start > ABANDONED_S / 2:
                raise StorageFailed(
                    f"writing a pack in {self.url} took {time.monotonic() - start:.0f} s: put fewer"
                    " objects at once"
                )
            name = str(writer.commit(max(position, 1)))
        except BaseException:
            writer.abort()
            raise
        return [Place(name, offset, length) for offset, length in places]

    def read(self, place: Place, digest: str | None = None) -> np.ndarray:
        """Returns an object's bytes, read-only uint8; from a folder a memory map if 1 MiB or more.
        Raises ``PackMissing``: no such pack; ``PackDamaged``: the pack is too short, or the bytes
        do not match the digest; ``UserError``: the storage refuses or does not answer. ``digest``:
        compared with all bytes if given.
        """
        data = next(self.read_many([place]))
        if digest is not None and (found := digest_of(data)) != digest:
            raise PackDamaged(
                f"revision {digest[:12]} is damaged: {place.length} bytes at {place.offset} of pack"
                f" {place.pack} have digest {found[:12]}; export or import it again"
            )
        return data

    def read_many(self, places: Iterable[Place]) -> Iterator[np.ndarray]:
        """Yields the objects in order; from a bucket with several requests in flight."""
        pieces = [list(self._pieces(place)) for place in places]
        found = self._storage.read(piece for of_one in pieces for piece in of_one)
        return (_join([next(found) for _ in of_one]) for of_one in pieces)

    def _pieces(self, place: Place) -> Iterator[Piece]:
        name = Name.parse(place.pack)
        if place.offset < 0 or place.length < 0 or place.offset + place.length > name.size:
            raise PackDamaged(
                f"{place} is not inside its pack of {name.size} bytes: the database is damaged"
            )
        return name.pieces(place.offset, place.offset + place.length)

    def delete(self, pack: str) -> None:
        """Removes a pack, if it exists; objects read from it stay valid."""
        name = Name.parse(pack)
        for key in [name.key, *name.parts]:  # first the object that commits it
            self._storage.delete(key)

    def packs(self) -> Iterator[PackInfo]:
        """Lists all committed packs."""
        for key in self._storage.list("packs/"):
            try:
                name = Name.parse(Path(key).stem)
            except UserError:  # another program's file
                continue
            if key == name.key:
                yield PackInfo(str(name), name.size, pack_format.started_at(name.stem))

    def sweep(self, older_s: float = ABANDONED_S, dry_run: bool = False) -> list[str]:
        """Removes leftovers of killed writers: staged files, and parts of uncommitted packs.
        ``older_s``: minimum age in seconds. Less than the default only while no process writes.

        Returns:
            Keys removed, or that would be.
        """
        found = list(self._storage.list("staging/"))
        if parts := list(self._storage.list("parts/")):
            # packs are listed after parts: these were not committed in between
            whole = {pack_format.stem_of(key) for key in self._storage.list("packs/")}
            found += [key for key in parts if pack_format.stem_of(key) not in whole]
        limit, left = time.time() - older_s, []
        for key in found:
            stem = pack_format.stem_of(key)
            if stem is not None and pack_format.started_at(stem) <= limit:
                left.append(key)
                if not dry_run:
                    self._storage.delete(key)
        return left


def _open_storage(url: str, timeout: float) -> "Folder | Bucket":
    """Opens a folder or bucket. Raises ``UserError`` for other URLs."""
    if "://" not in url:
        return Folder(Path(url))
    parts = urlsplit(url)
    if parts.scheme != "file":
        return bucket_at(url, timeout)
    if parts.netloc not in ("", "localhost") or not parts.path:
        raise UserError(f"{url} is not the URL of a folder here; write file:///absolute/path")
    return Folder(Path(unquote(parts.path)))


def bucket_at(url: str, timeout: float) -> "Bucket":
    """Opens a bucket at ``s3://bucket/path``, ``gs://bucket/path``, or ``memory://name``. Raises
    ``UserError`` for other URLs.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("s3", "gs", "memory") or not parts.netloc:
        raise UserError(
            f"{url} is not a place for payloads; write a folder's path, s3://bucket/path,"
            " gs://bucket/path or memory://name"
        )
    # TensorStore takes 0.3 s to import, and a folder does not need it
    from mint_jax.catalog.storage.bucket import Bucket

    return Bucket(url, parts.scheme, parts.netloc, parts.path.strip("/"), timeout)


def _join(pieces: Sequence[np.ndarray]) -> np.ndarray:
    if len(pieces) == 1:
        return pieces[0]
    data = np.concatenate([np.empty(0, np.uint8), *pieces])
    data.flags.writeable = False
    return data
