"""A pack: one immutable object that holds packed objects back to back.
An object starts at a multiple of 64 bytes, one of 1 MiB or more at a multiple of 4096.

A pack's name, ``<32 hex>-<bytes>`` or ``<32 hex>-<bytes>-<part bytes>``, records when its writing
started (12 digits: milliseconds since 1970 by the writer's clock) and its length. Stores without
appending, such as S3, get a long pack as equal parts; the last one has the pack's name.
"""

import re
import secrets
import time
from collections.abc import Iterator
from typing import NamedTuple

from mint_jax.errors import UserError

ALIGNMENT = 64
MAPPED = 1 << 20  # bytes from which an object is aligned to pages
PAGE = 4096
MAX_PARTS = 1_000_000  # 8 TB
_STEM = re.compile(r"/([0-9a-f]{32})(?![0-9a-z])")
_NAME = re.compile(r"([0-9a-f]{32})-([1-9][0-9]{0,14})(?:-([1-9][0-9]{0,11}))?")


class Place(NamedTuple):
    """The place of an object: bytes ``[offset, offset + length)`` of a pack."""

    pack: str
    offset: int
    length: int


class PackDamaged(UserError):
    """Bytes of a pack are missing or changed."""


class Name(NamedTuple):
    """A parsed pack name."""

    stem: str  # start of its parts' names; random after the time
    size: int  # bytes of the whole pack
    part: int  # bytes of every part but the last; 0 for a pack in one object

    def __str__(self) -> str:
        return f"{self.stem}-{self.size}" + (f"-{self.part}" if self.part else "")

    @classmethod
    def parse(cls, text: str) -> "Name":
        """Parses a name; the result is safe as a file name. Raises ``UserError`` for other text."""
        found = _NAME.fullmatch(text)
        if found is None:
            raise UserError(f"{ascii(text)[:100]} is not the name of a pack")
        name = cls(found[1], int(found[2]), int(found[3] or 0))
        if name.part and name.size // name.part > MAX_PARTS:
            raise UserError(f"{text!a} is not the name of a pack: it has over {MAX_PARTS} parts")
        return name

    @property
    def key(self) -> str:
        """Key of the object with the pack's name."""
        return f"packs/{self.stem[-1]}/{self}.pack"

    @property
    def parts(self) -> list[str]:
        """Keys of the parts before the last."""
        count = (self.size - 1) // self.part if self.part else 0
        return [part_key(self.stem, i) for i in range(count)]

    def pieces(self, begin: int, end: int) -> Iterator["Piece"]:
        """Yields the pieces of objects that hold bytes ``[begin, end)`` of the pack."""
        part = self.part or self.size
        while begin < end:
            i = begin // part
            stop = min(end, (i + 1) * part)
            key = self.key if i == (self.size - 1) // part else part_key(self.stem, i)
            yield key, begin - i * part, stop - i * part
            begin = stop


Piece = tuple[str, int, int]  # bytes [begin, end) of the object with a key


class PackMissing(UserError):
    """A pack was deleted or never existed; resolve the revision again."""


class StorageFailed(UserError):
    """The storage is full, refuses a request or does not answer."""


def new_stem() -> str:
    """Returns the time in milliseconds and 80 random bits, in 32 hex digits."""
    return f"{int(time.time() * 1000):012x}{secrets.token_hex(10)}"


def started_at(stem: str) -> float:
    """Returns when the writing started, in seconds since 1970 by the writer's clock."""
    return int(stem[:12], 16) / 1000


def part_key(stem: str, index: int) -> str:
    """Returns the key of a part."""
    return f"parts/{stem[-1]}/{stem}/{index:06d}"


def stem_of(key: str) -> str | None:
    """Returns the stem in the key of a pack, a part or a staged file; None for other keys."""
    found = _STEM.search(key)
    return found and found[1]


def padding(position: int, length: int) -> int:
    """Returns the bytes to skip at ``position`` before an object of ``length`` bytes."""
    return -position % (PAGE if length >= MAPPED else ALIGNMENT)
