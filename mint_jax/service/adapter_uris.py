"""Adapters that a request names by URI, without a load before it:

    file:/folder                           a PEFT folder of this machine
    s3://bucket/path, gs://bucket/path     one in a bucket, with credentials of the environment
    hf:org/name                            one on the hub, which is asked once

Changed files are read again. With ``#sha256=HEX`` the weights must have that hash; those of a
bucket are then read once.
"""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mint_jax.catalog.cli.sources import CONFIG, WEIGHTS, Source
from mint_jax.catalog.packed import digest_of
from mint_jax.catalog.storage.payloads import bucket_at
from mint_jax.errors import UserError
from mint_jax.files import write_file
from mint_jax.lora.peft import is_peft
from mint_jax.models.base import download

MAX_BYTES = 4 << 30  # of an adapter's weights
MAX_REMEMBERED = 1024
TIMEOUT_S = 30.0  # of a request to a bucket
_BUCKETS = ("s3://", "gs://")


class _Files:
    """An adapter in a folder."""

    def __init__(self, source: Source):
        self.source = source

    def stamp(self) -> tuple[Any, ...]:
        """Returns what changes with the files."""
        states = [self.source.file(name, MAX_BYTES).stat() for name in (CONFIG, WEIGHTS)]
        return tuple((one.st_ino, one.st_size, one.st_mtime_ns) for one in states)


class _Objects(_Files):
    """An adapter in a bucket, copied into a folder that goes with it."""

    def __init__(self, url: str, scratch: Path):
        scratch.mkdir(parents=True, exist_ok=True)
        self._copy = tempfile.TemporaryDirectory(dir=scratch)
        folder = Path(self._copy.name)
        super().__init__(Source(folder, True, folder.resolve()))
        self._url, self._bucket = url, bucket_at(url, TIMEOUT_S)
        self._generations: dict[str, bytes] = {}

    def stamp(self) -> tuple[Any, ...]:
        """Copies objects that changed. Returns what changes with them."""
        for name in (CONFIG, WEIGHTS):
            data, generation = self._bucket.changed(name, self._generations.get(name))
            if generation is None:
                raise UserError(f"{self._url[:200]!r} is not a PEFT adapter: it has no {name}")
            if data is not None:
                # atomic: another thread may be reading the file of before
                write_file(self.source.path / name, data)
                self._generations[name] = generation
        return tuple(self._generations.values())


class _Found(NamedTuple):
    """The adapter of a URI: its files, their state when they were read, and their revision."""

    files: _Files
    stamp: tuple[Any, ...]
    digest: str


class AdapterUris:
    """URIs of one server; may be called from any thread.

    Args:
        places: beginnings of URIs that may be named: ``file:/folder``, ``s3://bucket``, ``hf:org``.
        scratch: folder for copies of a bucket's files, which is emptied.
    """

    def __init__(self, places: Sequence[str] = (), scratch: Path | None = None):
        self._places, self._scratch = tuple(place.rstrip("/") for place in places), scratch
        self._found: dict[str, _Found] = {}
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)

    def digest(self, uri: str, packed: Callable[[Source], bytes]) -> str:
        """Returns the digest of a URI's adapter as ``packed`` reads it. Raises ``UserError``: it is
        outside the server's places, no adapter, or not that of its hash.
        """
        place, _, claim = uri.partition("#")
        found = self._found.get(uri)
        if found is not None and claim and isinstance(found.files, _Objects):
            return found.digest
        try:
            files = self._files(place) if found is None else found.files
            stamp = files.stamp()
            if found is None or found.stamp != stamp:
                if claim:
                    with open(files.source.file(WEIGHTS, MAX_BYTES), "rb") as file:
                        own = "sha256=" + hashlib.file_digest(file, "sha256").hexdigest()
                    if claim != own:
                        raise UserError(f"the URI says {claim[:80]!r}, and {WEIGHTS} has {own}")
                found = _Found(files, stamp, digest_of(packed(files.source)))
                if stamp != files.stamp():
                    raise UserError(f"{place!r} changed while it was read: retry")
                self._found[uri] = found
                while len(self._found) > MAX_REMEMBERED:
                    self._found.pop(next(iter(self._found)), None)
        except OSError as error:
            raise UserError(
                f"{place[:200]!r} cannot be read ({error.strerror or error}): check the folder"
            ) from None
        return found.digest

    def sources(self, digest: str) -> Iterator[Source]:
        """Yields files from which an adapter of this digest was read."""
        for found in self._found.copy().values():
            if found.digest == digest:
                yield found.files.source

    def _files(self, place: str) -> _Files:
        """Returns the files of a URI without its hash. Raises ``UserError``."""
        ours = self._places
        root = next((one for one in ours if place == one or place.startswith(one + "/")), None)
        if root is None or "\0" in place:
            raise UserError(
                f"{place[:200]!r} is outside this server's places for adapters, which its setting"
                f" adapter_uris names: {', '.join(ours) or 'none'}"
            )
        if place.startswith(_BUCKETS):
            assert self._scratch is not None
            if ".." in place.split("/"):  # of a bucket's names, but never of an adapter's
                raise UserError(f"{place[:200]!r} is not a PEFT adapter: give a folder without ..")
            return _Objects(place, self._scratch)
        if place.startswith("hf:"):
            what = f"{place[:200]!r} is not cached"
            folder = download(place.removeprefix("hf:"), what, [CONFIG, WEIGHTS])
            inside = folder.parents[1]  # its files are links to the cache's blobs
        else:
            paths = (one.removeprefix("file:") for one in (place, root))
            folder, inside = (Path(os.path.realpath(path)) for path in paths)
        if not folder.is_relative_to(inside) or not is_peft(folder):
            raise UserError(f"{place[:200]!r} is not a PEFT adapter: give a folder with {CONFIG}")
        return _Files(Source(folder, True, inside))
