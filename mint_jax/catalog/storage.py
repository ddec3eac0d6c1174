"""Where packs lie: a folder through the file system, a bucket (``s3://``, ``gs://``) or ``memory://`` through TensorStore.

Both kinds offer the same: a writer that commits a pack whole or not at all, ranged reads, a listing and deletion of
keys. ``Folder`` does not go through TensorStore's file driver because that takes the whole value as one ``bytes`` and
copies it (a pack would be in memory three times), reads by copying, and is no faster: see ``payloads``.

Every failure that a user can mend is a ``UserError`` that names place, reason and remedy.
"""

import contextlib
import ctypes
import errno
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

import numpy as np
import tensorstore as ts

from mint_jax.catalog import pack_format
from mint_jax.catalog.pack_format import Name, PackDamaged
from mint_jax.errors import UserError

PART = 8 << 20  # bytes of one request to a bucket
PARALLEL = 4  # requests of one writer that are under way at once
WINDOW = 64  # ranged reads of one caller that are under way at once
Piece = tuple[str, int, int]  # key, begin, end


class PackMissing(UserError):
    """A pack is not where its name says: deleted or never there. Who has an old place resolves the revision again."""


class StorageFailed(UserError):
    """The storage refuses, is full or does not answer."""


class Writer(Protocol):
    """One pack in writing. Leaving it uncommitted removes what it wrote."""

    def write(self, data: memoryview | bytes) -> None: ...
    def commit(self, size: int) -> Name: ...
    def abort(self) -> None: ...


class Storage(Protocol):
    """A folder or a bucket."""

    url: str

    def writer(self, stem: str) -> Writer: ...
    def read(self, pieces: Iterable[Piece]) -> Iterator[np.ndarray]: ...
    def list(self, prefix: str) -> Iterator[str]: ...
    def modified(self, key: str) -> float | None: ...
    def delete(self, key: str) -> None: ...


def open_storage(url: str | Path, timeout: float) -> Storage:
    """A folder's path, ``file://``, ``s3://bucket/path``, ``gs://bucket/path`` or ``memory://name``.

    Raises:
        UserError: a URL of another kind.
    """
    text = os.fspath(url)
    if "://" not in text:
        return Folder(Path(text))
    parts = urlsplit(text)
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost") or not parts.path:
            raise UserError(f"{text} is not the URL of a folder here; write file:///absolute/path")
        return Folder(Path(unquote(parts.path)))
    if parts.scheme not in ("s3", "gs", "memory") or not parts.netloc:
        raise UserError(f"{text} is no place for payloads; write a folder's path, s3://bucket/path, gs://bucket/path or memory://name")
    return Bucket(text, parts.scheme, parts.netloc, parts.path.strip("/"), timeout)


class Folder:
    """Packs in a folder. Made when the first pack is written, so that a folder that may only be read can be opened."""

    def __init__(self, root: Path):
        self.root = root.absolute()
        self.url = str(self.root)
        self._made: set[str] = set()  # folders known to exist durably
        if self.root.exists() and not self.root.is_dir():
            raise UserError(f"{self.root} is not a folder: payloads need one")

    def writer(self, stem: str) -> "_FileWriter":
        return _FileWriter(self, stem)

    def make(self, relative: str) -> Path:
        """A folder below the root, durable."""
        path = self.root / relative
        if relative not in self._made:
            path.mkdir(parents=True, exist_ok=True)
            for parent in [path.parent, *path.parent.parents]:
                _sync(parent)
                if parent == self.root.parent:
                    break
            self._made.add(relative)
        return path

    def read(self, pieces: Iterable[Piece]) -> Iterator[np.ndarray]:
        for key, begin, end in pieces:
            yield self._read(key, begin, end)

    def _read(self, key: str, begin: int, end: int) -> np.ndarray:
        with self.explained("read"):
            try:
                handle = os.open(self.root / key, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                raise PackMissing(f"{key} is not in {self.url}: resolve the revision again, or check the folder") from None
            try:
                if end - begin >= pack_format.MAPPED and begin % pack_format.PAGE == 0:
                    if os.fstat(handle).st_size < end:  # else reading the view would kill the process
                        raise PackDamaged(f"{key} in {self.url} ends before byte {end}: it was cut off")
                    return _map(handle, begin, end - begin)
                data = _aligned(end - begin)
                if os.preadv(handle, [data.data], begin) != data.size:
                    raise PackDamaged(f"{key} in {self.url} ends before byte {end}: it was cut off")
            finally:
                os.close(handle)
        data.flags.writeable = False
        return data

    def list(self, prefix: str) -> Iterator[str]:
        """Keys of files below ``prefix``, a folder or the beginning of a folder's name."""
        folder, _, start = prefix.rpartition("/")
        with self.explained("list"), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            with os.scandir(self.root / folder) as found:
                entries = sorted((e.name, e.is_dir(follow_symlinks=False)) for e in found if e.name.startswith(start))
            for name, is_folder in entries:
                key = f"{folder}/{name}" if folder else name
                if is_folder:
                    yield from self.list(f"{key}/")
                else:
                    yield key

    def modified(self, key: str) -> float | None:
        """When a file was last written, seconds since 1970; None when it is gone."""
        try:
            return (self.root / key).stat().st_mtime
        except FileNotFoundError:
            return None

    def delete(self, key: str) -> None:
        with self.explained("delete"):
            (self.root / key).unlink(missing_ok=True)

    @contextlib.contextmanager
    def explained(self, doing: str) -> Iterator[None]:
        """Turns an ``OSError`` into a ``UserError`` of one line."""
        try:
            yield
        except (FileNotFoundError, NotADirectoryError):
            if doing == "list":
                raise
            raise StorageFailed(f"cannot {doing} payloads in {self.url}: a folder on the way is missing or no folder") from None
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                remedy = "free disk space, run gc, or choose a larger disk"
            elif error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
                remedy = "the folder is read-only for this user; mend its rights or choose another"
            elif error.errno in (errno.EMFILE, errno.ENFILE):
                remedy = "raise the limit of open files (ulimit -n)"
            else:
                remedy = "check the disk"
            raise StorageFailed(f"cannot {doing} payloads in {self.url} ({error.strerror or error}): {remedy}") from None


class _FileWriter:
    """Writes beside the packs, then syncs the file, renames it into place and syncs the folder."""

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
            _sync(place.parent)
        return name

    def abort(self) -> None:
        with contextlib.suppress(OSError):  # what cannot be flushed to a full disk is not wanted any more
            self._file.close()
        with contextlib.suppress(OSError):  # a later sweep will find it
            self._path.unlink(missing_ok=True)


class Bucket:
    """Packs under a prefix of a bucket, or in this process's memory.

    Credentials and endpoint are the machine's: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or any other way the AWS
    tools know), AWS_ENDPOINT_URL, AWS_REGION; for ``gs://`` the Google application default credentials.

    Args:
        timeout: seconds until a request, with all its retries, is given up.
    """

    def __init__(self, url: str, scheme: str, bucket: str, path: str, timeout: float):
        self.url = url.rstrip("/")
        self._timeout = timeout
        self._endpoint = ""
        spec: dict[str, Any] = {"path": f"{path}/" if path else ""}
        if scheme == "memory":
            spec = {"driver": "memory", "path": f"{bucket}/{spec['path']}"}
        elif scheme == "gs":
            spec |= {"driver": "gcs", "bucket": bucket, "context": {"gcs_request_retries": _retries(timeout)}}
        else:
            spec |= {"driver": "s3", "bucket": bucket, "context": {"s3_request_retries": _retries(timeout)}, **self._s3_options()}
        try:
            self._store = ts.KvStore.open(spec, context=_MEMORY if scheme == "memory" else None).result(timeout)
        except (ValueError, TimeoutError) as error:
            raise self._explain(error, "open") from None

    def _s3_options(self) -> dict[str, Any]:
        options: dict[str, Any] = {}
        region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        self._endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
        if self._endpoint:
            options["endpoint"] = self._endpoint.rstrip("/")
            region = region or "us-east-1"  # servers of other makers ignore it, the signature needs one
        if region:
            options["aws_region"] = region
        if os.environ.get("AWS_ACCESS_KEY_ID"):  # else every opening complains on stderr about absent ~/.aws files
            options["aws_credentials"] = {"type": "environment"}
        return options

    def writer(self, stem: str) -> "_BucketWriter":
        return _BucketWriter(self, stem, PART)

    def start(self, key: str, data: bytes | None) -> ts.Future:
        """Starts writing or deleting an object."""
        return self._store.write(key, data)

    def wait(self, future: Any, doing: str) -> Any:
        """A request's result.

        Raises:
            UserError: it failed, or took longer than the timeout.
        """
        try:
            return future.result(timeout=self._timeout)
        except (ValueError, TimeoutError, OSError, KeyError) as error:
            future.cancel()
            raise self._explain(error, doing) from None

    def read(self, pieces: Iterable[Piece]) -> Iterator[np.ndarray]:
        waiting: list[tuple[Piece, Any]] = []
        for piece in pieces:
            key, begin, end = piece
            waiting.append((piece, self._store.read(key, byte_range=slice(begin, end))))
            if len(waiting) == WINDOW:
                yield self._finish(*waiting.pop(0))
        for item in waiting:
            yield self._finish(*item)

    def _finish(self, piece: Piece, future: Any) -> np.ndarray:
        key, begin, end = piece
        found = self.wait(future, f"read {key} of")
        if found.state == "missing":
            raise PackMissing(f"{key} is not in {self.url}: resolve the revision again, or check the bucket's name and path")
        if len(found.value) != end - begin:
            raise PackDamaged(f"{key} in {self.url} gave {len(found.value)} bytes for [{begin}, {end}): it was cut off")
        return np.frombuffer(found.value, np.uint8)

    def list(self, prefix: str) -> Iterator[str]:
        after = prefix[:-1] + chr(ord(prefix[-1]) + 1) if prefix else ""
        keys = self.wait(self._store.list(ts.KvStore.KeyRange(prefix, after)), "list")
        yield from sorted(key.decode(errors="replace") for key in keys)

    def modified(self, key: str) -> float | None:
        """Not known of an object; its name says when its writing began."""
        stem = pack_format.stem_of(key)
        return None if stem is None else pack_format.began_at(stem)

    def delete(self, key: str) -> None:
        self.wait(self.start(key, None), f"delete {key} of")

    def _explain(self, error: Exception, doing: str) -> UserError:
        """The reason in one line and a remedy."""
        text = str(error).split("[http_response_body", 1)[0].split("\n", 1)[0].strip()[:300] or type(error).__name__
        where = f"{self.url}{f' at {self._endpoint}' if self._endpoint else ''}"
        if "OUT_OF_RANGE" in text:
            return PackDamaged(f"cannot {doing} {where}: an object is shorter than its pack's name says ({text})")
        if isinstance(error, TimeoutError):
            text = f"no answer within {self._timeout:g} s"
            remedy = "check that the storage is up and AWS_ENDPOINT_URL right, or raise the timeout"
        elif "NoSuchBucket" in text or "bucket does not exist" in text:
            remedy = "create the bucket, or correct the URL"
        elif any(
            sign in text for sign in ("PERMISSION_DENIED", "UNAUTHENTICATED", "AccessDenied", "InvalidAccessKeyId", "SignatureDoesNot")
        ):
            remedy = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (gs: GOOGLE_APPLICATION_CREDENTIALS) to credentials with rights on it"
        elif "CURL" in text:
            remedy = "check the network and AWS_ENDPOINT_URL"
        else:
            remedy = "check the URL and the storage's log"
        return StorageFailed(f"cannot {doing} {where} ({text}): {remedy}")


class _BucketWriter:
    """Writes equal parts as they fill up, and last the object that the pack is named by: that commits it.

    Holds at most ``PARALLEL`` parts and the one that is filling up.
    """

    def __init__(self, bucket: Bucket, stem: str, part: int):
        self._bucket = bucket
        self._stem = stem
        self._part = part
        self._filling = bytearray()
        self._parts = 0
        self._under_way: list[Any] = []

    def write(self, data: memoryview | bytes) -> None:
        view = memoryview(data)
        while len(self._filling) + len(view) > self._part:  # the last part is never empty
            taken = self._part - len(self._filling)
            self._filling += view[:taken]
            view = view[taken:]
            if len(self._under_way) == PARALLEL:
                self._bucket.wait(self._under_way.pop(0), "write to")
            self._under_way.append(self._bucket.start(pack_format.part_key(self._stem, self._parts), bytes(self._filling)))
            self._parts += 1
            self._filling.clear()
        self._filling += view

    def commit(self, size: int) -> Name:
        name = Name(self._stem, size, self._part if self._parts else 0)
        while self._under_way:
            self._bucket.wait(self._under_way.pop(0), "write to")
        self._bucket.wait(self._bucket.start(name.key, bytes(self._filling)), "write to")
        return name

    def abort(self) -> None:
        for future in self._under_way:
            with contextlib.suppress(UserError):  # it has failed before; a later sweep will find what cannot be removed
                self._bucket.wait(future, "write to")
        for i in range(self._parts):
            with contextlib.suppress(UserError):
                self._bucket.delete(pack_format.part_key(self._stem, i))


_REFUSALS = ("PERMISSION_DENIED", "UNAUTHENTICATED", "AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch")
_MEMORY = ts.Context()  # memory://name is the same everywhere in this process


def _retries(timeout: float) -> dict[str, Any]:
    """So many retries that their pauses (0.1 s doubling to 2 s, and as much again at random) fit in the timeout."""
    return {"max_retries": max(2, 4 + math.floor((timeout - 6) / 3)), "initial_delay": "100ms", "max_delay": "2s"}


def _sync(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _aligned(size: int) -> np.ndarray:
    """Uninitialised bytes that begin at a multiple of 64, as XLA wants them."""
    data = np.empty(size + 64, np.uint8)
    start = -data.ctypes.data % 64
    return data[start : start + size]


_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value


class _Mapping:
    """A read-only memory map without an open file: Python's own keeps one per map, and a cache may hold thousands."""

    def __init__(self, handle: int, offset: int, length: int):
        self._length = length
        self._address = _LIBC.mmap(None, length, 1, 1, handle, offset)  # PROT_READ, MAP_SHARED
        if self._address == _FAILED:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (length,), "data": (self._address, True)}

    def __del__(self):
        if self._address != _FAILED:
            _LIBC.munmap(self._address, self._length)


def _map(handle: int, offset: int, length: int) -> np.ndarray:
    return np.asarray(_Mapping(handle, offset, length))
