"""Packs in a folder, through the file system.

A pack is staged, synced, renamed into place, and its folder synced. Large objects are read as
memory maps. TensorStore's file driver would copy them when reading and writing: see ``payloads``.
"""

import contextlib
import ctypes
import errno
import mmap
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from mint_jax.catalog.storage import pack_format
from mint_jax.catalog.storage.pack_format import (
    Name,
    PackDamaged,
    PackMissing,
    Piece,
    StorageFailed,
)
from mint_jax.errors import UserError
from mint_jax.files import sync_folder


class Folder:
    """Packs in a folder. The first write makes it, so a read-only folder can be opened."""

    def __init__(self, root: Path):
        self.root = root.absolute()
        self.url = str(self.root)
        self._made: set[str] = set()  # folders that are durable
        with self.explained("read"):
            if self.root.exists() and not self.root.is_dir():
                raise UserError(f"{self.root} is not a folder: payloads need one")

    def writer(self, stem: str) -> "_FileWriter":
        return _FileWriter(self, stem)

    def make(self, relative: str) -> Path:
        """Makes a durable folder below the root."""
        path = self.root / relative
        if relative not in self._made:
            for folder in reversed([path, *path.parents]):
                inside = folder != self.root and folder.is_relative_to(self.root)
                # another process may have made it and not yet synced it
                if not folder.is_dir() or inside:
                    folder.mkdir(exist_ok=True)
                    sync_folder(folder.parent)
            self._made.add(relative)
        return path

    def read(self, pieces: Iterable[Piece]) -> Iterator[np.ndarray]:
        return (self._read(*piece) for piece in pieces)

    def _read(self, key: str, begin: int, end: int) -> np.ndarray:
        damage = f"{key} in {self.url} ends before byte {end}: it was cut off"
        with self.explained("read"):
            try:
                handle = os.open(f"{self.url}/{key}", os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                raise PackMissing(
                    f"{key} is not in {self.url}: resolve the revision again, or check the folder"
                ) from None
            try:
                if end - begin >= pack_format.MAPPED:
                    # before allocating; a map beyond the end would kill the process
                    if os.fstat(handle).st_size < end:
                        raise PackDamaged(damage)
                    if begin % pack_format.PAGE == 0:
                        return np.asarray(_Mapping(handle, begin, end - begin))
                data = _aligned(end - begin)
                if os.preadv(handle, [data.data], begin) != data.size:
                    raise PackDamaged(damage)
            finally:
                os.close(handle)
        data.flags.writeable = False
        return data

    def list(self, prefix: str) -> list[str]:
        """Returns the keys of files below ``prefix``, a folder, in order."""

        def fail(error: OSError) -> None:
            if not isinstance(error, FileNotFoundError):
                raise error

        with self.explained("list"):
            walk = os.walk(self.root / prefix, onerror=fail)
            return sorted(
                os.path.relpath(f"{folder}/{name}", self.root)
                for folder, _, files in walk
                for name in files
            )

    def delete(self, key: str) -> None:
        with self.explained("delete"):
            (self.root / key).unlink(missing_ok=True)

    @contextlib.contextmanager
    def explained(self, doing: str) -> Iterator[None]:
        """Turns an ``OSError`` into a ``UserError`` of one line."""
        try:
            yield
        except OSError as error:
            self._made.clear()  # one of them may be gone
            remedies = (remedy for codes, remedy in _REMEDIES.items() if error.errno in codes)
            raise StorageFailed(
                f"cannot {doing} payloads in {self.url} ({error.strerror or error}):"
                f" {next(remedies, 'check the disk')}"
            ) from None


_REMEDIES = {
    (errno.ENOENT, errno.ENOTDIR, errno.EEXIST): "a folder on the way is missing or no folder",
    (errno.ENOSPC, errno.EDQUOT): "free disk space, run gc, or choose a larger disk",
    (errno.EROFS, errno.EACCES, errno.EPERM): (
        "the folder is read-only for this user; change its rights or choose another"
    ),
    (errno.EMFILE, errno.ENFILE): "raise the limit of open files (ulimit -n)",
}


class _FileWriter:
    """Stages a file, then syncs it, renames it into place and syncs the folder."""

    def __init__(self, folder: Folder, stem: str):
        self._folder = folder
        self._stem = stem
        with folder.explained("write"):
            self._path = folder.make("staging") / stem
            self._file = open(self._path, "xb", buffering=1 << 20)  # noqa: SIM115 - closed by commit or abort

    def write(self, data: memoryview | bytes) -> None:
        with self._folder.explained("write"):
            self._file.write(data)

    def commit(self, size: int) -> Name:
        name = Name(self._stem, size, 0)
        with self._folder.explained("write"):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            place = self._folder.root / name.key
            self._folder.make(name.key.rpartition("/")[0])
            os.rename(self._path, place)
            sync_folder(place.parent)
        return name

    def abort(self) -> None:
        # a full disk may refuse the flush; the file is removed anyway, or by a sweep later
        for undo in (self._file.close, self._path.unlink):
            with contextlib.suppress(OSError):
                undo()


def _aligned(size: int) -> np.ndarray:
    """Returns uninitialised bytes at a multiple of 64, as XLA wants them."""
    data = np.empty(size + 64, np.uint8)
    start = -data.ctypes.data % 64
    return data[start : start + size]


_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value


class _Mapping:
    """A read-only memory map without an open file: Python's ``mmap`` keeps one per map, and a cache
    may hold thousands of maps.
    """

    def __init__(self, handle: int, offset: int, length: int):
        self._length = length
        self._address = _LIBC.mmap(None, length, mmap.PROT_READ, mmap.MAP_SHARED, handle, offset)
        if self._address == _FAILED:
            self._address = None
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (length,),
            "data": (self._address, True),
        }

    def __del__(self, munmap=_LIBC.munmap):  # globals may be gone when the interpreter ends
        if self._address is not None:
            munmap(self._address, self._length)
