"""A pack: one immutable object that holds packed objects back to back and a trailer that says where
each lies.

::

    object, pad, object, pad, ..., object, pad | entry, entry, ... | footer
                                               ^ body              ^ 48 bytes each   ^ 96 bytes, the
                                               last of the pack

An object begins at a multiple of 64 bytes, one of 1 MiB and more at a multiple of 4096, so that it
can be mapped alone. An entry is digest, offset and length of one object. The footer holds the
BLAKE3 hash of all entries and of itself: who has a pack and no database knows what is in it, and a
damaged trailer is noticed. Damage between the objects hits nothing.

The name of a pack, ``<32 hex>-<bytes>`` or ``<32 hex>-<bytes>-<part bytes>``, says when its writing
began (the first 12 digits: milliseconds since 1970 by the writer's clock), how long it is, and
whether its bytes lie in one object or in parts: stores without appending, such as S3, get a long
pack as equal parts of which the last, written last, is the one that the pack is named by. A listing
is enough to know all that.
"""

import re
import secrets
import struct
import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from mint_jax.digest import blake3_of
from mint_jax.errors import UserError

ALIGNMENT = 64
MAPPED = 1 << 20  # bytes from which an object is aligned to pages
PAGE = 4096
MAX_PARTS = 1_000_000  # 8 TB
MAGIC = b"mint-pack/2\n\0\0\0\0"
ENTRY = np.dtype([("digest", "V32"), ("offset", "<u8"), ("length", "<u8")])
FOOTER = struct.Struct("<16sQQQ24x32s")  # magic, entries, bytes before them, bytes in all, checksum
_STEM = re.compile(r"[0-9a-f]{32}")
_NAME = re.compile(r"([0-9a-f]{32})-([1-9][0-9]{0,14})(?:-([1-9][0-9]{0,11}))?")


class Place(NamedTuple):
    """Where an object lies: bytes ``[offset, offset + length)`` of a pack."""

    pack: str
    offset: int
    length: int


class PackDamaged(UserError):
    """Bytes of a pack are not there or not what was written."""


class Name(NamedTuple):
    """A pack's name, taken apart.

    Attributes:
        stem: what its parts are called by; random, the time first.
        size: bytes of the whole pack.
        part: bytes of every part but the last; 0 for a pack in one object.
    """

    stem: str
    size: int
    part: int

    def __str__(self) -> str:
        return f"{self.stem}-{self.size}" + (f"-{self.part}" if self.part else "")

    @classmethod
    def parse(cls, text: str) -> "Name":
        """Raises ``UserError`` for what is no pack's name; a name that parses is harmless as a file
        name.
        """
        found = _NAME.fullmatch(text)
        if found is None:
            raise UserError(f"{ascii(text)[:100]} is not the name of a pack")
        name = cls(found[1], int(found[2]), int(found[3] or 0))
        if name.part and name.size // name.part > MAX_PARTS:
            raise UserError(
                f"{text!a} is not the name of a pack: nothing has more than {MAX_PARTS} parts"
            )
        return name

    @property
    def key(self) -> str:
        """Of the object that the pack is named by."""
        return f"packs/{shard(self.stem)}/{self}.pack"

    @property
    def parts(self) -> list[str]:
        """Keys of the parts before the last."""
        return (
            [part_key(self.stem, i) for i in range((self.size - 1) // self.part)]
            if self.part
            else []
        )

    def pieces(self, begin: int, end: int) -> Iterator[tuple[str, int, int]]:
        """The objects and their bytes ``(key, begin, end)`` that make up bytes ``[begin, end)`` of
        the pack, in order.
        """
        last = (self.size - 1) // self.part if self.part else 0
        while begin < end:
            i = begin // self.part if self.part else 0
            start, stop = (
                (i * self.part, (i + 1) * self.part) if i < last else (last * self.part, self.size)
            )
            yield (
                part_key(self.stem, i) if i < last else self.key,
                begin - start,
                min(end, stop) - start,
            )
            begin = stop


def new_stem() -> str:
    """The time in milliseconds and 80 random bits, in 32 hex digits."""
    return f"{int(time.time() * 1000):012x}{secrets.token_hex(10)}"


def began_at(stem: str) -> float:
    """Seconds since 1970 when the writing began, by the writer's clock."""
    return int(stem[:12], 16) / 1000


def shard(stem: str) -> str:
    """One of 16 folders."""
    return stem[-1]


def part_key(stem: str, index: int) -> str:
    return f"parts/{shard(stem)}/{stem}/{index:06d}"


def stem_of(key: str) -> str | None:
    """The stem in the key of a pack, a part or a file in writing; None for anything else."""
    tail = key.rsplit("/", 1)[-1].removesuffix(".pack")
    for text in (tail.split("-")[0], key.split("/")[-2] if key.startswith("parts/") else ""):
        if _STEM.fullmatch(text):
            return text
    return None


def padding(position: int, length: int) -> int:
    """Bytes to leave free at ``position`` before an object of ``length`` bytes."""
    return -position % (PAGE if length >= MAPPED else ALIGNMENT)


def trailer(entries: list[tuple[bytes, int, int]], body: int) -> bytes:
    """Entries and footer.

    Args:
        entries: digest, offset and length of each object, in the order of their offsets.
        body: how many bytes lie before the trailer.
    """
    if any(len(digest) != 32 for digest, _, _ in entries):
        raise ValueError("a digest is 32 bytes, 64 hex digits")
    table = np.array(entries, ENTRY).tobytes()
    total = body + len(table) + FOOTER.size
    head = FOOTER.pack(MAGIC, len(entries), body, total, b"")[:-32]
    return table + head + bytes.fromhex(blake3_of(table + head))


def table_size(footer: bytes, name: Name) -> int:
    """Checks a footer against its pack's name; returns how many bytes of entries lie before it.

    Raises:
        PackDamaged: it is none, or of another pack.
    """
    magic, count, body, total, _ = FOOTER.unpack(footer)
    if magic != MAGIC:
        raise PackDamaged(
            f"pack {name} has no trailer: it is damaged, or not a pack of this version"
        )
    if total != name.size or body + count * ENTRY.itemsize + FOOTER.size != total:
        raise PackDamaged(
            f"the trailer of pack {name} is damaged: it records {count} objects in {total} bytes"
        )
    return count * ENTRY.itemsize


def read_trailer(data: bytes, name: Name) -> list[tuple[str, Place]]:
    """Digest and place of each object, from entries and footer.

    Raises:
        PackDamaged: any of its bits is not as written.
    """
    if blake3_of(data[:-32]) != data[-32:].hex():
        raise PackDamaged(f"the trailer of pack {name} is damaged: its checksum is wrong")
    body = name.size - len(data)
    table = np.frombuffer(data[: -FOOTER.size], ENTRY)
    found, end = [], 0
    for digest, offset, length in table.tolist():
        if offset < end or offset + length > body:
            raise PackDamaged(
                f"the trailer of pack {name} is wrong: it places an object at bytes {offset} to"
                f" {offset + length}"
            )
        end = offset + length
        found.append((bytes(digest).hex(), Place(str(name), offset, length)))
    return found
