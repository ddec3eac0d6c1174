"""Bounds of requests' bodies: decompression, the depth of JSON, and the memory of parsed values.

A list in JSON has two characters and takes 64 bytes in Python; an empty protobuf message has two
bytes and takes 40. A limit of a body's bytes therefore bounds its memory only within a factor of
thirty. The constants are sizes of CPython 3.11's objects and of upb's messages. Estimates are upper
bounds; ``tests/service/bodies_test.py`` measures by how much.
"""

import io
import itertools
import re
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import zstandard

from mint_jax.errors import UserError
from mint_jax.service.wire import messages

DEPTH = 64  # of lists and objects in JSON; no request needs more than ten
WINDOW_BYTES = 8 << 20  # maximum of zstd in HTTP by RFC 9659
FRAMES = 1000  # in a body; a decompressor costs more memory than an empty frame has bytes
# compressed bytes at a time: a block of four gives 128 KiB, so that these give 8 MiB at most
SLICES = {"zstd": 256, "gzip": 8 << 10}
VALUES = 1 << 22  # of JSON in a body: eight times what Tinker's SDKs put into one
FIELDS = 1 << 20  # of protobuf: 25 times that
# bytes in memory; a number is also read into an array or a tuple
SIZES = {b"{": 200, b"[": 100, b",": 96, b":": 48, b'"': 32}
FIELD_BYTES = 128
NO_MESSAGE = "the body is no ForwardBackwardRequest"

# A string, whole or truncated. Possessive quantifiers never backtrack: time is linear in the body.
_STRINGS = re.compile(rb'"[^"\\]*+(?:\\.?[^"\\]*+)*+(?:"|\Z)', re.DOTALL)
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_DEPTHS = [1 if byte in b"[{" else -1 for byte in range(256)]


class TooLarge(UserError):
    """A body has too many bytes or values."""


class UnknownCoding(UserError):
    """The coding of a body is unknown."""


def decompress(
    body: bytes, coding: str, limit: int, hold: Callable[[int], None] = lambda count: None
) -> bytes:
    """Decompresses one or several frames of ``zstd`` or ``gzip`` in steps, with at most ``limit``
    and 16 MiB more in memory, whatever sizes the frames claim.

    Args:
        limit: maximum number of decompressed bytes; for more it raises ``TooLarge``.
        hold: called with the number of bytes of each step; may raise.
    """
    if coding not in SLICES:
        raise UnknownCoding(f"Content-Encoding is {coding!r}; send zstd, gzip, or plain bytes")
    options, gzipped = zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES), coding == "gzip"
    whole, length, frames = io.BytesIO(), 0, 0  # a joined list of parts would be a copy
    frame: Any = None
    try:
        for begin in range(0, len(body), SLICES[coding]):
            piece = body[begin : begin + SLICES[coding]]
            while piece:
                if frame is None or frame.eof:
                    frame = zlib.decompressobj(wbits=31) if gzipped else options.decompressobj()
                    frames += 1
                    if frames > FRAMES:
                        raise UserError(f"the body has more than {FRAMES} frames: compress it once")
                part = frame.decompress(piece, *([limit - length + 1] if gzipped else []))
                length += len(part)
                if length > limit:
                    raise TooLarge(f"the body decompresses to more than {limit} bytes: split it")
                hold(len(part))
                whole.write(part)
                piece = frame.unused_data if frame.eof else b""
    except (zlib.error, zstandard.ZstdError) as error:
        raise UserError(f"the body is not whole {coding} ({error}): compress it again") from error
    if frame is None or not frame.eof:
        raise UserError(f"the body ends within a frame of {coding}: send all of it")
    return whole.getvalue()


def depth_of(data: bytes) -> int:
    """Returns how deeply lists and objects of a JSON text nest, without parsing it."""
    # `sub` would take 177 bytes a string
    brackets = b"".join(_STRINGS.split(data)).translate(None, _NO_BRACKETS)
    return max(itertools.accumulate(map(_DEPTHS.__getitem__, brackets)), default=0)


def is_protobuf(content_type: str) -> bool:
    """Returns whether a body of this type is protobuf."""
    kind = content_type.partition(";")[0].strip().lower()
    return kind in ("application/x-protobuf", "application/protobuf")


def json_memory(body: bytes) -> int:
    """Returns bytes that the parsed JSON takes, in addition to the body's own. Counts brackets and
    commas in strings too. Raises ``TooLarge`` if it may have more than ``VALUES`` values.
    """
    counts = {mark: body.count(mark) for mark in SIZES}
    values = counts[b"{"] + counts[b"["] + counts[b","]
    if max(values, counts[b'"'] // 4) > VALUES:
        raise TooLarge(f"the JSON has more than {VALUES} values: send fewer, or protobuf")
    # Text of one character beyond ASCII may take four bytes for each of its characters, in the
    # decoded body and in the string.
    copies = 3 if body.isascii() and b"\\u" not in body else 9
    return copies * len(body) + sum(SIZES[mark] * count for mark, count in counts.items())


def protobuf_memory(body: bytes) -> int:
    """Returns bytes of the parsed ``ForwardBackwardRequest`` and its arrays, in addition to the
    body's own. Raises ``TooLarge`` for more than ``FIELDS`` fields and numbers, ``UserError`` for
    bytes that are no such message.
    """
    try:
        return 4 * len(body) + FIELD_BYTES * _fields(body, 0, len(body), _INNER, 0)
    except IndexError:
        reason = "it ends within a field, or has one of an unknown wire type"
        raise UserError(f"{NO_MESSAGE} ({reason}): send the message whole") from None


def _inner(descriptor: Any) -> Mapping[int, Any]:
    """Returns the fields of a message that hold messages or many numbers: number -> the same table
    of the held message, None for numbers.
    """
    return {
        field.number: _inner(field.message_type) if field.message_type else None
        for field in descriptor.fields
        if field.message_type or field.is_repeated
    }


_INNER = _inner(messages.ForwardBackwardRequest.DESCRIPTOR)


def _fields(body: bytes, at: int, end: int, inner: Mapping[int, Any], count: int) -> int:
    """Returns ``count`` and the number of fields and numbers in a part of a body. Raises
    ``IndexError`` if they do not end where the part does.
    """
    while at < end:
        count += 1
        key, at = _varint(body, at)
        form = key & 7
        if form == 2:
            size, at = _varint(body, at)
            table = inner.get(key >> 3, b"")
            if table is None:
                count += size  # each byte may be a number
            elif table and at + size <= end:
                count = _fields(body, at, at + size, table, count)
            at += size
        elif form == 0:
            _, at = _varint(body, at)
        else:
            at += {1: 8, 5: 4}.get(form, end)
        if at > end:
            raise IndexError
        if count > FIELDS:
            raise TooLarge(f"the message has more than {FIELDS} fields: send fewer data")
    return count


def _varint(body: bytes, at: int) -> tuple[int, int]:
    """Returns the number that begins at ``at``, and where it ends."""
    value = 0
    for i in range(10):
        part = body[at + i]
        value |= (part & 127) << 7 * i
        if part < 128:
            return value, at + i + 1
    raise IndexError  # no number has more than ten bytes
