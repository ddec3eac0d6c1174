"""Bodies of requests: decompressed within bounds of bytes, and the depth of their JSON."""

import io
import itertools
import re
import zlib
from collections.abc import Callable
from typing import Any

import zstandard

from mint_jax.errors import UserError

DEPTH = 64  # of lists and objects in JSON; no request needs more than ten
WINDOW_BYTES = 8 << 20  # maximum of zstd in HTTP by RFC 9659
FRAMES = 1000  # in a body; a decompressor costs more memory than an empty frame has bytes
# compressed bytes at a time: a block of four gives 128 KiB, so that these give 8 MiB at most
_ZSTD_SLICE = 256
_GZIP_SLICE = 8 << 10  # gives 8 MiB too

# A string, whole or truncated. Possessive quantifiers never backtrack: time is linear in the body.
_STRINGS = re.compile(rb'"[^"\\]*+(?:\\.?[^"\\]*+)*+(?:"|\Z)', re.DOTALL)
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_DEPTHS = [1 if byte in b"[{" else -1 for byte in range(256)]


class TooLarge(UserError):
    """A body has too many bytes."""


class UnknownCoding(UserError):
    """The coding of a body is unknown."""


def decompress(
    body: bytes, coding: str, limit: int, hold: Callable[[int], None] = lambda count: None
) -> bytes:
    """Decompresses one or several frames in steps, with at most ``limit`` and 16 MiB more in
    memory, whatever sizes the frames claim.

    Args:
        coding: ``zstd`` or ``gzip``.
        limit: maximum number of decompressed bytes.
        hold: called with the number of bytes of each step; may raise.

    Raises:
        TooLarge: it has more bytes.
        UnknownCoding: another coding.
        UserError: it is broken or cut off.
    """
    if coding not in ("zstd", "gzip"):
        raise UnknownCoding(
            f"Content-Encoding is {coding!r}; send the body as zstd, gzip, or uncompressed"
        )
    options = zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES)
    gzipped = coding == "gzip"
    size = _GZIP_SLICE if gzipped else _ZSTD_SLICE
    whole, length, frames = io.BytesIO(), 0, 0  # a joined list of parts would be a copy
    frame: Any = None
    try:
        for begin in range(0, len(body), size):
            piece = body[begin : begin + size]
            while piece:
                if frame is None or frame.eof:
                    frame = zlib.decompressobj(wbits=31) if gzipped else options.decompressobj()
                    frames += 1
                    if frames > FRAMES:
                        raise UserError(
                            f"the body has more than {FRAMES} frames of {coding}: compress it once"
                        )
                part = frame.decompress(piece, *([limit - length + 1] if gzipped else []))
                length += len(part)
                if length > limit:
                    raise TooLarge(
                        f"the body has more than {limit} bytes when decompressed: send fewer data"
                        " in a request"
                    )
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
