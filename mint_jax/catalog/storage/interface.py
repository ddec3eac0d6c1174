"""What a place for packs offers, and how it fails. ``folder`` and ``bucket`` are the two kinds."""

from collections.abc import Iterable, Iterator
from typing import Protocol

import numpy as np

from mint_jax.catalog.storage.pack_format import Name
from mint_jax.errors import UserError

Piece = tuple[str, int, int]  # bytes [begin, end) of the object with a key


class PackMissing(UserError):
    """A pack is not where its name says: deleted or never there. Who has an old place resolves the
    revision again.
    """


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
    def has(self, key: str) -> bool: ...
    def modified(self, key: str) -> float | None: ...
    def delete(self, key: str) -> None: ...
