"""The interface of a place for packs, and its errors; ``folder`` and ``bucket`` implement it."""

from collections.abc import Iterable, Iterator
from typing import Protocol

import numpy as np

from mint_jax.catalog.storage.pack_format import Name
from mint_jax.errors import UserError

Piece = tuple[str, int, int]  # bytes [begin, end) of the object with a key


class PackMissing(UserError):
    """A pack was deleted or never existed; resolve the revision again."""


class StorageFailed(UserError):
    """The storage is full, refuses a request or does not answer."""


class Writer(Protocol):
    """Writes one pack; ``abort`` removes an uncommitted one."""

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
